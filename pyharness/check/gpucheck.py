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
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ..base import build, cuda, errors
from ..base.digest import ROOT
from ..case.cases import OP
from ..device import ggml
from ..receipts import statement, summary
from ..training import train
from . import stress

T = TypeVar("T")
R = TypeVar("R")

TARGET = "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=24,nhkv=4,kv=75520,nb=2048,type_K=q8_0,type_V=q8_0)"
BOXES = {
    "info": 60,
    "oracle": 900,
    "hopper": 600,
    "mma": 600,
    "rows": 600,
    "target": 900,
    "repeat": 300,
    "random": 300,
    "sanitizer": 900,
    "properties": 300,
    "public": 600,
    "soak": 900,
    "memory": 300,
    "large": 300,
    "broken": 60,
    "backend-ops": 600,
    "perf": 1500,
}
"""Seconds of each step's time box."""

BESIDE = ("oracle", "hopper", "mma", "rows", "target", "repeat", "random", "sanitizer", "properties", "public")
"""Steps that neither time anything nor fill the device."""

ON_DEVICE = (
    "tests/operator/test_public_reports.py",
    "tests/operator/test_hand.py",
    "tests/operator/test_invariants.py",
    "tests/operator/test_corners.py",
    "tests/operator/test_pair.py",
)
ON_DEVICE_TRAINING = "tests/training/test_public_training.py"

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
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(BOXES)} (default: all, in this order)")
    parser.add_argument("-b", dest="backend", default="CUDA0", metavar="DEVICE", help="device (default: CUDA0)")
    parser.add_argument(
        "--libs", type=Path, metavar="DIR", help="libraries built elsewhere (default: the preset's build)"
    )
    parser.add_argument("--preset", default="cuda", help="CMake preset whose build is used (default: cuda)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/gpu-check", metavar="DIR", help="results (default: build/gpu-check)"
    )
    parser.add_argument(
        "--box", action="append", default=[], metavar="STEP=SECONDS", help="another time box; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="base seed (default: 0)")
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1000,
        metavar="N",
        help="repeats of each case in repeat, for each path (default: 1000)",
    )
    parser.add_argument(
        "--random", type=int, default=3000, metavar="N", help="shapes in random, for each path (default: 3000)"
    )
    parser.add_argument(
        "--perf", action="append", default=[], metavar="ARG", help="hand ARG to perf, as in --perf=-p --perf=nb=4096"
    )
    parser.add_argument(
        "--pytest",
        action="append",
        default=[],
        metavar="ARG",
        help="hand ARG to pytest, as in --pytest=--vocabulary=FILE",
    )
    parser.add_argument("--examples", type=int, default=100, metavar="N", help="of each property (default: 100)")
    parser.add_argument(
        "--soak",
        type=float,
        default=480,
        metavar="S",
        help="seconds of soak, at least, once prepared (default: 480)",
    )
    parser.add_argument("--beside", choices=("soak",), help="run what only checks correctness while the soak does")
    parser.add_argument("--lanes", type=int, default=2, metavar="N", help="steps at a time beside it (default: 2)")
    jobs = max(1, min(4, (os.cpu_count() or 1) // 4))
    parser.add_argument(
        "--jobs", type=int, default=jobs, metavar="N", help="processes of random (default: %(default)s here)"
    )
    parser.add_argument("--inner", choices=stress.INNER, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--within", type=float, default=sys.float_info.max, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the steps; 0 when all passed, 1 when one failed or its time was up, 3 when none ran or the device is lost."""
    if args.inner:
        return stress.INNER[args.inner](args)
    heed_interrupts()
    steps = args.steps or list(BOXES)
    unknown = [step for step in steps if step not in BOXES]
    if unknown:
        raise errors.Usage(f"{unknown[0]}: not a step", hint=f"steps: {', '.join(BOXES)}")
    if args.beside and args.beside not in steps:
        raise errors.Usage(f"--beside {args.beside}: it is none of the steps")
    boxes: dict[str, float] = dict(BOXES)
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
        self._found: dict[str, dict[str, Any]] = {}
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

    def pyharness(
        self, *words: str, wrap: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> tuple[int | None, list[str]]:
        """Run a verb (under `wrap`); exit code (None: the box was full) and lines."""
        where = ["--libs", str(self.args.libs)] if self.args.libs else ["--preset", self.args.preset]
        return self.command(*wrap, sys.executable, "-m", "pyharness", *words, *where, env=env)

    def command(self, *words: str, env: dict[str, str] | None = None) -> tuple[int | None, list[str]]:
        """Run a program in the tree's root; interrupted when the time box is full or this process is to end, killed if
        it does not end then.

        Its stdin ends once `released` is set; `ready` is set when it prints that word."""
        more = env or {}
        self._note(f"$ {' '.join([*(f'{name}={value}' for name, value in more.items()), *words])}")
        lines: list[str] = []
        try:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=os.environ | {"GGML_NO_BACKTRACE": "1"} | more,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as e:
            self._note(str(e))
            return 127, [str(e)]
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

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
                process.send_signal(signal.SIGINT)
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


def _state(code: int | None, text: str, **more: Any) -> dict[str, Any]:
    state = "TIME" if code is None else {0: "ok", errors.Environment.exit_code: "not run"}.get(code, "FAILED")
    if state == "not run" and f": {errors.LOST}: " in text:
        state = "LOST"
    return {"state": state, "exit_code": code, "text": text, **more}


def _last(lines: list[str]) -> str:
    """The line that says most: the error, else the last one."""
    said = [line for line in lines if line.strip() and not line.startswith("receipt ")]
    telling = [line for line in said if line.startswith("pyharness ") or "CUDA error: " in line]
    return telling[0] if telling else said[-1] if said else ""


def _info(runner: _Runner) -> dict[str, Any]:
    code, lines = runner.pyharness("doctor", "-b", runner.args.backend)
    runner.command("nvidia-smi")
    return _state(code, next((line for line in lines if runner.args.backend in line), _last(lines)).strip())


def _oracle(runner: _Runner, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    args = runner.args
    common = (
        "-b",
        args.backend,
        "--seed",
        str(args.seed),
        "--receipts",
        str(args.out),
        "--timeout",
        str(runner.left()),
    )
    code, lines = runner.pyharness("oracle", *common, *words, env=env)
    failed = [line.strip() for line in lines if line.startswith("failed")]
    worst = [line.strip() for line in lines if "worst NMSE" in line]
    summary = [line for line in lines if re.search(r"\d cases?: ", line)] if failed or not code else []
    return _state(code, summary[-1] if summary else _last(lines), failed=failed, worst=worst)


def _path(path: str) -> Callable[[_Runner], dict[str, Any]]:
    def run_path(runner: _Runner) -> dict[str, Any]:
        if not runner.args.backend.startswith("CUDA"):
            return _state(errors.Environment.exit_code, f"{runner.args.backend} has no path {path}")
        return _oracle(runner, env={cuda.KERNEL_PATH: path})

    return run_path


def _target(runner: _Runner) -> dict[str, Any]:
    return _oracle(runner, "-o", TARGET)


def _inner(
    runner: _Runner, step: str, *words: str, out: Path | None = None, env: dict[str, str] | None = None
) -> tuple[int | None, list[str]]:
    args = runner.args
    common = ("-b", args.backend, "--seed", str(args.seed), "--out", str(out or args.out), "--inner", step)
    return runner.pyharness("gpucheck", *common, "--threads", str(args.threads), *words, env=env)


def _each_path(
    runner: _Runner, step: Callable[[_Runner, dict[str, str]], dict[str, Any]], *paths: str
) -> dict[str, Any]:
    """A step with the path that CUDA chooses, then held to each of `paths`; elsewhere just the step."""
    if not runner.args.backend.startswith("CUDA"):
        return step(runner, {})
    found = {
        path or "chosen": step(runner.share(len(paths) + 1 - n), {cuda.KERNEL_PATH: path} if path else {})
        for n, path in enumerate(("", *paths))
    }
    worst = next(
        x for state in ("LOST", "FAILED", "TIME", "ok", "not run") for x in found.values() if x["state"] == state
    )
    return worst | {"text": "; ".join(f"{path}: {x['text']}" for path, x in found.items()), "paths": found}


def _repeat(runner: _Runner) -> dict[str, Any]:
    def step(runner: _Runner, env: dict[str, str]) -> dict[str, Any]:
        code, lines = _inner(runner, "repeat", "--repeats", str(runner.args.repeats), env=env)
        return _state(code, _last(lines))

    return _each_path(runner, step, *cuda.PATHS[1:])  # what hopper takes of the list it is chosen for


def _resumed(
    runner: _Runner, step: str, total: int, jobs: int, *words: str, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """A step whose inner processes, `jobs` at a time, print a line for each of `total` cases.

    An abort ends an inner process; the next one goes on after the case that aborted."""
    told = (None, 0, 1, errors.Usage.exit_code, errors.Environment.exit_code, errors.INTERRUPTED)
    counts, refusals, failed, aborted = Counter[str](), Counter[str](), list[str](), list[str]()
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    env = (env or {}) | ({"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads} if jobs > 1 else {})

    def part(first: int) -> tuple[int | None, str]:
        while True:
            code, lines = _inner(runner, step, "--first", str(first), "--stride", str(jobs), *words, env=env)
            done = 0
            for line in lines:
                kind, _, rest = line.partition("\t")
                if kind in ("ok", "failed", "refused", "skipped"):
                    done += 1
                    counts[kind] += 1
                    case, _, reason = rest.partition("\t")
                    if kind == "refused":
                        refusals[reason] += 1
                    if kind == "failed":
                        failed.append(f"{case}: {reason}")
            if code in told:
                return code, _last(lines)
            case = next((line for line in reversed(lines) if line.startswith("case\t")), "case\tno case had begun")
            said = [line for line in lines[-40:] if "error" in line.lower() and "\t" not in line]
            words_ = "; ".join(dict.fromkeys(line.strip() for line in said)) or _last(lines)
            aborted.append(f"{case.partition(chr(9))[2]}: the process ended with {code}: {words_}")
            first += (done + 1) * jobs
            if first >= total:
                return 1, words_

    ends = runner.each(part, range(jobs), jobs)
    codes = [code for code, _ in ends]
    text = (
        ", ".join(f"{counts[kind]} {kind}" for kind in ("ok", "failed", "refused", "skipped"))
        + f", {len(aborted)} aborted"
    )
    code = None if None in codes else 1 if aborted or failed else max(code for code in codes if code is not None)
    if code not in (None, 0, 1):
        text = next(last for ended, last in ends if ended == code)
    found = {"counts": dict(counts), "failed": failed, "aborted": aborted, "refusals": dict(refusals.most_common())}
    return _state(code, text, **found)


def _random(runner: _Runner) -> dict[str, Any]:
    def step(runner: _Runner, env: dict[str, str]) -> dict[str, Any]:
        args = runner.args
        return _resumed(runner, "random", args.random, args.jobs, "--random", str(args.random), env=env)

    return _each_path(runner, step, *cuda.PATHS)


def _memory(runner: _Runner) -> dict[str, Any]:
    return _resumed(runner, "memory", len(stress.SQUEEZED) * len(stress.ROOM), 1)


def _soak(runner: _Runner) -> dict[str, Any]:
    code, lines = _inner(runner, "soak", "--soak", str(runner.args.soak), "--within", str(runner.left()))
    found: dict[str, Any] = next((json.loads(line[5:]) for line in lines if line.startswith("soak\t")), {})
    return _state(code, _last(lines), **found)


def _broken(runner: _Runner) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        code, lines = _inner(runner, "broken", out=Path(directory))
        bodies = [statement.read(path)["predicate"]["receipt"] for path in Path(directory).glob("*.json")]
    said = [line.strip() for line in lines if "error" in line.lower()]
    states = [[record["status"] for record in body["cases"]] for body in bodies if body["partial"]]
    if code not in (None, errors.Environment.exit_code):
        code = 0 if code == 1 and said and states == [["ok", "failed"]] else 1
    return _state(
        code, f"{said[0] if said else _last(lines)}; partial receipts of {states}" if bodies else _last(lines)
    )


def _pytest(runner: _Runner, *words: str, env: dict[str, str] | None = None, jobs: int | None = None) -> dict[str, Any]:
    plugins = ["pytest_timeout", "_hypothesis_pytestplugin"]
    missing = [name for name in ("pytest", *plugins) if find_spec(name) is None]
    if missing:
        return _state(errors.Environment.exit_code, f"{', '.join(missing)} not installed")
    args = runner.args
    libs = ggml.find_libraries(args.libs, args.preset)
    more = {"PYHARNESS_LIBS": str(libs), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | train.search(libs)
    jobs = jobs or args.jobs
    parallel = find_spec("xdist") is not None and jobs > 1
    common = [word for plugin in [*plugins, *["xdist.plugin"] * parallel] for word in ("-p", plugin)]
    common += ["-n", str(jobs)] * parallel
    common += ["-q", "-rfx", "-W", "default", "--tb=short", "-p", "no:cacheprovider", "--device", args.backend]
    code, lines = runner.command(sys.executable, "-m", "pytest", *common, *words, *args.pytest, env=more | (env or {}))
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return _state(code if code in (0, None) else 1, _last(lines), failed=failed)


def _properties(runner: _Runner) -> dict[str, Any]:
    examples = {"PYHARNESS_EXAMPLES": str(runner.args.examples)}
    return _pytest(runner, f"--hypothesis-seed={runner.args.seed}", "tests/operator/test_properties.py", env=examples)


def _public(runner: _Runner) -> dict[str, Any]:
    libs = ggml.find_libraries(runner.args.libs, runner.args.preset)
    training = [ON_DEVICE_TRAINING] if (libs / train.PROGRAM).exists() else []
    return _pytest(runner, "-m", "not large", *ON_DEVICE, *training)


def _large(runner: _Runner) -> dict[str, Any]:
    if not runner.args.backend.startswith("CUDA"):
        return _state(errors.Environment.exit_code, "sizes for GPUs")
    return _pytest(runner, "-m", "large", *ON_DEVICE, jobs=1)


def _backend_ops(runner: _Runner) -> dict[str, Any]:
    args = runner.args
    libs = ggml.find_libraries(args.libs, args.preset)
    program = libs / "test-backend-ops"
    if not program.exists():
        return _state(errors.Environment.exit_code, f"no test-backend-ops in {libs}")
    modes = ("test", "support", "grad", "perf")
    found: dict[str, dict[str, Any]] = {}
    for number, mode in enumerate(modes):
        words = (str(program), mode, "-b", args.backend, "-o", OP, *(("-p", UPSTREAM_TIMED) if mode == "perf" else ()))
        code, lines = runner.share(len(modes) - number).command(*words, env=train.search(libs))
        said = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines]
        failed = [line for line in said if line.startswith(OP) and "FAIL" in line]
        found[mode] = {
            "exit_code": code,
            "text": next((x for x in said if " tests passed" in x), _last(said)),
            "failed": failed,
        }
    codes = [item["exit_code"] for item in found.values()]
    wrong = [code for code in codes if code]
    text = "; ".join(f"{mode}: {item['text']}" for mode, item in found.items())
    return _state(wrong[0] if wrong else None if None in codes else 0, text, modes=found)


def _sanitizer(runner: _Runner) -> dict[str, Any]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return _state(errors.Environment.exit_code, "compute-sanitizer is not installed")

    def check(item: tuple[str, str]) -> tuple[int | None, str]:
        path, tool = item
        options_ = ("--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20")
        words = ("oracle", "-b", runner.args.backend, "--no-receipt", "--no-monitor", "-o", ",".join(SANITIZED))
        code, lines = runner.pyharness(*words, wrap=(program, *options_), env={cuda.KERNEL_PATH: path})
        summary = (line for line in reversed(lines) if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line)
        return code, next(summary, _last(lines)).strip("= ")

    checks = [(path, tool) for path in cuda.PATHS for tool in TOOLS]
    ends = runner.each(check, checks, runner.args.jobs)
    found = {f"{path} {tool}": text for (path, tool), (_, text) in zip(checks, ends, strict=True)}
    codes = [code for code, _ in ends]
    refused = errors.Environment.exit_code  # a path that takes none of the cases
    wrong = [code for code in codes if code not in (0, None, refused)]
    worst = wrong[0] if wrong else None if None in codes else 0 if 0 in codes else refused
    return _state(worst, "; ".join(f"{check}: {text}" for check, text in found.items()))


def _perf(runner: _Runner) -> dict[str, Any]:
    args = runner.args
    words = (
        "-b",
        args.backend,
        "--seed",
        str(args.seed),
        "--receipts",
        str(args.out),
        "--peer",
        "mma",
        "--peer",
        "unfused",
        "--peer",
        "torch",
        "--peer",
        "fa3",
    )
    code, lines = runner.pyharness("perf", *words, *args.perf)
    verdicts = [line for line in lines if ": against " in line]
    return _state(code, _last(lines) if code else f"{len(verdicts)} comparisons", comparisons=verdicts)


_STEPS: dict[str, Callable[[_Runner], dict[str, Any]]] = {
    "info": _info,
    "oracle": _oracle,
    "hopper": _path("hopper"),
    "mma": _path("mma"),
    "rows": _path("rows"),
    "target": _target,
    "repeat": _repeat,
    "random": _random,
    "sanitizer": _sanitizer,
    "properties": _properties,
    "public": _public,
    "soak": _soak,
    "memory": _memory,
    "large": _large,
    "broken": _broken,
    "backend-ops": _backend_ops,
    "perf": _perf,
}
