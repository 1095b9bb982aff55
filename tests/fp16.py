"""The arithmetic of the kernel paths on tensor cores in numpy, and the guard that sends units to F32 instead.

One emulation of both paths: K and V centred, powers of two, fp16 operands, sums taken as exact. What differs between
them (which rows share a power of two, the shift of P) matters less than the bound that is tried here.
ggml/src/ggml-cuda/fattn-back-guard.cuh has the bound; `Bound` repeats its numbers, and a test compares them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from pyharness.case import reference
from pyharness.case.operands import Inputs

F64 = NDArray[np.float64]
FP16, D_IN_F32, F32 = range(3)
LOG2E = 1 / np.log(2)
HALVES = 20  # |log2(e) x| from which on K and Q are taken in two halves


@dataclasses.dataclass(frozen=True)
class Bound:
    """FATTN_BACK_GUARD_* of fattn-back-guard.cuh; lengths as 2*log2."""

    k: int = 4
    k_peaked: int = 3
    alike: float = 0.25
    v: int = 8
    do: int = 14
    share: int = 2
    most: int = 24
    wide: float = 8
    peaked: float = 40
    range: int = 90
    terms: int = 16
    logit: float = 16384
    softcap: float = 4
    sink: float = 2**-8
    cancel: float = 0.06
    d: float = 8

    def longest(self, few: int, rows: int) -> int:
        """The bound for the longest of so many rows of V or dO, by that of few rows."""
        return min(max(2 * (max(rows, 1).bit_length() - 1) - self.share, few), self.most)


def fp16(x: F64) -> F64:
    """Rounded to fp16."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float16).astype(np.float64)


def power(x: F64, target: int = 0) -> F64:
    """The power of two that brings x to [2^target, 2^(target + 1)); 1 for 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.where(x > 0, 2.0 ** np.clip(target - np.floor(np.log2(x)), -100, 100), 2.0**100))


@dataclasses.dataclass
class Measured:
    """What the preparation and the forward of a path find of a unit."""

    spread_k: float = 0  # of the longest row over the mean, 2*log2
    spread_v: float = 0
    rows_v: int = 0
    rows_do: int = 0
    spread_do: float = 0
    wide: float = 0
    beyond: bool = False  # of the range of the powers of two
    terms: int = 1 << 30
    logit: float = 0  # largest |log2(e) x| of a row's maximum
    softcap: float = 0  # largest |x| over the cap
    d: float = 0  # largest part of D without the mean of V over the largest D, of a head
    sink: float = 1  # the least that a head's sink leaves to the keys of its best row

    def level(self, bound: Bound) -> int:
        over = (
            self.spread_k > bound.k,
            self.spread_v > bound.longest(bound.v, self.rows_v),
            self.spread_do > bound.longest(bound.do, self.rows_do),
        )
        few = 0 < self.terms < bound.terms
        logits = self.logit > bound.logit or self.softcap > bound.softcap
        peaked = (self.logit > HALVES and self.wide > bound.wide) or (
            self.logit > bound.peaked and (self.spread_k > bound.k_peaked or self.spread_do < bound.alike)
        )
        if any(over) or few or logits or peaked or self.beyond or self.sink < bound.sink:
            return F32
        return D_IN_F32 if self.d > bound.d else FP16


def _mean(rows: F64, kind: str) -> F64:
    """Of the columns, with few bits, as fattn_back_column_mean: else all x of a binade are rounded by one error."""
    if not len(rows):
        return np.zeros(rows.shape[1])
    exact, low, high = rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)
    step = np.maximum(high - exact, exact - low) / 64
    if kind in ("f16", "bf16"):
        step = np.maximum(step, np.maximum(np.abs(high), np.abs(low)) / 1024)
    with np.errstate(divide="ignore", invalid="ignore"):
        step = 2.0 ** np.floor(np.log2(step))
        return np.asarray(np.where(step > 0, np.rint(exact / step) * step, exact))


def _spread(rows: F64) -> float:
    square = np.square(rows).sum(axis=-1)
    length = np.rint(np.log2(square[square > 0]))
    return float(length.max() - length.mean()) if length.size else 0.0


class Unit:
    """A KV head of a sequence with its query heads: what fp16 makes of it."""

    def __init__(self, given: Inputs, s: int, g: int) -> None:
        _, heads, hkv, self.n, self.m = given.sizes
        self.given, self.s, self.g, self.group = given, s, g, heads // hkv
        self.heads = range(g * self.group, (g + 1) * self.group)
        q, k, v, d = (x.astype(np.float64) for x in given.shown())
        self.k, self.v = k[s, g], v[s, g]
        self.q = q[s, self.heads.start : self.heads.stop]
        self.d = d[s, :, self.heads.start : self.heads.stop].swapaxes(0, 1)
        self.used = given.seen()[s, g]
        self.sees = given.sees()[s, self.heads.start : self.heads.stop]
        self.slopes = reference.slopes(heads, given.max_bias)
        self.measured = Measured()
        self._operands()

    def _operands(self) -> None:
        m, used = self.measured, self.used
        kinds = (self.given.type_K, self.given.type_V)
        self.mean_k, self.mean_v = (_mean(x[used], kind) for x, kind in zip((self.k, self.v), kinds, strict=True))
        kc, vc = (np.where(used[:, None], x - mean, 0) for x, mean in ((self.k, self.mean_k), (self.v, self.mean_v)))
        dev = np.abs(kc).max(axis=0, initial=0)
        size_v = np.abs(vc).max(axis=0, initial=0)
        if self.given.sinks is not None:
            size_v = np.maximum(size_v, np.abs(self.mean_v))
        m.spread_k, m.spread_v = _spread(kc), _spread(vc)
        m.rows_v, m.rows_do = (int(x.any(axis=-1).sum()) for x in (vc, self.d))
        m.spread_do = _spread(self.d.reshape(-1, self.d.shape[-1]))
        some = dev[dev > 0]
        m.wide = float(np.square(some).mean() / np.exp(2 * np.log(some).mean())) if some.size else 0.0
        lengths = [np.linalg.norm(dev), np.linalg.norm(size_v), np.abs(self.q).max(initial=0)]
        lengths.append(
            float(np.sqrt(np.square(self.d / max(np.abs(self.d).max(), 1e-300)).sum(-1)).max() * np.abs(self.d).max())
        )
        m.beyond = any(x > 0 and abs(np.log2(x)) > Bound.range for x in lengths)
        m.terms = min([int(used.sum())] + [int(x.sum()) for x in self.sees if x.any()])
        self.scale_k, self.scale_v = power(dev.max(initial=0), 8), power(np.asarray(np.linalg.norm(size_v)), 6)
        self.scale_q = power(np.abs(self.q).max(initial=0), 8)
        self.k16, self.v16 = fp16(kc * self.scale_k), fp16(vc * self.scale_v)
        self.k_low = fp16(kc * self.scale_k - self.k16)

    def _scores(self, h: int, split: bool) -> tuple[F64, F64, F64]:
        """Logits and biases (-inf where hidden), and the derivative of the softcap."""
        given = self.given
        q = self.q[h] * self.scale_q
        q16 = fp16(q)
        product = q16 @ self.k16.T
        if split:
            product = product + fp16(q - q16) @ self.k16.T + q16 @ self.k_low.T
        x = given.scale * (product / (self.scale_q * self.scale_k) + (self.q[h] @ self.mean_k)[:, None])
        slope = np.ones_like(x)
        if given.softcap:
            tanh = np.tanh(x / given.softcap)
            self.measured.softcap = max(self.measured.softcap, float(np.abs(x / given.softcap).max(initial=0)))
            x, slope = given.softcap * tanh, 4 / (np.exp(x / given.softcap) + np.exp(-x / given.softcap)) ** 2
        bias = np.zeros_like(x)
        if given.mask is not None:
            head, sequence = self.heads.start + h, self.s
            mask = given.mask[sequence % given.mask.shape[0], head % given.mask.shape[1], : self.n].astype(np.float64)
            bias = np.where(np.isneginf(mask), mask, mask * self.slopes[head])
        return x, bias, slope

    def run(self) -> dict[str, F64]:
        """dq, dk, dv, lse, d of the unit, and the terms of dsinks."""
        split = False
        for h in range(self.group):
            x, bias, _ = self._scores(h, False)
            centred = x + bias - (0 if self.given.softcap else self.given.scale * (self.q[h] @ self.mean_k)[:, None])
            top = centred.max(axis=1, initial=-np.inf)
            largest = np.abs(top[np.isfinite(top)]).max(initial=0) * LOG2E
            biased = np.abs((centred - bias)[(bias != 0) & np.isfinite(bias)]).max(initial=0) * LOG2E
            self.measured.logit = max(self.measured.logit, float(largest), float(biased))
        split = self.measured.logit > HALVES
        parts: dict[str, list[F64]] = {name: [] for name in ("dq", "lse", "d", "sinks")}
        dk, dv = np.zeros(self.k.shape), np.zeros(self.v.shape)
        scale_d = power(np.sqrt(np.square(self.d).sum(axis=-1)).max(initial=0))
        for h in range(self.group):
            d = self.d[h]
            own = power(np.sqrt(np.square(d).sum(axis=-1)))[:, None]
            d16 = fp16(d * own)
            x, bias, slope = self._scores(h, split)
            score = np.where(np.isneginf(bias), -np.inf, x + bias)
            top = score.max(axis=1, keepdims=True, initial=-np.inf)
            safe = np.where(np.isfinite(top), top, 0)
            e = np.exp(score - safe)
            e16 = fp16(4 * e) / 4
            total = e16.sum(axis=1, keepdims=True)
            sink = -np.inf if self.given.sinks is None else float(self.given.sinks[self.heads[h]])
            with np.errstate(divide="ignore"):
                keys = np.where(total > 0, safe + np.log(total), -np.inf)
            lse = np.logaddexp(keys, sink)
            lse32 = lse.astype(np.float32).astype(np.float64)
            finite = np.isfinite(lse)
            of_keys = np.where(finite, np.exp(np.where(finite, keys - lse, 0)), 0)
            of_sink = np.where(finite, np.exp(np.where(finite, sink - lse, 0)), 0)
            out = e16 @ self.v16 / np.where(total > 0, total, 1)
            dot = (d @ self.mean_v)[:, None]
            mean = of_keys * (d16 * out).sum(axis=1, keepdims=True)
            raw = mean / self.scale_v / own + of_keys * dot
            part, most = np.abs(mean / self.scale_v / own).max(initial=0), np.abs(raw).max(initial=0)
            self.measured.d = max(self.measured.d, float(part / max(most, 1e-300)))
            p = np.where(
                finite & np.isfinite(score),
                np.exp(np.where(np.isfinite(score), score, 0) - np.where(finite, lse32, 0)),
                0,
            )
            ds = p * (d16 @ self.v16.T - (mean - of_sink * dot * self.scale_v * own)) * slope
            weight = scale_d / own
            q16 = fp16(self.q[h] * self.scale_q)
            q_low = fp16(self.q[h] * self.scale_q - q16) if split else 0
            k16 = self.k16 + (self.k_low if split else 0)
            back = self.given.scale / 256
            dq = back * (fp16(256 * ds) @ k16) / (self.scale_k * self.scale_v * own)
            if self.given.softcap:  # the sum of dS by what the softcap takes from it, as the sum of the rest is 0
                taken = ((mean - d16 @ self.v16.T) * p * (1 - slope)).sum(axis=1, keepdims=True)
                dq = dq + self.given.scale * taken / (self.scale_v * own) * self.mean_k
            elif self.given.sinks is not None:
                dq = dq + self.given.scale * of_sink * raw * self.mean_k
            dk += back * (fp16(256 * weight * ds).T @ (q16 + q_low)) / (self.scale_q * self.scale_v * scale_d)
            dv += fp16(256 * weight * p).T @ d16 / 256 / scale_d
            parts["dq"].append(dq)
            parts["lse"].append(np.where(finite, lse32, lse)[:, 0])
            parts["d"].append(raw[:, 0])
            parts["sinks"].append(-(of_sink * raw)[:, 0])
            if np.isfinite(sink):
                self.measured.sink = min(self.measured.sink, float((1 - of_sink).max(initial=0)))
        return {name: np.stack(x) for name, x in parts.items()} | {"dk": dk, "dv": dv}


def run(given: Inputs, bound: Bound | None, exact: dict[str, F64]) -> tuple[dict[str, F64], list[tuple[int, Measured]]]:
    """Every part as the paths on tensor cores give it, those of `exact` where the guard sends a unit to F32, and the
    level and what was measured of each unit. bound None: there is no guard."""
    s, _, hkv, _, _ = given.sizes
    units = [Unit(given, i, g) for i in range(s) for g in range(hkv)]
    with np.errstate(all="ignore"):
        found = [unit.run() for unit in units]
    parts = {name: exact[name].copy() for name in exact}
    terms = np.stack([x["sinks"] for x in found]).reshape(s, hkv, *found[0]["sinks"].shape)
    summed, square = terms.sum(axis=(0, 3)).ravel(), np.square(terms).sum()
    cancels = given.sinks is not None and bool(np.square(summed).sum() < (bound or Bound()).cancel * square)
    levels = []
    for unit, own in zip(units, found, strict=True):
        level = unit.measured.level(bound) if bound else FP16
        level = max(level, D_IN_F32 if bound and cancels else FP16)
        levels.append((level, unit.measured))
        heads = slice(unit.heads.start, unit.heads.stop)
        if level < F32:
            parts["dq"][unit.s, heads] = own["dq"]
            parts["dk"][unit.s, unit.g], parts["dv"][unit.s, unit.g] = own["dk"], own["dv"]
        if level < D_IN_F32:
            parts["lse"][unit.s, heads], parts["d"][unit.s, heads] = own["lse"], own["d"]
    if "dsinks" in parts and not any(level for level, _ in levels):
        parts["dsinks"] = summed
    return parts, levels
