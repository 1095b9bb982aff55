from __future__ import annotations

import gguf
import numpy as np
import pytest
from attention import case, small

from pyharness.case import cases, inputs, quant
from pyharness.case.cases import Case


def test_inputs_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    first, again, other = (inputs.make(small(), seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.q, again.q)
    np.testing.assert_array_equal(first.k, again.k)
    assert (first.q != other.q).any()


@pytest.mark.parametrize("type_name", cases.TYPES)
def test_every_type_makes_finite_rows_of_about_unit_variance(type_name: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 3, 40, 256), np.float32)
    data = quant.quantize(values, type_name, rng)
    assert data.shape[-1] == 256 // cases.block(type_name)[0] * cases.block(type_name)[1]
    back = quant.dequantize(data, type_name)
    assert back.shape == values.shape
    assert np.isfinite(back).all()
    assert 0.5 < back.std() < 2


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_quantised_values_are_close_to_what_was_quantised(type_name: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((50, 64), np.float32)
    back = quant.dequantize(quant.quantize(values, type_name, rng), type_name)
    assert np.square(back - values).mean() < 0.02


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q6_K"])
def test_keys_that_no_row_sees_hold_nan(type_name: str) -> None:
    given = inputs.make(
        case(f"hsk=256,hsv=256,nh=2,nhkv=1,kv=32,nb=8,mask=pad,type_K={type_name},type_V={type_name}"), 0
    )
    seen = given.seen()[0, 0]
    assert seen[:24].all()
    assert not seen[24:].any()
    for values in (given.k_f32(), given.v_f32()):
        assert np.isfinite(values[0, 0, :24]).all()
        assert not np.isfinite(values[0, 0, 24:]).all(axis=1).any()


def test_rows_that_see_no_key_hold_nan_or_huge_numbers_and_count_as_zeros() -> None:
    given = inputs.make(small(mask="rows", mh=2, nb=40), 0)
    assert given.mask is not None
    hidden = np.isneginf(given.mask[0]).all(axis=2)
    np.testing.assert_array_equal(given.sees()[0], ~hidden[[0, 1, 0, 1]])
    q, _, _, d = given.shown()
    for values, counted in ((given.q, q), (given.d.transpose(0, 2, 1, 3), d.transpose(0, 2, 1, 3))):
        blind = values[~given.sees()]
        assert np.abs(blind[np.isfinite(blind)]).max() > 1e28
        assert 0.4 < np.isnan(blind).any(axis=1).mean() < 0.6
        assert np.abs(values[given.sees()]).max() < 10
        assert not counted[~given.sees()].any()
        np.testing.assert_array_equal(counted[given.sees()], values[given.sees()])


def visible(text: str) -> list[str]:
    """The first mask, a string for each row: x where it lets the key through."""
    mask = inputs.make(case(f"hsk=8,hsv=8,nh=2,nhkv=1,{text}"), 0).mask
    assert mask is not None
    return ["".join("." if x == -np.inf else "x" for x in row) for row in mask[0, 0]]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("kv=6,nb=3,mask=causal", ["xxxx..", "xxxxx.", "xxxxxx"]),
        ("kv=2,nb=4,mask=causal", ["..", "..", "x.", "xx"]),
        ("kv=6,nb=3,mask=swa:2", ["..xx..", "...xx.", "....xx"]),
        ("kv=6,nb=3,mask=docs:4", ["xxxx..", "....x.", "....xx"]),
        ("kv=8,nb=3,mask=pad", ["xxxxxx..", "xxxxxx..", "xxxxxx.."]),
        ("kv=4,nb=2,mask=lowest", ["xxxx", "xxxx"]),
        ("kv=4,nb=2,mask=bias", ["xxxx", "xxxx"]),
    ],
)
def test_masks_let_through_what_they_say(text: str, rows: list[str]) -> None:
    assert visible(text) == rows


def test_the_row_of_lowest_numbers_is_finite() -> None:
    mask = inputs.make(small(mask="lowest"), 0).mask
    assert mask is not None
    assert (mask[0, 0, 0] == -65504).all()


def test_masks_of_heads_and_sequences_differ_and_rows_beyond_the_queries_are_nan() -> None:
    mask = inputs.make(small(ns=2, ms=2, mh=4, mpad=3), 0).mask
    assert mask is not None
    assert mask.shape == (2, 4, 10, 20)
    assert np.isnan(mask[:, :, 7:]).all()
    assert len({mask[s, h, :7].tobytes() for s in range(2) for h in range(4)}) == 8


@pytest.mark.parametrize(
    ("data", "low", "high"), [("logits", 30, 42), ("normal", 0.8, 1.2), ("outlier", 20, 60), ("uniform", 0.2, 0.5)]
)
def test_scores_have_the_spread_that_the_data_is_for(data: str, low: float, high: float) -> None:
    given = inputs.make(case(f"hsk=128,hsv=128,nh=8,nhkv=8,kv=128,nb=128,type_K=f32,mask=none,data={data}"), 0)
    assert low < (given.scale * given.q @ given.k_f32().transpose(0, 1, 3, 2)).std() < high


def test_v_is_a_view_of_k() -> None:
    given = inputs.make(case("hsk=64,hsv=32,nh=2,nhkv=1,kv=8,nb=4,type_K=q8_0,type_V=q8_0,vview=1"), 0)
    np.testing.assert_array_equal(given.v_f32(), given.k_f32()[..., :32])
    assert np.shares_memory(given.v, given.k)


def test_broadcast_gradient_has_one_row() -> None:
    d = inputs.make(small(layout="bcast"), 0).d.reshape(-1, 16)
    assert (d == d[0]).all()


@pytest.mark.parametrize("text", ["mask=causal", "mask=random,mh=4", "mask=none", "mask=swa:3,ns=4,ms=2"])
def test_unmasked_pairs_are_counted(text: str) -> None:
    given = inputs.make(Case.parse(f"FLASH_ATTN_BACK(hsk=8,hsv=8,nh=8,nhkv=4,kv=12,nb=5,{text})"), 0)
    s, h, _, n, m = given.sizes
    want = s * h * n * m
    if given.mask is not None:
        tiled = np.tile(given.mask[:, :, :n], (s // given.mask.shape[0], h // given.mask.shape[1], 1, 1))
        want = int((tiled > -np.inf).sum())
    assert given.unmasked() == want


@pytest.mark.parametrize("text", [str(c) for c in cases.load(cases.CASES)[::17] if not c.capture])
def test_blank_inputs_have_the_shapes_of_real_ones(text: str) -> None:
    real, blank = inputs.make(Case.parse(text), 0), inputs.blank(Case.parse(text))
    for name in ("q", "k", "v", "mask", "sinks", "o", "d"):
        a, b = getattr(real, name), getattr(blank, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.shape, a.dtype) == (b.shape, b.dtype), name
    assert (real.scale, real.grads, real.kv_count) == (blank.scale, blank.grads, blank.kv_count)


def test_types_are_those_of_the_gguf_package() -> None:
    assert cases.TYPES["q4_K"] == gguf.GGMLQuantizationType.Q4_K
