"""The attention gradient in float64, blocked over query rows and keys: bounded memory, time spent in BLAS.

Written from the formulas, shares nothing with the C code. Tasks run on threads of their own with one BLAS thread each;
sums over tasks are taken in a fixed order, so a result depends on the inputs only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from .inputs import Inputs

F64 = NDArray[np.float64]
T = TypeVar("T")
R = TypeVar("R")

ROWS = 256
KEYS = 512

_MASKED = 0xFC00  # -inf as float16


def slopes(heads: int, max_bias: float) -> F64:
    """ALiBi slope of each query head, 1 without a bias: geometric over the power of two below, then odd half steps."""
    if max_bias <= 0:
        return np.ones(heads)
    base = 2 ** int(np.floor(np.log2(heads)))
    h = np.arange(heads)
    steps = np.where(h < base, h + 1, h - base + 0.5)
    return np.asarray(2.0 ** (-max_bias / base * steps))


class _Attention:
    """The inputs as blocks of float64."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.s, self.h, self.hkv, self.n, self.m = inputs.sizes
        self.group = self.h // self.hkv
        self.slope = slopes(self.h, inputs.max_bias)
        self._q, self._k, self._v, self.incoming = inputs.shown()

    def row_blocks(self) -> list[slice]:
        return [slice(a, min(a + ROWS, self.n)) for a in range(0, self.n, ROWS)]

    def key_blocks(self) -> list[slice]:
        return [slice(a, min(a + KEYS, self.m)) for a in range(0, self.m, KEYS)]

    def q(self, s: int, h: int, rows: slice) -> F64:
        return self._q[s, h, rows].astype(np.float64)

    def d(self, s: int, h: int, rows: slice) -> F64:
        return self.incoming[s, rows, h].astype(np.float64)

    def k(self, s: int, g: int, keys: slice) -> F64:
        return self._k[s, g, keys].astype(np.float64)

    def v(self, s: int, g: int, keys: slice) -> F64:
        return self._v[s, g, keys].astype(np.float64)

    def scores(self, s: int, h: int, rows: slice, keys: slice, q: F64, k: F64) -> tuple[F64, F64 | None] | None:
        """Scores of a block and, with a softcap, the factor of its derivative; None if the mask hides all of it."""
        mask = self.inputs.mask
        part = None
        if mask is not None:
            part = mask[s % mask.shape[0], h % mask.shape[1], rows, keys]
            bits = part.view(np.uint16)
            if not bits.any():
                part = None
            elif (bits == _MASKED).all():
                return None
        scores = q @ k.T
        scores *= self.inputs.scale
        factor = None
        if self.inputs.softcap:
            scores /= self.inputs.softcap
            np.tanh(scores, out=scores)
            factor = 1 - scores * scores
            scores *= self.inputs.softcap
        if part is not None:
            scores += self.slope[h] * part.astype(np.float64)
        return scores, factor


def forward(inputs: Inputs) -> F64:
    """The attention's output, [S, N, H, Dv]."""
    attention = _Attention(inputs)
    return _forward(attention, lambda _: None)[1]


def backward(inputs: Inputs, progress: Callable[[float], None] | None = None) -> dict[str, F64]:
    """The wanted gradients and the row statistics.

    dq [S, H, N, Dk]; dk, dv [S, Hkv, kv_count, D]; lse, d [S, H, N]; dsinks [H]; of a pair o [S, H, N, Dv].
    progress is called with the fraction done.
    """
    report = progress or (lambda _: None)
    a = _Attention(inputs)
    lse, o = _forward(a, lambda x: report(0.3 * x))
    if inputs.o is not None:
        o = inputs.o.astype(np.float64)
    d_sum = np.einsum("snhc,snhc->shn", a.incoming.astype(np.float64), o)
    d_sum[np.isinf(lse)] = 0

    first, count = inputs.kv_first, inputs.kv_count
    parts: dict[str, F64] = {}
    if "dq" in inputs.grads:
        parts["dq"] = np.zeros(inputs.q.shape)
    for part, width in (("dk", inputs.q.shape[3]), ("dv", inputs.d.shape[3])):
        if part in inputs.grads:
            parts[part] = np.zeros((a.s, a.hkv, count, width))
    tasks = [(s, g, keys) for s in range(a.s) for g in range(a.hkv) for keys in a.key_blocks()] if parts else []

    def work(task: tuple[int, int, slice]) -> list[tuple[int, slice, F64]]:
        """dK and dV of a block of keys, written in place; returns its share of dQ."""
        s, g, keys = task
        low, high = max(keys.start, first), min(keys.stop, first + count)
        owed = [part for part in ("dk", "dv") if part in parts and low < high]
        if not owed and "dq" not in parts:
            return []
        k, v = a.k(s, g, keys), a.v(s, g, keys)
        sums = {"dk": np.zeros_like(k), "dv": np.zeros_like(v)}
        shares = []
        for h in range(g * a.group, (g + 1) * a.group):
            for rows in a.row_blocks():
                q = a.q(s, h, rows)
                block = a.scores(s, h, rows, keys, q, k)
                if block is None:
                    continue
                p, factor = block
                with np.errstate(invalid="ignore"):
                    p -= np.where(np.isneginf(lse[s, h, rows]), 0, lse[s, h, rows])[:, None]
                np.exp(p, out=p)
                d = a.d(s, h, rows)
                if "dv" in owed:
                    sums["dv"] += p.T @ d
                ds = d @ v.T
                ds -= d_sum[s, h, rows, None]
                ds *= p
                if factor is not None:
                    ds *= factor
                if "dk" in owed:
                    sums["dk"] += ds.T @ q
                if "dq" in parts:
                    shares.append((h, rows, ds @ k))
        inside, outside = slice(low - keys.start, high - keys.start), slice(low - first, high - first)
        for part in owed:
            parts[part][s, g, outside] = sums[part][inside]
        return shares

    for i, ((s, _, _), shares) in enumerate(_ordered(work, tasks)):
        for h, rows, share in shares:
            parts["dq"][s, h, rows] += share
        report(0.3 + 0.7 * (i + 1) / len(tasks))
    for part in parts.keys() & {"dq", "dk"}:
        parts[part] *= inputs.scale
    parts["lse"], parts["d"] = lse, d_sum
    if inputs.case.pair:
        parts["o"] = o.transpose(0, 2, 1, 3)
    if "dsinks" in inputs.grads:
        assert inputs.sinks is not None
        sinks = inputs.sinks.astype(np.float64)
        with np.errstate(invalid="ignore"):  # LSE may be as infinite as the sink
            shares = np.exp(sinks[None, :, None] - lse) * d_sum
        parts["dsinks"] = -np.where(d_sum == 0, 0, shares).sum(axis=(0, 2))
    return parts


def _forward(a: _Attention, report: Callable[[float], None]) -> tuple[F64, F64]:
    """LSE [S, H, N] and output [S, N, H, Dv]; a row without keys or sink has LSE -inf and output 0."""
    lse = np.full((a.s, a.h, a.n), -np.inf)
    o: F64 = np.zeros(a.inputs.d.shape)
    sinks = a.inputs.sinks
    tasks = [(s, h, rows) for s in range(a.s) for h in range(a.h) for rows in a.row_blocks()]

    def work(task: tuple[int, int, slice]) -> None:
        s, h, rows = task
        if sinks is not None and np.isposinf(sinks[h]):  # it takes all
            lse[s, h, rows] = np.inf
            return
        g = h // a.group
        q = a.q(s, h, rows)
        top = np.full(q.shape[0], -np.inf if sinks is None else float(sinks[h]))
        total = np.zeros_like(top) if sinks is None else np.ones_like(top)
        out = np.zeros((len(q), a.inputs.d.shape[3]))
        for keys in a.key_blocks():
            block = a.scores(s, h, rows, keys, q, a.k(s, g, keys))
            if block is None:
                continue
            p = block[0]
            new = np.maximum(top, p.max(axis=1))
            safe = np.where(np.isneginf(new), 0, new)
            p -= safe[:, None]
            np.exp(p, out=p)
            shrink = np.exp(top - safe)
            total = total * shrink + p.sum(axis=1)
            out = out * shrink[:, None] + p @ a.v(s, g, keys)
            top = new
        with np.errstate(divide="ignore"):
            lse[s, h, rows] = np.where(total > 0, top + np.log(total), -np.inf)
        o[s, rows, h] = out / np.where(total > 0, total, 1)[:, None]

    for i, _ in enumerate(_ordered(work, tasks)):
        report((i + 1) / len(tasks))
    return lse, o


def _ordered(work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Results of work on a thread per core, in the order of the tasks, a bounded number of them ahead."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(workers) as pool:
        pending: deque[tuple[T, Future[Any]]] = deque()
        try:
            for task in tasks:
                pending.append((task, pool.submit(work, task)))
                if len(pending) > 2 * workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            for _, future in pending:
                future.cancel()
