"""What the tests share: attention inputs written out by hand, runs of them, and processes that must die."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyharness import ggml, oracle, reference
from pyharness.cases import Case
from pyharness.inputs import Inputs

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


def run(library: ggml.Library, given: Inputs, threads: int = 0) -> dict[str, NDArray[np.float32]]:
    """The CPU's parts, on memory that is checked."""
    result = library.run(library.device("CPU"), given, threads)
    assert not result.guards
    assert not any(result.unwritten.values())
    return result.parts


def agree(library: ggml.Library, given: Inputs) -> dict[str, NDArray[np.float32]]:
    """The CPU's parts, all of which must agree with the reference."""
    result = library.run(library.device("CPU"), given)
    assert not result.guards
    for part in oracle.compare(given, result, reference.backward(given)).values():
        assert part.passed, part
    return result.parts


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
