"""Small models with random weights: the shapes of known ones, a real tokenizer, written as GGUF for llama.cpp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..base import errors


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a decoder looks like; sizes as in GGUF metadata. Weights are drawn for it by `write`."""

    arch: str = "llama"  # llama, qwen2, gemma2 or granite-swa
    layers: int = 2
    embd: int = 128
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    ff: int = 256
    context: int = 2048
    tied: bool = False  # the output matrix is the token embedding, which llama.cpp does not train
    words: int = (
        0  # entries of the (SPM) tokenizer, 0 = its own; fewer: the rest of a text becomes bytes; more: unused ones
    )

    @property
    def bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.arch == "qwen2"


SHAPES = {
    "llama": Shape(layers=4, embd=256, heads=8, kv_heads=2, ff=512),
    "tiny": Shape(embd=64, ff=128),
    "qwen2": Shape("qwen2", heads=14, kv_heads=2, embd=896, ff=1024),
    "gemma2": Shape("gemma2", heads=4, kv_heads=2, head=256, tied=True),
    "sinks": Shape("granite_swa"),
    "stories260k": Shape(layers=5, embd=64, heads=8, kv_heads=4, head=8, ff=172),
    "smollm2-135m": Shape(layers=30, embd=576, heads=9, kv_heads=3, ff=1536, tied=True),
    "smollm2-135m-152k": Shape(layers=30, embd=576, heads=9, kv_heads=3, ff=1536, tied=True, words=151936),
    "qwen2.5-0.5b": Shape("qwen2", layers=24, embd=896, heads=14, kv_heads=2, ff=4864, tied=True),
    "llama3.2-1b": Shape(layers=16, embd=2048, heads=32, kv_heads=8, ff=8192, tied=True),
    "tinyllama-1.1b": Shape(layers=22, embd=2048, heads=32, kv_heads=4, ff=5632),
    "llama-8b": Shape(layers=32, embd=4096, heads=32, kv_heads=8, head=128, ff=14336),
}
"""Known shapes. The first five are small; those of whole models are meant to be narrowed with dataclasses.replace."""


def write(file: Path, shape: Shape, vocabulary: Path, seed: int = 0, noise: float = 0) -> None:
    """Writes an F32 model with random weights and the tokenizer of `vocabulary`, a ggml-vocab-*.gguf of llama.cpp.
    Raises errors.Usage if that is none.

    `noise` changes every weight by a normal number times it, relative to the weight."""
    tokenizer = _tokenizer(vocabulary)
    words = shape.words or len(tokenizer["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(file, shape.arch)
    for name, value in _metadata(shape, words).items():
        _add(writer, name, value)
    for name, field in tokenizer.items():
        value = field.contents()
        if name in _OF_WORDS:
            value = value[:words] + [_OF_WORDS[name](i) for i in range(len(value), words)]
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    rng, change = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    for name, size in _tensors(shape, words).items():
        if name.endswith("norm.weight"):
            values = np.ones(size, np.float32)
        else:
            last = name.endswith(("attn_output.weight", "ffn_down.weight"))
            deviation = 0.02 / np.sqrt(2 * shape.layers) if last else 0.02
            values = rng.standard_normal(size, np.float32) * np.float32(deviation)
        if noise:
            values *= 1 + np.float32(noise) * change.standard_normal(size, np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_OF_WORDS: dict[str, Callable[[int], Any]] = {
    "tokenizer.ggml.tokens": lambda i: f"<unused {i}>",
    "tokenizer.ggml.scores": lambda _: 0.0,
    "tokenizer.ggml.token_type": lambda _: int(gguf.TokenType.UNUSED),
}
"""Lists with an entry for each word, and the entry of a word that the tokenizer lacks."""


def _tokenizer(vocabulary: Path) -> dict[str, gguf.ReaderField]:
    hint = "give a ggml-vocab-*.gguf of llama.cpp"
    try:
        reader = gguf.GGUFReader(vocabulary)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError) as error:
        raise errors.Usage(f"{vocabulary}: not a whole GGUF file: {error}", hint) from None
    found = {name: field for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in found:
        raise errors.Usage(f"{vocabulary}: no tokenizer in it", hint)
    return found


def _metadata(shape: Shape, words: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "vocab_size": words,
        "context_length": shape.context,
        "embedding_length": shape.embd,
        "block_count": shape.layers,
        "feed_forward_length": shape.ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head,
    }
    if shape.arch == "gemma2":
        values |= {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention.sliding_window": 128,
        }
    if shape.arch == "granite_swa":
        values |= {
            "logit_scale": 1.0,
            "attention.sliding_window": 128,
            "attention.sliding_window_pattern": [i % 2 == 0 for i in range(shape.layers)],
        }
    return {f"{shape.arch}.{name}": value for name, value in values.items()}


def _tensors(shape: Shape, words: int) -> dict[str, tuple[int, ...]]:
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (words, shape.embd),
        "output_norm.weight": (shape.embd,),
    }
    if not shape.tied:
        tensors["output.weight"] = (words, shape.embd)
    for i in range(shape.layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (shape.embd,),
            "attn_q.weight": (q, shape.embd),
            "attn_k.weight": (kv, shape.embd),
            "attn_v.weight": (kv, shape.embd),
            "attn_output.weight": (shape.embd, q),
            "ffn_norm.weight": (shape.embd,),
            "ffn_gate.weight": (shape.ff, shape.embd),
            "ffn_up.weight": (shape.ff, shape.embd),
            "ffn_down.weight": (shape.embd, shape.ff),
        }
        if shape.bias:
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if shape.arch == "gemma2":
            block |= {"post_attention_norm.weight": (shape.embd,), "post_ffw_norm.weight": (shape.embd,)}
        if shape.arch == "granite_swa":
            block |= {"attn_sinks.weight": (shape.heads,)}
        tensors |= {f"blk.{i}.{name}": size for name, size in block.items()}
    return tensors


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    else:
        writer.add_float32(name, value)
