"""What is timed on the tensors of a case: the operator and its pair, what else computes the same gradient: the
operator's other kernel paths, ggml's unfused graph, PyTorch's fused attention, FlashAttention-3.

Keys that no query sees may hold NaN in the inputs; peers that multiply them by zero get them as zeros.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import types
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from ..base import cuda
from ..case.cases import GGML
from ..case.operands import Inputs
from ..case.result import named_units
from ..device.ggml import Device, Library
from ..receipts.statement import OURS
from . import fa3, pair
from .bench import Bench, Sample

TORCH = ("torch", "fa3")
"""The peers that need PyTorch."""
NAMES = (*cuda.PATHS, "unfused", *TORCH)
F32 = NDArray[np.float32]

PARTS = {"forward": ("o",), "backward": ("dq", "dk", "dv"), "forward+backward": ("o", "dq", "dk", "dv")}
"""What each pass computes."""
PASSES = tuple(PARTS)


class Unavailable(Exception):
    """A peer that does not do this case; says why."""


class Peer:
    """One implementation on one case. A context manager: entering builds it or raises Unavailable.

    `who` names it, `paths` the kernel paths that its passes take, `bytes` are the device bytes of its tensors (None:
    unknown), `passes` the ways to time it, `traffic` the bytes of inputs and outputs of those passes that are compared
    with the device's ceilings."""

    who = ""
    paths: dict[str, str] = {}  # noqa: RUF012
    bytes: int | None = None
    passes: tuple[str, ...] = PASSES
    traffic: dict[str, int] = {}  # noqa: RUF012

    def name(self, way: str) -> str:
        """Who a measurement of this pass is of."""
        del way
        return self.who

    def __enter__(self) -> Peer:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def time(self, way: str) -> Sample:
        """Run a pass once; forward has run at least once before backward."""
        raise NotImplementedError

    def units(self, way: str) -> str:
        """Of a run of a pass what path_and_units adds to its path."""
        del way
        return ""

    def flush(self) -> None:
        """Push everything out of the last-level cache."""
        raise NotImplementedError

    def parts(self) -> dict[str, F32]:
        """What the last runs wrote: o [S, N, H, Dv], and dq, dk, dv in the operator's shapes."""
        raise NotImplementedError


class Plain:
    """A case's inputs as plain arrays, made once for all peers."""

    def __init__(self, given: Inputs) -> None:
        self.given = given

    @functools.cached_property
    def tail(self) -> bool:
        """Whether the mask is the causal one, aligned at the last row and key."""
        return causal_tail(self.given)

    @functools.cached_property
    def arrays(self) -> tuple[F32, F32, F32, F32]:
        """q [S, H, N, Dk], k [S, Hkv, M, Dk] and v [S, Hkv, M, Dv] dequantised, d [S, H, N, Dv]."""
        q, k, v, d = self.given.shown()
        return q, k, v, d.transpose(0, 2, 1, 3)


def ours(library: Library, device: Device, plain: Plain, threads: int, path: str = "") -> Iterator[Peer]:
    """The operator alone and the pair, not yet entered; `path` holds them to a kernel path of the CUDA backend."""
    yield Operator(library, device, plain, threads, path)
    yield Pair(library, device, plain, threads, path)


def all_of(names: Sequence[str], library: Library, device: Device, plain: Plain, threads: int) -> Iterator[Peer]:
    """The peers of these names for a device, not yet entered."""
    kind = "bfloat16" if plain.given.type_K == "bf16" else "float16"
    for name in names:
        if name in cuda.PATHS:
            yield from ours(library, device, plain, threads, name)
        elif name == "unfused":
            yield Unfused(library, device, plain, threads)
        elif name == "torch":
            yield from torch_peers(device, plain, kind)
        else:
            yield Fa3(device, plain, kind)
            yield Fa3(device, plain, kind, deterministic=True)


def _plain_attention(given: Inputs) -> None:
    """Raise Unavailable for what neither ggml's SOFT_MAX_BACK nor the peers on a GPU differentiate."""
    for present, name in (
        (given.softcap > 0, "softcap"),
        (given.sinks is not None, "sinks"),
        (given.max_bias > 0, "ALiBi"),
    ):
        if present:
            raise Unavailable(f"no {name} there")


# ---- ours ----


class _Ours(Peer):
    """What holds a node of the operator to a kernel path of the CUDA backend, or lets the device choose."""

    def __init__(self, library: Library, device: Device, plain: Plain, threads: int, path: str) -> None:
        self._library, self._device, self._plain, self._threads = library, device, plain, threads
        self._stack = contextlib.ExitStack()
        self.who = path

    def name(self, way: str) -> str:
        """The path that it is held to, the nodes of the pass where the device chooses."""
        return self.who or OURS[way]

    def __enter__(self) -> _Ours:
        with contextlib.ExitStack() as stack:
            if self.who:
                if cuda.ordinal(self._device.name) is None:
                    raise Unavailable(f"{self._device.name} has no kernel paths")
                stack.enter_context(mock.patch.dict(os.environ, {cuda.KERNEL_PATH: self.who}))
            backend = self._open(stack)
            self._bench = stack.enter_context(Bench(self._library, self._device, backend))
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: contextlib.ExitStack) -> Any:
        """Build the graphs; returns their backend."""
        raise NotImplementedError

    def units(self, way: str) -> str:
        """Of a run of a pass what path_and_units adds to its path."""
        if cuda.ordinal(self._device.name) is None:
            return ""
        self._library.units(self._device)
        self.time(way)
        return named_units(self._library.units(self._device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def flush(self) -> None:
        """Write twice the last-level cache."""
        self._bench.flush()


class Operator(_Ours):
    """FLASH_ATTN_BACK alone, from q, k, v and dO, with K and V in the case's types."""

    passes = ("backward",)

    def _open(self, stack: contextlib.ExitStack) -> Any:
        given = self._plain.given
        refusal = self._library.refusal(self._device, given)
        if refusal is not None:
            raise Unavailable(refusal)
        self._session = stack.enter_context(self._library.prepare(self._device, given, self._threads))
        self.paths, self.bytes = {"backward": self._session.path}, self._session.bytes
        read: list[NDArray[Any] | None] = [given.q, given.k, given.v, given.mask, given.sinks, given.o, given.d]
        shared = given.v.nbytes if given.case.vview else 0
        written = self._session.result_bytes
        self.traffic = {"backward": sum(a.nbytes for a in read if a is not None) - shared + written}
        return self._session.backend

    def time(self, way: str) -> Sample:
        """Run the operator once."""
        del way
        return self._bench.time(self._session.graph)

    def parts(self) -> dict[str, F32]:
        """Download the gradients of the last run."""
        return self._session.result().parts


class Pair(_Ours):
    """FLASH_ATTN_EXT and FLASH_ATTN_BACK in one graph, and its forward alone; see pair.py."""

    passes = ("forward", "forward+backward")

    def _open(self, stack: contextlib.ExitStack) -> Any:
        plain = self._plain
        self._pair = stack.enter_context(
            pair.Pair(self._library, self._device, plain.given, plain.arrays, self._threads)
        )
        if self._pair.refusal:
            raise Unavailable(self._pair.refusal)
        self.bytes, self.traffic = self._pair.bytes, self._pair.traffic
        forward, back = self._pair.forward_path or GGML, self._pair.path
        self.paths = {"forward": forward, "forward+backward": back if forward == back else f"{forward} + {back}"}
        return self._pair.backend

    def time(self, way: str) -> Sample:
        """Compute the graph of a pass once."""
        return self._bench.time(self._pair.forward if way == "forward" else self._pair.both)

    def parts(self) -> dict[str, F32]:
        """Download the output and the gradients of the last runs."""
        return self._pair.parts()


# ---- ggml's own operators ----


class Unfused(Peer):
    """MUL_MAT, SOFT_MAX and their gradients through OUT_PROD and SOFT_MAX_BACK, as ggml's autodiff chains them.

    K and V are F32, which OUT_PROD asks for. The query heads of a group stand as rows of one matrix, so that grouped
    KV heads cost no copies. Two F32 buffers of queries times keys a head live: P and dP, which becomes dS in place."""

    who = "unfused"

    def __init__(self, library: Library, device: Device, plain: Plain, threads: int) -> None:
        self._library, self._device, self._plain, self._threads = library, device, plain, threads
        self._given = plain.given
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
        given, library = self._given, self._library
        c, ffi = library.c, library.ffi
        s, h, hkv, n, m = given.sizes
        dk, dv, rows = given.q.shape[3], given.d.shape[3], n * (h // hkv)
        leaves = self._context()
        q = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dk, rows, hkv, s)
        k = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dk, m, hkv, s)
        v = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dv, m, hkv, s)
        d = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F32, dv, rows, hkv, s)
        mask = ffi.NULL
        uploads: list[tuple[Any, NDArray[Any]]] = list(zip((q, k, v, d), self._plain.arrays, strict=True))
        if given.mask is not None:
            mask = c.ggml_new_tensor_4d(leaves, c.GGML_TYPE_F16, *reversed(given.mask.shape))
            uploads.append((mask, given.mask))
        buffer = c.ggml_backend_alloc_ctx_tensors(leaves, self._backend)
        if not buffer:
            raise Unavailable("its inputs do not fit into memory")
        self._undo.append(lambda: c.ggml_backend_buffer_free(buffer))
        for tensor, array in uploads:
            library.upload(tensor, np.ascontiguousarray(array))
        nodes = self._context()

        def split(x: Any) -> Any:
            """[M, N * group, Hkv, S] as [M, N, H, S]."""
            return c.ggml_reshape_4d(nodes, x, m, n, h, s)

        def joined(x: Any) -> Any:
            return c.ggml_reshape_4d(nodes, x, m, rows, hkv, s)

        p = c.ggml_soft_max_ext(nodes, split(c.ggml_mul_mat(nodes, k, q)), mask, given.scale, 0.0)
        o = c.ggml_mul_mat(nodes, c.ggml_cont(nodes, c.ggml_transpose(nodes, v)), joined(p))
        for tensor in (p, o):
            c.ggml_set_output(tensor)
        forward, forward_bytes = self._graph(nodes, [o])

        kept = c.ggml_new_tensor_4d(nodes, c.GGML_TYPE_F32, m, n, h, s)  # P as a leaf: no forward in the backward
        c.ggml_backend_tensor_alloc(p.buffer, kept, p.data)
        ds = joined(c.ggml_soft_max_ext_back(nodes, split(c.ggml_mul_mat(nodes, v, d)), kept, given.scale, 0.0))
        wanted: dict[str, Callable[[], Any]] = {
            "dq": lambda: c.ggml_out_prod(nodes, k, c.ggml_transpose(nodes, ds)),
            "dk": lambda: c.ggml_out_prod(nodes, q, ds),
            "dv": lambda: c.ggml_out_prod(nodes, d, joined(kept)),
        }
        gradients = {name: make() for name, make in wanted.items() if name in given.grads}
        for tensor in gradients.values():
            c.ggml_set_output(tensor)
        backward, backward_bytes = self._graph(nodes, list(gradients.values()))
        self._outputs = {"o": o, **gradients}
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
        """Run the graph of a pass once; of both, one graph after the other."""
        host, device = zip(*(self._bench.time(self._graphs[one]) for one in way.split("+")), strict=True)
        return sum(host), None if None in device else sum(device)

    def flush(self) -> None:
        """Write twice the last-level cache."""
        self._bench.flush()

    def parts(self) -> dict[str, F32]:
        """Download the output of the last forward and the gradients of the last backward."""
        given = self._given
        s, h, hkv, n, m = given.sizes
        dk, dv = given.q.shape[3], given.d.shape[3]
        shapes = {"o": (s, h, n, dv), "dq": (s, h, n, dk), "dk": (s, hkv, m, dk), "dv": (s, hkv, m, dv)}
        found = {
            name: self._library.download(tensor, np.float32).reshape(shapes[name])
            for name, tensor in self._outputs.items()
        }
        return found | {"o": found["o"].transpose(0, 2, 1, 3)}


# ---- PyTorch ----


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        raise Unavailable("PyTorch is not installed") from e
    return torch


def preload() -> None:
    """Import PyTorch where it is installed. To be called before ggml's libraries are loaded, whose symbols are global:
    imported after them it may end in `free(): invalid pointer`."""
    with contextlib.suppress(Unavailable):
        _torch()


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


LEAD = 400_000
"""Cycles that a GPU spins before a sample of a peer, so that the host is ahead and launches are not in the time."""


def _cuda_time(torch: Any, run: Callable[[], Any]) -> Sample:
    """Device nanoseconds by CUDA events; the host's time is that of the launches, and none is given."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LEAD)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return None, round(first.elapsed_time(last) * 1e6)


def causal_tail(given: Inputs) -> bool:
    """Whether the mask lets row i see exactly the keys j <= M - N + i, in every head and sequence."""
    _, _, _, n, m = given.sizes
    if given.mask is None:
        return False
    keys = np.arange(m)
    return all((given.mask[:, :, i].view(np.uint16) == np.where(keys <= m - n + i, 0, 0xFC00)).all() for i in range(n))


def torch_peers(device: Device, plain: Plain, kind: str = "float16") -> Iterator[Peer]:
    """SDPA's three implementations in `kind` on a GPU, PyTorch's choice in float32 on a CPU."""
    index = cuda.ordinal(device.name)
    if index is None:
        yield TorchPeer(None, plain, "", "float32")
        return
    for kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        yield TorchPeer(index, plain, kernel, kind)


class _Torch(Peer):
    """Tensors of a case in PyTorch. K and V are dequantised and, like Q and dO, rounded to the type before the clock
    starts. `_tensors` holds what the device's memory is freed of in the end."""

    def __init__(self, index: int | None, plain: Plain, kind: str) -> None:
        self._index, self._plain, self._given, self._kind = index, plain, plain.given, kind
        self._tensors = types.SimpleNamespace()

    def __enter__(self) -> _Torch:
        torch = self._torch = _torch()
        _plain_attention(self._given)
        if self._index is not None:
            if not torch.cuda.is_available():
                raise Unavailable("this PyTorch has no CUDA")
            torch.cuda.set_device(self._index)
        try:
            self._build()
            if self._index is not None:
                size = 2 * cuda.l2_bytes(self._index)
                self._tensors.flusher = torch.empty(size, dtype=torch.uint8, device=self._place)
            self._both()
        except (RuntimeError, ValueError, TypeError) as e:  # no kernel for this shape, or out of memory
            self.__exit__(None, None, None)
            raise Unavailable((str(e).splitlines() or [type(e).__name__])[0][:200]) from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors = types.SimpleNamespace()
        if self._index is not None:
            self._torch.cuda.empty_cache()

    @property
    def _place(self) -> str:
        return "cpu" if self._index is None else f"cuda:{self._index}"

    def _tensor(self, array: NDArray[Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(array)).to(self._place, getattr(self._torch, self._kind))

    def _build(self) -> None:
        """Make the tensors."""
        raise NotImplementedError

    def _forward(self) -> None:
        raise NotImplementedError

    def _backward(self) -> None:
        raise NotImplementedError

    def _both(self) -> None:
        self._forward()
        self._backward()

    def _results(self) -> tuple[Any, ...]:
        """o [S, N, H, Dv], dq [S, H, N, Dk], dk and dv [S, Hkv, M, D]."""
        raise NotImplementedError

    def time(self, way: str) -> Sample:
        """Run a pass once; on a GPU between CUDA events."""
        run = {"forward": self._forward, "backward": self._backward, "forward+backward": self._both}[way]
        if self._index is not None:
            return _cuda_time(self._torch, run)
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start, None

    def flush(self) -> None:
        """Write twice the L2 cache, 64 MiB on a CPU."""
        if self._index is not None:
            self._tensors.flusher.zero_()
            self._torch.cuda.synchronize()
        else:
            np.zeros(64 * 2**20, np.uint8).fill(1)

    def parts(self) -> dict[str, F32]:
        """Download the output and the gradients of the last runs as float32."""
        given = self._given
        window = slice(given.kv_first, given.kv_first + given.kv_count)
        names = PARTS["forward+backward"]
        found = {name: x.detach().float().cpu().numpy() for name, x in zip(names, self._results(), strict=True)}
        wanted = {"o", *given.grads}
        return {name: a[:, :, window] if name in ("dk", "dv") else a for name, a in found.items() if name in wanted}


class TorchPeer(_Torch):
    """scaled_dot_product_attention and its gradient; grouped heads go in as such or, where that is refused, are
    expanded inside the clock."""

    def __init__(self, index: int | None, plain: Plain, kernel: str, kind: str) -> None:
        super().__init__(index, plain, kind)
        self._kernel = kernel
        self.who = f"torch {kernel.removesuffix('_ATTENTION').lower() or 'CPU'} {kind}"

    def _build(self) -> None:
        given, t, tail = self._given, self._tensors, self._plain.tail
        _, h, hkv, n, m = given.sizes
        if given.mask is not None and not tail and self._kernel == "FLASH_ATTENTION":
            raise Unavailable("no mask but a causal one there")
        *leaves, d = self._plain.arrays
        t.leaves = tuple(self._tensor(x).requires_grad_(True) for x in leaves)
        t.d = self._tensor(d)
        t.mask = None
        if tail and n != m:
            from torch.nn.attention.bias import causal_lower_right  # type: ignore[import-not-found,unused-ignore]

            t.mask = causal_lower_right(n, m)
        elif given.mask is not None and not tail:
            t.mask = self._tensor(given.mask[:, :, :n])
        self._causal = tail and n == m
        self._expand = False
        try:
            self._forward()
        except (RuntimeError, ValueError, TypeError):
            self._expand = h != hkv
            self._forward()
        if self._expand:
            self.who += " (heads expanded)"

    def _forward(self) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found,unused-ignore]

        q, k, v = self._tensors.leaves
        if self._expand:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        options = {"is_causal": True} if self._causal else {"attn_mask": self._tensors.mask}
        options |= {"scale": self._given.scale, "enable_gqa": k.shape[1] != q.shape[1]}
        only = sdpa_kernel([getattr(SDPBackend, self._kernel)]) if self._kernel else contextlib.nullcontext()
        with only:
            self._tensors.out = self._torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    def _backward(self) -> None:
        t = self._tensors
        t.gradients = self._torch.autograd.grad(t.out, t.leaves, t.d, retain_graph=True)

    def _results(self) -> tuple[Any, ...]:
        return (self._tensors.out.transpose(1, 2), *self._tensors.gradients)


# ---- FlashAttention-3 ----


class Fa3(_Torch):
    """FlashAttention-3 from its wheel; PyTorch gives memory, stream and clock. Not deterministic, dQ is summed in any
    order; `deterministic` is its mode that keeps one."""

    def __init__(self, device: Device, plain: Plain, kind: str, deterministic: bool = False) -> None:
        super().__init__(cuda.ordinal(device.name), plain, kind)
        self._device, self._deterministic = device, deterministic
        self.who = "fa3" + (f" {kind}" if kind != "float16" else "") + (" deterministic" if deterministic else "")

    def __enter__(self) -> Fa3:
        given = self._given
        path = fa3.find()
        if self._index is None:
            raise Unavailable(f"{self._device.name} is no GPU")
        if path is None:
            raise Unavailable(f"FlashAttention-3 is not installed: it is in the package {fa3.WHEEL}")
        dk, dv = given.q.shape[3], given.d.shape[3]
        if dk != dv or dk not in fa3.HEAD_SIZES:
            raise Unavailable(f"no head sizes but {', '.join(map(str, fa3.HEAD_SIZES))} there, one for K and V")
        if self._deterministic and dk >= 256:
            raise Unavailable("not deterministic at head size 256")
        self._path = path
        super().__enter__()
        return self

    def _build(self) -> None:
        torch, t, index = self._torch, self._tensors, self._index
        assert index is not None
        if torch.cuda.get_device_capability(index) != (9, 0):
            raise Unavailable("FlashAttention-3 needs compute capability 9.0")
        if self._given.mask is not None and not self._plain.tail:
            raise Unavailable("no mask but a causal one there")
        s, h, _, n, _ = self._given.sizes

        def new(*shape: int) -> Any:
            return torch.empty(shape, dtype=torch.float32, device=self._place)

        t.q, t.k, t.v, t.d = (self._tensor(x.transpose(0, 2, 1, 3)) for x in self._plain.arrays)
        t.o, t.dq, t.dk, t.dv = (torch.empty_like(x) for x in (t.q, t.q, t.k, t.v))
        t.lse, t.unused = new(s, h, n), (new(1, 1, 1, 1), new(1, 1, 1))
        rows = s * h * (-(-n // fa3.ROWS) + 1) * fa3.ROWS
        t.statistics = new(rows), new(rows)
        t.scratch = {}

        def stream() -> int:
            return int(torch.cuda.current_stream().cuda_stream)

        def scratch(size: int, piece: int) -> int:
            if (size, piece) not in t.scratch:
                t.scratch[size, piece] = torch.empty(size, dtype=torch.uint8, device=self._place)
            return int(t.scratch[size, piece].data_ptr())

        def buffers(*tensors: Any) -> list[fa3.Buffer]:
            return [fa3.Buffer(str(x.dtype).removeprefix("torch."), int(x.data_ptr()), tuple(x.shape)) for x in tensors]

        try:
            library = fa3.Library(self._path, index, stream, scratch)
        except OSError as e:  # a library of CUDA that it needs is not here
            raise Unavailable(f"{self._path.name}: {e}") from e
        scale, causal = float(self._given.scale), self._given.mask is not None
        t.forward = library.forward(buffers(t.q, t.k, t.v), buffers(t.o, t.lse, *t.unused), scale=scale, causal=causal)
        t.backward = library.backward(
            buffers(t.d, t.q, t.k, t.v, t.o, t.lse),
            buffers(t.dq, t.dk, t.dv, *t.statistics),
            scale=scale,
            causal=causal,
            deterministic=self._deterministic,
        )

    def _forward(self) -> None:
        self._tensors.forward()

    def _backward(self) -> None:
        self._tensors.backward()

    def _results(self) -> tuple[Any, ...]:
        t = self._tensors
        return (t.o, *(x.transpose(1, 2) for x in (t.dq, t.dk, t.dv)))
