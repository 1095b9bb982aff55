"""A stand-in for the little of PyTorch that peers use, on numpy arrays: what is called with what, not how fast."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

TYPES = {"float16": np.float16, "bfloat16": np.float32, "float32": np.float32, "uint8": np.uint8}


class Tensor:
    def __init__(self, array: Any, dtype: str, of: Any = None) -> None:
        self.array, self.dtype, self.of = array, f"torch.{dtype}", of
        self.requires_grad = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def to(self, _place: str, dtype: str) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array.astype(TYPES[dtype])), dtype)

    def requires_grad_(self, wanted: bool) -> Tensor:
        self.requires_grad = wanted
        return self

    def transpose(self, a: int, b: int) -> Tensor:
        return Tensor(np.swapaxes(self.array, a, b), self.dtype[6:])

    def repeat_interleave(self, times: int, axis: int) -> Tensor:
        return Tensor(np.repeat(self.array, times, axis), self.dtype[6:], of=(self, times))

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def float(self) -> Tensor:
        return Tensor(self.array.astype(np.float32), "float32")

    def numpy(self) -> Any:
        return self.array

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def zero_(self) -> None:
        self.array[...] = 0


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, _last: Event) -> float:
        return 1.5


def modules(calls: list[str], capability: tuple[int, int] = (9, 0), grouped: bool = True) -> dict[str, Any]:
    """sys.modules entries; `calls` hears of kernels, passes and spins. `grouped`: whether SDPA takes grouped heads."""

    @contextlib.contextmanager
    def sdpa_kernel(kernels: list[str]) -> Iterator[None]:
        calls.append(f"kernel {' '.join(kernels)}")
        yield

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Tensor:
        if options["enable_gqa"] and not grouped:
            raise RuntimeError("no grouped heads\nand more")
        calls.append("forward")
        group = q.shape[1] // k.shape[1]
        keys, values = (np.repeat(x.array.astype(np.float64), group, 1) for x in (k, v))
        scores = options["scale"] * q.array.astype(np.float64) @ np.swapaxes(keys, 2, 3)
        n, m = scores.shape[2:]
        mask = options.get("attn_mask")
        if options.get("is_causal") or isinstance(mask, tuple):
            assert options.get("is_causal") is None or n == m
            scores += np.where(np.arange(m) > np.arange(n)[:, None] + m - n, -np.inf, 0)
        elif mask is not None:
            scores += mask.array
        p = np.exp(scores - scores.max(axis=3, keepdims=True))
        p /= p.sum(axis=3, keepdims=True)
        return Tensor(p @ values, q.dtype[6:], of=(p, q, k, v, keys, values, options["scale"]))

    def grad(out: Tensor, leaves: Any, d: Tensor, retain_graph: bool) -> tuple[Tensor, ...]:
        assert retain_graph
        assert all(x.requires_grad for x in leaves)
        calls.append("backward")
        p, q, _, _, keys, values, scale = out.of
        heads = leaves[1].shape[1]
        dp = d.array @ np.swapaxes(values, 2, 3)
        ds = scale * p * (dp - (p * dp).sum(axis=3, keepdims=True))

        def summed(x: Any) -> Tensor:
            return Tensor(x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(axis=2), "float32")

        dk, dv = np.swapaxes(ds, 2, 3) @ q.array, np.swapaxes(p, 2, 3) @ d.array
        return Tensor(ds @ keys, "float32"), summed(dk), summed(dv)

    def empty(shape: Any, dtype: str, device: str) -> Tensor:
        assert device.startswith("cuda:")
        return Tensor(np.zeros(shape, TYPES[dtype]), dtype)

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        set_device=lambda _: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
        _sleep=lambda cycles: calls.append(f"spin {cycles}"),
        Event=Event,
        current_stream=lambda: types.SimpleNamespace(cuda_stream=4711),
        get_device_capability=lambda _: capability,
    )
    torch: Any = types.ModuleType("torch")
    torch.__dict__.update(
        {name: name for name in TYPES},
        __version__="0",
        cuda=cuda,
        autograd=types.SimpleNamespace(grad=grad),
        empty=empty,
        empty_like=lambda x: Tensor(np.zeros_like(x.array), x.dtype[6:]),
        from_numpy=lambda x: Tensor(x, str(x.dtype)),
        nn=types.SimpleNamespace(functional=types.SimpleNamespace(scaled_dot_product_attention=attention)),
    )
    chooser: Any = types.ModuleType("torch.nn.attention")
    kernels = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    chooser.SDPBackend, chooser.sdpa_kernel = types.SimpleNamespace(**{k: k for k in kernels}), sdpa_kernel
    bias: Any = types.ModuleType("torch.nn.attention.bias")
    bias.causal_lower_right = lambda n, m: (n, m)
    return {
        "torch": torch,
        "torch.nn": types.ModuleType("torch.nn"),
        "torch.nn.attention": chooser,
        "torch.nn.attention.bias": bias,
    }
