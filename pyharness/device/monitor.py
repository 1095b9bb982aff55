"""What the device, and a server that shares it, did while a run lasted.

A `Monitor` reads NVML ten times a second and polls a health URL once a second, each on its own thread, from before the
first allocation (entering it) to after the last free (leaving it). No NVML is not an error: the report then holds null
and the reason.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import re
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..base import cuda, errors

FIELDS = (
    "t_ns",
    "memory_bytes",
    "sm_mhz",
    "mem_mhz",
    "power_mw",
    "temp_c",
    "util_percent",
    "reasons",
    "other_processes",
)
REASONS = {  # nvmlClocksEventReasons
    1: "idle", 2: "application clocks", 4: "software power cap", 8: "hardware slowdown", 16: "sync boost",
    32: "software thermal slowdown", 64: "hardware thermal slowdown", 128: "power brake", 256: "display clocks",
}  # fmt: skip
LIMITS = {
    "thermal": (32 | 64, "thermally throttled"),
    "hardware": (8 | 128, "throttled by the hardware"),
    "power": (4, "power-capped"),
}
"""What holds clocks down, as the report counts it: the reasons, and the words for it."""
THROTTLED = LIMITS["thermal"][0] | LIMITS["hardware"][0]
"""A power cap is not among these: it is how a GPU runs at full load, and everything that is timed there meets it."""
_BODY = 65536  # bytes of a health answer that are read
KEPT = 2000  # samples that a report lists; a longer run keeps of each stretch the one with most memory in use

Reading = tuple[int | None, ...]  # FIELDS without t_ns; None = this GPU does not report it


class Nvml:
    """One GPU through NVML (nvidia-ml-py)."""

    def __init__(self, index: int = 0) -> None:
        """`index` is CUDA's ordinal; the same GPU is found by its PCI address. errors.Environment: no NVML, no GPU."""
        try:
            import pynvml

            self.api: Any = pynvml
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByPciBusId(cuda.pci_bus_id(index).encode())
        except ImportError as e:
            raise errors.Environment("the package nvidia-ml-py is not installed") from e
        except pynvml.NVMLError as e:
            raise errors.Environment(f"NVML: {e}") from e
        self._before: set[int] | None = None

    def get(self, name: str, *arguments: Any) -> Any:
        """nvmlDeviceGet<name>(handle, ...), None where this GPU, driver or sandbox does not report it."""
        try:
            return getattr(self.api, f"nvmlDeviceGet{name}")(self.handle, *arguments)
        except (self.api.NVMLError, AttributeError):
            return None

    def _others(self) -> int | None:
        """Compute processes beside this one.

        A sandbox can show pids of another namespace, so this process is the one that appeared after the first reading
        where its own pid is not listed."""
        listed = self.get("ComputeRunningProcesses")
        if listed is None:
            return None
        pids = {process.pid for process in listed}
        if self._before is None:
            self._before = pids - {os.getpid()}
        if os.getpid() in pids:
            return len(pids) - 1
        return len(pids & self._before) + max(0, len(pids - self._before) - 1)

    def read(self) -> Reading:
        """One reading; raises errors.Environment when the GPU no longer answers."""
        memory = self.get("MemoryInfo")
        if memory is None:
            raise errors.Environment("NVML: the GPU stopped answering")
        utilization = self.get("UtilizationRates")
        reasons = self.get("CurrentClocksEventReasons")
        return (
            memory.used,
            self.get("ClockInfo", self.api.NVML_CLOCK_SM),
            self.get("ClockInfo", self.api.NVML_CLOCK_MEM),
            self.get("PowerUsage"),
            self.get("Temperature", self.api.NVML_TEMPERATURE_GPU),
            None if utilization is None else utilization.gpu,
            self.get("CurrentClocksThrottleReasons") if reasons is None else reasons,
            self._others(),
        )


class _Every(threading.Thread):
    """Calls `action` at once, then every `period` seconds until stopped, then once more."""

    def __init__(self, period: float, action: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._period, self._action, self._stop_event = period, action, threading.Event()
        action()
        self.start()

    def run(self) -> None:
        due = time.monotonic() + self._period
        while not self._stop_event.wait(max(0.0, due - time.monotonic())):
            self._action()
            due = max(due + self._period, time.monotonic())

    def finish(self) -> None:
        """Stop, wait for the thread, call the action a last time on the caller's."""
        self._stop_event.set()
        self.join()
        self._action()


class Monitor:
    """Context manager around a run; `report()` after it."""

    def __init__(
        self,
        read: Callable[[], Reading] | None,
        *,
        period: float = 0.1,
        reason: str = "",
        health_url: str | None = None,
        health_period: float = 1.0,
    ) -> None:
        """`read` gives FIELDS after t_ns (None: no device to watch, for `reason`); periods in seconds."""
        self._read, self._period, self._reason = read, period, reason
        self._url, self._health_period = health_url, health_period
        self._samples: list[tuple[int | None, ...]] = []
        self._errors: list[str] = []
        self._polls: list[tuple[int, int | None, str]] = []
        self._threads: list[_Every] = []
        self._start = 0

    def __enter__(self) -> Monitor:
        self._start = time.monotonic_ns()
        if self._read is not None:
            self._threads.append(_Every(self._period, self.sample))
        if self._url is not None:
            self._threads.append(_Every(self._health_period, self._poll))
        return self

    def __exit__(self, *exception: object) -> None:
        for thread in self._threads:
            thread.finish()
        self._threads = []

    def mark(self) -> int:
        """Now, in the clock of t_ns: two marks bound a stretch for `peak`."""
        return time.monotonic_ns() - self._start

    def sample(self) -> None:
        """Take a reading now, beside the regular ones: where a short stretch has its memory."""
        if self._read is None:
            return
        at = self.mark()
        try:
            self._samples.append((at, *self._read()))
        except errors.Environment as e:
            self._errors.append(str(e))

    def _poll(self) -> None:
        assert self._url is not None
        at = self.mark()
        try:
            with urllib.request.urlopen(self._url, timeout=max(self._health_period, 1.0)) as response:
                data = response.read(_BODY)
                if len(data) < _BODY and response.length:
                    raise http.client.IncompleteRead(data, response.length)
                self._polls.append((at, self.mark() - at, str(response.status)))
        except urllib.error.HTTPError as e:
            self._polls.append((at, None, str(e.code)))
        except (OSError, ValueError, http.client.HTTPException) as e:  # refused, reset, timed out, cut off, not HTTP
            self._polls.append((at, None, type(getattr(e, "reason", e)).__name__))

    def _readings(self) -> list[tuple[int | None, ...]]:
        return sorted(self._samples, key=lambda sample: sample[0] or 0)

    def covers(self, since: int | None = None, until: int | None = None) -> bool:
        """Whether readings span [since, until] (marks; default: all), none failed, no gap is over ten periods."""
        times = [int(sample[0] or 0) for sample in self._readings()]
        if not times or self._errors:
            return False
        if (since is not None and times[0] > since) or (until is not None and times[-1] < until):
            return False
        return max((b - a for a, b in itertools.pairwise(times)), default=0) <= 10 * self._period * 1e9

    def peak(self, since: int | None = None, until: int | None = None) -> int | None:
        """Most device memory in use, bytes, between two marks; None when readings do not cover that stretch.

        A stretch that lies between two readings takes the reading before and the reading after it."""
        if not self.covers(since, until):
            return None
        readings = self._readings()
        times = [int(sample[0] or 0) for sample in readings]
        first = 0 if since is None else max(i for i, t in enumerate(times) if t <= since)
        last = len(times) - 1 if until is None else min(i for i, t in enumerate(times) if t >= until)
        used = [sample[1] for sample in readings[first : last + 1]]
        return max(value for value in used if value is not None)

    @property
    def latest(self) -> int | None:
        """Device memory in use at the last reading, bytes."""
        return self._samples[-1][1] if self._samples else None

    @property
    def baseline(self) -> int | None:
        """Device memory in use at the first reading, bytes."""
        return self._samples[0][1] if self._samples else None

    @property
    def throttled(self) -> bool:
        """Whether any reading showed a hardware or thermal slowdown or a power brake; a power cap is none."""
        return any((sample[FIELDS.index("reasons")] or 0) & THROTTLED for sample in self._samples)

    def report(self) -> dict[str, Any]:
        """The receipt's `monitor`: integers and strings only."""
        return {"device": self._device(), "device_reason": self._device_reason(), "health": self._health()}

    def _device_reason(self) -> str:
        if self._read is None:
            return self._reason
        return "" if self._samples else self._errors[0]

    def _device(self) -> dict[str, Any] | None:
        if not self._samples:
            return None
        readings = self._readings()
        times = [int(sample[0] or 0) for sample in readings]
        bits = 0
        for sample in readings:
            bits |= sample[FIELDS.index("reasons")] or 0
        others = [sample[FIELDS.index("other_processes")] for sample in readings]
        stride = -(-len(readings) // KEPT)
        kept = [
            max(readings[i : i + stride], key=lambda sample: sample[1] or 0) for i in range(0, len(readings), stride)
        ]
        peak = self.peak()
        return {
            "period_ms": round(self._period * 1e3),
            "fields": list(FIELDS),
            "samples": [list(sample) for sample in kept],
            "sampled": len(self._samples),
            "covers_run": self.covers(),
            "longest_gap_ns": max((b - a for a, b in itertools.pairwise(times)), default=0),
            "errors": sorted(set(self._errors)),
            "baseline_memory_bytes": self.baseline,
            "peak_memory_bytes": "unknown" if peak is None else peak,
            "reasons": [name for bit, name in REASONS.items() if bits & bit],
            "throttled": self.throttled,
            "limited": limited(FIELDS, readings),
            "other_processes": None if None in others else max(value or 0 for value in others),
        }

    def _health(self) -> dict[str, Any] | None:
        if self._url is None:
            return None
        latencies = [latency for _, latency, _ in self._polls if latency is not None]
        return {
            "url": public(self._url),
            "period_ms": round(self._health_period * 1e3),
            "polls": [list(poll) for poll in self._polls],
            "failures": len(self._polls) - len(latencies),
            "median_latency_ns": round(statistics.median(latencies)) if latencies else None,
            "max_latency_ns": max(latencies, default=None),
        }


def limited(fields: Sequence[str], readings: Iterable[Sequence[int | None]]) -> dict[str, int]:
    """How many readings say what limits the clocks, and how many of them name each of LIMITS."""
    reasons = [dict(zip(fields, reading, strict=False)).get("reasons") for reading in readings]
    known = [bits for bits in reasons if bits is not None]
    return {"readings": len(known)} | {name: sum(bool(bits & b) for b in known) for name, (bits, _) in LIMITS.items()}


def clocks(device: dict[str, Any]) -> str:
    """Whether a report's GPU was throttled or power-capped, and in how many of the readings, in words."""
    found = device.get("limited") or limited(device["fields"], device["samples"])  # older receipts count nothing
    total = found["readings"]
    if not total:
        return "throttling not reported"
    seen = [
        f"{words} in {found[name]} of {total} readings ({100 * found[name] / total:.1f} %)"
        for name, (_, words) in LIMITS.items()
        if found[name]
    ]
    throttled = found["thermal"] or found["hardware"]
    calm = [] if throttled else ["not throttled"]
    return ", ".join(calm + seen if seen else [*calm, "not power-capped"])


def contradictions(device: dict[str, Any]) -> Iterator[str]:
    """Where a report's counts of limited clocks do not fit the readings that it lists: all, or some of a long run."""
    listed = limited(device["fields"], device["samples"])
    counted = device.get("limited", listed)
    whole = device["sampled"] == len(device["samples"])
    for name, count in listed.items():
        if not (count == counted[name] if whole else count <= counted[name] <= device["sampled"]):
            yield f"{counted[name]} readings of limited clocks ({name}), but those listed give {count}"
    if device["throttled"] != bool(counted["thermal"] + counted["hardware"]):
        yield f"throttled is {device['throttled']}, which the readings contradict"


def public(url: str) -> str:
    """A URL without user, password, query and fragment."""
    scheme, mark, rest = re.split(r"[?#]", url)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--health-url and --no-monitor."""
    group = parser.add_argument_group("monitor")
    group.add_argument(
        "--health-url", metavar="URL", help="poll this http(s) URL once a second: a server that shares the GPU"
    )
    group.add_argument("--no-monitor", action="store_true", help="do not sample the GPU through NVML")


def from_args(args: argparse.Namespace) -> Monitor:
    """The monitor that the options select, of the GPU that -b names (the first when it names none)."""
    if args.health_url and not args.health_url.startswith(("http://", "https://")):
        raise errors.Usage(f"--health-url {args.health_url}: not an http or https URL", "write http://HOST:PORT/PATH")
    named = [cuda.ordinal(name) for name in (args.backend or "CUDA0").split(",")]
    index = next((i for i in named if i is not None), None)
    if args.no_monitor or index is None:
        reason = (
            "--no-monitor" if args.no_monitor else f"the run was limited to {args.backend}, which NVML does not see"
        )
        return Monitor(None, reason=reason, health_url=args.health_url)
    try:
        return Monitor(Nvml(index).read, health_url=args.health_url)
    except errors.Environment as e:
        return Monitor(None, reason=str(e), health_url=args.health_url)
