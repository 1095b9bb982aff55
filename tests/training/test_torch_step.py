"""The peer of a training step, on stand-ins for PyTorch and transformers: what it prints, and how it is run."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import gguf
import numpy as np
import pytest

from pyharness.base import errors
from pyharness.training import torch_step, train

WORDS = ["--shape", "llama", "--words", "100", "--ctx", "64", "--steps", "3"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch and transformers that count; the device loses 5 bytes with each look at its memory."""
    free = iter(range(1000, 0, -5))
    torch, transformers = MagicMock(__version__="2.11.0"), MagicMock(__version__="5.0.0")
    torch.cuda.mem_get_info.side_effect = lambda: (next(free), 2000)
    frozen, tensor = (SimpleNamespace(requires_grad=grad, numel=lambda: 7) for grad in (False, True))
    model = transformers.LlamaForCausalLM.return_value.cuda.return_value.train.return_value
    model.parameters.return_value = [frozen, tensor, tensor]
    model.return_value.loss.__float__.return_value = 4.5
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    return SimpleNamespace(torch=torch, transformers=transformers, model=model)


@pytest.mark.parametrize("mode", torch_step.MODES)
def test_it_prints_the_events_of_a_training(
    modules: SimpleNamespace, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    assert torch_step.main([*WORDS, "--mode", mode]) == 0
    start, *steps, memory = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert start == {"event": "start", "torch": "2.11.0", "transformers": "5.0.0", "parameters": 14}
    assert [(e["event"], e["step"], e["loss"]) for e in steps] == [("step", i, 4.5) for i in (1, 2, 3)]
    assert memory == {"event": "memory", "device": "CUDA0", "peak": 15}
    assert modules.torch.autocast.call_args.kwargs == {"enabled": mode == "bf16"}
    modules.model.get_input_embeddings().weight.requires_grad_.assert_called_once_with(False)
    shape = modules.transformers.LlamaConfig.call_args.kwargs
    assert (shape["hidden_size"], shape["num_key_value_heads"], shape["vocab_size"]) == (256, 2, 100)


def test_what_does_not_fit_ends_it_with_a_message(modules: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    modules.model.side_effect = RuntimeError("CUDA out of memory. Tried to allocate\nmore")
    assert torch_step.main([*WORDS, "--mode", "tf32"]) == 2
    assert capsys.readouterr().err == "error: RuntimeError: CUDA out of memory. Tried to allocate\n"


def test_each_context_runs_in_each_mode_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((321, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    commands: list[list[str]] = []

    monkeypatch.setenv("PYTHONPATH", "/modules")

    def follow(command: list[str], _box: float, _say: Any, environment: dict[str, str]) -> train.Run:
        commands.append(command)
        assert environment["PYTHONPATH"].endswith(os.pathsep + "/modules")
        events: list[dict[str, Any]] = [{"event": "start", "torch": "2", "transformers": "5", "parameters": 1}]
        events += [{"event": "step", "loss": 5.0, "seconds": 0.25}, {"event": "memory", "peak": 3 << 20}]
        return train.Run(command, 0, events, "")

    monkeypatch.setattr(train, "follow", follow)
    found = train.torch_peers(Namespace(device="cuda", shape="llama"), file)
    assert [(p["ctx"], p["mode"]) for p in found] == [(c, m) for c in (512, 4096, 16384) for m in torch_step.MODES]
    assert found[0]["steps_ns"] == [250_000_000]
    assert found[0]["memory_bytes"] == {"peak": 3 << 20}
    assert " ".join(commands[0][1:]) == (
        "-m pyharness.training.torch_step --shape llama --words 321 --ctx 512 --mode tf32 --steps 28"
    )
    assert "512  PyTorch tf32" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_step, "PACKAGES", ("json", "no_such_package"))
    args = Namespace(ctx=256, peer="torch", bench=True, device="cuda", shape="llama", out=tmp_path)
    with pytest.raises(errors.Environment, match="--peer torch: no no_such_package"):
        train.run(args)


def test_a_peer_needs_a_benchmark_on_a_gpu(tmp_path: Path) -> None:
    args = Namespace(ctx=256, peer="torch", bench=True, device="cpu", shape="llama", out=tmp_path)
    with pytest.raises(errors.Usage, match="--peer torch: needs --bench --device cuda"):
        train.run(args)


def test_products_of_bf16_need_a_benchmark_on_a_gpu(tmp_path: Path) -> None:
    args = Namespace(ctx=256, peer=None, bf16=True, bench=False, device="cuda", shape="llama", out=tmp_path)
    with pytest.raises(errors.Usage, match="--bf16: needs --bench --device cuda"):
        train.run(args)
