"""The GPU check: its steps, and what runs in processes of its own, on the CPU."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import gc
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import squeeze
from attention import small
from numpy.typing import NDArray

from pyharness.base import cuda, errors
from pyharness.case import cases, inputs, operands
from pyharness.case.cases import Case
from pyharness.check import gpucheck, oracle, shapes
from pyharness.check import soak as soaking
from pyharness.cli import cli
from pyharness.device import ggml
from pyharness.receipts import statement

CASE = str(small())
OTHER = str(small(kv=21))
pytestmark = pytest.mark.usefixtures("library")

Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Runs steps on the CPU: exit code, and the steps of summary.json; results lie in tmp_path/out."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        common = ("--preset", "cpu", "-b", "CPU", "--out", str(tmp_path / "out"), "--threads", "1")
        code = cli.main(["gpucheck", *words, *common])
        found = statement.read(tmp_path / "out/summary.json")["predicate"]["receipt"]
        return code, found["check"]["steps"]

    return run


def states(steps: dict[str, Any]) -> dict[str, str]:
    return {name: step["state"] for name, step in steps.items()}


def options(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpucheck.add_arguments(parser)
    args = parser.parse_args(["--preset", "cpu", "-b", "CPU", "--out", str(tmp_path), "--threads", "1"])
    vars(args).update(changes)
    return args


class Fake(gpucheck._Runner):
    """A runner whose processes are written out: exit code and lines of each."""

    def __init__(self, args: argparse.Namespace, *ends: tuple[int | None, list[str]]) -> None:
        super().__init__("step", args, io.StringIO(), 0, threading.Event())
        self.ends, self.words, self.env = list(ends), list[tuple[str, ...]](), list[dict[str, str]]()

    def share(self, of: int) -> Fake:
        del of
        return self

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> tuple[int | None, list[str]]:
        self.env.append(dict(env or {}))
        self.words.append(words)
        return self.ends.pop(0)


# ---- steps ----


def test_the_gpu_check_leaves_a_flat_folder(check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("info", "repeat", "random", "memory", "broken", "properties")
    code, steps = check(*words, "--repeats", "3", "--random", "20", "--jobs", "2", "--examples", "1")
    assert code == 0
    assert states(steps) == {
        "info": "ok",
        "repeat": "ok",
        "random": "ok",
        "properties": "ok",
        "memory": "not run",
        "broken": "not run",
    }
    assert steps["random"]["text"].startswith("20 ok")
    out = tmp_path / "out"
    (path,) = out.glob("*-oracle-*.json")
    assert steps["repeat"]["text"].endswith(
        "6 ok, 0 failed, 0 unsupported, 0 skipped, 3 runs each beside another stream"
    )
    assert all(c["repeats"] == 3 and c["distinct"] == 1 for c in statement.read(path)["predicate"]["receipt"]["cases"])
    assert all(child.is_file() for child in out.iterdir())
    assert len(list(out.iterdir())) <= 8
    said = capsys.readouterr()
    assert "repeat      ok" in said.out
    assert re.fullmatch(r"gpucheck \.\.\.\n(.*\n)*gpucheck: done in .+\nresults in .+\n", said.err)


def test_a_full_time_box_interrupts_a_step_and_keeps_what_was_done(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, steps = check("oracle", "--box", "oracle=4")
    assert (code, states(steps)) == (1, {"oracle": "TIME"})
    (path,) = (tmp_path / "out").glob("*-oracle-*.json")
    assert statement.read(path)["predicate"]["receipt"]["partial"] is True
    assert "oracle      TIME" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("nothing",), ("oracle", "--beside", "soak"), ("info", "--box", "info"), ("info", "--box", "x=1")]
)
def test_a_wrong_step_or_box_is_exit_2(words: tuple[str, ...]) -> None:
    assert cli.main(["gpucheck", *words]) == errors.Usage.exit_code


@pytest.mark.parametrize("words", [("gpucheck",), ("gpucheck", "perf", "--libs", "."), ("train", "--device", "cuda")])
def test_without_a_gpu_nothing_is_built_or_run(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*_: object) -> None:
        raise errors.Environment("no CUDA driver")

    monkeypatch.setattr(cuda, "_call", call)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a program"))
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == errors.Environment.exit_code
    said = capsys.readouterr()
    assert said.err.startswith(f"pyharness {words[0]}: no CUDA0: no CUDA driver\n  this needs an NVIDIA GPU")
    assert len(said.err.splitlines()) == 2
    assert not said.out
    assert not list(tmp_path.iterdir())


def test_steps_that_check_run_beside_the_soak_and_timings_after_it(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    soaking, order = threading.Event(), list[str]()

    def soak(runner: gpucheck._Runner) -> dict[str, Any]:
        soaking.set()
        runner.ready.set()
        assert runner.released.wait(60)
        soaking.clear()
        return gpucheck._state(0, "")

    def step(name: str) -> Callable[[gpucheck._Runner], dict[str, Any]]:
        def run(_: gpucheck._Runner) -> dict[str, Any]:
            order.append(name)
            return gpucheck._state(0 if soaking.is_set() == (name in gpucheck.BESIDE) else 1, "")

        return run

    monkeypatch.setattr(gpucheck, "_STEPS", {name: step(name) for name in gpucheck.BOXES} | {"soak": soak})
    code, steps = check("--beside", "soak", "--lanes", "3")
    assert code == 0, states(steps)
    assert list(steps) == list(gpucheck.BOXES)
    assert order[0] == "info"
    assert order[-1] == "perf"


def test_an_interrupt_ends_the_soak_and_what_runs_beside_it(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def endless(runner: gpucheck._Runner) -> dict[str, Any]:
        if runner.step == "rows":
            runner = runner.share(1)
            begun.set()
        program = "import time; print('ready', flush=True); time.sleep(600)"
        return gpucheck._state(runner.command(sys.executable, "-c", program)[0], "")

    def interrupted(_: gpucheck._Runner) -> dict[str, Any]:
        assert begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpucheck, "_STEPS", {"mma": interrupted, "rows": endless, "soak": endless})
    begin = time.monotonic()
    code, steps = check("mma", "rows", "soak", "--beside", "soak")
    assert code == errors.INTERRUPTED
    assert states(steps) == {"rows": "TIME", "soak": "TIME"}
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("step", ["random", "oracle"])
@pytest.mark.parametrize("to_all", [True, False])
def test_a_signal_ends_the_check_and_every_process_of_it(tmp_path: Path, step: str, to_all: bool) -> None:
    words = ("--preset", "cpu", "-b", "CPU", "--out", str(tmp_path), "--threads", "1", "--jobs", "2", step)
    command = [sys.executable, "-m", "pyharness", "gpucheck", *words]
    with subprocess.Popen(command, cwd=ggml.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as check:
        log, deadline = tmp_path / "log.txt", time.monotonic() + 60
        while time.monotonic() < deadline and (not log.exists() or "FLASH_ATTN_BACK(" not in log.read_text()):
            time.sleep(0.05)
        children = psutil.Process(check.pid).children()
        os.killpg(check.pid, signal.SIGINT) if to_all else check.terminate()
        said = check.communicate(timeout=60)[1]
    assert check.returncode == errors.INTERRUPTED
    first, *_, last = said.splitlines()
    assert (first, last) == ("gpucheck ...", "pyharness gpucheck: interrupted")
    assert "Traceback" not in said
    assert children
    assert not any(child.is_running() for child in children)
    assert log.read_text().count(" $ ") == len(children)


def test_a_lost_device_ends_the_check_with_exit_3(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"pyharness oracle: {errors.Lost('CPU fell off the bus')}"
    monkeypatch.setattr(gpucheck._Runner, "command", lambda *_, **__: (errors.Lost.exit_code, ["1 ok", said]))
    code, steps = check("oracle", "random")
    assert code == errors.Lost.exit_code
    assert states(steps) == {"oracle": "LOST", "random": "not run"}
    assert steps["oracle"]["text"] == said


def row(case: Case, status: str, reason: str = "") -> str:
    """A line of the oracle's CSV."""
    out = io.StringIO()
    csv.writer(out).writerow(("CPU", str(case), "1", status, reason))
    return out.getvalue().strip()


def test_an_abort_is_told_in_its_words_and_the_next_process_goes_on(tmp_path: Path) -> None:
    listed = [small(kv=keys) for keys in range(21, 27)]
    a, b, c, d, e, f = listed
    died = [row(a, "ok"), "CUDA error: out of memory", "  cuMemCreate(&handle)", "bye"]
    asserted = [row(c, "unsupported", "too small"), row(d, "failed", f"{oracle.ABORTED}GGML_ASSERT(x)")]
    rest = [row(e, "failed", "dq: NMSE"), row(e, "failed", "dq: NMSE"), row(f, "unsupported")]
    runner = Fake(options(tmp_path, jobs=1), (-6, died), (1, asserted), (1, rest))
    found = gpucheck._judged(runner, listed, {})
    assert found["state"] == "FAILED"
    assert found["text"] == "1 ok, 2 failed, 1 refused, 0 skipped, 2 aborted"
    assert found["aborted"] == [
        f"{b}: the process ended with -6: CUDA error: out of memory",
        f"{d}: ggml aborted: GGML_ASSERT(x)",
    ]
    assert found["failed"] == [f"{e}: dq: NMSE", f"{f}: refused without a reason"]
    assert found["refusals"] == {"too small": 1}
    assert not runner.ends


def test_a_full_box_keeps_the_shapes_that_were_tried(tmp_path: Path) -> None:
    listed = [small(kv=keys) for keys in range(21, 24)]
    found = gpucheck._judged(Fake(options(tmp_path, jobs=1), (None, [row(listed[0], "ok")])), listed, {})
    assert (found["state"], found["counts"]) == ("TIME", {"ok": 1})


def test_repeats_and_random_shapes_run_on_every_kernel_path_of_cuda(tmp_path: Path) -> None:
    ends = [(0, ["5 cases: 5 ok"]), (1, ["failed A", "5 cases: 4 ok"]), (0, ["3 cases: 3 ok"])]
    runner = Fake(options(tmp_path, backend="CUDA0"), *ends)
    found = gpucheck._repeat(runner)
    assert (found["state"], found["text"]) == (
        "FAILED",
        "chosen: 5 cases: 5 ok; mma: 5 cases: 4 ok; rows: 3 cases: 3 ok",
    )
    assert [env.get(cuda.KERNEL_PATH) for env in runner.env] == [None, "mma", "rows"]


@pytest.mark.parametrize(("tests", "state"), [("3/3 tests passed", "ok"), ("2/3 tests passed", "FAILED")])
def test_upstream_s_test_is_told_by_its_summary_and_exit_code(tmp_path: Path, tests: str, state: str) -> None:
    (tmp_path / "libggml-base.so").touch()
    args = options(tmp_path, libs=tmp_path)
    assert gpucheck._backend_ops(Fake(args))["state"] == "not run"
    (tmp_path / "test-backend-ops").touch()
    lines = ["FLASH_ATTN_BACK(hsk=64): \x1b[1;31mFAIL\x1b[0m", f"  {tests}", "Backend CPU: FAIL"]
    ends = [(0, ["fine"]) for _ in range(3)]
    runner = Fake(args, (1, lines) if state == "FAILED" else (0, lines[1:]), *ends)
    found = gpucheck._backend_ops(runner)
    assert found["state"] == state
    assert found["text"] == f"test: {tests}; support: fine; grad: fine; perf: fine"
    assert found["modes"]["test"]["failed"] == ["FLASH_ATTN_BACK(hsk=64): FAIL"] * (state == "FAILED")
    assert ["-p" in words for words in runner.words] == [False, False, False, True]


def test_upstream_s_test_times_a_few_cases_of_each_head_size_and_type() -> None:
    keys = (str(case).removesuffix(")") for case in cases.load(cases.PERF))
    timed = [Case.parse(text + ")") for text in keys if re.search(gpucheck.UPSTREAM_TIMED, text)]
    assert {case.hsk for case in timed} == {64, 128, 256}
    assert {case.type_K for case in timed} >= {"f16", "f32", "bf16", "q8_0"}
    assert len(timed) <= 10


@pytest.mark.parametrize(("bad", "state"), [(0, "ok"), (gpucheck.FOUND, "FAILED"), (None, "TIME")])
def test_every_tool_of_the_sanitizer_runs_on_every_kernel_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int | None, state: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: sys.executable)
    ends: list[tuple[int | None, list[str]]] = [(0, ["========= ERROR SUMMARY: 0 errors"]) for _ in range(11)]
    runner = Fake(options(tmp_path, jobs=1), *ends, (bad, ["========= ERROR SUMMARY: 1 error"]))
    found = gpucheck._sanitizer(runner)
    assert found["state"] == state
    assert found["text"].startswith("hopper memcheck: ERROR SUMMARY: 0 errors; hopper initcheck: ")
    assert found["text"].endswith("rows synccheck: ERROR SUMMARY: 1 error")


# ---- what runs in a process of its own ----


def test_random_shapes_are_seeded_and_reach_every_corner_of_the_grammar() -> None:
    def drawn(seed: int) -> list[Case]:
        rng = random.Random(seed)
        return [shapes.random_case(rng) for _ in range(600)]

    found = drawn(0)
    assert found == drawn(0) != drawn(1)
    for key, values in {
        "layout": set(cases.LAYOUTS),
        "sinks": {0, 1},
        "o": {0, 1},
        "prec": set(cases.PRECISIONS),
    }.items():
        assert {getattr(case, key) for case in found} == values
    assert {case.mask.partition(":")[0] for case in found} == {mask.partition(":")[0] for mask in cases.MASKS}
    assert {case.type_K for case in found} >= {"f16", "f32", "bf16", "q8_0", "q4_0"}
    assert all(Case.parse(str(case)) == case for case in found)


def test_a_third_and_more_of_the_random_shapes_are_for_each_path_on_tensor_cores() -> None:
    found = shapes.random_cases(random.Random(0), 3000)
    assert len(set(found)) == 3000
    large = [case for case in found if min(case.nb, case.window[1]) >= 64]
    mma = [case for case in large if max(case.hsk, case.hsv) <= 256 and not (case.softcap and case.sinks)]
    hopper = [case for case in mma if case.hsk == case.hsv and case.hsk in (64, 128, 256) and not case.softcap]
    assert len(mma) > len(hopper) > 1000
    for some in (
        [case for case in hopper if case.data == "wild"],
        [case for case in hopper if case.kv > 1000],
        [case for case in hopper if case.nb % 64 and case.kv % 64],
        [case for case in hopper if case.kv_count],
        [case for case in hopper if case.hsk == 256],
    ):
        assert len(some) > 50


def wrong_once(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    """One bit of one run's result is another."""
    right, count = ggml.Session.again, itertools.count(1)

    def wrong(session: ggml.Session) -> NDArray[np.uint32]:
        number = next(count)  # streams run at the same time
        now = right(session)
        if number == run:
            now[0] ^= 1
        return now

    monkeypatch.setattr(ggml.Session, "again", wrong)


def test_a_repeat_with_other_bits_is_found(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = oracle.check(library, cpu, small(), 0, repeats=20)
    assert (found.status, found.repeats, found.distinct) == ("ok", 20, 1)
    wrong_once(monkeypatch, 13)
    found = oracle.check(library, cpu, small(), 0, repeats=20)
    assert (found.status, found.reason, found.distinct) == ("failed", "2 different results in 20 runs", 2)


def test_repeats_whose_other_stream_ends_are_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = ggml.Session.compute

    def failing(session: ggml.Session) -> float:
        if session.inputs.case == Case.parse(oracle.BUSY):
            raise errors.Environment("no memory")
        return compute(session)

    monkeypatch.setattr(ggml.Session, "compute", failing)
    words = ("-b", "CPU", "-o", CASE, "--repeat", "3", "--busy", "--receipts", str(tmp_path))
    assert cli.main(["oracle", *words]) == errors.Environment.exit_code
    assert "pyharness oracle: no memory" in capsys.readouterr().err
    (path,) = tmp_path.glob("*-oracle-*.json")
    document = statement.read(path)
    ended = {"exit_code": errors.Environment.exit_code, "reason": "no memory"}
    assert (document["predicate"]["receipt"]["ended"], document["predicate"]["result"]) == (ended, "WARNED")


def soaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak takes four cases and ends by itself."""
    monkeypatch.setattr(shapes, "SOAKED", (CASE, OTHER))
    monkeypatch.setattr(shapes, "SOAKED_RANDOM", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def run_soak(seconds: float) -> int:
    parser = argparse.ArgumentParser()
    soaking.add_arguments(parser)
    return soaking.run(parser.parse_args(["-b", "CPU", "--threads", "1", "--hold", "--seconds", str(seconds)]))


def soak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    soaks(monkeypatch)
    code = run_soak(0.5)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"prepared in .* s: .* inputs of 4 cases made after .* s, then each run once", lines[0])
    assert lines[1] == "ready"
    return code, json.loads(next(line for line in lines if line.startswith("soak\t"))[5:])


def test_a_soak_gives_the_same_bits_and_takes_no_more_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = soak(monkeypatch, capsys)
    assert (code, found["failures"], found["cases"]) == (0, [], 4)
    assert found["runs"] >= 16
    assert found["ballasts"]
    assert found["grown"].keys() == {"host"}


def test_a_soak_does_not_count_its_preparation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, made = inputs.make, itertools.count(1)

    def slow(case: Case, seed: int) -> operands.Inputs:
        time.sleep(0.25)
        if next(made) == 2:  # a line is due from here on, however long the library took to open
            monkeypatch.setattr(soaking, "PROGRESS", 0.0)
        return make(case, seed)

    monkeypatch.setattr(inputs, "make", slow)
    soaks(monkeypatch)
    assert run_soak(0.5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"preparing: inputs of [23] of 4 cases, \d s", lines[0])
    found = json.loads(next(line for line in lines if line.startswith("soak\t"))[5:])
    assert found["samples"][0]["seconds"] < 0.25
    assert found["seconds"] >= 0.5


def test_a_soak_that_does_not_fit_its_box_says_so_before_it_is_cut_off(check: Check) -> None:
    code, steps = check("soak", "--soak", "480", "--box", "soak=300")
    assert (code, states(steps)) == (1, {"soak": "FAILED"})
    assert re.match("pyharness soak: 480 s of soak do not fit the time box: .* s are left", steps["soak"]["text"])


def test_a_soak_that_is_cut_off_tells_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soaks(monkeypatch)
    callbacks = gc.callbacks.copy()  # an interrupt inside one of them, as hypothesis has, would reach nobody
    gc.callbacks.clear()

    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 10  # the second comes once the first is taken, which may last where tests share cores
        while signal.getsignal(signal.SIGINT) != signal.SIG_IGN and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    memory, cut = soaking.Soak.memory, threading.Timer(0.5, interrupt_twice)
    before = signal.getsignal(signal.SIGINT)

    def first_figure(soaked: soaking.Soak) -> dict[str, Any]:
        with contextlib.suppress(RuntimeError):  # it counts already
            cut.start()
        return memory(soaked)

    monkeypatch.setattr(soaking.Soak, "memory", first_figure)
    try:
        assert run_soak(600) == errors.INTERRUPTED
        cut.join()
    finally:
        gc.callbacks.extend(callbacks)
        signal.signal(signal.SIGINT, before)
    out = capsys.readouterr().out
    assert out.rstrip().endswith("; interrupted")
    found = json.loads(next(line for line in out.splitlines() if line.startswith("soak\t"))[5:])
    assert found["runs"] >= 16
    assert found["failures"] == []


def test_a_soak_finds_other_bits_and_growing_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = iter(range(10**9, 10**12, 10**8))
    monkeypatch.setattr(soaking.Soak, "memory", lambda _: {"host": 1, "device": next(held), "others": 0})
    wrong_once(monkeypatch, 17)
    code, found = soak(monkeypatch, capsys)
    assert code == 1
    bits, memory = found["failures"]
    assert bits.startswith("different bits in FLASH_ATTN_BACK")
    assert memory == "device memory grew by 95 MiB"


def test_a_soak_tells_what_ends_a_stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: ggml.Session) -> float:
        raise errors.Lost("gone")

    monkeypatch.setattr(ggml.Session, "compute", fail)
    code, found = soak(monkeypatch, capsys)
    assert code == 1
    assert found["failures"] == [f"{errors.LOST}: gone"] * 2


@contextlib.contextmanager
def no_fill(*_: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("fails", "scale", "want"),
    [
        (False, 1, (True, "the same bits")),
        (False, 1 + 1e-6, (True, "right, NMSE")),
        (False, 2, (False, "wrong: dq")),
        (True, 1, (True, "no memory, afterwards the same bits")),
        (True, 2, (False, "no memory, afterwards wrong: dq")),
    ],
)
def test_a_full_device_gives_a_right_result_or_words(
    library: ggml.Library,
    cpu: ggml.Device,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
    scale: float,
    want: tuple[bool, str],
) -> None:
    compute, result, computed, read = ggml.Session.compute, ggml.Session.result, 0, 0

    def full(session: ggml.Session) -> float:
        nonlocal computed
        computed += 1
        if fails and computed == 3:
            raise errors.Environment("no memory")
        return compute(session)

    def scaled(session: ggml.Session) -> ggml.Result:
        nonlocal read
        read += 1
        found = result(session)
        if read == 1 or scale == 1:
            return found
        return dataclasses.replace(
            found, digest="another", parts={name: part * np.float32(scale) for name, part in found.parts.items()}
        )

    monkeypatch.setattr(ggml.Session, "compute", full)
    monkeypatch.setattr(ggml.Session, "result", scaled)
    monkeypatch.setattr(squeeze, "fill", no_fill)
    right, words = squeeze.squeezed(library, cpu, small(sinks=1), 0.5)
    assert right == want[0]
    assert want[1] in words


def test_ballast_leaves_the_room_that_was_asked_for(library: ggml.Library) -> None:
    memory = {"free": 1000 * squeeze.MIB, "most": 300 * squeeze.MIB}
    blocks: dict[int, int] = {}

    class C:
        def ggml_backend_alloc_buffer(self, _: Any, size: int) -> int:
            if size > min(memory["most"], memory["free"]):
                return 0
            memory["free"] -= size
            blocks[len(blocks) + 1] = size
            return len(blocks)

        def ggml_backend_buffer_free(self, block: int) -> None:
            memory["free"] += blocks[block]

    fake: Any = argparse.Namespace(c=C(), backend=None)
    with squeeze.fill(fake, fake, 30 * squeeze.MIB, lambda: memory["free"]):
        assert 30 * squeeze.MIB <= memory["free"] < 32 * squeeze.MIB
    assert memory["free"] == 1000 * squeeze.MIB
    del library


# ---- a device that fails ----


class Failing:
    """ggml's functions; the graph ends with a status."""

    def __init__(self, c: Any, status: int) -> None:
        self._c, self._status = c, status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._c, name)

    def ggml_backend_graph_compute(self, *_: Any) -> int:
        return self._status


def test_a_graph_without_memory_is_no_lost_device(library: ggml.Library, cpu: ggml.Device) -> None:
    with library.prepare(cpu, inputs.make(small(), 0)) as session:
        session._c = Failing(library.c, library.c.GGML_STATUS_ALLOC_FAILED)
        with pytest.raises(errors.Environment, match=r"CPU: .*memory.* for FLASH_ATTN_BACK") as caught:
            session.compute()
        assert not isinstance(caught.value, errors.Lost)
        session._c = Failing(library.c, -1)
        with pytest.raises(errors.Lost, match=f"{errors.LOST}: CPU: .* for FLASH_ATTN_BACK"):
            session.compute()
        session._c = library.c


def test_a_device_lost_in_the_middle_leaves_a_partial_receipt_and_is_exit_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute, runs = ggml.Session.compute, 0

    def second_fails(session: ggml.Session) -> float:
        nonlocal runs
        runs += 1
        if runs > 1:
            raise errors.Lost("CPU: it fell off the bus")
        return compute(session)

    monkeypatch.setattr(ggml.Session, "compute", second_fails)
    listed = f"{CASE},{OTHER},{small(kv=22)}"
    code = cli.main(["oracle", "-b", "CPU", "-o", listed, "--receipts", str(tmp_path), "--no-monitor"])
    assert code == errors.Lost.exit_code
    streams = capsys.readouterr()
    assert "stopped after 1 of 3 cases" in streams.out
    assert f"pyharness oracle: {errors.LOST}: CPU: it fell off the bus" in streams.err
    (path,) = tmp_path.glob("*.json")
    body = statement.read(path)["predicate"]["receipt"]
    assert body["partial"] is True
    assert [record["case"] for record in body["cases"]] == [CASE]
    assert runs == 2
