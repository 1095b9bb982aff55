"""Check a device end to end and leave everything in one flat folder: summary.json, log.txt and the receipts.

steps
  info       what is built, which devices, the driver
  oracle     the whole case list against float64
  hopper, mma, rows  the same with the CUDA backend held to that kernel path
  target     the reference shape (24 heads of 256, 2048 queries, 75520 keys, q8_0) against the full float64 reference
  repeat     the same bits in every repeat while another stream of the device is busy
  random     random shapes: what supports_op takes must run and be right, and whatever it refuses says why
  sanitizer  compute-sanitizer's memcheck, initcheck, racecheck and synccheck on a short list, every kernel path
  perf       timings with ggml's unfused graph and PyTorch beside them

Each step runs in processes of its own under a time box; one that is full is interrupted, and what was done is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from . import cases, digest, errors, inputs, monitor, options, oracle, receipt
from .cases import Case
from .digest import ROOT

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
    "perf": 900,
}
"""Seconds of each step's time box."""

PATH = "GGML_CUDA_FATTN_BACK_PATH"

REPEATED = (
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=16,nhkv=4,kv=1024,nb=1024)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=8,nhkv=2,kv=2048,nb=64)",
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=8,nhkv=8,kv=512,nb=512,type_K=q8_0,type_V=q8_0,mask=swa:64)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=6,nhkv=1,kv=1024,nb=128,type_K=q8_0,type_V=q8_0,sinks=1)",
    "FLASH_ATTN_BACK(hsk=80,hsv=80,nh=4,nhkv=2,kv=333,nb=77,type_K=f32,type_V=bf16,mask=docs:50,softcap=20)",
)
BUSY = "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=4,nhkv=4,kv=512,nb=256)"

SANITIZED = (
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=97,nb=66)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=2,nhkv=1,kv=160,nb=65,type_K=q8_0,type_V=q8_0,sinks=1)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=2,nhkv=2,kv=130,nb=70,mask=docs:9)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=2,nhkv=2,kv=70,nb=64,mask=docs:9,softcap=10)",
    "FLASH_ATTN_BACK(hsk=80,hsv=80,nh=4,nhkv=4,kv=80,nb=70,type_K=bf16,type_V=f32,mask=rows,layout=cache)",
    "FLASH_ATTN_BACK(hsk=192,hsv=128,nh=2,nhkv=1,kv=90,nb=20,mask=bias,max_bias=8,kv_first=64,kv_count=26)",
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nhkv=2,kv=30,nb=40,type_K=f32,type_V=f32,layout=strided,prec=f32)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=2,nhkv=1,kv=300,nb=1,o=1)",
)
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
        "--repeats", type=int, default=1000, metavar="N", help="repeats of each case in repeat (default: 1000)"
    )
    parser.add_argument("--random", type=int, default=3000, metavar="N", help="shapes in random (default: 3000)")
    parser.add_argument(
        "--perf", action="append", default=[], metavar="ARG", help="hand ARG to perf, as in --perf=-p --perf=nb=4096"
    )
    parser.add_argument("--inner", choices=("repeat", "random"), help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the steps; 0 when all passed, 1 when one failed or ran out of time, 3 when nothing could run."""
    if args.inner:
        return {"repeat": _repeat, "random": _random}[args.inner](args)
    steps = args.steps or list(BOXES)
    unknown = [step for step in steps if step not in BOXES]
    if unknown:
        raise errors.Usage(f"{unknown[0]}: not a step", hint=f"steps: {', '.join(BOXES)}")
    boxes: dict[str, float] = dict(BOXES)
    for item in args.box:
        step, equals, seconds = item.partition("=")
        if step not in BOXES or not equals or not seconds.replace(".", "", 1).isdigit():
            raise errors.Usage(f"--box {item}: write STEP=SECONDS, STEP of {', '.join(BOXES)}")
        boxes[step] = float(seconds)
    args.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"device": args.backend, "patch": digest.patch_digest(), "steps": {}}
    with (args.out / "log.txt").open("a", encoding="utf-8") as log:
        for step in steps:
            runner = _Runner(args, log, time.monotonic() + boxes[step])
            begin = time.monotonic()
            found = _STEPS[step](runner)
            found["seconds"] = round(time.monotonic() - begin, 1)
            summary["steps"][step] = found
            (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            print(f"{step:10} {found['state']:9} {found['seconds']:8.1f} s  {found['text']}", flush=True)
    print(f"results in {args.out}", file=sys.stderr)
    states = {found["state"] for found in summary["steps"].values()}
    return 1 if states & {"FAILED", "TIME"} else 0 if "ok" in states else errors.Environment.exit_code


class _Runner:
    """Runs a step's processes within its time box, everything they print into the log."""

    def __init__(self, args: argparse.Namespace, log: TextIO, end: float) -> None:
        self.args, self._log, self._end = args, log, end

    def left(self) -> float:
        """Seconds left in the box."""
        return max(0.0, self._end - time.monotonic())

    def share(self, of: int) -> _Runner:
        """A runner for one of `of` equal parts of what is left."""
        return _Runner(self.args, self._log, time.monotonic() + self.left() / of)

    def pyharness(self, *words: str, wrap: tuple[str, ...] = (), path: str = "") -> tuple[int | None, list[str]]:
        """Run a verb (under `wrap`, held to a kernel path); exit code (None: the box was full) and lines."""
        where = ["--libs", str(self.args.libs)] if self.args.libs else ["--preset", self.args.preset]
        return self.command(*wrap, sys.executable, "-m", "pyharness", *words, *where, path=path)

    def command(self, *words: str, path: str = "") -> tuple[int | None, list[str]]:
        """Run a program in the tree's root; interrupted when the time box is full, killed if it does not end then."""
        print(f"$ {f'{PATH}={path} ' if path else ''}{' '.join(words)}", file=self._log, flush=True)
        lines: list[str] = []
        try:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=os.environ | ({PATH: path} if path else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as e:
            print(e, file=self._log, flush=True)
            return 127, [str(e)]

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    lines.append(line.rstrip("\n"))
                    self._log.write(line)
                    self._log.flush()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        code: int | None
        try:
            code = process.wait(self.left())
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(10)
        print(f"-> {'time box full' if code is None else f'exit {code}'}", file=self._log, flush=True)
        return code, lines


def _state(code: int | None, text: str, **more: Any) -> dict[str, Any]:
    state = "TIME" if code is None else {0: "ok", errors.Environment.exit_code: "not run"}.get(code, "FAILED")
    return {"state": state, "exit_code": code, "text": text, **more}


def _last(lines: list[str]) -> str:
    """The line that says most: the error, else the last one."""
    said = [line for line in lines if line.strip() and not line.startswith("receipt ")]
    return next((line for line in said if line.startswith("pyharness ")), said[-1] if said else "")


def _info(runner: _Runner) -> dict[str, Any]:
    code, lines = runner.pyharness("doctor", "-b", runner.args.backend)
    runner.command("nvidia-smi")
    return _state(code, next((line for line in lines if runner.args.backend in line), _last(lines)).strip())


def _oracle(runner: _Runner, *words: str, path: str = "") -> dict[str, Any]:
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
    code, lines = runner.pyharness("oracle", *common, *words, path=path)
    failed = [line.strip() for line in lines if line.startswith("failed")]
    worst = [line.strip() for line in lines if "worst NMSE" in line]
    summary = [line for line in lines if " cases: " in line] if failed or not code else []
    return _state(code, summary[-1] if summary else _last(lines), failed=failed, worst=worst)


def _path(path: str) -> Callable[[_Runner], dict[str, Any]]:
    def run_path(runner: _Runner) -> dict[str, Any]:
        if not runner.args.backend.startswith("CUDA"):
            return _state(errors.Environment.exit_code, f"{runner.args.backend} has no path {path}")
        return _oracle(runner, path=path)

    return run_path


def _target(runner: _Runner) -> dict[str, Any]:
    return _oracle(runner, "-o", TARGET)


def _inner(runner: _Runner, step: str, *words: str) -> tuple[int | None, list[str]]:
    args = runner.args
    common = ("-b", args.backend, "--seed", str(args.seed), "--out", str(args.out), "--inner", step)
    return runner.pyharness("gpucheck", *common, "--threads", str(args.threads), *words)


def _repeat_step(runner: _Runner) -> dict[str, Any]:
    code, lines = _inner(runner, "repeat", "--repeats", str(runner.args.repeats))
    return _state(code, _last(lines))


def _random_step(runner: _Runner) -> dict[str, Any]:
    """An abort ends the inner process; the next one goes on after the case that aborted."""
    first, aborts, counts, refusals, failed = 0, [], Counter[str](), Counter[str](), []
    while first < runner.args.random:
        code, lines = _inner(runner, "random", "--random", str(runner.args.random), "--first", str(first))
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
        if code in (0, 1, errors.Environment.exit_code, errors.Usage.exit_code) or code is None:
            break
        aborted = next((line for line in reversed(lines) if line.startswith("case\t")), "case\tno case had begun")
        aborts.append(f"{aborted.partition(chr(9))[2]}: the process ended with {code}: {_last(lines)}")
        first += done + 1
    text = (
        ", ".join(f"{counts[kind]} {kind}" for kind in ("ok", "failed", "refused", "skipped"))
        + f", {len(aborts)} aborted"
    )
    if code is not None and (aborts or failed):
        code = 1
    return _state(code, text, failed=failed, aborted=aborts, refusals=dict(refusals.most_common()))


def _sanitizer(runner: _Runner) -> dict[str, Any]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return _state(errors.Environment.exit_code, "compute-sanitizer is not installed")
    found: dict[str, Any] = {}
    checks = [(path, tool) for path in ("hopper", "mma", "rows") for tool in TOOLS]
    for number, (path, tool) in enumerate(checks):
        share = runner.share(len(checks) - number)
        options_ = ("--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20")
        words = ("oracle", "-b", runner.args.backend, "--no-receipt", "--no-monitor", "-o", ",".join(SANITIZED))
        code, lines = share.pyharness(*words, wrap=(program, *options_), path=path)
        summary = next(
            (line for line in reversed(lines) if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line), _last(lines)
        )
        found[f"{path} {tool}".strip()] = {"exit_code": code, "text": summary.strip("= ")}
    codes = [item["exit_code"] for item in found.values()]
    refused = errors.Environment.exit_code  # a path that takes none of the cases
    wrong = [code for code in codes if code not in (0, None, refused)]
    worst = wrong[0] if wrong else None if None in codes else 0 if 0 in codes else refused
    return _state(worst, "; ".join(f"{tool}: {item['text']}" for tool, item in found.items()), tools=found)


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
        "unfused",
        "--peer",
        "torch",
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
    "repeat": _repeat_step,
    "random": _random_step,
    "sanitizer": _sanitizer,
    "perf": _perf,
}


# ---- what runs in a process of its own ----


def _repeat(args: argparse.Namespace) -> int:
    """Each case `repeats` times while a second backend of the device, on its own stream and thread, never rests."""
    started = time.time()
    with monitor.Monitor(None, reason="not watched") as watch:
        library = options.library(args)
        receipt.check_source(library)
        (device,) = options.devices(args, library)
        busy = library.prepare(device, inputs.make(Case.parse(BUSY), args.seed), args.threads)
        stop, computed = threading.Event(), 0

        def compete() -> None:
            nonlocal computed
            while not stop.is_set():
                busy.compute()
                computed += 1

        thread = threading.Thread(target=compete)
        results = []
        with busy:
            thread.start()
            try:
                for text in REPEATED:
                    before = computed
                    result = oracle.check(
                        library, device, Case.parse(text), args.seed, args.threads, repeats=args.repeats
                    )
                    results.append(result)
                    words = (
                        f"{result.distinct} different in {result.repeats} runs, {computed - before} of the other stream"
                    )
                    print(f"{result.status} {text}: {result.reason or words}", flush=True)
            finally:
                stop.set()
                thread.join()
    path = receipt.write(
        args.out, "oracle", library, results, args.seed, False, started, time.time(), [], monitor=watch.report()
    )
    print(f"receipt {path}")
    ran = [result for result in results if result.status != "unsupported"]
    same = sum(result.status == "ok" for result in ran)
    rest = f", {len(results) - len(ran)} unsupported" if len(ran) < len(results) else ""
    print(f"{same} of {len(ran)} cases right and the same in {args.repeats} runs beside another stream{rest}")
    return 0 if same == len(ran) and ran else 1


def random_case(rng: random.Random) -> Case:
    """A small case from the whole grammar but captures.

    Left out is what float32 cannot hold in few rows: outliers, large logits, near-constant V, a finite lowest mask."""
    types = ["f16", "f32", "bf16", "q8_0"] * 4 + list(cases.TYPES)
    sizes = [8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576]
    while True:
        hkv, group = rng.randint(1, 4), rng.choice((1, 1, 2, 3, 4, 6, 8))
        hsk = rng.choice(sizes)
        kv, nb = (
            rng.choice((rng.randint(1, 70), rng.randint(1, 400))),
            rng.choice((1, rng.randint(1, 40), rng.randint(1, 150))),
        )
        ns = rng.choice((1, 1, 1, 2, 3))
        mask = (
            rng.choice([m for m in cases.MASKS if m != "lowest" or nb >= 32])
            .replace("W", str(rng.randint(1, kv)))
            .replace("L", str(rng.randint(1, kv)))
        )
        masked = mask != "none"
        first = rng.randint(0, kv - 1) if rng.random() < 0.2 else 0
        count = rng.randint(1, kv - first) if first or rng.random() < 0.1 else 0
        sinks = int(rng.random() < 0.3)
        letters = "qkvs" if sinks else "qkv"
        kind = rng.choice(types)
        try:
            return Case(
                hsk=hsk,
                hsv=hsk if rng.random() < 0.7 else rng.choice(sizes),
                nh=hkv * group,
                nhkv=hkv,
                kv=kv,
                nb=nb,
                ns=ns,
                type_K=kind,
                type_V=kind if rng.random() < 0.6 else rng.choice(types),
                mask=mask,
                mh=rng.choice((1, 1, hkv * group)) if masked else 1,
                ms=rng.choice((1, ns)) if masked else 1,
                mpad=rng.choice((0, 0, 3)) if masked else 0,
                max_bias=rng.choice((0.0, 0.0, 8.0)) if masked else 0.0,
                softcap=rng.choice((0.0, 0.0, 0.0, 15.0)),
                sinks=sinks,
                grads="".join(x for x in letters if rng.random() < 0.7) or "q" if rng.random() < 0.25 else "",
                kv_first=first,
                kv_count=count,
                o=int(rng.random() < 0.2),
                prec=rng.choice(("default", "default", "f32")),
                data=rng.choice(("normal", "normal", "normal", "uniform", "kmean", "tiny", "huge", "zero")),
                layout=rng.choice(("cont",) * 4 + cases.LAYOUTS),
            )
        except errors.Usage:
            continue


def _random(args: argparse.Namespace) -> int:
    """A line "kind<TAB>case<TAB>reason" for each shape, before it "case<TAB>case" should the process die in it."""
    library = options.library(args)
    receipt.check_source(library)
    (device,) = options.devices(args, library)
    rng = random.Random(args.seed)
    shapes = [random_case(rng) for _ in range(args.random)][args.first :]
    failed = 0
    for case in shapes:
        print(f"case\t{case}", flush=True)
        try:
            result = oracle.check(library, device, case, args.seed, args.threads)
        except errors.Environment as e:  # no memory
            print(f"skipped\t{case}\t{e}", flush=True)
            continue
        kind = {"unsupported": "refused"}.get(result.status, result.status)
        if kind == "refused" and not result.reason.strip():
            kind = "failed"
        failed += kind == "failed"
        print(f"{kind}\t{case}\t{result.reason or ('no reason given' if kind == 'failed' else '')}", flush=True)
    return 1 if failed else 0
