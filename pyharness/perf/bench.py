"""The clock and the cache of a ggml backend: one run of a graph timed, the last-level cache flushed between runs."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from ..base import cuda, errors
from ..device.ggml import Device, Library

Sample = tuple[int | None, int | None]
"""Host and device nanoseconds of one run; None where the device has no clock of its own, or the host's says nothing."""


class Bench:
    """A backend's clock and cache: times graphs, flushes the last-level cache."""

    def __init__(self, library: Library, device: Device, backend: Any) -> None:
        self._c, self._backend = library.c, backend
        index = cuda.ordinal(device.name)
        self._watch = cuda.Stopwatch(library.ffi, library.c, backend, index) if index is not None else None
        size = 2 * (cuda.l2_bytes(index) if index is not None else last_level_cache())
        self._buffer = library.c.ggml_backend_alloc_buffer(backend, size)
        if not self._buffer:
            raise errors.Environment(f"{device.name}: no {size / 2**20:.0f} MiB to flush the cache with")
        self._value = 0

    def time(self, graph: Any) -> tuple[int, int | None]:
        """Compute a graph once."""
        start = time.perf_counter_ns()
        if self._watch is None:
            status = self._c.ggml_backend_graph_compute(self._backend, graph)
            end, device = time.perf_counter_ns(), None
        else:
            self._watch.start()
            status = self._c.ggml_backend_graph_compute_async(self._backend, graph)
            device = self._watch.stop()
            end = time.perf_counter_ns()
        if status != self._c.GGML_STATUS_SUCCESS:
            raise errors.Environment(f"graph compute failed with status {status}")
        return end - start, device

    def flush(self) -> None:
        """Push everything out of the last-level cache by writing twice its size."""
        self._value ^= 1
        self._c.ggml_backend_buffer_clear(self._buffer, self._value)
        self._c.ggml_backend_synchronize(self._backend)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._watch is not None:
            self._watch.close()
        self._c.ggml_backend_buffer_free(self._buffer)


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB where the system does not say."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    found = [re.fullmatch(r"(\d+)([KMG]?)", size) for size in sizes]
    return max((int(m[1]) * units.get(m[2], 1) for m in found if m), default=32 * 2**20)
