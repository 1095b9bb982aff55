"""What else computes the same gradient, on the same tensors: the operator's other kernel paths, ggml's unfused graph,
PyTorch's fused attention.

Keys that no query sees may hold NaN in the inputs; peers that multiply them by zero get them as zeros.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from . import cuda
from .bench import Bench, Sample
from .inputs import Inputs

if TYPE_CHECKING:
    from .ggml import Device, Library

NAMES = (*cuda.PATHS, "unfused", "torch")
F32 = NDArray[np.float32]


class Unavailable(Exception):
    """A peer that does not do this case; says why."""


class Peer:
    """One implementation on one case. A context manager: entering builds it or raises Unavailable.

    `who` names it, `bytes` are the device bytes of its tensors (None: unknown), `passes` the ways to time it."""

    who = ""
    bytes: int | None = None
    passes: tuple[str, ...] = ("forward", "backward")

    def __enter__(self) -> Peer:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def time(self, way: str) -> Sample:
        """Run a pass once; forward has run at least once before backward."""
        raise NotImplementedError

    def flush(self) -> None:
        """Push everything out of the last-level cache."""
        raise NotImplementedError

    def parts(self) -> dict[str, F32]:
        """dq, dk, dv of the last backward in the operator's shapes."""
        raise NotImplementedError


def all_of(names: Sequence[str], library: Library, device: Device, given: Inputs, threads: int) -> Iterator[Peer]:
    """The peers of these names for a device, not yet entered."""
    for name in names:
        if name in cuda.PATHS:
            yield KernelPath(library, device, given, threads, name)
        elif name == "unfused":
            yield Unfused(library, device, given, threads)
        else:
            yield from torch_peers(device, given, "bfloat16" if given.type_K == "bf16" else "float16")


def _arrays(given: Inputs) -> tuple[F32, F32, F32, F32]:
    q, k, v, d = given.shown()
    return q, k, v, d.transpose(0, 2, 1, 3)


def _plain_attention(given: Inputs) -> None:
    """Raise Unavailable for what neither ggml's SOFT_MAX_BACK nor PyTorch's SDPA differentiates."""
    for present, name in (
        (given.softcap > 0, "softcap"),
        (given.sinks is not None, "sinks"),
        (given.max_bias > 0, "ALiBi"),
    ):
        if present:
            raise Unavailable(f"no {name} there")


# ---- the operator ----


class KernelPath(Peer):
    """The operator held to one kernel path of the CUDA backend."""

    passes = ("backward",)

    def __init__(self, library: Library, device: Device, given: Inputs, threads: int, path: str) -> None:
        self._library, self._device, self._given, self._threads = library, device, given, threads
        self.who = path
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> KernelPath:
        if cuda.ordinal(self._device.name) is None:
            raise Unavailable(f"{self._device.name} has no kernel paths")
        self._stack.enter_context(mock.patch.dict(os.environ, {cuda.KERNEL_PATH: self.who}))
        refusal = self._library.refusal(self._device, self._given)
        if refusal is not None:
            self._stack.close()
            raise Unavailable(refusal)
        self._session = self._stack.enter_context(self._library.prepare(self._device, self._given, self._threads))
        self._bench = self._stack.enter_context(Bench(self._library, self._device, self._session.backend))
        self.bytes = self._session.bytes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def time(self, way: str) -> Sample:
        """Run the operator once."""
        del way
        return self._bench.time(self._session.graph)

    def flush(self) -> None:
        """Write twice the L2 cache."""
        self._bench.flush()

    def parts(self) -> dict[str, F32]:
        """Download the gradients of the last run."""
        return {name: part for name, part in self._session.result().parts.items() if name in ("dq", "dk", "dv")}


# ---- ggml's own operators ----


class Unfused(Peer):
    """MUL_MAT, SOFT_MAX and their gradients through OUT_PROD and SOFT_MAX_BACK, as ggml's autodiff chains them.

    K and V are F32, which OUT_PROD asks for. The query heads of a group stand as rows of one matrix, so that grouped
    KV heads cost no copies. Two F32 buffers of queries times keys a head live: P and dP, which becomes dS in place."""

    who = "unfused"

    def __init__(self, library: Library, device: Device, given: Inputs, threads: int) -> None:
        self._library, self._device, self._given, self._threads = library, device, given, threads
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Unfused:
        given, library, c = self._given, self._library, self._library.c
        s, h, hkv, n, m = given.sizes
        _plain_attention(given)
        if given.kv_count != m:
            raise Unavailable("no key window there")
        need = 4 * (2 * s * h * n * m + 2 * s * hkv * m * (given.q.shape[3] + given.d.shape[3]))
        if need > self._device.memory_free:
            raise Unavailable(
                f"needs {need / 2**30:.0f} GiB, {self._device.name} has {self._device.memory_free / 2**30:.0f} GiB free"
            )
        try:
            self._backend = library.backend(self._device, self._threads)
            self._undo.append(lambda: c.ggml_backend_free(self._backend))
            self._bench = Bench(library, self._device, self._backend)
            self._undo.append(lambda: self._bench.__exit__(None, None, None))
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()

    def _context(self) -> Any:
        c = self._library.c
        size = 64 * c.ggml_tensor_overhead() + 2 * c.ggml_graph_overhead_custom(64, False)
        context = c.ggml_init({"mem_size": size, "mem_buffer": self._library.ffi.NULL, "no_alloc": True})
        self._undo.append(lambda: c.ggml_free(context))
        return context

    def _build(self) -> None:
        given, c, ffi = self._given, self._library.c, self._library.ffi
        s, h, hkv, n, m = given.sizes
        dk, dv, rows = given.q.shape[3], given.d.shape[3], n * (h // hkv)
        leaves = self._context()
        q = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dk, rows, hkv, s)
        k = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dk, m, hkv, s)
        v = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dv, m, hkv, s)
        d = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dv, rows, hkv, s)
        mask = ffi.NULL
        uploads: list[tuple[Any, NDArray[Any]]] = list(zip((q, k, v, d), _arrays(given), strict=True))
        if given.mask is not None:
            mask = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F16, *reversed(given.mask.shape))
            uploads.append((mask, given.mask))
        buffer = c.ggml_backend_alloc_ctx_tensors(leaves, self._backend)
        if not buffer:
            raise Unavailable("its inputs do not fit into memory")
        self._undo.append(lambda: c.ggml_backend_buffer_free(buffer))
        for tensor, array in uploads:
            array = np.ascontiguousarray(array)
            data = ffi.cast("void *", array.__array_interface__["data"][0])
            c.ggml_backend_tensor_set(tensor, data, 0, array.nbytes)
        nodes = self._context()

        def split(x: Any) -> Any:
            """[M, N * group, Hkv, S] as [M, N, H, S]."""
            return c.ggml_reshape_4d(nodes, x, m, n, h, s)

        def joined(x: Any) -> Any:
            return c.ggml_reshape_4d(nodes, x, m, rows, hkv, s)

        p = c.ggml_soft_max_ext(nodes, split(c.ggml_mul_mat(nodes, k, q)), mask, given.scale, 0.0)
        o = c.ggml_mul_mat(nodes, c.ggml_cont(nodes, c.ggml_transpose(nodes, v)), joined(p))
        c.ggml_set_output(p)
        forward, forward_bytes = self._graph(nodes, [o])

        kept = c.ggml_new_tensor_4d(nodes, c.GGML_TYPE_F32, m, n, h, s)  # P as a leaf: no forward in the backward
        c.ggml_backend_tensor_alloc(p.buffer, kept, p.data)
        ds = joined(c.ggml_soft_max_ext_back(nodes, split(c.ggml_mul_mat(nodes, v, d)), kept, given.scale, 0.0))
        wanted: dict[str, Callable[[], Any]] = {
            "dq": lambda: c.ggml_out_prod(nodes, k, c.ggml_transpose(nodes, ds)),
            "dk": lambda: c.ggml_out_prod(nodes, q, ds),
            "dv": lambda: c.ggml_out_prod(nodes, d, joined(kept)),
        }
        self._outputs = {name: make() for name, make in wanted.items() if name in given.grads}
        for tensor in self._outputs.values():
            c.ggml_set_output(tensor)
        backward, backward_bytes = self._graph(nodes, list(self._outputs.values()))
        self._graphs = {"forward": forward, "backward": backward}
        self.bytes = int(c.ggml_backend_buffer_get_size(buffer)) + forward_bytes + backward_bytes
        self.time("forward")

    def _graph(self, nodes: Any, ends: list[Any]) -> tuple[Any, int]:
        c = self._library.c
        graph = c.ggml_new_graph_custom(nodes, 64, False)
        for tensor in ends:
            c.ggml_build_forward_expand(graph, tensor)
        for i in range(c.ggml_graph_n_nodes(graph)):
            node = c.ggml_graph_node(graph, i)
            if not c.ggml_backend_dev_supports_op(self._library.handle(self._device), node):
                name = self._library.ffi.string(c.ggml_op_name(node.op)).decode()
                raise Unavailable(f"{self._device.name} does not run {name} of this shape")
        allocator = c.ggml_gallocr_new(c.ggml_backend_get_default_buffer_type(self._backend))
        self._undo.append(lambda: c.ggml_gallocr_free(allocator))
        if not c.ggml_gallocr_alloc_graph(allocator, graph):
            raise Unavailable("its buffers do not fit into memory")
        return graph, int(c.ggml_gallocr_get_buffer_size(allocator, 0))

    def time(self, way: str) -> Sample:
        """Run the graph of a pass once."""
        return self._bench.time(self._graphs[way])

    def flush(self) -> None:
        """Write twice the last-level cache."""
        self._bench.flush()

    def parts(self) -> dict[str, F32]:
        """Download the gradients of the last backward."""
        given, c, ffi = self._given, self._library.c, self._library.ffi
        s, h, hkv, n, m = given.sizes
        dk, dv = given.q.shape[3], given.d.shape[3]
        shapes = {"dq": (s, h, n, dk), "dk": (s, hkv, m, dk), "dv": (s, hkv, m, dv)}
        found = {}
        for name, tensor in self._outputs.items():
            array = np.empty(shapes[name], np.float32)
            c.ggml_backend_tensor_get(tensor, ffi.cast("void *", array.__array_interface__["data"][0]), 0, array.nbytes)
            found[name] = array
        return found


# ---- PyTorch ----


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        raise Unavailable("PyTorch is not installed") from e
    return torch


def torch_ceilings(index: int) -> dict[str, Any] | None:
    """FLOP/s of an fp16 product of 8192^3 and bytes/s of a copy of 2 GiB (read and written) through PyTorch.

    The median of ten each; None without PyTorch on this GPU."""
    try:
        torch = _torch()
    except Unavailable:
        return None
    if not torch.cuda.is_available():
        return None
    with torch.cuda.device(index):
        flop = 2 * 8192**3 / (_product(torch) * 1e-9)
        moved = 2 * 4 * 2**29 / (_copy(torch) * 1e-9)
        torch.cuda.empty_cache()
    return {
        "compute": flop,
        "memory": moved,
        "how": f"PyTorch {torch.__version__}: fp16 product of 8192^3, copy of 2 GiB counting reads and writes",
    }


def _product(torch: Any) -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    return _median(torch, lambda: torch.matmul(a, a))


def _copy(torch: Any) -> float:
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    return _median(torch, lambda: y.copy_(x))


def _median(torch: Any, run: Callable[[], Any]) -> float:
    """Nanoseconds by CUDA events."""
    run()
    return float(sorted(_cuda_time(torch, run)[1] or 0 for _ in range(10))[5])


def _cuda_time(torch: Any, run: Callable[[], Any]) -> Sample:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return time.perf_counter_ns() - start, round(first.elapsed_time(last) * 1e6)


def causal_tail(given: Inputs) -> bool:
    """Whether the mask lets row i see exactly the keys j <= M - N + i, in every head and sequence."""
    _, _, _, n, m = given.sizes
    if given.mask is None:
        return False
    keys = np.arange(m)
    return all((given.mask[:, :, i].view(np.uint16) == np.where(keys <= m - n + i, 0, 0xFC00)).all() for i in range(n))


def torch_peers(device: Device, given: Inputs, kind: str = "float16") -> Iterator[Peer]:
    """SDPA's three implementations in `kind` on a GPU, PyTorch's choice in float32 on a CPU."""
    index = cuda.ordinal(device.name)
    plain = Plain(given)
    if index is None:
        yield TorchPeer(None, plain, "", "float32")
        return
    for kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        yield TorchPeer(index, plain, kernel, kind)


class Plain:
    """What PyTorch's peers take of a case, made once for all of them."""

    def __init__(self, given: Inputs) -> None:
        self.given = given

    @functools.cached_property
    def tail(self) -> bool:
        """Whether the mask is the causal one, aligned at the last row and key."""
        return causal_tail(self.given)

    @functools.cached_property
    def arrays(self) -> tuple[F32, F32, F32, F32]:
        """q [S, H, N, Dk], k [S, Hkv, M, Dk] and v [S, Hkv, M, Dv] dequantised, d [S, H, N, Dv]."""
        return _arrays(self.given)


class TorchPeer(Peer):
    """scaled_dot_product_attention and its gradient. K and V are dequantised and, like Q and dO, rounded to the type
    before the clock starts; grouped heads go in as such or, where that is refused, are expanded inside the clock."""

    def __init__(self, index: int | None, plain: Plain, kernel: str, kind: str) -> None:
        self._index, self._plain, self._kernel, self._kind = index, plain, kernel, kind
        self._given = plain.given
        self.who = f"torch {kernel.removesuffix('_ATTENTION').lower() or 'CPU'} {kind}"

    def __enter__(self) -> TorchPeer:
        given = self._given
        torch = self._torch = _torch()
        _plain_attention(given)
        _, h, hkv, n, m = given.sizes
        if self._index is not None and not torch.cuda.is_available():
            raise Unavailable("this PyTorch has no CUDA")
        place = "cpu" if self._index is None else f"cuda:{self._index}"
        tail = self._plain.tail
        if given.mask is not None and not tail and self._kernel == "FLASH_ATTENTION":
            raise Unavailable("no mask but a causal one there")
        if self._index is not None:
            torch.cuda.set_device(self._index)

        def tensor(array: NDArray[Any], grad: bool = True) -> Any:
            found = torch.from_numpy(np.ascontiguousarray(array)).to(place, getattr(torch, self._kind))
            return found.requires_grad_(grad)

        try:
            *leaves, d = self._plain.arrays
            self._q, self._k, self._v = (tensor(x) for x in leaves)
            self._d = tensor(d, grad=False)
            self._mask: Any = None
            if tail and n != m:
                from torch.nn.attention.bias import causal_lower_right  # type: ignore[import-not-found,unused-ignore]

                self._mask = causal_lower_right(n, m)
            elif given.mask is not None and not tail:
                self._mask = tensor(given.mask[:, :, :n], grad=False)
            self._causal = tail and n == m
            self._expand = False
            self._flusher = (
                None
                if self._index is None
                else torch.empty(2 * cuda.l2_bytes(self._index), dtype=torch.uint8, device=place)
            )
            try:
                self._out = self._forward()
            except (RuntimeError, ValueError, TypeError):
                self._expand = h != hkv
                self._out = self._forward()
            self._grads = self._backward()
        except (RuntimeError, ValueError, TypeError) as e:  # no kernel for this shape, or out of memory
            self.__exit__(None, None, None)
            raise Unavailable(str(e).splitlines()[0][:200]) from e
        if self._expand:
            self.who += " (heads expanded)"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in ("_q", "_k", "_v", "_d", "_mask", "_out", "_grads", "_flusher"):
            self.__dict__.pop(name, None)
        if self._index is not None:
            self._torch.cuda.empty_cache()

    def _forward(self) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found,unused-ignore]

        k, v = self._k, self._v
        if self._expand:
            group = self._q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attention = self._torch.nn.functional.scaled_dot_product_attention
        options = {"is_causal": True} if self._causal else {"attn_mask": self._mask}
        options |= {"scale": self._given.scale, "enable_gqa": k.shape[1] != self._q.shape[1]}
        if not self._kernel:
            return attention(self._q, k, v, **options)
        with sdpa_kernel([getattr(SDPBackend, self._kernel)]):
            return attention(self._q, k, v, **options)

    def _backward(self) -> Any:
        return self._torch.autograd.grad(self._out, (self._q, self._k, self._v), self._d, retain_graph=True)

    def time(self, way: str) -> Sample:
        """Run a pass once; on a GPU between CUDA events."""

        def run() -> None:
            if way == "forward":
                self._out = self._forward()
            else:
                self._grads = self._backward()

        if self._index is not None:
            return _cuda_time(self._torch, run)
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start, None

    def flush(self) -> None:
        """Write twice the L2 cache, 64 MiB on a CPU."""
        if self._flusher is not None:
            self._flusher.zero_()
            self._torch.cuda.synchronize()
        else:
            np.zeros(64 * 2**20, np.uint8).fill(1)

    def parts(self) -> dict[str, F32]:
        """Download the gradients of the last backward as float32."""
        names = ("dq", "dk", "dv")
        window = slice(self._given.kv_first, self._given.kv_first + self._given.kv_count)
        found = {name: g.float().cpu().numpy() for name, g in zip(names, self._grads, strict=True)}
        return {name: a if name == "dq" else a[:, :, window] for name, a in found.items() if name in self._given.grads}
