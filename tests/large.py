"""FLASH_ATTN_BACK nodes of sizes that no host array holds: sources are filled and results are read in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from attention import Operator, parameters
from numpy.typing import NDArray

from pyharness.base.cuda import KERNEL_PATH, PATHS
from pyharness.case.cases import PARTS, TYPES
from pyharness.case.operands import Inputs
from pyharness.check import oracle
from pyharness.device import ggml

F64 = NDArray[np.float64]

PIECE = 64 << 20  # elements that are uploaded at once
PERIOD = 1_000_003  # of the numbers in a source: a prime, so that an offset that wrapped reads other ones


def numbers(seed: int, kind: str = "f32") -> NDArray[Any]:
    """A period of normal numbers; of a mask: half of it zeros, half -inf."""
    rng = np.random.default_rng(seed)
    if kind == "mask":
        return np.where(rng.random(PERIOD) < 0.5, -np.inf, 0).astype(np.float16)
    return rng.standard_normal(PERIOD, np.float32).astype(np.float16 if kind == "f16" else np.float32)


class Large:
    """The node with its sources on the device. Shapes are ggml's: q [D, N, H, S], mask [M, N, H, S]; d [D, H, N, S]."""

    def __init__(self, op: Operator, q: tuple[int, ...], k: tuple[int, ...], mask: tuple[int, ...] = (), row: int = 0):
        self.op, self.library = op, op.library
        c, ffi = self.c, self.ffi = self.library.c, self.library.ffi
        self.ctx = c.ggml_init({"mem_size": 4 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
        head, n, h, s = q
        self.scale = head**-0.5
        self.wide = row or head * h  # elements from one row of d to the next
        self.failed: list[str] = []
        self.periods: dict[str, NDArray[Any]] = {}
        self.tensors: dict[str, Any] = {}
        kinds = {"q": (q, "f32"), "k": (k, "f16"), "v": (k, "f16"), "d": ((self.wide, n, 1, s), "f32")}
        if mask:
            kinds["mask"] = (mask, "f16")
        for seed, (name, (ne, kind)) in enumerate(kinds.items()):
            self.tensors[name] = c.ggml_new_tensor_4d(self.ctx, int(TYPES[kind]), *ne)
            self.periods[name] = numbers(seed, "mask" if name == "mask" else kind)
        bytes_ = 4 * self.wide
        d = c.ggml_view_4d(self.ctx, self.tensors["d"], head, h, n, s, 4 * head, bytes_, n * bytes_, 0)
        sources = [self.tensors["q"], self.tensors["k"], self.tensors["v"], self.tensors.get("mask", ffi.NULL)]
        wanted = sum(1 << PARTS.index(part) for part in ("dq", "dk", "dv"))
        self.back = c.ggml_flash_attn_back(
            self.ctx, *sources, ffi.NULL, ffi.NULL, d, parameters(wanted, float(np.float32(self.scale)))
        )
        self.graph = c.ggml_new_graph_custom(self.ctx, 16, False)
        c.ggml_build_forward_expand(self.graph, self.back)
        self.views = {part: c.ggml_flash_attn_back_view(self.ctx, self.back, i) for i, part in enumerate(PARTS[:5])}
        backend = self.library.backend(op.device)
        self.buffer = c.ggml_backend_alloc_ctx_tensors(self.ctx, backend)
        assert self.buffer, "no memory"
        for name, tensor in self.tensors.items():
            self._fill(tensor, self.periods[name], backend)
        c.ggml_backend_free(backend)

    def _fill(self, tensor: Any, period: NDArray[Any], backend: Any) -> None:
        """Uploads some periods and lets the device repeat them."""
        c = self.c
        total = int(c.ggml_nelements(tensor))
        piece = np.resize(period, min(PIECE // PERIOD * PERIOD, total))
        data = self.ffi.cast("void *", piece.__array_interface__["data"][0])
        c.ggml_backend_tensor_set(tensor, data, 0, piece.nbytes)
        graph = c.ggml_new_graph_custom(self.ctx, 1024, False)
        for first in range(piece.size, total, piece.size):
            count = min(piece.size, total - first)
            views = [c.ggml_view_1d(self.ctx, tensor, count, place * piece.itemsize) for place in (0, first)]
            for view in (*views, copied := c.ggml_cpy(self.ctx, *views)):
                c.ggml_backend_view_init(view)
            c.ggml_build_forward_expand(graph, copied)
        if total > piece.size:
            assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
            c.ggml_backend_synchronize(backend)

    def source(self, name: str, first: int, *shape: int) -> NDArray[np.float32]:
        """Elements of a source from one on, in a shape."""
        count = int(np.prod(shape))
        period = self.periods[name]
        return np.resize(np.roll(period, -(first % PERIOD)), count).reshape(shape).astype(np.float32)

    def part(self, name: str, first: int, *shape: int) -> NDArray[np.float32]:
        """Elements of a part from one on, in a shape."""
        array = np.empty(shape, np.float32)
        data = self.library.ffi.cast("void *", array.__array_interface__["data"][0])
        self.c.ggml_backend_tensor_get(self.views[name], data, first * 4, array.nbytes)
        return array

    def runs(self) -> Iterator[str]:
        """Computes the node on each kernel path that takes it, on poisoned memory; yields the path's name."""
        c, patch = self.c, pytest.MonkeyPatch()
        taken = 0
        for path in PATHS:
            patch.setenv(KERNEL_PATH, path)
            backend = self.library.backend(self.op.device)
            if c.ggml_backend_supports_op(backend, self.back):
                c.ggml_backend_tensor_memset(self.back, ggml.GUARD_BYTE, 0, c.ggml_nbytes(self.back))
                status = c.ggml_backend_graph_compute(backend, self.graph)
                c.ggml_backend_synchronize(backend)
                assert status == c.GGML_STATUS_SUCCESS, path
                taken += 1
                yield path
            c.ggml_backend_free(backend)
        patch.undo()
        assert taken

    def check(self, given: Inputs, want: dict[str, F64], part: Callable[[str], NDArray[np.float32]], path: str) -> None:
        """Parts of a piece of the node against its reference; what fails is told when all paths are done."""
        got = {name: part(name) for name in want}
        result = ggml.Result(got, dict.fromkeys(want, 0), [], {}, "", path, 0.0, 0)
        self.failed += [f"{path}: {one}" for one in oracle.compare(given, result, want).values() if not one.passed]

    def near(self, got: NDArray[Any], want: NDArray[Any], path: str) -> None:
        """Numbers against others, within the operator's limit; what fails is told when all paths are done."""
        error, size = (np.square(x, dtype=np.float64).sum() for x in (got - want, want))
        if not error <= self.op.limit * size:
            self.failed.append(f"{path}: {error / size:.1e}")

    def __enter__(self) -> Large:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.c.ggml_backend_buffer_free(self.buffer)
        self.c.ggml_free(self.ctx)
        assert error or not self.failed, "\n".join(self.failed)
