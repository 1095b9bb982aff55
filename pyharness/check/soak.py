"""Mixed shapes on two streams of a device beside memory that comes and goes: the same bits, and no more memory, as when
every shape had run once.

Prints "ready" once every shape has run and the first figures of memory are taken, from where --seconds count, and in
the end a line "soak<TAB>JSON" and one in words. An interrupt ends it with what was found until then.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from .. import options
from ..base import cuda, errors
from ..case import inputs
from ..case.cases import Case
from ..case.operands import Inputs
from ..device import ggml, monitor
from ..receipts import writing
from . import shapes

MIB = 1 << 20
PROGRESS = 20.0  # seconds between lines of the preparation
GROWTH = 64 * MIB  # bytes that the device's and the host's memory may grow by after every shape ran once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `soak`."""
    options.backend(parser)
    options.seed(parser)
    parser.add_argument(
        "--seconds", type=float, default=480, metavar="S", help="once prepared, at least (default: 480)"
    )
    parser.add_argument("--hold", action="store_true", help="go on until stdin ends, too")
    parser.add_argument(
        "--within", type=float, default=sys.float_info.max, metavar="S", help="exit 2 where it cannot fit"
    )


class Soak:
    """Mixed cases on two streams, and memory that comes and goes beside them."""

    def __init__(
        self, library: ggml.Library, device: ggml.Device, seed: int, threads: int, progress: Callable[[str], None]
    ) -> None:
        self.library, self.device, self.threads = library, device, threads
        rng = random.Random(seed)
        listed = [Case.parse(text) for text in shapes.SOAKED]
        listed += [shapes.random_case(rng) for _ in range(shapes.SOAKED_RANDOM)]
        self.cases = [case for case in listed if library.refusal(device, case) is None]
        if not self.cases:
            raise errors.Environment(f"{device.name} takes none of the cases")
        self.given: list[Inputs] = []
        for case in self.cases:
            progress(f"inputs of {len(self.given)} of {len(self.cases)} cases")
            self.given.append(inputs.make(case, seed))
        self.first: dict[int, NDArray[np.uint32]] = {}
        self.lock, self._stopped, self._open = threading.Lock(), threading.Event(), threading.Event()
        self._working = [threading.Lock() for _ in range(3)]
        self.differing, self.failures = list[str](), list[str]()
        self.runs, self.ballasts, self.warm = 0, 0, 0
        self.nvml: monitor.Nvml | None = None
        with contextlib.suppress(errors.Environment):
            self.nvml = monitor.Nvml(cuda.ordinal(device.name) or 0)

    def start(self, seed: int) -> list[threading.Thread]:
        """The threads of the two streams and of the ballast, which work until `stop`."""
        self._open.set()
        work = zip(self._working, (self.stream(seed), self.stream(seed + 1), self.ballast(seed)), strict=True)
        threads = [threading.Thread(target=self._work, args=each) for each in work]
        for thread in threads:
            thread.start()
        return threads

    def _work(self, working: threading.Lock, pieces: Generator[None, None, None]) -> None:
        try:
            while not self._stopped.is_set():
                self._open.wait()
                with working:
                    next(pieces)
        except Exception as error:
            self.failures.append(str(error) or repr(error))
        finally:
            pieces.close()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """While inside nobody works."""
        self._open.clear()
        try:
            with contextlib.ExitStack() as stack:
                for working in self._working:
                    stack.enter_context(working)
                yield
        finally:
            self._open.set()

    def stop(self) -> None:
        """Nobody begins another piece of work."""
        self._stopped.set()
        self._open.set()

    def stream(self, seed: int) -> Generator[None, None, None]:
        """Every case once, then any of them; a new backend and new buffers each time, two runs of each."""
        rng = random.Random(seed)
        order = list(range(len(self.cases)))
        rng.shuffle(order)
        for index in itertools.chain(order, iter(lambda: rng.randrange(len(self.cases)), None)):
            with self.library.prepare(self.device, self.given[index], self.threads) as session:
                for _ in range(2):
                    now = session.again()
                    with self.lock:
                        first = self.first[index] if index in self.first else self.first.setdefault(index, now.copy())
                        self.runs += 1
                    if not np.array_equal(now, first):
                        self.differing.append(str(self.cases[index]))
            with self.lock:
                self.warm += 1
            yield

    def ballast(self, seed: int) -> Generator[None, None, None]:
        """Up to three blocks of a random size at a time, at most an eighth of what is free each."""
        rng, c = random.Random(seed), self.library.c
        backend = self.library.backend(self.device, 1)
        try:
            while True:
                free = self.library.device(self.device.name).memory_free
                most = max(20.0, np.log2(max(min(free / 8, 2**33), 1)))
                sizes = [int(2 ** rng.uniform(20, most)) for _ in range(rng.randint(1, 3))]
                blocks = [block for size in sizes if (block := c.ggml_backend_alloc_buffer(backend, size))]
                self.ballasts += len(blocks)
                for block in blocks:
                    c.ggml_backend_buffer_clear(block, ggml.GUARD_BYTE)
                time.sleep(rng.uniform(0, 0.2))
                for block in blocks:
                    c.ggml_backend_buffer_free(block)
                yield
        finally:
            c.ggml_backend_free(backend)

    def memory(self) -> dict[str, Any]:
        """Bytes of the process on the host, and on the device (all processes' where its own are not known)."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that the rest can be compared
        found: dict[str, Any] = {"host": psutil.Process().memory_info().rss, "device": None, "others": None}
        if self.device.name.startswith("CUDA"):
            now = self.library.device(self.device.name)
            listed = (self.nvml and self.nvml.get("ComputeRunningProcesses")) or []
            own = [process.usedGpuMemory for process in listed if process.pid == os.getpid()]
            found["device"] = own[0] if own and own[0] else now.memory_total - now.memory_free
            found["others"] = self.nvml and self.nvml.read()[-1]
        return found


def run(args: argparse.Namespace) -> int:
    """Soak; 1 where bits differ, memory grew or a stream ended. errors.Usage once --seconds do not fit --within."""
    start = said = time.monotonic()

    def preparing(what: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - start + args.seconds > args.within:
            raise errors.Usage(
                f"{args.seconds:g} s of soak do not fit the time box: {args.within - (now - start):.0f} s are left"
                f" after {now - start:.0f} s of preparation ({what})",
                hint="--box soak=SECONDS for more, --soak SECONDS for less",
            )
        if now - said > PROGRESS:
            said = now
            print(f"preparing: {what}, {now - start:.0f} s", flush=True)

    library = options.library(args)
    writing.check_source(library)
    device, *more = options.devices(args, library)
    if more:
        raise errors.Usage("soak takes one device", "name it with -b")
    opened = time.monotonic() - start
    soak = Soak(library, device, args.seed, args.threads, preparing)
    made = time.monotonic() - start
    begin, interrupted, released = 0.0, False, threading.Event()
    samples: list[dict[str, Any]] = []

    def sample() -> None:
        nonlocal begin
        with soak.still():
            begin = begin or time.monotonic()
            samples.append({"seconds": round(time.monotonic() - begin, 1), **soak.memory()})

    def wait() -> None:
        if args.hold:
            sys.stdin.read()
        released.set()

    threads = soak.start(args.seed)
    threading.Thread(target=wait, daemon=True).start()
    try:
        while soak.warm < 2 * len(soak.cases) and not soak.failures:
            preparing(f"{soak.warm} of {2 * len(soak.cases)} first runs")
            time.sleep(0.05)
        sample()
        print(
            f"prepared in {begin - start:.1f} s: device open after {opened:.1f} s, inputs of {len(soak.cases)} cases "
            f"made after {made:.1f} s, then each run once\nready",
            flush=True,
        )
        while (time.monotonic() - begin < args.seconds or not released.is_set()) and not soak.failures:
            time.sleep(min(1.0, max(0.05, args.seconds / 20)))
            if time.monotonic() - begin - samples[-1]["seconds"] > 30:
                sample()
        sample()
    except KeyboardInterrupt:  # the time box is full: what was found until then
        if not samples:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a group and its check send one each
        sample()
        interrupted = True
    finally:
        soak.stop()
        for thread in threads:
            thread.join()
    return _report(soak, samples, interrupted)


def _report(soak: Soak, samples: list[dict[str, Any]], interrupted: bool) -> int:
    first, halfway, last = samples[0], samples[len(samples) // 2], samples[-1]
    grown = {where: last[where] - first[where] for where in ("host", "device") if first[where] is not None}
    failures = soak.failures + [f"different bits in {case}" for case in sorted(set(soak.differing))]
    failures += [f"{where} memory grew by {more / MIB:.0f} MiB" for where, more in grown.items() if more > GROWTH]
    counts = {name: getattr(soak, name) for name in ("runs", "ballasts")}
    lengths = {name: len(getattr(soak, name)) for name in ("cases", "differing")}
    figures = {"seconds": last["seconds"], "grown": grown, "failures": failures, "samples": samples}
    print(f"soak\t{json.dumps(counts | lengths | figures)}")
    growth = ", ".join(
        f"{where} memory {(halfway[where] - first[where]) / MIB:+.1f} half-way, {more / MIB:+.1f} MiB at the end"
        for where, more in grown.items()
    )
    print(
        f"{soak.runs} runs of {len(soak.cases)} cases on two streams in {last['seconds']:.0f} s beside "
        f"{soak.ballasts} blocks of ballast: {len(soak.differing)} differ, {growth}"
        + "".join(f"; {text}" for text in soak.failures)
        + ("; interrupted" if interrupted else "")
    )
    return 1 if failures else errors.INTERRUPTED if interrupted else 0
