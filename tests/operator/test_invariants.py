"""Identities that need no reference, in a small size and in one that every kernel path takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from attention import NINF, Operator, attention, case, small

from pyharness.case import inputs
from pyharness.case.operands import Inputs
from pyharness.device import ggml

MASKS = ("none", "causal", "swa:5", "random", "rows", "docs:6", "bias")
SIZES: dict[str, dict[str, Any]] = {
    "small": {"nb": 20, "kv": 20},
    "wide": {"nb": 80, "kv": 130, "hsk": 64, "hsv": 64},
}


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def f32(size: str, **changes: Any) -> Inputs:
    """Seeded F32 inputs without keys that no row sees."""
    given = inputs.make(small(**SIZES[size] | changes), 0)
    seen = given.seen()[..., None]
    given.k = np.where(seen, given.k, 0).astype(np.uint8)
    given.v = np.where(seen, given.v, 0).astype(np.uint8)
    return given


def test_zero_incoming_gradient_gives_exact_zeros(op: Operator, size: str) -> None:
    given = f32(size, sinks=1, mask="random")
    given.d[:] = 0
    parts = op.run(given)
    for part in ("dq", "dk", "dv", "d", "dsinks"):
        assert not parts[part].any(), part


def test_gradients_are_linear_in_the_incoming_gradient_to_the_bit_for_powers_of_two(op: Operator, size: str) -> None:
    given = f32(size, sinks=1)
    once = op.run(given)
    given.d *= np.float32(0.25)
    quarter = op.run(given)
    for part in ("dq", "dk", "dv", "d", "dsinks"):
        np.testing.assert_array_equal(quarter[part], once[part] * np.float32(0.25), err_msg=part)


def test_gradients_add_up(op: Operator, size: str) -> None:
    first, second = f32(size), f32(size)
    second.d = np.random.default_rng(1).standard_normal(second.d.shape, np.float32)
    both = dataclasses.replace(first, d=first.d + second.d)
    a, b, c = (op.run(given) for given in (first, second, both))
    for part in ("dq", "dk", "dv"):
        op.near(a[part] + b[part], c[part], what=part)


@pytest.mark.parametrize("mask", MASKS)
def test_dv_sums_to_the_incoming_gradient_of_the_rows_that_see_a_key(op: Operator, size: str, mask: str) -> None:
    given = f32(size, mask=mask, mh=1)
    parts = op.run(given)
    d = np.where(np.isneginf(parts["lse"])[..., None], 0, given.d.transpose(0, 2, 1, 3).astype(np.float64))
    s, h, hkv, _, _ = given.sizes
    want = d.sum(axis=2).reshape(s, hkv, h // hkv, -1).sum(axis=2)
    op.near(parts["dv"].astype(np.float64).sum(axis=2), want)


@pytest.mark.parametrize("mask", MASKS)
def test_dk_sums_to_zero_without_sinks_and_softcap(op: Operator, size: str, mask: str) -> None:
    dk = op.run(f32(size, mask=mask))["dk"]
    op.near(dk.astype(np.float64).sum(axis=2), 0, dk)


def test_equal_rows_of_v_give_no_gradient_to_q_and_k(op: Operator, size: str) -> None:
    given = f32(size)
    usual = op.run(given)
    v = given.v_f32().copy()
    v[:] = v[:, :, :1]
    given.v = v.view(np.uint8)
    parts = op.run(given)
    for part in ("dq", "dk"):
        op.near(parts[part], 0, usual[part], part)


def test_permuting_keys_permutes_their_gradients(op: Operator, size: str) -> None:
    given = f32(size, mask="random")
    assert given.mask is not None
    order = np.random.default_rng(0).permutation(given.sizes[4])
    other = dataclasses.replace(
        given, k=given.k[:, :, order].copy(), v=given.v[:, :, order].copy(), mask=given.mask[..., order].copy()
    )
    a, b = op.run(given), op.run(other)
    op.near(b["dq"], a["dq"])
    op.near(b["dk"], a["dk"][:, :, order])
    op.near(b["dv"], a["dv"][:, :, order])


def test_masked_keys_behind_the_others_change_nothing_and_get_exact_zeros(op: Operator, size: str) -> None:
    given = f32(size, mask="bias")
    assert given.mask is not None
    extra = 45
    junk = np.full((*given.k.shape[:2], extra, given.k.shape[3]), 0xFF, np.uint8)
    hidden = np.full((*given.mask.shape[:3], extra), -np.inf, np.float16)
    longer = dataclasses.replace(
        given,
        case=given.case.replace(kv=given.case.kv + extra),
        k=np.concatenate((given.k, junk), axis=2),
        v=np.concatenate((given.v, junk), axis=2),
        mask=np.concatenate((given.mask, hidden), axis=3),
        kv_count=given.kv_count + extra,
    )
    a, b = op.run(given), op.run(longer)
    keys = given.sizes[4]
    for part in ("dq", "lse", "d"):
        op.near(b[part], a[part], what=part)
    for part in ("dk", "dv"):
        op.near(b[part][:, :, :keys], a[part], what=part)
        assert not b[part][:, :, keys:].any(), part


def test_grouped_heads_equal_repeated_kv_heads_summed_over_the_group(op: Operator, size: str) -> None:
    given = f32(size, nh=6, nhkv=2)
    repeated = dataclasses.replace(
        given,
        case=given.case.replace(nhkv=6),
        k=np.repeat(given.k, 3, axis=1),
        v=np.repeat(given.v, 3, axis=1),
    )
    a, b = op.run(given), op.run(repeated)
    op.near(a["dq"], b["dq"])
    for part in ("dk", "dv"):
        s, _, keys, width = b[part].shape
        op.near(a[part], b[part].reshape(s, 2, 3, keys, width).sum(axis=2), what=part)


def test_several_sequences_equal_as_many_runs_of_one(op: Operator, size: str) -> None:
    """To the bit on the CPU; CUDA cuts the work of few sequences into more partial sums."""
    given = f32(size, ns=3, mask="random", ms=3)
    assert given.mask is not None
    together = op.run(given)
    for s in range(3):
        one = dataclasses.replace(
            given,
            case=given.case.replace(ns=1, ms=1),
            q=given.q[s : s + 1],
            k=given.k[s : s + 1],
            v=given.v[s : s + 1],
            d=given.d[s : s + 1],
            mask=given.mask[s : s + 1],
        )
        for part, array in op.run(one).items():
            op.near(array[0], together[part][s], what=part)
            assert not op.on_cpu or np.array_equal(array[0], together[part][s]), part


@pytest.mark.parametrize(
    "text",
    [
        "hsk=64,hsv=64,nh=6,nhkv=2,kv=300,nb=70,mask=random,mh=6,sinks=1,ns=2",
        "hsk=128,hsv=128,nh=8,nhkv=2,kv=1000,nb=33,type_K=q8_0,type_V=q8_0",
        "hsk=576,hsv=512,nh=16,nhkv=1,kv=130,nb=40,vview=1",
        "hsk=64,hsv=64,nh=1,nhkv=1,kv=2000,nb=1",
        "hsk=64,hsv=64,nh=2,nhkv=1,kv=40,nb=700,mask=none,softcap=30",
    ],
)
def test_any_number_of_threads_gives_the_same_bits(library: ggml.Library, cpu: ggml.Device, text: str) -> None:
    given = inputs.make(case(text), 0)
    digests = {threads: library.run(cpu, given, threads).digest for threads in (1, 2, 3, 16)}
    assert len(set(digests.values())) == 1, digests


def test_thirty_runs_give_the_same_bits(op: Operator) -> None:
    given = inputs.make(case("hsk=128,hsv=128,nh=4,nhkv=2,kv=256,nb=128,sinks=1"), 0)
    op.take(given)
    digests = set()
    with op.library.prepare(op.device, given) as session:
        for _ in range(30):
            session.poison()
            session.compute()
            digests.add(session.result().digest)
    assert len(digests) == 1


@pytest.mark.parametrize("infinite", [np.inf, np.nan])
def test_a_row_that_sees_a_sink_alone_leaves_every_gradient_alone(op: Operator, size: str, infinite: float) -> None:
    given = f32(size, mask="rows", sinks=1)
    assert given.mask is not None
    unseeing = np.isneginf(given.mask[0, 0, : given.q.shape[2]]).all(axis=1)
    assert unseeing.any()
    given.d[:, unseeing] = 0
    quiet = op.run(given)
    given.d[:, unseeing] = infinite
    for part, array in op.run(given).items():
        np.testing.assert_array_equal(array, quiet[part], err_msg=part)


@pytest.mark.parametrize("keys", [200, 9400])  # the latter are more than the CPU keeps at once
def test_keys_that_a_bias_outweighs_are_as_masked(op: Operator, keys: int) -> None:
    rng = np.random.default_rng(0)
    rows, hidden = 64, keys // 2
    q, k, v, d = (rng.standard_normal((1, 1, n, 64)) for n in (rows, keys, keys, rows))
    mask = np.zeros((1, 1, rows, keys))
    mask[..., :hidden] = NINF
    want = op.run(attention(q, k, v, d, mask, scale=0.125))
    mask[..., :hidden], mask[..., hidden:] = 0, 40000  # exp(-40000) is 0 as well
    want["lse"] += 40000
    for part, array in op.run(attention(q, k, v, d, mask, scale=0.125)).items():
        op.near(array, want[part], what=part)


@pytest.mark.parametrize("max_bias", [0, 8])
def test_a_bias_that_the_keys_of_a_row_share_costs_no_bits(op: Operator, max_bias: float) -> None:
    if not op.in_f32:
        pytest.skip(f"{op.path}: scores of 60000 have steps of 2^-8")
    rng = np.random.default_rng(0)
    (q, d), (k, v) = rng.standard_normal((2, 2, 4, 70, 16)), rng.standard_normal((2, 2, 2, 130, 16))
    mask = np.broadcast_to(rng.choice([0, 60000, -60000], (2, 4, 70, 1)), (2, 4, 70, 130))
    sinks = [-70000, 3, 0, 59990]
    given = attention(q, k, v, d, mask, sinks, scale=0.25)
    op.agree(dataclasses.replace(given, max_bias=float(max_bias)))


@pytest.mark.parametrize("first", [0.0, 2.0, -3.0, -65504.0, NINF])
@pytest.mark.parametrize("last", [0.0, 2.0, -3.0, -65504.0, NINF])
def test_a_bias_counts_the_same_in_every_chunk_of_keys(first: float, last: float, op: Operator) -> None:
    rng = np.random.default_rng(0)
    keys, rows = 9400, 64  # more keys than the CPU keeps at once
    q, k, v, d = (rng.standard_normal((1, 1, n, 64)) for n in (rows, keys, keys, rows))
    mask = np.full((1, 1, rows, keys), first)
    mask[..., 5000:] = last
    mask[..., 1, :5000:7] = 1.0
    op.agree(attention(q, k, v, d, mask, scale=0.125))


def test_d_is_taken_from_the_output_that_is_given(op: Operator, size: str) -> None:
    if not op.in_f32:
        pytest.skip(f"{op.path} takes D from its own weights, which a foreign output does not know")
    given = f32(size, hsv=24, mask="random", o=1)
    assert given.o is not None
    given.o = given.o * np.float32(2)
    op.agree(given)


@pytest.mark.parametrize("sink", [80, 88])
def test_keys_keep_what_a_sink_leaves_them_as_far_as_f32_goes(op: Operator, size: str, sink: float) -> None:
    if not op.in_f32:
        pytest.skip(f"{op.path}: fp16 holds what is within 2^24 of the largest")
    given = f32(size, nb=70, mask="random", sinks=1)
    assert given.sinks is not None
    given.sinks[:] = sink  # exp(-88) is below F32's normal range, and so is P of most keys
    parts = op.agree(given)
    for part in ("dq", "dk", "dv", "d"):
        assert parts[part].any(), part
