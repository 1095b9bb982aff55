"""What differs between two receipts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import statement, timing, verify
from .statement import Document


def differences(old: Document, new: Document) -> Iterable[str]:
    """What two receipts disagree on, a line each."""
    a, b = (d["predicate"]["receipt"] for d in (old, new))
    for name in sorted(a["limits"].keys() | b["limits"].keys()):
        if a["limits"].get(name) != b["limits"].get(name):
            yield f"limit    {name}: {a['limits'].get(name)} -> {b['limits'].get(name)}"
    yield from _changes(
        "file", {f["path"]: f["sha256_lf"] for f in a["inputs"]}, {f["path"]: f["sha256_lf"] for f in b["inputs"]}
    )
    yield from _changes(
        "library", {i["name"]: i["sha256"] for i in a["libraries"]}, {i["name"]: i["sha256"] for i in b["libraries"]}
    )
    for name in ("os", "cpu", "python", "build", "gpu", "runtimes"):
        left, right = ({k: v for k, v in _items(body["environment"][name]) if k != "load"} for body in (a, b))
        if left != right:
            keys = sorted(k for k in left.keys() | right.keys() if left.get(k) != right.get(k))
            yield f"environ  {name}: " + "; ".join(f"{k} {left.get(k)} -> {right.get(k)}" for k in keys)
    then, now = ({statement.name_of(r): r for r in body["cases"]} for body in (a, b))
    for name in sorted(then.keys() | now.keys()):
        if name not in now or name not in then:
            yield f"case     {name}: {'gone' if name in then else 'new'}"
        elif then[name]["status"] != now[name]["status"]:
            yield f"result   {name}: {then[name]['status']} -> {now[name]['status']} {now[name]['reason']}".rstrip()
        else:
            yield from _moved(name, then[name], now[name])
    if "check" in a and "check" in b:
        left, right = ({n: f"{s['state']} {s['text']}" for n, s in d["check"]["steps"].items()} for d in (a, b))
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                yield f"step     {name}: {left.get(name, 'not asked')} -> {right.get(name, 'not asked')}"
    if "train" in a and "train" in b:
        then, now = _trained(a["train"]), _trained(b["train"])
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) != now.get(name):
                yield f"train    {name}: {then.get(name)} -> {now.get(name)}"
    if a["perf"] and b["perf"]:
        for found in timing.against_base(b["perf"]["measurements"], old)["comparisons"]:
            if found["verdict"] != "undecided":
                what = f"{found['case']} on {found['device']}, {found['who']}, {found['l2']} L2"
                yield f"time     {what}: {found['verdict']} ({float(found['ratio']):.3f}x)"


def _moved(name: str, then: dict[str, Any], now: dict[str, Any]) -> Iterable[str]:
    """How the results of a case that ended the same way differ: bits by their digests, errors as numbers."""
    digests = then["digests"], now["digests"]
    bits = [part for part in {**digests[0], **digests[1]} if digests[0].get(part) != digests[1].get(part)]
    errors_ = [
        f"{part} {record['nmse']} -> {now['parts'][part]['nmse']}"
        for part, record in then["parts"].items()
        if part in now["parts"] and not verify.same_error(record, now["parts"][part])
    ]
    what = [f"other bits in {', '.join(bits)}"] * bool(bits) + [f"NMSE {', '.join(errors_)}"] * bool(errors_)
    if what:
        yield f"result   {name}: {'; '.join(what)}"


def _trained(train: dict[str, Any]) -> dict[str, Any]:
    """What was trained and how it went, by name."""
    plan = {"device": train["device"], "noise": train.get("noise"), **train.get("schedule", {})}
    files = {name: train[f"{name}_sha256"][:12] for name in ("text", "model")}
    shape = {f"shape {name}": value for name, value in train["shape"].items()}
    last = {f"last loss {name}": run["losses"][-1] for name, run in train["runs"].items()}
    return plan | files | shape | last | {check["name"]: check["found"] for check in train["checks"]}


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else [("", value)]


def _changes(kind: str, then: dict[str, str], now: dict[str, str]) -> Iterable[str]:
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            how = "gone" if name not in now else "new" if name not in then else "changed"
            yield f"{kind:8} {name}: {how}"
