"""Labels that are token ids, -1 for a row that does not count: loss and gradient in float64, results of ggml-opt."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyharness.device import ggml

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


def reference(logits: Floats, labels: Ids) -> tuple[float, npt.NDArray[np.float64]]:
    """Loss and gradient in float64."""
    x = logits.astype(np.float64)
    counted = np.flatnonzero(labels >= 0)
    gradient = np.zeros_like(x)
    if not len(counted):
        return 0.0, gradient
    x = x[counted] - x[counted].max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(x).sum(axis=1, keepdims=True))
    gradient[counted] = np.exp(x - log_sum) / len(counted)
    gradient[counted, labels[counted]] -= 1 / len(counted)
    return float(np.mean(log_sum[:, 0] - x[np.arange(len(counted)), labels[counted]])), gradient


def computed(
    library: ggml.Library, device: ggml.Device, logits: Floats, labels: Ids, threads: int = 2
) -> tuple[float, Floats]:
    """Loss and gradient of ggml's autodiff on a device."""
    c, ffi = library.c, library.ffi
    rows, classes = logits.shape
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    x = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, classes, rows, 1, 1)
    ids = c.ggml_new_tensor_1d(ctx, c.GGML_TYPE_I32, rows)
    c.ggml_set_param(x)
    loss = c.ggml_cross_entropy_loss(ctx, x, ids)
    c.ggml_set_loss(loss)
    graph = c.ggml_new_graph_custom(ctx, 64, True)
    c.ggml_build_forward_expand(graph, loss)
    c.ggml_build_backward_expand(ctx, graph, ffi.NULL)
    backend = library.backend(device, threads)
    buffer = c.ggml_backend_alloc_ctx_tensors(ctx, backend)
    library.upload(x, logits)
    library.upload(ids, labels)
    c.ggml_graph_reset(graph)
    assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
    found = float(library.download(loss, np.float32)[0])
    gradient = library.download(c.ggml_graph_get_grad(graph, x), np.float32).reshape(rows, classes)
    c.ggml_backend_buffer_free(buffer)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)
    return found, gradient


def draw(rows: int, classes: int, ignored: float, seed: int = 0) -> tuple[Floats, Ids]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows, np.int32)
    labels[rng.random(rows) < ignored] = -1
    return rng.normal(0, 5, (rows, classes)).astype(np.float32), labels


@pytest.mark.parametrize("ignored", [0, 0.5])
@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (33, 1000), (7, 1025), (5, 8193), (3, 32000)])
def test_loss_and_gradient_are_those_of_float64(
    library: ggml.Library, device: ggml.Device, rows: int, classes: int, ignored: float
) -> None:
    logits, labels = draw(rows, classes, ignored)
    want, gradient = reference(logits, labels)
    found, got = computed(library, device, logits, labels)
    assert found == pytest.approx(want, rel=1e-6)
    np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-9)
    assert not got[labels == -1].any()


def test_no_row_counts_and_loss_and_gradient_are_zero(library: ggml.Library, device: ggml.Device) -> None:
    logits, labels = draw(5, 1025, 1)
    logits[2, 3] = np.nan  # of a row that does not count
    found, gradient = computed(library, device, logits, labels)
    assert found == 0
    assert not gradient.any()


def test_rows_that_do_not_count_change_nothing(library: ggml.Library, device: ggml.Device) -> None:
    logits, labels = draw(33, 100, 0.5)
    found, gradient = computed(library, device, logits, labels)
    logits[labels == -1] = np.inf
    again, same = computed(library, device, logits, labels)
    assert again == found
    np.testing.assert_array_equal(same, gradient)


def test_bits_do_not_depend_on_the_number_of_threads(library: ggml.Library, cpu: ggml.Device) -> None:
    logits, labels = draw(131, 1003, 0.3)
    loss, gradient = computed(library, cpu, logits, labels, threads=1)
    for threads in (2, 3, 7):
        found, got = computed(library, cpu, logits, labels, threads)
        assert found == loss
        np.testing.assert_array_equal(got, gradient)


class Optimizer:
    """ggml-opt on a layer of its own, static graphs: W x is the output, x the input."""

    def __init__(self, library: ggml.Library, device: ggml.Device, classes: int, rows: int, width: int = 4) -> None:
        self.library, c, ffi = library, library.c, library.ffi
        self.backends = ffi.new("ggml_backend_t[2]")
        names = [device.name] + ["CPU"] * (device.name != "CPU")
        for i, name in enumerate(names):
            self.backends[i] = library.backend(library.device(name))
        self.sched = c.ggml_backend_sched_new(self.backends, ffi.NULL, len(names), 256, False, False)
        own, compute = (c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True}) for _ in range(2))
        self.w = c.ggml_new_tensor_4d(own, c.GGML_TYPE_F32, width, classes, 1, 1)
        self.x = c.ggml_new_tensor_4d(own, c.GGML_TYPE_F32, width, rows, 1, 1)
        c.ggml_set_param(self.w)
        self.buffer = c.ggml_backend_alloc_ctx_tensors(own, self.backends[0])
        params = c.ggml_opt_default_params(self.sched, c.GGML_OPT_LOSS_TYPE_CROSS_ENTROPY_IDS)
        params.ctx_compute, params.inputs = compute, self.x
        params.outputs = c.ggml_mul_mat(compute, self.w, self.x)
        params.optimizer = c.GGML_OPT_OPTIMIZER_TYPE_SGD
        self.opt = c.ggml_opt_init(params)
        self.result = c.ggml_opt_result_init()
        rng = np.random.default_rng(1)
        # sixteenths, so that TF32 products are exact
        self.weights = (rng.integers(-32, 33, size=(classes, width)) / 16).astype(np.float32)
        self.inputs = (rng.integers(-32, 33, size=(rows, width)) / 16).astype(np.float32)
        library.upload(self.w, self.weights)
        library.upload(self.x, self.inputs)

    def step(self, labels: Ids, backward: bool = True) -> None:
        c = self.library.c
        c.ggml_opt_alloc(self.opt, backward)
        self.library.upload(c.ggml_opt_labels(self.opt), labels)
        c.ggml_opt_eval(self.opt, self.result)

    def value(self, name: str) -> float:
        number = self.library.ffi.new("double *")
        getattr(self.library.c, f"ggml_opt_result_{name}")(self.result, number, self.library.ffi.NULL)
        return float(number[0])

    @property
    def moved(self) -> bool:
        """Whether a step changed the weights."""
        return not np.array_equal(self.library.download(self.w, np.float32).reshape(self.weights.shape), self.weights)


def test_loss_and_accuracy_of_a_result_are_of_the_rows_that_count(library: ggml.Library, device: ggml.Device) -> None:
    rows, classes = 20, 7
    optimizer = Optimizer(library, device, classes, rows)
    batches = [draw(rows, classes, ignored, seed)[1] for seed, ignored in enumerate((0, 0.8, 1))]
    logits = optimizer.inputs @ optimizer.weights.T
    for labels in batches:
        optimizer.step(labels, backward=False)
    tiled, labels = np.tile(logits, (len(batches), 1)), np.concatenate(batches)
    counted = labels >= 0
    assert optimizer.value("loss") == pytest.approx(reference(tiled, labels)[0], rel=1e-5)
    hits = tiled[counted].argmax(axis=1) == labels[counted]
    assert optimizer.value("accuracy") == pytest.approx(hits.mean())


def test_a_step_without_a_row_that_counts_trains_nothing(library: ggml.Library, device: ggml.Device) -> None:
    optimizer = Optimizer(library, device, 7, 20)
    optimizer.step(np.full(20, -1, np.int32))
    assert not optimizer.moved
    assert optimizer.value("loss") == 0
    optimizer.step(draw(20, 7, 0.5)[1])
    assert optimizer.moved


def _step_with_a_wrong_label(libs: Any, label: int) -> None:
    library = ggml.Library.open(libs)
    labels = draw(20, 7, 0.5)[1]
    labels[11] = label
    Optimizer(library, library.device("CPU"), 7, 20).step(labels)


@pytest.mark.parametrize("label", [-2, 7])
def test_a_label_that_is_no_class_is_refused_in_words(
    library: ggml.Library, capfd: pytest.CaptureFixture[str], label: int
) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_step_with_a_wrong_label, args=(library.directory, label)
    )
    process.start()
    process.join()
    assert process.exitcode
    assert f"label {label} of datapoint 11 is neither -1 nor one of 7 classes" in capfd.readouterr().err
