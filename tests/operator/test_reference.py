from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import case
from numpy.typing import NDArray

from pyharness.case import cases, inputs, reference
from pyharness.case.operands import Inputs

CASES = [
    "hsk=64,hsv=64,nh=4,nhkv=2,kv=600,nb=300",
    "hsk=32,hsv=64,nh=6,nhkv=3,kv=130,nb=20,ns=2,mask=rows,mh=3,ms=2,mpad=3,softcap=15,sinks=1,type_K=q8_0,type_V=q4_0",
    "hsk=40,hsv=24,nh=6,nhkv=2,kv=20,nb=33,max_bias=8,type_K=bf16,type_V=f32,kv_first=5,kv_count=7",
    "hsk=64,hsv=32,nh=2,nhkv=1,kv=64,nb=16,vview=1,mask=pad,sinks=1",
    "hsk=32,hsv=32,nh=2,nhkv=1,kv=64,nb=7,layout=bcast,mask=none",
    "hsk=32,hsv=32,nh=2,nhkv=1,kv=64,nb=0,sinks=1",
    "hsk=32,hsv=32,nh=2,nhkv=1,kv=0,nb=5",
    "hsk=16,hsv=32,nh=4,nhkv=2,kv=20,nb=9,ns=2,mask=random,mh=2,pair=1",
    "hsk=16,hsv=16,nh=2,nhkv=1,kv=20,nb=9,mask=bias",
    "hsk=16,hsv=16,nh=2,nhkv=1,kv=600,nb=9,kv_first=20,kv_count=560",
    "hsk=16,hsv=16,nh=2,nhkv=1,kv=300,nb=9,kv_first=20,kv_count=60",
]


def row_by_row(x: Inputs, dtype: Any = np.float64) -> dict[str, NDArray[Any]]:
    """The formulas as they stand, one query row at a time."""
    sequences, heads, kv_heads, rows, keys = x.sizes
    seen = x.seen()[..., None]
    k, v = np.where(seen, x.k_f32(), 0).astype(dtype), np.where(seen, x.v_f32(), 0).astype(dtype)
    parts = {
        "dq": np.zeros(x.q.shape, dtype),
        "dk": np.zeros(k.shape, dtype),
        "dv": np.zeros(v.shape, dtype),
        "lse": np.full((sequences, heads, rows), -np.inf, dtype),
        "d": np.zeros((sequences, heads, rows), dtype),
        "dsinks": np.zeros(heads, dtype),
        "o": np.zeros((sequences, heads, rows, x.d.shape[3]), dtype),
    }
    power = 2 ** int(np.log2(heads))
    for s, h, i in np.ndindex(sequences, heads, rows):
        g = h // (heads // kv_heads)
        q, d = x.q[s, h, i].astype(dtype), x.d[s, i, h].astype(dtype)
        if x.mask is not None and np.isneginf(x.mask[s % x.mask.shape[0], h % x.mask.shape[1], i]).all():
            q, d = np.zeros_like(q), np.zeros_like(d)
        scores = x.scale * k[s, g] @ q
        factor = np.ones(keys)
        if x.softcap:
            factor = 1 / np.cosh(scores / x.softcap) ** 2
            scores = x.softcap * np.tanh(scores / x.softcap)
        if x.mask is not None:
            slope = 1.0
            if x.max_bias:
                exponent = h + 1 if h < power else (2 * (h - power) + 1) / 2
                slope = 2 ** (-x.max_bias * exponent / power)
            scores = scores + slope * x.mask[s % x.mask.shape[0], h % x.mask.shape[1], i].astype(dtype)
        sink = dtype(-np.inf if x.sinks is None else x.sinks[h])
        total = np.exp(scores).sum() + np.exp(sink)
        if total == 0:
            continue
        p, dp = np.exp(scores) / total, v[s, g] @ d
        row = p @ dp if x.o is None else d @ x.o[s, i, h].astype(dtype)
        ds = p * (dp - row) * factor
        parts["lse"][s, h, i], parts["d"][s, h, i] = np.log(total), row
        parts["o"][s, h, i] = p @ v[s, g]
        parts["dq"][s, h, i] = x.scale * ds @ k[s, g]
        parts["dk"][s, g] += x.scale * np.outer(ds, q)
        parts["dv"][s, g] += np.outer(p, d)
        parts["dsinks"][h] -= np.exp(sink) / total * row
    window = slice(x.kv_first, x.kv_first + x.kv_count)
    parts["dk"], parts["dv"] = parts["dk"][:, :, window], parts["dv"][:, :, window]
    return parts


@pytest.mark.parametrize("text", [*CASES, f"{CASES[1]},o=1"])
def test_agrees_with_the_formulas_row_by_row(text: str) -> None:
    given = inputs.make(case(text), 0)
    want = row_by_row(given)
    for part, array in reference.backward(given).items():
        np.testing.assert_allclose(array, want[part], rtol=1e-11, atol=1e-13, err_msg=part)


def test_slopes_are_a_geometric_series_over_the_power_of_two_and_half_steps_beyond() -> None:
    want = [2 ** (-0.5 * i / 8) for i in range(1, 9)] + [2 ** (-0.5 * (i + 0.5) / 8) for i in range(4)]
    np.testing.assert_allclose(reference.slopes(12, 0.5), want, rtol=1e-15)
    for off in (0, -1):
        np.testing.assert_array_equal(reference.slopes(12, off), np.ones(12))


def test_blocks_of_any_size_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs.make(case(CASES[1]), 0)
    want = reference.backward(given)
    monkeypatch.setattr(reference, "ROWS", 7)
    monkeypatch.setattr(reference, "KEYS", 11)
    for part, array in reference.backward(given).items():
        np.testing.assert_allclose(array, want[part], rtol=1e-11, atol=1e-13, err_msg=part)


def test_repeats_give_the_same_bits() -> None:
    given = inputs.make(case(CASES[0]), 0)
    first, second = reference.backward(given), reference.backward(given)
    for part, array in first.items():
        np.testing.assert_array_equal(array, second[part])


@pytest.mark.parametrize("grads", ["q", "k", "v", "kv", "s"])
def test_only_what_is_wanted_is_returned_and_it_is_the_same(grads: str) -> None:
    whole = case("hsk=32,hsv=32,nh=4,nhkv=2,kv=60,nb=9,sinks=1")
    every = reference.backward(inputs.make(whole, 0))
    given = inputs.make(whole, 0)
    given.grads = whole.replace(grads=grads).wanted
    some = reference.backward(given)
    assert set(some) == {*given.grads, "lse", "d"}
    for part, array in some.items():
        np.testing.assert_array_equal(array, every[part], err_msg=part)


def test_large_scores_do_not_overflow() -> None:
    given = inputs.make(case("hsk=16,hsv=16,nh=2,nhkv=1,kv=9,nb=5,type_K=f32,mask=lowest,scale=1000"), 0)
    for part, array in reference.backward(given).items():
        assert np.isfinite(array[~np.isneginf(array)]).all(), part


def test_a_bias_that_all_keys_share_moves_the_lse_alone() -> None:
    given = inputs.make(case("hsk=16,hsv=16,nh=2,nhkv=1,kv=40,nb=5,type_K=f32,mask=bias,pair=1"), 0)
    assert given.mask is not None
    given.mask = np.zeros_like(given.mask)
    want = reference.backward(given)
    given.mask -= 2048
    found = reference.backward(given)
    np.testing.assert_allclose(found.pop("lse") + 2048, want.pop("lse"), rtol=0, atol=1e-11)
    for part, array in found.items():
        np.testing.assert_allclose(array, want[part], rtol=1e-9, atol=1e-12, err_msg=part)


def test_progress_goes_from_zero_to_one() -> None:
    seen: list[float] = []
    reference.backward(inputs.make(case(CASES[0]), 0), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_sink_of_inf_takes_all_rows_of_its_head_in_every_sequence() -> None:
    given = inputs.make(case("hsk=16,hsv=16,nh=3,nhkv=1,kv=9,nb=5,ns=2,sinks=1"), 0)
    assert given.sinks is not None
    want = reference.backward(given)
    given.sinks[2] = np.inf
    found = reference.backward(given)
    assert np.isposinf(found["lse"][:, 2]).all()
    np.testing.assert_array_equal(found["lse"][:, :2], want["lse"][:, :2])
    assert not found["dq"][:, 2].any()
    assert not found["d"][:, 2].any()


def test_a_given_output_replaces_the_recomputed_one() -> None:
    given = inputs.make(case("hsk=16,hsv=16,nh=2,nhkv=1,kv=9,nb=5,o=1"), 0)
    exact = reference.backward(given)["d"]
    assert given.o is not None
    given.o = given.o * np.float32(2)
    np.testing.assert_allclose(reference.backward(given)["d"], 2 * exact, rtol=1e-12)


def rounding_row_by_row(x: Inputs) -> dict[str, NDArray[np.float64]]:
    """What F32 may make of each part as reference.rounding says it, one query row at a time."""
    sequences, heads, kv_heads, rows, keys = x.sizes
    group, width_k, width_v = heads // kv_heads, x.q.shape[3], x.d.shape[3]
    (q_all, k_all, v_all, d_all), want = (a.astype(np.float64) for a in x.shown()), row_by_row(x)
    window = slice(x.kv_first, x.kv_first + x.kv_count)
    parts = {part: np.zeros((sequences, heads)) for part in ("dq", "dk", "dv", "lse", "d", "dsinks")}
    for s, h, i in np.ndindex(sequences, heads, rows):
        q, k, v, d = q_all[s, h, i], k_all[s, h // group], v_all[s, h // group], d_all[s, i, h]
        if not np.isfinite(want["lse"][s, h, i]):
            continue
        mask = np.zeros(keys) if x.mask is None else x.mask[s % x.mask.shape[0], h % x.mask.shape[1], i].astype(float)
        seen = ~np.isneginf(mask)
        k, v, mask = k[seen], v[seen], mask[seen]
        products, dp = x.scale * q * k, v @ d
        of_product = width_k * (np.square(products).sum(axis=1) + np.square(products.sum(axis=1)))
        scores = logits = products.sum(axis=1)
        slope, of_slope = np.ones(len(k)), np.zeros(len(k))
        if x.softcap:
            scores = x.softcap * np.tanh(logits / x.softcap)
            slope = 1 / np.cosh(logits / x.softcap) ** 2
            of_slope = np.square(2 * np.tanh(logits / x.softcap) / x.softcap) * of_product
        scores = scores + reference.slopes(heads, x.max_bias)[h] * mask
        lse, row_d = want["lse"][s, h, i], want["d"][s, h, i]
        p = np.exp(scores - lse)
        of_dp = width_v * (np.square(v * d).sum(axis=1) + np.square(dp))
        of_score = of_product * slope**2 + scores**2
        of_lse = p.sum() * p @ of_score + lse**2 + keys * p @ p
        of_d = p.sum() * p @ (of_dp + (dp - row_d) ** 2 * of_score) + keys * (p * dp) @ (p * dp)
        if x.o is not None:
            of_d = width_v * (np.square(d * x.o[s, i, h]).sum() + (d @ x.o[s, i, h]) ** 2)
        of_d += row_d**2
        ds = p * (dp - row_d) * slope
        of_ds = ds**2 * (of_score + of_slope + of_lse) + (p * slope) ** 2 * of_dp
        of_dk = of_ds + rows * group * ds**2 + (p * slope) ** 2 * of_d
        of_dv = p**2 * (of_score + of_lse + rows * group)
        inside = np.isin(np.flatnonzero(seen), np.arange(keys)[window])
        length = np.linalg.norm(k, axis=1)
        parts["dq"][s, h] += x.scale**2 * ((of_ds + keys * ds**2) @ length**2 + of_d * (p * slope @ length) ** 2)
        parts["dk"][s, h] += x.scale**2 * (q @ q) * of_dk[inside].sum()
        parts["dv"][s, h] += (d @ d) * of_dv[inside].sum()
        parts["lse"][s, h] += of_lse
        parts["d"][s, h] += of_d
        if x.sinks is not None:
            parts["dsinks"][s, h] += np.exp(float(x.sinks[h]) - lse) ** 2 * (of_d + row_d**2 * (of_lse + rows))
    for part in ("dk", "dv"):
        parts[part] = parts[part].reshape(sequences, kv_heads, group).sum(axis=2)
    parts["dsinks"] = parts["dsinks"].sum(axis=0)
    elements = {"dq": rows * width_k, "dk": x.kv_count * width_k, "dv": x.kv_count * width_v, "dsinks": 1}
    return {part: 2.0**-48 * array + elements.get(part, rows) * 2.0**-252 for part, array in parts.items()}


def test_rows_that_see_nothing_have_no_gradient_whatever_their_output_and_others_heads_see() -> None:
    given = inputs.make(case("hsk=16,hsv=16,nh=2,nhkv=2,kv=9,nb=5,mask=random,mh=2,sinks=1,o=1"), 0)
    assert given.mask is not None
    assert given.o is not None
    assert given.sinks is not None
    given.sinks[:] = -np.inf
    given.mask[0, 0, 1] = given.mask[0, 1, 3] = -np.inf
    given.mask[0, 0, 3, 0] = given.mask[0, 1, 1, 0] = 0
    want = row_by_row(given)
    assert np.isneginf(want["lse"][0]).tolist() == [[i == row for i in range(5)] for row in (1, 3)]
    np.testing.assert_allclose(reference.forward(given), want["o"].transpose(0, 2, 1, 3), rtol=1e-11, atol=1e-13)
    for part, array in reference.backward(given).items():
        np.testing.assert_allclose(array, want[part], rtol=1e-11, atol=1e-13, err_msg=part)
    rounding = rounding_row_by_row(given)
    for part, array in reference.rounding(given, want["lse"], want["d"]).items():
        np.testing.assert_allclose(array, rounding[part], rtol=1e-9, err_msg=part)


@pytest.mark.parametrize("text", [*CASES, f"{CASES[1]},o=1"])
def test_rounding_agrees_with_its_formulas_row_by_row(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ROWS", 70)
    monkeypatch.setattr(reference, "KEYS", 110)
    given = inputs.make(case(text), 0)
    parts = reference.backward(given)
    want = rounding_row_by_row(given)
    for part, array in reference.rounding(given, parts["lse"], parts["d"]).items():
        np.testing.assert_allclose(array, want[part], rtol=1e-9, err_msg=part)


@pytest.mark.parametrize("text", [*CASES[:5], f"{CASES[1]},o=1", f"{CASES[0]},data=vconst", f"{CASES[2]},data=kmean"])
def test_plain_f32_arithmetic_is_within_the_rounding_that_is_derived_for_it(text: str) -> None:
    given = inputs.make(case(text), 0)
    want, got = reference.backward(given), row_by_row(given, np.float32)
    rounding = reference.rounding(given, want["lse"], want["d"])
    for part, right in want.items():
        difference = np.where(np.isneginf(right), 0, got[part]) - np.where(np.isneginf(right), 0, right)
        error = np.square(difference).sum(axis=tuple(range(2, right.ndim)) or None)
        allowed = cases.limits()["rounding"] * (rounding[part] if right.ndim > 1 else rounding[part].sum())
        assert (error <= allowed).all(), part
        assert error.sum() >= 1e-5 * allowed.sum(), part
