"""Run a model of the transformers package on a text and store what one of its attentions read.

The model computes with its own attention; `Recorder` keeps q, k, v, mask, sinks and the gradient that reaches the
attention's output. Stored beside them: the output in float64 of the stored (perhaps rounded) tensors, and gradients of
the same attention by torch's float64 autograd, as a second opinion.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

from ..base import build, errors
from . import capture_file, cases, reference
from .capture_file import Capture
from .cases import Case
from .operands import Inputs

Array = npt.NDArray[Any]

# types that the gguf package can write
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
# NMSE of a model's own F32 attention against float64: far above its rounding, far below another formula
SAME_ATTENTION = 1e-8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `capture`."""
    add = parser.add_argument
    add("out", help="NAME (tests/data/NAME.gguf) or a .gguf file")
    add("--model", required=True, help="folder, .gguf file, package:PATH (inside a Python package), or a hub id")
    add("--text", required=True, type=Path, metavar="FILE", help="the text; paragraphs are the sequences of pairs")
    add(
        "--loss",
        choices=tuple(_LOSSES),
        default="lm",
        help="lm: next-token cross-entropy; pairs: embedding of paragraph 2i against those of 2i+1 and all others",
    )
    add("--layer", type=int, default=0, metavar="N", help="which attention, in the order they run; -1 is the last")
    add("--tokens", type=int, metavar="N", help="cut sequences after N tokens, 0 = none (default)")
    add("--rows", type=int, metavar="N", help="keep the last N queries (of every key), 0 = all (default)")
    add("--kv-heads", metavar="LIST", help="keep these KV heads (as 0,2) and their query heads")
    for part in "kv":
        types = f"type that {part} is stored in: {', '.join(TYPES)} (default: f32)"
        add(f"--type-{part}", choices=TYPES, default="f32", metavar="TYPE", help=types)
    add("--licence", default="", help="licence of model and text, stored as a note")
    add("--force", action="store_true", help="replace the file if it exists")


def run(args: argparse.Namespace) -> int:
    """Captures; 0 when the file is written.

    Raises errors.Usage, errors.Environment (no torch, no model), errors.Failure when the attention is another formula.
    """
    out = capture_file.path(args.out)
    if out.suffix != ".gguf":
        raise errors.Usage(f"{out}: a capture is written as GGUF", "end its name in .gguf")
    if out.exists() and not args.force:
        raise errors.Usage(f"{out} exists", "give another name, or --force")
    if not out.parent.is_dir():
        raise errors.Usage(f"{out}: there is no folder {out.parent}", "make it, or name another")
    kv_heads = _numbers(args.kv_heads) if args.kv_heads else None
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise errors.Usage(f"--text {args.text}: {why}") from None

    model, tokenizer = _load(args.model, args.loss)
    recorder = Recorder()
    model.set_attn_implementation(recorder.name)
    _LOSSES[args.loss](model, tokenizer, text, args.tokens).backward()
    capture = recorder.capture(args.layer, args.rows, kv_heads, args.type_k, args.type_v)
    notes = {
        "source": f"pyharness capture with torch {_version('torch')}, transformers {_version('transformers')}",
        "model": args.model,
        "layer": str(args.layer % len(recorder)),
        "kv_heads": args.kv_heads or "all",
        "text": args.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "loss": args.loss,
        "licence": args.licence,
    }
    capture = dataclasses.replace(capture, notes={name: note for name, note in notes.items() if note})
    capture_file.write(out, capture)
    (sequences, heads, kept, queries, keys), size = capture.inputs.sizes, out.stat().st_size
    print(f"{out}: {size} bytes, S={sequences} H={heads} Hkv={kept} N={queries} M={keys} D={capture.inputs.q.shape[3]}")
    return 0


class Recorder:
    """Keeps what every attention of a transformers model reads and, after backward(), the gradient of what it gave.

    For a model of one's own: `model.set_attn_implementation(recorder.name)`, one forward and backward, `capture()`.
    Its own eager attention computes, which has to go through transformers' attention interface.
    """

    name = "attention_recorder"

    def __init__(self) -> None:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        self._calls: list[dict[str, Any]] = []
        transformers.AttentionInterface.register(self.name, self._attention)
        AttentionMaskInterface.register(self.name, eager_mask)

    def __len__(self) -> int:
        return len(self._calls)

    def _attention(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[Any, Any]:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        output, weights = eager(module, q, k, v, mask, **options)
        output.retain_grad()
        self._calls.append({"q": q, "k": k, "v": v, "mask": mask, "output": output, "options": options})
        return output, weights

    def capture(
        self,
        layer: int,
        rows: int | None = None,
        kv_heads: Sequence[int] | None = None,
        type_k: str = "f32",
        type_v: str = "f32",
    ) -> Capture:
        """One attention of the last forward and backward as a capture, its gradients by torch's float64 autograd.

        rows keeps the last queries, kv_heads some KV heads with their query heads; K and V are stored as ggml types.
        Raises errors.Usage for what the model does not have, errors.Failure when its attention is another formula.
        """
        if not -len(self) <= layer < len(self):
            raise errors.Usage(f"--layer {layer}: the model ran {len(self)} attentions through transformers")
        call = self._calls[layer]
        if call["output"].grad is None:
            raise errors.Failure("no gradient reached the attention's output", "run backward() on a loss that needs it")
        q, k, v, o, d = (_numpy(x) for x in (call["q"], call["k"], call["v"], call["output"], call["output"].grad))
        options, mask, sinks = call["options"], call["mask"], call["options"].get("s_aux")
        if mask is not None:
            lowest = np.finfo(_numpy(mask).dtype).min
            mask = np.where(_numpy(mask) <= lowest, -np.inf, _numpy(mask)).astype(np.float16)[..., : k.shape[2]]
        if sinks is not None:
            sinks = _numpy(sinks).reshape(-1)

        group = q.shape[1] // k.shape[1]
        kept = list(range(k.shape[1])) if kv_heads is None else list(kv_heads)
        if not set(kept) <= set(range(k.shape[1])):
            raise errors.Usage(f"--kv-heads {kept}: the model has KV heads 0 to {k.shape[1] - 1}")
        heads = [g * group + i for g in kept for i in range(group)]
        tail = slice(-min(rows or q.shape[2], q.shape[2]), None)
        q, k, v, o, d = q[:, heads, tail], k[:, kept], v[:, kept], o[:, tail, heads], d[:, tail, heads]
        if mask is not None:
            mask = mask[:, heads if mask.shape[1] > 1 else slice(None), tail]
        exact = Inputs(
            case=Case(capture="-"), q=q, k=_bytes(k, "f32"), v=_bytes(v, "f32"), mask=mask,
            sinks=None if sinks is None else sinks[heads], o=None, d=d, type_K="f32", type_V="f32",
            scale=float(np.float32(options.get("scaling") or q.shape[3] ** -0.5)), max_bias=0.0,
            softcap=float(np.float32(options.get("softcap") or 0)),
            grads=("dq", "dk", "dv") + ("dsinks",) * (sinks is not None), kv_first=0, kv_count=k.shape[2],
        )  # fmt: skip
        error = float(np.square(reference.forward(exact) - o).sum() / np.square(o.astype(np.float64)).sum())
        if error > SAME_ATTENTION:
            raise errors.Failure(
                f"the model's attention is not FLASH_ATTN_EXT's: its output is off by NMSE {error:.1e}, "
                f"limit {SAME_ATTENTION}",
                "a bias, a window or a fully masked row that the model treats in its own way; pad on the right",
            )
        stored = dataclasses.replace(exact, k=_bytes(k, type_k), v=_bytes(v, type_v), type_K=type_k, type_V=type_v)
        stored.o = reference.forward(stored).astype(np.float32)
        return Capture(stored, _autograd(stored))


def _autograd(inputs: Inputs) -> dict[str, Array]:
    """The gradients by torch's autograd in float64, as float32."""
    import torch

    def leaf(array: Array) -> Any:
        return torch.tensor(array, dtype=torch.float64, requires_grad=True)

    leaves = {"dq": leaf(inputs.q), "dk": leaf(inputs.k_f32()), "dv": leaf(inputs.v_f32())}
    sequences, heads, kv_heads, queries, keys = inputs.sizes
    k, v = (leaves[name].repeat_interleave(heads // kv_heads, 1) for name in ("dk", "dv"))
    scores = inputs.scale * leaves["dq"] @ k.mT
    if inputs.softcap:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.mask is not None:
        scores = scores + torch.tensor(inputs.mask, dtype=torch.float64)
    if inputs.sinks is not None:
        leaves["dsinks"] = leaf(inputs.sinks)
        sinks = leaves["dsinks"].view(1, heads, 1, 1).expand(sequences, heads, queries, 1)
        scores = torch.cat([scores, sinks], -1)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)[..., :keys]
    output = (weights @ v).transpose(1, 2)
    gradients = torch.autograd.grad(output, list(leaves.values()), torch.tensor(inputs.d, dtype=torch.float64))
    return {name: gradient.numpy().astype(np.float32) for name, gradient in zip(leaves, gradients, strict=True)}


def _load(name: str, loss: str) -> tuple[Any, Any]:
    """A model with F32 weights and its tokenizer."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise errors.Environment(f"capture needs {error.name}", build.pip("capture")) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    location = name
    if name.startswith("package:"):
        package, _, inside = name.removeprefix("package:").partition("/")
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # of the folder that a dotted name begins with; of no name
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise errors.Environment(f"--model {name}: no Python package {package}", "install it")
        location = str(Path(spec.submodule_search_locations[0], inside))
    options: dict[str, Any] = {}
    if location.endswith(".gguf"):
        file = Path(location)
        location, options = str(file.parent), {"gguf_file": file.name}
    auto = transformers.AutoModelForCausalLM if loss == "lm" else transformers.AutoModel
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(location, **options)
        model = auto.from_pretrained(location, dtype=torch.float32, **options)
    except Exception as error:  # of one of the many kinds that its readers raise
        raise errors.Environment(f"--model {name}: {error}", "give a folder or file that transformers loads") from None
    return model.eval(), tokenizer


def _lm(model: Any, tokenizer: Any, text: str, tokens: int | None) -> Any:
    """Mean next-token cross-entropy of the text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : tokens or None]
    if ids.shape[1] < 2:
        raise errors.Usage(
            f"--loss lm: the text has {ids.shape[1]} tokens", "it needs 2, one to predict the other from"
        )
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _pairs(model: Any, tokenizer: Any, text: str, tokens: int | None) -> Any:
    """Loss of sentence embedding: the mean-pooled paragraphs 2i and 2i+1 belong together, all others do not.

    Cosines times 20 in a cross-entropy, as sentence-transformers' MultipleNegativesRankingLoss.
    """
    import torch

    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) < 4 or len(paragraphs) % 2:
        raise errors.Usage(
            f"--loss pairs: the text has {len(paragraphs)} paragraphs", "write an even number, at least 4"
        )
    batch = tokenizer(paragraphs, return_tensors="pt", padding=True, truncation=bool(tokens), max_length=tokens or None)
    states = model(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None].to(states.dtype)
    embeddings = torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)
    scores = 20 * embeddings[0::2] @ embeddings[1::2].T
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


_LOSSES: dict[str, Callable[[Any, Any, str, int | None], Any]] = {"lm": _lm, "pairs": _pairs}


def _numpy(tensor: Any) -> Array:
    array: Array = tensor.detach().float().cpu().numpy()
    return array


def _bytes(values: Array, type_name: str) -> Array:
    return quants.quantize(np.ascontiguousarray(values), cases.TYPES[type_name]).view(np.uint8)


def _numbers(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise errors.Usage(f"--kv-heads {text}: not a list of numbers", "write as 0,2") from None


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", "unknown"))
