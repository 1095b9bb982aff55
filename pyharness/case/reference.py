"""The attention gradient in float64, blocked over query rows and keys: bounded memory, time spent in BLAS.

Written from the formulas, shares nothing with the C code. Tasks run on threads of their own with one BLAS thread each;
sums over tasks are taken in a fixed order, so a result depends on the inputs only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from .operands import Inputs

F64 = NDArray[np.float64]
T = TypeVar("T")
R = TypeVar("R")

ROWS = 256
KEYS = 512

_MASKED = 0xFC00  # -inf as float16

_ROUNDING = 2.0**-48  # squared relative rounding of F32
_TINY = 2.0**-252  # squared size of what F32 may flush to zero


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


def rounding(inputs: Inputs, lse: F64, d: F64) -> dict[str, F64]:
    """Squared error over each head that plain F32 arithmetic may make in every part, to first order.

    Scores, LSE, D, the factor of a softcap and every term of a sum are rounded to 2^-24 of themselves, independently;
    a sum of n terms adds n times that of its terms (those of S and dP also n times that of the sum). The formulas
    carry these errors to the parts. What is below 2^-126 may be flushed to zero.
    dq, lse, d [S, H]; dk, dv [S, Hkv]; dsinks [H]. lse and d are those of `backward`, [S, H, N].
    """
    a = _Attention(inputs)
    parts = {part: np.zeros((a.s, a.h)) for part in ("dq", "dk", "dv", "lse", "d", "dsinks")}
    tasks = [(s, h, rows) for s in range(a.s) for h in range(a.h) for rows in a.row_blocks()]
    for (s, h, _), errors in _ordered(lambda task: _rounding(a, lse, d, *task), tasks):
        for part, error in errors.items():
            parts[part][s, h] += error
    for part in ("dk", "dv"):
        parts[part] = parts[part].reshape(a.s, a.hkv, a.group).sum(axis=2)
    parts["dsinks"] = parts["dsinks"].sum(axis=0)
    width_k, width_v = inputs.q.shape[3], inputs.d.shape[3]
    elements = {"dq": a.n * width_k, "dk": inputs.kv_count * width_k, "dv": inputs.kv_count * width_v, "dsinks": 1}
    return {part: array * _ROUNDING + elements.get(part, a.n) * _TINY for part, array in parts.items()}


def _rounding(a: _Attention, lse: F64, d: F64, s: int, h: int, rows: slice) -> dict[str, np.float64]:
    """The share of some rows of a query head in `rounding`, in units of 2^-48."""
    x, g = a.inputs, h // a.group
    finite = np.isfinite(lse[s, h, rows])
    top, row_d = np.where(finite, lse[s, h, rows], 0)[:, None], d[s, h, rows, None]
    q, incoming = a.q(s, h, rows), a.d(s, h, rows)
    # sums over the keys a row sees: of P, P^2, (P dP)^2, and of what P carries into LSE and D
    p_sum, p_square, pdp_square, into_lse, into_d = (np.zeros(len(q)) for _ in range(5))
    # of dS^2 and P^2 alone, of what goes into one dS and P beside LSE and D, and of dS by D; for dq with lengths of k
    ds_q, own_q, by_d_q, ds_k, own_k, by_d_k, p_v, own_v = (np.zeros(len(q)) for _ in range(8))
    for keys in a.key_blocks():
        k, v = a.k(s, g, keys), a.v(s, g, keys)
        block = a.scores(s, h, rows, keys, q, k)
        if block is None:
            continue
        scores, factor = block
        p = np.where(finite[:, None], np.exp(scores - top), 0)
        dp = incoming @ v.T
        of_dp = v.shape[1] * (np.square(incoming) @ np.square(v).T + np.square(dp))
        of_product = k.shape[1] * x.scale**2 * (np.square(q) @ np.square(k).T + np.square(q @ k.T))
        slope = 1.0 if factor is None else factor
        of_slope = 0.0 if factor is None else 4 * (1 - factor) / x.softcap**2 * of_product
        of_score = of_product * np.square(slope) + np.square(np.where(p > 0, scores, 0))
        ds, square = np.square(p * (dp - row_d) * slope), np.square(p)
        own = ds * (of_score + of_slope) + square * np.square(slope) * of_dp

        p_sum += p.sum(axis=1)
        p_square += square.sum(axis=1)
        pdp_square += (square * np.square(dp)).sum(axis=1)
        into_lse += (p * of_score).sum(axis=1)
        into_d += (p * (of_dp + np.square(dp - row_d) * of_score)).sum(axis=1)
        length = np.square(k).sum(axis=1)
        ds_q += ds @ length
        own_q += own @ length
        by_d_q += (p * slope) @ np.sqrt(length)
        window = slice(max(x.kv_first - keys.start, 0), max(x.kv_first + x.kv_count - keys.start, 0))
        ds_k += ds[:, window].sum(axis=1)
        own_k += own[:, window].sum(axis=1)
        by_d_k += (square * np.square(slope))[:, window].sum(axis=1)
        p_v += square[:, window].sum(axis=1)
        own_v += (square * of_score)[:, window].sum(axis=1)

    of_lse = np.where(finite, p_sum * into_lse + np.square(top[:, 0]) + a.m * p_square, 0)
    of_d = p_sum * into_d + a.m * pdp_square
    if x.o is not None:
        products = incoming * x.o[s, rows, h]
        of_d = products.shape[1] * (np.square(products).sum(axis=1) + np.square(products.sum(axis=1)))
    of_d += np.square(row_d[:, 0])
    sink = 0.0 if x.sinks is None else np.exp(np.minimum(float(x.sinks[h]) - top[:, 0], 0)) * finite
    terms = a.n * a.group  # of dk and dv
    return {
        "dq": x.scale**2 * (own_q + (of_lse + a.m) * ds_q + of_d * np.square(by_d_q)).sum(),
        "dk": x.scale**2 * (np.square(q).sum(axis=1) * (own_k + (of_lse + terms) * ds_k + of_d * by_d_k)).sum(),
        "dv": (np.square(incoming).sum(axis=1) * (own_v + (of_lse + terms) * p_v)).sum(),
        "lse": of_lse.sum(),
        "d": of_d.sum(),
        "dsinks": (np.square(sink) * (of_d + np.square(row_d[:, 0]) * (of_lse + a.n))).sum(),
    }


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
