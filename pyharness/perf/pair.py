"""Forward and backward of one attention in one graph, as llama.cpp's training has ggml's autodiff build it.

Q, K and V are parameters laid out as a model leaves them, the heads of a token beside each other. K and V are F32,
which they are where llama.cpp trains; a quantised one stays as it is: a cache. FLASH_ATTN_EXT carries GGML_PREC_F32
and `ggml_build_backward_expand` adds the rest, seeded with dO, so that nothing but the two nodes costs time.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import errors
from ..case.cases import PARTS, TYPES, block
from ..case.operands import Inputs
from ..device.ggml import Device, Library, output_of, parts_of

F32 = NDArray[np.float32]
Shown = tuple[F32, F32, F32, F32]
"""q [S, H, N, Dk], k [S, Hkv, M, Dk], v [S, Hkv, M, Dv], d [S, H, N, Dv]; zeros where a key or row does not count."""
NODES = 32
_PARAMETERS = {"dq": "q", "dk": "k", "dv": "v", "dsinks": "sinks"}


class Pair:
    """The graphs `forward` and `both` of a case on a device, their inputs uploaded; a context manager.

    Where `refusal` says why the device does not run them, there is no memory behind them."""

    def __init__(self, library: Library, device: Device, given: Inputs, shown: Shown, threads: int = 0) -> None:
        """Raises errors.Environment where the device has no memory for them."""
        self._library, self._given, self._uploads = library, given, dict[str, tuple[Any, NDArray[Any]]]()
        c = library.c
        self.path, self.forward_path, self.bytes, self.traffic = "", "", 0, dict[str, int]()
        self.refusal = _unlike_autodiff(given)
        with contextlib.ExitStack() as owned:
            if not self.refusal:
                size = NODES * c.ggml_tensor_overhead() + 2 * c.ggml_graph_overhead_custom(NODES, True)
                self._context = c.ggml_init({"mem_size": size, "mem_buffer": library.ffi.NULL, "no_alloc": True})
                owned.callback(c.ggml_free, self._context)
                self._build(shown)
                grads = sum(1 << PARTS.index(part) for part in given.grads)
                handle = library.handle(device)
                reason = c.ggml_flash_attn_back_train_refusal(handle, self.attention, grads)
                self.refusal = library.text(reason) or library.forward_refusal(device, self.attention)
            if not self.refusal:
                self.path = library.node_path(device, self.back)
                self.forward_path = library.node_path(device, self.attention)
                self.backend = library.backend(device, threads)
                owned.callback(c.ggml_backend_free, self.backend)
                buffer = c.ggml_backend_alloc_ctx_tensors(self._context, self.backend)
                if not buffer:
                    raise errors.Environment(f"{device.name}: no memory for forward and backward of {given.case}")
                owned.callback(c.ggml_backend_buffer_free, buffer)
                self.bytes = int(c.ggml_backend_buffer_get_size(buffer))
                for tensor, array in self._uploads.values():
                    library.upload(tensor, array)
                self._count_traffic()
            self._uploads.clear()
            self._owned = owned.pop_all()

    def _leaf(self, name: str, array: NDArray[Any], kind: str) -> Any:
        """A tensor that `array` is uploaded to once there is memory."""
        c, row = self._library.c, array.shape[-1]
        if array.dtype == np.uint8:
            values, size = block(kind)
            row = row // size * values
        ne = [row, *reversed(array.shape[:-1]), 1, 1, 1][:4]
        tensor = c.ggml_new_tensor_4d(self._context, int(TYPES[kind]), *ne)
        c.ggml_set_name(tensor, name.encode())
        self._uploads[name] = tensor, np.ascontiguousarray(array)
        return tensor

    def _heads(self, name: str, array: F32) -> Any:
        """[S, H, rows, D] as the attention reads it, of memory [S, rows, H, D]."""
        leaf = self._leaf(name, array.transpose(0, 2, 1, 3), "f32")
        return self._library.c.ggml_permute(self._context, leaf, 0, 2, 1, 3)

    def _build(self, shown: Shown) -> None:
        given, c, ffi, context = self._given, self._library.c, self._library.ffi, self._context
        q, k, v, d = shown

        def keys(name: str, values: F32, raw: NDArray[np.uint8], kind: str) -> Any:
            if block(kind)[0] == 1:
                return self._heads(name, values)
            seen = given.seen()[..., None]
            return self._leaf(name, raw if seen.all() else np.where(seen, raw, np.uint8(0)), kind)

        operands = (self._heads("q", q), keys("k", k, given.k, given.type_K), keys("v", v, given.v, given.type_V))
        mask = ffi.NULL if given.mask is None else self._leaf("mask", given.mask, "f16")
        self.attention = c.ggml_flash_attn_ext(context, *operands, mask, given.scale, given.max_bias, given.softcap)
        if given.sinks is not None:
            c.ggml_flash_attn_ext_add_sinks(self.attention, self._leaf("sinks", given.sinks, "f32"))
        c.ggml_flash_attn_ext_set_prec(self.attention, c.GGML_PREC_F32)
        seed = self._leaf("d", d.transpose(0, 2, 1, 3), "f32")
        for part in given.grads:
            c.ggml_set_param(self._uploads[_PARAMETERS[part]][0])

        self.both = c.ggml_new_graph_custom(context, NODES, True)
        c.ggml_build_forward_expand(self.both, self.attention)
        count = c.ggml_graph_n_nodes(self.both)
        seeds = ffi.new("struct ggml_tensor *[]", count)
        seeds[count - 1] = seed  # the attention is the last node
        self.attention.flags |= c.GGML_TENSOR_FLAG_LOSS  # not by ggml_set_loss, which takes a scalar
        c.ggml_build_backward_expand(context, self.both, seeds)
        self.attention.flags &= ~c.GGML_TENSOR_FLAG_LOSS
        nodes = [c.ggml_graph_node(self.both, i) for i in range(c.ggml_graph_n_nodes(self.both))]
        (self.back,) = (node for node in nodes if node.op == c.GGML_OP_FLASH_ATTN_BACK)
        # the node that autodiff saw, so that what it did to it holds for the forward alone too
        self.forward = c.ggml_new_graph_custom(context, NODES, False)
        c.ggml_build_forward_expand(self.forward, self.attention)

    def _count_traffic(self) -> None:
        sizes = {name: array.nbytes for name, (_, array) in self._uploads.items()}
        nbytes = self._library.c.ggml_nbytes
        forward = sum(sizes.values()) - sizes["d"] + int(nbytes(self.attention))
        self.traffic = {"forward": forward, "forward+backward": forward + sizes["d"] + int(nbytes(self.back))}

    def parts(self) -> dict[str, F32]:
        """o [S, N, H, Dv] and the parts of the backward, of the last run of `both`."""
        library, given = self._library, self._given
        return {"o": output_of(library, self.attention, given), **parts_of(library, self.back, given)}

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()


def _unlike_autodiff(given: Inputs) -> str:
    """Why autodiff builds no such pair, "" if it does."""
    if given.kv_count != given.sizes[4]:
        return "autodiff gives the gradients of all keys"
    return "autodiff adds the gradients of K and V where V is a view of K" if given.case.vview else ""
