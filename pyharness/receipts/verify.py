"""Whether a receipt is whole, agrees with itself, and is about the tree that lies here.

It stops mistakes: a stale build, an edited file, another library, a loosened limit, a hand-corrected number. Without a
signature it does not stop somebody who makes up a whole receipt; with one it says who vouches, not that it is true.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import errors
from ..base.digest import ROOT
from ..case import cases
from ..device import monitor
from . import commits, losses, signing, statement, summary, timing
from .statement import Document

if TYPE_CHECKING:
    pass

OK, FAILED, INVALID, STALE = 0, 1, 4, 6
SECONDS = 10.0
"""That applying a receipt's filter again may take."""


@dataclass(frozen=True)
class Finding:
    """One thing that a step found: `code` 0 is a remark, any other is what the exit code would be."""

    step: str
    code: int
    text: str


def check(
    path: Path, *, key: Path | None = None, libs: Path | None = None, sources_only: bool = False, root: Path = ROOT
) -> list[Finding]:
    """Every step but replay; the first finding with a code other than 0 decides. Findings of one step come together.

    `libs`: a folder that must hold the libraries that ran. Without it a library is compared where the receipt says it
    lay, when there is one; `sources_only` leaves libraries alone. Raises errors.Usage where there is no such folder."""
    if libs is not None and not libs.is_dir():
        raise errors.Usage(f"{libs}: not a folder, so it holds no library that ran")
    try:
        document = statement.parse(path)
    except errors.Invalid as e:
        return [Finding("schema", INVALID, f"{e}; {e.hint}")]
    problems = statement.schema_errors(document)
    if problems:
        return [Finding("schema", INVALID, text) for text in problems[:5]]
    with commits.History(root) as history:
        return examine(document, path, history, key=key, libs=libs, sources_only=sources_only, root=root)


def examine(
    document: Document,
    path: Path,
    history: commits.History,
    *,
    key: Path | None = None,
    libs: Path | None = None,
    sources_only: bool = False,
    root: Path = ROOT,
) -> list[Finding]:
    """What `check` finds in a document that fits the schema; `path` is its file, `history` that of `root`."""
    found = [*_identity(document, path), *_signature(path, key, root)]
    found += [Finding("sums", INVALID, text) for text in sums(document)]
    origin = commits.origin(document["predicate"]["receipt"], history)
    found += files(document, root, str(origin) if origin.commit or origin.recorded else "")
    if not sources_only:
        found += _libraries(document, libs, root)
    return found + list(_run(document, path, root)) + list(_commit(origin, history))


def _signature(path: Path, key: Path | None, root: Path) -> Iterator[Finding]:
    """By the key that is demanded, else by any of the repository's."""
    if not signing.envelope_path(path).exists() and key is None:
        yield Finding("signature", OK, "unsigned")
        return
    keys = [key] if key else sorted((root / signing.KEYS).glob("*.pem"))
    if not keys:
        yield Finding("signature", OK, f"not checked: no key in {signing.KEYS}; --key PUBLIC.pem checks it")
        return
    problems = []
    for one in keys:
        try:
            yield Finding("signature", OK, f"signed by {one.name}, key {signing.check(path, one)[:12]}")
            return
        except errors.Invalid as e:
            problems.append(str(e))
        except errors.Environment as e:
            if key:
                raise
            yield Finding("signature", OK, f"not checked: {e}")
            return
    yield Finding("signature", INVALID, "; ".join(problems))


def _run(document: Document, path: Path, root: Path) -> Iterator[Finding]:
    """How the run went, and how much of its list it is about."""
    body, predicate = document["predicate"]["receipt"], document["predicate"]
    if "check" in body:
        absent = [name for name in body["check"]["receipts"] if not path.with_name(name).exists()]
        if absent:
            yield Finding("run", OK, f"receipts of its steps that do not lie beside it: {_names(absent)}")
    lacking = [name for name in ("ended", "selection", "checks") if name not in body]
    if lacking:
        what = "the run's exit code, the digest of its case list, its filter and its checks"
        yield Finding("run", OK, f"an early receipt (schema {body['schema']}) that does not hold {what}")
    if body["partial"]:
        yield Finding("run", OK, "partial: the run ended early")
    if predicate["result"] == "FAILED" or ("ended" in body and body["ended"]["exit_code"]):
        code = f", exit code {body['ended']['exit_code']}" if "ended" in body else ""
        failed = predicate["failedTests"]
        why = "; ".join([*failed[:3], *(["..."] if len(failed) > 3 else [])]) if failed else body["ended"]["reason"]
        yield Finding("run", OK, f"{predicate['result']}{code}: {why}")
    chosen = body.get("selection")
    if chosen:
        yield from _selected(body, chosen, root)
    elif body["counts"]["listed"]:
        tried = {record["case"] for record in statement.tried(body)}
        if len(tried) != body["counts"]["listed"]:
            yield Finding("run", OK, f"{len(tried)} of {body['counts']['listed']} cases")


def _selected(body: Document, chosen: dict[str, Any], root: Path) -> Iterator[Finding]:
    """Whether the list of this tree, where it is the run's, gives the cases that the receipt names."""
    listed, selected, words = chosen["listed"], chosen["selected"], chosen["filter"]
    given = [f"{option} {words[name]!r}" for name, option in (("op", "-o"), ("params", "-p")) if words[name]]
    part = selected["count"] - chosen["unlisted"]
    if part != listed["count"] or chosen["unlisted"]:
        more = f" and {chosen['unlisted']} that the list does not have" if chosen["unlisted"] else ""
        yield Finding("run", OK, f"{part} of {listed['count']} cases{more}: {' '.join(given) or 'no filter'}")
    then = {f["path"]: f["sha256_lf"] for f in body["inputs"]}.get(chosen["file"])
    if chosen["file"] is None or then is None or not os.path.isfile(root / chosen["file"]):
        return
    if statement.fingerprint(root, chosen["file"])["sha256_lf"] != then:
        return  # stale, which `files` finds
    again: list[cases.Case] = []
    try:
        with _within(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd expressions
            here = (
                cases.random_cases(words["random"], body["seed"])
                if words["random"]
                else cases.load(root / chosen["file"])
            )
            here = cases.in_graphs(here, words["graphs"]) if words["graphs"] else here
            same = statement.cases_digest(map(str, here)) == listed
            again = cases.select(here, words["op"], words["params"]) if same else []
    except (errors.Failure, OverflowError, RecursionError, MemoryError, TimeoutError) as e:
        yield Finding("sums", INVALID, f"selection: {chosen['file']} and {' '.join(given) or 'no filter'}: {e!r}")
        return
    if not same:
        yield Finding("sums", INVALID, f"selection: {listed['count']} cases listed are not those of {chosen['file']}")
    elif statement.cases_digest(map(str, again)) != selected:
        text = f"selection: {' '.join(given) or 'no filter'} selects {len(again)} cases of {chosen['file']}"
        yield Finding("sums", INVALID, f"{text}, the receipt is about {selected['count']}")


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """TimeoutError where what a receipt gives, an expression or a number of random cases, takes longer than this; only
    in the main thread, which alone signals reach, and not on Windows, which has no timer for it."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before, timer = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def _commit(origin: commits.Origin, history: commits.History) -> Iterator[Finding]:
    """The commit whose files the receipt stands on."""
    recorded = origin.recorded
    if origin.differing and recorded:
        names = _names(origin.differing)
        text = f"the run found commit {recorded['commit'][:12]} unchanged, which has other contents of {names}"
        yield Finding("commit", INVALID, text)
    elif origin.commit:
        there = f", which the history here does not {'reach' if history else 'tell'}"
        yield Finding("commit", OK, f"the files are those of {origin}{'' if origin.commit in history else there}")
        if recorded and recorded["commit"] != origin.commit:
            many = f", which differed in {len(recorded['dirty']['paths'])} paths" if recorded["dirty"] else ""
            yield Finding("commit", OK, f"the run's checkout was at commit {recorded['commit'][:12]}{many}")
    elif recorded:
        names = _names(recorded["dirty"]["paths"])
        text = f"DIRTY: the checkout differed from commit {recorded['commit'][:12]} in {names}"
        yield Finding("commit", OK, f"{text}, and no commit {'here ' if history else ''}is known to have its files")
    else:
        yield Finding("commit", OK, "no commit is known to have these files")


def _names(paths: Sequence[str]) -> str:
    return ", ".join(paths[:5]) + (" ..." if len(paths) > 5 else "")


def exit_code(findings: list[Finding]) -> int:
    """Code of the first finding that is not a remark."""
    return next((f.code for f in findings if f.code), OK)


def _identity(document: Document, path: Path) -> Iterator[Finding]:
    body = document["predicate"]["receipt"]
    if statement.identify(document) == body["id"]:
        if path.name != statement.file_name(body) and (path.name, body["mode"]) != (summary.FILE, summary.MODE):
            yield Finding("id", INVALID, f"the file of this receipt is named {statement.file_name(body)}")
        return
    edited = []
    seals = statement.seals(body)
    for name in sorted(seals.keys() | body["seals"].keys()):
        if seals.get(name) != body["seals"].get(name):
            kind, _, index = name.partition("/")
            timed = (body["perf"] or {"measurements": []})["measurements"]
            records = body["cases"] if kind == "cases" else timed if kind == "perf" and index else []
            here = int(index) < len(records) if index.isdigit() else False
            edited.append(f"{name} ({statement.name_of(records[int(index)])})" if here else name)
    where = ", ".join(edited) or "the statement around the receipt"
    yield Finding("id", INVALID, f"changed after it was written: {where}")


def sums(document: Document) -> Iterator[str]:
    """What in a document contradicts the rest of it."""
    body, predicate = document["predicate"]["receipt"], document["predicate"]
    ends = statement.outcome(body)
    counts = ends.pop("counts")
    for name, want in ends.items():
        if predicate[name] != want:
            yield f"{name} is {_short(predicate[name])}, but the cases give {_short(want)}"
    for name, count in counts.items():
        if body["counts"][name] != count:
            yield f"counts: {body['counts'][name]} {name}, but {count} are listed"
    if document["subject"] != statement.subject(body):
        yield "subject does not list the patch files and libraries of the receipt"
    if predicate["configuration"] != statement.configuration(body):
        yield "configuration does not list the hooks, harness and case files of the receipt"
    if body["harness"] != statement.harness_digest(body["inputs"]):
        yield "harness is not the digest of the harness files listed"
    if body["patch"] != statement.patch_digest(body["inputs"]):
        yield "patch is not the digest of the patch files listed"
    if body["finished"] < body["started"]:
        yield f"finished {body['finished']} before it started {body['started']}"
    yield from _ended_sums(body, ends["failedTests"])
    yield from _twice(body)
    for item in body["libraries"]:
        if item["source"] not in (None, body["patch"]):
            yield f"{item['name']} was built from {item['source'][:12]}, not from the patch {body['patch'][:12]}"
    for record in body["cases"]:
        yield from (f"{statement.name_of(record)}: {text}" for text in _case_sums(record, body))
    for record in (body["perf"] or {"measurements": []})["measurements"]:
        yield from (f"{statement.name_of(record)}, {record['who']}: {text}" for text in _perf_sums(record, body))
    if "train" in body:
        yield from _train_sums(body["train"])
    if "check" in body:
        check = body["check"]
        for step in [step for step in check["asked"] if step not in check["steps"]] * (not body["partial"]):
            yield f"step {step} was to run and is missing, but the run is not partial"
    yield from _monitor_sums(body["monitor"])


def _ended_sums(body: Document, failed: Sequence[str]) -> Iterator[str]:
    """Whether exit code, checks and the cases that were to run fit what is listed."""
    for check in body.get("checks", ()):
        within = float(check["found"]) <= float(check["limit"])
        if check["limit"] != body["limits"]["nmse"] or check["passed"] != within:
            yield f"{check['name']}: {check['found']} of at most {check['limit']} is not what passed or the limits say"
    if "ended" in body:
        code, reason = body["ended"]["exit_code"], body["ended"]["reason"]
        if code == 0 and (failed or body["partial"]):
            yield f"exit code 0, but {f'{len(failed)} cases or checks failed' if failed else 'the run is partial'}"
        if code and not failed and not reason:
            yield f"exit code {code} without a reason"
    chosen = body.get("selection")
    if chosen:
        for device in chosen["devices"]:
            names = list(dict.fromkeys(r["case"] for r in statement.tried(body) if r["device"] == device))
            if not body["partial"] and statement.cases_digest(names) != chosen["selected"]:
                yield f"{len(names)} cases on {device} are not the {chosen['selected']['count']} that were selected"
        others = {record["device"] for record in statement.tried(body)} - set(chosen["devices"])
        yield from (f"cases on {device}, which was not selected" for device in sorted(others))


def _twice(body: Document) -> Iterator[str]:
    """Cases and measurements that stand in a receipt more than once."""
    timed = (body["perf"] or {"measurements": []})["measurements"]
    names = Counter(statement.name_of(record) for record in body["cases"])
    names += Counter(f"{statement.name_of(r)}, {r['who']} {r['pass']}" for r in timed)
    yield from (f"{name}: {count} times" for name, count in names.items() if count > 1)


def _short(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list) else str(value)


def _seed(record: dict[str, Any], body: Document) -> Iterator[str]:
    try:
        case = cases.Case.parse(record["case"])
    except errors.Usage as e:
        yield f"not a case: {e}"
        return
    if record["case"] != str(case):
        yield f"the case string is not canonical: {case}"
    if record["seed"] != str(case.seed(body["seed"])):
        yield f"seed {record['seed']} is not this case's under --seed {body['seed']}"


def _case_sums(record: dict[str, Any], body: Document) -> Iterator[str]:
    yield from _seed(record, body)
    for name, part in record["parts"].items():
        limit = cases.limit(body["limits"], record["forward"]["by"] if name == "o" else record["path"])
        if part["limit"] != limit:
            yield f"{name}: limit {part['limit']}, but the limits say {limit}"
        within = statement.worst_nmse(part) <= float(part["limit"]) and not part["why"]
        if part["passed"] and not within:
            yield f"{name}: NMSE {part['nmse']} (worst head {part['worst_head_nmse']}) does not pass {part['limit']}"
    passed = all(part["passed"] for part in record["parts"].values())
    if record["status"] == "ok" and not (passed and record["parts"] and record["distinct"] == 1):
        yield "status is ok, but its parts or repeats say otherwise"
    if record["status"] != "ok" and not record["reason"]:
        yield f"{record['status']} without a reason"


def _perf_sums(record: dict[str, Any], body: Document) -> Iterator[str]:
    yield from _seed(record, body)
    for one in record["timings"]:
        label = f"{one['l2']} L2, {one['clock']} clock"
        for name, want in timing.statistics(one["samples_ns"]).items():
            if one[name] != want:
                yield f"{label}: {name} is {one[name]}, but the samples give {want}"
    if bool(record["timings"]) == bool(record["unavailable"]):
        yield "has both samples and a reason for having none, or neither"


def _train_sums(record: dict[str, Any]) -> Iterator[str]:
    for check in record["checks"]:
        if check["passed"] != (float(check["found"]) <= float(check["limit"])):
            yield f"{check['name']}: {check['found']} of at most {check['limit']} is not what passed says"
    missing = [name for name in ("schedule", "noise") if name not in record]
    missing += ["losses of the control run"] if "control" not in record["runs"] else []
    if missing:
        yield f"training: no {', no '.join(missing)}, which receipts hold by now; train again"
    found = {check["name"]: check["found"] for check in record["checks"]}
    for check in _train_checks(record):
        if found.get(check.name) != statement.number(check.found):
            then = found.get(check.name, "missing")
            yield f"{check.name}: is {then}, but losses and gradients give {statement.number(check.found)}"


def _train_checks(record: dict[str, Any]) -> list[losses.Check]:
    """The checks that follow from what a training recorded; none from receipts that hold too little."""
    if "control" not in record["runs"] or "noise" not in record:
        return []
    found = {name: [float(loss) for loss in run["losses"]] for name, run in record["runs"].items()}
    gradients = {name: float(error) for name, error in record["gradients"].items()}
    return losses.compare(found, gradients, float(record["noise"]), losses.LIMITS[record["device"]])


def _monitor_sums(report: dict[str, Any]) -> Iterator[str]:
    device, health = report["device"], report["health"]
    if (device is None) != bool(report["device_reason"]):
        yield "monitor: device readings and a reason for having none exclude each other"
    if device is not None and device["covers_run"]:
        peak = max(sample[device["fields"].index("memory_bytes")] or 0 for sample in device["samples"])
        if peak != device["peak_memory_bytes"]:
            yield f"monitor: the peak is {device['peak_memory_bytes']}, but the readings give {peak}"
    if device is not None:
        yield from (f"monitor: {text}" for text in monitor.contradictions(device))
    if health is not None and health["failures"] != sum(poll[1] is None for poll in health["polls"]):
        yield f"monitor: {health['failures']} failed polls, but the polls say otherwise"


def files(document: Document, root: Path = ROOT, about: str = "") -> list[Finding]:
    """The receipt's files against the tree: missing is unverifiable, changed or new stale, line ends only a remark.
    `about` names the receipt's commit."""
    body = document["predicate"]["receipt"]
    then = {f["path"]: f for f in body["inputs"]}
    outside = {path for path, f in then.items() if f["role"] in ("cases", "data") and "/" not in path}
    now = {f["path"]: f for f in statement.inputs(body["mode"], root=root)}
    now |= {
        p: {"role": f["role"], **statement.fingerprint(root, p)}
        for p, f in then.items()
        if p not in now and os.path.isfile(root / p)
    }
    made = f" (the receipt is about {about})" if about else ""
    found = []
    for path in sorted(then.keys() | now.keys()):
        old, new = then.get(path), now.get(path)
        role = (old or new or {})["role"]
        deciding = role != "harness"
        if path in outside:
            found.append(Finding("files", OK, f"{path} lies outside the tree: not compared"))
        elif new is None:
            found.append(
                Finding(
                    "files", INVALID if role == "patch" else STALE if deciding else OK, f"{path} is missing here{made}"
                )
            )
        elif old is None:
            found.append(Finding("files", STALE if deciding else OK, f"{path} is new since the receipt{made}"))
        elif old["sha256"] != new["sha256"]:
            if old["sha256_lf"] == new["sha256_lf"]:
                found.append(Finding("files", OK, f"{path} differs in line ends only"))
            else:
                found.append(
                    Finding(
                        "files",
                        STALE if deciding else OK,
                        f"{path} has changed{made if deciding else ' (decides no result)'}",
                    )
                )
    limits = (
        cases.limits(root / cases.LIMITS.relative_to(ROOT)) if (root / cases.LIMITS.relative_to(ROOT)).is_file() else {}
    )
    then_limits, now_limits = body["limits"], {name: statement.number(value) for name, value in limits.items()}
    if "train" in body:
        recorded = {check["name"]: check["limit"] for check in body["train"]["checks"]}
        checks = [check for check in _train_checks(body["train"]) if check.name in recorded]
        then_limits = then_limits | {check.name: recorded[check.name] for check in checks}
        now_limits |= {check.name: statement.number(check.limit) for check in checks}
    for name in sorted(then_limits.keys() | now_limits.keys()):
        then_limit, now_limit = then_limits.get(name), now_limits.get(name)
        if then_limit != now_limit:
            found.append(
                Finding("files", STALE, f"limit {name} was {then_limit} in the receipt and is {now_limit} here")
            )
    return sorted(found, key=lambda f: f.code not in (INVALID, STALE))


def _libraries(document: Document, libs: Path | None, root: Path) -> Iterator[Finding]:
    absent = []
    for item in document["predicate"]["receipt"]["libraries"]:
        path = libs / item["name"] if libs else root / item["path"] if item["path"] else None
        if path is None or not os.path.isfile(path):  # nor one whose name the system does not take
            absent.append(item["name"])
        elif statement.sha256(path) != item["sha256"]:
            text = f"{item['name']} here is not the library that ran; --sources-only leaves libraries alone"
            yield Finding("libraries", STALE, text)
    if absent:
        yield Finding("libraries", INVALID if libs else OK, f"not here, so not compared: {', '.join(absent)}")


def same_error(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two errors of the same bits are one but for the rounding of the float64 reference, which other BLAS
    kernels and thread counts change: 1e-8 of an NMSE, all of one below 1e-25."""
    return all(
        math.isclose(float(then[name]), float(now[name]), rel_tol=1e-6, abs_tol=1e-25)
        or (math.isnan(float(then[name])) and math.isnan(float(now[name])))
        for name in ("nmse", "worst_head_nmse")
    )


def manifest_of(source: str, places: list[Path]) -> dict[str, str] | None:
    """The files that a library with this compiled-in digest was built from: from the manifest that its build left."""
    for place in places:
        for path in sorted(place.rglob("ggml-flash-attn-back*.sha256")) if place.is_dir() else []:
            lines = [
                line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
            ]
            if hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest() == source:
                return {line[66:]: line[:64] for line in lines}
    return None
