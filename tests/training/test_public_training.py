"""Reports of failed finetunes, tried on a GPU with models of the reported shapes; test_train.py tries them on the CPU.

`--device CUDA0 --libs DIR` with the training program in DIR, and `--vocabulary FILE` where there is no upstream tree.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyharness.base import digest, errors
from pyharness.device import ggml
from pyharness.receipts import losses
from pyharness.training import tiny, train

NARROW = {"embd": 64, "ff": 64}
LOSS = losses.LIMITS["cuda"].loss


class Trainer:
    """The training program on the device, with models and a text of its own."""

    def __init__(self, folder: Path, libs: Path, device: str, vocabulary: Path) -> None:
        self.folder, self.program, self.device, self.vocabulary = folder, libs / train.PROGRAM, device, vocabulary
        self.text = folder / "text.txt"
        pages = sorted((digest.ROOT / "docs").glob("*.md"))
        self.text.write_text("".join(page.read_text(encoding="utf-8") for page in pages)[:20000], encoding="utf-8")

    def run(self, name: str, shape: dict[str, Any], **options: Any) -> train.Run:
        """A run of a narrow model of a known shape that ends well."""
        made = dataclasses.replace(tiny.SHAPES[name], words=2048, **NARROW | shape)
        if made.arch == "qwen2":  # q is as wide as the model
            made = dataclasses.replace(made, embd=made.heads * made.head)
        model = self.folder / f"{name}.gguf"
        if not model.exists():
            tiny.write(model, made, self.vocabulary)
        return train.require(train.execute(self.program, model, self.text, 120, device=self.device, **options))

    def agree(self, name: str, shape: dict[str, Any], **options: Any) -> train.Run:
        """The run with flash attention on, whose losses have to agree with one with it off."""
        off, on = (self.run(name, shape, fa=fa, **options) for fa in ("off", "on"))
        assert (off.flash_attn, on.flash_attn) == (False, True)
        np.testing.assert_allclose(on.losses, off.losses, rtol=LOSS)
        return on


@pytest.fixture(scope="module")
def trainer(request: pytest.FixtureRequest, library: ggml.Library, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    device = request.config.getoption("--device")
    if device.upper() == "CPU":
        pytest.skip("test_train.py tries these on the CPU")
    if not (library.directory / train.PROGRAM).exists():
        raise errors.Environment(f"no {train.PROGRAM} in {library.directory}")
    vocabulary = request.config.getoption("--vocabulary") or train.vocabulary()
    return Trainer(tmp_path_factory.mktemp("train"), library.directory, device, vocabulary)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        pytest.param("qwen2.5-0.5b", {"layers": 3}, {}, id="u01-qwen2.5-0.5b"),
        pytest.param("llama3.2-1b", {"layers": 3}, {}, id="u01-llama-3.2-1b"),
        pytest.param("tinyllama-1.1b", {"layers": 3}, {}, id="u02-tinyllama"),
        pytest.param("smollm2-135m", {}, {}, id="u01-u03-smollm2-135m"),
        pytest.param("smollm2-135m", {}, {"ctx": 512, "ubatch": 256}, id="u03-small-ubatch"),
        pytest.param("llama-8b", {"layers": 2}, {}, id="u05-llama-8b"),
    ],
)
def test_reported_model_trains(trainer: Trainer, name: str, shape: dict[str, Any], options: dict[str, Any]) -> None:
    trainer.agree(name, shape, steps=2, **options)


def test_u04_ubatch_of_4_trains_and_says_what_does_not(trainer: Trainer) -> None:
    run = trainer.agree("tiny", {}, steps=1, ubatch=4)
    assert "n_ubatch (4) != n_ctx (256)" in run.messages
    assert "the K and V projections will not receive gradients" in run.messages


def test_u06_loss_falls_for_10_steps(trainer: Trainer) -> None:
    run = trainer.run("stories260k", {}, steps=10, tokens=257, fa="on")
    assert not run.flash_attn  # CUDA's forward takes no head size of 8
    assert f"disabling flash attention: layer 0 on {trainer.device}" in run.messages
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("types", [("q5_1", "q5_1"), ("q8_0", "q4_0"), ("f16", "f32")])
def test_u14_cache_types_do_not_move_attention_to_the_cpu(trainer: Trainer, types: tuple[str, str]) -> None:
    options = {"steps": 1, "ctx": 512, "ubatch": 256, "fa": "on", "nodes": True}
    run = trainer.run("tiny", {}, type_k=types[0], type_v=types[1], **options)
    assert run.flash_attn
    assert {node["backend"] for node in run.all("node")} == {trainer.device}
    assert not run.misplaced
