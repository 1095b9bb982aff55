"""Identities of the gradient that need no reference, over random shapes, layouts, types and masks.

On the CPU some hold to the bit. Each holds to the limit of the kernel path, and zeros are exact.
PYHARNESS_EXAMPLES=N tries N examples of each, others with another --hypothesis-seed; by default the same 100 always.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import hypothesis
import numpy as np
import pytest
from attention import Operator
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyharness.base import errors
from pyharness.case import cases, inputs, quant, reference
from pyharness.case.cases import Case
from pyharness.case.operands import Inputs
from pyharness.check import oracle
from pyharness.device import ggml

EXAMPLES = os.environ.get("PYHARNESS_EXAMPLES")
THREADS = 1  # of the CPU: the cases are small
GRADIENTS = ("dq", "dk", "dv")

F64 = NDArray[np.float64]

each_shape = hypothesis.settings(
    max_examples=int(EXAMPLES or 100),
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@st.composite
def shapes(draw: st.DrawFn, /, op: Operator, **held: Any) -> Case:
    """A case that the device takes, with some keys held."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def count(most: int) -> int:
        return int(draw(st.integers(1, most)))

    tensor = op.path in ("hopper", "mma")  # kernels on tiles
    types = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", *(("q4_K", "iq4_nl") if op.on_cpu else ()))
    kv_heads, sequences = count(3), one(1, 1, 2, 3)
    heads = kv_heads * one(1, 1, 2, 3, 4)
    size = one(64, 128, 256) if op.path == "hopper" else one(8, 32, 40, 64, 72, 96, 128, 256)
    keys, queries = (64 + count(120), 63 + count(90)) if tensor else (one(count(24), count(90)), one(1, count(40)))
    layout, kind, vview = one("cont", *cases.LAYOUTS), one(*types), one(0, 0, 0, 1)
    values: dict[str, Any] = {
        "hsk": size,
        "hsv": size if op.path == "hopper" else one(size, size, 64, 32),
        "nh": heads,
        "nhkv": kv_heads,
        "kv": keys,
        "nb": queries,
        "ns": sequences,
        "type_K": kind,
        "type_V": kind if vview else one(kind, *types),
        "mask": one(*(mask for mask in cases.MASKS if mask != "lowest")).replace("W", "7").replace("L", "11"),
        "softcap": one(0.0, 0.0, 15.0),
        "sinks": one(0, 1),
        # with one visible key the gradient is the rounding of o
        "o": one(0, 0, 1) if min(keys, queries) >= 8 else 0,
        "prec": one("default", "default", "f32"),
        "data": one("normal", "normal", "uniform", "kmean", "tiny", "huge"),
        "layout": layout,
        "vview": vview,
    } | held
    if values["mask"] != "none":
        more = {"mh": one(1, 1, heads), "ms": one(1, sequences), "mpad": one(0, 3), "max_bias": one(0.0, 0.0, 8.0)}
        values = {**more, **values}
    if op.path == "hopper" or (op.path == "mma" and values["sinks"]):
        values["softcap"] = 0.0
    try:
        case = Case(**values)
    except errors.Usage:
        hypothesis.reject()
    if op.library.refusal(op.device, case) is not None:
        assert tensor, case
        hypothesis.reject()
    return case


def prepare(drawn: st.DataObject, op: Operator, **held: Any) -> Inputs:
    """Inputs of a drawn case, which is shown when the property fails."""
    case = drawn.draw(shapes(op, **held))
    hypothesis.note(str(case))
    return inputs.make(case, drawn.draw(st.integers(0, 3)))


def slack(op: Operator, given: Inputs, part: str, parts: dict[str, Any]) -> F64:
    """Squared error that two right results may be apart in each head where sums cancel, beside the limit."""
    limits = cases.limits()
    if ("cpu" if op.on_cpu else op.path) not in cases.f32_paths():
        return limits["zero"] * oracle._Operands(given).of(part)
    lse, d = (np.asarray(parts[name], np.float64) for name in ("lse", "d"))
    return 4 * limits["rounding"] * reference.rounding(given, lse, d)[part]


def agrees(op: Operator, given: Inputs, want: dict[str, Any], exact: bool = False) -> ggml.Result:
    """The result for some inputs, whose parts must be those that are wanted: to the bit on the CPU where exact.

    A head's error is held against its size and, where few rows cancel, against what they are sums of. Row statistics
    lie near the limit of fp16: two of them that are each within it differ by up to four times as much."""
    got = op.result(given, THREADS)
    if exact and op.on_cpu:
        for part, array in want.items():
            np.testing.assert_array_equal(got.parts[part], array, err_msg=part)
    statistics = {part: got.parts[part] for part in ("lse", "d")}
    whole = {part: np.asarray(array, np.float64) for part, array in (statistics | want).items()}
    for part, found in oracle.compare(given, got, whole).items():
        assert not found.why, found
        inner = tuple(range(2, whole[part].ndim)) or (0,)
        hidden = np.isneginf(whole[part])
        error = np.square(np.where(hidden, 0, got.parts[part] - np.where(hidden, 0, whole[part]))).sum(axis=inner)
        size = np.square(np.where(hidden, 0, whole[part])).sum(axis=inner)
        apart = 1 if part in GRADIENTS else 4
        assert (error <= apart * op.limit * size + slack(op, given, part, got.parts)).all(), found
    return got


def changed(given: Inputs, keys: dict[str, Any] | None = None, **arrays: Any) -> Inputs:
    """Inputs with other arrays, and other keys of their case; V stays a view of K where it is one."""
    other = dataclasses.replace(given, case=given.case.replace(**(keys or {})), **arrays)
    if given.case.vview:
        other.v = other.k[..., : given.v.shape[-1]]
    return other


def vanishes(op: Operator, given: Inputs, part: str, error: F64, parts: dict[str, Any]) -> None:
    """Asserts that an error [S, Hkv, D] of a part's sum over keys is one that its elements [S, Hkv, M, D] may make."""
    size = np.square(parts[part], dtype=np.float64).sum(axis=(2, 3))
    each = op.limit * size + slack(op, given, part, parts)
    assert (np.square(error).sum(axis=2) <= parts[part].shape[2] * each).all()  # Cauchy and Schwarz


@each_shape
@hypothesis.given(st.data())
def test_no_incoming_gradient_gives_exact_zeros(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op)
    parts = op.run(changed(given, d=np.zeros_like(given.d)), THREADS)
    for part in {*GRADIENTS, "d", "dsinks"} & parts.keys():
        assert not parts[part].any(), part


@each_shape
@hypothesis.given(st.data())
def test_a_power_of_two_times_the_incoming_gradient(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op)
    factor = np.float32(drawn.draw(st.sampled_from((-2.0, 0.125, 1024.0))))
    once = op.run(given, THREADS)
    agrees(
        op, changed(given, d=given.d * factor), {p: a * (1 if p == "lse" else factor) for p, a in once.items()}, True
    )


@each_shape
@hypothesis.given(st.data())
def test_the_gradients_of_a_sum_are_the_sums_of_the_gradients(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, layout="cont", data="normal")
    other = changed(given, d=np.roll(given.d, 1, axis=3) * np.float32(1.5))
    both = changed(given, d=given.d + other.d)
    one, two = op.run(given, THREADS), op.run(other, THREADS)
    agrees(op, both, {p: one[p].astype(np.float64) + two[p] for p in one if p != "lse"})


@each_shape
@hypothesis.given(st.data())
def test_dv_sums_to_the_incoming_gradient_of_the_rows_that_see_a_key(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, sinks=0)
    parts = op.run(given, THREADS)
    s, h, hkv, _, _ = given.sizes
    d = np.where(np.isneginf(parts["lse"])[..., None], 0, given.d.transpose(0, 2, 1, 3).astype(np.float64))
    want = d.sum(axis=2).reshape(s, hkv, h // hkv, -1).sum(axis=2)
    vanishes(op, given, "dv", parts["dv"].sum(axis=2, dtype=np.float64) - want, parts)


@each_shape
@hypothesis.given(st.data())
def test_dk_sums_to_zero(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, sinks=0, softcap=0.0, data="normal")
    parts = op.run(given, THREADS)
    vanishes(op, given, "dk", parts["dk"].sum(axis=2, dtype=np.float64), parts)


@each_shape
@hypothesis.given(st.data())
def test_equal_rows_of_v_give_no_gradient_to_q_and_k(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, sinks=0, o=0, vview=0)
    rng = np.random.default_rng(0)
    row = quant.quantize(rng.standard_normal((1, 1, 1, given.case.hsv), np.float32), given.type_V, rng)
    equal = changed(given, v=np.ascontiguousarray(np.broadcast_to(row, given.v.shape)))
    s, h, hkv, n, m = given.sizes
    width = given.case.hsk
    agrees(op, equal, {"dq": np.zeros((s, h, n, width)), "dk": np.zeros((s, hkv, m, width))})


@each_shape
@hypothesis.given(st.data())
def test_permuted_keys_permute_their_gradients(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op)
    order = np.random.default_rng(given.sizes[4]).permutation(given.sizes[4])
    mask = None if given.mask is None else given.mask[..., order].copy()
    other = changed(given, k=given.k[:, :, order].copy(), v=given.v[:, :, order].copy(), mask=mask)
    parts = op.run(given, THREADS)
    agrees(op, other, {p: a[:, :, order] if p in ("dk", "dv") else a for p, a in parts.items()})


@each_shape
@hypothesis.given(st.data())
def test_masked_keys_behind_the_others_change_nothing_and_get_exact_zeros(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, mask=drawn.draw(st.sampled_from(("causal", "random", "rows", "bias"))))
    assert given.mask is not None
    extra, keys = drawn.draw(st.integers(1, 150)), given.sizes[4]

    def longer(array: NDArray[Any], axis: int, value: Any) -> NDArray[Any]:
        shape = list(array.shape)
        shape[axis] = extra
        return np.concatenate((array, np.full(shape, value, array.dtype)), axis=axis)

    other = changed(
        given,
        {"kv": keys + extra},
        k=longer(given.k, 2, 0xFF),
        v=longer(given.v, 2, 0xFF),
        mask=longer(given.mask, 3, -np.inf),
        kv_count=keys + extra,
    )
    want = {p: longer(a, 2, 0) if p in ("dk", "dv") else a for p, a in op.run(given, THREADS).items()}
    agrees(op, other, want)  # the oracle demands exact zeros of keys that no row sees


@each_shape
@hypothesis.given(st.data())
def test_grouped_heads_are_repeated_kv_heads_summed_over_the_group(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op)
    s, h, hkv, _, m = given.sizes
    group = h // hkv
    repeated = changed(given, {"nhkv": h}, k=np.repeat(given.k, group, axis=1), v=np.repeat(given.v, group, axis=1))
    want = dict(op.run(repeated, THREADS))
    for part in ("dk", "dv"):
        want[part] = want[part].astype(np.float64).reshape(s, hkv, group, m, -1).sum(axis=2)
    grouped = agrees(op, given, want)
    if op.on_cpu:
        np.testing.assert_array_equal(grouped.parts["dq"], want["dq"])


@each_shape
@hypothesis.given(st.data())
def test_several_sequences_are_as_many_runs_of_one(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, ns=drawn.draw(st.sampled_from((2, 3))))
    together = op.run(given, THREADS)
    sinks: F64 = np.zeros(given.case.nh)
    for s in range(given.sizes[0]):
        cut = {name: getattr(given, name)[s : s + 1].copy() for name in ("q", "k", "v", "d")}
        if given.mask is not None:
            cut["mask"] = given.mask[s % len(given.mask)][None].copy()
        if given.o is not None:
            cut["o"] = given.o[s : s + 1].copy()
        want = {part: array[s : s + 1] for part, array in together.items() if part != "dsinks"}
        one = agrees(op, changed(given, {"ns": 1, "ms": 1}, **cut), want, exact=True)
        sinks = sinks + one.parts.get("dsinks", 0.0)
    if given.sinks is not None:
        agrees(op, given, together | {"dsinks": sinks})


@each_shape
@hypothesis.given(st.data())
def test_a_window_is_a_slice_of_the_whole(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op)
    first = drawn.draw(st.integers(0, given.sizes[4] - 1))
    count = drawn.draw(st.integers(1, given.sizes[4] - first))
    parts = op.run(given, THREADS)
    want = {p: a[:, :, first : first + count] if p in ("dk", "dv") else a for p, a in parts.items()}
    keys = {"kv_first": first, "kv_count": count}
    agrees(op, changed(given, keys, **keys), want, exact=True)


@each_shape
@hypothesis.given(st.data())
def test_a_choice_of_gradients_leaves_those_that_are_computed_alone(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, o=drawn.draw(st.sampled_from((0, 1))))
    letters = drawn.draw(st.sampled_from(("q", "k", "v", "qk", "qv", "kv")))
    keys = {"grads": letters}
    parts = op.run(given, THREADS)
    fewer = changed(given, keys, grads=given.case.replace(**keys).wanted)
    absent = {part for letter, part in cases.LETTERS.items() if letter not in letters}
    got = agrees(op, fewer, {p: a for p, a in parts.items() if p not in absent}, exact=True)
    assert not absent & got.parts.keys()


@each_shape
@hypothesis.given(st.data())
def test_strides_change_nothing(op: Operator, drawn: st.DataObject) -> None:
    given = prepare(drawn, op, layout=drawn.draw(st.sampled_from(cases.LAYOUTS[1:])))
    agrees(op, given, op.run(changed(given, {"layout": "cont"}), THREADS), exact=True)


def test_a_property_that_does_not_hold_fails(op: Operator) -> None:
    given = inputs.make(Case.parse("FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nhkv=2,kv=90,nb=70)"), 0)
    parts = dict(op.run(given, THREADS))
    parts["dk"] = parts["dk"] * np.float32(1.01)
    with pytest.raises(AssertionError, match="dk"):
        agrees(op, given, parts)
    with pytest.raises(AssertionError):
        vanishes(op, given, "dv", parts["dv"].sum(axis=2, dtype=np.float64), parts)
