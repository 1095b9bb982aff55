"""Failures that others met with attention gradients or with training in llama.cpp, tried on the CPU.

Each test carries the id of its row in the list of public reports.
"""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import numpy as np
import pytest
from attention import NINF, agree, attention, case, last_words, parameters, run, small
from numpy.typing import NDArray

from pyharness import cases, ggml, gradcheck, inputs, oracle

MAP_NORESERVE = 0x4000  # Linux's; Python's mmap names it from 3.13 on


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def drawn(s: int, h: int, hkv: int, n: int, m: int, width: int, seed: int = 0) -> dict[str, Any]:
    """q, k, v, d of normal numbers."""
    return {
        "q": normal(s, h, n, width, seed=seed),
        "k": normal(s, hkv, m, width, seed=seed + 1),
        "v": normal(s, hkv, m, width, seed=seed + 2),
        "d": normal(s, h, n, width, seed=seed + 3),
    }


def causal(n: int, m: int) -> NDArray[np.float64]:
    """A bottom-right aligned causal mask, [1, 1, n, m]."""
    return np.where(np.arange(m)[None] > np.arange(n)[:, None] + m - n, NINF, 0.0)[None, None]


def test_u05_autodiff_agrees_with_the_unfused_attention(library: ggml.Library, cpu: ggml.Device) -> None:
    shape = case("hsk=128,hsv=128,nh=8,nhkv=8,kv=16,nb=16,ns=4,type_K=f32,type_V=f32")
    result = gradcheck.check(library, cpu, shape, 0, samples=50)
    assert result.status == "ok", result.reason


def test_u06_small_llama_shape(library: ggml.Library) -> None:
    agree(library, inputs.make(case("hsk=8,hsv=8,nh=8,nhkv=4,kv=128,nb=128"), 0))


def test_u07_grouped_heads_are_summed_and_differences_checked(library: ggml.Library, cpu: ggml.Device) -> None:
    result = gradcheck.check(library, cpu, case("hsk=4,hsv=4,nh=4,nhkv=2,kv=3,nb=3,type_K=f32,type_V=f32"), 0)
    assert result.status == "ok", result.reason


def test_u09_masked_entries_of_ds_are_exact_zeros(library: ggml.Library) -> None:
    parts = run(library, attention(**drawn(1, 1, 1, 3, 3, 4), mask=causal(3, 3)))
    assert not parts["dq"][0, 0, 0].any()  # row 0 sees one key
    assert np.isfinite(parts["dk"]).all()
    given = attention(**drawn(1, 1, 1, 3, 3, 4), mask=causal(3, 3))
    given.d[:, :2] = 0
    assert run(library, given)["dk"][0, 0, 2].any()
    given.d[:, 2] = 0
    given.d[:, 0] = 1
    assert not run(library, given)["dv"][0, 0, 1:].any()


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "d"])
def test_u10_u11_u34_u58_strides_beyond_32_bits(library: ggml.Library, cpu: ggml.Device, name: str) -> None:
    given = inputs.make(case("hsk=32,hsv=32,nh=2,nhkv=2,kv=3,nb=3,ns=2,mask=random,ms=2,mh=2"), 0)
    expected = run(library, given)
    with library.prepare(cpu, given) as session:
        tensor = session.sources[name]
        stride = 2**31 * 4 + 4096  # bytes from sequence to sequence
        rows: NDArray[np.uint8] = library.download(session.storages[name], np.uint8).reshape(2, -1)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, stride + rows.shape[1], flags=flags)
        sparse = np.frombuffer(memory, np.uint8)
        sparse[: rows.shape[1]], sparse[stride:] = rows
        tensor.nb[3] = stride
        tensor.data = library.ffi.cast("void *", sparse.__array_interface__["data"][0])
        session.compute()
        found = session.result().parts
        del sparse
    for part, array in expected.items():
        np.testing.assert_array_equal(found[part], array, err_msg=part)


def test_u12_gradients_reach_f32_parameters_through_casts(library: ggml.Library, cpu: ggml.Device) -> None:
    shape = case("hsk=16,hsv=16,nh=4,nhkv=2,kv=9,nb=5")
    for graph in ("plain", "views"):
        result = gradcheck.check(library, cpu, shape, 0, graph)
        assert result.status == "ok", result.reason


@pytest.mark.parametrize("size", [(d, d) for d in (40, 64, 72, 80, 88, 96, 112, 128, 256)] + [(192, 128), (576, 512)])
def test_u13_u28_what_is_supported_runs(library: ggml.Library, cpu: ggml.Device, size: tuple[int, int]) -> None:
    shape = small(hsk=size[0], hsv=size[1], nh=4, nhkv=1, kv=70, nb=8, sinks=1)
    assert library.refusal(cpu, shape) is None
    agree(library, inputs.make(shape, 0))


def test_u14_a_cast_to_a_quantised_type_is_refused_in_words(library: ggml.Library, cpu: ggml.Device) -> None:
    shape = case("hsk=32,hsv=32,nh=2,nhkv=1,kv=8,nb=4,type_K=q5_1,type_V=q5_1")
    result = gradcheck.check(library, cpu, shape, 0)
    assert (result.status, result.reason) == ("unsupported", "a cast to a quantised type has no gradient")


def test_u15_query_heads_map_to_kv_heads_in_blocks(library: ggml.Library) -> None:
    given = attention(**drawn(1, 4, 2, 3, 3, 4))
    given.d[:, :, 2:] = 0
    parts = agree(library, given)
    for part in ("dk", "dv"):
        assert parts[part][0, 0].any(), part
        assert not parts[part][0, 1].any(), part


def test_u16_second_sequence_equals_a_run_of_its_own(library: ggml.Library) -> None:
    arrays = drawn(2, 4, 2, 3, 3, 4)
    both = run(library, attention(**arrays))
    second = run(library, attention(**{name: array[1:] for name, array in arrays.items()}))
    for part, array in second.items():
        np.testing.assert_array_equal(both[part][1], array[0], err_msg=part)


def test_u19_one_query_one_key(library: ggml.Library) -> None:
    arrays = {name: 3 * array for name, array in drawn(1, 1, 1, 1, 1, 16).items()}
    parts = run(library, attention(**arrays))
    assert not parts["dq"].any()
    assert not parts["dk"].any()
    np.testing.assert_array_equal(parts["dv"][0, 0, 0], arrays["d"][0, 0, 0])


@pytest.mark.parametrize("n", [76, 34, 146])
def test_u20_more_queries_than_keys_causal(library: ggml.Library, n: int) -> None:
    arrays = drawn(1, 1, 1, n, 1, 32)
    parts = agree(library, attention(**arrays, mask=causal(n, 1)))
    assert not parts["dq"].any()
    np.testing.assert_allclose(parts["dv"][0, 0, 0], arrays["d"][0, 0, -1], rtol=1e-6)


def test_u21_bottom_right_alignment_leaves_the_first_rows_without_keys(library: ggml.Library) -> None:
    parts = agree(library, attention(**drawn(1, 2, 1, 4, 2, 8), mask=causal(4, 2)))
    assert not parts["dq"][:, :, :2].any()
    assert np.isneginf(parts["lse"][:, :, :2]).all()
    assert parts["dq"][:, :, 3].any()


@pytest.mark.parametrize(("n", "m"), [(3, 7), (7, 3)])
def test_u22_u60_queries_and_keys_of_different_number(library: ggml.Library, n: int, m: int) -> None:
    for h, hkv in ((6, 2), (6, 3), (4, 4)):
        agree(library, attention(**drawn(1, h, hkv, n, m, 16), mask=causal(n, m)))


@pytest.mark.parametrize("layout", ["perm", "cache", "strided"])
def test_u23_u25_u51_any_memory_layout_gives_the_same_bits(library: ggml.Library, layout: str) -> None:
    given = inputs.make(small(kv=513, nb=65, hsk=64, hsv=64, nh=2, mask="causal"), 0)
    expected = run(library, given)
    other = run(library, dataclasses.replace(given, case=given.case.replace(layout=layout)))
    for part, array in expected.items():
        np.testing.assert_array_equal(other[part], array, err_msg=part)


def test_u24_an_incoming_gradient_with_row_strides_of_zero(library: ggml.Library) -> None:
    given = inputs.make(small(layout="bcast", sinks=1), 0)
    expected = run(library, dataclasses.replace(given, case=given.case.replace(layout="cont")))
    for part, array in run(library, given).items():
        np.testing.assert_array_equal(array, expected[part], err_msg=part)


def test_u24_a_component_stride_of_zero_is_refused_in_words(library: ggml.Library) -> None:
    c, ffi = library.c, library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    q, k, d = (c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, 16, 4, 4, 1) for _ in range(3))
    d.nb[0] = 0

    def build() -> None:
        c.ggml_flash_attn_back(ctx, q, k, k, ffi.NULL, ffi.NULL, ffi.NULL, d, parameters())

    assert "component stride of 0" in last_words(build)
    c.ggml_free(ctx)


@pytest.mark.parametrize("size", [160, 192, 224, 256])
def test_u26_large_heads(library: ggml.Library, cpu: ggml.Device, size: int) -> None:
    shape = case(f"hsk={size},hsv={size},nh=2,nhkv=2,kv=97,nb=97,type_K=f32,type_V=f32")
    result = oracle.check(library, cpu, shape, 0)
    assert result.status == "ok", result.reason
    assert max(part.worst_head_nmse for part in result.parts.values()) < 1e-10


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0)])
def test_u31_u32_no_queries_or_no_keys_give_zeros(library: ggml.Library, n: int, m: int, sinks: int) -> None:
    parts = agree(library, inputs.make(small(nb=n, kv=m, sinks=sinks), 0))
    for part in ("dq", "dk", "dv", "d"):
        assert not parts[part].any(), part


def test_u35_thirty_runs_have_one_digest(library: ggml.Library, cpu: ggml.Device) -> None:
    result = oracle.check(library, cpu, case("hsk=128,hsv=128,nh=2,nhkv=1,kv=256,nb=256"), 0, repeats=30)
    assert (result.repeats, result.distinct) == (30, 1)


def test_u38_u39_softcap_with_scores_far_beyond_it(library: ggml.Library) -> None:
    for cap, reach in ((15.0, 30.0), (30.0, 168.0)):
        arrays = drawn(1, 2, 1, 32, 32, 16)
        top = np.abs(arrays["q"] @ np.repeat(arrays["k"], 2, axis=1).transpose(0, 1, 3, 2)).max()
        arrays["q"] *= np.float32(reach / top)
        agree(library, attention(**arrays, mask=causal(32, 32), softcap=cap))


def test_u40_softcap_that_saturates_has_no_gradient(library: ggml.Library) -> None:
    arrays = drawn(1, 1, 1, 4, 6, 8)
    arrays["q"][:] = 25
    arrays["k"][:] = np.sign(arrays["k"][..., :1]) * 25  # scores of +-5000
    parts = run(library, attention(**arrays, softcap=50.0))
    assert not parts["dq"].any()
    assert not parts["dk"].any()
    assert np.isfinite(parts["dv"]).all()


def test_u42_alibi_with_a_number_of_heads_that_is_no_power_of_two(library: ggml.Library) -> None:
    agree(library, inputs.make(small(nh=6, nhkv=2, max_bias=8.0, softcap=20.0), 0))


def test_u43_u55_rows_that_see_none_one_or_all_keys(library: ggml.Library) -> None:
    mask = np.zeros((1, 1, 3, 6))
    mask[0, 0, 0] = NINF
    mask[0, 0, 1, 1:] = NINF
    arrays = drawn(1, 2, 1, 3, 6, 16)
    without = agree(library, attention(**arrays, mask=mask))
    assert np.isneginf(without["lse"][:, :, 0]).all()
    assert not without["dq"][:, :, :2].any()
    sinks = normal(2, seed=9)
    beside = agree(library, attention(**arrays, mask=mask, sinks=sinks))
    np.testing.assert_array_equal(beside["lse"][0, :, 0], sinks)
    assert not beside["d"][:, :, 0].any()


def test_u44_a_row_without_keys_does_not_spoil_the_others(library: ggml.Library) -> None:
    band = np.array([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]], bool)
    padded = np.array([1, 1, 0, 0], bool)
    mask = np.where(band | padded, NINF, 0.0)[None, None]
    parts = agree(library, attention(**drawn(1, 1, 1, 4, 4, 8), mask=mask))
    assert not parts["dq"][0, 0, :2].any()
    assert np.isfinite(parts["dk"]).all()


def test_u46_a_row_of_lowest_finite_numbers_is_not_a_masked_row(library: ggml.Library) -> None:
    mask = np.zeros((1, 1, 2, 8))
    mask[0, 0, 0] = -65504
    arrays = drawn(1, 1, 1, 2, 8, 16)
    parts = run(library, attention(**arrays, mask=mask, scale=1e-4))
    assert np.isfinite(parts["lse"]).all()
    given = attention(**arrays, mask=mask, scale=1e-4)
    given.d[:, 1] = 0
    np.testing.assert_allclose(run(library, given)["dv"][0, 0], np.tile(arrays["d"][0, 0, 0] / 8, (8, 1)), rtol=5e-3)


@pytest.mark.slow
def test_u49_65536_heads_and_sequences(library: ggml.Library) -> None:
    given = inputs.make(case("hsk=64,hsv=64,nh=32,nhkv=32,kv=2,nb=1,ns=2048,mask=none"), 0)
    parts = run(library, given)
    q, k, v = given.q.astype(np.float64), given.k_f32().astype(np.float64), given.v_f32().astype(np.float64)
    d = given.d.astype(np.float64).transpose(0, 2, 1, 3)
    x = given.scale * np.einsum("shic,shjc->shij", q, k)
    p = np.exp(x - x.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    dp = np.einsum("shic,shjc->shij", d, v)
    ds = p * (dp - (p * dp).sum(axis=3, keepdims=True))
    want = {
        "dq": given.scale * ds @ k,
        "dk": given.scale * ds.transpose(0, 1, 3, 2) @ q,
        "dv": p.transpose(0, 1, 3, 2) @ d,
    }
    for part, array in want.items():
        np.testing.assert_allclose(parts[part], array, atol=2e-5, err_msg=part)


def test_u50_huge_inputs_stay_finite(library: ggml.Library) -> None:
    arrays = drawn(1, 1, 1, 8, 8, 64)
    arrays["q"][:] = arrays["k"][:] = 133120
    parts = run(library, attention(**arrays))
    for part, array in parts.items():
        assert np.isfinite(array).all(), part
    assert np.abs(parts["dv"]).max() <= np.abs(arrays["d"]).sum()


@pytest.mark.parametrize("m", [*range(1, 34), 63, 65, 127, 129])
def test_u54_any_number_of_keys(library: ggml.Library, m: int) -> None:
    agree(library, inputs.make(small(kv=m, nb=min(m, 9), mask="none"), 0))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_u59_with_and_without_a_causal_mask(library: ggml.Library, mask: str) -> None:
    agree(library, inputs.make(case(f"hsk=64,hsv=64,nh=2,nhkv=2,kv=128,nb=128,mask={mask}"), 0))


def test_u61_every_element_is_written_whatever_the_memory_held(library: ggml.Library, cpu: ggml.Device) -> None:
    given = inputs.make(small(sinks=1, mask="rows"), 0)
    with library.prepare(cpu, given) as session:
        session.compute()
        fresh = session.result()
        session.compute()
        again = session.result()
    assert not any(fresh.unwritten.values())
    assert fresh.digest == again.digest


def test_u62_rows_of_the_mask_need_no_alignment(library: ggml.Library) -> None:
    agree(library, inputs.make(small(kv=43, nb=20, mask="random"), 0))


def test_u62_a_mask_of_another_type_is_refused_in_words(library: ggml.Library) -> None:
    c, ffi = library.c, library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    q, k, d, mask = (c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, 16, 4, 4, 1) for _ in range(4))

    def build() -> None:
        c.ggml_flash_attn_back(ctx, q, k, k, mask, ffi.NULL, ffi.NULL, d, parameters())

    assert "the mask must be F16" in last_words(build)
    c.ggml_free(ctx)


def test_every_kind_of_public_report_has_a_case_in_the_list() -> None:
    listed = cases.load(cases.CASES)
    assert {c.mask.partition(":")[0] for c in listed} == {name.partition(":")[0] for name in cases.MASKS}
    assert {c.data for c in listed} == set(cases.DATA)
    assert {c.layout for c in listed} == set(cases.LAYOUTS)
    assert {c.type_K for c in listed} == {c.type_V for c in listed} == set(cases.TYPES)
    assert {c.kv for c in listed} >= {*range(34), 63, 65, 127, 129}
    assert {c.nh / c.nhkv for c in listed if not c.capture} >= {1, 2, 3, 7, 16}
