"""Failures that others met with attention gradients or with training in llama.cpp, tried on a device.

Each test carries the id of its row in the list of public reports; docs/public-failures.md says what came out.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from attention import NINF, Operator, attention, case, in_a_graph, last_words, parameters, small
from large import PERIOD, Large
from numpy.typing import NDArray

from pyharness.base import digest
from pyharness.case import cases, inputs, reference
from pyharness.case.operands import Inputs
from pyharness.check import gradcheck, oracle
from pyharness.device import ggml

MAP_NORESERVE = 0x4000  # Linux's; Python's mmap names it from 3.13 on


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def drawn(s: int, h: int, hkv: int, n: int, m: int, width: int, seed: int = 0) -> dict[str, Any]:
    """q, k, v, d of normal numbers; q is scaled for scores of size 1."""
    return {
        "q": normal(s, h, n, width, seed=seed, scale=width**-0.5),
        "k": normal(s, hkv, m, width, seed=seed + 1),
        "v": normal(s, hkv, m, width, seed=seed + 2),
        "d": normal(s, h, n, width, seed=seed + 3),
    }


def differentiate(op: Operator, text: str, graph: str = "plain", samples: int = 0) -> None:
    """ggml's own autodiff of the attention against finite differences, on the device."""
    result = gradcheck.check(op.library, op.device, case(text), 0, graph, samples=samples)
    if result.status == "unsupported" and not op.on_cpu:  # the path, or the forward for this head size
        pytest.skip(result.reason)
    assert result.status == "ok", result.reason


def causal(n: int, m: int) -> NDArray[np.float64]:
    """A bottom-right aligned causal mask, [1, 1, n, m]."""
    return np.where(np.arange(m)[None] > np.arange(n)[:, None] + m - n, NINF, 0.0)[None, None]


@pytest.mark.parametrize("n", [16, 64])
def test_u01_u02_gradients_pass_a_cache_that_cpy_writes(op: Operator, n: int) -> None:
    """K and V go through CPY into views of an F16 cache, whose other cells hold NaN."""
    given = inputs.make(case(f"hsk=64,hsv=64,nh=14,nhkv=2,kv={n},nb={n}"), 0)
    op.take(given)
    c, ffi = op.library.c, op.library.ffi
    ctx = c.ggml_init({"mem_size": 4 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    arrays = {"q": given.q, "k": given.k_f32(), "v": given.v_f32()}
    leaves = {name: c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, *reversed(a.shape)) for name, a in arrays.items()}
    read = {"q": leaves["q"]}
    for name in ("k", "v"):
        c.ggml_set_param(leaves[name])
        cache = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F16, 64, n + 9, 2, 1)
        nb = [cache.nb[i] for i in (1, 2, 3)]
        read[name] = c.ggml_cpy(ctx, leaves[name], c.ggml_view_4d(ctx, cache, 64, n, 2, 1, *nb, 5 * cache.nb[1]))
    mask = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F16, n, n, 1, 1)
    weights = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, 64, 14, n, 1)
    out = c.ggml_flash_attn_ext(ctx, *read.values(), mask, given.scale, 0.0, 0.0)
    loss = c.ggml_sum(ctx, c.ggml_mul(ctx, out, weights))
    c.ggml_set_loss(loss)
    graph = c.ggml_new_graph_custom(ctx, 256, True)
    c.ggml_build_forward_expand(graph, loss)
    c.ggml_build_backward_expand(ctx, graph, ffi.NULL)
    backend = op.library.backend(op.device)
    nodes = [c.ggml_graph_node(graph, i) for i in range(c.ggml_graph_n_nodes(graph))]
    refused = {op.library.text(c.ggml_op_name(n.op)) for n in nodes if not c.ggml_backend_supports_op(backend, n)}
    if not refused:
        buffer = c.ggml_backend_alloc_ctx_tensors(ctx, backend)
        c.ggml_backend_buffer_clear(buffer, ggml.GUARD_BYTE)
        for tensor, array in [
            *((leaves[name], arrays[name]) for name in arrays),
            (mask, given.mask),
            (weights, given.d),
        ]:
            op.library.upload(tensor, np.ascontiguousarray(array))
        c.ggml_graph_reset(graph)
        assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
        want = reference.backward(given)
        for name in ("k", "v"):
            gradient = op.library.download(c.ggml_graph_get_grad(graph, leaves[name]), np.float32)
            op.near(gradient, want[f"d{name}"].reshape(-1), what=name)
        c.ggml_backend_buffer_free(buffer)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)
    if refused and not op.on_cpu:
        pytest.skip(f"the device refuses {', '.join(map(str, refused))}")
    assert not refused


@pytest.mark.parametrize("shape", ["nh=8,nhkv=8,kv=16,nb=16,ns=4", "nh=4,nhkv=1,kv=64,nb=64"])
def test_u05_autodiff_agrees_with_the_unfused_attention(op: Operator, shape: str) -> None:
    differentiate(op, f"hsk=128,hsv=128,{shape},type_K=f32,type_V=f32", samples=20)


@pytest.mark.parametrize("d", [8, 64])
def test_u06_small_llama_shape(op: Operator, d: int) -> None:
    op.agree(inputs.make(case(f"hsk={d},hsv={d},nh=8,nhkv=4,kv=128,nb=128"), 0))


@pytest.mark.parametrize(("d", "n"), [(4, 3), (64, 3), (64, 64)])
def test_u07_grouped_heads_are_summed_and_differences_checked(op: Operator, d: int, n: int) -> None:
    text = f"hsk={d},hsv={d},nh=4,nhkv=2,kv={n},nb={n},type_K=f32,type_V=f32"
    if d % 8 and not op.on_cpu:  # in steps of 8 there: the same attention with zeros behind it
        assert "head sizes" in str(op.library.refusal(op.device, case(text)))
        op.agree(attention(**drawn(1, 4, 2, n, n, d)))
    else:
        differentiate(op, text, samples=40)


@pytest.mark.parametrize("output", ["", "q", "k", "v", "d"])
@pytest.mark.parametrize("n", [13, 70])
def test_u08_memory_that_an_allocator_reuses_changes_nothing(op: Operator, output: str, n: int) -> None:
    """The sources are nodes that nobody else reads, but one that is marked as an output."""
    given = inputs.make(case(f"hsk=64,hsv=64,nh=4,nhkv=2,kv={n},nb={n},type_K=f32,type_V=f32,mask=none"), 0)
    expected = op.run(given)
    c, ffi = op.library.c, op.library.ffi
    with in_a_graph(op.library, op.device, given, output) as (back, sources, found):

        def place(tensor: Any) -> range:
            start = int(ffi.cast("uintptr_t", tensor.data))
            return range(start, start + int(c.ggml_nbytes(tensor)))

        own = place(back)
        for name, tensor in sources.items():
            other = place(tensor)
            assert own.stop <= other.start or other.stop <= own.start, name
        for i, part in enumerate(cases.PARTS[:5]):
            first = int(c.ggml_flash_attn_back_offset(back, i)) // 4
            got = found[first : first + expected[part].size].reshape(expected[part].shape)
            np.testing.assert_array_equal(got, expected[part], err_msg=part)


@pytest.mark.parametrize(("n", "d"), [(3, 4), (66, 64)])
def test_u09_masked_entries_of_ds_are_exact_zeros(op: Operator, n: int, d: int) -> None:
    given = attention(**drawn(1, 1, 1, n, n, d), mask=causal(n, n))
    parts = op.agree(given)
    op.near(parts["dq"][0, 0, 0], 0, parts["dq"][0, 0, 1])  # row 0 sees one key
    given.d[:, : n - 1] = 0
    assert op.run(given)["dk"][0, 0, n - 1].any()
    given.d[:, n - 1] = 0
    given.d[:, 0] = 1
    assert not op.run(given)["dv"][0, 0, 1:].any()


@contextmanager
def address_space(op: Operator, size: int) -> Iterator[tuple[int, Callable[[int, NDArray[np.uint8]], None]]]:
    """Memory of the device: where it starts, and a function that writes bytes at an offset."""
    library, c = op.library, op.library.c
    if op.on_cpu:  # pages that nobody touches cost nothing
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        sparse = np.frombuffer(memory, np.uint8)

        def write(offset: int, data: NDArray[np.uint8]) -> None:
            sparse[offset : offset + data.size] = data

        yield sparse.__array_interface__["data"][0], write
        return
    backend = library.backend(op.device)
    buffer = c.ggml_backend_alloc_buffer(backend, size)
    assert buffer, f"no {size / 2**30:.1f} GiB"
    ctx = c.ggml_init({"mem_size": 1 << 16, "mem_buffer": library.ffi.NULL, "no_alloc": True})
    whole = c.ggml_new_tensor_1d(ctx, c.GGML_TYPE_I8, size)
    base = c.ggml_backend_buffer_get_base(buffer)
    c.ggml_backend_tensor_alloc(buffer, whole, base)

    def upload(offset: int, data: NDArray[np.uint8]) -> None:
        pointer = library.ffi.cast("void *", data.__array_interface__["data"][0])
        c.ggml_backend_tensor_set(whole, pointer, offset, data.size)

    yield int(library.ffi.cast("uintptr_t", base)), upload
    c.ggml_backend_buffer_free(buffer)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)


def restrided(
    op: Operator, given: Inputs, name: str, change: Callable[[list[int], list[int]], None]
) -> dict[str, NDArray[np.float32]]:
    """The parts of a run in which a source lies elsewhere, with strides that a function of its ne and nb changes."""
    library = op.library
    with library.prepare(op.device, given) as session:
        tensor = session.sources[name]
        ne, nb = [int(x) for x in tensor.ne], [int(x) for x in tensor.nb]
        rows: NDArray[np.uint8] = library.download(session.storages[name], np.uint8).reshape(ne[1] * ne[2] * ne[3], -1)
        change(ne, nb)
        size = rows.shape[1] + sum((ne[i] - 1) * nb[i] for i in (1, 2, 3))
        with address_space(op, size) as (start, write):
            for row, (i3, i2, i1) in zip(rows, np.ndindex(ne[3], ne[2], ne[1]), strict=True):
                write(i1 * nb[1] + i2 * nb[2] + i3 * nb[3], row)
            for i in (1, 2, 3):
                tensor.nb[i] = nb[i]
            tensor.data = library.ffi.cast("void *", start)
            session.compute()
            return session.result().parts


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "o", "d"])
@pytest.mark.parametrize(("n", "width"), [(3, 32), (66, 64)])
def test_u10_u11_u34_u58_strides_beyond_32_bits(op: Operator, name: str, dim: int, n: int, width: int) -> None:
    """2^31 floats and more from the first element of a dimension to its last one."""
    text = f"hsk={width},hsv={width},nh=2,nhkv=2,kv={n},nb={n},ns=2,mask=random,ms=2,mh=2,o={int(name == 'o')}"
    given = inputs.make(case(text), 0)
    expected = op.run(given)

    def far(ne: list[int], nb: list[int]) -> None:
        nb[dim] = -(-(2**31 * 4 + 4096) // (ne[dim] - 1)) // 256 * 256 + 256

    for part, array in restrided(op, given, name, far).items():
        np.testing.assert_array_equal(array, expected[part], err_msg=part)


@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("graph", ["plain", "views"])
def test_u12_gradients_reach_f32_parameters_through_casts(op: Operator, graph: str, d: int) -> None:
    differentiate(op, f"hsk={d},hsv={d},nh=4,nhkv=2,kv={9 if d < 64 else 64},nb={5 if d < 64 else 64}", graph, 40)


@pytest.mark.parametrize(
    "size", [(d, d) for d in (40, 64, 72, 80, 88, 96, 104, 112, 128, 256)] + [(192, 128), (576, 512)]
)
@pytest.mark.parametrize("n", [8, 70])
def test_u13_u28_what_is_supported_runs(op: Operator, size: tuple[int, int], n: int) -> None:
    shape = small(hsk=size[0], hsv=size[1], nh=4, nhkv=1, kv=70, nb=n, sinks=1, type_K="f16", type_V="f16")
    op.agree(inputs.make(shape, 0))


@pytest.mark.parametrize("d", [1, 4, 12, 100, 580])
def test_u13_a_head_size_is_run_or_refused_in_words(op: Operator, d: int) -> None:
    shape = small(hsk=d, hsv=d)
    if op.on_cpu:
        op.agree(inputs.make(shape, 0))
    else:
        assert "head sizes" in str(op.library.refusal(op.device, shape))


@pytest.mark.parametrize("types", [("q5_1", "q5_1"), ("q8_0", "f16"), ("f32", "q4_0"), ("bf16", "f32")])
@pytest.mark.parametrize("n", [9, 70])
def test_u14_types_of_k_and_v_stay_on_the_device(op: Operator, types: tuple[str, str], n: int) -> None:
    op.agree(inputs.make(case(f"hsk=64,hsv=64,nh=4,nhkv=2,kv=70,nb={n},type_K={types[0]},type_V={types[1]}"), 0))


def test_u14_a_cast_to_a_quantised_type_is_refused_in_words(op: Operator) -> None:
    shape = case("hsk=32,hsv=32,nh=2,nhkv=1,kv=8,nb=4,type_K=q5_1,type_V=q5_1")
    result = gradcheck.check(op.library, op.device, shape, 0)
    assert (result.status, result.reason) == ("unsupported", "a cast to a quantised type has no gradient")


@pytest.mark.parametrize(("n", "d"), [(3, 4), (66, 64)])
def test_u15_query_heads_map_to_kv_heads_in_blocks(op: Operator, n: int, d: int) -> None:
    given = attention(**drawn(1, 4, 2, n, n, d))
    given.d[:, :, 2:] = 0
    parts = op.agree(given)
    for part in ("dk", "dv"):
        assert parts[part][0, 0].any(), part
        assert not parts[part][0, 1].any(), part


@pytest.mark.parametrize(("n", "d"), [(3, 4), (66, 64)])
def test_u16_second_sequence_equals_a_run_of_its_own(op: Operator, n: int, d: int) -> None:
    """To the bit on the CPU; CUDA cuts the work of few sequences into more partial sums."""
    arrays = drawn(2, 4, 2, n, n, d)
    both = op.agree(attention(**arrays))
    second = op.run(attention(**{name: array[1:] for name, array in arrays.items()}))
    for part, array in second.items():
        op.near(both[part][1], array[0], what=part)
        assert not op.on_cpu or np.array_equal(both[part][1], array[0]), part


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_u18_the_output_of_the_devices_own_forward_may_be_given(op: Operator, kind: str) -> None:
    """CUDA's forward rounds K, V and P to F16: D = dO . O carries that, and the gradients stay within the limit."""
    given = inputs.make(case(f"hsk=64,hsv=64,nh=4,nhkv=2,kv=256,nb=256,type_K={kind},type_V={kind}"), 0)
    op.take(given)
    c, ffi = op.library.c, op.library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    q = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, 64, 256, 4, 1)
    k, v = (c.ggml_new_tensor_4d(ctx, int(cases.TYPES[kind]), 64, 256, 2, 1) for _ in range(2))
    mask = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F16, 256, 256, 1, 1)
    out = c.ggml_flash_attn_ext(ctx, q, k, v, mask, given.scale, 0.0, 0.0)
    graph = c.ggml_new_graph_custom(ctx, 16, False)
    c.ggml_build_forward_expand(graph, out)
    backend = op.library.backend(op.device)
    buffer = c.ggml_backend_alloc_ctx_tensors(ctx, backend)
    for tensor, array in ((q, given.q), (k, given.k), (v, given.v), (mask, given.mask)):
        assert array is not None
        op.library.upload(tensor, array)
    assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
    o = op.library.download(out, np.float32).reshape(given.d.shape)
    c.ggml_backend_buffer_free(buffer)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)
    result = op.result(dataclasses.replace(given, case=given.case.replace(o=1), o=o))
    for part in oracle.compare(given, result, reference.backward(given)).values():
        assert part.passed, part
    dk = result.parts["dk"].astype(np.float64)
    op.near(dk.sum(axis=2), 0, dk)  # sum_j dS_ij = 0


@pytest.mark.parametrize("d", [16, 64])
def test_u19_one_query_one_key(op: Operator, d: int) -> None:
    arrays = {name: 3 * array for name, array in drawn(1, 1, 1, 1, 1, d).items()}
    parts = op.run(attention(**arrays))
    if op.on_cpu:
        assert not parts["dq"].any()
        assert not parts["dk"].any()
        np.testing.assert_array_equal(parts["dv"][0, 0, 0], arrays["d"][0, 0, 0])
    else:  # dO . V and D are added up in different orders there
        op.agree(attention(**arrays))


@pytest.mark.parametrize("n", [76, 34, 146])
def test_u20_more_queries_than_keys_causal(op: Operator, n: int) -> None:
    arrays = drawn(1, 1, 1, n, 1, 32)
    parts = op.agree(attention(**arrays, mask=causal(n, 1)))
    assert not parts["dq"][:, :, :-1].any()
    assert not op.on_cpu or not parts["dq"].any()
    np.testing.assert_allclose(parts["dv"][0, 0, 0], arrays["d"][0, 0, -1], rtol=1e-6)


@pytest.mark.parametrize(("n", "m"), [(4, 2), (140, 70)])
def test_u21_bottom_right_alignment_leaves_the_first_rows_without_keys(op: Operator, n: int, m: int) -> None:
    parts = op.agree(attention(**drawn(1, 2, 1, n, m, 64), mask=causal(n, m)))
    assert not parts["dq"][:, :, : n - m].any()
    assert np.isneginf(parts["lse"][:, :, : n - m]).all()
    assert parts["dq"][:, :, -1].any()


@pytest.mark.parametrize(("n", "m"), [(3, 5), (3, 7), (7, 3), (70, 131), (131, 70)])
@pytest.mark.parametrize(("h", "hkv"), [(6, 2), (6, 3), (4, 4)])
def test_u22_u60_queries_and_keys_of_different_number(op: Operator, n: int, m: int, h: int, hkv: int) -> None:
    op.agree(attention(**drawn(1, h, hkv, n, m, 64), mask=causal(n, m)))


@pytest.mark.parametrize("layout", ["perm", "cache", "strided"])
def test_u23_u25_u51_any_memory_layout_gives_the_same_bits(op: Operator, layout: str) -> None:
    given = inputs.make(small(kv=513, nb=65, hsk=64, hsv=64, nh=2, mask="causal"), 0)
    expected = op.run(given)
    other = op.run(dataclasses.replace(given, case=given.case.replace(layout=layout)))
    for part, array in expected.items():
        np.testing.assert_array_equal(other[part], array, err_msg=part)


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "d"])
@pytest.mark.parametrize("n", [7, 70])
def test_u23_rows_of_a_wider_tensor_give_the_same_bits(op: Operator, name: str, n: int) -> None:
    given = inputs.make(small(hsk=64, hsv=64, kv=70, nb=n, ns=2, o=int(name == "o")), 0)
    expected = op.run(given)

    def widen(ne: list[int], nb: list[int]) -> None:
        nb[1] += 8 * 4
        nb[2], nb[3] = ne[1] * nb[1], ne[2] * ne[1] * nb[1]

    for part, array in restrided(op, given, name, widen).items():
        np.testing.assert_array_equal(array, expected[part], err_msg=part)


def test_u25_v_permuted_and_k_contiguous(op: Operator) -> None:
    given = inputs.make(case("hsk=64,hsv=64,nh=16,nhkv=16,kv=513,nb=513,ns=2,type_K=f32,type_V=f32"), 0)
    expected = op.agree(given)

    def swap(ne: list[int], nb: list[int]) -> None:
        nb[1], nb[2] = ne[2] * nb[1], nb[1]

    for part, array in restrided(op, given, "v", swap).items():
        np.testing.assert_array_equal(array, expected[part], err_msg=part)


@pytest.mark.parametrize("n", [7, 70])
def test_u24_an_incoming_gradient_with_row_strides_of_zero(op: Operator, n: int) -> None:
    given = inputs.make(small(layout="bcast", sinks=1, nb=n, kv=70, hsk=64, hsv=64), 0)
    expected = op.run(dataclasses.replace(given, case=given.case.replace(layout="cont")))
    for part, array in op.run(given).items():
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
def test_u26_large_heads(op: Operator, size: int) -> None:
    given = inputs.make(case(f"hsk={size},hsv={size},nh=2,nhkv=2,kv=97,nb=97,type_K=f32,type_V=f32"), 0)
    found = oracle.compare(given, op.result(given), reference.backward(given))
    assert max(part.worst_head_nmse for part in found.values()) < (1e-10 if op.on_cpu else 1e-6)


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0)])
def test_u31_u32_no_queries_or_no_keys_give_zeros(op: Operator, n: int, m: int, sinks: int) -> None:
    parts = op.agree(inputs.make(small(nb=n, kv=m, sinks=sinks), 0))
    for part in ("dq", "dk", "dv", "d"):
        assert not parts[part].any(), part


@pytest.mark.parametrize("d", [16, 64])
def test_u31_one_sequence_of_a_batch_without_visible_queries(op: Operator, d: int) -> None:
    mask = np.zeros((2, 1, 66, 70))
    mask[0] = NINF
    parts = op.agree(attention(**drawn(2, 2, 1, 66, 70, d), mask=mask))
    for part in ("dq", "dk", "dv", "d"):
        assert not parts[part][0].any(), part
        assert parts[part][1].any(), part


def test_u32_no_sequences_give_zeros(op: Operator) -> None:
    c, ffi = op.library.c, op.library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    q, k, d = (c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, 64, *ne, 0) for ne in ((70, 4), (70, 2), (4, 70)))
    sinks = c.ggml_new_tensor_1d(ctx, c.GGML_TYPE_F32, 4)
    back = c.ggml_flash_attn_back(ctx, q, k, k, ffi.NULL, sinks, ffi.NULL, d, parameters(0b100111))
    graph = c.ggml_new_graph_custom(ctx, 16, False)
    c.ggml_build_forward_expand(graph, back)
    backend = op.library.backend(op.device)
    supported = c.ggml_backend_supports_op(backend, back)
    if supported:
        buffer = c.ggml_backend_alloc_ctx_tensors(ctx, backend)
        c.ggml_backend_buffer_clear(buffer, ggml.GUARD_BYTE)
        assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
        assert not op.library.download(back, np.float32)[:4].any()
        c.ggml_backend_buffer_free(buffer)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)
    assert supported or op.path in ("hopper", "mma")


def test_u33_parts_lie_behind_2_31_elements(library: ggml.Library) -> None:
    s, h, n, m, d = 16384, 16, 64, 64, 128
    c, ffi = library.c, library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    q, k, do = (c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, d, *ne, s) for ne in ((n, h), (m, h), (h, n)))
    back = c.ggml_flash_attn_back(ctx, q, k, k, ffi.NULL, ffi.NULL, ffi.NULL, do, parameters(0b111))
    sizes = [4 * s * h * n * d, 4 * s * h * m * d, 4 * s * h * m * d, 4 * s * h * n, 4 * s * h * n]
    offset = 0
    for part, size in enumerate(sizes):
        view = c.ggml_flash_attn_back_view(ctx, back, part)
        assert (c.ggml_flash_attn_back_offset(back, part), view.view_offs) == (offset, offset)
        assert c.ggml_nbytes(view) == size
        offset += size
    assert c.ggml_nbytes(back) == offset
    assert sizes[0] == 4 * 2**31
    c.ggml_free(ctx)


def test_u35_thirty_runs_have_one_digest(op: Operator) -> None:
    shape = case(
        "hsk=128,hsv=128,nh=2,nhkv=1,kv=1024,nb=1024" if not op.on_cpu else "hsk=128,hsv=128,nh=2,nhkv=1,kv=256,nb=256"
    )
    op.take(shape)
    result = oracle.check(op.library, op.device, shape, 0, repeats=30)
    assert result.status == "ok", result.reason
    assert (result.repeats, result.distinct) == (30, 1)


def test_u37_a_loss_on_lse_is_refused_by_the_name_of_the_operator(library: ggml.Library) -> None:
    """FLASH_ATTN_EXT has no LSE to give; that of FLASH_ATTN_BACK has no gradient."""
    c, ffi = library.c, library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    q, k, d = (c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, 16, 4, 4, 1) for _ in range(3))
    c.ggml_set_param(q)
    back = c.ggml_flash_attn_back(ctx, q, k, k, ffi.NULL, ffi.NULL, ffi.NULL, d, parameters())
    loss = c.ggml_sum(ctx, c.ggml_flash_attn_back_view(ctx, back, cases.PARTS.index("lse")))
    c.ggml_set_loss(loss)
    graph = c.ggml_new_graph_custom(ctx, 64, True)
    c.ggml_build_forward_expand(graph, loss)
    said = last_words(lambda: c.ggml_build_backward_expand(ctx, graph, ffi.NULL))
    assert "unsupported ggml op for backward pass: FLASH_ATTN_BACK" in said
    c.ggml_free(ctx)


@pytest.mark.parametrize(("n", "d"), [(32, 16), (70, 64)])
@pytest.mark.parametrize(("cap", "reach"), [(15.0, 30.0), (30.0, 168.0), (-30.0, 60.0)])
def test_u38_u39_softcap_with_scores_far_beyond_it(op: Operator, cap: float, reach: float, n: int, d: int) -> None:
    arrays = drawn(1, 2, 1, n, n, d)
    top = np.abs(arrays["q"] @ np.repeat(arrays["k"], 2, axis=1).transpose(0, 1, 3, 2)).max()
    arrays["q"] *= np.float32(reach / top)
    parts = op.agree(attention(**arrays, mask=causal(n, n), softcap=abs(cap)))
    if cap < 0:  # c * tanh(x / c) is even in c
        given = attention(**arrays, mask=causal(n, n), softcap=abs(cap))
        for part, array in op.run(dataclasses.replace(given, softcap=cap)).items():
            np.testing.assert_array_equal(array, parts[part], err_msg=part)


@pytest.mark.parametrize(("n", "m", "d"), [(4, 6, 8), (66, 70, 64)])
def test_u40_softcap_that_saturates_has_no_gradient(op: Operator, n: int, m: int, d: int) -> None:
    arrays = drawn(1, 1, 1, n, m, d)
    size = np.float32((5000 / d) ** 0.5)
    arrays["q"][:] = size
    arrays["k"][:] = np.sign(arrays["k"][..., :1]) * size  # scores of +-5000
    parts = op.run(attention(**arrays, softcap=50.0))
    assert not parts["dq"].any()
    assert not parts["dk"].any()
    assert np.isfinite(parts["dv"]).all()


@pytest.mark.parametrize("kv", [2, 64])
def test_u41_sinks_get_their_gradient_from_autodiff(op: Operator, kv: int) -> None:
    rows = 1 if kv < 64 else 64
    differentiate(
        op, f"hsk=64,hsv=64,nh=2,nhkv=1,kv={kv},nb={rows},type_K=f32,type_V=f32,mask=none,sinks=1", samples=40
    )


@pytest.mark.parametrize(("n", "d"), [(7, 16), (70, 64)])
def test_u41_u55_a_sink_of_minus_infinity_is_no_sink(op: Operator, n: int, d: int) -> None:
    arrays = drawn(1, 4, 2, n, n, d)
    mask = causal(n, n)
    mask[0, 0, :3] = NINF
    without = op.agree(attention(**arrays, mask=mask))
    beside = op.run(attention(**arrays, mask=mask, sinks=np.full(4, NINF)))
    assert not beside.pop("dsinks").any()
    assert np.array_equal(np.isneginf(beside["lse"]), np.isneginf(without["lse"]))
    for part, array in beside.items():
        seen = np.isfinite(without[part])
        op.near(array[seen], without[part][seen], what=part)


@pytest.mark.parametrize(("n", "d"), [(7, 16), (70, 64)])
def test_u42_alibi_with_a_number_of_heads_that_is_no_power_of_two(op: Operator, n: int, d: int) -> None:
    op.agree(inputs.make(small(nh=6, nhkv=2, max_bias=8.0, softcap=20.0, nb=n, kv=90, hsk=d, hsv=d), 0))


@pytest.mark.parametrize(("n", "m", "d"), [(3, 6, 16), (66, 130, 64)])
def test_u43_u55_rows_that_see_none_one_or_all_keys(op: Operator, n: int, m: int, d: int) -> None:
    mask = np.zeros((1, 1, n, m))
    mask[0, 0, ::3] = NINF
    mask[0, 0, 1::3, 1:] = NINF
    arrays = drawn(1, 2, 1, n, m, d)
    without = op.agree(attention(**arrays, mask=mask))
    assert np.isneginf(without["lse"][:, :, ::3]).all()
    assert not without["dq"][:, :, ::3].any()
    op.near(without["dq"][:, :, 1::3], 0, without["dq"][:, :, 2::3])
    sinks = normal(2, seed=9)
    beside = op.agree(attention(**arrays, mask=mask, sinks=sinks))
    of_sink = np.repeat(sinks[:, None], len(range(0, n, 3)), axis=1)
    op.near(beside["lse"][0, :, ::3], of_sink)  # CUDA's tensor core paths keep it in base 2: a rounding more
    assert not op.on_cpu or np.array_equal(beside["lse"][0, :, ::3], of_sink)
    assert not beside["d"][:, :, ::3].any()


@pytest.mark.parametrize(("n", "d"), [(4, 8), (72, 64)])
def test_u44_a_row_without_keys_does_not_spoil_the_others(op: Operator, n: int, d: int) -> None:
    """A causal window of half the keys, the second half of which is padding."""
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    hidden = (j > i) | (j <= i - n // 2) | (j < n // 2)
    parts = op.agree(attention(**drawn(1, 1, 1, n, n, d), mask=np.where(hidden, NINF, 0.0)[None, None]))
    assert not parts["dq"][0, 0, : n // 2].any()
    assert np.isfinite(parts["dk"]).all()


@pytest.mark.parametrize(("n", "d"), [(6, 16), (70, 64)])
@pytest.mark.parametrize("name", ["q", "d"])
def test_u44_nan_in_a_row_without_keys_stays_there(op: Operator, name: str, n: int, d: int) -> None:
    mask = causal(n, n)
    mask[0, 0, 1] = NINF
    given = attention(**drawn(1, 4, 2, n, n, d), mask=mask)
    expected = op.agree(given)
    spoilt = given.q[:, :, 1] if name == "q" else given.d[:, 1]
    spoilt[:] = np.nan
    for part, array in op.run(given).items():
        np.testing.assert_array_equal(array, expected[part], err_msg=part)


@pytest.mark.parametrize(("n", "m", "d"), [(2, 8, 16), (66, 72, 64)])
def test_u46_a_row_of_lowest_finite_numbers_is_not_a_masked_row(op: Operator, n: int, m: int, d: int) -> None:
    mask = np.zeros((1, 1, n, m))
    mask[0, 0, 0] = -65504
    arrays = drawn(1, 1, 1, n, m, d)
    given = attention(**arrays, mask=mask, scale=1e-4)
    assert np.isfinite(op.agree(given)["lse"]).all()
    given.d[:, 1:] = 0
    uniform = np.tile(arrays["d"][0, 0, 0] / m, (m, 1))
    np.testing.assert_allclose(op.run(given)["dv"][0, 0], uniform, rtol=5e-3)


@pytest.mark.slow
def test_u49_65536_heads_and_sequences(op: Operator) -> None:
    given = inputs.make(case("hsk=64,hsv=64,nh=32,nhkv=32,kv=2,nb=1,ns=2048,mask=none"), 0)
    parts = op.run(given)
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
        op.near(parts[part], array, what=part)


@pytest.mark.parametrize("n", [8, 70])
def test_u50_huge_inputs_stay_finite(op: Operator, n: int) -> None:
    arrays = drawn(1, 1, 1, n, n, 64)
    arrays["q"][:] = arrays["k"][:] = 133120
    parts = op.run(attention(**arrays))
    for part, array in parts.items():
        assert np.isfinite(array).all(), part
    assert np.abs(parts["dv"]).max() <= np.abs(arrays["d"]).sum()


@pytest.mark.parametrize("m", [*range(1, 34), 63, 65, 127, 129])
def test_u54_any_number_of_keys(op: Operator, m: int) -> None:
    op.agree(inputs.make(small(kv=m, nb=min(m, 9), mask="none"), 0))


@pytest.mark.parametrize("m", [*range(64, 80), 95, 96, 97, 127, 128, 129, 191, 193, 255, 257])
def test_u54_any_number_of_keys_of_a_tile(op: Operator, m: int) -> None:
    op.agree(inputs.make(small(kv=m, nb=128 + m % 17, mask="none", hsk=64, hsv=64, type_K="f16", type_V="f16"), 0))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_u59_with_and_without_a_causal_mask(op: Operator, mask: str) -> None:
    op.agree(inputs.make(case(f"hsk=64,hsv=64,nh=2,nhkv=2,kv=128,nb=128,mask={mask}"), 0))


@pytest.mark.parametrize("n", [7, 70])
def test_u61_every_element_is_written_whatever_the_memory_held(op: Operator, n: int) -> None:
    given = inputs.make(small(sinks=1, mask="rows", nb=n, kv=90, hsk=64, hsv=64), 0)
    op.take(given)
    with op.library.prepare(op.device, given) as session:
        session.compute()
        fresh = session.result()
        session.compute()
        again = session.result()
    assert not any(fresh.unwritten.values())
    assert fresh.digest == again.digest


@pytest.mark.parametrize(("n", "d"), [(20, 16), (70, 64)])
def test_u62_rows_of_the_mask_need_no_alignment(op: Operator, n: int, d: int) -> None:
    op.agree(inputs.make(small(kv=43 if n < 64 else 75, nb=n, mask="random", hsk=d, hsv=d), 0))


def test_u62_a_sequence_that_ends_inside_a_tile(op: Operator) -> None:
    given = inputs.make(case("hsk=64,hsv=64,nh=1,nhkv=1,kv=4092,nb=4092"), 0)
    op.take(given)
    with op.library.prepare(op.device, given) as session:
        session.compute()
        first = session.result()
        session.poison()
        session.compute()
        assert session.result().digest == first.digest
    for part in oracle.compare(given, first, reference.backward(given)).values():
        assert part.passed, part


@pytest.mark.parametrize("what", ["stride", "offset"])
@pytest.mark.parametrize(("name", "split"), [("q", 2), ("k", 1), ("v", 1), ("mask", 1), ("d", 2)])
def test_u62_views_that_split_elements_are_refused_in_words(op: Operator, name: str, split: int, what: str) -> None:
    given = inputs.make(case("hsk=16,hsv=16,nh=2,nhkv=2,kv=75,nb=70"), 0)
    with op.library.prepare(op.device, given) as session:
        handle = op.library.handle(op.device)
        ask = op.library.proc(handle, "ggml_backend_flash_attn_back_refusal", "ggml_backend_flash_attn_back_refusal_t")
        if op.library.text(ask(handle, session.back)):
            assert op.path in ("hopper", "mma")
            return
        if what == "stride":
            session.sources[name].nb[1] += split
        else:
            session.sources[name].view_offs += split
        assert not op.library.c.ggml_backend_dev_supports_op(handle, session.back)
        assert op.library.text(ask(handle, session.back)) == "a source's strides do not keep its elements aligned"


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
    assert {c.data for c in listed} == set(cases.TAME)
    assert {c.layout for c in listed} == set(cases.LAYOUTS)
    assert {c.type_K for c in listed} == {c.type_V for c in listed} == set(cases.TYPES)
    assert {c.kv for c in listed} >= {*range(34), 63, 65, 127, 129}
    assert {c.nh / c.nhkv for c in listed if not c.capture} >= {1, 2, 3, 7, 16}


def test_the_document_names_tests_that_exist() -> None:
    text = (digest.ROOT / "docs/public-failures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (U\d\d) .*\| (.*) \|$", text.partition("\n## Values\n")[0], re.MULTILINE)
    assert len(rows) == len({row for row, _ in rows}) == 50
    everything = set(re.findall(r"^\| ([UN]\d\d) ", text, re.MULTILINE))
    assert f" {len(everything)} public reports " in (digest.ROOT / "README.md").read_text(encoding="utf-8")
    for row, shown in rows:
        names = re.findall(r"`(?:(test_\w+\.py)::)?(\w+)(?:\.\.\.)?(?:\[[^`]*\])?(?:\.\.\.)?`", shown)
        assert names, row
        for file, name in names:
            (path,) = (digest.ROOT / "tests").rglob(file or "test_public_reports.py")
            source = path.read_text(encoding="utf-8")
            assert f"def test_{name}" in source, (row, name)


# ---- sizes that need the memory of a GPU; every path that takes the node runs it ----


def piece(
    large: Large, s: int, h: int, g: int, n: int, m: int, first: int = 0, rows: int = 0, hidden: bool = False
) -> Any:
    """Inputs of rows of one head h of sequence s, with KV head g, as an attention of its own."""
    heads, kv_heads, width = (
        int(x) for x in (large.tensors["q"].ne[2], large.tensors["k"].ne[2], large.tensors["q"].ne[0])
    )
    rows = rows or n
    q = large.source("q", ((s * heads + h) * n + first) * width, 1, 1, rows, width)
    k, v = (large.source(name, (s * kv_heads + g) * m * width, 1, 1, m, width) for name in ("k", "v"))
    d = large.source("d", (s * n + first) * large.wide, 1, rows, large.wide)[..., h * width : (h + 1) * width]
    mask = large.source("mask", ((s * heads + h) * n + first) * m, 1, 1, rows, m) if hidden else None
    return attention(q, k, v, d[:, None], mask=mask, scale=float(np.float32(large.scale)))


def run_last_head(large: Large, s: int, h: int, n: int, m: int, d: int, hidden: bool = False) -> None:
    """All parts of the last head of the last sequence, on each path; as many KV heads as query heads."""
    unit = s * h - 1
    given = piece(large, s - 1, h - 1, h - 1, n, m, hidden=hidden)
    want = reference.backward(given)

    def part(name: str) -> NDArray[np.float32]:
        if name in ("dk", "dv"):
            return large.part(name, unit * m * d, 1, 1, m, d)
        if name == "dq":
            return large.part(name, unit * n * d, 1, 1, n, d)
        return large.part(name, unit * n, 1, 1, n)

    for path in large.runs():
        large.check(given, want, part, path)


def last_rows(large: Large, given: Any, rows: int) -> tuple[dict[str, Any], Callable[[str], NDArray[np.float32]]]:
    """The reference of what the last rows of the last head have of their own, and a function that reads that."""
    d, n, h, s = (int(x) for x in large.tensors["q"].ne)
    first = s * h * n - rows

    def part(name: str) -> NDArray[np.float32]:
        return large.part(name, first * d, 1, 1, rows, d) if name == "dq" else large.part(name, first, 1, 1, rows)

    want = reference.backward(given)
    return {name: want[name] for name in ("dq", "lse", "d")}, part


@pytest.mark.large(16)
def test_u10_a_mask_of_8_gib(op: Operator) -> None:
    n, m, d, rows = 8192, 524288, 64, 16
    with Large(op, (d, n, 1, 1), (d, m, 1, 1), (m, n, 1, 1)) as large:
        given = piece(large, 0, 0, 0, n, m, n - rows, rows, hidden=True)
        want, part = last_rows(large, given, rows)
        q, do = large.source("q", 0, n, d), large.source("d", 0, n, d)
        keys = np.arange(m - 64, m)
        k, v = (large.source(name, (m - 64) * d, 64, d).astype(np.float64) for name in ("k", "v"))
        hidden = large.periods["mask"][(np.arange(n)[:, None] * m + keys) % PERIOD]
        for path in large.runs():
            large.check(given, want, part, path)
            lse, sums = large.part("lse", 0, n), large.part("d", 0, n)
            p = np.exp(given.scale * q @ k.T + hidden - lse[:, None])
            ds = p * (do @ v.T - sums[:, None])
            large.near(large.part("dv", (m - 64) * d, 64, d), p.T @ do, path)
            large.near(large.part("dk", (m - 64) * d, 64, d), given.scale * ds.T @ q, path)


@pytest.mark.large(40)
@pytest.mark.parametrize(("s", "h", "m", "d"), [(9, 8, 262144, 128), (5, 64, 32768, 256)])
def test_u11_sequences_whose_keys_lie_2_31_elements_apart(op: Operator, s: int, h: int, m: int, d: int) -> None:
    n = 64
    with Large(op, (d, n, h, s), (d, m, h, s)) as large:
        run_last_head(large, s, h, n, m, d)


@pytest.mark.large(60)
def test_u33_2_31_elements_of_dq(op: Operator) -> None:
    s, h, n, m, d = 16384, 16, 64, 64, 128
    with Large(op, (d, n, h, s), (d, m, h, s)) as large:
        run_last_head(large, s, h, n, m, d)


@pytest.mark.large(40)
def test_u34_an_incoming_gradient_in_wide_rows(op: Operator) -> None:
    n, m, d, h, rows = 410923, 64, 96, 16, 64
    with Large(op, (d, n, h, 1), (d, m, h, 1), row=9728) as large:
        given = piece(large, 0, h - 1, h - 1, n, m, n - rows, rows)
        want, part = last_rows(large, given, rows)
        place = np.arange(n)[:, None] * large.wide + (h - 1) * d + np.arange(d)
        total = large.periods["d"][place % PERIOD].astype(np.float64).sum(axis=0)
        for path in large.runs():
            large.check(given, want, part, path)
            large.near(large.part("dv", (h - 1) * m * d, m, d).astype(np.float64).sum(axis=0), total, path)


@pytest.mark.large(40)
@pytest.mark.parametrize("s", [699, 700])
def test_u58_either_side_of_2_31_elements_of_k(op: Operator, s: int) -> None:
    h, n, m, d = 24, 64, 999, 128
    with Large(op, (d, n, h, s), (d, m, h, s)) as large:
        run_last_head(large, s, h, n, m, d)


@pytest.mark.large(16)
def test_u62_a_mask_of_more_than_2_31_elements(op: Operator) -> None:
    s, h, n, d = 8, 28, 4096, 64
    with Large(op, (d, n, h, s), (d, n, h, s), (n, n, h, s)) as large:
        run_last_head(large, s, h, n, n, d, hidden=True)
