"""The receipt as a document: an in-toto Statement v1 with a test-result v0.1 predicate and one extension object.

Rules: RFC 8785 canonical JSON; `predicate.receipt.id` is the sha256 of the document without it; measured numbers are
strings, times are integer nanoseconds, paths are relative with "/" between folders.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import rfc8785

from ..base import digest, errors, system
from ..base.digest import ROOT
from ..case import capture_file, cases
from ..case.cases import Case
from ..case.result import CaseResult, PartResult
from ..device import environment
from ..device.folder import Folder
from ..device.ggml import Library
from ..device.monitor import public
from . import commits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


Document = dict[str, Any]

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
VERSION = "1.1.0"
SCHEMA = Path(__file__).with_name("schema") / "receipt-1.json"

OPERATOR, FORWARD = "flash_attn_back", "flash_attn_ext"
OURS = {"forward": FORWARD, "backward": OPERATOR, "forward+backward": f"{FORWARD} + {OPERATOR}"}
"""`who` of a measurement of ours by its pass; every other name is a peer."""

MEASURES = {
    "capture_file",
    "cases",
    "ggml",
    "ggml_cdef",
    "inputs",
    "operands",
    "oracle",
    "quant",
    "reference",
    "result",
    "shapes",
    "soak",
}
MEASURES_PERF = MEASURES | {"bench", "cuda", "fa3", "pair", "peers", "perf", "timing"}
MEASURES_TRAIN = {"losses", "tiny", "train"}
"""Modules of the harness that decide a result; the others may change without making a receipt stale."""


# ---- numbers and digests ----


def number(value: float) -> str:
    """A measured float: the shortest text that reads back as the same float64; nan and inf are words."""
    return repr(float(value))


def moment(seconds: float) -> str:
    """RFC 3339 UTC of a time.time()."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def median(samples: Sequence[int]) -> str:
    """Median of integer nanoseconds: exact, so with .5 where two samples share the middle."""
    return number(statistics.median(samples))


def mad(samples: Sequence[int]) -> str:
    """Median absolute deviation from the median, nanoseconds."""
    middle = statistics.median(samples)
    return number(statistics.median(abs(s - middle) for s in samples))


def canonical(document: Document) -> bytes:
    """RFC 8785 bytes."""
    return rfc8785.dumps(document)


def identify(document: Document) -> str:
    """sha256 of the canonical document without its id."""
    bare = copy.copy(document)
    bare["predicate"] = copy.copy(bare["predicate"])
    bare["predicate"]["receipt"] = {k: v for k, v in bare["predicate"]["receipt"].items() if k != "id"}
    return hashlib.sha256(canonical(bare)).hexdigest()


def sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            total.update(block)
    return total.hexdigest()


def seals(body: Document) -> dict[str, str]:
    """Short digests of the members of `predicate.receipt`, each case and each measurement apart.

    They add nothing to the id; where the id does not fit, they say what was edited."""
    members = {k: v for k, v in body.items() if k not in ("id", "seals", "cases", "perf")}
    members |= {f"cases/{i}": record for i, record in enumerate(body["cases"])}
    if body["perf"]:
        members |= {f"perf/{i}": record for i, record in enumerate(body["perf"]["measurements"])}
        members["perf"] = {k: v for k, v in body["perf"].items() if k != "measurements"}
    return {name: hashlib.sha256(canonical(value)).hexdigest()[:16] for name, value in members.items()}


def fingerprint(root: Path, path: str) -> dict[str, str]:
    """Of one file: sha256 of its bytes, sha256 with LF line ends, git's blob id (of the bytes as they lie there)."""
    data = (root / path).read_bytes()
    return {
        "path": path,
        "sha256": hashlib.sha256(data).hexdigest(),
        "sha256_lf": hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest(),
        "git_blob": hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest(),
    }


def inputs(mode: str, extra: Iterable[tuple[str, Path]] = (), root: Path = ROOT) -> list[dict[str, str]]:
    """Every file of the tree that a receipt of this mode stands on, by role and path.

    Roles: patch (the operator's sources), hooks (edits and pins), measure (harness modules that decide results),
    harness (the others); `extra` adds (role, path) for case lists and captures, outside the tree by name."""
    measuring = {
        "perf": MEASURES_PERF,
        "train": MEASURES_TRAIN,
        "replay": MEASURES | {"replay"},
        "gpucheck": MEASURES_PERF | MEASURES_TRAIN | {"gpucheck"},
    }.get(mode, MEASURES)
    found: dict[str, tuple[str, Path]] = {f"ggml/{path}": ("patch", root) for path in digest.sources(root)}
    hooks = [*(root / "ggml/edits").glob("*.toml"), root / "ggml/upstream.toml"]
    found |= dict.fromkeys((path.relative_to(root).as_posix() for path in hooks), ("hooks", root))
    for module in [*(root / "pyharness").rglob("*.py"), *(root / "pyharness/receipts/schema").glob("*.json")]:
        role = "measure" if module.suffix == ".py" and module.stem in measuring else "harness"
        found[module.relative_to(root).as_posix()] = (role, root)
    for role, path in extra:
        path = path.resolve()
        inside = path.is_relative_to(root.resolve())
        found.setdefault(
            path.relative_to(root.resolve()).as_posix() if inside else path.name,
            (role, root if inside else path.parent),
        )
    return [{"role": role, **fingerprint(base, path)} for path, (role, base) in sorted(found.items())]


def cases_digest(names: Iterable[str]) -> dict[str, Any]:
    """How many case strings, and the sha256 over them, a line each."""
    listed = list(names)
    return {"count": len(listed), "sha256": hashlib.sha256("".join(f"{n}\n" for n in listed).encode()).hexdigest()}


def selection(
    listed: Sequence[Case],
    selected: Sequence[Case],
    devices: Iterable[str],
    *,
    file: str | None = None,
    op: str | None = None,
    params: str | None = None,
    random: int = 0,
    graphs: Sequence[str] = (),
) -> dict[str, Any]:
    """What a run was to try: the cases that the filters -o and -p (`op`, `params`) leave of a list, on each device.

    `file` holds the list, relative to the tree, or `random` cases take the list's place; each in `graphs`, or as it
    is."""
    known = set(listed)
    return {
        "file": file,
        "listed": cases_digest(map(str, listed)),
        "selected": cases_digest(map(str, selected)),
        "unlisted": sum(case not in known for case in selected),
        "devices": list(devices),
        "filter": {"op": op, "params": params, "random": random, "graphs": list(graphs)},
    }


# ---- the document ----


def libraries(library: Library | Folder, root: Path = ROOT) -> list[dict[str, Any]]:
    """The ggml libraries that this process really mapped, hashed, with the source digest that each answers; of a folder
    all, without digests."""
    sources = {"base": library.source} | {d.name.rstrip("0123456789").lower(): d.source for d in library.devices()}
    if isinstance(library, Library):  # a backend may have no device, as that of RPC
        sources |= library.sources()
    found = []
    for path in library.mapped():
        part = system.stem(path.name).removeprefix("ggml").lstrip("-").partition("-")[0]
        inside = path.resolve().is_relative_to(root.resolve())
        found.append(
            {
                "name": path.name,
                "path": path.resolve().relative_to(root.resolve()).as_posix() if inside else None,
                "sha256": sha256(path),
                "bytes": path.stat().st_size,
                "source": sources.get(part) if part else None,
            }
        )
    return sorted(found, key=lambda item: str(item["name"]))


def part_record(part: PartResult) -> dict[str, Any]:
    """A part's result as it stands in the receipt."""
    return {
        "nmse": number(part.nmse),
        "limit": number(part.limit),
        "passed": part.passed,
        "why": part.why,
        "worst_head": list(part.worst_head),
        "worst_head_nmse": number(part.worst_head_nmse),
        "worst_row": list(part.worst_row),
        "worst_row_nmse": number(part.worst_row_nmse),
        "worst_index": list(part.worst_index),
        "got": number(part.got),
        "want": number(part.want),
    }


def case_record(result: CaseResult) -> dict[str, Any]:
    """A case's result as it stands in the receipt."""
    forward = result.forward
    made = (
        {"by": forward.by, "nmse": number(forward.nmse), "worst_head_nmse": number(forward.worst_head_nmse)}
        if forward
        else None
    )
    return {
        "case": str(result.case),
        "device": result.device,
        "seed": str(result.seed),
        "status": result.status,
        "reason": result.reason,
        "path": result.path,
        "seconds": number(result.seconds),
        "repeats": result.repeats,
        "distinct": result.distinct,
        "digest": result.digest,
        "digests": dict(result.digests),
        "parts": {name: part_record(part) for name, part in result.parts.items()},
        **({"forward": made} if made else {}),
        **({"units": dict(result.units)} if result.units else {}),
    }


def worst_nmse(part: dict[str, Any]) -> float:
    """The NMSE that a part's limit is about: over the whole or of the worst head, whichever is larger."""
    return max(float(part["nmse"]), float(part["worst_head_nmse"]))


def name_of(record: dict[str, Any]) -> str:
    """How passedTests, warnedTests and failedTests name a case: what to paste after -o, on which device."""
    return f"{record['case']} on {record['device']}"


def tried(body: Document) -> list[dict[str, Any]]:
    """The records of the cases that ran or were to run: the oracle's, and perf's of the operator and its peers."""
    return [*body["cases"], *(body["perf"] or {"measurements": []})["measurements"]]


def measured_status(record: dict[str, Any], limit: float) -> str:
    """A measurement of ours as a case: unsupported if it could not run, failed if over the limit.

    The limit is one on what the operator computes, not on the output of ggml's own forward."""
    if record["unavailable"]:
        return "unsupported"
    errors_ = (record["error"] or {"nmse": {}})["nmse"]
    foreign = {"o"} if record["path"].startswith(cases.GGML) else set()
    within = all(float(value) <= limit for name, value in errors_.items() if name not in foreign)
    return "ok" if within else "failed"


_STEP = {"ok": "ok", "not run": "skipped", "FAILED": "failed", "TIME": "failed", "LOST": "failed"}
"""What the state of a step of gpu-check means."""
_ON = {True: "on", False: "off"}


def timed_cases(perf: dict[str, Any], limit: float) -> dict[str, str]:
    """The status of each case and device of a perf receipt by its name: that of its passes, the first of failed, ok
    and unsupported."""
    found: dict[str, set[str]] = {}
    for record in perf["measurements"]:
        if record["who"] in OURS.values():
            found.setdefault(name_of(record), set()).add(measured_status(record, limit))
    return {name: next(s for s in ("failed", "ok", "unsupported") if s in states) for name, states in found.items()}


def outcome(body: Document) -> dict[str, Any]:
    """The test-result fields and counts that follow from a receipt's cases, timed cases or checks.

    A skip or a refusal warns, and so does a run that ended early; exit code 1 fails."""
    found = [(record["status"], name_of(record)) for record in body["cases"]]
    if body["perf"]:
        timed = timed_cases(body["perf"], float(body["limits"]["nmse"]))
        found += [(status, name) for name, status in timed.items()]
    if "bench" in body:
        found += [
            (
                "unsupported" if run["exit_code"] else "ok",
                f"context {run['ctx']}, flash attention {_ON[run['flash_attn']]}",
            )
            for run in body["bench"]["runs"]
        ]
    if "check" in body:
        found += [(_STEP[step["state"]], name) for name, step in body["check"]["steps"].items()]
    checks = [*body.get("checks", ()), *(body["train"]["checks"] if "train" in body else ())]
    found += [("ok" if check["passed"] else "failed", check["name"]) for check in checks]
    by_status: dict[str, list[str]] = {"ok": [], "failed": [], "unsupported": [], "skipped": []}
    for status, name in found:
        by_status[status].append(name)
    warned = by_status["unsupported"] + by_status["skipped"]
    code = body["ended"]["exit_code"] if "ended" in body else 0
    warns = warned or body["partial"] or code
    result = "FAILED" if by_status["failed"] or code == 1 else "WARNED" if warns else "PASSED"
    return {
        "result": result,
        "passedTests": by_status["ok"],
        "warnedTests": warned,
        "failedTests": by_status["failed"],
        "counts": {status: len(names) for status, names in by_status.items()},
    }


_REASONS = {errors.INTERRUPTED: "interrupted", errors.Environment.exit_code: "no case ran"}
"""Why a run ended with an exit code, where it does not say."""


def build(
    mode: str,
    library: Library | Folder,
    results: Sequence[CaseResult],
    *,
    seed: int,
    partial: bool,
    started: float,
    finished: float,
    case_files: Sequence[Path],
    exit_code: int,
    reason: str = "",
    selection: dict[str, Any] | None = None,
    checks: Sequence[dict[str, Any]] = (),
    perf: dict[str, Any] | None = None,
    monitor: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    bench: dict[str, Any] | None = None,
    check: dict[str, Any] | None = None,
    root: Path = ROOT,
) -> Document:
    """The document of one run; its id is set. `started` and `finished` are time.time(); `reason` says why the exit code
    is not 0 where no case or check failed."""
    extra = [("cases", path) for path in case_files]
    if train or bench:
        extra += [("measure", root / "examples/train/flash-attn-train.cpp"), ("measure", root / "cmake/llama.cmake")]
    if check:
        extra += [("harness", path) for path in (root / "tests").rglob("*.py")]
    if any(r.case.capture for r in results):
        extra += [("data", capture_file.path(r.case.capture)) for r in results if r.case.capture]
    own = inputs(mode, root=root)
    pins = tomllib.loads((root / "ggml/upstream.toml").read_text(encoding="utf-8"))
    body: Document = {
        "schema": VERSION,
        "mode": mode,
        "partial": partial,
        "argv": [_argument(a, root) for a in sys.argv[1:]],
        "seed": seed,
        "started": moment(started),
        "finished": moment(finished),
        "ended": {"exit_code": exit_code, "reason": reason or _REASONS.get(exit_code, "")},
        "selection": selection,
        "checks": list(checks),
        "patch": digest.patch_digest(root),
        "upstream": {
            "ggml": library.version,
            "pin": next(
                (
                    {"name": name, "version": pin["version"], "sha256": pin["sha256"]}
                    for name, pin in pins.items()
                    if name != "default" and pin["ggml"] == library.version
                ),
                None,
            ),
        },
        "revision": commits.revision(root, [f["path"] for f in own]),
        "inputs": inputs(mode, extra, root),
        "limits": {name: number(value) for name, value in cases.limits(root / cases.LIMITS.relative_to(ROOT)).items()},
        "libraries": libraries(library, root),
        "environment": environment.collect(library.directory, system.mapped_files()),
        "devices": [
            {"name": d.name, "description": d.description, "memory_bytes": d.memory_total} for d in library.devices()
        ],
        "cases": [case_record(r) for r in results],
        "perf": perf,
        "monitor": monitor or {"device": None, "device_reason": "not monitored", "health": None},
        **({"train": train} if train else {}),
        **({"bench": bench} if bench else {}),
        **({"check": check} if check else {}),
    }
    return seal(body, listed=sum(len(cases.load(path)) for path in case_files))


def seal(body: Document, listed: int) -> Document:
    """The document around a receipt's members, with all that follows from them; `listed` cases were in the lists."""
    ends = outcome(body)
    body["counts"] = {"listed": listed, **ends.pop("counts")}
    body["harness"] = harness_digest(body["inputs"])
    body["seals"] = seals(body)
    document: Document = {
        "_type": STATEMENT,
        "subject": subject(body),
        "predicateType": PREDICATE,
        "predicate": {**ends, "configuration": configuration(body), "receipt": body},
    }
    body["id"] = identify(document)
    return document


def _argument(text: str, root: Path) -> str:
    """A command line argument without the machine's folders, and without what a URL says of its user."""
    option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    if "://" in value:
        return f"{option}{equals}{public(value)}"
    if not value.startswith("/"):
        return text
    path = Path(value)
    short = path.relative_to(root).as_posix() if path.is_relative_to(root) else f".../{path.name}"
    return f"{option}{equals}{short}"


def subject(body: Document) -> list[Document]:
    """What was tested: the patch's files and the libraries that the process mapped."""
    named = [(f["path"], f) for f in body["inputs"] if f["role"] == "patch"] + [
        (item["name"], item) for item in body["libraries"]
    ]
    return [{"name": name, "digest": {"sha256": item["sha256"]}} for name, item in named]


def configuration(body: Document) -> list[Document]:
    """What it was tested with: hooks, harness, case lists, captures."""
    return [{"name": f["path"], "digest": {"sha256": f["sha256"]}} for f in body["inputs"] if f["role"] != "patch"]


def harness_digest(files: list[dict[str, str]]) -> str:
    """sha256 over the sha256sum lines of the harness's own files."""
    lines = (f"{f['sha256']}  {f['path']}\n" for f in files if f["role"] in ("measure", "harness"))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def patch_digest(files: list[dict[str, str]]) -> str:
    """What the libraries must answer when they were built from the patch files listed in a receipt."""
    patch = {f["path"].removeprefix("ggml/"): f["sha256"] for f in files if f["role"] == "patch"}
    return hashlib.sha256(digest.manifest({path: patch[path] for path in sorted(patch)}).encode()).hexdigest()


def file_name(body: Document) -> str:
    """<utc>-<mode>-<id12>.json."""
    stamp = body["finished"].replace("-", "").replace(":", "")
    return f"{stamp}-{body['mode']}-{body['id'][:12]}.json"


@contextlib.contextmanager
def _written(folder: Path, data: bytes) -> Iterator[Path]:
    """A hidden file with data, whole on the disk and closed; it is gone afterwards, unless it has another name then."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".tmp", delete=False) as file:
        path = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(path, 0o644)
            file.close()
            yield path
        finally:
            path.unlink(missing_ok=True)


def save(directory: Path, document: Document) -> Path:
    """Write a document under its name: whole or not at all, never over another file."""
    problems = schema_errors(document)
    if problems:
        raise errors.Invalid(f"this receipt breaks its own schema: {problems[0]}")
    path = directory / file_name(document["predicate"]["receipt"])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _written(directory, canonical(document) + b"\n") as file:
            os.link(file, path)
    except OSError as e:
        if isinstance(e, FileExistsError) and directory.is_dir():
            raise errors.Environment(f"{path} is there already and receipts are never overwritten") from None
        raise errors.Environment(
            f"cannot write a receipt below {directory}: {e.strerror}", hint="--receipts DIR, or --no-receipt"
        ) from e
    return path


def replace(path: Path, data: bytes) -> None:
    """Write a file: whole or not at all; what lay there before is replaced. errors.Environment where it cannot be."""
    try:
        with _written(path.parent, data) as file:
            os.replace(file, path)
    except OSError as e:
        raise errors.Environment(
            f"cannot write {path}: {e.strerror}", hint="make room or permit it, and run again"
        ) from e


# ---- reading ----


@functools.cache
def _validator() -> Any:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)


def schema_errors(document: Any) -> list[str]:
    """What breaks the schema, each with where it stands; empty = valid."""
    found = sorted(_validator().iter_errors(document), key=lambda e: list(map(str, e.absolute_path)))
    texts = [f"{'/'.join(map(str, e.absolute_path)) or 'document'}: {e.message[:300]}" for e in found]
    if texts:
        return texts
    body = document["predicate"]["receipt"]
    return [
        *_contradictions(body["perf"]),
        *(_uneven(body["train"]) if "train" in body else ()),
        *(_unpaired(body["bench"]) if "bench" in body else ()),
    ]


def _uneven(train: dict[str, Any]) -> Iterable[str]:
    """Runs of a training that have not the same steps."""
    steps = train.get("schedule", {}).get("steps", len(train["runs"]["off"]["losses"]))
    for name, run in train["runs"].items():
        if not len(run["losses"]) == len(run["steps_ns"]) == steps:
            yield f"predicate/receipt/train/runs/{name}: not {steps} steps"


def _unpaired(bench: dict[str, Any]) -> Iterable[str]:
    """Runs of a training benchmark that lack the other setting of flash attention, or their steps."""
    found = [(run["ctx"], run["flash_attn"]) for run in bench["runs"]]
    for kind in ("runs", "variants", "peers"):
        for number_, run in enumerate(bench.get(kind, ())):
            place = f"predicate/receipt/bench/{kind}/{number_}"
            if kind != "runs" and run["ctx"] not in {ctx for ctx, _ in found}:
                yield f"{place}: a context that has no run of ours"
            if kind == "runs" and ((run["ctx"], not run["flash_attn"]) not in found or found.count(found[number_]) > 1):
                yield f"{place}: not one run with flash attention off and one with it on"
            if len(run["losses"]) != len(run["steps_ns"]) or (run["exit_code"] == 0 and not run["losses"]):
                yield f"{place}: no loss and time of each step"


def _contradictions(perf: dict[str, Any] | None) -> Iterable[str]:
    """Measurements that fit the schema and not each other."""
    measurements = perf["measurements"] if perf else []
    own = {(r["device"], r["case"]) for r in measurements if r["who"] in OURS.values()}
    for number_, record in enumerate(measurements):
        place = f"predicate/receipt/perf/measurements/{number_}"
        if (record["device"], record["case"]) not in own:
            yield f"{place}: the operator itself was not measured there"
        times = [float(timing["median_ns"]) for timing in record["timings"]]
        if not record["unavailable"] and not (times and all(time > 0 for time in times)):
            yield f"{place}/timings: no time, and not unavailable"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _exact(text: str) -> int:
    value = int(text)
    if abs(value) >= 2**53:
        raise ValueError(f"the integer {text[:40]} is not exact in a float64, as RFC 8785 wants it")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def parse(path: Path) -> Document:
    """The JSON document in a file; errors.Invalid says why there is none."""
    hint = "receipts are the files receipts/*.json that runs write"
    try:
        document = json.loads(
            path.read_bytes(),
            parse_constant=_no_constant,
            parse_int=_exact,
            parse_float=_finite,
            object_pairs_hook=_no_twins,
        )
        json.dumps(document, ensure_ascii=False).encode()  # halves of surrogate pairs are not text
    except OSError as e:
        raise errors.Usage(f"{path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise errors.Invalid(f"{path.name} is not a JSON document: {e}", hint) from e
    if not isinstance(document, dict):
        raise errors.Invalid(f"{path.name} holds no JSON object", hint)
    return document


def read(path: Path) -> Document:
    """A document that fits the schema; errors.Invalid names the first thing that does not."""
    document = parse(path)
    problems = schema_errors(document)
    if problems:
        raise errors.Invalid(f"{path.name}: {problems[0]}")
    return document
