"""Check a device end to end and leave everything in one flat folder: summary.json, log.txt and the receipts.

steps
  info       what is built, which devices, the driver
  oracle     the whole case list against float64
  hopper, mma, rows  the same with the CUDA backend held to that kernel path
  target     the reference shape (24 heads of 256, 2048 queries, 75520 keys, q8_0) against the full float64 reference
  repeat     the same bits in every repeat while another stream of the device is busy
  random     random shapes: what supports_op accepts must run and be right, and every refusal has a reason
  sanitizer  compute-sanitizer's memcheck, initcheck, racecheck and synccheck on a short list, every kernel path
  properties  identities that need no reference, over random shapes (pytest and hypothesis)
  public     the tests of hand-computed values, invariants, corners, pairs and publicly reported failures (pytest)
  soak       mixed shapes on two streams beside memory that comes and goes: the same bits, no growth
  memory     too little device memory for the workspace: right, or a graph that fails in words
  large      publicly reported failures of sizes beyond 2^31 elements
  broken     an error of the device in the middle of a run: words and a partial receipt
  backend-ops  upstream's test-backend-ops in its four modes (perf on some shapes), where it was built
  perf       timings with ggml's unfused graph, PyTorch and FlashAttention-3 beside them

Each step runs in processes of its own under a time box; one that is full is interrupted, and what was done is kept.
With --beside soak the steps from oracle to public run while the soak does.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ..base import build, cuda, errors, system
from ..base.digest import ROOT
from ..case.cases import OP, Case
from ..device import ggml
from ..receipts import summary
from ..training import train
from . import shapes
from .oracle import ABORTED

T = TypeVar("T")
R = TypeVar("R")
Found = dict[str, Any]
"""What a step found: `state`, `exit_code`, `text`, and figures of its own."""

TARGET = "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=24,nhkv=4,kv=75520,nb=2048,type_K=q8_0,type_V=q8_0)"
BOXES: dict[str, float] = {
    "info": 60, "oracle": 900, "hopper": 600, "mma": 600, "rows": 600, "target": 900, "repeat": 300, "random": 300,
    "sanitizer": 900, "properties": 300, "public": 600, "soak": 900, "memory": 300, "large": 300, "broken": 60,
    "backend-ops": 600, "perf": 1500,
}  # fmt: skip
"""Seconds of each step's time box."""

BESIDE = ("oracle", "hopper", "mma", "rows", "target", "repeat", "random", "sanitizer", "properties", "public")
"""Steps that neither time anything nor fill the device."""

ON_DEVICE = (
    "tests/operator/test_public_reports.py",
    "tests/operator/test_reported_values.py",
    "tests/operator/test_hand.py",
    "tests/operator/test_invariants.py",
    "tests/operator/test_corners.py",
    "tests/operator/test_pair.py",
)
ON_DEVICE_TRAINING = "tests/training/test_public_training.py"
FAULTS = "tests/operator/test_faulty_device.py"

SANITIZED = (
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=97,nb=66)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=2,nhkv=1,kv=160,nb=65,type_K=q8_0,type_V=q8_0,sinks=1)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=2,nhkv=2,kv=130,nb=70,mask=docs:9)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=2,nhkv=2,kv=70,nb=64,mask=docs:9,softcap=10)",
    "FLASH_ATTN_BACK(hsk=80,hsv=80,nh=4,nhkv=4,kv=80,nb=70,type_K=bf16,type_V=f32,mask=rows,layout=cache)",
    "FLASH_ATTN_BACK(hsk=192,hsv=128,nh=2,nhkv=1,kv=90,nb=20,mask=bias,max_bias=8,kv_first=64,kv_count=26)",
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nhkv=2,kv=30,nb=40,type_K=f32,type_V=f32,layout=strided,prec=f32)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=2,nhkv=1,kv=300,nb=1,o=1)",
    # what fills a device: the fused kernels of mma; keys shared among blocks and dS in memory on hopper
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=22,nhkv=11,kv=200,nb=150,ns=4)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=22,nhkv=11,kv=200,nb=150,ns=4,type_K=q8_0,type_V=q8_0,sinks=1)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=2,nhkv=1,kv=1100,nb=70,sinks=1)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=3,nhkv=1,kv=1100,nb=128)",
)
UPSTREAM_TIMED = r"kv=4096,nb=4096(,type_K=\w+,type_V=\w+)?$"
"""The timed cases that test-backend-ops takes, by head size and type; it needs seconds to fill the tensors of each."""

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
FOUND = 99  # compute-sanitizer's exit code when it found something


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """gpucheck's options."""
    add, jobs = parser.add_argument, max(1, min(4, (os.cpu_count() or 1) // 4))
    add("steps", nargs="*", metavar="STEP", help=f"of {', '.join(BOXES)} (default: all, in this order)")
    add("-b", dest="backend", default="CUDA0", metavar="DEVICE", help="device (default: CUDA0)")
    add("--libs", type=Path, metavar="DIR", help="libraries built elsewhere (default: the preset's build)")
    add("--preset", default="cuda", help="CMake preset whose build is used (default: cuda)")
    default = ROOT / "build/gpu-check"
    add("--out", type=Path, default=default, metavar="DIR", help="results (default: build/gpu-check)")
    add("--box", action="append", default=[], metavar="STEP=SECONDS", help="another time box; may be repeated")
    add("--seed", type=int, default=0, help="base seed (default: 0)")
    add("--threads", type=int, default=0, metavar="N", help="of the CPU device (default: all cores)")
    add("--repeats", type=int, default=1000, metavar="N", help="of each case in repeat and path (default: 1000)")
    add("--random", type=int, default=3000, metavar="N", help="shapes in random, for each path (default: 3000)")
    add("--perf", action="append", default=[], metavar="ARG", help="hand ARG to perf, as in --perf=-p --perf=nb=4096")
    add("--pytest", action="append", default=[], metavar="ARG", help="hand ARG to pytest: --pytest=--vocabulary=FILE")
    add("--examples", type=int, default=100, metavar="N", help="of each property (default: 100)")
    add("--soak", type=float, default=480, metavar="S", help="seconds of soak, once prepared (default: 480)")
    add("--beside", choices=("soak",), help="run what only checks correctness while the soak does")
    add("--lanes", type=int, default=2, metavar="N", help="steps at a time beside it (default: 2)")
    add("--jobs", type=int, default=jobs, metavar="N", help="processes of random (default: %(default)s here)")


def run(args: argparse.Namespace) -> int:
    """Run the steps; 0 when all passed, 1 when one failed or its time was up, 3 when none ran or the device is lost."""
    heed_interrupts()
    steps = args.steps or list(BOXES)
    unknown = [step for step in steps if step not in BOXES]
    if unknown:
        raise errors.Usage(f"{unknown[0]}: not a step", hint=f"steps: {', '.join(BOXES)}")
    if args.beside and args.beside not in steps:
        raise errors.Usage(f"--beside {args.beside}: it is none of the steps")
    boxes = dict(BOXES)
    for item in args.box:
        step, equals, seconds = item.partition("=")
        if step not in BOXES or not equals or not seconds.replace(".", "", 1).isdigit():
            raise errors.Usage(f"--box {item}: write STEP=SECONDS, STEP of {', '.join(BOXES)}")
        boxes[step] = float(seconds)
    cuda.require(args.backend)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "log.txt").open("a", encoding="utf-8") as log:
        states = _Check(args, boxes, log, steps).run(steps)
    print(f"results in {args.out}", file=sys.stderr)
    return exit_code(states)


def exit_code(states: set[str]) -> int:
    """Of a check whose steps ended in these states."""
    if "LOST" in states:
        return errors.Lost.exit_code
    return 1 if states & {"FAILED", "TIME"} else 0 if "ok" in states else errors.Environment.exit_code


if sys.platform == "win32":  # sends an interrupt to all of a group
    INTERRUPT, GROUP = signal.CTRL_BREAK_EVENT, subprocess.CREATE_NEW_PROCESS_GROUP
else:
    INTERRUPT, GROUP = signal.SIGINT, 0


def heed_interrupts() -> None:
    """Take SIGINT again where a job in the background was started to ignore it: what it runs would ignore it, too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Check:
    """Runs steps one after the other, or beside the soak, and keeps summary.json current."""

    def __init__(self, args: argparse.Namespace, boxes: dict[str, float], log: TextIO, asked: Sequence[str]) -> None:
        libs = ggml.find_libraries(args.libs, args.preset)
        self._summary = summary.Summary(args.out, libs, args.backend, args.seed, asked)
        self._args, self._boxes, self._log, self._lock = args, boxes, log, threading.Lock()
        self._found: dict[str, Found] = {}
        self._stopped, self._progress, self._running = threading.Event(), build.Progress("gpucheck"), list[str]()

    def run(self, steps: Sequence[str]) -> set[str]:
        """The states that the steps ended in."""
        beside = [step for step in steps if step in BESIDE] if self._args.beside else []
        with self._progress:
            for step in steps:
                if step == self._args.beside and beside:
                    self._both(step, beside)
                elif step not in beside:
                    self._step(step)
        return {found["state"] for found in self._found.values()}

    def _both(self, long: str, beside: Sequence[str]) -> None:
        runner = self._runner(long, sum(self._boxes[step] for step in (long, *beside)))
        runner.released.clear()
        thread = threading.Thread(target=self._step, args=(long, runner))
        thread.start()
        try:
            while thread.is_alive() and not runner.ready.wait(0.1):
                pass
            runner.each(self._step, beside, self._args.lanes)
        except BaseException:
            self._stopped.set()
            raise
        finally:
            runner.released.set()
            thread.join()

    def _runner(self, step: str, box: float) -> _Runner:
        return _Runner(step, self._args, self._log, time.monotonic() + box, self._stopped)

    def _step(self, step: str, runner: _Runner | None = None) -> None:
        begin = time.monotonic()
        with self._lock:
            self._running.append(step)
            self._progress.say(", ".join(self._running))
        if any(found["state"] == "LOST" for found in self._found.values()):
            found = _state(errors.Environment.exit_code, errors.LOST)
        else:
            try:
                found = _STEPS[step](runner or self._runner(step, self._boxes[step]))
            except errors.Failure as error:
                found = _state(error.exit_code, str(error))
        found["seconds"] = round(time.monotonic() - begin, 1)
        with self._lock:
            self._found[step] = found
            steps = {name: self._found[name] for name in BOXES if name in self._found}
            self._summary.write(steps, exit_code({found["state"] for found in steps.values()}))
            self._running.remove(step)
            self._progress.say(", ".join(self._running))
            self._progress.print(f"{step:11} {found['state']:9} {found['seconds']:8.1f} s  {found['text']}")


class _Runner:
    """Runs a step's processes within its time box, everything they print into the log."""

    def __init__(self, step: str, args: argparse.Namespace, log: TextIO, end: float, stopped: threading.Event) -> None:
        self.step, self.args, self._log, self._end, self._stopped = step, args, log, end, stopped
        self.ready, self.released = threading.Event(), threading.Event()
        self.released.set()

    def left(self) -> float:
        """Seconds left in the box, none once the check is stopped."""
        return 0.0 if self._stopped.is_set() else max(0.0, self._end - time.monotonic())

    def share(self, of: int) -> _Runner:
        """A runner for one of `of` equal parts of what is left."""
        return _Runner(self.step, self.args, self._log, time.monotonic() + self.left() / of, self._stopped)

    def each(self, call: Callable[[T], R], items: Iterable[T], jobs: int) -> list[R]:
        """`call` of each item, so many at a time; an interrupt is no reason to wait for what runs."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                return list(pool.map(call, items))
            except BaseException:
                self._stopped.set()
                raise

    @property
    def libs(self) -> Path:
        """The folder of the libraries."""
        return ggml.find_libraries(self.args.libs, self.args.preset)

    @property
    def on_cuda(self) -> bool:
        """Whether the device is one of CUDA's."""
        return str(self.args.backend).startswith("CUDA")

    def pyharness(
        self, verb: str, *words: Any, wrap: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> tuple[int | None, list[str]]:
        """Run a verb on the device (under `wrap`); exit code (None: the box was full) and lines."""
        where = ("--libs", self.args.libs) if self.args.libs else ("--preset", self.args.preset)
        command = (*wrap, sys.executable, "-m", "pyharness", verb, "-b", self.args.backend, *words, *where)
        return self.command(*map(str, command), env=env)

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> tuple[int | None, list[str]]:
        """Run a program in the tree's root; interrupted when the time box is full or this process is to end, killed if
        it does not end then.

        Its stdin ends once `released` is set; `ready` is set when it prints that word."""
        more = dict(env or {})
        self._note(f"$ {' '.join([*(f'{name}={value}' for name, value in more.items()), *words])}")
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"} | more
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, text=True, errors="replace", creationflags=GROUP, **pipes
            )
        except OSError as e:
            self._note(str(e))
            return 127, [str(e)]
        lines: list[str] = []
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def read() -> None:
            with stdout:
                for line in stdout:
                    lines.append(line.rstrip("\n"))
                    self._note(lines[-1])
                    if lines[-1] == "ready":
                        self.ready.set()

        def hold() -> None:
            with stdin:
                self.released.wait()

        reader, holder = (threading.Thread(target=target, daemon=True) for target in (read, hold))
        reader.start()
        holder.start()
        try:
            while (code := process.poll()) is None and self.left():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(self.left(), 1))
        finally:
            if process.poll() is None:
                process.send_signal(INTERRUPT)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            reader.join(10)
        self._note(f"-> {'time box full' if code is None else f'exit {code}'}")
        return code, lines

    def _note(self, line: str) -> None:
        self._log.write(f"{self.step}: {line}\n")
        self._log.flush()


def _state(code: int | None, text: str, **more: Any) -> Found:
    state = "TIME" if code is None else {0: "ok", errors.Environment.exit_code: "not run"}.get(code, "FAILED")
    if state == "not run" and f": {errors.LOST}: " in text:
        state = "LOST"
    return {"state": state, "exit_code": code, "text": text, **more}


def _not_run(text: str) -> Found:
    return _state(errors.Environment.exit_code, text)


def _last(lines: Sequence[str]) -> str:
    """The line that says most: the error, else the last one."""
    said = [line for line in lines if line.strip() and not line.startswith("receipt ")]
    telling = [line for line in said if line.startswith("pyharness ") or "CUDA error: " in line]
    return telling[0] if telling else said[-1] if said else ""


def _worst(codes: Iterable[int | None]) -> int | None:
    """Of several exit codes that of a failure, else None for a full box, else 0 where one is."""
    codes = list(codes)
    refused = errors.Environment.exit_code
    wrong = [code for code in codes if code not in (0, None, refused)]
    return wrong[0] if wrong else None if None in codes else 0 if 0 in codes else refused


def _info(runner: _Runner) -> Found:
    code, lines = runner.pyharness("doctor")
    runner.command("nvidia-smi")
    return _state(code, next((line for line in lines if runner.args.backend in line), _last(lines)).strip())


def _oracle(runner: _Runner, *words: Any, env: Mapping[str, str] | None = None) -> Found:
    args = runner.args
    common = ("--seed", args.seed, "--threads", args.threads, "--receipts", args.out, "--timeout", runner.left())
    code, lines = runner.pyharness("oracle", *common, *words, env=env)
    failed = [line.strip() for line in lines if line.startswith("failed")]
    worst = [line.strip() for line in lines if "worst NMSE" in line]
    said = [line for line in lines if re.search(r"\d cases?: ", line)] if failed or not code else []
    return _state(code, said[-1] if said else _last(lines), failed=failed, worst=worst)


def _path(path: str) -> Callable[[_Runner], Found]:
    def run_path(runner: _Runner) -> Found:
        if not runner.on_cuda:
            return _not_run(f"{runner.args.backend} has no path {path}")
        return _oracle(runner, env={cuda.KERNEL_PATH: path})

    return run_path


def _each_path(runner: _Runner, step: Callable[[_Runner, dict[str, str]], Found], *paths: str) -> Found:
    """A step with the path that CUDA chooses, then held to each of `paths`; elsewhere just the step."""
    if not runner.on_cuda:
        return step(runner, {})
    found = {
        path or "chosen": step(runner.share(len(paths) + 1 - n), {cuda.KERNEL_PATH: path} if path else {})
        for n, path in enumerate(("", *paths))
    }
    order = ("LOST", "FAILED", "TIME", "ok", "not run")
    worst = min(found.values(), key=lambda one: order.index(one["state"]))
    return worst | {"text": "; ".join(f"{path}: {x['text']}" for path, x in found.items()), "paths": found}


def _repeat(runner: _Runner) -> Found:
    def step(runner: _Runner, env: dict[str, str]) -> Found:
        repeats = runner.args.repeats
        found = _oracle(runner, "-o", ",".join(shapes.REPEATED), "--repeat", repeats, "--busy", "--no-monitor", env=env)
        return (
            found | {"text": f"{found['text']}, {repeats} runs each beside another stream"} if found["worst"] else found
        )

    return _each_path(runner, step, *cuda.PATHS[1:])  # what hopper takes of the list it is chosen for


def _random(runner: _Runner) -> Found:
    """Shapes through the oracle, shared out among processes. One that dies is told with the case that it was at, and
    the next goes on behind that."""
    rng = random.Random(runner.args.seed)
    listed = shapes.random_cases(rng, runner.args.random)

    def step(runner: _Runner, env: dict[str, str]) -> Found:
        return _judged(runner, listed, env)

    return _each_path(runner, step, *cuda.PATHS)


def _judged(runner: _Runner, listed: Sequence[Case], env: Mapping[str, str]) -> Found:
    """What the oracle says of each case: counts, refusals by their reason, failures, aborts."""
    args, jobs = runner.args, runner.args.jobs
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    env = {"PYTHONUNBUFFERED": "1", **env} | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    counts, refusals, failed, aborted = Counter[str](), Counter[str](), list[str](), list[str]()

    def count(case: str, status: str, reason: str) -> None:
        if status == "unsupported" and reason.strip():
            refusals[reason] += 1
        elif status == "unsupported":
            status, reason = "failed", "refused without a reason"
        if reason.startswith(ABORTED):
            aborted.append(f"{case}: {reason}")
            return
        counts["refused" if status == "unsupported" else status] += 1
        if status == "failed":
            failed.append(f"{case}: {reason}")

    def part(own: Sequence[Case]) -> tuple[int | None, str]:
        while True:
            with tempfile.NamedTemporaryFile("w", suffix=".def") as file:
                file.write("".join(f"{case}\n" for case in own))
                file.flush()
                plain = ("--no-receipt", "--no-monitor", "--output", "csv")
                words = ("--case-file", file.name, "--seed", args.seed, "--threads", args.threads, *plain)
                code, lines = runner.pyharness("oracle", *words, env=env)
            own_lines = (line for line in lines if line.startswith(f"{args.backend},{chr(34)}{OP}("))
            rows = {row[1]: row for row in csv.reader(own_lines)}
            for case, row in rows.items():
                count(case, row[3], row[4])
            own, rest = own[len(rows) :], own[len(rows) + 1 :]
            if not own:
                return 0, ""
            if code in (None, errors.INTERRUPTED, errors.Usage.exit_code, errors.Environment.exit_code):
                return code, _last(lines)
            if code == 1 and any(row[4].startswith(ABORTED) for row in rows.values()):
                continue
            said = [
                line.strip() for line in lines[-40:] if "error" in line.lower() and not line.startswith(args.backend)
            ]
            words_ = "; ".join(dict.fromkeys(said)) or _last(lines)
            aborted.append(f"{own[0]}: the process ended with {code}: {words_}")
            own = rest

    ends = runner.each(part, [listed[n::jobs] for n in range(min(jobs, len(listed)))], jobs)
    code = 1 if aborted or failed else _worst(code for code, _ in ends)
    text = ", ".join(f"{counts[kind]} {kind}" for kind in ("ok", "failed", "refused", "skipped"))
    if code not in (None, 0, 1):
        text = next(last for ended, last in ends if ended == code)
    else:
        text += f", {len(aborted)} aborted"
    figures = {"counts": dict(counts), "failed": failed, "aborted": aborted}
    return _state(code, text, **figures, refusals=dict(refusals.most_common()))


def _soak(runner: _Runner) -> Found:
    args = runner.args
    words = ("--seconds", args.soak, "--within", runner.left(), "--seed", args.seed, "--threads", args.threads)
    code, lines = runner.pyharness("soak", *words, "--hold")
    found: Found = next((json.loads(line[5:]) for line in lines if line.startswith("soak\t")), {})
    return _state(code, _last(lines), **found)


def _pytest(runner: _Runner, *words: str, env: Mapping[str, str] | None = None, jobs: int | None = None) -> Found:
    plugins = ["pytest_timeout", "_hypothesis_pytestplugin"]
    missing = [name for name in ("pytest", *plugins) if find_spec(name) is None]
    if missing:
        return _not_run(f"{', '.join(missing)} not installed")
    args, jobs = runner.args, jobs or runner.args.jobs
    more = {"PYHARNESS_LIBS": str(runner.libs), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | system.search(runner.libs)
    parallel = find_spec("xdist") is not None and jobs > 1
    common = [word for plugin in [*plugins, *["xdist.plugin"] * parallel] for word in ("-p", plugin)]
    common += ["-n", str(jobs)] * parallel
    common += ["-q", "-rfx", "-W", "default", "--tb=short", "-p", "no:cacheprovider", "--device", args.backend]
    code, lines = runner.command(
        sys.executable, "-m", "pytest", *common, *words, *args.pytest, env=more | dict(env or {})
    )
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return _state(code if code in (0, None) else 1, _last(lines), failed=failed)


def _properties(runner: _Runner) -> Found:
    examples = {"PYHARNESS_EXAMPLES": str(runner.args.examples)}
    return _pytest(runner, f"--hypothesis-seed={runner.args.seed}", "tests/operator/test_properties.py", env=examples)


def _public(runner: _Runner) -> Found:
    training = [ON_DEVICE_TRAINING] if (runner.libs / system.program(train.PROGRAM)).exists() else []
    return _pytest(runner, "-m", "not large", *ON_DEVICE, *training)


def _cuda_tests(*words: str) -> Callable[[_Runner], Found]:
    """A step of tests, one after the other, for devices with memory of their own."""

    def run_tests(runner: _Runner) -> Found:
        if not runner.on_cuda:
            return _not_run(f"{runner.args.backend} has no memory of its own")
        return _pytest(runner, *words, jobs=1)

    return run_tests


def _backend_ops(runner: _Runner) -> Found:
    program = runner.libs / "test-backend-ops"
    if not program.exists():
        return _not_run(f"no test-backend-ops in {runner.libs}")
    modes, found = ("test", "support", "grad", "perf"), dict[str, Found]()
    for number, mode in enumerate(modes):
        timed = ("-p", UPSTREAM_TIMED) if mode == "perf" else ()
        words = (str(program), mode, "-b", runner.args.backend, "-o", OP, *timed)
        code, lines = runner.share(len(modes) - number).command(*words, env=system.search(runner.libs))
        said = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines]
        failed = [line for line in said if line.startswith(OP) and "FAIL" in line]
        text = next((x for x in said if " tests passed" in x), _last(said))
        found[mode] = {"exit_code": code, "text": text, "failed": failed}
    codes = [item["exit_code"] for item in found.values()]
    wrong = [code for code in codes if code]
    text = "; ".join(f"{mode}: {item['text']}" for mode, item in found.items())
    return _state(wrong[0] if wrong else None if None in codes else 0, text, modes=found)


def _sanitizer(runner: _Runner) -> Found:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return _not_run("compute-sanitizer is not installed")

    def check(item: tuple[str, str]) -> tuple[int | None, str]:
        path, tool = item
        wrap = (program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20")
        words = ("--no-receipt", "--no-monitor", "-o", ",".join(SANITIZED))
        code, lines = runner.pyharness("oracle", *words, wrap=wrap, env={cuda.KERNEL_PATH: path})
        said = (line for line in reversed(lines) if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line)
        return code, next(said, _last(lines)).strip("= ")

    checks = [(path, tool) for path in cuda.PATHS for tool in TOOLS]
    ends = runner.each(check, checks, runner.args.jobs)
    found = {f"{path} {tool}": text for (path, tool), (_, text) in zip(checks, ends, strict=True)}
    return _state(_worst(code for code, _ in ends), "; ".join(f"{check}: {text}" for check, text in found.items()))


def _perf(runner: _Runner) -> Found:
    named = [word for peer in ("mma", "unfused", "torch", "fa3") for word in ("--peer", peer)]
    words = ("--seed", runner.args.seed, "--receipts", runner.args.out, *named, *runner.args.perf)
    code, lines = runner.pyharness("perf", *words)
    verdicts = [line for line in lines if ": against " in line]
    return _state(code, _last(lines) if code else f"{len(verdicts)} comparisons", comparisons=verdicts)


_STEPS: dict[str, Callable[[_Runner], Found]] = {
    "info": _info,
    "oracle": _oracle,
    **{path: _path(path) for path in cuda.PATHS},
    "target": lambda runner: _oracle(runner, "-o", TARGET),
    "repeat": _repeat,
    "random": _random,
    "sanitizer": _sanitizer,
    "properties": _properties,
    "public": _public,
    "soak": _soak,
    "memory": _cuda_tests(FAULTS, "-k", "memory"),
    "large": _cuda_tests("-m", "large", *ON_DEVICE),
    "broken": _cuda_tests(FAULTS, "-k", "address"),
    "backend-ops": _backend_ops,
    "perf": _perf,
}
