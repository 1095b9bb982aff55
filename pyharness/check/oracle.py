"""Check each backend's FLASH_ATTN_BACK against a float64 reference, part by part and head by head.

The NMSE, sum((got - want)^2) / sum(want^2), of each part and of each of its heads must not exceed the limit of
flash-attn-back-limits.def, a tighter one on kernel paths that compute in F32. Where plain F32 arithmetic cannot hold
it (few terms that cancel, scores of 60000), the squared error may be a multiple of what reference.rounding derives for
it. What the operator guarantees to be zero must be exactly zero: the gradient of a key that no row sees, of a row that
sees no key, and of a row whose incoming gradient is zero. An LSE that is infinite (no key, a sink of inf) must be
infinite. Where the true gradient cancels to zero (one key: dq = 0), fp16's error is compared with the operands of the
sum instead. dsinks has one number per head and is compared as a whole.

A case with pair=1 runs the forward, too: FLASH_ATTN_EXT and its gradient as autodiff makes them. Where a path of the
operator runs that forward its output is a part like the others; ggml's own is measured and neither passes nor fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import options
from ..base import errors
from ..case import cases, inputs, operands, reference
from ..case.cases import Case
from ..case.result import CaseResult, Forward, PartResult
from ..device import ggml, monitor
from ..receipts import statement, writing
from . import report

F64 = NDArray[np.float64]

BUSY = "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=4,nhkv=4,kv=512,nb=256)"
"""What the stream of --busy computes."""

ABORTED = "ggml aborted: "
"""What the reason of a case begins with in which an assertion of ggml ended the process."""

# a reference this small against its operands is zero up to float64 rounding
CANCELLED = 1e-9


def check(
    library: ggml.Library,
    device: ggml.Device,
    case: Case,
    seed: int,
    threads: int = 0,
    limits: dict[str, float] | None = None,
    repeats: int = 1,
    progress: Callable[[float], None] | None = None,
) -> CaseResult:
    """Run a case on a device and compare it with the reference. seed is the base seed."""
    reason = library.refusal(device, case)
    if reason is not None:
        return CaseResult(case, device.name, case.seed(seed), "unsupported", reason)
    given = inputs.make(case, seed)
    with library.prepare(device, given, threads) as session:
        session.compute()
        result = session.result()
        others = set[bytes]()
        if repeats > 1:
            first = session.again().copy()
            for _ in range(repeats - 2):
                now = session.again()
                if not np.array_equal(now, first):
                    others.add(hashlib.sha256(now.tobytes()).digest())
            last = session.result()
            result.guards += [name for name in last.guards if name not in result.guards]
            if last.digest != result.digest and not others:
                others.add(b"the checked run")
    parts = compare(given, result, reference.backward(given, progress), limits)
    forward = None
    if "o" in parts:
        forward = Forward(result.forward or cases.GGML, parts["o"].nmse, parts["o"].worst_head_nmse)
        if not result.forward:
            del parts["o"]  # not the operator's
    reasons = [f"guard words of {name} overwritten" for name in result.guards]
    if others:
        reasons.append(f"{1 + len(others)} different results in {repeats} runs")
    reasons += [f"{part.part}: {part.why or 'NMSE'}" for part in parts.values() if not part.passed]
    return CaseResult(
        case,
        device.name,
        case.seed(seed),
        "failed" if reasons else "ok",
        "; ".join(reasons),
        parts,
        result.digests,
        result.digest,
        result.path,
        result.seconds,
        repeats,
        1 + len(others),
        forward,
        result.units,
    )


@contextlib.contextmanager
def busy(library: ggml.Library, device: ggml.Device, seed: int, threads: int) -> Iterator[None]:
    """Inside, a second stream of the device computes without rest; raises what ended it before its time."""
    stop, ended = threading.Event(), list[errors.Failure]()

    def compete(session: ggml.Session) -> None:
        try:
            while not stop.is_set():
                session.compute()
        except errors.Failure as error:
            ended.append(error)

    with library.prepare(device, inputs.make(Case.parse(BUSY), seed), threads) as session:
        thread = threading.Thread(target=compete, args=(session,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
    if ended:
        raise ended[0]


def compare(
    given: operands.Inputs, result: ggml.Result, want: dict[str, F64], limits: dict[str, float] | None = None
) -> dict[str, PartResult]:
    """Each part of a result against the reference."""
    bounds = limits or cases.limits()
    sizes = _Operands(given)
    zero = _zeros(given, want)
    rounding = functools.cache(lambda: reference.rounding(given, want["lse"], want["d"]))
    return {
        part: _compare(
            part,
            given,
            result.parts[part],
            want[part],
            zero[part],
            sizes.of(part),
            rounding,
            result.unwritten[part],
            bounds,
            (result.forward or cases.GGML) if part == "o" else result.path,
        )
        for part in want
    }


def _compare(
    part: str,
    given: operands.Inputs,
    got32: NDArray[np.float32],
    want: F64,
    zero: NDArray[np.bool_],
    operands: F64,
    rounding: Callable[[], dict[str, F64]],
    unwritten: int,
    limits: dict[str, float],
    path: str,
) -> PartResult:
    got = got32.astype(np.float64)
    heads = 2 if want.ndim > 1 else 0
    inner = tuple(range(heads, want.ndim))
    infinite = np.isinf(want)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(infinite, np.where(got == want, 0, np.inf), np.abs(got - np.where(infinite, 0, want)))
    error[np.isnan(error)] = np.inf
    square = np.square(error)
    reference_square = np.square(np.where(infinite, 0, want))
    limit = cases.limit(limits, path)

    def ratio(e: F64, r: F64, o: F64, whole: bool) -> F64:
        """NMSE; for what cancels to zero or what F32 cannot hold, the error in units of its own limit."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(e == 0, 0.0, e / r)
            if path not in cases.f32_paths():
                cancelled = (r <= CANCELLED**2 * o) & (e > 0)
                value = np.where(cancelled, e / o * (limits["nmse"] / limits["zero"]), value)
            if part != "o" and (value > limit / 10).any():
                of_f32 = rounding()[part].sum() if whole else rounding()[part]
                value = np.fmin(value, e / (r + limits.get("rounding", 0) / limit * of_f32))
        return np.where(np.isnan(value), np.inf, value)

    head_error, head_reference = square.sum(axis=inner), reference_square.sum(axis=inner)
    by_head = np.atleast_1d(ratio(head_error, head_reference, operands, not heads))
    nmse = float(ratio(square.sum(), reference_square.sum(), operands.sum(), True)) if want.size else 0.0

    not_zero = zero & (got != 0)
    why = ""
    if unwritten:
        why = f"{unwritten} elements not written"
    elif not np.isfinite(got[~infinite]).all():
        why = "not finite"
    elif (got[infinite] != want[infinite]).any():
        why = "not infinite where no key counts"
    elif not_zero.any():
        why = "not exactly 0"
    worst_head_nmse = float(by_head.max(initial=0))
    passed = not why and nmse <= limit and worst_head_nmse <= limit

    if not want.size:
        return PartResult(part, nmse, (), 0.0, (), 0.0, (), 0.0, 0.0, limit, passed, why)
    worst_head = np.unravel_index(int(by_head.argmax()), by_head.shape) if heads else ()
    where = np.where(not_zero, np.inf, error) if why == "not exactly 0" else error
    if not why and heads:  # the worst element of the worst head
        outside = np.ones(want.shape[:heads], bool)
        outside[worst_head] = False
        where = np.where(outside.reshape(outside.shape + (1,) * len(inner)), -1, where)
    index = np.unravel_index(int(where.argmax()), want.shape)
    row = index[:3] if want.ndim == 4 else index
    row_error, row_reference = float(square[row].sum()), float(reference_square[row].sum())
    shift = (0, 0, given.kv_first, 0) if part in ("dk", "dv") else (0,) * want.ndim
    return PartResult(
        part=part,
        nmse=nmse,
        worst_head=tuple(map(int, worst_head)),
        worst_head_nmse=worst_head_nmse,
        worst_row=tuple(int(i + d) for i, d in zip(row, shift, strict=False)),
        worst_row_nmse=row_error / row_reference if row_reference else (0.0 if row_error == 0 else np.inf),
        worst_index=tuple(int(i + d) for i, d in zip(index, shift, strict=True)),
        got=float(got[index]),
        want=float(want[index]),
        limit=limit,
        passed=passed,
        why=why,
    )


def _zeros(given: operands.Inputs, want: dict[str, F64]) -> dict[str, NDArray[np.bool_]]:
    """Elements of each part that the operator promises to be exactly zero, broadcast to the part's shape."""
    still = np.asarray((given.d == 0).all(axis=3)).transpose(0, 2, 1)  # [S, H, N]: no incoming gradient
    rows = still | ~given.sees() | np.isinf(want["lse"])
    unseen = ~given.seen()[:, :, given.kv_first : given.kv_first + given.kv_count]
    nothing = np.zeros((), bool)
    flat = {
        "dq": rows[..., None],
        "dk": unseen[..., None],
        "dv": unseen[..., None],
        "lse": nothing,
        "d": rows,
        "dsinks": rows.all(axis=(0, 2)),
        "o": (~given.sees() | np.isinf(want["lse"]))[..., None],
    }
    return {part: np.broadcast_to(flat[part], array.shape) for part, array in want.items()}


class _Operands:
    """Squared size of what is summed in each head of a part: the scale of rounding errors where the sum cancels."""

    def __init__(self, given: operands.Inputs) -> None:
        s, h, hkv, _, _ = given.sizes
        self.shape, self.group = (s, h), h // hkv
        q, k, v, d = (np.square(x, dtype=np.float64).sum(axis=3) for x in given.shown())
        self.k, self.v = (x.max(axis=2, initial=0) for x in (k, v))  # the longest, [S, Hkv]
        self.q, self.d = q, d.transpose(0, 2, 1)  # [S, H, N]
        self.scale = given.scale**2

    def of(self, part: str) -> F64:
        """Per head of the part; per element for dsinks as a whole."""
        k, v = (np.repeat(x, self.group, axis=1) for x in (self.k, self.v))
        d = self.d.sum(axis=2)
        if part == "dq":
            return np.asarray(self.scale * d * v * k)
        if part == "dk":
            return np.asarray(self.scale * self._grouped((self.d * self.q).sum(axis=2)) * self.v)
        if part == "dv":
            return self._grouped(d)
        if part == "o":
            return np.asarray(self.q.shape[2] * v)
        if part == "lse":
            return np.asarray(self.scale * self.q.sum(axis=2) * k)
        return np.asarray((d * v).sum()) if part == "dsinks" else np.asarray(d * v)

    def _grouped(self, by_head: F64) -> F64:
        s, h = self.shape
        return np.asarray(by_head.reshape(s, h // self.group, self.group).sum(axis=2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `oracle`."""
    options.selection(parser)
    options.graph(parser)
    parser.add_argument(
        "--lf",
        "--last-failed",
        dest="last_failed",
        action="store_true",
        help="of these only cases that failed in the newest receipt of the folder --receipts; all where none did",
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a run once its cases are known."""
    options.backend(parser)
    options.seed(parser)
    options.strict(parser)
    options.output(parser)
    monitor.add_arguments(parser)
    parser.add_argument("-x", "--fail-fast", action="store_true", help="stop after the first case that fails")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="compute each case N times and compare the bits"
    )
    parser.add_argument("--busy", action="store_true", help="beside a second stream of the device that never rests")
    parser.add_argument(
        "--timeout", type=float, default=1800, metavar="S", help="time limit of one case in seconds (default: 1800)"
    )
    parser.add_argument(
        "--receipts",
        type=Path,
        default=ggml.ROOT / "receipts",
        metavar="DIR",
        help="where the receipt goes (default: receipts)",
    )
    parser.add_argument(
        "--no-receipt",
        action="store_true",
        help="write no receipt, and accept libraries that were built from other sources",
    )


def run(args: argparse.Namespace) -> int:
    """Check the selected cases."""
    selected = options.select(args)
    return execute(args, last_failed(selected, args.receipts) if args.last_failed else selected)


def last_failed(selected: list[Case], receipts: Path) -> list[Case]:
    """The cases that failed in the newest oracle receipt of a folder; all of them where none of them did."""
    newest = max(receipts.glob("*-oracle-*.json"), key=lambda path: path.stat().st_mtime_ns, default=None)
    records = statement.read(newest)["predicate"]["receipt"]["cases"] if newest else []
    failed = {record["case"] for record in records if record["status"] == "failed"}
    return [case for case in selected if str(case) in failed] or selected


def execute(args: argparse.Namespace, selected: list[Case], checks: Sequence[dict[str, Any]] = ()) -> int:
    """Check cases on the devices that the options name, report, write the receipt; returns the exit code.

    `checks` were made before, as the receipt records them: one that did not pass makes it 1."""
    with monitor.from_args(args) as watch:  # before the first allocation: to list CUDA devices makes a context
        library = options.library(args)
        devices = options.devices(args, library)
        if not args.no_receipt:
            writing.check_source(library)
        limits = cases.limits()
        work = [(device, case) for device in devices for case in selected]
        results: list[CaseResult] = []
        started = time.time()
        stopped, reason = 0, ""
        stuck = False

        def save(seen: dict[str, Any] | None, code: int, reason: str = "") -> None:
            if not args.no_receipt:
                partial = len(results) < len(work)
                files = [args.case_file] if "case_file" in args else []
                finished = time.time()
                writing.save(
                    args.receipts,
                    statement.build(
                        args.verb,
                        library,
                        results,
                        seed=args.seed,
                        partial=partial,
                        started=started,
                        finished=finished,
                        case_files=files,
                        exit_code=code,
                        reason=reason,
                        selection=writing.selection(args, selected, devices),
                        checks=checks,
                        monitor=seen,
                    ),
                )

        with report.Reporter(args.output, len(work), args.seed) as reporter:

            def aborted(message: str) -> None:
                device, case = work[len(results)]
                why = f"{ABORTED}{message.strip()}"
                results.append(CaseResult(case, device.name, case.seed(args.seed), "failed", why))
                reporter.case(results[-1])
                reporter.finish(results, len(work))
                save(None, 1)
                reporter.flush()
                os._exit(1)

            otherwise, library.on_abort = library.on_abort, aborted
            try:
                with contextlib.ExitStack() as streams:
                    for device in devices if args.busy else ():
                        streams.enter_context(busy(library, device, args.seed, args.threads))
                    for device, case in work:
                        reporter.start(case)

                        def one(device: ggml.Device = device, case: Case = case) -> CaseResult:
                            return check(
                                library, device, case, args.seed, args.threads, limits, args.repeat, reporter.fraction
                            )

                        try:
                            result = _timed(one, args.timeout)
                        except TimeoutError:
                            why = f"not finished within {args.timeout:g} s"
                            result = CaseResult(case, device.name, case.seed(args.seed), "failed", why)
                            stuck = True
                        except errors.Lost:
                            raise
                        except (errors.Environment, errors.Usage, MemoryError) as error:
                            why = str(error) or "out of memory"
                            result = CaseResult(case, device.name, case.seed(args.seed), "skipped", why)
                        except errors.Failure as error:
                            result = CaseResult(case, device.name, case.seed(args.seed), "failed", str(error))
                        results.append(result)
                        reporter.case(result)
                        if stuck or (args.fail_fast and result.status == "failed"):
                            break
            except KeyboardInterrupt:
                stopped, stuck = errors.INTERRUPTED, True
            except errors.Failure as error:  # the device is lost, or what was to keep it busy ended
                reporter.flush()
                print(f"pyharness {args.verb}: {error}", file=sys.stderr)
                stopped, reason = error.exit_code, str(error)
            library.on_abort = otherwise
            reporter.finish(results, len(work))
    code = stopped or exit_code(results, args.strict) or int(not all(check["passed"] for check in checks))
    if not reason and code == 1 and args.strict:
        reason = "--strict: not every case ran"
    save(watch.report(), code, reason)
    if stuck:  # the thread of the case is still in ggml or BLAS
        reporter.flush()
        os._exit(code)
    return code


def exit_code(results: list[CaseResult], strict: bool) -> int:
    """0 if all is well, 1 if a case failed; under strict also if one did not run; 3 if nothing ran at all."""
    states = {result.status for result in results}
    if "failed" in states or (strict and states - {"ok"}):
        return 1
    return 0 if "ok" in states else errors.Environment.exit_code


def _timed(work: Callable[[], CaseResult], timeout: float) -> CaseResult:
    """The result of work on a thread of its own, so that time and Ctrl-C are noticed while C code runs."""
    box: queue.Queue[CaseResult | BaseException] = queue.Queue()

    def target() -> None:
        try:
            box.put(work())
        except BaseException as error:
            box.put(error)

    threading.Thread(target=target, daemon=True).start()
    try:
        outcome = box.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
