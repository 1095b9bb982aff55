"""The built ggml, bound through cffi in API mode: devices, and runs of one FLASH_ATTN_BACK node on guarded memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shlex
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import cffi
import numpy as np
from cffi import recompiler
from numpy.typing import NDArray

from ..base import commands, errors, system
from ..case.cases import PARTS, TYPES, Case, block
from ..case.inputs import blank
from ..case.operands import Inputs
from .ggml_cdef import CDEF, SOURCE

ROOT = Path(__file__).resolve().parents[2]
_DRIFTED = "headers and pyharness/device/ggml_cdef.py have drifted apart"
MODULE = "_pyharness_ggml"
BINDING = f"{MODULE}.{'pyd' if sys.platform == 'win32' else 'abi3.so'}"
STRUCTS = ("struct ggml_tensor", "struct ggml_init_params", "struct ggml_flash_attn_back_params")

GUARD = 1024  # bytes of guard on each side of a tensor
GUARD_BYTE = 0xFF  # NaN in every floating-point type
POISON = np.uint32(0x7FA5A5A5)  # a NaN that no arithmetic makes
CACHE_CELLS = 37  # cells of the cache layout that hold no key; the first 5 come before the keys

GGML_CUDA = ("CUDA", "ROCm", "MUSA")  # what the names of ggml-cuda's devices begin with
GGML_SOFTCAP_HEADS = (128, 256, 512)
"""Head sizes for which ggml-cuda compiles its own forward with a softcap. Its supports_op accepts every other one, too,
and the kernel then ends in a trap (`unspecified launch failure`)."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that ggml offers. Memory in bytes; source is the digest compiled into its library, if it has one."""

    name: str
    description: str
    memory_free: int
    memory_total: int
    source: str | None


UNITS = ("halves", "d_in_f32", "f32")
"""What units of a tensor-core path take beyond fp16: K and Q in two halves; F32 for LSE, D and dSinks, or for all."""


@dataclasses.dataclass
class Result:
    """What a run wrote: parts as float32 in the shapes of reference.backward."""

    parts: dict[str, NDArray[np.float32]]
    unwritten: dict[str, int]  # elements that still hold the poison
    guards: list[str]  # tensors whose guard words changed
    digests: dict[str, str]  # sha256 of each part's bytes
    digest: str  # sha256 over all parts in their order
    path: str
    seconds: float
    memory: int  # bytes of the device buffer
    forward: str = ""  # path of a pair's forward, "" if ggml's own ran
    units: dict[str, int] = dataclasses.field(default_factory=dict)  # Library.units of its runs


class Library:
    """The libraries of one directory, loaded into this process."""

    _open: Library | None = None

    def __init__(self, directory: Path, module: Any) -> None:
        self.directory = directory
        self.ffi: cffi.FFI = module.ffi
        self.c: Any = module.lib
        # told the message of a failed GGML_ASSERT before it ends the process
        self.on_abort: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True)

        def aborted(message: Any) -> None:
            self.on_abort(self.text(message) or "")

        self.ffi.def_extern("pyharness_aborted")(aborted)
        self.c.pyharness_attach()
        if self.c.ggml_backend_dev_count() == 0:
            self.c.ggml_backend_load_all_from_path(str(directory).encode())
        for name, kind in TYPES.items():
            if kind < self.c.GGML_TYPE_COUNT and self.text(self.c.ggml_type_name(int(kind))) != name:
                raise errors.Environment(f"type {int(kind)} is {name} in the gguf package but not in {directory}")

    @staticmethod
    def open(libs: Path | None = None, preset: str = "cpu") -> Library:
        """Load the libraries in libs (default: the preset's), once in a process. Raises errors.Environment."""
        directory = find_libraries(libs, preset)
        if Library._open is None:
            extension = build_extension(directory)
            _load_shared(directory)
            Library._open = Library(directory, import_extension(extension))
        elif Library._open.directory != directory:
            raise errors.Environment(
                f"{Library._open.directory} is loaded already", "use a process for each set of libraries"
            )
        return Library._open

    @property
    def version(self) -> str:
        """ggml's version."""
        return self.text(self.c.ggml_version()) or ""

    @property
    def source(self) -> str:
        """Digest of the patch compiled into libggml-base."""
        return self.text(self.c.ggml_flash_attn_back_source()) or ""

    @property
    def rebuild(self) -> str:
        """The command that builds the libraries from the tree's sources."""
        return commands.rebuild(self.directory)

    def mapped(self) -> list[Path]:
        """The ggml libraries that this process mapped."""
        return [path for path in system.mapped_files() if system.belongs(path, "ggml")]

    def devices(self) -> list[Device]:
        """All devices, in ggml's order."""
        return [self._describe(self.c.ggml_backend_dev_get(i)) for i in range(self.c.ggml_backend_dev_count())]

    def device(self, name: str) -> Device:
        """The device of a name (any letter case). Raises errors.Environment that lists the others."""
        devices = self.devices()
        for device in devices:
            if device.name.lower() == name.lower():
                return device
        raise errors.Environment(
            f"no device {name} in {self.directory}", "devices: " + ", ".join(d.name for d in devices)
        )

    def refusal(self, device: Device, case: Case | Inputs) -> str | None:
        """Why the device does not run the node, None if it does: supports_op, with the backend's own reason.

        Raises errors.Failure when the two disagree.
        """
        with _Node(self, case) as node:
            handle = self.handle(device)
            supported = bool(self.c.ggml_backend_dev_supports_op(handle, node.back))
            if node.attn and not self.c.ggml_backend_dev_supports_op(handle, node.attn):
                return "FLASH_ATTN_EXT: supports_op says no"
            if node.attn and (no_forward := self.forward_refusal(device, node.attn)):
                return no_forward
            ask = self.proc(handle, "ggml_backend_flash_attn_back_refusal", "ggml_backend_flash_attn_back_refusal_t")
            reason = self.text(ask(handle, node.back)) if ask else None
            if ask and supported != (reason is None):
                said = "yes" if supported else "no"
                raise errors.Failure(
                    f"{device.name}: supports_op says {said}, the refusal says {reason!r}, for {node.case}"
                )
            return None if supported else reason or "supports_op says no"

    def path(self, device: Device, case: Case | Inputs) -> str:
        """Name of the kernel path that the device takes for a node that it runs, "" if it does not say."""
        with _Node(self, case) as node:
            return self.node_path(device, node.back)

    def prepare(self, device: Device, inputs: Inputs, threads: int = 0) -> Session:
        """The node on the device with its inputs uploaded. threads: of the CPU device, 0 = all cores."""
        return Session(self, device, inputs, threads)

    def run(self, device: Device, inputs: Inputs, threads: int = 0) -> Result:
        """Compute the node once, on poisoned memory."""
        with self.prepare(device, inputs, threads) as session:
            session.compute()
            return session.result()

    def handle(self, device: Device) -> Any:
        """ggml_backend_dev_t of a device."""
        return self.c.ggml_backend_dev_by_name(device.name.encode())

    def backend(self, device: Device, threads: int = 0) -> Any:
        """A new ggml_backend_t of the device, the caller's to free. threads: of the CPU device, 0 = all cores."""
        handle = self.handle(device)
        backend = self.c.ggml_backend_dev_init(handle, self.ffi.NULL)
        if not backend:
            raise errors.Lost(f"{device.name}: cannot be initialised", "see ggml's messages above")
        set_threads = self.proc(handle, "ggml_backend_set_n_threads", "ggml_backend_set_n_threads_t")
        if set_threads:
            set_threads(backend, threads or os.cpu_count() or 1)
        return backend

    def proc(self, handle: Any, name: str, kind: str) -> Any:
        """A function that the device's backend exports under a name, None if it does not."""
        pointer = self.c.ggml_backend_reg_get_proc_address(self.c.ggml_backend_dev_backend_reg(handle), name.encode())
        return self.ffi.cast(kind, pointer) if pointer else None

    def sources(self) -> dict[str, str | None]:
        """Digest of the patch compiled into each backend's library, by its lower-case name, whether it has devices or
        not; None where it does not say."""
        found: dict[str, str | None] = {}
        for i in range(self.c.ggml_backend_reg_count()):
            reg = self.c.ggml_backend_reg_get(i)
            pointer = self.c.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_flash_attn_back_source")
            ask = self.ffi.cast("ggml_backend_flash_attn_back_source_t", pointer) if pointer else None
            found[(self.text(self.c.ggml_backend_reg_name(reg)) or "").lower()] = self.text(ask()) if ask else None
        return found

    def node_path(self, device: Device, back: Any) -> str:
        """`path` of a FLASH_ATTN_BACK node that stands already, or of a FLASH_ATTN_EXT node."""
        handle = self.handle(device)
        ask = self.proc(handle, "ggml_backend_flash_attn_back_path", "ggml_backend_flash_attn_back_path_t")
        return (self.text(ask(handle, back)) if ask else None) or ""

    def units(self, device: Device) -> dict[str, int]:
        """Of the nodes that the device has run since the last call the units (a KV head of a sequence) that took more
        than fp16 operands, by what they took (UNITS); without those that are 0."""
        handle = self.handle(device)
        ask = self.proc(handle, "ggml_backend_flash_attn_back_units", "ggml_backend_flash_attn_back_units_t")
        if ask is None:
            return {}
        counts = self.ffi.new("uint64_t[]", len(UNITS))
        ask(handle, counts)
        return {name: int(count) for name, count in zip(UNITS, counts, strict=True) if count}

    def forward_refusal(self, device: Device, attn: Any) -> str:
        """Why the device's own forward cannot run a FLASH_ATTN_EXT node that supports_op accepts, "" if it can."""
        softcap = struct.unpack("f", struct.pack("i", attn.op_params[2]))[0]
        size = int(attn.src[0].ne[0])
        if not softcap or size in GGML_SOFTCAP_HEADS or not device.name.startswith(GGML_CUDA):
            return ""
        if self.node_path(device, attn):
            return ""
        return f"ggml's own forward has no kernel for a softcap at head size {size}"

    def _describe(self, handle: Any) -> Device:
        free, total = self.ffi.new("size_t *"), self.ffi.new("size_t *")
        self.c.ggml_backend_dev_memory(handle, free, total)
        ask = self.proc(handle, "ggml_backend_flash_attn_back_source", "ggml_backend_flash_attn_back_source_t")
        return Device(
            name=self.text(self.c.ggml_backend_dev_name(handle)) or "",
            description=self.text(self.c.ggml_backend_dev_description(handle)) or "",
            memory_free=int(free[0]),
            memory_total=int(total[0]),
            source=self.text(ask()) if ask else None,
        )

    def upload(self, tensor: Any, array: NDArray[Any]) -> None:
        """Copy a contiguous array into a tensor on its device."""
        if array.nbytes:
            data = self.ffi.cast("void *", array.__array_interface__["data"][0])
            self.c.ggml_backend_tensor_set(tensor, data, 0, array.nbytes)

    def download(self, tensor: Any, dtype: Any) -> NDArray[Any]:
        """A tensor's bytes as a flat array."""
        array = np.empty(int(self.c.ggml_nbytes(tensor)) // np.dtype(dtype).itemsize, dtype)
        self.download_into(tensor, array)
        return array

    def download_into(self, tensor: Any, array: NDArray[Any]) -> None:
        """Copy as many bytes of a tensor as a contiguous array has."""
        if array.nbytes:
            data = self.ffi.cast("void *", array.__array_interface__["data"][0])
            self.c.ggml_backend_tensor_get(tensor, data, 0, array.nbytes)

    def text(self, value: Any) -> str | None:
        """A C string or an enum's name, None for NULL."""
        if not value:
            return None
        text = self.ffi.string(value)
        return text.decode() if isinstance(text, bytes) else str(text)


@dataclasses.dataclass
class _Operand:
    """Memory of a source and the view of it that the node reads, as numpy arrays; bytes for k and v."""

    storage: NDArray[Any]
    view: NDArray[Any]
    type_name: str
    parent: _Operand | None = None  # the operand whose storage this one views

    def ne(self) -> list[int]:
        """Sizes in ggml's order."""
        row = self.view.shape[-1]
        if self.view.dtype == np.uint8:
            values, size = block(self.type_name)
            row = row // size * values
        return [row, *reversed(self.view.shape[:-1])]

    def nb(self) -> list[int]:
        """Strides in bytes, in ggml's order."""
        view = self.view if self.view.size else np.empty([max(n, 1) for n in self.view.shape], self.view.dtype)
        step = block(self.type_name)[1] if view.dtype == np.uint8 else view.strides[-1]
        return [step, *reversed(view.strides[:-1])]

    def offset(self) -> int:
        """Bytes from the storage to the view."""
        root = self.parent.storage if self.parent else self.storage
        return int(self.view.__array_interface__["data"][0] - root.__array_interface__["data"][0])


def _operands(inputs: Inputs) -> dict[str, _Operand]:
    """The node's sources in the memory layout of the case; nothing is written yet."""
    layout = inputs.case.layout

    def plain(array: NDArray[Any], kind: str = "f32") -> _Operand:
        storage = np.empty(array.shape, array.dtype)
        return _Operand(storage, storage, kind)

    def swapped(array: NDArray[Any], kind: str = "f32") -> _Operand:
        a, b, c, d = array.shape
        storage = np.empty((a, c, b, d), array.dtype)
        return _Operand(storage, storage.transpose(0, 2, 1, 3), kind)

    def strided(array: NDArray[Any], kind: str = "f32") -> _Operand:
        storage = np.empty((*array.shape, 2), array.dtype)
        return _Operand(storage, storage[..., 0], kind)

    def cached(array: NDArray[Any], kind: str = "f32") -> _Operand:
        s, g, m, row = array.shape
        storage = np.empty((s, m + CACHE_CELLS, g, row), array.dtype)
        return _Operand(storage, storage[:, 5 : 5 + m].transpose(0, 2, 1, 3), kind)

    def repeated(array: NDArray[Any], kind: str = "f32") -> _Operand:
        storage = np.empty(array.shape[-1:], array.dtype)
        strides = (*[0] * (array.ndim - 1), array.itemsize)
        return _Operand(storage, np.lib.stride_tricks.as_strided(storage, array.shape, strides), kind)

    arrange = {"perm": swapped, "strided": strided}.get(layout, plain)
    arrange_kv = {"perm": swapped, "cache": cached}.get(layout, plain)
    k = arrange_kv(inputs.k, inputs.type_K)
    operands = {"q": arrange(inputs.q), "k": k}
    if inputs.case.vview:
        operands["v"] = _Operand(k.storage, k.view[..., : inputs.v.shape[-1]], inputs.type_V, parent=k)
    else:
        operands["v"] = arrange_kv(inputs.v, inputs.type_V)
    if inputs.mask is not None:
        *outer, keys = inputs.mask.shape
        storage = np.empty((*outer, keys + (8 if layout == "strided" else 0)), inputs.mask.dtype)
        operands["mask"] = _Operand(storage, storage[..., :keys], "f16")
    if inputs.sinks is not None:
        operands["sinks"] = plain(inputs.sinks)
    if inputs.o is not None:
        operands["o"] = plain(inputs.o)
    operands["d"] = (repeated if layout == "bcast" else arrange)(inputs.d)
    return operands


class _Node:
    """A FLASH_ATTN_BACK node and its sources in a context of their own, without memory."""

    def __init__(self, library: Library, case: Case | Inputs) -> None:
        self.library = library
        self.inputs = case if isinstance(case, Inputs) else blank(case)
        self.case = self.inputs.case
        c, ffi = library.c, library.ffi
        overhead = 64 * c.ggml_tensor_overhead() + c.ggml_graph_overhead_custom(16, False)
        self.ctx = c.ggml_init({"mem_size": overhead, "mem_buffer": ffi.NULL, "no_alloc": True})
        self.operands = _operands(self.inputs)
        self.storages: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for name, operand in self.operands.items():
            if operand.parent is None:
                self.storages[name] = c.ggml_new_tensor_1d(self.ctx, c.GGML_TYPE_I8, operand.storage.nbytes)
                root = self.storages[name]
            else:
                root = next(self.storages[n] for n, other in self.operands.items() if other is operand.parent)
            tensors[name] = self._view(name, operand, root)
        inputs = self.inputs
        split = self.case.prec == "f32"
        self.attn: Any = None
        if self.case.pair:
            self.attn = c.ggml_flash_attn_ext(
                self.ctx,
                *(tensors.get(name, ffi.NULL) for name in ("q", "k", "v", "mask")),
                inputs.scale,
                inputs.max_bias,
                inputs.softcap,
            )
            c.ggml_flash_attn_ext_set_prec(self.attn, c.GGML_PREC_F32)  # as llama.cpp does
            c.ggml_flash_attn_ext_add_sinks(self.attn, tensors.get("sinks", ffi.NULL))
            c.ggml_flash_attn_back_set_split(self.attn, split)
        self.back = c.ggml_flash_attn_back(
            self.ctx,
            *(tensors.get(name, ffi.NULL) for name in ("q", "k", "v", "mask", "sinks")),
            self.attn or tensors.get("o", ffi.NULL),
            tensors["d"],
            {
                "scale": inputs.scale,
                "max_bias": inputs.max_bias,
                "logit_softcap": inputs.softcap,
                "grads": sum(1 << PARTS.index(part) for part in inputs.grads),
                "kv_first": inputs.kv_first,
                "kv_count": inputs.kv_count,
            },
        )
        c.ggml_flash_attn_back_set_split(self.back, split)
        if self.attn and not c.ggml_flash_attn_back_use_saved(self.back):
            raise errors.Failure(f"{self.case}: the gradient does not go with its forward")
        self.tensors = tensors

    def _view(self, name: str, operand: _Operand, root: Any) -> Any:
        ne, nb = operand.ne(), operand.nb()
        padded = ne + [1] * (4 - len(ne))
        tensor = self.library.c.ggml_new_tensor_4d(self.ctx, int(TYPES[operand.type_name]), *padded)
        for i, stride in enumerate(nb):
            tensor.nb[i] = stride
        for i in range(len(nb), 4):
            tensor.nb[i] = nb[-1] * ne[-1]
        tensor.view_src = root
        tensor.view_offs = operand.offset()
        self.library.c.ggml_set_name(tensor, name.encode())
        return tensor

    def __enter__(self) -> _Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.c.ggml_free(self.ctx)


class Session:
    """A node on a device, its inputs uploaded, every tensor between guard words, the destination poisoned."""

    def __init__(self, library: Library, device: Device, inputs: Inputs, threads: int) -> None:
        self.library = library
        self.device = device
        self.inputs = inputs
        self.seconds = 0.0
        self._words: NDArray[np.uint32] | None = None
        c = self._c = library.c
        with contextlib.ExitStack() as owned:
            self._node = _Node(library, inputs)
            owned.callback(c.ggml_free, self._node.ctx)
            self.back = self._node.back
            self.sources = self._node.tensors  # the node's sources by name
            self.storages = self._node.storages  # the memory that they view
            self.graph = c.ggml_new_graph_custom(self._node.ctx, 16, False)
            c.ggml_build_forward_expand(self.graph, self.back)
            self.path = library.node_path(device, self.back)
            self.attn = self._node.attn
            self.forward = library.node_path(device, self.attn) if self.attn else ""
            self.backend = library.backend(device, threads)
            owned.callback(c.ggml_backend_free, self.backend)
            self._allocate(owned)
            self._upload()
            self.poison()
            library.units(device)
            self._owned = owned.pop_all()

    def _allocate(self, owned: contextlib.ExitStack) -> None:
        c, node = self._c, self._node
        align = int(c.ggml_backend_get_alignment(self.backend))
        buft = c.ggml_backend_get_default_buffer_type(self.backend)
        tensors = {**node.storages, "result": self.back, **({"o": self.attn} if self.attn else {})}
        places, guards, position = {}, {"before": (0, GUARD)}, GUARD
        for name, tensor in tensors.items():
            places[name] = position
            end = position + int(c.ggml_backend_buft_get_alloc_size(buft, tensor))
            position = -(-(end + GUARD) // align) * align
            guards[name] = (end, position)
        self.bytes = position
        self.result_bytes = int(c.ggml_nbytes(self.back))
        buffer = c.ggml_backend_alloc_buffer(self.backend, self.bytes + align)
        if not buffer:
            raise errors.Environment(f"{self.device.name}: no {self.bytes / 2**30:.2f} GiB for {self.inputs.case}")
        owned.callback(c.ggml_backend_buffer_free, buffer)
        base = int(self.library.ffi.cast("uintptr_t", c.ggml_backend_buffer_get_base(buffer)))
        base = -(-base // align) * align

        def place(tensor: Any, offset: int) -> None:
            c.ggml_backend_tensor_alloc(buffer, tensor, self.library.ffi.cast("void *", base + offset))

        for name, tensor in tensors.items():
            place(tensor, places[name])
        for tensor in node.tensors.values():
            c.ggml_backend_view_init(tensor)
        self.guards = {}
        for name, (start, stop) in guards.items():
            self.guards[name] = c.ggml_new_tensor_1d(node.ctx, c.GGML_TYPE_I8, stop - start)
            place(self.guards[name], start)
        c.ggml_backend_buffer_clear(buffer, GUARD_BYTE)

    def _upload(self) -> None:
        for name, operand in self._node.operands.items():
            if operand.parent is not None:
                continue
            if operand.view.size != operand.storage.size:
                operand.storage.view(np.uint8)[...] = GUARD_BYTE
            operand.view[...] = getattr(self.inputs, name)
            self.library.upload(self._node.storages[name], operand.storage)
        self._node.operands.clear()

    def poison(self) -> None:
        """Fill the destination with the NaN that counts as unwritten."""
        for tensor in filter(None, (self.back, self.attn)):
            self.library.upload(tensor, np.full(int(self._c.ggml_nbytes(tensor)) // 4, POISON, np.uint32))

    def again(self) -> NDArray[np.uint32]:
        """One more run, on a destination of 0xFF bytes: the words of the result, and of the output of a forward of the
        operator's. Valid until the next."""
        written = (self.back, self.attn) if self.forward else (self.back,)
        sizes = [int(self._c.ggml_nbytes(tensor)) for tensor in written]
        for tensor, size in zip(written, sizes, strict=True):
            self._c.ggml_backend_tensor_memset(tensor, GUARD_BYTE, 0, size)
        self.compute()
        if self._words is None:
            self._words = np.empty(sum(sizes) // 4, np.uint32)
        for tensor, words in zip(written, np.split(self._words, [sizes[0] // 4]), strict=False):
            self.library.download_into(tensor, words)
        return self._words

    def compute(self) -> float:
        """Compute the graph once; seconds on the host's clock until the device is done.

        Raises errors.Environment when the device has no memory for the work, errors.Lost when it fails.
        """
        start = time.perf_counter()
        status = self._c.ggml_backend_graph_compute(self.backend, self.graph)
        self._c.ggml_backend_synchronize(self.backend)
        self.seconds = time.perf_counter() - start
        if status != self._c.GGML_STATUS_SUCCESS:
            text = self.library.text(self._c.ggml_status_to_string(status))
            kind = errors.Environment if status == self._c.GGML_STATUS_ALLOC_FAILED else errors.Lost
            raise kind(f"{self.device.name}: {text} for {self.inputs.case}")
        return self.seconds

    def result(self) -> Result:
        """Download the parts, look at the guard words and for elements that were not written."""
        parts = parts_of(self.library, self.back, self.inputs)
        if self.attn:
            parts["o"] = output_of(self.library, self.attn, self.inputs).transpose(0, 2, 1, 3)
        whole = hashlib.sha256()
        digests = {}
        for part, array in parts.items():
            if part == "o" and not self.forward:
                continue  # ggml's own promises no bits
            whole.update(array.tobytes())
            digests[part] = hashlib.sha256(array.tobytes()).hexdigest()
        return Result(
            parts=parts,
            unwritten={part: int(np.count_nonzero(array.view(np.uint32) == POISON)) for part, array in parts.items()},
            guards=[
                name
                for name, tensor in self.guards.items()
                if (self.library.download(tensor, np.uint8) != GUARD_BYTE).any()
            ],
            digests=digests,
            digest=whole.hexdigest(),
            path=self.path,
            seconds=self.seconds,
            memory=self.bytes,
            forward=self.forward,
            units=self.library.units(self.device),
        )

    def close(self) -> None:
        """Free the buffer, the backend and the context."""
        self._owned.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parts_of(library: Library, back: Any, inputs: Inputs) -> dict[str, NDArray[np.float32]]:
    """Download the parts of a FLASH_ATTN_BACK node's result, in the shapes of reference.backward."""
    s, h, g, n, _ = inputs.sizes
    count = inputs.kv_count
    dk, dv = inputs.q.shape[3], inputs.d.shape[3]
    shapes = {
        "dq": (s, h, n, dk),
        "dk": (s, g, count, dk),
        "dv": (s, g, count, dv),
        "lse": (s, h, n),
        "d": (s, h, n),
        "dsinks": (h,),
    }
    raw = library.download(back, np.float32)
    parts = {}
    for i, part in enumerate(PARTS):
        if library.c.ggml_flash_attn_back_has(back, i):
            first = int(library.c.ggml_flash_attn_back_offset(back, i)) // 4
            parts[part] = raw[first : first + int(np.prod(shapes[part]))].reshape(shapes[part])
    return parts


def output_of(library: Library, attn: Any, inputs: Inputs) -> NDArray[np.float32]:
    """Download the result of a FLASH_ATTN_EXT node: [S, N, H, Dv]."""
    s, h, _, n, _ = inputs.sizes
    return library.download(attn, np.float32).reshape(s, n, h, inputs.d.shape[3])


def find_libraries(libs: Path | None, preset: str) -> Path:
    """The directory of ggml-base: libs, $PYHARNESS_LIBS, or the preset's build. Raises errors.Environment."""
    if libs is None and os.environ.get("PYHARNESS_LIBS"):
        libs = Path(os.environ["PYHARNESS_LIBS"])
    directory = libs or Path(_build(ROOT / "build" / preset).get("lib", ROOT / "build" / preset / "bin"))
    base = system.library("ggml-base")
    if (directory / base).exists():
        return directory.resolve()
    if libs:
        raise errors.Environment(
            f"no {base} in {libs}",
            "give the directory of the built libraries, shared ones (BUILD_SHARED_LIBS=ON)",
        )
    known = presets()
    raise errors.Environment(
        f"preset {preset} is not built: no {base} in {directory}",
        f"presets: {', '.join(known)}" if known and preset not in known else commands.build(preset),
    )


def presets() -> list[str]:
    """The presets of CMakePresets.json that can be built here."""
    file = ROOT / "CMakePresets.json"
    listed = json.loads(file.read_text(encoding="utf-8"))["configurePresets"] if file.is_file() else []
    return [preset["name"] for preset in listed if not preset.get("hidden")]


def find_headers(directory: Path) -> Path | None:
    """The include directory that goes with a directory of libraries: beside them, or the one that their build names."""
    named = _build(directory).get("include") or _build(directory.parent).get("include")
    for include in (directory / "include", directory.parent / "include", *([Path(named)] if named else [])):
        if (include / "ggml-flash-attn-back.h").exists():
            return include
    return None


def _build(directory: Path) -> dict[str, str]:
    """What a CMake binary directory says about itself."""
    path = directory / "flash-attn-back.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _compile(folder: Path, include: Path, libraries: Path) -> Path:
    """Compile the cffi module in a folder. Raises errors.Environment."""
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    if sys.platform == "win32":  # links with import libraries, by the compiler that setuptools finds
        names = [system.stem(path.name) for path in system.libraries(libraries, "ggml")]
        ffi.set_source(MODULE, SOURCE, include_dirs=[str(include)], library_dirs=[str(libraries)], libraries=names)
        try:
            return Path(ffi.compile(str(folder)))
        except cffi.VerificationError as error:
            raise errors.Environment(f"the binding was not built: {error}", _DRIFTED) from None
    source, built = folder / f"{MODULE}.c", folder / BINDING
    recompiler.make_c_source(ffi, MODULE, SOURCE, str(source))
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise errors.Environment(
            f"no Python.h in {python}", "install Python's headers (Debian: apt install python3-dev)"
        )
    compiler = shlex.split(os.environ.get("CC", "cc"))
    kind = ("-bundle", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared", "-fPIC")
    command = [*compiler, *kind, "-O1", "-w", f"-I{include}", f"-I{python}", str(source), "-o", str(built)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise errors.Environment(f"{compiler[0]}: {error.strerror}", "install a C compiler, or set CC") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise errors.Environment(
            f"the binding does not fit the headers in {include}: {lines[0] if lines else done.returncode}", _DRIFTED
        )
    return built


def build_extension(directory: Path) -> Path:
    """The cffi module for the libraries in a directory, compiled there unless it fits the headers and declarations."""
    extension = directory / BINDING
    stamp = directory / f"{MODULE}.sha256"
    include = find_headers(directory)
    if include is None:
        if extension.exists():
            return extension
        raise errors.Environment(
            f"no headers for the libraries in {directory}", f"put them into {directory / 'include'}"
        )
    digest = hashlib.sha256((CDEF + SOURCE).encode())
    for header in sorted(include.glob("ggml*.h")):
        digest.update(header.read_bytes())
    if extension.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
        return extension
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        built = _compile(Path(temporary), include, directory)
        os.replace(built, extension)
        stamp.write_text(digest.hexdigest())
    return extension


def _check_whole(library: Path) -> None:
    """Refuse an ELF file that ends before its last table does: the process would die of loading it."""
    with library.open("rb") as file:
        header = file.read(64)
    if header.startswith(b"\x7fELF\x02\x01") and len(header) == 64:
        offset, size, count = struct.unpack_from("<Q10xHH", header, 40)
        if library.stat().st_size < offset + size * count:
            raise errors.Environment(f"{library}: cut off", "delete it, then copy or build it again")


def _load_shared(directory: Path) -> None:
    """Map the libraries so that the extension finds their symbols: base first, libggml last, backends between."""
    if sys.platform == "win32":
        os.add_dll_directory(str(directory))
    first, last = system.library("ggml-base"), system.library("ggml")
    for path in sorted(directory.glob(system.library("ggml*")), key=lambda p: (p.name == last, p.name != first)):
        try:
            _check_whole(path)
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise errors.Environment(
                f"{path}: {error}", "the library or one that it needs is missing or of another machine"
            ) from None


def import_extension(path: Path) -> Any:
    """The cffi module of a built extension; the libraries must be mapped. Raises errors.Environment."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec
    _check_whole(path)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        older = "undefined symbol" in str(error)
        hint = "the libraries are older than the headers: build again" if older else "delete it: it is built again"
        raise errors.Environment(f"{path}: {str(error).removeprefix(f'{path}: ')}", hint) from None
    try:
        for name in STRUCTS:  # cffi compares layouts when a struct is first used
            module.ffi.sizeof(name)
    except module.ffi.error as error:
        raise errors.Environment(f"{path}: {error}", _DRIFTED) from None
    return module
