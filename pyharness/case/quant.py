"""ggml's K/V types in numpy, through the gguf package: shares no code with the C side."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import quants
from numpy.typing import NDArray

from .cases import TYPES, block

# half-precision fields (scales and minima) of the types that gguf can read but not write, as byte offsets in a block
_HALVES = {
    "q2_K": (80, 82),
    "q3_K": (108,),
    "q4_K": (0, 2),
    "q5_K": (0, 2),
    "q6_K": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
    "iq1_s": (0,),
}

# and of those that it can write: a key that no row may see gets NaN there
_SCALES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
} | _HALVES


def quantize(values: NDArray[np.float32], type_name: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Bytes [..., row bytes] of values [..., D] in a ggml type.

    Types that the gguf package cannot write get random blocks of about unit variance instead.
    """
    kind = TYPES[type_name]
    if kind == gguf.GGMLQuantizationType.F32:
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.F16:
        return np.ascontiguousarray(values, np.float16).view(np.uint8)
    if type_name in _HALVES:
        return _random_rows(values.shape, type_name, rng)
    return np.asarray(quants.quantize(np.ascontiguousarray(values), kind), dtype=np.uint8)


def dequantize(data: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """Values [..., D] of bytes [..., row bytes], as ggml converts them."""
    kind = TYPES[type_name]
    if kind == gguf.GGMLQuantizationType.F32:
        return np.ascontiguousarray(data).view(np.float32)
    if kind == gguf.GGMLQuantizationType.F16:
        return np.ascontiguousarray(data).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(quants.dequantize(np.ascontiguousarray(data), kind), dtype=np.float32)


def _random_rows(shape: tuple[int, ...], type_name: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    elements, size = block(type_name)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), np.uint8)
    rows = blocks.reshape(*shape[:-1], -1)
    scales = rng.uniform(0.5, 1.5, blocks.shape[:-1])

    def write(factor: float) -> None:
        for offset in _HALVES[type_name]:
            blocks[..., offset : offset + 2] = (factor * scales).astype(np.float16)[..., None].view(np.uint8)

    write(1.0)
    if rows.size:
        write(1.0 / float(dequantize(rows, type_name).std()))
    return rows


def spoil(data: NDArray[np.uint8], type_name: str, rng: np.random.Generator) -> None:
    """Overwrite rows [n, row bytes] in place with what an unwritten cache cell may hold: NaN, Inf, or random bytes."""
    if type_name in ("f32", "f16", "bf16"):
        words = {"f32": (0x7FC00000, 0x7F800000), "f16": (0x7E00, 0x7C00), "bf16": (0x7FC0, 0x7F80)}[type_name]
        kind = np.uint32 if type_name == "f32" else np.uint16
        data[:] = rng.choice(np.array(words, kind), (data.shape[0], data.shape[1] // np.dtype(kind).itemsize)).view(
            np.uint8
        )
        return
    data[:] = rng.integers(0, 256, data.shape, np.uint8)
    blocks = data.reshape(data.shape[0], -1, block(type_name)[1])
    for offset in _SCALES.get(type_name, ()):
        blocks[..., offset : offset + 2] = np.array([0x7E00], np.uint16).view(np.uint8)
