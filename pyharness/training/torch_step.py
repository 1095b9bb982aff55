"""Training steps of a Llama shape in PyTorch, the peer of `train --bench --peer torch`.

A process of its own, so that the device holds nothing else. It prints the events of flash-attn-train: `start`, `step`,
`memory`. The model is transformers', with SDPA, eager; it trains what llama.cpp trains, so neither token embeddings nor
an output matrix tied to them, in F32 weights with fused AdamW, one sequence a step. Needs torch and transformers.

    tf32   products of F32 in TF32, what ggml's cuBLAS computes in
    bf16   the same under autocast in BF16
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from pyharness.training import tiny

MODES = ("tf32", "bf16")
PACKAGES = ("torch", "transformers")


def steps(shape: tiny.Shape, words: int, ctx: int, mode: str, count: int) -> Iterator[dict[str, Any]]:
    """The events of a training of `count` steps."""
    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    torch.cuda.synchronize()
    before = least = torch.cuda.mem_get_info()[0]
    config = transformers.LlamaConfig(
        hidden_size=shape.embd,
        intermediate_size=shape.ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        vocab_size=words,
        max_position_embeddings=ctx,
        tie_word_embeddings=shape.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).cuda().train()
    model.get_input_embeddings().weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    tokens = torch.randint(0, words, (1, ctx), device="cuda")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    yield {"event": "start", **versions, "parameters": sum(p.numel() for p in trained)}
    for step in range(1, count + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=mode == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        yield {"event": "step", "step": step, "loss": float(loss), "seconds": time.perf_counter() - start}
        least = min(least, torch.cuda.mem_get_info()[0])
    yield {"event": "memory", "device": "CUDA0", "peak": before - least}


def main(argv: list[str] | None = None) -> int:
    """Print the events, one JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m pyharness.training.torch_step")
    parser.add_argument(
        "--shape", choices=[name for name, s in tiny.SHAPES.items() if s.arch == "llama"], required=True
    )
    parser.add_argument("--words", type=int, required=True)
    parser.add_argument("--ctx", type=int, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args(argv)
    try:
        for event in steps(tiny.SHAPES[args.shape], args.words, args.ctx, args.mode, args.steps):
            print(json.dumps(event), flush=True)
    except (ImportError, RuntimeError) as error:  # out of memory is a RuntimeError
        print(f"error: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
