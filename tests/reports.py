"""Publicly reported failures whose kind is in the numbers: as corners (corners.py), each with its own shape.

A report is a function that changes a Draft; docs/public-failures.md names where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attention import NINF
from corners import Draft

Build = Callable[[Draft], object]
REPORTS: dict[str, Build] = {}
SLOW: set[str] = set()


def report(name: str, slow: bool = False) -> Callable[[Build], Build]:
    """Puts a function into REPORTS."""

    def add(build: Build) -> Build:
        REPORTS[name] = build
        if slow:
            SLOW.add(name)
        return build

    return add


def draft(name: str) -> Draft:
    """A report's inputs under construction, ready to be made."""
    made = Draft(name, "few", True)
    made.spoilt = False
    REPORTS[name](made)
    return made


def _turned(kind: str, n: int, m: int, width: int, high: float = 300, long: float = 3, turn: float = 0.3) -> Build:
    """A pair of channels of K far above the others, turned by RoPE, and the same pair of Q."""

    def build(b: Draft) -> None:
        b.draw(1, 2, 2, n, m, width)
        b.type_K = b.type_V = kind
        for x, size in ((b.k, high), (b.q, long)):
            place = turn * (np.arange(x.shape[2]) + m - x.shape[2])
            x[..., 6], x[..., 7] = size * np.cos(place), size * np.sin(place)
        b.causal()

    return build


report("n12_rope_f32")(_turned("f32", 200, 200, 64))
report("n12_rope_q8_0")(_turned("q8_0", 200, 200, 64))
report("n12_rope_f16_d128")(_turned("f16", 130, 400, 128))
report("n12_rope_d256_high", slow=True)(_turned("f32", 90, 300, 256, 1000, 2, 0.05))
report("n12_rope_low", slow=True)(_turned("bf16", 200, 333, 64, 60, 6, 1.0))


def _first(kind: str, width: int, bias: bool, times: float = 1000) -> Build:
    """The first token's key far longer than the others, and its value next to nothing."""

    def build(b: Draft) -> None:
        b.draw(1, 2, 2, 130, 130, width)
        b.type_K = b.type_V = kind
        b.k[:, :, 0] = 0
        b.k[:, :, 0, 3] = times * width**0.5
        b.q[..., 3] = 10 / times * (1 + 0.1 * b.normal(*b.q.shape[:3]))
        b.v[:, :, 0] *= 0.01
        if bias:
            b.k[..., 8:10] += 300
        b.causal()

    return build


for _kind in ("f32", "f16", "q8_0"):
    report(f"n12_bos_{_kind}", slow=_kind == "f16")(_first(_kind, 256, False))
report("n12_bos_bias")(_first("f32", 256, True))
report("n12_bos_bias_d64", slow=True)(_first("q8_0", 64, True, 100))
report("n12_bos_d128", slow=True)(_first("f32", 128, False, 30))


def _shared(heads: int, n: int, width: int, runs: int = 2, noise: float = 0.1) -> Build:
    """Rows whose largest score several keys share: runs of identical keys, V nearly constant, dO nearly constant."""

    def build(b: Draft) -> None:
        b.draw(1, heads, 1, n, n, width)
        b.type_K = b.type_V = "f32"
        b.k[...] = np.repeat(b.k[:, :, ::runs], runs, axis=2)[:, :, :n]
        towards = b.normal(1, heads, 1, width)
        b.k[:, :, :runs] += 4 * towards
        b.q[...] = towards + 0.1 * b.normal(*b.q.shape)
        b.v[...] = -2 + 0.01 * b.v
        b.d[...] = 1 + noise * b.d
        b.causal()

    return build


report("n01_shared_maximum", slow=True)(_shared(12, 1024, 64))
report("n01_shared_maximum_short")(_shared(12, 200, 64))
report("n01_shared_maximum_of_4_d128", slow=True)(_shared(8, 256, 128, runs=4, noise=0.01))


def _cancelled(heads: int, n: int, m: int, width: int, left: float) -> Build:
    """dSinks whose terms cancel: dO of each head is scaled so that the positive ones meet the negative ones."""

    def build(b: Draft) -> None:
        b.draw(1, heads, 1, n, m, width)
        b.type_K = b.type_V = "bf16"
        b.sink(0.5, -1, 2, 1)
        terms = np.zeros((n, heads))
        for h in range(heads):
            scores = b.scale * b.q[0, h].astype(np.float64) @ b.k[0, h].T
            weights = np.exp(scores)
            total = weights.sum(axis=1) + np.exp(float(b.sinks[h] if b.sinks is not None else 0))
            out = weights @ b.v[0, h] / total[:, None]
            terms[:, h] = (b.d[0, :, h] * out).sum(axis=1) / total
        for h in range(heads):
            up, down = terms[terms[:, h] > 0, h].sum(), -terms[terms[:, h] < 0, h].sum()
            b.d[0, terms[:, h] > 0, h] *= np.float32(down / up * (1 + left))

    return build


report("n02_cancelled_sinks")(_cancelled(8, 300, 200, 128, 1e-3))
report("n02_cancelled_sinks_long", slow=True)(_cancelled(8, 4096, 512, 128, 1e-5))


def _far_sinks(x: float) -> Build:
    """Finite sinks that overflow once multiplied by log2(e); a row without keys."""

    def build(b: Draft) -> None:
        b.draw(1, 2, 2, 70, 130, 64)
        b.causal()[..., 1, :] = NINF
        b.sink(0.5, x, -1, x)

    return build


for _x in (2.4e38, float(np.finfo(np.float32).max)):
    report(f"n05_sinks_of_{_x:.1e}")(_far_sinks(_x))
    report(f"n05_sinks_of_minus_{_x:.1e}")(_far_sinks(-_x))


def _scaled(by: float, heads: int = 16, n: int = 200) -> Build:
    """Gradients near the ends of float32."""

    def build(b: Draft) -> None:
        b.draw(1, heads, 1, n, n, 64)
        b.type_K = b.type_V = "bf16"
        b.d[...] = np.clip(b.d, -4, 4) / 4 * np.float32(by)
        b.causal()

    return build


report("n11_do_of_3.5e35", slow=True)(_scaled(3.5e35))
report("n11_do_of_3.5e35_short")(_scaled(3.5e35, 2, 70))
report("n11_do_of_1e-36", slow=True)(_scaled(1e-36))
report("n11_do_of_1e-36_short")(_scaled(1e-36, 2, 70))


def _one_query(m: int) -> Build:
    """One query a head: D is one number, which may cancel."""

    def build(b: Draft) -> None:
        b.draw(128, 4, 1, 1, m, 64)
        b.type_K = b.type_V = "f32"

    return build


report("u48_one_query_2_keys")(_one_query(2))
report("u48_one_query_64_keys")(_one_query(64))
