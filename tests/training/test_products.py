"""Products of BF16 with F32 sums, which GGML_CUDA_CUBLAS_COMPUTE_TYPE=bf16 asks for; the CPU does not know of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pyharness.device import ggml
from pyharness.training import train

Floats = npt.NDArray[np.float32]


def bf16(x: Floats) -> Floats:
    """Rounded to the nearest, half to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def out_prod(library: ggml.Library, device: ggml.Device, a: Floats, b: Floats, transposed: bool) -> Floats:
    """sum over k of a[k, m] b[k, n] as [n, m]; `transposed`: b lies as [n, k]."""
    c, ffi = library.c, library.ffi
    (k, m), (_, n) = a.shape, b.shape
    ctx = c.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True})
    left = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, m, k, 1, 1)
    right = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, *((k, n) if transposed else (n, k)), 1, 1)
    result = c.ggml_out_prod(ctx, left, c.ggml_transpose(ctx, right) if transposed else right)
    graph = c.ggml_new_graph_custom(ctx, 8, False)
    c.ggml_build_forward_expand(graph, result)
    backend = library.backend(device, 2)
    buffer = c.ggml_backend_alloc_ctx_tensors(ctx, backend)
    library.upload(left, a)
    library.upload(right, np.ascontiguousarray(b.T) if transposed else b)
    assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
    found = library.download(result, np.float32).reshape(n, m)
    c.ggml_backend_buffer_free(buffer)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 96, 128), (33, 7, 131), (1, 5, 3), (256, 40, 4096)])
def test_a_product_is_of_rounded_operands_and_exact_sums(
    library: ggml.Library,
    device: ggml.Device,
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    transposed: bool,
) -> None:
    rng = np.random.default_rng(m)
    a, b = (rng.standard_normal((k, size), np.float32) for size in (m, n))
    rounded = bf16(b).T.astype(np.float64) @ bf16(a)
    for name, value in train.BF16.items():
        monkeypatch.setenv(name, value)
    found = out_prod(library, device, a, b, transposed)
    exact = b.T.astype(np.float64) @ a
    assert train.nmse(found, rounded if device.name.startswith("CUDA") else exact) < 1e-10
    assert train.nmse(rounded, exact) > 1e-7  # so that the one is not the other
