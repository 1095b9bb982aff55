"""What the tests share: attention inputs written out by hand, runs of them, and processes that must die."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from pyharness.base.cuda import PATHS
from pyharness.case import cases, reference
from pyharness.case.cases import Case
from pyharness.case.operands import Inputs
from pyharness.check import oracle
from pyharness.device import ggml

NINF: float = -np.inf


def case(text: str) -> Case:
    """A case from its keys without the operator's name."""
    return Case.parse(f"FLASH_ATTN_BACK({text})")


def small(**changes: Any) -> Case:
    """A small F32 case with some keys changed."""
    plain = case("hsk=16,hsv=16,nh=4,nhkv=2,kv=20,nb=7,type_K=f32,type_V=f32")
    return plain.replace(**changes)


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    d: ArrayLike,
    mask: Any = None,
    sinks: ArrayLike | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Inputs:
    """F32 inputs of arrays: q [S, H, N, D], k and v [S, Hkv, M, D], d [S, H, N, Dv], mask [Sm, Hm, N, M], sinks [H]."""
    q, k, v, d = (np.ascontiguousarray(x, np.float32) for x in (q, k, v, d))
    s, h, n, dk = q.shape
    _, hkv, m, dv = v.shape
    masks = None if mask is None else np.ascontiguousarray(mask, np.float16)
    kind = "none" if masks is None else "random"
    mh, ms = (1, 1) if masks is None else (masks.shape[1], masks.shape[0])
    keys: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": int(sinks is not None)}
    made = Case(dk, dv, h, hkv, m, n, s, "f32", "f32", kind, mh, ms, **keys)
    return Inputs(
        case=made,
        q=q,
        k=k.view(np.uint8),
        v=v.view(np.uint8),
        mask=masks,
        sinks=None if sinks is None else np.asarray(sinks, np.float32),
        o=None,
        d=np.ascontiguousarray(d.transpose(0, 2, 1, 3)),
        type_K="f32",
        type_V="f32",
        scale=scale,
        max_bias=made.max_bias,
        softcap=made.softcap,
        grads=made.wanted,
        kv_first=0,
        kv_count=m,
    )


def parameters(grads: int = 1, scale: float = 1.0) -> dict[str, float]:
    """ggml_flash_attn_back_params: every field, for cffi leaves out ones as they are in memory."""
    zeros = {"max_bias": 0.0, "logit_softcap": 0.0, "kv_first": 0, "kv_count": 0}
    return {"scale": scale, "grads": grads, **zeros}


def heads(values: Any) -> NDArray[np.float64]:
    """Head by rows of numbers as [1, H, rows, 1]."""
    return np.asarray(values, np.float64)[None, :, :, None]


@dataclasses.dataclass(frozen=True)
class Operator:
    """FLASH_ATTN_BACK on a device; on CUDA held to a kernel path."""

    library: ggml.Library
    device: ggml.Device
    path: str

    @property
    def on_cpu(self) -> bool:
        return self.device.name == "CPU"

    @property
    def in_f32(self) -> bool:
        """Whether the path computes in F32; not known where a CUDA device chooses it."""
        return self.on_cpu or self.path in cases.f32_paths()

    @property
    def limit(self) -> float:
        """NMSE by which two results of one thing may differ: the limit of the kernel path."""
        return cases.limit(cases.limits(), "cpu" if self.on_cpu else self.path)

    def take(self, given: Case | Inputs) -> None:
        """Fails when the device does not take a node, skips when it is only the path that does not."""
        reason = self.library.refusal(self.device, given)
        if reason and self.path not in ("", PATHS[-1]):
            pytest.skip(f"{self.path}: {reason}")
        assert reason is None

    def result(self, given: Inputs, threads: int = 0) -> ggml.Result:
        """A run on memory that is checked. CUDA takes head sizes in steps of 8: the rest is zeros there."""
        dk, dv = given.q.shape[3], given.d.shape[3]
        step = 1 if self.on_cpu else 8
        wide = given if dk % step == dv % step == 0 else _widened(given, -dk % step, -dv % step)
        self.take(wide)
        result = self.library.run(self.device, wide, threads)
        assert not result.guards
        assert not any(result.unwritten.values())
        for part, width in (("dq", dk), ("dk", dk), ("dv", dv)):
            if part in result.parts:
                assert not result.parts[part][..., width:].any(), part
                result.parts[part] = result.parts[part][..., :width]
        return result

    def run(self, given: Inputs, threads: int = 0) -> dict[str, NDArray[np.float32]]:
        """The parts of a run."""
        return self.result(given, threads).parts

    def agree(self, given: Inputs) -> dict[str, NDArray[np.float32]]:
        """The parts of a run, all of which must agree with the reference."""
        result = self.result(given)
        for part in oracle.compare(given, result, reference.backward(given)).values():
            assert part.passed, part
        return result.parts

    def near(self, got: ArrayLike, want: ArrayLike, size: ArrayLike | None = None, what: str = "") -> None:
        """Asserts that squared differences are within the limit of the squares of `size` (default: of want)."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.square(got - want).sum()
        assert error <= self.limit * np.square(np.asarray(want if size is None else size, np.float64)).sum(), what


def _widened(given: Inputs, more_k: int, more_v: int) -> Inputs:
    """F32 inputs with zeros behind the components of q and k, v and d."""

    def pad(array: NDArray[np.float32], more: int) -> NDArray[np.float32]:
        return np.pad(array, [(0, 0)] * 3 + [(0, more)])

    case = given.case
    return dataclasses.replace(
        given,
        case=case.replace(hsk=case.hsk + more_k, hsv=case.hsv + more_v),
        q=pad(given.q, more_k),
        k=pad(given.k_f32(), more_k).view(np.uint8),
        v=pad(given.v_f32(), more_v).view(np.uint8),
        d=pad(given.d, more_v),
    )


def last_words(work: Callable[[], object]) -> str:
    """What a process says on stderr when ggml aborts in it; it must abort."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    with tempfile.TemporaryFile("w+") as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
            child = os.fork()
        if child == 0:
            faulthandler.disable()
            os.dup2(said.fileno(), 2)
            sys.stderr = os.fdopen(2, "w")
            try:
                work()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        text = said.read()
    assert os.WIFSIGNALED(status), f"it lived, and said: {text}"
    assert os.WTERMSIG(status) == signal.SIGABRT, text
    return text


@contextlib.contextmanager
def in_a_graph(
    library: ggml.Library, device: ggml.Device, given: Inputs, output: str = ""
) -> Iterator[tuple[Any, dict[str, Any], NDArray[np.float32]]]:
    """FLASH_ATTN_BACK of F32 sources that the graph computes and nobody else reads, but one that is an output.

    The node, its sources and its result, in memory that ggml's allocator has placed."""
    c, ffi = library.c, library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    names = [name for name in ("q", "k", "v", "sinks", "d") if getattr(given, name) is not None]
    arrays = {name: np.ascontiguousarray(getattr(given, name)).view(np.float32) for name in names}
    leaves = {
        name: c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, *[*reversed(a.shape), 1, 1, 1][:4])
        for name, a in arrays.items()
    }
    sources = {name: c.ggml_scale(ctx, leaf, 1.0) for name, leaf in leaves.items()}
    for leaf in leaves.values():
        c.ggml_set_input(leaf)
    if output:
        c.ggml_set_output(sources[output])
    back = c.ggml_flash_attn_back(
        ctx,
        *(sources.get(name, ffi.NULL) for name in ("q", "k", "v", "mask", "sinks", "o", "d")),
        parameters(sum(1 << cases.PARTS.index(part) for part in given.grads), given.scale),
    )
    c.ggml_set_output(back)
    graph = c.ggml_new_graph_custom(ctx, 64, False)
    c.ggml_build_forward_expand(graph, back)
    backend = library.backend(device)
    allocator = c.ggml_gallocr_new(c.ggml_backend_get_default_buffer_type(backend))
    assert c.ggml_gallocr_alloc_graph(allocator, graph)
    for name, leaf in leaves.items():
        library.upload(leaf, arrays[name])
    assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
    yield back, sources, library.download(back, np.float32)
    c.ggml_gallocr_free(allocator)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)
