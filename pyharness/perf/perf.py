"""Time the operator, and what else computes the same gradient, on the same tensors in the same process.

Passes: `backward` is FLASH_ATTN_BACK alone, from q, k, v and dO; `forward+backward` is what a trainer pays for, both
nodes in the graph that llama.cpp's autodiff builds (pair.py); `forward` is the first node of that graph alone. Peers
have the same three; their backward alone starts from their forward's output and LSE.

A sample is one run of a pass. Warm-ups come first and are not counted. With a warm L2 samples follow each other; with a
cold one a buffer of twice the last-level cache is written before each. On CUDA the device's time is taken by events on
the backend's own stream (see cuda.Stopwatch) and includes the gaps between the operator's kernels; host time is taken
beside it, from before the launch until the device is done. Other backends have host time alone.

Work is counted as the products that a pass needs, each once, over unmasked pairs of query and key. Forward:
S = Q K^T and O = P V. Backward: S and dP = dO V^T always, dQ, dK, dV as wanted; 2 (3 Dk + 2 Dv) FLOP a pair for all.
What a kernel computes twice counts once; both passes together are seven products.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import os
import statistics as stats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import options
from ..base import cuda, errors
from ..case import cases, inputs, reference
from ..case.cases import Case
from ..case.operands import Inputs
from ..device import monitor
from ..device.ggml import Device, Library
from ..receipts import statement, tables, timing, writing
from ..receipts.statement import OURS
from . import peers
from .bench import Bench, Sample
from .peers import PASSES

RUNS = 20
WARMUPS = 3
_BACKWARD = "2 pairs (Dk + Dv) + 2 pairs Dk [dQ] + 2 window pairs Dk [dK] + 2 window pairs Dv [dV]"
FORMULA = {
    way: f"flop = {products}; pairs of all heads that the mask leaves"
    for way, products in (
        ("forward", "2 pairs (Dk + Dv)"),
        ("backward", _BACKWARD),
        ("forward+backward", f"2 pairs (Dk + Dv) + {_BACKWARD}"),
    )
}

NO_CEILINGS = {"compute_flop_per_s": None, "memory_bytes_per_s": None, "how": ""}

# ---- samples ----


def sample(run: Callable[[], Sample], flush: Callable[[], None], runs: int, cold: bool) -> list[dict[str, Any]]:
    """The timings of one subject: `runs` samples, or 20 and more until a fifth of a second is full, at most 200."""
    timings = []
    for l2 in ("warm", "cold") if cold else ("warm",):
        for _ in range(WARMUPS):
            run()
        found: list[Sample] = []
        begin = time.perf_counter()
        while len(found) < (runs or RUNS) or (
            not runs and len(found) < 10 * RUNS and time.perf_counter() - begin < 0.2
        ):
            if l2 == "cold":
                flush()
            found.append(run())
        host, device = ([ns for ns in column if ns is not None] for column in zip(*found, strict=True))
        timings += [
            {"l2": l2, "clock": clock, "warmups": WARMUPS, "samples_ns": samples, **timing.statistics(samples)}
            for clock, samples in (("device", device), ("host", host))
            if samples
        ]
    return timings


# ---- work, floors, errors ----


def work(given: Inputs, way: str = "backward") -> dict[str, Any]:
    """Pairs and FLOP of a pass; null with the reason where the mask cannot be counted."""
    dk, dv = given.q.shape[3], given.d.shape[3]
    if given.mask is not None and np.isnan(given.mask[:, :, : given.sizes[3]]).any():
        return {"pairs": None, "flop": None, "formula": FORMULA[way], "reason": "unavailable: the mask holds NaN"}
    pairs = given.unmasked()
    passes = way.split("+")
    flop = 2 * pairs * (dk + dv) * len(passes)
    if "backward" in passes:
        mask, window = given.mask, slice(given.kv_first, given.kv_first + given.kv_count)
        small = dataclasses.replace(
            given, k=given.k[:, :, window], v=given.v[:, :, window], mask=mask if mask is None else mask[..., window]
        )
        in_window = small.unmasked() if {"dk", "dv"} & set(given.grads) else 0
        flop += 2 * pairs * dk * ("dq" in given.grads) + 2 * in_window * (
            dk * ("dk" in given.grads) + dv * ("dv" in given.grads)
        )
    return {"pairs": pairs, "flop": flop, "formula": FORMULA[way], "reason": ""}


def floor(traffic: int, flop: int | None, ceilings: dict[str, Any], median_ns: float) -> dict[str, Any]:
    """What no kernel can go under: inputs read once, outputs written once, every product once, at the ceilings."""
    rate, bandwidth = ceilings["compute_flop_per_s"], ceilings["memory_bytes_per_s"]
    memory = traffic / float(bandwidth) * 1e9 if bandwidth else None
    compute = flop / float(rate) * 1e9 if rate and flop is not None else None
    known = [f for f in (memory, compute) if f is not None]
    text = [
        None if f is None else statement.number(f) for f in (memory, compute, max(known) / median_ns if known else None)
    ]
    return {"bytes": traffic, "memory_ns": text[0], "compute_ns": text[1], "fraction": text[2]}


def nmse(got: NDArray[Any], want: NDArray[np.float64]) -> float:
    """sum((got - want)^2) / sum(want^2) in float64; nan is nan."""
    difference = got.astype(np.float64) - want
    return float(np.vdot(difference, difference) / np.vdot(want, want))


class Truth:
    """The float64 reference of a case, over everything or over one KV head's group of sequence 0."""

    def __init__(self, given: Inputs, scope: str, output: bool = False) -> None:
        """`scope`: "slice" or "full"; ALiBi slopes depend on the number of heads, so such a case is always full.
        `output`: whether the forward's is wanted too."""
        s, h, hkv, _, _ = given.sizes
        whole = scope == "full" or given.max_bias > 0 or (s == 1 and hkv == 1)
        self.group = h if whole else h // hkv
        self.sequences, self.kv_heads = (s, hkv) if whole else (1, 1)
        self.scope = "all heads" if whole else f"sequence 0, KV head 0 of {hkv} with its {self.group} query heads"
        part = given
        if not whole:
            mask = given.mask
            if mask is not None:
                mask = mask[:1] if mask.shape[1] == 1 else mask[:1, np.arange(self.group) % mask.shape[1]]
            part = dataclasses.replace(
                given,
                q=given.q[:1, : self.group],
                k=given.k[:1, :1],
                v=given.v[:1, :1],
                d=given.d[:1, :, : self.group],
                o=None if given.o is None else given.o[:1, :, : self.group],
                sinks=None if given.sinks is None else given.sinks[: self.group],
                mask=mask,
            )
        found = reference.backward(part)
        self._want: dict[str, NDArray[np.float64]] = {p: found[p] for p in ("dq", "dk", "dv") if p in found}
        if output:
            self._want["o"] = reference.forward(part)

    def error(self, parts: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """NMSE of the output and of each gradient in `parts` (shapes of the whole case)."""
        s = slice(self.sequences)
        heads, kv_heads = slice(self.group), slice(self.kv_heads)
        places = {"o": (s, slice(None), heads), "dq": (s, heads), "dk": (s, kv_heads), "dv": (s, kv_heads)}
        values = {
            name: statement.number(nmse(parts[name][places[name]], self._want[name]))
            for name in places
            if name in parts and name in self._want
        }
        return {"scope": self.scope, "nmse": values}


# ---- a case ----


@dataclasses.dataclass
class Settings:
    """What one run of the verb measures with."""

    library: Library
    device: Device
    seed: int
    threads: int
    runs: int
    cold: bool
    error: str  # "none", "slice", "full"
    peers: tuple[str, ...]
    budget: float  # seconds that a case may take by the compute floor
    ceilings: dict[str, Any]
    monitor: monitor.Monitor
    passes: tuple[str, ...] = PASSES


def measure(case: Case, settings: Settings) -> Iterator[dict[str, Any]]:
    """The measurements of one case: the operator and its pair first, then the peers; a subject that cannot run says
    why, and where neither of ours runs there are no others."""
    library, device, threads = settings.library, settings.device, settings.threads
    given = inputs.make(case, settings.seed)
    plain, watch = peers.Plain(given), settings.monitor

    @functools.cache
    def count(way: str) -> dict[str, Any]:
        return work(given, way)

    @functools.cache
    def truth() -> Truth:
        return Truth(given, settings.error, output=any("forward" in way for way in settings.passes))

    def record(who: str, way: str, unavailable: str = "", **found: Any) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "case": str(case),
            "device": device.name,
            "seed": str(case.seed(settings.seed)),
            "who": who,
            "pass": way,
            "path": "",
            "unavailable": unavailable,
            "timings": [],
            "work": count(way),
            "memory": {"buffers_bytes": None, "peak_bytes": None},
            "floor": None,
            "error": None,
        }
        return entry | found

    def peak(since: int, before: int | None) -> int | str | None:
        if watch.baseline is None:
            return None
        end = watch.mark()
        watch.sample()
        most = watch.peak(since, end)
        return "unknown" if most is None or before is None else max(0, most - before)

    def subject(peer: peers.Peer) -> Iterator[dict[str, Any]]:
        wanted = [way for way in peer.passes if way in settings.passes]
        if not wanted:
            return
        watch.sample()
        since, before = watch.mark(), watch.latest
        try:
            with peer:
                for way in wanted:
                    timings = sample(functools.partial(peer.time, way), peer.flush, settings.runs, settings.cold)
                    memory = {"buffers_bytes": peer.bytes, "peak_bytes": peak(since, before)}
                    path = peer.paths.get(way, "") + peer.units(way)
                    found = record(peer.name(way), way, path=path, timings=timings, memory=memory)
                    if settings.error != "none":
                        parts = peer.parts()
                        found["error"] = truth().error({p: parts[p] for p in peers.PARTS[way] if p in parts})
                    if way in peer.traffic:
                        median_ns = float(timing.best_clock(found, "warm")["median_ns"])
                        found["floor"] = floor(peer.traffic[way], found["work"]["flop"], settings.ceilings, median_ns)
                    yield found
        except peers.Unavailable as e:
            yield record(peer.name(wanted[-1]), wanted[-1], unavailable=str(e))

    if too_long := _too_long(count("backward")["flop"], settings):
        way = "backward" if "backward" in settings.passes else settings.passes[-1]
        yield record(OURS[way], way, unavailable=too_long)
        return
    ran = False
    for own in peers.ours(library, device, plain, threads):
        for found in subject(own):
            ran |= not found["unavailable"]
            yield found
    if ran:
        for peer in peers.all_of(settings.peers, library, device, plain, threads):
            yield from subject(peer)


def _too_long(flop: int | None, settings: Settings) -> str:
    """Why a case is not run whose backward has so many FLOP, "" if it is."""
    rate = settings.ceilings["compute_flop_per_s"]
    if not rate or not flop:
        return ""
    least = flop / float(rate) * (settings.runs or RUNS) * (1 + settings.cold)
    if least <= settings.budget:
        return ""
    return f"not run: by the compute floor it takes {least:.0f} s or more; --budget SECONDS allows it"


def ceilings(library: Library, device: Device, threads: int) -> dict[str, Any]:
    """What the device reaches at most: FLOP/s of a large product, bytes/s of a large copy (bytes read and written).

    Through PyTorch on a GPU where it is installed; otherwise ggml's own MUL_MAT (F16 by F32 on a GPU, F32 on a CPU, its
    conversions included) and a contiguous copy, the median of ten."""
    index = cuda.ordinal(device.name)
    found = peers.torch_ceilings(index) if index is not None else None
    if found is None:
        size, kind, name = (
            (2048, library.c.GGML_TYPE_F32, "F32") if index is None else (16384, library.c.GGML_TYPE_F16, "F16")
        )
        floats = 2**26 if index is None else 2**28
        c, shape = library.c, "ggml_new_tensor_4d"
        backend = library.backend(device, threads)
        with Bench(library, device, backend) as bench:

            def median_ns(build: Callable[[Any], Any]) -> float:
                overhead = 16 * c.ggml_tensor_overhead() + c.ggml_graph_overhead_custom(16, False)
                context = c.ggml_init({"mem_size": overhead, "mem_buffer": library.ffi.NULL, "no_alloc": True})
                graph = c.ggml_new_graph_custom(context, 16, False)
                c.ggml_build_forward_expand(graph, build(context))
                buffer = c.ggml_backend_alloc_ctx_tensors(context, backend)
                if not buffer:
                    raise errors.Environment(
                        f"{device.name}: no memory to measure the ceilings; give --ceiling-tflops and --ceiling-gbs"
                    )
                c.ggml_backend_buffer_clear(buffer, 0x11)
                times = [bench.time(graph) for _ in range(12)][2:]
                c.ggml_backend_buffer_free(buffer)
                c.ggml_free(context)
                return stats.median(host if on_device is None else on_device for host, on_device in times)

            make = getattr(c, shape)
            product = median_ns(
                lambda x: c.ggml_mul_mat(x, make(x, kind, size, size, 1, 1), make(x, c.GGML_TYPE_F32, size, size, 1, 1))
            )
            copy = median_ns(lambda x: c.ggml_cont(x, make(x, c.GGML_TYPE_F32, floats, 1, 1, 1)))
        c.ggml_backend_free(backend)
        found = {
            "compute": 2 * size**3 / (product * 1e-9),
            "memory": 8 * floats / (copy * 1e-9),
            "how": f"ggml: {name} MUL_MAT of {size}^3, copy of {floats * 4 / 2**20:.0f} MiB counting reads and writes",
        }
    return {
        "compute_flop_per_s": statement.number(found["compute"]),
        "memory_bytes_per_s": statement.number(found["memory"]),
        "how": found["how"],
    }


# ---- the verb ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """perf's options."""
    options.selection(parser, default_file=cases.PERF)
    options.backend(parser)
    options.seed(parser)
    options.output(parser)
    parser.add_argument(
        "--runs",
        type=int,
        default=0,
        metavar="N",
        help=f"samples of each timing (default: {RUNS}, short ones up to {10 * RUNS})",
    )
    parser.add_argument("--no-cold", action="store_true", help="warm L2 only")
    parser.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=PASSES,
        help="time this pass; may be repeated (default: all of them)",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        choices=peers.NAMES,
        help="time this beside the operator; may be repeated",
    )
    parser.add_argument(
        "--error", choices=("slice", "full", "none"), default="slice",
        help="NMSE against float64 of the first KV head with its query heads, of all, or none (default: slice)",
    )  # fmt: skip
    parser.add_argument("--base", type=options.receipt, metavar="RECEIPT", help="compare with an earlier perf receipt")
    parser.add_argument(
        "--budget",
        type=float,
        default=120,
        metavar="S",
        help="leave out cases whose compute floor alone exceeds this (default: 120)",
    )
    parser.add_argument(
        "--ceiling-tflops", type=float, metavar="X", help="compute ceiling for the floors (default: measured)"
    )
    parser.add_argument(
        "--ceiling-gbs", type=float, metavar="X", help="memory ceiling in GB/s for the floors (default: measured)"
    )
    parser.add_argument(
        "--receipts",
        type=Path,
        default=options.RECEIPTS,
        metavar="DIR",
        help="where the receipt goes (default: receipts)",
    )
    parser.add_argument("--no-receipt", action="store_true", help="write no receipt")
    monitor.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the selected cases on the chosen devices, print, write the receipt; a case that fails ends the run."""
    if args.runs < 0:
        raise errors.Usage("--runs: a positive number of samples")
    chosen = args.op or args.params or args.random or args.case_file is not cases.PERF  # is: not named by the user
    selected = options.select(args)
    base = statement.read(args.base) if args.base else None
    if base is not None and not base["predicate"]["receipt"]["perf"]:
        raise errors.Usage(f"--base {options.label(args.base)}: not a receipt of perf")
    measured = _given_ceilings(args) is None and not _only_cpu(args)
    if measured or {*args.peer} & {*peers.TORCH}:
        peers.preload()
    started = time.time()
    stopped: KeyboardInterrupt | MemoryError | errors.Failure | None = None
    measurements: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        "runs": args.runs,
        "ceilings": {},
        "throttled": None,
        "measurements": measurements,
        "base": None,
    }
    watch = monitor.from_args(args)

    def finish(partial: bool, code: int, reason: str = "") -> None:
        found["throttled"] = watch.throttled if watch.baseline is not None else None
        if base is not None:
            found["base"] = timing.against_base(measurements, base, throttled=bool(found["throttled"]))
        _print(args.output, found, watch)
        if not args.no_receipt:
            files, seen = [args.case_file], watch.report()
            writing.save(
                args.receipts,
                statement.build(
                    "perf",
                    library,
                    [],
                    seed=args.seed,
                    partial=partial,
                    started=started,
                    finished=time.time(),
                    case_files=files,
                    exit_code=code,
                    reason=reason,
                    selection=writing.selection(args, selected, devices),
                    monitor=seen,
                    perf=found,
                ),
            )

    def aborted(message: str) -> None:
        print(f"ggml aborted: {message.strip()}", file=sys.stderr)
        finish(True, 1, f"ggml aborted: {message.strip()}")
        sys.stdout.flush()
        os._exit(1)

    with watch:
        library = options.library(args)
        writing.check_source(library)
        otherwise, library.on_abort = library.on_abort, aborted
        devices = options.devices(args, library)
        if not chosen and all(device.name == "CPU" for device in devices):
            args.case_file = cases.PERF_CPU
            selected = options.select(args)
        try:
            for device in devices:
                limits = _given_ceilings(args) or ceilings(library, device, args.threads)
                found["ceilings"][device.name] = limits
                print(f"{device.name} {device.description}: {_ceiling_text(limits)}", file=sys.stderr)
                settings = Settings(
                    library=library,
                    device=device,
                    seed=args.seed,
                    threads=args.threads,
                    runs=args.runs,
                    cold=not args.no_cold,
                    error=args.error,
                    peers=tuple(dict.fromkeys(args.peer)),
                    budget=args.budget,
                    ceilings=limits,
                    monitor=watch,
                    passes=tuple(way for way in PASSES if way in (args.passes or PASSES)),
                )
                for case in selected:
                    console = args.output == "console"
                    print(f"{device.name} {case}", file=sys.stdout if console else sys.stderr, flush=True)
                    for record in measure(case, settings):
                        measurements.append(record)
                        if console:
                            print(_line(record), flush=True)
        except (KeyboardInterrupt, MemoryError, errors.Failure) as error:
            stopped = error
        library.on_abort = otherwise
    states = set(statement.timed_cases(found, cases.limits()["nmse"]).values())
    code = 1 if "failed" in states else 0 if "ok" in states else errors.Environment.exit_code
    if stopped is not None:
        code = errors.exit_code(stopped)
    if measurements or stopped is None or isinstance(stopped, KeyboardInterrupt):
        finish(stopped is not None, code, errors.reason(stopped))
    if stopped is not None and not isinstance(stopped, KeyboardInterrupt):
        raise stopped
    return code


def _only_cpu(args: argparse.Namespace) -> bool:
    """Whether -b names the CPU alone."""
    return args.backend is not None and all(name.strip().upper() == "CPU" for name in args.backend.split(",") if name)


def _given_ceilings(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.ceiling_tflops is None and args.ceiling_gbs is None:
        return None
    for option, value in (("--ceiling-tflops", args.ceiling_tflops), ("--ceiling-gbs", args.ceiling_gbs)):
        if value is not None and not 0 < value < math.inf:
            raise errors.Usage(f"{option} {value}: must be above 0 and finite")
    scaled = [
        None if x is None else statement.number(x * f)
        for x, f in ((args.ceiling_tflops, 1e12), (args.ceiling_gbs, 1e9))
    ]
    return {"compute_flop_per_s": scaled[0], "memory_bytes_per_s": scaled[1], "how": "given"}


def _ceiling_text(found: dict[str, Any]) -> str:
    rate, bandwidth = found["compute_flop_per_s"], found["memory_bytes_per_s"]
    parts = [f"{float(rate) / 1e12:.4g} TFLOP/s"] if rate else []
    parts += [f"{float(bandwidth) / 1e9:.4g} GB/s"] if bandwidth else []
    return f"{', '.join(parts)} ({found['how']})"


def _line(record: dict[str, Any]) -> str:
    """A measurement for the console."""
    label = f"  {record['who']} {record['pass']}{' ' + record['path'] if record['path'] else ''}"
    if record["unavailable"]:
        return f"{label}: unavailable: {record['unavailable']}"
    lines = [label]
    for found in record["timings"]:
        low, high = (f"{value / 1e6:.4g}" for value in found["interval_ns"])
        flop = record["work"]["flop"]
        speed = (
            f"  {flop / float(found['median_ns']) / 1e3:.4g} TFLOP/s"
            if flop
            else f"  FLOP/s {record['work']['reason']}"
        )
        middle, spread, least = (float(found[name]) / 1e6 for name in ("median_ns", "mad_ns", "min_ns"))
        lines.append(
            f"    {found['l2']} L2, {found['clock']:6} clock: median {middle:.4g} ms [{low}, {high}], "
            f"MAD {spread:.2g}, min {least:.4g}, n={len(found['samples_ns'])}{speed}"
        )
        if shaky := timing.unstable(found):
            lines.append(f"    {shaky}")
    notes = []
    if record["floor"] and record["floor"]["fraction"]:
        floors = {"memory": record["floor"]["memory_ns"], "compute": record["floor"]["compute_ns"]}
        named = ", ".join(f"{name} {float(value) / 1e6:.3g} ms" for name, value in floors.items() if value)
        notes.append(f"floor: {named}; {float(record['floor']['fraction']):.1%} of it reached")
    memory = record["memory"]
    if memory["buffers_bytes"] is not None:
        notes.append(f"buffers {memory['buffers_bytes'] / 2**20:.1f} MiB")
    if memory["peak_bytes"] is not None:
        peak = memory["peak_bytes"]
        notes.append(f"peak {peak / 2**20:.0f} MiB" if isinstance(peak, int) else f"peak {peak}")
    if record["error"]:
        values = ", ".join(f"{name} {float(value):.2g}" for name, value in record["error"]["nmse"].items())
        notes.append(f"NMSE {values} ({record['error']['scope']})")
    return "\n".join(lines + [f"    {note}" for note in notes])


COLUMNS = (
    "device", "case", "who", "pass", "path", "unavailable",
    "l2", "clock", "samples", "median_ns", "mad_ns", "min_ns", "low_ns", "high_ns",
    "flop", "buffers_bytes", "peak_bytes", "nmse_o", "nmse_dq", "nmse_dk", "nmse_dv",
)  # fmt: skip


def rows(measurements: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """COLUMNS of each timing; one row without a timing for what was unavailable."""
    for record in measurements:
        error = record["error"]["nmse"] if record["error"] else {}
        head = tuple(record[name] for name in COLUMNS[:6])
        tail = (
            record["work"]["flop"],
            record["memory"]["buffers_bytes"],
            record["memory"]["peak_bytes"],
            *(error.get(p) for p in ("o", "dq", "dk", "dv")),
        )
        for t in record["timings"] or [None]:
            columns = (None,) * 8
            if t is not None:
                statistics = (t[name] for name in ("median_ns", "mad_ns", "min_ns"))
                columns = (t["l2"], t["clock"], len(t["samples_ns"]), *statistics, *t["interval_ns"])
            yield (*head, *columns, *tail)


def _print(form: str, perf: dict[str, Any], watch: monitor.Monitor) -> None:
    if form == "json":
        print(json.dumps(perf, indent=1))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(perf["measurements"]))
    elif form == "md":
        print(tables.performance_table([perf]))
    else:
        print("\n".join(comparisons(perf)))
        for way in dict.fromkeys(r["pass"] for r in perf["measurements"]):
            print(f"work, {way}: {FORMULA[way]}")
        device, health = watch.report()["device"], watch.report()["health"]
        if device is None:
            print(f"GPU not watched: {watch.report()['device_reason']}")
        else:
            covers = "cover" if device["covers_run"] else "DO NOT cover"
            print(
                f"GPU {monitor.clocks(device)}; readings {covers} the run; other processes: {device['other_processes']}"
            )
        if health is not None:
            worst = (health["max_latency_ns"] or 0) / 1e6
            print(f"health: {health['failures']} of {len(health['polls'])} polls failed, worst latency {worst:.1f} ms")
    if form == "md" and (watched := watch.report()["device"]):
        print(f"\nGPU {monitor.clocks(watched)}.")


def comparisons(perf: dict[str, Any]) -> Iterator[str]:
    """Ours against each peer's same pass and against the base, a line each; nothing is called faster where intervals
    meet."""
    measured = [r for r in perf["measurements"] if not r["unavailable"]]
    own = {(r["device"], r["case"], r["pass"]): r for r in measured if r["who"] in OURS.values()}
    for peer in (r for r in measured if r["who"] not in OURS.values()):
        ours = own.get((peer["device"], peer["case"], peer["pass"]))
        if ours:
            found = timing.compare(timing.best_clock(ours, "warm"), timing.best_clock(peer, "warm"))
            settled = (found[0], "undecided") if perf["throttled"] else found
            what = f"{peer['device']} {peer['case']}: {peer['pass']}: against {peer['who']}"
            yield f"{what}: {timing.verdict_text(settled)}"
    for found in (perf["base"] or {"comparisons": []})["comparisons"]:
        text = timing.verdict_text((float(found["ratio"]), found["verdict"]))
        what = f"{found['who']} {found['pass']}, {found['l2']} L2, {found['clock']} clock"
        yield f"{found['device']} {found['case']}: {what}, against base: {text}"
