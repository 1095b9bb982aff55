"""Finite differences through autodiff, and the shape of the backward graph."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from attention import case, in_a_graph, last_words, small
from graphs import Graph

from pyharness.case import cases, inputs, reference
from pyharness.case.cases import Case
from pyharness.check import gradcheck, report
from pyharness.cli import cli
from pyharness.device import ggml

LISTED = [(str(c), graph) for c in cases.load(cases.GRAD) for graph in gradcheck.graphs(c)]


@pytest.mark.parametrize(("text", "graph"), LISTED)
def test_autodiff_agrees_with_finite_differences(
    library: ggml.Library, cpu: ggml.Device, text: str, graph: str
) -> None:
    found = gradcheck.check(library, cpu, Case.parse(text), 0, graph, samples=60)
    assert found.status == "ok", found.reason


@pytest.mark.parametrize("graph", gradcheck.GRAPHS)
def test_a_wrong_gradient_is_found_and_placed(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    loss = gradcheck._Problem.loss
    monkeypatch.setattr(gradcheck._Problem, "loss", lambda self, values: 1.01 * loss(self, values))
    found = gradcheck.check(library, cpu, small(), 0, graph, samples=10)
    assert found.status == "failed"
    assert "dq: NMSE" in found.reason
    text = report.failure(found, 0, "grad")
    assert "worst at (s=0, h=" in text
    assert "worst at (s=0, g=" in text
    assert f" -m pyharness grad -b CPU --seed 0 -o '{small()}' --graph {graph}" in text


def test_no_time_is_printed_where_none_was_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grad", "-b", "CPU", "--samples", "2", "--graph", "plain", "-o", str(small())]) == 0
    out = capsys.readouterr().out
    assert re.search(r"dv \S+  plain$", out, re.MULTILINE)
    assert " ms" not in out


def test_the_wanted_gradients_of_the_node_are_minimal(library: ggml.Library, cpu: ggml.Device) -> None:
    for grads in ("q", "k", "qv", "s"):
        found = gradcheck.check(library, cpu, small(sinks=1, grads=grads), 0, samples=5)
        assert found.status == "ok", found.reason


@pytest.fixture
def made(library: ggml.Library) -> Any:
    graph = Graph(library)
    yield graph
    graph.c.ggml_free(graph.ctx)


def test_u01_u02_a_cache_written_through_set_rows_is_refused_by_the_name_of_the_operator(made: Graph) -> None:
    cache = made.tensor(64 * 2, 32, kind="f16")
    rows = made.c.ggml_new_tensor_1d(made.ctx, made.c.GGML_TYPE_I64, 16)
    new = made.tensor(64 * 2, 16, param=True)
    written = made.c.ggml_set_rows(made.ctx, cache, new, rows)
    k = made.c.ggml_permute(made.ctx, made.c.ggml_reshape_4d(made.ctx, written, 64, 2, 32, 1), 0, 2, 1, 3)
    out = made.attend(made.tensor(64, 16, 14, param=True), k, k)
    assert "SET_ROWS" in last_words(lambda: made.backward(out, 256))


@pytest.mark.parametrize("layers", [1, 30])
def test_u03_every_layer_gets_one_node(made: Graph, layers: int) -> None:
    out = made.tensor(64, 16, 9, param=True)
    for _ in range(layers):
        k, v = made.tensor(64, 16, 3, param=True), made.tensor(64, 16, 3, param=True)
        out = made.c.ggml_permute(made.ctx, made.attend(out, k, v), 0, 2, 1, 3)
    graph = made.backward(out, 64 * layers)
    backs = [node for node in made.nodes(graph) if node.op == made.c.GGML_OP_FLASH_ATTN_BACK]
    assert len(backs) == layers


def test_u03_a_graph_that_is_too_small_says_so(made: Graph) -> None:
    out = made.attend(made.tensor(64, 16, 9, param=True), *(made.tensor(64, 16, 3, param=True) for _ in range(2)))
    assert "cgraph" in last_words(lambda: made.backward(out, 6))


def test_u62_the_mask_gets_no_gradient(made: Graph) -> None:
    mask = made.tensor(16, 16, kind="f16", param=True)
    q, k, v = made.tensor(64, 16, 9, param=True), made.tensor(64, 16, 3, param=True), made.tensor(64, 16, 3, param=True)
    graph = made.backward(made.attend(q, k, v, mask), 256)
    assert made.c.ggml_graph_get_grad(graph, q)
    assert not made.c.ggml_graph_get_grad(graph, mask)


def test_an_attention_that_nobody_differentiates_gets_no_node(made: Graph) -> None:
    frozen = made.attend(made.tensor(64, 16, 9), made.tensor(64, 16, 3), made.tensor(64, 16, 3))
    graph = made.backward(made.c.ggml_mul(made.ctx, frozen, made.tensor(64, 9, 16, param=True)), 256)
    assert not [node for node in made.nodes(graph) if node.op == made.c.GGML_OP_FLASH_ATTN_BACK]


@pytest.mark.parametrize(
    ("v_heads", "mask", "words"),
    [
        (1, (16, 16), "k and v must have the same keys and heads"),
        (3, (20, 16), "the mask must have the shape [M, >=N, Hm, Sm]"),
        (3, (16, 9), "the mask must have the shape [M, >=N, Hm, Sm]"),
    ],
)
def test_a_forward_that_takes_more_than_the_backward_is_refused_in_words(
    made: Graph, cpu: ggml.Device, v_heads: int, mask: tuple[int, int], words: str
) -> None:
    q, k, v = made.tensor(64, 16, 9, param=True), made.tensor(64, 16, 3), made.tensor(64, 16, v_heads)
    out = made.attend(q, k, v, made.tensor(*mask, kind="f16"))
    handle = made.library.handle(cpu)
    assert made.library.text(made.c.ggml_flash_attn_back_train_refusal(handle, out, 1)) == words
    assert words in last_words(lambda: made.backward(out, 256))


@pytest.mark.parametrize(
    "text", ["hsk=64,hsv=64,nh=4,nhkv=2,kv=50,nb=20,sinks=1", "hsk=32,hsv=32,nh=2,nhkv=2,kv=9,nb=9"]
)
def test_u08_the_allocator_lets_the_result_share_no_memory_with_a_source(
    library: ggml.Library, cpu: ggml.Device, text: str
) -> None:
    """The sources are computed in the graph and read by nobody else: an in-place operator would take their memory."""
    given = inputs.make(case(text + ",mask=none,type_K=f32,type_V=f32"), 0)
    with in_a_graph(library, cpu, given) as (back, _, found):
        first = int(library.c.ggml_flash_attn_back_offset(back, 0)) // 4
        dq = found[first : first + given.q.size].reshape(given.q.shape)
        np.testing.assert_allclose(dq, reference.backward(given)["dq"], atol=1e-5)


def test_every_node_stays_on_the_backend_that_a_scheduler_is_given(library: ggml.Library, cpu: ggml.Device) -> None:
    made = Graph(library)
    c = made.c
    q = c.ggml_permute(made.ctx, made.tensor(32, 4, 8, param=True), 0, 2, 1, 3)
    k, v = (c.ggml_cast(made.ctx, made.tensor(32, 16, 2, param=True), c.GGML_TYPE_F16) for _ in range(2))
    graph = made.backward(made.attend(q, k, v), 256)
    backend = library.backend(cpu)
    for node in made.nodes(graph):
        assert c.ggml_backend_supports_op(backend, node), library.text(c.ggml_op_name(node.op))
    scheduler = c.ggml_backend_sched_new(
        library.ffi.new("ggml_backend_t[]", [backend]), library.ffi.NULL, 1, 256, False, True
    )
    assert c.ggml_backend_sched_alloc_graph(scheduler, graph)
    assert c.ggml_backend_sched_get_n_splits(scheduler) == 1
    c.ggml_backend_sched_free(scheduler)
    c.ggml_backend_free(backend)
    c.ggml_free(made.ctx)
