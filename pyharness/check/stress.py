"""What gpucheck runs in processes of their own: repeats, random shapes, a soak, a full device, a broken device.

Each prints lines "KIND<TAB>TEXT..." that gpucheck reads; what was printed stays when a process dies.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from .. import options
from ..base import cuda, errors
from ..case import cases, inputs, operands, result
from ..case.cases import Case
from ..device import ggml, monitor
from ..receipts import statement, writing
from . import oracle

MIB = 1 << 20

# with enough blocks for the fused kernels of the mma path and, at head size 256, for dS in memory on the hopper path,
# where dQ is added up over three ranges of keys
REPEATED = (
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=22,nhkv=11,kv=1000,nb=200,ns=4)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=8,nhkv=2,kv=2048,nb=64)",
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=22,nhkv=11,kv=1000,nb=200,ns=4,type_K=q8_0,type_V=q8_0,mask=swa:64)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=12,nhkv=2,kv=20000,nb=256,type_K=q8_0,type_V=q8_0,sinks=1)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=8,nhkv=2,kv=9600,nb=256)",
    "FLASH_ATTN_BACK(hsk=80,hsv=80,nh=4,nhkv=2,kv=333,nb=77,type_K=f32,type_V=bf16,mask=docs:50,softcap=20)",
)
BUSY = "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=4,nhkv=4,kv=512,nb=256)"

SOAKED = (
    *REPEATED,
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=24,nhkv=4,kv=8192,nb=256,type_K=q8_0,type_V=q8_0)",
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=14,nhkv=2,kv=2048,nb=2048,sinks=1)",
    "FLASH_ATTN_BACK(hsk=112,hsv=112,nh=8,nhkv=8,kv=700,nb=700,type_K=bf16,type_V=bf16,mask=none)",
    "FLASH_ATTN_BACK(hsk=192,hsv=128,nh=16,nhkv=1,kv=1500,nb=150,mask=bias,max_bias=8)",
    "FLASH_ATTN_BACK(hsk=576,hsv=512,nh=16,nhkv=1,kv=900,nb=40,vview=1)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=8,nhkv=2,kv=8192,nb=1,type_K=q4_0,type_V=q5_1)",
)
"""Cases of the soak beside random ones."""
SOAKED_RANDOM = 20
PROGRESS = 20.0  # seconds between lines of its preparation
GROWTH = 64 * MIB  # bytes that the device's and the host's memory may grow by after every case ran once

SQUEEZED = (
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=32,nhkv=8,kv=4096,nb=4096)",
    "FLASH_ATTN_BACK(hsk=80,hsv=80,nh=16,nhkv=4,kv=4096,nb=2048)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=6,nhkv=1,kv=32768,nb=64,type_K=q8_0,type_V=q8_0)",
    "FLASH_ATTN_BACK(hsk=576,hsv=512,nh=16,nhkv=1,kv=4096,nb=256,vview=1)",
)
ROOM = (0.9, 0.5, 0.25, 0.06, 0.0)
"""Shares of the memory that a case's workspace takes, left free for it."""

BROKEN = "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nhkv=2,kv={},nb=70)"


class Bits:
    """Runs a session again and again and tells whether the bytes of its result change."""

    def __init__(self, session: ggml.Session) -> None:
        self._session = session
        self._now: NDArray[np.uint32] = np.empty(session.result_bytes // 4, np.uint32)

    def run(self) -> NDArray[np.uint32]:
        """The result of one run on a destination of 0xFF bytes; valid until the next."""
        session, library = self._session, self._session.library
        library.c.ggml_backend_tensor_memset(session.back, ggml.GUARD_BYTE, 0, session.result_bytes)
        session.compute()
        data = library.ffi.cast("void *", self._now.__array_interface__["data"][0])
        library.c.ggml_backend_tensor_get(session.back, data, 0, session.result_bytes)
        return self._now


def repeat(args: argparse.Namespace) -> int:
    """Each case `repeats` times while a second backend of the device, on its own stream and thread, never rests."""
    started = time.time()
    with monitor.Monitor(None, reason="not watched") as watch:
        library, device = _open(args)
        busy = library.prepare(device, inputs.make(Case.parse(BUSY), args.seed), args.threads)
        stop, computed = threading.Event(), 0
        ended: list[BaseException] = []
        listed = [Case.parse(text) for text in REPEATED]

        def compete() -> None:
            nonlocal computed
            try:
                while not stop.is_set():
                    busy.compute()
                    computed += 1
            except errors.Failure as error:
                ended.append(error)

        thread = threading.Thread(target=compete)
        results: list[result.CaseResult] = []
        with busy:
            thread.start()
            try:
                for case in listed:
                    before, begin = computed, time.monotonic()
                    result = repeated(library, device, case, args.seed, args.threads, args.repeats)
                    results.append(result)
                    words = (
                        f"{result.distinct} different in {result.repeats} runs, "
                        f"{computed - before} of the other stream, {time.monotonic() - begin:.1f} s"
                    )
                    print(f"{result.status} {case}: {result.reason or words}", flush=True)
            except (KeyboardInterrupt, MemoryError, OSError, errors.Failure) as error:
                ended.insert(0, error)
            finally:
                stop.set()
                thread.join()
            problem = ended[0] if ended else None  # if the other stream's, it was not busy all the time
            ran = [result for result in results if result.status != "unsupported"]
            same = sum(result.status == "ok" for result in ran)
            code = errors.exit_code(problem) if problem else int(same < len(ran) or not ran)
            writing.save(
                args.out,
                statement.build(
                    "oracle",
                    library,
                    results,
                    seed=args.seed,
                    partial=len(results) < len(listed),
                    started=started,
                    finished=time.time(),
                    case_files=[],
                    exit_code=code,
                    reason=errors.reason(problem) if problem else "" if ran else "every case is unsupported",
                    selection=statement.selection(listed, listed, [device.name]),
                    monitor=watch.report(),
                ),
            )
    if problem:
        raise problem
    rest = f", {len(results) - len(ran)} unsupported" if len(ran) < len(results) else ""
    print(f"{same} of {len(ran)} cases right and the same in {args.repeats} runs beside another stream{rest}")
    return code


def repeated(
    library: ggml.Library, device: ggml.Device, case: Case, seed: int, threads: int, repeats: int
) -> result.CaseResult:
    """The oracle's verdict on a case, and on whether so many more runs give the same bits."""
    result = oracle.check(library, device, case, seed, threads)
    if result.status != "ok":
        return result
    with library.prepare(device, inputs.make(case, seed), threads) as session:
        bits = Bits(session)
        first = bits.run().copy()
        others = {hashlib.sha256(now.tobytes()).digest() for now in _differing(bits, first, repeats - 1)}
        if session.result().digest != result.digest:
            others.add(b"the checked run")
        guards = session.result().guards
    reasons = [f"guard words of {name} overwritten" for name in guards]
    if others:
        reasons.append(f"{1 + len(others)} different results in {repeats} runs")
    state = "failed" if reasons else "ok"
    return dataclasses.replace(
        result, status=state, reason="; ".join(reasons), repeats=repeats, distinct=1 + len(others)
    )


def _differing(bits: Bits, first: NDArray[np.uint32], runs: int) -> Iterator[NDArray[np.uint32]]:
    for _ in range(runs):
        now = bits.run()
        if not np.array_equal(now, first):
            yield now


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


def shapes(args: argparse.Namespace) -> int:
    """A line "kind<TAB>case<TAB>reason" for each shape, before it "case<TAB>case" should the process die in it."""
    library, device = _open(args)
    rng = random.Random(args.seed)
    failed = 0
    for case in [random_case(rng) for _ in range(args.random)][args.first :: args.stride]:
        print(f"case\t{case}", flush=True)
        try:
            result = oracle.check(library, device, case, args.seed, args.threads)
        except errors.Lost:
            raise
        except errors.Environment as e:  # no memory
            print(f"skipped\t{case}\t{e}", flush=True)
            continue
        kind = {"unsupported": "refused"}.get(result.status, result.status)
        if kind == "refused" and not result.reason.strip():
            kind = "failed"
        failed += kind == "failed"
        print(f"{kind}\t{case}\t{result.reason or ('no reason given' if kind == 'failed' else '')}", flush=True)
    return 1 if failed else 0


# ---- soak ----


class _Gate:
    """Lets workers run, or waits until all of them stand still."""

    def __init__(self, workers: int) -> None:
        self._condition = threading.Condition()
        self._workers, self._waiting, self._closed, self.stopped = workers, 0, False, False

    def passes(self) -> bool:
        """Called by a worker between two pieces of work: stands still while the gate is closed; False at the end."""
        with self._condition:
            self._waiting += 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._closed or self.stopped)
            self._waiting -= 1
            return not self.stopped

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """While inside no worker works."""
        with self._condition:
            self._closed = True
            self._condition.wait_for(lambda: self._waiting == self._workers)
        try:
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()

    def leave(self) -> None:
        """A worker ends and is waited for no more."""
        with self._condition:
            self._workers -= 1
            self._condition.notify_all()

    def stop(self) -> None:
        """Every worker's next passes() says False."""
        with self._condition:
            self.stopped = True
            self._condition.notify_all()


class _Soak:
    """Mixed cases on two streams, and memory that comes and goes beside them."""

    def __init__(
        self, library: ggml.Library, device: ggml.Device, seed: int, threads: int, progress: Callable[[str], None]
    ) -> None:
        self.library, self.device, self.threads = library, device, threads
        rng = random.Random(seed)
        listed = [Case.parse(text) for text in SOAKED] + [random_case(rng) for _ in range(SOAKED_RANDOM)]
        self.cases = [case for case in listed if library.refusal(device, case) is None]
        if not self.cases:
            raise errors.Environment(f"{device.name} takes none of the cases")
        self.given: list[operands.Inputs] = []
        for case in self.cases:
            progress(f"inputs of {len(self.given)} of {len(self.cases)} cases")
            self.given.append(inputs.make(case, seed))
        self.first: dict[int, NDArray[np.uint32]] = {}
        self.lock = threading.Lock()
        self.differing: list[str] = []
        self.failures: list[str] = []
        self.runs, self.ballasts, self.warm = 0, 0, 0
        self.gate = _Gate(3)
        self.nvml: monitor.Nvml | None = None
        with contextlib.suppress(errors.Environment):
            self.nvml = monitor.Nvml(cuda.ordinal(device.name) or 0)

    def worker(self, work: Callable[[], Iterator[None]]) -> threading.Thread:
        """A thread that does pieces of work while the gate lets it."""

        def target() -> None:
            try:
                for _ in work():
                    if not self.gate.passes():
                        return
            except Exception as error:
                self.failures.append(str(error) or repr(error))
            finally:
                self.gate.leave()

        thread = threading.Thread(target=target)
        thread.start()
        return thread

    def stream(self, seed: int) -> Iterator[None]:
        """Every case once, then any of them; a new backend and new buffers each time, two runs of each."""
        rng = random.Random(seed)
        order = list(range(len(self.cases)))
        rng.shuffle(order)
        for index in itertools.chain(order, iter(lambda: rng.randrange(len(self.cases)), None)):
            self._twice(index)
            yield

    def _twice(self, index: int) -> None:
        with self.library.prepare(self.device, self.given[index], self.threads) as session:
            bits = Bits(session)
            for _ in range(2):
                now = bits.run()
                with self.lock:
                    first = self.first[index] if index in self.first else self.first.setdefault(index, now.copy())
                    self.runs += 1
                if not np.array_equal(now, first):
                    self.differing.append(str(self.cases[index]))
        with self.lock:
            self.warm += 1

    def ballast(self, seed: int) -> Iterator[None]:
        """Up to three blocks of a random size at a time, at most an eighth of what is free each."""
        rng = random.Random(seed)
        backend = self.library.backend(self.device, 1)
        c = self.library.c
        try:
            while True:
                free = self.library.device(self.device.name).memory_free
                blocks = []
                for _ in range(rng.randint(1, 3)):
                    size = int(2 ** rng.uniform(20, max(20.0, np.log2(max(min(free / 8, 2**33), 1)))))
                    block = c.ggml_backend_alloc_buffer(backend, size)
                    if block:
                        c.ggml_backend_buffer_clear(block, ggml.GUARD_BYTE)
                        blocks.append(block)
                        self.ballasts += 1
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
            found["device"] = now.memory_total - now.memory_free
            listed = (self.nvml and self.nvml.get("ComputeRunningProcesses")) or []
            own = [process.usedGpuMemory for process in listed if process.pid == os.getpid()]
            if own and own[0]:
                found["device"] = own[0]
            found["others"] = self.nvml and self.nvml.read()[-1]
        return found


def soak(args: argparse.Namespace) -> int:
    """For `soak` seconds and until stdin ends: the same bits, and no more memory, as when every case had run once.

    Says "ready" once every case has run and the first figure is taken: from then on `soak` counts, and until stdin ends
    others may use the device. errors.Usage as soon as the soak does not fit what is left of `within` seconds."""
    start = said = time.monotonic()

    def preparing(what: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - start + args.soak > args.within:
            raise errors.Usage(
                f"{args.soak:g} s of soak do not fit the time box: {args.within - (now - start):.0f} s are left after "
                f"{now - start:.0f} s of preparation ({what})",
                hint="--box soak=SECONDS for more, --soak SECONDS for less",
            )
        if now - said > PROGRESS:
            said = now
            print(f"preparing: {what}, {now - start:.0f} s", flush=True)

    library, device = _open(args)
    opened = time.monotonic() - start
    soaked = _Soak(library, device, args.seed, args.threads, preparing)
    made = time.monotonic() - start
    begin = 0.0
    samples: list[dict[str, Any]] = []

    def sample() -> None:
        nonlocal begin
        with soaked.gate.closed():
            begin = begin or time.monotonic()
            samples.append({"seconds": round(time.monotonic() - begin, 1), **soaked.memory()})

    threads = [
        soaked.worker(lambda: soaked.stream(args.seed)),
        soaked.worker(lambda: soaked.stream(args.seed + 1)),
        soaked.worker(lambda: soaked.ballast(args.seed)),
    ]
    released, interrupted = threading.Event(), False

    def wait() -> None:
        sys.stdin.read()
        released.set()

    threading.Thread(target=wait, daemon=True).start()
    try:
        while soaked.warm < 2 * len(soaked.cases) and not soaked.failures:
            preparing(f"{soaked.warm} of {2 * len(soaked.cases)} first runs")
            time.sleep(0.05)
        sample()
        print(
            f"prepared in {begin - start:.1f} s: device open after {opened:.1f} s, inputs of {len(soaked.cases)} cases "
            f"made after {made:.1f} s, then each run once",
            flush=True,
        )
        print("ready", flush=True)
        while (time.monotonic() - begin < args.soak or not released.is_set()) and not soaked.failures:
            time.sleep(min(1.0, max(0.05, args.soak / 20)))
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
        soaked.gate.stop()
        for thread in threads:
            thread.join()
    grown = {
        where: samples[-1][where] - samples[0][where] for where in ("host", "device") if samples[0][where] is not None
    }
    failures = soaked.failures + [f"different bits in {case}" for case in sorted(set(soaked.differing))]
    failures += [f"{where} memory grew by {more / MIB:.0f} MiB" for where, more in grown.items() if more > GROWTH]
    report = {
        "runs": soaked.runs,
        "cases": len(soaked.cases),
        "seconds": samples[-1]["seconds"],
        "ballasts": soaked.ballasts,
        "differing": len(soaked.differing),
        "grown": grown,
        "failures": failures,
        "samples": samples,
    }
    print(f"soak\t{json.dumps(report)}")
    halfway = samples[len(samples) // 2]
    growth = ", ".join(
        f"{where} memory {(halfway[where] - samples[0][where]) / MIB:+.1f} half-way, {more / MIB:+.1f} MiB at the end"
        for where, more in grown.items()
    )
    print(
        f"{soaked.runs} runs of {len(soaked.cases)} cases on two streams in {samples[-1]['seconds']:.0f} s beside "
        f"{soaked.ballasts} blocks of ballast: {len(soaked.differing)} differ, {growth}"
        + "".join(f"; {text}" for text in soaked.failures)
        + ("; interrupted" if interrupted else "")
    )
    return 1 if failures else errors.INTERRUPTED if interrupted else 0


# ---- a full device ----


def squeeze(args: argparse.Namespace) -> int:
    """Cases while other memory leaves less than their workspace: right, or a graph that fails in words.

    A line "kind<TAB>case<TAB>words" for each, before it "case<TAB>case" should the process die in it."""
    library, device = _open(args)
    if not device.name.startswith("CUDA"):
        raise errors.Environment(f"{device.name} has no memory of its own to fill")
    listed = [(Case.parse(text), share) for text in SQUEEZED for share in ROOM]
    failed = False
    for case, share in listed[args.first :: args.stride]:
        print(f"case\t{case} in {share:g} of its workspace", flush=True)
        kind, words = squeezed(library, device, case, args.seed, share)
        failed |= kind == "failed"
        print(f"{kind}\t{case} in {share:g} of its workspace\t{words}", flush=True)
    return 1 if failed else 0


def squeezed(library: ggml.Library, device: ggml.Device, case: Case, seed: int, share: float) -> tuple[str, str]:
    """How a case goes when only a share of what its workspace takes is free: "ok", "failed" or "refused", and words."""
    reason = library.refusal(device, case)
    if reason is not None:
        return "refused", reason
    given = inputs.make(case, seed)

    def free() -> int:
        return library.device(device.name).memory_free

    with library.prepare(device, given) as session:
        session.compute()  # loads the kernels
    with library.prepare(device, given) as session:
        before = free()
        session.compute()
        workspace = before - free()
        want = session.result()
    with library.prepare(device, given) as session:
        library.c.ggml_backend_synchronize(session.backend)  # makes its stream, which takes memory too
        with fill(library, session, int(workspace * share), free):
            left = free()
            words = f"workspace {workspace / MIB:.0f} MiB, {left / MIB:.0f} MiB free: "
            try:
                session.compute()
            except errors.Lost as error:
                return "failed", words + str(error)
            except errors.Environment as error:
                words += f"{error}, afterwards "
                failed = True
            else:
                words += f"{(left - free()) / MIB:.0f} MiB taken, "
                failed = False
        if failed:  # there is memory again, and the same graph
            session.compute()
        return _judged(given, session.result(), want, words)


def _judged(given: operands.Inputs, got: ggml.Result, want: ggml.Result, words: str) -> tuple[str, str]:
    if got.digest == want.digest:
        return "ok", words + "the same bits"
    parts = oracle.compare(given, got, {part: array.astype(np.float64) for part, array in want.parts.items()})
    wrong = [f"{part.part} {part.why or part.nmse}" for part in parts.values() if not part.passed] + got.guards
    worst = max(part.nmse for part in parts.values())
    return ("failed", words + f"wrong: {', '.join(wrong)}") if wrong else ("ok", words + f"right, NMSE {worst:.1e}")


@contextlib.contextmanager
def fill(library: ggml.Library, session: ggml.Session, room: int, free: Callable[[], int]) -> Iterator[None]:
    """Takes the device's memory but `room` bytes, in blocks that halve as they stop fitting, and gives it back."""
    blocks, size = [], 0
    try:
        size = max(free() - room, 0)
        while size >= 2 * MIB and free() - room >= 2 * MIB:
            size = min(size, free() - room)
            block = library.c.ggml_backend_alloc_buffer(session.backend, size)
            if block:
                blocks.append(block)
            else:
                size //= 2
        yield
    finally:
        for block in blocks:
            library.c.ggml_backend_buffer_free(block)


# ---- a broken device ----


def broken(args: argparse.Namespace) -> int:
    """The oracle on three cases, the second of which reads a wild address on the device, as a broken one would.

    The run must end, say why, and leave a receipt that is marked partial and holds the first case."""
    library, device = _open(args)
    if not device.name.startswith("CUDA"):
        raise errors.Environment(f"{device.name} would end the process, not report")
    compute, runs = ggml.Session.compute, itertools.count()

    def wild(session: ggml.Session) -> float:
        if next(runs) == 1:
            session.sources["q"].data = library.ffi.cast("void *", 1 << 20)
        return compute(session)

    ggml.Session.compute = wild  # type: ignore[assignment,method-assign]
    listed = ",".join(BROKEN.format(keys) for keys in (80, 81, 82))
    where = ["--libs", str(args.libs)] if args.libs else ["--preset", args.preset]
    words = ["-b", device.name, "-o", listed, "--receipts", str(args.out), "--no-monitor", *where]
    parser = argparse.ArgumentParser()
    parser.set_defaults(verb="oracle")
    oracle.add_arguments(parser)
    return oracle.run(parser.parse_args(words))


# ---- ----


def _open(args: argparse.Namespace) -> tuple[ggml.Library, ggml.Device]:
    library = options.library(args)
    writing.check_source(library)
    (device,) = options.devices(args, library)
    return library, device


INNER: dict[str, Callable[[argparse.Namespace], int]] = {
    "repeat": repeat,
    "random": shapes,
    "soak": soak,
    "memory": squeeze,
    "broken": broken,
}
