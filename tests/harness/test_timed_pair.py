"""The pair that perf times: forward and backward in the graph that ggml's autodiff builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attention import small

from pyharness.case import inputs, operands, quant, reference
from pyharness.device.ggml import Device, Library
from pyharness.perf import pair, peers, perf

MOVES = {"NONE", "VIEW", "PERMUTE"}
"""Nodes that cost no time."""


def build(library: Library, device: Device, given: operands.Inputs) -> pair.Pair:
    return pair.Pair(library, device, given, peers.Plain(given).arrays, threads=1)


def nodes(library: Library, graph: Any) -> Iterator[Any]:
    for i in range(library.c.ggml_graph_n_nodes(graph)):
        node = library.c.ggml_graph_node(graph, i)
        if library.text(library.c.ggml_op_name(node.op)) not in MOVES:
            yield node


def test_both_nodes_stand_in_one_graph_and_nothing_else_that_costs_time(library: Library, cpu: Device) -> None:
    c = library.c
    with build(library, cpu, inputs.make(small(sinks=1), 0)) as found:
        forward, back = nodes(library, found.both)
        assert (forward.op, back.op) == (c.GGML_OP_FLASH_ATTN_EXT, c.GGML_OP_FLASH_ATTN_BACK)
        assert list(nodes(library, found.forward)) == [forward]  # the same node, whatever autodiff did to it
        assert [back.src[i] for i in range(5)] == [forward.src[i] for i in range(5)]
        assert forward.op_params[3] == c.GGML_PREC_F32
        assert forward.src[3].type == c.GGML_TYPE_F16
        assert found.path == "cpu"
        assert found.bytes > sum(found.traffic.values()) - found.traffic["forward"]


@pytest.mark.parametrize(
    ("kind", "stored"), [("f32", "f32"), ("f16", "f32"), ("bf16", "f32"), ("q8_0", "q8_0"), ("q4_0", "q4_0")]
)
def test_k_and_v_are_f32_as_in_training_unless_they_are_a_quantised_cache(
    library: Library, cpu: Device, kind: str, stored: str
) -> None:
    given = inputs.make(small(hsk=32, hsv=32, type_K=kind, type_V=kind), 0)
    with build(library, cpu, given) as found:
        forward, _ = nodes(library, found.both)
        assert [library.text(library.c.ggml_type_name(forward.src[i].type)) for i in (1, 2)] == [stored] * 2


@pytest.mark.parametrize(
    "case",
    [
        small(),
        small(hsv=8, ns=2, sinks=1, softcap=5.0),
        small(mask="rows", mh=4, ms=2, ns=2, mpad=3, max_bias=8.0),
        small(mask="none", grads="kv"),
        small(mask="pad", grads="q", layout="cache"),
        small(hsk=32, hsv=64, type_K="q8_0", type_V="q5_1", mask="pad", mh=4, sinks=1),
        small(hsk=32, hsv=32, type_K="q8_0", type_V="q8_0", o=1),
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_the_definition(library: Library, cpu: Device, case: Any) -> None:
    given = inputs.make(case, 0)
    want = reference.backward(given) | {"o": reference.forward(given)}
    with build(library, cpu, given) as found:
        for graph in (found.both, found.forward, found.both):  # none leaves anything that another trips over
            status = library.c.ggml_backend_graph_compute(found.backend, graph)
            assert status == library.c.GGML_STATUS_SUCCESS
        got = found.parts()
    assert {"o", *given.grads} <= set(got)
    for name in ("o", *given.grads):
        assert got[name].shape == want[name].shape
        # upstream's forward rounds q to 8 bits where K is quantised
        assert perf.nmse(got[name], want[name]) < (1e-3 if name == "o" else 1e-9), name


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (small(kv_first=2, kv_count=5), "autodiff gives the gradients of all keys"),
        (small(hsk=32, hsv=16, vview=1), "autodiff adds the gradients of K and V where V is a view of K"),
    ],
    ids=["window", "view"],
)
def test_what_autodiff_builds_no_pair_for_says_so(library: Library, cpu: Device, case: Any, reason: str) -> None:
    given = inputs.make(case, 0)
    with build(library, cpu, given) as found:
        assert found.refusal == reason
    peer = peers.Pair(library, cpu, peers.Plain(given), 1, "")
    with pytest.raises(peers.Unavailable, match=reason), peer:
        pass


def test_what_a_device_does_not_run_is_refused_in_its_words(
    library: Library, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            if name == "ggml_flash_attn_back_train_refusal":
                return lambda *_: library.ffi.new("char[]", b"not on a Sunday")
            return getattr(real, name)

    real = library.c
    monkeypatch.setattr(library, "c", Refusing())
    with build(library, cpu, inputs.make(small(), 0)) as found:
        assert found.refusal == "not on a Sunday"
        assert found.bytes == 0


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_keys_that_nothing_sees_are_zeros_for_the_forward(library: Library, cpu: Device, kind: str) -> None:
    given = inputs.make(small(hsk=32, hsv=32, type_K=kind, type_V=kind, mask="pad"), 0)
    assert np.isnan(given.k_f32()).any()
    with build(library, cpu, given) as found:
        forward, _ = nodes(library, found.both)
        for source in (forward.src[1], forward.src[2]):
            leaf = source.src[0] if source.src[0] else source
            raw = library.download(leaf, np.uint8).reshape(*reversed([leaf.ne[i] for i in range(1, 4)]), -1)
            assert np.isfinite(quant.dequantize(raw, "f32" if kind == "f16" else kind)).all()
