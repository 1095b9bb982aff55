"""Training over several devices: the same losses, gradients and momenta wherever layers lie, and failures in words."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import Link, Server

from pyharness.base import build
from pyharness.device import ggml
from pyharness.training import tiny, train

pytestmark = pytest.mark.slow

Options = dict[str, Any]
Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
STEPS = 20
LIMIT = 1e-6


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training left behind."""

    run: train.Run
    gradients: Tensors
    momenta: Tensors


class Workplace:
    """The training program, a text, models, and three servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = train.prepare("cpu")
        self.started: list[Server] = []
        self.servers = [self.server(f"server-{i}") for i in range(3)]
        self.text = folder / "text.txt"
        self.text.write_text(train.corpus()[:20000], encoding="utf-8")
        self._kept: dict[str, Result] = {}

    def server(self, name: str, environment: dict[str, str] | None = None, program: Path | None = None) -> Server:
        started = Server(program or self.program.parent / train.SERVER, self.folder / f"{name}.log", environment)
        self.started.append(started)
        return started

    def model(self, name: str = "tiny") -> Path:
        """A narrow model of a known shape."""
        shape = dataclasses.replace(tiny.SHAPES[name], words=2048, embd=64, ff=64)
        if shape.arch == "qwen2":  # q is as wide as the model
            shape = dataclasses.replace(shape, heads=4, embd=4 * shape.head)
        file = self.folder / f"{name}.gguf"
        if not file.exists():
            tiny.write(file, shape, train.vocabulary())
        return file

    def over(self, *ends: Server | Link, **options: Any) -> Options:
        """The options that put layers on servers."""
        return {"rpc": ",".join(end.endpoint for end in ends), **options}

    def attempt(self, **options: Any) -> train.Run:
        """A run of the training program, or of another `program`, on a `model`."""
        chosen: Options = {"program": self.program, "model": "tiny", "threads": 1, "steps": 2} | options
        program, model = chosen.pop("program"), self.model(chosen.pop("model"))
        return train.execute(program, model, self.text, 120, **chosen)

    def result(self, model: str, **options: Any) -> Result:
        """Of 20 steps: gradients of the last and momenta after it."""
        key = f"{model} {sorted(options.items())}"
        if key not in self._kept:
            files = {name: self.folder / f"{name}.gguf" for name in ("grads", "momenta")}
            chosen: Options = {"steps": STEPS, "grads_step": STEPS, "nodes": True} | files | options
            run = self.attempt(model=model, **chosen)
            train.require(run)
            self._kept[key] = Result(run, train.tensors(files["grads"]), train.tensors(files["momenta"]))
        return self._kept[key]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = Workplace(tmp_path_factory.mktemp("devices"))
    yield place
    for server in place.started:
        server.kill()


def assert_same(got: Result, want: Result) -> None:
    np.testing.assert_allclose(got.run.losses, want.run.losses, rtol=LIMIT)
    for found, known in ((got.gradients, want.gradients), (got.momenta, want.momenta)):
        assert found.keys() == known.keys()
        apart = {name: float(np.linalg.norm(found[name] - known[name])) for name in known}
        assert all(apart[name] <= LIMIT * np.linalg.norm(known[name]) for name in known), apart


def placement(at: Workplace, name: str) -> Options:
    a, b, c = at.servers
    return {
        "output on a server": at.over(a, ngl=1),
        "output and a layer on a server": at.over(a, ngl=2),
        "two servers": at.over(a, b),
        "a layer on each of three": at.over(a, b, c, tensor_split="1,1,1"),
    }[name]


WHERE = ["output on a server", "output and a layer on a server", "two servers", "a layer on each of three"]


@pytest.mark.parametrize("fa", ["on", "off"])
@pytest.mark.parametrize("where", WHERE)
def test_training_is_the_same_wherever_layers_lie(at: Workplace, where: str, fa: str) -> None:
    got, want = at.result("tiny", fa=fa, **placement(at, where)), at.result("tiny", fa=fa, device="none")
    assert (got.run.flash_attn, want.run.flash_attn) == (fa == "on", fa == "on")
    assert_same(got, want)
    assert len(got.run.all("layers")) > 1
    # momenta lie beside the weights, all of them
    assert len(got.run.all("state")) == len(got.run.all("layers"))
    assert sum(e["bytes"] for e in got.run.all("state")) == sum(e["bytes"] for e in want.run.all("state"))


@pytest.mark.parametrize("fa", ["on", "off"])
@pytest.mark.parametrize("model", ["qwen2", "gemma2", "sinks"])
def test_every_shape_trains_the_same_on_three_servers(at: Workplace, model: str, fa: str) -> None:
    three = placement(at, WHERE[-1])
    assert_same(at.result(model, fa=fa, **three), at.result(model, fa=fa, device="none"))


def test_accumulated_gradients_lie_beside_their_weights(at: Workplace) -> None:
    options: Options = {"fa": "on", "ctx": 512, "ubatch": 256, "steps": 4, "grads_step": 4}
    assert_same(at.result("tiny", **options, **placement(at, WHERE[2])), at.result("tiny", **options, device="none"))


def test_graphs_made_anew_on_two_devices_need_no_copies_of_the_pipeline(
    at: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp pipelines where all layers and no overridden tensors lie on several devices."""
    monkeypatch.setenv("LLAMA_GRAPH_REUSE_DISABLE", "1")
    options: Options = {"fa": "on", "steps": 4, "embd_offload": False}
    two = train.require(at.attempt(**at.over(*at.servers[:2]), **options))
    assert two.losses == pytest.approx(train.require(at.attempt(device="none", **options)).losses, rel=LIMIT)


def test_split_mode_tensor_is_refused_in_words(at: Workplace) -> None:
    run = at.attempt(fa="on", split_mode="tensor", **at.over(*at.servers[:2]))
    assert run.exit_code == 2
    assert "error: cannot train with split mode tensor" in run.messages


def test_a_device_that_is_none_is_named(at: Workplace) -> None:
    run = at.attempt(device="RPC0,RPC9", **at.over(at.servers[0]))
    assert (run.exit_code, run.problem) == (2, "exit 2: error: no device is called RPC9")


# ---- servers of other kinds ----


@pytest.fixture(scope="module")
def stock() -> Path:
    return train.prepare_stock()


@pytest.mark.xdist_group("stock")
def test_an_unpatched_server_trains_without_flash_attention(at: Workplace, stock: Path) -> None:
    server = at.server("stock", program=stock.parent / train.SERVER)
    with contextlib.closing(Link(server.port)) as link:
        run = train.require(at.attempt(fa="on", **at.over(link)))
        assert server.alive
    assert not run.flash_attn
    why = f"RPC server {link.endpoint} (protocol 7.0.0) is not patched, and version 1 runs FLASH_ATTN_BACK"
    assert f"disabling flash attention: layer 0 on RPC0: {why}" in run.messages
    assert link.messages["SUPPORT"] == 0
    want = train.require(at.attempt(fa="off", device="none"))
    assert run.losses == pytest.approx(want.losses, rel=1e-4)


def test_a_server_of_another_version_of_the_patch_is_asked_nothing(at: Workplace) -> None:
    def greeting(answer: bytearray) -> None:
        answer[3] = 9

    with contextlib.closing(Link(at.servers[0].port, greeting)) as link:
        run = train.require(at.attempt(fa="on", **at.over(link)))
    assert not run.flash_attn
    assert "has version 9 of the patch, and version 1 runs FLASH_ATTN_BACK" in run.messages
    assert link.messages["SUPPORT"] == 0


def test_a_server_of_another_protocol_is_refused(at: Workplace) -> None:
    def greeting(answer: bytearray) -> None:
        answer[0] = 8

    with contextlib.closing(Link(at.servers[0].port, greeting)) as link:
        run = at.attempt(**at.over(link))
    assert run.exit_code == 2
    assert f"RPC server {link.endpoint} speaks protocol 8.0.0, this client 7.0.0" in run.messages


@pytest.mark.xdist_group("stock")
def test_an_unpatched_client_trains_on_a_patched_server(at: Workplace, stock: Path) -> None:
    """Upstream's labels are as long as the vocabulary."""
    with contextlib.closing(Link(at.servers[0].port)) as link:
        run = at.attempt(program=stock, perplexity=True, steps=0, fa="on", **at.over(link))
    want = at.attempt(perplexity=True, steps=0, fa="on", device="none")
    assert train.require(run).perplexity == pytest.approx(train.require(want).perplexity, rel=1e-4)
    assert link.messages["SUPPORT"] == 0


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "ggml-backend.h"

// FLASH_ATTN_BACK is refused, any other op of $REFUSED only once the client has been told that it runs
bool ggml_backend_dev_supports_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    bool (*real)(ggml_backend_dev_t, const struct ggml_tensor *) = dlsym(RTLD_NEXT, "ggml_backend_dev_supports_op");
    const char * refused = getenv("REFUSED");
    const bool first = op->op == GGML_OP_FLASH_ATTN_BACK || op->data;
    return !(refused && first && !strcmp(ggml_op_name(op->op), refused)) && real(dev, op);
}

static const char * refusal(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    return "no gradients on Sundays";
}

void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    void * (*real)(ggml_backend_reg_t, const char *) = dlsym(RTLD_NEXT, "ggml_backend_reg_get_proc_address");
    return strcmp(name, "ggml_backend_flash_attn_back_refusal") ? real(reg, name) : (void *) refusal;
}

enum ggml_status ggml_backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    enum ggml_status (*real)(ggml_backend_t, struct ggml_cgraph *) = dlsym(RTLD_NEXT, "ggml_backend_graph_compute");
    return getenv("FULL") ? GGML_STATUS_ALLOC_FAILED : real(backend, graph);
}
"""


@pytest.fixture(scope="module")
def shim(at: Workplace) -> str:
    source, library = at.folder / "shim.c", at.folder / "shim.so"
    source.write_text(SHIM)
    include = ggml.find_headers(at.program.parent)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-I{include}", source, "-o", library], check=True)
    return str(library)


def test_a_device_that_refuses_the_gradient_turns_flash_attention_off(at: Workplace, shim: str) -> None:
    server = at.server("refusing", {"LD_PRELOAD": shim, "REFUSED": "FLASH_ATTN_BACK"})
    run = train.require(at.attempt(fa="on", **at.over(server)))
    assert server.alive
    assert not run.flash_attn
    assert (
        "disabling flash attention: layer 0 on RPC0: CPU does not run FLASH_ATTN_BACK: no gradients on Sundays"
        in run.messages
    )


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"REFUSED": "OUT_PROD"}, "CPU does not run OUT_PROD on these tensors"),
        ({"FULL": "1"}, "CPU did not compute the graph: GGML status: error (failed to allocate memory)"),
    ],
)
def test_a_graph_that_a_server_cannot_run_ends_the_client_and_not_the_server(
    at: Workplace, shim: str, environment: dict[str, str], why: str
) -> None:
    server = at.server("failing", {"LD_PRELOAD": shim} | environment)
    run = at.attempt(**at.over(server))
    assert run.exit_code == 2
    assert f"RPC server {server.endpoint}: {why}" in run.problem
    assert f"refused: {why}" in server.messages
    assert server.alive


# ---- failures on the way ----


@pytest.mark.parametrize("fail", [("GRAPH_RECOMPUTE", 3), ("SET_TENSOR", 60), ("GET_TENSOR", 5)])
def test_a_server_killed_in_a_step_is_named(at: Workplace, fail: tuple[str, int]) -> None:
    """All layers on one server: a step is its inputs, the word to compute the graph again, and the loss."""
    server = at.server("killed")
    made = {name: at.folder / f"{name}-killed.gguf" for name in ("save", "grads", "momenta")}
    with contextlib.closing(Link(server.port, fail=fail, failing=server.kill)) as link:
        run = at.attempt(steps=50, **made, **at.over(link))
    assert not server.alive
    assert run.exit_code == 2
    assert f"RPC server {link.endpoint}: the connection was lost" in run.problem
    assert len(run.losses) < 50
    assert not list(at.folder.glob("*-killed.gguf*"))


def test_a_server_killed_while_the_client_computes_is_named(at: Workplace) -> None:
    """Its next message has no answer to wait for, and would end the client with a signal."""
    server = at.server("killed-between")

    def say(line: str) -> None:
        if line.startswith("step 3"):
            server.kill()

    options = {"steps": 50, "ctx": 512, "threads": 1, "ngl": 1, **at.over(server)}
    run = train.execute(at.program, at.model(), at.text, 120, say, **options)
    assert run.exit_code == 2
    assert f"RPC server {server.endpoint}: the connection was lost" in run.problem


def test_a_server_killed_while_the_model_is_saved_leaves_no_half_of_it(at: Workplace) -> None:
    server = at.server("killed-late")
    saved = at.folder / "late.gguf"
    with contextlib.closing(Link(server.port)) as link:
        train.require(at.attempt(save=saved, **at.over(link)))
    before, last = saved.read_bytes(), link.messages["GET_TENSOR"]
    with contextlib.closing(Link(server.port, fail=("GET_TENSOR", last), failing=server.kill)) as link:
        run = at.attempt(save=saved, lr=2e-3, **at.over(link))
    assert (run.exit_code, len(run.losses)) == (2, 2)
    assert saved.read_bytes() == before


def test_a_link_that_stalls_ends_the_training(at: Workplace) -> None:
    server = at.server("stalled")
    started = time.monotonic()
    with contextlib.closing(Link(server.port, fail=("SET_TENSOR", 60), failing=lambda: link.stall())) as link:
        run = at.attempt(steps=50, rpc_timeout=2, **at.over(link))
        assert time.monotonic() - started < 30
    assert run.exit_code == 2
    assert f"RPC server {link.endpoint}: no answer within 2 s" in run.problem


def test_a_server_that_is_not_there_is_named(at: Workplace) -> None:
    server = at.server("gone")
    server.kill()
    run = at.attempt(**at.over(server))
    assert run.exit_code == 2
    assert f"Failed to connect to {server.endpoint}" in run.problem


def test_a_client_that_goes_away_leaves_the_server_to_the_next_one(at: Workplace) -> None:
    server = at.server("left")
    with contextlib.closing(Link(server.port)) as link:
        train.execute(at.program, at.model(), at.text, 3, steps=100000, threads=1, **at.over(link))
    train.require(at.attempt(**at.over(server)))


# ---- what a server says ----


def test_what_travels_to_a_server_in_a_step_is_a_boundary(at: Workplace) -> None:
    """The output's server gets activations and labels and gives gradients and loss; no weights, no momenta."""
    marks: list[tuple[int, int]] = []

    def mark(line: str) -> None:
        if line.startswith("step"):
            marks.append((link.sent["SET_TENSOR"], link.received))

    with contextlib.closing(Link(at.servers[2].port)) as link:
        options = {"steps": 6, "fa": "on", "threads": 1, **at.over(*at.servers[:2], link, tensor_split="1,1,1")}
        train.require(train.execute(at.program, at.model(), at.text, 60, mark, **options))
    activations = 256 * 64 * 4  # a layer's output or its gradient; the output matrix has 8 times as many bytes
    for i in (0, 1):
        mean = (marks[-1][i] - marks[0][i]) / 5
        assert activations < mean < 4 * activations


def test_train_demo_over_servers_says_what_lies_where(
    at: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    where = ["--rpc", ",".join(server.endpoint for server in at.servers[:2]), "--tensor-split", "2,2"]
    words = ["--shape", "tiny", "--tokens", "257", "--steps", "8", "--text", str(at.text), "--out", str(tmp_path)]
    assert train.run(parser.parse_args([*words, *where, "--receipts", str(tmp_path)])) == 0
    said = capsys.readouterr()
    assert f"RPC0 ({at.servers[0].endpoint}): layers 0, 1\nRPC1 ({at.servers[1].endpoint}): output\n" in said.out
    assert re.search(rf"RPC0\[{at.servers[0].endpoint}]: weights [\d.]+ MiB, optimizer [\d.]+ MiB, compute", said.out)
    assert "FLASH_ATTN_BACK cpu x2" in said.out  # the paths that the servers name
    assert "no receipt" in said.err
    assert not list(tmp_path.glob("*-train-*.json"))


@pytest.mark.parametrize("servers", [0, 2])
def test_heads_split_over_devices_give_the_same_gradients(at: Workplace, servers: int) -> None:
    """On the CPU twice, and on two servers."""
    program = build.build("cpu", "test-flash-attn-back-meta") / "bin/test-flash-attn-back-meta"
    ends = [server.endpoint for server in at.servers[:servers]]
    run = subprocess.run([program, *ends], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("ok  ") == 6
    assert "N=16: taken" in run.stdout
    assert "N=3: the devices that share these tensors do not run FLASH_ATTN_BACK" in run.stdout
