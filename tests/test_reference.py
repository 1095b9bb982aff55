from __future__ import annotations

import numpy as np
import pytest
from attention import case
from numpy.typing import NDArray

from pyharness import inputs, reference
from pyharness.inputs import Inputs

CASES = [
    "hsk=64,hsv=64,nh=4,nhkv=2,kv=600,nb=300",
    "hsk=32,hsv=64,nh=6,nhkv=3,kv=130,nb=20,ns=2,mask=rows,mh=3,ms=2,mpad=3,softcap=15,sinks=1,type_K=q8_0,type_V=q4_0",
    "hsk=40,hsv=24,nh=6,nhkv=2,kv=20,nb=33,max_bias=8,type_K=bf16,type_V=f32,kv_first=5,kv_count=7",
    "hsk=64,hsv=32,nh=2,nhkv=1,kv=64,nb=16,vview=1,mask=pad,sinks=1",
    "hsk=32,hsv=32,nh=2,nhkv=1,kv=64,nb=7,layout=bcast,mask=none",
    "hsk=32,hsv=32,nh=2,nhkv=1,kv=64,nb=0,sinks=1",
    "hsk=32,hsv=32,nh=2,nhkv=1,kv=0,nb=5",
]


def row_by_row(x: Inputs) -> dict[str, NDArray[np.float64]]:
    """The formulas as they stand, one query row at a time."""
    sequences, heads, kv_heads, rows, keys = x.sizes
    seen = x.seen()[..., None]
    k, v = np.where(seen, x.k_f32(), 0).astype(np.float64), np.where(seen, x.v_f32(), 0).astype(np.float64)
    parts = {
        "dq": np.zeros(x.q.shape),
        "dk": np.zeros(k.shape),
        "dv": np.zeros(v.shape),
        "lse": np.full((sequences, heads, rows), -np.inf),
        "d": np.zeros((sequences, heads, rows)),
        "dsinks": np.zeros(heads),
    }
    power = 2 ** int(np.log2(heads))
    for s, h, i in np.ndindex(sequences, heads, rows):
        g = h // (heads // kv_heads)
        q, d = x.q[s, h, i].astype(np.float64), x.d[s, i, h].astype(np.float64)
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
            scores = scores + slope * x.mask[s % x.mask.shape[0], h % x.mask.shape[1], i].astype(np.float64)
        sink = -np.inf if x.sinks is None else float(x.sinks[h])
        total = np.exp(scores).sum() + np.exp(sink)
        if total == 0:
            continue
        p, dp = np.exp(scores) / total, v[s, g] @ d
        row = p @ dp
        ds = p * (dp - row) * factor
        parts["lse"][s, h, i], parts["d"][s, h, i] = np.log(total), row
        parts["dq"][s, h, i] = x.scale * ds @ k[s, g]
        parts["dk"][s, g] += x.scale * np.outer(ds, q)
        parts["dv"][s, g] += np.outer(p, d)
        parts["dsinks"][h] -= np.exp(sink) / total * row
    window = slice(x.kv_first, x.kv_first + x.kv_count)
    parts["dk"], parts["dv"] = parts["dk"][:, :, window], parts["dv"][:, :, window]
    return parts


@pytest.mark.parametrize("text", CASES)
def test_agrees_with_the_formulas_row_by_row(text: str) -> None:
    given = inputs.make(case(text), 0)
    want = row_by_row(given)
    for part, array in reference.backward(given).items():
        np.testing.assert_allclose(array, want[part], rtol=1e-11, atol=1e-13, err_msg=part)


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


def test_progress_goes_from_zero_to_one() -> None:
    seen: list[float] = []
    reference.backward(inputs.make(case(CASES[0]), 0), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_given_output_replaces_the_recomputed_one() -> None:
    given = inputs.make(case("hsk=16,hsv=16,nh=2,nhkv=1,kv=9,nb=5,o=1"), 0)
    exact = reference.backward(given)["d"]
    assert given.o is not None
    given.o = given.o * np.float32(2)
    np.testing.assert_allclose(reference.backward(given)["d"], 2 * exact, rtol=1e-12)
