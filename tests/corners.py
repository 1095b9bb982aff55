"""Corner cases that the case list cannot name: what masks, sinks, values and memory may hold at their ends.

A corner is a function that changes a Draft of normal numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from attention import NINF
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pyharness.case import inputs, quant, reference
from pyharness.case.cases import Case
from pyharness.case.operands import Inputs

F32 = NDArray[np.float32]
Arrange = Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]  # of an array: memory, and the view of it


Dims = tuple[int, int, int, int, int, int]  # sequences, KV heads, heads of a group, queries, keys, head size

SHAPES: dict[str, tuple[Dims, tuple[int, ...]]] = {  # and CUDA's workspaces in MiB
    "few": ((1, 2, 3, 100, 300, 64), (256, 1)),  # mma: five products
    "few96": ((1, 2, 3, 130, 260, 96), (1,)),
    "many": ((3, 16, 3, 66, 140, 64), (256, 1)),  # mma: fused kernels
    "many128": ((3, 16, 3, 66, 140, 128), (256,)),
    "wide": ((2, 2, 2, 70, 700, 256), (256, 2, 3)),  # hopper: ranges of keys, dS in memory
    "square": ((1, 2, 2, 200, 210, 256), (256, 2)),  # hopper: ranges of keys, dS computed again
    "long": ((1, 1, 2, 66, 9500, 16), (256, 3)),  # CPU: two chunks; rows: splits
    "shared": ((1, 1, 2, 100, 1500, 128), (256,)),  # hopper: blocks that share the keys, dQ from A and B
    "shared256": ((1, 1, 2, 70, 1500, 256), (256,)),  # the same, dS in memory
}
ON_CPU: dict[str, Dims] = {  # smaller ones; the others take no code there that these do not
    "few": (1, 2, 3, 100, 300, 64),
    "many": (2, 2, 3, 66, 140, 64),
    "wide": (2, 2, 2, 70, 300, 256),
    "long": (1, 1, 2, 66, 9500, 16),
}
USUAL = ("few", "many", "wide", "shared", "shared256")


class Draft:
    """Inputs under construction: arrays that a corner changes."""

    def __init__(self, name: str, shape: str, on_cpu: bool) -> None:
        self.rng = np.random.default_rng(zlib.crc32(f"{name} {shape}".encode()))
        self.mask: F32 | None = None
        self.sinks: F32 | None = None
        self.type_K = self.type_V = "f16"
        self.max_bias = self.softcap = 0.0
        self.prec = "default"
        self.o = False
        self.spoilt = True  # what must not count holds NaN and huge numbers
        self.arranged: dict[str, Arrange] = {}
        self.runs: list[dict[str, Any]] = [{}]  # changes to grads, kv_first and kv_count
        self.draw(*(ON_CPU[shape] if on_cpu else SHAPES[shape][0]))

    def draw(self, s: int, hkv: int, group: int, n: int, m: int, width: int) -> None:
        self.S, self.Hkv, self.G, self.N, self.M, self.D, self.H = s, hkv, group, n, m, width, hkv * group
        self.q = self.normal(s, self.H, n, width)
        self.k = self.normal(s, hkv, m, width)
        self.v = self.normal(s, hkv, m, width)
        self.d = self.normal(s, n, self.H, width)
        self.scale = width**-0.5

    def normal(self, *shape: int) -> F32:
        return self.rng.standard_normal(shape, np.float32)

    def full(self, value: float = 0.0, heads: int = 1, sequences: int = 1, pad: int = 0) -> F32:
        """A mask of one value, NaN beyond the queries."""
        self.mask = np.full((sequences, heads, self.N + pad, self.M), value, np.float32)
        self.mask[:, :, self.N :] = np.nan
        return self.mask

    def causal(self) -> F32:
        mask = self.full()
        mask[..., np.arange(self.M) > np.arange(self.N)[:, None] + self.M - self.N] = NINF
        return mask

    def sink(self, *values: float) -> None:
        self.sinks = np.resize(np.asarray(values, np.float32), self.H)

    def distance(self) -> NDArray[np.int64]:
        return np.asarray(np.abs(np.arange(self.M) - np.arange(self.N)[:, None]))

    def inputs(self) -> Inputs:
        rng = np.random.default_rng(1)
        mask = None if self.mask is None else self.mask.astype(np.float16)
        heads, sequences = (1, 1) if mask is None else (mask.shape[1], mask.shape[0])
        shape = (self.D, self.D, self.H, self.Hkv, self.M, self.N, self.S, self.type_K, self.type_V)
        kind = "none" if mask is None else "random"
        made = Case(*shape, kind, heads, sequences, sinks=int(self.sinks is not None), prec=self.prec)
        given = Inputs(
            case=made,
            q=np.ascontiguousarray(self.q, np.float32),
            k=quant.quantize(self.k.astype(np.float32), self.type_K, rng),
            v=quant.quantize(self.v.astype(np.float32), self.type_V, rng),
            mask=mask,
            sinks=self.sinks,
            o=None,
            d=np.ascontiguousarray(self.d, np.float32),
            type_K=self.type_K,
            type_V=self.type_V,
            scale=float(np.float32(self.scale)),
            max_bias=float(np.float32(self.max_bias)),
            softcap=float(np.float32(self.softcap)),
            grads=made.wanted,
            kv_first=0,
            kv_count=self.M,
        )
        if self.spoilt:
            inputs.spoil(given, rng)
        if self.o:
            given.o = reference.forward(given).astype(np.float32)
        return given


Build = Callable[[Draft], object]
CORNERS: dict[str, tuple[Build, tuple[str, ...]]] = {}


def corner(*more: str, shapes: tuple[str, ...] = USUAL, name: str = "") -> Callable[[Build], Build]:
    """Puts a function into CORNERS, in the usual shapes and more."""

    def add(build: Build) -> Build:
        CORNERS[name or build.__name__] = build, (*shapes, *more)
        return build

    return add


# masks


@corner("long", "square")
def bias_positive(b: Draft) -> None:
    b.full()[...] = 3 * b.normal(b.N, b.M) + 8


@corner("many128", "square")
def bias_65504_everywhere(b: Draft) -> None:
    b.full(65504)


@corner("many128", "square")
def bias_lowest_everywhere(b: Draft) -> None:
    b.full(-65504)


@corner("square")
def bias_lowest_everywhere_with_alibi(b: Draft) -> None:
    b.full(-65504)
    b.max_bias = 8


@corner("long", "square")
def bias_zero_then_30000(b: Draft) -> None:
    b.full()[..., b.M // 2 :] = 30000


@corner("long")
def bias_30000_then_zero(b: Draft) -> None:
    b.full()[..., : b.M // 2] = 30000


@corner("long")
def bias_rows_differ_hugely(b: Draft) -> None:
    b.full()[...] = np.resize([0, 40000, -40000, 300, -65504], b.N)[:, None]


@corner("long", "square")
def first_half_hidden_then_300(b: Draft) -> None:
    b.full(NINF)[..., b.M // 2 :] = 300


@corner("long", "square")
def first_keys_hidden_from_all(b: Draft) -> None:
    b.full()[..., : b.M * 2 // 3] = NINF


@corner("long", "square")
def last_keys_hidden_from_all(b: Draft) -> None:
    b.full()[..., b.M // 3 :] = NINF


@corner("long", "square")
def rows_see_first_or_last_keys(b: Draft) -> None:
    mask = b.full(NINF)
    mask[..., ::2, : b.M // 3] = 0
    mask[..., 1::2, b.M * 2 // 3 :] = 0
    b.sink(0.5, -1)


@corner("long", "square")
def blocks_of_rows_see_first_or_last_keys(b: Draft) -> None:
    mask = b.full(NINF)
    mask[..., : b.N // 2, : b.M // 3] = 0
    mask[..., b.N // 2 :, b.M * 2 // 3 :] = 0


@corner("long", "square")
def rows_without_keys_among_others(b: Draft) -> None:
    mask = b.full()
    mask[..., ::3, :] = NINF
    mask[..., : b.N // 2, : b.M // 2] = NINF


@corner()
def whole_block_of_rows_without_keys(b: Draft) -> None:
    b.full()[..., : min(64, b.N - 2), :] = NINF


@corner()
def whole_block_of_rows_without_keys_but_sinks(b: Draft) -> None:
    whole_block_of_rows_without_keys(b)
    b.sink(0.3, -2, 4)


@corner()
def nobody_sees_anything(b: Draft) -> None:
    b.full(NINF)


@corner()
def nobody_sees_anything_but_sinks(b: Draft) -> None:
    b.full(NINF)
    b.sink(0.3, -2, 4)


@corner("long")
def only_the_last_key(b: Draft) -> None:
    b.full(NINF)[..., -1] = 0


@corner("long")
def two_keys_far_apart(b: Draft) -> None:
    b.full(NINF)[..., [0, -1]] = 5


@corner("long")
def few_random_keys_a_row(b: Draft) -> None:
    mask = b.full(NINF)
    for i in range(b.N):
        mask[..., i, b.rng.choice(b.M, 3, replace=False)] = b.rng.standard_normal(3)


@corner()
def negative_zeros(b: Draft) -> None:
    b.full(-0.0)[..., ::5, ::3] = NINF


@corner()
def tiny_biases(b: Draft) -> None:
    b.full()[...] = 6e-8 * b.rng.integers(-1000, 1000, (b.N, b.M))


@corner("long")
def half_lowest_half_zero(b: Draft) -> None:
    b.full()[...] = np.where(b.rng.random((b.N, b.M)) < 0.5, -65504, 0)


@corner("long")
def lowest_beside_hidden(b: Draft) -> None:
    b.full(NINF)[..., : b.M // 2] = -65504
    b.sink(-70000, 3, -65504)


@corner()
def mask_heads_2(b: Draft) -> None:
    mask = b.full(heads=2, pad=3)
    mask[:, 0, : b.N, : b.M // 2] = NINF
    mask[:, 1, : b.N, b.M // 3 :] = NINF


@corner()
def mask_heads_of_groups_differ(b: Draft) -> None:
    mask = b.full(heads=b.H, sequences=b.S, pad=1)
    for s, h in np.ndindex(b.S, b.H):
        g = h // b.G
        mask[s, h, : b.N, (g * 37 + s * 11) % b.M :: 2 + g % 3] = NINF
        mask[s, h, : b.N, : 40 * (g % 4)] = NINF


@corner(shapes=("few", "many"))
def mask_heads_3(b: Draft) -> None:
    mask = b.full(heads=3, sequences=b.S)
    for s, h in np.ndindex(b.S, 3):
        mask[s, h][b.rng.random((b.N, b.M)) < 0.6] = NINF
        mask[s, h, :, : 30 * h + 20 * s] = NINF


@corner(shapes=("many",))
def mask_heads_half_of_all(b: Draft) -> None:
    mask = b.full(heads=b.H // 2, pad=2)
    for h in range(b.H // 2):
        mask[:, h, : b.N, : 5 * h] = NINF


@corner(shapes=("many",))
def mask_heads_third_of_all(b: Draft) -> None:
    mask = b.full(heads=b.H // 3, sequences=b.S, pad=2)
    for s, h in np.ndindex(b.S, b.H // 3):
        mask[s, h, : b.N, 8 * h + s : 8 * h + s + 64] = NINF


@corner("long")
def alibi_positive(b: Draft) -> None:
    b.full()[...] = b.distance()
    b.max_bias = 8


@corner()
def alibi_tiny_max_bias(b: Draft) -> None:
    mask = b.causal()
    mask[mask == 0] = 1.5
    b.max_bias = 1e-3


@corner()
def alibi_negative_max_bias_is_none(b: Draft) -> None:
    b.full()[...] = b.normal(b.N, b.M)
    b.max_bias = -1.0


@corner()
def alibi_slope_underflows(b: Draft) -> None:
    b.causal()
    b.max_bias = 300.0


@corner()
def alibi_sinks_positive(b: Draft) -> None:
    b.full()[...] = 4 * np.abs(b.normal(b.N, b.M))
    b.max_bias = 4
    b.sink(5, -5, 0)


# sinks


@corner()
def sinks_of_minus_inf(b: Draft) -> None:
    b.causal()[..., ::7, :] = NINF
    b.sink(NINF)


@corner("long", "square")
def sinks_mixed(b: Draft) -> None:
    b.causal()[..., ::7, :] = NINF
    b.sink(NINF, 1e30, -1e30, 0, 50, -50, 88, -103)


@corner("square")
def sinks_large_first_half_hidden(b: Draft) -> None:
    b.full()[..., : b.M // 2] = NINF
    b.sink(30, -30, 12)


@corner("long")
def sinks_and_biases_of_60000(b: Draft) -> None:
    b.full(60000)
    b.sink(60004, 60000, 59990)


@corner()
def sinks_and_constant_v(b: Draft) -> None:
    b.v = 1e-3 * b.v + 50
    b.causal()
    b.sink(3, 5)


@corner()
def sinks_outweigh_keys(b: Draft) -> None:
    b.sink(20, 25, 16)
    b.k = b.k + 3


@corner("long")
def sinks_of_plus_inf(b: Draft) -> None:
    b.sink(np.inf, 0)


# logits, scale, softcap


@corner("many128", "square")
def visible_logits_very_negative(b: Draft) -> None:
    """Two documents whose keys lie apart: every row sees only keys with q . (k - mean) of about -100."""
    rows, keys = b.N // 2, b.M // 2
    b.type_K = "f32"
    b.k[:, :, :keys, :2] = 30 + 0.3 * b.normal(b.S, b.Hkv, keys, 2)
    b.k[:, :, keys:, :2] = -30 + 0.3 * b.normal(b.S, b.Hkv, b.M - keys, 2)
    b.q[:, :, :rows, :2] = -0.025 * b.D**0.5 * 66
    b.q[:, :, rows:, :2] = 0.025 * b.D**0.5 * 66
    mask = b.full(NINF)
    mask[..., :rows, :keys] = 0
    mask[..., rows:, keys:] = 0


@corner("many128", "square")
def visible_logits_very_negative_f32(b: Draft) -> None:
    visible_logits_very_negative(b)
    b.prec = "f32"


@corner("many128", "square")
def logits_made_up_by_biases(b: Draft) -> None:
    """Logits of up to 60 and a mask of about their negative: every score is about 0."""
    b.type_K = "f32"
    b.q *= 8
    b.k *= 8
    logits = b.scale * (b.q[0, 0] @ b.k[0, 0].T)
    b.q[...] = b.q[:1, :1]
    b.k[...] = b.k[:1, :1]
    b.q += 0.01 * b.normal(*b.q.shape)
    b.full()[...] = -logits


@corner("square")
def logits_of_60_under_a_bias_of_minus_50(b: Draft) -> None:
    """A constant in every score: the softmax is that of the logits."""
    b.type_K = "f32"
    b.q[..., :2] = 30 * b.D**0.5 / 20
    b.k[..., :2] = 20 + 0.3 * b.normal(b.S, b.Hkv, b.M, 2)
    b.k[:, :, b.M // 2 :, :2] *= -1
    b.full(-50)


@corner()
def logits_of_50(b: Draft) -> None:
    b.q *= 7
    b.k *= 7
    b.causal()


@corner()
def keys_with_a_mean_of_100(b: Draft) -> None:
    b.type_K = "f32"
    b.k += 100


@corner()
def logits_all_minus_300(b: Draft) -> None:
    b.type_K = "f32"
    b.k[..., 0] = 30
    b.q[..., 0] = -10 * b.D**0.5


@corner()
def queries_of_zero(b: Draft) -> None:
    b.q[...] = 0
    b.causal()


@corner()
def some_queries_of_zero(b: Draft) -> None:
    b.q[:, :, ::2] = 0


@corner()
def keys_all_the_same(b: Draft) -> None:
    b.k[...] = b.k[:, :, :1]


@corner()
def scale_zero(b: Draft) -> None:
    b.scale = 0.0
    b.causal()


@corner()
def scale_negative(b: Draft) -> None:
    b.scale = -b.scale
    b.causal()
    b.sink(0.5, -1)


@corner()
def scale_negative_alibi(b: Draft) -> None:
    b.scale = -b.scale
    b.full()[...] = -b.distance()
    b.max_bias = 8


@corner()
def scale_tiny_q_huge(b: Draft) -> None:
    b.scale = 1e-20
    b.q *= 1e19
    b.causal()


@corner()
def scale_huge_q_tiny(b: Draft) -> None:
    b.scale = 1e15
    b.q *= 1e-16
    b.full()[...] = b.normal(b.N, b.M)


@corner()
def scale_denormal(b: Draft) -> None:
    b.scale = 1e-40
    b.causal()


@corner()
def k_tiny_q_huge(b: Draft) -> None:
    b.type_K = "f32"
    b.k *= 1e-15
    b.q *= 1e15
    b.full()[...] = b.normal(b.N, b.M)


@corner()
def v_tiny_do_huge(b: Draft) -> None:
    b.type_V = "f32"
    b.v *= 1e-18
    b.d *= 1e18
    b.causal()


@corner()
def v_huge_do_tiny(b: Draft) -> None:
    b.type_V = "f32"
    b.v *= 1e15
    b.d *= 1e-15
    b.sink(1)


@corner("square")
def q_and_k_of_1e_minus_18(b: Draft) -> None:
    """Logits of zero: a softmax of the mask alone."""
    b.type_K = "f32"
    b.k *= 1e-18
    b.q *= 1e-18
    mask = b.full()
    mask[...] = b.normal(b.N, b.M)
    mask[..., ::3] = NINF


def _softcap(cap: float) -> Build:
    def build(b: Draft) -> None:
        b.softcap = cap
        b.causal()

    return build


for _cap in (1e4, 1e5, 1e6, 1e9, 1e30):
    corner(name=f"softcap_{_cap:g}")(_softcap(_cap))
corner(name="softcap_negative")(_softcap(-20.0))
corner(name="softcap_small")(_softcap(0.05))


@corner()
def softcap_tiny(b: Draft) -> None:
    b.softcap = 1e-20
    b.q *= 1e-20
    b.causal()


def _saturated(by: float) -> Build:
    """Every logit is about so many times the cap: 1 - tanh^2 is 2.5e-5 at 6, 4.5e-7 at 8, 1e-8 at 10."""

    def build(b: Draft) -> None:
        b.type_K = "f32"
        b.softcap = 2.0
        b.q[..., 0] = by * b.softcap * b.D**0.5
        b.k[..., 0] = 1
        b.q[..., 1:] *= 0.5

    return build


corner(name="softcap_saturated")(_saturated(10))
corner(name="softcap_saturated_at_6")(_saturated(6))
corner(name="softcap_saturated_at_8")(_saturated(8))


@corner("long")
def softcap_bias_positive(b: Draft) -> None:
    b.softcap = 10.0
    mask = b.full()
    mask[..., b.M // 2 :] = 20
    mask[..., ::3] += 2


@corner()
def softcap_and_sinks(b: Draft) -> None:
    b.softcap = 10.0
    b.causal()
    b.sink(2, -60000, 9)


# dO, V and K of very different size


@corner("many128", "square")
def heads_of_a_group_with_very_different_do(b: Draft) -> None:
    b.d *= np.resize(np.array([1, 1e-5, 1e-3], np.float32), b.H)[:, None]
    b.causal()


@corner(shapes=("wide", "square"))
def heads_of_a_group_with_do_of_1_and_3e7(b: Draft) -> None:
    b.d *= np.resize(np.array([1, 3e-7], np.float32), b.H)[:, None]
    b.causal()


@corner("square")
def a_head_without_gradient(b: Draft) -> None:
    b.d[:, :, 1::2] = 0
    b.causal()


@corner("square")
def rows_of_do_with_very_different_size(b: Draft) -> None:
    b.d *= np.exp2(-b.rng.integers(0, 20, (b.S, b.N, b.H, 1)), dtype=np.float32)
    b.causal()


@corner("square")
def do_huge_and_zero_rows(b: Draft) -> None:
    b.d *= 1e9
    b.d[:, ::3] = 0
    b.causal()


@corner("square")
def do_of_1e_minus_30(b: Draft) -> None:
    b.d *= 1e-30
    b.causal()


@corner()
def longest_do_where_q_is_smallest(b: Draft) -> None:
    b.d *= 1e-6
    b.d[:, 5] *= 1e6
    b.q[:, :, 5] *= 1e-6


@corner()
def longest_do_where_q_is_zero(b: Draft) -> None:
    b.d *= 1e-7
    b.d[:, 5] *= 1e7
    b.q[:, :, 5] = 0


@corner()
def last_v_is_large_and_seen_once(b: Draft) -> None:
    b.type_V = "f32"
    b.causal()
    b.v[:, :, -1] *= 300


@corner()
def last_v_is_huge_and_seen_once(b: Draft) -> None:
    b.type_V = "f32"
    b.causal()
    b.v[:, :, -1] *= 1e5
    b.d[:, -1] *= 1e-5


@corner()
def last_k_is_huge_and_seen_once(b: Draft) -> None:
    b.type_K = "f32"
    b.causal()
    b.k[:, :, -1] *= 1e5
    b.q[:, :, -1] *= 1e-5


@corner()
def v_zero(b: Draft) -> None:
    b.v[...] = 0


@corner()
def v_zero_in_one_head(b: Draft) -> None:
    b.v[:, 0] = 0
    b.causal()


@corner()
def v_constant(b: Draft) -> None:
    b.v[...] = 3


# what rows that see no key hold


def _blind(q: float = 1.0, d: float = 1.0, sinks: tuple[float, ...] = ()) -> Build:
    """Every fifth row sees no key; its q and dO are multiplied."""

    def build(b: Draft) -> None:
        b.spoilt = False
        b.causal()[..., ::5, :] = NINF
        b.q[:, :, ::5] *= np.float32(q)
        b.d[:, ::5] *= np.float32(d)
        if sinks:
            b.sink(*sinks)

    return build


corner(name="rows_without_keys_hold_nan_queries")(_blind(q=np.nan))
corner(name="rows_without_keys_hold_nan_do")(_blind(d=np.nan))
corner("square", name="rows_without_keys_hold_large_queries")(_blind(q=1e7))
corner("square", name="rows_without_keys_hold_large_do")(_blind(d=1e7))
corner("square", name="rows_without_keys_hold_huge_queries_and_do")(_blind(q=3e37, d=3e37))
corner("square", name="rows_with_a_sink_alone_hold_large_do")(_blind(d=1e7, sinks=(0.5,)))
corner(name="rows_with_a_sink_alone_hold_inf_do")(_blind(d=np.inf, sinks=(0.5,)))


# parts, windows, the forward's output


def _subsets(*parts: str) -> list[dict[str, Any]]:
    return [{"grads": tuple(x for i, x in enumerate(parts) if bits >> i & 1)} for bits in range(1 << len(parts))]


@corner("many128", "square", "long")
def parts_in_every_combination(b: Draft) -> None:
    b.causal()[..., 3, :] = NINF
    b.sink(0.5, -1)
    b.runs = _subsets("dq", "dk", "dv", "dsinks")


@corner()
def parts_in_every_combination_softcap(b: Draft) -> None:
    b.causal()
    b.softcap = 15.0
    b.runs = _subsets("dq", "dk", "dv")


@corner("few96", "many128", "square", "long")
def windows(b: Draft) -> None:
    b.causal()[..., 70:90] = NINF
    m = b.M
    pairs = [(0, 1), (1, 1), (63, 2), (64, 64), (65, 63), (127, 2), (72, 10)]
    pairs += [(m - 1, 1), (m - 65, 65), (129, m - 129), (0, m - 1)]
    b.runs = [{"kv_first": first, "kv_count": count} for first, count in pairs if first + count <= m]
    b.runs += [{"kv_first": 5, "kv_count": 67, "grads": ("dk",)}, {"kv_first": 66, "kv_count": 60, "grads": ("dv",)}]


@corner()
def o_given(b: Draft) -> None:
    b.causal()[..., ::6, :] = NINF
    b.sink(1, -1)
    b.o = True


# sizes


def size(name: str, *dims: int, mask: str = "causal", sinks: bool = False, softcap: float = 0.0) -> None:
    def build(b: Draft) -> None:
        b.draw(*dims)
        b.softcap = softcap
        if mask == "causal":
            b.causal()
        elif mask != "none":
            b.full()[..., :: int(mask)] = 3
        if sinks:
            b.sink(0.5, -1)

    corner(shapes=("few",), name=f"size_{name}")(build)


size("n64_m64", 1, 2, 2, 64, 64, 64)
size("n64_m64_d128", 2, 1, 4, 64, 64, 128, mask="none")
size("n65_m65", 1, 1, 1, 65, 65, 64, sinks=True)
size("n127_m129_d256", 1, 1, 2, 127, 129, 256)
size("n129_m127", 1, 2, 1, 129, 127, 128, mask="none")
size("n700_m64", 1, 1, 3, 700, 64, 64, sinks=True)
size("n700_m65_d256", 1, 1, 1, 700, 65, 256, mask="3")
size("n64_m3000_d80", 1, 1, 1, 64, 3000, 80, mask="none", softcap=20.0)
size("group_of_16", 1, 1, 16, 64, 64, 64, mask="5")
size("group_of_13_d112", 1, 1, 13, 70, 90, 112, sinks=True)
size("n1_m1", 2, 2, 2, 1, 1, 64, sinks=True)
size("n1_m3000", 1, 2, 4, 1, 3000, 64, mask="none", sinks=True)
size("n3000_m1", 1, 1, 2, 3000, 1, 64, mask="none", sinks=True)
size("d8", 1, 2, 2, 70, 70, 8, sinks=True)


# memory


def odd(offset: int, pad: int) -> Arrange:
    """So many elements (bytes of k and v) before the first and behind each row."""

    def arrange(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        *outer, row = array.shape
        memory = np.empty(offset + array.size // row * (row + pad), array.dtype)
        return memory, memory[offset:].reshape(*outer, row + pad)[..., :row]

    return arrange


def shared(axis: int) -> Arrange:
    """A stride of 0."""

    def arrange(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        memory = np.empty([1 if i == axis else n for i, n in enumerate(array.shape)], array.dtype)
        strides = [0 if i == axis else n for i, n in enumerate(memory.strides)]
        return memory, as_strided(memory, array.shape, strides)

    return arrange


def turned(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Components farther apart than rows."""
    *outer, rows, width = array.shape
    memory = np.empty((*outer, width, rows), array.dtype)
    return memory, memory.swapaxes(-1, -2)


@corner()
def layout_odd_offsets(b: Draft) -> None:
    b.causal()
    b.arranged = {"q": odd(1, 3), "k": odd(2, 2), "v": odd(6, 6), "d": odd(3, 1), "mask": odd(1, 1)}


@corner()
def layout_odd_mask_rows(b: Draft) -> None:
    b.causal()
    b.sink(1)
    b.arranged = {"mask": odd(3, 5)}


@corner()
def layout_f32_kv_odd(b: Draft) -> None:
    b.type_K = b.type_V = "f32"
    b.causal()
    b.arranged = {"k": odd(4, 4), "v": odd(12, 12)}


@corner()
def layout_components_far_apart(b: Draft) -> None:
    b.causal()
    b.arranged = {"q": turned, "d": turned}


@corner()
def layout_kv_shared_by_heads(b: Draft) -> None:
    b.causal()
    b.k[:], b.v[:] = b.k[:, :1], b.v[:, :1]
    b.arranged = {"k": shared(1), "v": shared(1)}


@corner(shapes=("many", "wide"))
def layout_kv_shared_by_sequences(b: Draft) -> None:
    b.causal()
    b.k[:], b.v[:] = b.k[:1], b.v[:1]
    b.arranged = {"k": shared(0), "v": shared(0)}


@corner()
def layout_q_and_do_shared_by_heads(b: Draft) -> None:
    b.causal()
    b.q[:], b.d[:] = b.q[:, :1], b.d[:, :, :1]
    b.arranged = {"q": shared(1), "d": shared(2)}


@corner()
def layout_mask_row_shared(b: Draft) -> None:
    mask = b.full()
    mask[...] = b.normal(b.M)
    mask[..., ::3] = NINF
    b.arranged = {"mask": shared(2)}


@corner()
def layout_rows_of_q_shared(b: Draft) -> None:
    b.causal()
    b.q[:] = b.q[:, :, :1]
    b.arranged = {"q": shared(2)}


@corner()
def kinds_q8_0_and_bf16(b: Draft) -> None:
    b.type_K, b.type_V = "q8_0", "bf16"
    b.causal()[..., ::4] += 2
    b.sink(1, 2)


@corner()
def prec_f32_bias_sinks(b: Draft) -> None:
    b.prec = "f32"
    mask = b.full()
    mask[..., b.M // 2 :] = 4
    mask[..., ::9] = NINF
    b.sink(1, 2)
