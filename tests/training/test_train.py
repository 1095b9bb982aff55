"""Training in llama.cpp with flash attention on the CPU: what the patch promises, and reports of failed finetunes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from attention import attention

from pyharness.base import errors
from pyharness.case import capture_file, reference
from pyharness.check import oracle
from pyharness.cli import cli
from pyharness.device import ggml
from pyharness.patch import tree
from pyharness.receipts import statement, verify
from pyharness.receipts.losses import LIMITS, compare
from pyharness.training import tiny, train

pytestmark = pytest.mark.slow

Options = dict[str, Any]
NARROW: Options = {"embd": 64, "ff": 64}
WORDS = 2048


class Trainer:
    """The training program with models and a text of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = train.prepare("cpu")
        self.text = folder / "text.txt"
        self.text.write_text(train.corpus()[:20000], encoding="utf-8")

    def model(self, name: str, **changes: Any) -> Path:
        """A model of a known shape with some sizes changed."""
        shape = dataclasses.replace(tiny.SHAPES[name], words=WORDS, **changes)
        if shape.arch == "qwen2":  # q is as wide as the model
            shape = dataclasses.replace(shape, embd=shape.heads * shape.head)
        file = self.folder / f"{name}-{abs(hash(shape))}.gguf"
        if not file.exists():
            tiny.write(file, shape, train.vocabulary())
        return file

    def run(self, model: Path, **options: Any) -> train.Run:
        """A run that ends well."""
        return train.require(self.attempt(model, **options))

    def attempt(self, model: Path, **options: Any) -> train.Run:
        return train.execute(self.program, model, self.text, device="none", **options)

    def gradients(self, model: Path, **options: Any) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        file = self.folder / "gradients.gguf"
        self.run(model, grads=file, **({"steps": 1} | options))
        return train.tensors(file)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("train"))


def agree(trainer: Trainer, model: Path, **options: Any) -> train.Run:
    """Trains with flash attention off and on; the losses have to agree. Returns the run with it on."""
    off, on = (trainer.run(model, fa=fa, **options) for fa in ("off", "on"))
    assert (off.flash_attn, on.flash_attn) == (False, True)
    np.testing.assert_allclose(on.losses, off.losses, rtol=LIMITS["cpu"].loss)
    return on


@pytest.mark.parametrize(
    ("shape", "schedule", "fall"),
    [
        pytest.param({"name": "tiny", "ff": 128}, {}, 0.7, id="llama-full-rate"),
        pytest.param({"name": "tiny"}, train.SCHEDULE, 0.9, id="llama"),
        pytest.param({"name": "qwen2", "heads": 4}, train.SCHEDULE, 0.9, id="qwen2"),
        pytest.param(
            {"name": "gemma2"}, train.SCHEDULE, 0.99, id="gemma2"
        ),  # neither embeddings nor output are trained
        pytest.param({"name": "sinks"}, train.SCHEDULE, 0.9, id="sinks"),
    ],
)
def test_losses_agree_for_50_steps_and_fall(trainer: Trainer, shape: Options, schedule: Options, fall: float) -> None:
    model = trainer.model(**NARROW | shape)
    on = agree(trainer, model, steps=50, tokens=600, **schedule)  # the third window is padded
    assert np.mean(on.losses[-3:]) < fall * np.mean(on.losses[:3])


@pytest.mark.parametrize("name", ["tiny", "qwen2", "gemma2", "sinks", "stories260k"])
def test_gradients_of_every_parameter_agree(trainer: Trainer, name: str) -> None:
    files = {fa: trainer.folder / f"{fa}.gguf" for fa in ("on", "off")}
    for fa, file in files.items():
        trainer.run(trainer.model(name, **NARROW), steps=1, fa=fa, grads=file)
    found = train.gradient_errors(files["on"], files["off"])
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in found} >= {"attn_q", "attn_k", "attn_v", "ffn_up"}
    assert max(found.values()) < LIMITS["cpu"].gradient, found


@pytest.mark.parametrize(
    ("name", "part", "prompt"),
    [
        ("gemma2", "ffn_gate", 0),
        ("gemma2", "attn_k", 0),
        ("sinks", "attn_sinks", 0),
        ("tiny", "attn_q", 100),
        ("tiny", "output", 250),
    ],
)
def test_gradients_are_slopes_of_the_loss(trainer: Trainer, name: str, part: str, prompt: int) -> None:
    """Along its own gradient the loss has the gradient's length as its slope: checks GEGLU, TANH and sinks as well."""
    model = trainer.model(name, **NARROW)
    gradients = {n: g for n, g in trainer.gradients(model, fa="on", prompt=prompt).items() if part in n}
    length = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values()))
    step = 2e-4 / length  # far above the rounding of a loss of 8
    losses = []
    for sign in (1, -1):
        moved = trainer.folder / "moved.gguf"
        moved.write_bytes(model.read_bytes())
        for tensor in gguf.GGUFReader(moved, "r+").tensors:
            if tensor.name in gradients:
                tensor.data[:] += np.float32(sign * step / length) * gradients[tensor.name].reshape(tensor.data.shape)
        losses += trainer.run(moved, steps=1, fa="on", prompt=prompt).losses
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(length, rel=1e-2)


def test_a_window_without_labels_has_no_loss_and_no_gradient(trainer: Trainer) -> None:
    model = trainer.model("tiny")
    assert trainer.run(model, steps=2, fa="on", prompt=256).losses == [0, 0]
    assert not any(g.any() for g in trainer.gradients(model, fa="on", prompt=256).values())


def test_a_label_that_is_no_token_is_refused_before_the_first_step(trainer: Trainer) -> None:
    run = trainer.attempt(trainer.model("tiny"), steps=2, label=f"7:{WORDS}")
    assert f"label {WORDS} of token 7 of datapoint 0 is neither -1 nor one of {WORDS} tokens" in run.messages
    assert run.exit_code
    assert not run.losses


@pytest.mark.parametrize("fa", ["on", "off"])
def test_logits_in_chunks_give_the_same_losses_and_gradients(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, fa: str
) -> None:
    """512 rows of 2048 words are 4 MiB: four chunks, the first of which has no label."""
    model, options = trainer.model("tiny"), {"fa": fa, "ctx": 512, "prompt": 130}
    whole, gradients = trainer.run(model, steps=4, **options), trainer.gradients(model, **options)
    monkeypatch.setenv("GGML_OPT_LOGITS_MIB", "1")
    chunks, found = trainer.run(model, steps=4, nodes=True, **options), trainer.gradients(model, **options)
    (losses,) = (e["nodes"] for e in chunks.all("ops") if e["op"] == "CROSS_ENTROPY_LOSS")
    assert losses == 4
    np.testing.assert_allclose(chunks.losses, whole.losses, rtol=1e-6)
    assert max(train.nmse(found[name], gradients[name]) for name in gradients) < 1e-10
    assert trainer.run(model, steps=4, **options).losses == chunks.losses


SHARE = {"elementwise": 0.82, "layers": 0.3}
"""Of the compute buffers, what is left at most where eight narrow layers are formed again."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("tiny", {"fa": "on"}, id="llama"),
        pytest.param("tiny", {"fa": "off"}, id="flash-attention-off"),
        pytest.param("tiny", {"fa": "on", "ctx": 512, "ubatch": 256}, id="accumulated"),
        pytest.param("gemma2", {"fa": "on"}, id="gemma2"),
        pytest.param("sinks", {"fa": "on", "prompt": 100}, id="sinks"),
        pytest.param("qwen2", {"fa": "on", "optimizer": "sgd"}, id="qwen2"),
    ],
)
def test_results_formed_again_are_the_same_bits(trainer: Trainer, name: str, options: Options) -> None:
    """Losses of three steps, the second step's gradients, and the weights in the end."""
    changes = {"tiny": {"layers": 4}, "qwen2": {"heads": 4}}
    model = trainer.model(name, **NARROW | changes.get(name, {}))
    found = []
    for recompute in ("", *train.RECOMPUTE):
        grads, save = trainer.folder / "again.gguf", trainer.folder / "weights.gguf"
        run = trainer.run(
            model, steps=3, grads=grads, grads_step=2, save=save, nodes=True, recompute=recompute, **options
        )
        ops = {e["op"]: e["nodes"] for e in run.all("ops")}
        bits = {name: tensor.tobytes() for name, tensor in train.tensors(grads).items()}
        found.append((run.losses, bits, save.read_bytes()))
        assert found[-1] == found[0], recompute
        if not recompute:
            plain = ops
        assert (ops["MUL_MAT"] > plain["MUL_MAT"]) == (recompute == "layers")
        assert (ops["RMS_NORM"] > plain["RMS_NORM"]) == bool(recompute)


def test_results_formed_again_need_no_memory(trainer: Trainer) -> None:
    """The plan of a graph's memory: what each layer saves for the backward pass, in floats of a token, and no more."""
    layers, ctx, embd, ff, q, kv = 8, 1024, 64, 128, 4 * 64, 2 * 64
    model = trainer.model("tiny", layers=layers, embd=embd, ff=ff)
    compute = {
        recompute: trainer.run(model, steps=1, ctx=ctx, fa="on", recompute=recompute).memory("compute")
        for recompute in ("", *train.RECOMPUTE)
    }
    saved = 4 * ctx * layers * (6 * embd + 2 * q + 2 * kv + 3 * ff)
    logits = 4 * ctx * WORDS
    assert saved + logits < compute[""] < 1.05 * (saved + logits)
    assert all(compute[recompute] < share * compute[""] for recompute, share in SHARE.items()), compute


def test_what_cannot_be_formed_again_is_refused_in_words(trainer: Trainer) -> None:
    run = trainer.attempt(trainer.model("tiny"), steps=1, recompute="everything")
    assert "GGML_OPT_RECOMPUTE=everything: must be elementwise, layers or empty" in run.messages
    assert run.exit_code


def test_learning_rate_rises_in_the_first_steps(trainer: Trainer) -> None:
    model, fixed = trainer.model("tiny"), {"fa": "on", "tokens": 257}
    rising = trainer.run(model, steps=4, lr=2e-3, warmup=2, **fixed).losses
    assert rising[:2] == trainer.run(model, steps=2, lr=1e-3, **fixed).losses
    assert rising[2:] != trainer.run(model, steps=4, lr=1e-3, **fixed).losses[2:]


def test_sinks_are_trained_with_flash_attention(trainer: Trainer) -> None:
    gradients = trainer.gradients(trainer.model("sinks", **NARROW), fa="on")
    assert all(np.abs(g).max() > 0 for n, g in gradients.items() if n.endswith("attn_sinks.weight"))


def test_attention_runs_where_its_layer_lies(trainer: Trainer) -> None:
    run = trainer.run(trainer.model("tiny"), steps=1, fa="on", nodes=True)
    found = sorted((node["op"], node["layer"]) for node in run.all("node"))
    assert found == [("FLASH_ATTN_BACK", 0), ("FLASH_ATTN_BACK", 1), ("FLASH_ATTN_EXT", 0), ("FLASH_ATTN_EXT", 1)]
    assert not run.misplaced
    assert run.paths == "FLASH_ATTN_BACK cpu x2, FLASH_ATTN_EXT none x2"


def test_every_step_starts_from_zero_gradients(trainer: Trainer) -> None:
    still: Options = {"optimizer": "sgd", "lr": 1e-20, "tokens": 257}  # one window, weights that do not move
    first, third = (trainer.gradients(trainer.model("tiny"), steps=s, grads_step=s, **still) for s in (1, 3))
    for name, gradient in first.items():
        np.testing.assert_array_equal(third[name], gradient, err_msg=name)


def test_sequences_of_a_batch_do_not_see_each_other(trainer: Trainer) -> None:
    still: Options = {"optimizer": "sgd", "lr": 1e-20}
    model = trainer.model("tiny")
    both = agree(trainer, model, steps=1, ctx=512, seqs=2, **still)
    apart = trainer.run(model, steps=2, ctx=256, **still)
    assert both.losses[0] == pytest.approx(np.mean(apart.losses), rel=1e-6)


def test_sequences_need_a_unified_cache(trainer: Trainer) -> None:
    run = trainer.attempt(trainer.model("tiny"), steps=1, ctx=512, seqs=2, kv_unified=False)
    assert "training with several sequences needs a unified KV cache" in run.problem


def test_smaller_ubatch_trains_without_gradients_of_k_and_v_and_says_so(trainer: Trainer) -> None:
    run = agree(trainer, trainer.model("tiny"), steps=2, ctx=512, ubatch=128)
    assert not run.all("start")[0]["kv_gradients"]
    assert "the K and V projections will not receive gradients" in run.messages


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>
#include "ggml-backend.h"

bool ggml_backend_dev_supports_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    bool (*real)(ggml_backend_dev_t, const struct ggml_tensor *) = dlsym(RTLD_NEXT, "ggml_backend_dev_supports_op");
    return op->op != GGML_OP_FLASH_ATTN_BACK && real(dev, op);
}

static const char * refusal(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    return "no gradients on Sundays";
}

void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    void * (*real)(ggml_backend_reg_t, const char *) = dlsym(RTLD_NEXT, "ggml_backend_reg_get_proc_address");
    return strcmp(name, "ggml_backend_flash_attn_back_refusal") ? real(reg, name) : (void *) refusal;
}
"""


def test_flash_attention_goes_off_with_the_devices_reason(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    source, shim = trainer.folder / "shim.c", trainer.folder / "shim.so"
    source.write_text(SHIM)
    include = ggml.find_headers(trainer.program.parent)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-I{include}", source, "-o", shim], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    run = trainer.run(trainer.model("tiny"), steps=1, fa="on")
    assert not run.flash_attn
    assert "disabling flash attention: layer 0 on CPU: no gradients on Sundays" in run.messages


COUNT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include "ggml-opt.h"

void ggml_opt_prepare_alloc(ggml_opt_context_t opt_ctx, struct ggml_context * ctx, struct ggml_cgraph * gf,
        struct ggml_tensor * inputs, struct ggml_tensor * outputs) {
    void (*real)(ggml_opt_context_t, struct ggml_context *, struct ggml_cgraph *, struct ggml_tensor *,
        struct ggml_tensor *) = dlsym(RTLD_NEXT, "ggml_opt_prepare_alloc");
    fputs("a new graph\n", stderr);
    real(opt_ctx, ctx, gf, inputs, outputs);
}
"""


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        pytest.param({"ctx": 256}, 1, id="kept"),
        pytest.param({"ctx": 512, "seqs": 2}, 1, id="kept-of-two-sequences"),
        pytest.param({"ctx": 512, "ubatch": 256}, 8, id="accumulated"),
    ],
)
@pytest.mark.parametrize("fa", ["on", "off"])
def test_a_graph_serves_every_step_with_the_same_losses(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, options: Options, graphs: int, fa: str
) -> None:
    model, options = trainer.model("tiny"), {"fa": fa, "steps": 4, **options}
    monkeypatch.setenv("LLAMA_GRAPH_REUSE_DISABLE", "1")
    anew = trainer.run(model, **options)
    monkeypatch.delenv("LLAMA_GRAPH_REUSE_DISABLE")
    source, shim = trainer.folder / "count.c", trainer.folder / "count.so"
    source.write_text(COUNT)
    include = ggml.find_headers(trainer.program.parent)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-I{include}", source, "-o", shim], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    kept = trainer.run(model, **options)
    assert kept.messages.count("a new graph") == graphs
    assert kept.losses == anew.losses


@pytest.mark.parametrize("layer", [0, 1])
def test_captures_of_a_training_pass_the_oracle(
    trainer: Trainer, cpu: ggml.Device, library: ggml.Library, layer: int
) -> None:
    file = trainer.folder / "capture.gguf"
    trainer.run(trainer.model("tiny"), steps=3, fa="on", capture=file, capture_layer=layer, capture_step=3)
    given = capture_file.read(file).inputs
    assert (given.q.shape, given.type_K, given.type_V) == ((1, 4, 256, 64), "f32", "f32")
    result = oracle.check(library, cpu, given.case, 0)
    assert result.status == "ok", result.reason


@pytest.mark.xdist_group("stock")
def test_checkpoint_is_better_in_stock_llama(trainer: Trainer) -> None:
    model, tuned = trainer.model("tiny"), trainer.folder / "tuned.gguf"
    trainer.run(model, steps=6, fa="on", tokens=600, save=tuned)
    stock = train.prepare_stock()
    before, after = (
        train.require(train.execute(stock, m, trainer.text, perplexity=True, tokens=600)).perplexity
        for m in (model, tuned)
    )
    assert after < 0.9 * before


def demonstrate(trainer: Trainer, out: Path, *words: str) -> int:
    """Exit code of the demonstration with a tiny model."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    always = ["--shape", "tiny", "--tokens", "257", "--text", str(trainer.text)]
    return train.run(parser.parse_args([*always, "--out", str(out), "--receipts", str(out), *words]))


def test_demonstration_leaves_curves_and_a_receipt_that_verifies(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "prepare_stock", lambda: pytest.fail("built llama.cpp a second time"))
    assert demonstrate(trainer, tmp_path, "--steps", "8") == 0
    assert "8 steps with flash attention on: done in" in capsys.readouterr().err
    assert {file.suffix for file in tmp_path.glob("losses.*")} == {".png", ".svg"}
    (receipt,) = tmp_path.glob("*-train-*.json")
    assert verify.exit_code(verify.check(receipt)) == 0
    body = statement.read(receipt)["predicate"]["receipt"]
    found = body["train"]
    assert {name: len(run["losses"]) for name, run in found["runs"].items()} == {"off": 8, "on": 8, "control": 8}
    assert found["schedule"] == {"steps": 8, "ctx": 256, "tokens": 257, "lr": "0.0003", "warmup": 10}
    events = json.loads((tmp_path / "train.json").read_text())["runs"]["control"]
    control = [event["loss"] for event in events if event["event"] == "step"]
    assert [float(loss) for loss in found["runs"]["control"]["losses"]] == control
    assert body["counts"]["ok"] == len(body["train"]["checks"]) == 7


def test_demonstration_tells_a_training_that_parts_by_itself(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demonstrate(trainer, tmp_path, "--steps", "8", "--lr", "0.1", "--warmup", "0", "--no-receipt") == 1
    assert "FAILED  the same of two runs with it off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--ctx", "100"), errors.Usage.exit_code, "--ctx 100: must be a multiple of 256"),
        (("--libs", "."), errors.Environment.exit_code, f"cmake --build BUILD --target {train.PROGRAM}"),
        (("--vocabulary", "picture"), errors.Usage.exit_code, "picture: not a whole GGUF file"),
        (("--vocabulary", "cut"), errors.Usage.exit_code, "cut: not a whole GGUF file"),
        (("--vocabulary", "bare"), errors.Usage.exit_code, "bare: no tokenizer in it"),
    ],
)
def test_what_it_cannot_train_with_is_said_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    bare = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)
    for name, content in {"picture": b"\x89PNG\r\n\x1a\n", "cut": bare[:10], "bare": bare}.items():
        Path(name).write_bytes(content)
    Path("libs").mkdir()
    (Path("libs") / train.PROGRAM).touch()
    assert cli.main(["train", "--no-receipt", "--out", "out", "--libs", "libs", *words]) == code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_loss_that_is_no_number_is_read_and_passes_no_check(tmp_path: Path) -> None:
    program = tmp_path / "program"
    steps = "\n".join(f'{{"event": "step", "loss": {loss}, "seconds": 0.1}}' for loss in ("2", "-nan", "inf", "1"))
    program.write_text(f"#!/bin/sh\ncat <<END\n{steps}\nEND\n")
    program.chmod(0o755)
    losses = train.execute(program, tmp_path, tmp_path).losses
    np.testing.assert_equal(losses, [2, np.nan, np.inf, 1])
    good = [2.0, 1.5, 1.5, 1.0]
    for runs in ({"on": losses, "control": good}, {"on": good, "control": losses}):
        checks = compare({"off": good, **runs}, {"a": 1e-9, "b": float("nan")}, 1e-6, LIMITS["cpu"])
        differ, control, falls, gradients = (check.passed for check in checks)
        assert (differ, control) == (runs["on"] is good, runs["control"] is good)
        assert falls
        assert not gradients


# ---- public reports ----


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"name": "qwen2.5-0.5b", "layers": 3}, id="u01-qwen2.5-0.5b"),
        pytest.param({"name": "llama3.2-1b", "layers": 3}, id="u01-llama-3.2-1b"),
        pytest.param({"name": "tinyllama-1.1b", "layers": 3}, id="u02-tinyllama"),
        pytest.param({"name": "smollm2-135m"}, id="u01-u03-smollm2-135m"),
        pytest.param({"name": "llama-8b", "layers": 2}, id="u05-llama-8b"),
        pytest.param({"name": "stories260k"}, id="u06-stories260k"),
    ],
)
def test_reported_model_trains(trainer: Trainer, shape: Options) -> None:
    agree(trainer, trainer.model(**(NARROW | shape)), steps=2)


def test_u03_graph_of_many_layers_fits_with_a_small_ubatch(trainer: Trainer) -> None:
    agree(trainer, trainer.model("smollm2-135m", **NARROW), steps=1, ctx=512, ubatch=256)


def test_u04_ubatch_of_4_trains(trainer: Trainer) -> None:
    run = agree(trainer, trainer.model("tiny"), steps=1, ubatch=4)
    assert "n_ubatch (4) != n_ctx (256)" in run.messages


@pytest.mark.parametrize("types", [("q5_1", "q5_1"), ("q8_0", "q4_0"), ("f16", "f32")])
def test_u14_cache_types_do_not_move_attention_to_another_device(trainer: Trainer, types: tuple[str, str]) -> None:
    run = trainer.run(
        trainer.model("tiny"), steps=1, ctx=512, ubatch=256, fa="on", type_k=types[0], type_v=types[1], nodes=True
    )
    assert run.flash_attn
    assert run.all("node")
    assert not run.misplaced


def test_u14_quantized_v_without_flash_attention_is_refused_in_words(trainer: Trainer) -> None:
    run = trainer.attempt(trainer.model("tiny"), steps=1, ctx=512, ubatch=256, fa="off", type_v="q8_0")
    assert "V cache" in run.problem + run.messages
    assert run.exit_code


def test_u12_adapters_around_q_k_v_get_the_gradients_of_one_backward_node(
    library: ggml.Library, cpu: ggml.Device
) -> None:
    """Rank-4 matrices are the only parameters; K and V are cast to F16 before the attention."""
    embd, rank, h, hkv, n, d = 24, 4, 4, 2, 16, 8
    c, ffi = library.c, library.ffi
    ctx = c.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    tensors: dict[str, Any] = {}

    def leaf(name: str, *shape: int) -> Any:
        arrays[name] = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        tensors[name] = c.ggml_new_tensor_4d(ctx, c.GGML_TYPE_F32, *[*shape[::-1], 1, 1, 1][:4])
        return tensors[name]

    x, heads = leaf("x", n, embd), {"q": h, "k": hkv, "v": hkv}
    source = {}
    for name, count in heads.items():
        a, b = leaf(f"a{name}", rank, embd), leaf(f"b{name}", count * d, rank)
        c.ggml_set_param(a)
        c.ggml_set_param(b)
        frozen = c.ggml_mul_mat(ctx, leaf(f"w{name}", count * d, embd), x)
        y = c.ggml_add(ctx, frozen, c.ggml_mul_mat(ctx, b, c.ggml_mul_mat(ctx, a, x)))
        y = c.ggml_permute(ctx, c.ggml_reshape_4d(ctx, y, d, count, n, 1), 0, 2, 1, 3)
        source[name] = y if name == "q" else c.ggml_cast(ctx, y, c.GGML_TYPE_F16)
    o = c.ggml_flash_attn_ext(ctx, *source.values(), ffi.NULL, d**-0.5, 0.0, 0.0)
    loss = c.ggml_sum(ctx, c.ggml_mul(ctx, o, leaf("do", 1, n, h, d)))
    c.ggml_set_loss(loss)
    graph = c.ggml_new_graph_custom(ctx, 512, True)
    c.ggml_build_forward_expand(graph, loss)
    c.ggml_build_backward_expand(ctx, graph, ffi.NULL)
    nodes = [c.ggml_graph_node(graph, i) for i in range(c.ggml_graph_n_nodes(graph))]
    assert sum(node.op == c.GGML_OP_FLASH_ATTN_BACK for node in nodes) == 1
    backend = library.backend(cpu)
    buffer = c.ggml_backend_alloc_ctx_tensors(ctx, backend)
    for name, tensor in tensors.items():
        library.upload(tensor, arrays[name])
    c.ggml_graph_reset(graph)
    assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
    got = {
        name: library.download(c.ggml_graph_get_grad(graph, tensors[name]), np.float32).reshape(arrays[name].shape)
        for name in arrays
        if name[0] in "ab"
    }
    c.ggml_backend_buffer_free(buffer)
    c.ggml_backend_free(backend)
    c.ggml_free(ctx)

    made = {
        name: (arrays["x"] @ (arrays[f"w{name}"] + arrays[f"b{name}"] @ arrays[f"a{name}"]).T)
        .reshape(1, n, count, d)
        .transpose(0, 2, 1, 3)
        for name, count in heads.items()
    }
    k, v = (made[name].astype(np.float16) for name in "kv")
    given = attention(made["q"], k, v, arrays["do"].transpose(0, 2, 1, 3), scale=d**-0.5)
    parts = reference.backward(given)
    for name in heads:
        dy = parts[f"d{name}"].transpose(0, 2, 1, 3).reshape(n, -1)
        assert train.nmse(got[f"b{name}"], dy.T @ arrays["x"] @ arrays[f"a{name}"].T) < 1e-6
        assert train.nmse(got[f"a{name}"], arrays[f"b{name}"].T @ dy.T @ arrays["x"]) < 1e-6


# ---- the patch ----


def test_hooks_of_llama_lie_outside_ggml(tmp_path: Path) -> None:
    for file in ("include/ggml.h", "src/ggml.c"):
        (tmp_path / "ggml" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ggml" / file).touch()
    assert tree.place(tmp_path, "src/llama-context.cpp") == tmp_path / "src/llama-context.cpp"
    assert tree.place(tmp_path, "src/ggml.c") == tmp_path / "ggml/src/ggml.c"
