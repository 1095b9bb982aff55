"""A checkout with receipts of real runs in it, for the receipt tests to copy, change and verify."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pyharness.base.digest import ROOT
from pyharness.device import ggml
from pyharness.receipts import losses, statement
from pyharness.training import torch_step, train

CASES = (
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=40,nb=8)",
    "FLASH_ATTN_BACK(hsk=32,hsv=32,nh=4,nhkv=4,kv=50,nb=9,type_K=q8_0,type_V=q8_0,mask=swa:7,sinks=1)",
    "FLASH_ATTN_BACK(capture=minilm-l0)",
)
KERNEL = "ggml/src/ggml-cpu/flash-attn-back.cpp"


@dataclass
class World:
    """A checkout in git with an oracle and a perf receipt, both written in it by the command line."""

    root: Path
    oracle: Path
    perf: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`python -m pyharness` of this checkout."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, "-m", "pyharness", *words], cwd=self.root, env=environment, capture_output=True, text=True
        )

    def verify(self, path: Path, *words: str) -> tuple[int, str]:
        """Exit code and output of `receipt verify`."""
        done = self.run("receipt", "verify", str(path), *words)
        return done.returncode, done.stdout + done.stderr

    def git(self, *words: str) -> str:
        """git in this checkout, under a name of its own."""
        named = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "core.autocrlf=false")
        command = ["git", *named, "-C", str(self.root), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def copy(self, to: Path) -> World:
        """The same checkout elsewhere."""
        shutil.copytree(self.root, to, symlinks=True)
        return World(to, *(to / path.relative_to(self.root) for path in (self.oracle, self.perf)))

    def edit(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Rewrite a file's bytes."""
        file = self.root / path
        before = file.read_bytes()
        after = change(before)
        assert after != before
        file.write_bytes(after)


def change(path: Path, edit: Callable[[dict[str, Any]], None], seal: bool = False) -> Path:
    """Edit a receipt's document in place; with `seal` all that follows from its members, its name too, is made to fit
    again. Returns its file."""
    document = json.loads(path.read_bytes())
    body = document["predicate"]["receipt"]
    edit(body)
    if seal:
        for derived in ("id", "seals", "harness"):
            del body[derived]
        document = statement.seal(body, body["counts"]["listed"])
        path = path.rename(path.with_name(statement.file_name(document["predicate"]["receipt"])))
    path.write_bytes(statement.canonical(document) + b"\n")
    return path


def libraries() -> Path:
    """The folder of the CPU build's libraries."""
    return ggml.find_libraries(None, "cpu")


OFF = (9.5, 9.0, 8.5, 8.0)
RUNS = {"off": OFF, "on": (9.5, 9.0, 8.5, 8.0004), "control": (9.5, 9.0009, 8.5, 8.0)}
GRADIENTS = {"blk.0.attn_k.weight": 3e-7, "blk.0.attn_q.weight": 2e-7}


def trained(folder: Path, library: ggml.Library) -> Path:
    """The receipt of a training of this checkout whose losses and gradients are the above."""
    for name in (train.PROGRAM, "libllama.so.0", "model.gguf", "text.txt"):
        (folder / name).write_text(name)
    receipts = folder / "receipts"
    args = Namespace(device="cpu", shape="tiny", steps=len(OFF), lr=3e-4, warmup=2, receipts=receipts)
    start = {"event": "start", "flash_attn": True, "n_ctx": 256, "tokens": 600}
    runs = {
        name: train.Run([], 0, [start, *({"event": "step", "loss": loss, "seconds": 0.25} for loss in losses)], "")
        for name, losses in RUNS.items()
    }
    checks = losses.compare(RUNS, GRADIENTS, losses.NOISE, losses.LIMITS["cpu"])
    program, model, text = (folder / name for name in (train.PROGRAM, "model.gguf", "text.txt"))
    train.stamp(args, library, program, model, text, runs, GRADIENTS, checks, time.time())
    (path,) = receipts.iterdir()
    return path


def make(root: Path) -> World:
    """Copy what a receipt stands on, commit it, run oracle and perf there."""
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("ggml", "pyharness"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignore)
    (root / "tests/data").mkdir(parents=True)
    shutil.copy(ROOT / "tests/data/minilm-l0.gguf", root / "tests/data")
    (root / ".gitignore").write_text("__pycache__/\n")
    world = World(root, Path(), Path())
    world.git("init", "-q")
    world.git("add", ".")
    world.git("commit", "-q", "-m", "start")
    common = ("-b", "CPU", "--threads", "1", "--libs", str(libraries()), "--receipts", str(root / "receipts"))
    done = world.run("oracle", *common, "-o", ",".join(CASES))
    assert done.returncode == 0, done.stdout + done.stderr
    fast = ("--runs", "7", "--peer", "unfused", "--ceiling-tflops", "1", "--ceiling-gbs", "100")
    done = world.run("perf", *common, *fast, "-o", ",".join(CASES[:2]))
    assert done.returncode == 0, done.stdout + done.stderr
    (world.oracle,) = (root / "receipts").glob("*-oracle-*.json")
    (world.perf,) = (root / "receipts").glob("*-perf-*.json")
    return world


def timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The receipt of a training benchmark in which a context without flash attention does not fit."""
    for name in (train.PROGRAM, "model.gguf", "text.txt"):
        (folder / name).write_text(name)

    def execute(*_: Any, ctx: int, fa: str, steps: int, **__: Any) -> train.Run:
        compute = ctx << (21 if fa == "off" else 20)
        events: list[dict[str, Any]] = [{"event": "memory", "compute": compute, "peak": 2 * compute}]
        if fa == "off" and ctx > 600:
            return train.Run([], 1, events, "error: out of memory")
        events += [{"event": "step", "loss": 9.5 - i, "seconds": 0.5 - i / 100} for i in range(steps)]
        return train.Run([], 0, events, "")

    described = {"device": "cpu", "shape": {"name": "tiny"}, "text_sha256": "0" * 64, "model_sha256": "1" * 64}

    def peers(*_: Any) -> list[dict[str, Any]]:
        fits: dict[str, Any] = {"exit_code": 0, "problem": "", "losses": ["10.5", "10.25"], "steps_ns": [10**9, 10**8]}
        fails = {
            "exit_code": 2,
            "problem": "exit 2: error: OutOfMemoryError: CUDA out of memory.",
            "losses": [],
            "steps_ns": [],
        }
        versions = {"torch": "2.11.0", "transformers": "5.0.0"}
        return [
            {"name": "torch", "mode": mode, "ctx": ctx, "versions": versions, "memory_bytes": {"peak": ctx << 20}}
            | (fails if ctx == 2048 and mode == "tf32" else fits)
            for ctx in train.CONTEXTS["cpu"]
            for mode in torch_step.MODES
        ]

    monkeypatch.setattr(train, "execute", execute)
    monkeypatch.setattr(train, "torch_peers", peers)
    monkeypatch.setattr(train, "trained", lambda *_: described | {"programs": []})
    monkeypatch.setattr(train, "load", lambda _: ggml.Library.open(libraries()))
    out = folder / "receipts"
    args = Namespace(device="cpu", shape="tiny", out=folder, receipts=out, no_receipt=False, peer="torch")
    args.recompute, args.bf16 = "layers", False
    assert train.bench(args, folder / train.PROGRAM, folder / "model.gguf", folder / "text.txt", {}) == 0
    (path,) = out.iterdir()
    return path
