"""FlashAttention-3's kernels from the wheel dew-flash-attn-cu13, without the JAX that it is made for.

The wheel's library holds them as handlers of XLA's foreign function interface (openxla/xla, xla/ffi/api/c_api.h and
ffi.h, version 0): C functions of one call frame that lists buffers and attributes, beside a table of functions through
which a handler reaches its caller. Of that table FlashAttention needs the stream, the device, scratch memory and
errors. The backward's handler has no attribute for the deterministic mode; the C++ function behind it takes one.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cffi

WHEEL, LIBRARY = "dew-flash-attn-cu13", "libdew_flash_attn3.so"
HEAD_SIZES = (64, 128, 192, 256)
ROWS = 128
"""Rows that the backward's statistics of a head are padded to, and by which they are longer once more."""

IMPLEMENTATION = (
    "_Z12mha_bwd_implP11CUstream_stN3xla3ffi16ScratchAllocatorEiNS2_9AnyBufferES4_S4_S4_S4_S4_S4_S4_S4_S4_"
    "lblbdbblldblNS2_6ResultIS4_EES6_S6_S6_S6_"
)
CDEF = f"""
typedef void * (*call_t)(void * args);
typedef struct {{ size_t size; void * extension; int major; int minor; }} version_t;
typedef struct {{ size_t size; void * extension; version_t version; void * internal; call_t calls[19]; }} api_t;

typedef struct {{ size_t size; void * extension; int dtype; void * data; int64_t rank; int64_t * dims; }} buffer_t;
typedef struct {{ const char * text; size_t length; }} span_t;
typedef struct {{ int dtype; void * value; }} scalar_t;
typedef struct {{ size_t size; void * extension; int64_t count; int * kinds; void ** items; }} list_t;
typedef struct {{ size_t size; void * extension; int64_t count; int * kinds; span_t ** names; void ** items; }} named_t;
typedef struct {{
    size_t size; void * extension; const api_t * api; void * context; int stage;
    list_t args; list_t rets; named_t attrs; void * future;
}} frame_t;

typedef struct {{ size_t size; void * extension; const char * message; int code; }} error_create_t;
typedef struct {{ size_t size; void * extension; void * error; const char * message; int code; }} error_get_t;
typedef struct {{ size_t size; void * extension; void * context; void * stream; }} stream_t;
typedef struct {{
    size_t size; void * extension; void * context; size_t bytes; size_t alignment; void * data;
}} memory_t;
typedef struct {{ size_t size; void * extension; void * context; int32_t ordinal; }} ordinal_t;

typedef struct {{ const void * text; size_t length; char rest[16]; }} string_t; // std::string, diagnostics of a call
typedef struct {{ const api_t * api; void * context; string_t * diagnostics; void * memory[3]; }} scratch_t;
typedef struct {{ int code; string_t message; }} error_t;

void * dew_flash3_mha_fwd(frame_t * frame);
void * dew_flash3_mha_bwd(frame_t * frame);
// an error, a scratch allocator and buffers by value are pointers in the Itanium C++ ABI
void {IMPLEMENTATION}(
    error_t * error, void * stream, scratch_t * scratch, int ordinal,
    buffer_t * d, buffer_t * q, buffer_t * k, buffer_t * v, buffer_t * o, buffer_t * lse,
    buffer_t * q_starts, buffer_t * k_starts, buffer_t * q_used, buffer_t * k_used,
    int64_t max_q, bool has_q_starts, int64_t max_k, bool has_k_starts,
    double scale, bool zero_tensors, bool causal, int64_t left, int64_t right, double softcap, bool deterministic,
    int64_t sm_margin,
    buffer_t * dq, buffer_t * dk, buffer_t * dv, buffer_t * softmax_d, buffer_t * lse_log2);
"""
_CALLS = {"error_create": 0, "error_get": 1, "stream": 4, "memory": 9, "ordinal": 17}  # places in the table of 19
_EXECUTE = 3
_BUFFER, _SCALAR = 1, 3  # kinds of arguments and attributes
_DTYPES = {"bool": 1, "int32": 4, "int64": 5, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}
_C_TYPES = {bool: ("bool", "uint8_t *"), int: ("int64", "int64_t *"), float: ("float64", "double *")}


class Buffer(NamedTuple):
    """A contiguous array on the device."""

    dtype: str  # of PyTorch's names: "float16"
    address: int
    shape: tuple[int, ...]


class Failed(RuntimeError):
    """What a handler answered instead of running."""


def find() -> Path | None:
    """The library of the installed wheel (its package is not imported: it wants JAX), None where there is none."""
    spec = importlib.util.find_spec("dew_flash_attn")
    places = (spec.submodule_search_locations if spec else None) or []
    return next((path for path in (Path(place) / LIBRARY for place in places) if path.is_file()), None)


def _attributes(scale: float, causal: bool) -> dict[str, bool | int | float]:
    return {"softmax_scale": scale, "is_causal": causal, "window_size_left": -1, "window_size_right": -1}


class Library:
    """The handlers of a library on one device. Raises OSError where it cannot be loaded."""

    def __init__(
        self, path: Path, ordinal: int, stream: Callable[[], int], allocate: Callable[[int, int], int]
    ) -> None:
        """`stream` gives the address of the current one, `allocate` that of scratch memory, from a number of bytes
        and which of a call's pieces of memory it is."""
        self._ffi = ffi = cffi.FFI()
        ffi.cdef(CDEF)
        self._lib: Any = ffi.dlopen(str(path))
        self._ordinal, self._stream, self._allocate = ordinal, stream, allocate
        self._pieces = 0
        self._said: list[Any] = []
        given = {
            "error_create": self._error_create,
            "error_get": self._error_get,
            "stream": self._stream_get,
            "memory": self._memory,
            "ordinal": self._ordinal_get,
        }
        nothing = ffi.callback("call_t", lambda _: ffi.NULL)
        self._kept = [nothing, *(ffi.callback("call_t", call) for call in given.values())]
        calls = [nothing] * 19
        for name, call in zip(given, self._kept[1:], strict=True):
            calls[_CALLS[name]] = call
        version = {"size": ffi.sizeof("version_t"), "major": 0, "minor": 4}
        self._api = ffi.new("api_t *", {"size": ffi.sizeof("api_t"), "version": version, "calls": calls})

    # ---- what a handler calls ----

    def _error_create(self, args: Any) -> Any:
        self._said.append(self._ffi.new("char[]", self._ffi.string(self._ffi.cast("error_create_t *", args).message)))
        return self._said[-1]

    def _error_get(self, args: Any) -> Any:
        found = self._ffi.cast("error_get_t *", args)
        found.message, found.code = self._ffi.cast("char *", found.error), 2
        return self._ffi.NULL

    def _stream_get(self, args: Any) -> Any:
        self._ffi.cast("stream_t *", args).stream = self._ffi.cast("void *", self._stream())
        return self._ffi.NULL

    def _memory(self, args: Any) -> Any:
        found = self._ffi.cast("memory_t *", args)
        try:
            found.data = self._ffi.cast("void *", self._allocate(int(found.bytes), self._pieces))
        except Exception as e:  # nothing may be raised through the handler
            self._said.append(self._ffi.new("char[]", str(e).encode()))
            return self._said[-1]
        self._pieces += 1
        return self._ffi.NULL

    def _ordinal_get(self, args: Any) -> Any:
        self._ffi.cast("ordinal_t *", args).ordinal = self._ordinal
        return self._ffi.NULL

    # ---- what calls a handler ----

    def _buffer(self, buffer: Buffer, kept: list[Any]) -> Any:
        ffi = self._ffi
        dims = ffi.new("int64_t[]", buffer.shape or (0,))
        found = ffi.new("buffer_t *", (
            ffi.sizeof("buffer_t"), ffi.NULL, _DTYPES[buffer.dtype], ffi.cast("void *", buffer.address),
            len(buffer.shape), dims,
        ))  # fmt: skip
        kept += [dims, found]
        return found

    def _list(self, buffers: Sequence[Buffer], kept: list[Any]) -> dict[str, Any]:
        ffi = self._ffi
        kinds = ffi.new("int[]", [_BUFFER] * len(buffers))
        items = ffi.new("void *[]", [self._buffer(buffer, kept) for buffer in buffers])
        kept += [kinds, items]
        return {"size": ffi.sizeof("list_t"), "count": len(buffers), "kinds": kinds, "items": items}

    def _named(self, attributes: dict[str, bool | int | float], kept: list[Any]) -> dict[str, Any]:
        ffi, names, items = self._ffi, [], []
        for name in sorted(attributes):  # a handler looks names up by bisection
            dtype, kind = _C_TYPES[type(attributes[name])]
            text, value = ffi.new("char[]", name.encode()), ffi.new(kind, attributes[name])
            names.append(ffi.new("span_t *", (text, len(name))))
            items.append(ffi.new("scalar_t *", (_DTYPES[dtype], value)))
            kept += [text, value]
        kinds = ffi.new("int[]", [_SCALAR] * len(names))
        arrays = ffi.new("span_t *[]", names), ffi.new("void *[]", items)
        kept += [*names, *items, kinds, *arrays]
        return {
            "size": ffi.sizeof("named_t"), "count": len(names), "kinds": kinds, "names": arrays[0], "items": arrays[1],
        }  # fmt: skip

    def _handler(
        self, handler: Any, args: Sequence[Buffer], rets: Sequence[Buffer], **attributes: bool | int | float
    ) -> Callable[[], None]:
        ffi, kept = self._ffi, list[Any]()
        frame = ffi.new("frame_t *", {
            "size": ffi.offsetof("frame_t", "future"), "api": self._api, "stage": _EXECUTE,
            "args": self._list(args, kept), "rets": self._list(rets, kept), "attrs": self._named(attributes, kept),
        })  # fmt: skip

        return functools.partial(self._run, handler, frame, kept)

    def _run(self, handler: Any, frame: Any, kept: list[Any]) -> None:
        del kept  # what the frame points to; the caller's partial keeps it alive
        self._begin()
        if handler(frame):
            self._fail()

    def _begin(self) -> None:
        self._pieces = 0
        self._said.clear()

    def _fail(self) -> None:
        raise Failed("; ".join(self._ffi.string(text).decode(errors="replace") for text in self._said) or "failed")

    def forward(
        self, inputs: Sequence[Buffer], outputs: Sequence[Buffer], *, scale: float, causal: bool
    ) -> Callable[[], None]:
        """A call of the forward: inputs q, k, v [B, rows, heads, D]; outputs o, lse [B, H, N] float32, and two float32
        of rank 4 and 3 that nothing is written to. It raises Failed."""
        return self._handler(self._lib.dew_flash3_mha_fwd, inputs, outputs, **_attributes(scale, causal))

    def backward(
        self, inputs: Sequence[Buffer], outputs: Sequence[Buffer], *, scale: float, causal: bool, deterministic: bool
    ) -> Callable[[], None]:
        """A call of the backward: inputs d, q, k, v, o, lse as the forward has them; outputs dq, dk, dv and two
        float32 [B H (N padded to ROWS + ROWS)] for row statistics. It raises Failed."""
        if not deterministic:
            return self._handler(self._lib.dew_flash3_mha_bwd, inputs, outputs, **_attributes(scale, causal))
        kept: list[Any] = []
        starts = [Buffer("int32", 0, (0,))] * 4  # sequences of one length
        read, written = ([self._buffer(b, kept) for b in buffers] for buffers in ([*inputs, *starts], outputs))
        scalars = (0, False, 0, False, scale, True, causal, -1, -1, 0.0, deterministic, 0)
        return functools.partial(self._run_implementation, (*read, *scalars, *written), kept)

    def _run_implementation(self, arguments: tuple[Any, ...], kept: list[Any]) -> None:
        del kept
        ffi = self._ffi
        self._begin()
        diagnostics, error = ffi.new("string_t *"), ffi.new("error_t *")
        diagnostics.text = ffi.addressof(diagnostics, "rest")
        scratch = ffi.new("scratch_t *", {"api": self._api, "diagnostics": diagnostics})
        stream = ffi.cast("void *", self._stream())
        getattr(self._lib, IMPLEMENTATION)(error, stream, scratch, self._ordinal, *arguments)
        if error.code:
            self._said.append(ffi.cast("char *", error.message.text))
            self._fail()
