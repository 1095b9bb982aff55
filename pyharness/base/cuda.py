"""The few calls of the CUDA driver that timing needs, through ctypes: no toolkit, no allocation, no link.

A ggml CUDA backend runs on a stream of its own that no public function hands out, and its events are made without
timing. But `ggml_backend_event_record` records whatever CUDA event a `struct ggml_backend_event` holds on that very
stream, and runtime and driver events are the same objects. So an event made here with timing, put into that struct of
two pointers (device, event), is recorded exactly before and after a graph.
"""

from __future__ import annotations

import ctypes
import re
import sys
from typing import Any

from . import errors

KERNEL_PATH = "GGML_CUDA_FATTN_BACK_PATH"
"""The environment variable that holds the CUDA backend to one kernel path."""
PATHS = ("hopper", "mma", "rows")
DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_L2_CACHE_SIZE = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
_driver: ctypes.CDLL | None = None


def _call(name: str, *arguments: Any) -> None:
    """Call a driver function; an error is a Failure that says which and why."""
    global _driver
    if _driver is None:
        try:
            _driver = ctypes.CDLL(DRIVER)
        except OSError as e:
            raise errors.Environment(f"no CUDA driver: {DRIVER} cannot be loaded", hint="run on the CPU: -b CPU") from e
        try:
            _call("cuInit", 0)
        except errors.Environment:
            _driver = None
            raise
    status = getattr(_driver, name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _driver.cuGetErrorString(status, ctypes.byref(text))
        raise errors.Environment(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def ordinal(device: str) -> int | None:
    """The CUDA ordinal of a ggml device name ("CUDA1" -> 1), None for any other device."""
    found = re.fullmatch(r"CUDA(\d+)", device)
    return int(found[1]) if found else None


def require(device: str) -> None:
    """Raise errors.Environment unless the driver lists the CUDA device of a ggml name; other names pass."""
    index = ordinal(device)
    if index is None:
        return
    count = ctypes.c_int()
    try:
        _call("cuDeviceGetCount", ctypes.byref(count))
        why = f"the driver lists {count.value} devices"
    except errors.Environment as error:
        why = str(error)
    if index >= count.value:
        hint = "this needs an NVIDIA GPU and its driver (nvidia-smi -L); oracle and train --device cpu run without"
        raise errors.Environment(f"no {device}: {why}", hint)


def _handle(index: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), index)
    return handle


def pci_bus_id(index: int) -> str:
    """ "0000:65:00.0" of a CUDA ordinal, by which NVML finds the same GPU whatever CUDA_VISIBLE_DEVICES says."""
    text = ctypes.create_string_buffer(64)
    _call("cuDeviceGetPCIBusId", text, len(text), _handle(index))
    return text.value.decode()


def l2_bytes(index: int) -> int:
    """Size of the L2 cache in bytes."""
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), _L2_CACHE_SIZE, _handle(index))
    return value.value


class Stopwatch:
    """Device time between two points of a ggml CUDA backend's stream.

    Usage: `start()`, `ggml_backend_graph_compute_async`, `stop()` -> nanoseconds (waits for the graph).
    """

    def __init__(self, ffi: Any, c: Any, backend: Any, index: int) -> None:
        self._c, self._backend = c, backend
        context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _handle(index))  # the context of ggml's runtime
        _call("cuCtxSetCurrent", context)
        device = c.ggml_backend_get_device(backend)
        probe = c.ggml_backend_event_new(device)
        if probe == ffi.NULL:
            raise errors.Environment("this CUDA backend has no events (built with GGML_CUDA_NO_PEER_COPY)")
        layout_known = ffi.cast("void **", probe)[0] == ffi.cast("void *", device)
        c.ggml_backend_event_free(probe)
        if not layout_known:
            raise errors.Environment(
                "struct ggml_backend_event is not (device, event) in this ggml: no device-side timing"
            )
        self._events = [ctypes.c_void_p(), ctypes.c_void_p()]
        self._structs = []
        for event in self._events:
            _call("cuEventCreate", ctypes.byref(event), 0)
            pair = ffi.new("void *[2]", [ffi.cast("void *", device), ffi.cast("void *", event.value)])
            self._structs.append((pair, ffi.cast("ggml_backend_event_t", pair)))

    def start(self) -> None:
        """Record the first event on the backend's stream."""
        self._c.ggml_backend_event_record(self._structs[0][1], self._backend)

    def stop(self) -> int:
        """Record the second event, wait for it, return the nanoseconds between the two (resolution about 500 ns)."""
        self._c.ggml_backend_event_record(self._structs[1][1], self._backend)
        _call("cuEventSynchronize", self._events[1])
        milliseconds = ctypes.c_float()
        _call("cuEventElapsedTime", ctypes.byref(milliseconds), *self._events)
        return round(milliseconds.value * 1e6)

    def close(self) -> None:
        """Give the two events back."""
        for event in self._events:
            _call("cuEventDestroy_v2", event)
        self._events = []
