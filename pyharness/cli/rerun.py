"""Runs the cases of a receipt again: `receipt verify --replay`."""

from __future__ import annotations

import math
import random
from typing import Any

from ..base import errors
from ..case import cases
from ..check import oracle
from ..device import monitor
from ..device.ggml import Device, Library
from ..perf import perf
from ..receipts import statement, timing
from ..receipts.statement import Document
from ..receipts.verify import FAILED, OK, Finding, same_error


def replay(document: Document, library: Library, count: int, threads: int = 0) -> list[Finding]:
    """Run `count` of the receipt's cases, chosen by its id, again; a perf receipt's are timed again.

    With the same libraries on the same device the bits must be the same, and of the same bits the NMSE; otherwise every
    case must end as it did, no worse than _worse allows. A time is reproduced unless the intervals part and the medians
    differ by more than a quarter."""
    body = document["predicate"]["receipt"]
    timed = (body["perf"] or {"measurements": []})["measurements"]
    measured = [r for r in timed if r["who"] in statement.OURS.values()]
    records = [r for r in body["cases"] if r["status"] in ("ok", "failed")] + [r for r in measured if r["timings"]]
    if not records:
        return [Finding("replay", FAILED, "the receipt lists no case that ran")]
    chosen = random.Random(body["id"]).sample(records, min(count, len(records)))
    devices = {d.name: d for d in library.devices()}
    found = []
    for record in chosen:
        device = devices.get(record["device"])
        if device is None:
            raise errors.Environment(f"cannot replay {statement.name_of(record)}: there is no {record['device']} here")
        again = _replay_case if "status" in record else _replay_timing
        code, text = again(record, body, library, device, threads)
        found.append(Finding("replay", code, f"{statement.name_of(record)}: {text}"))
    return found


def _replay_case(
    record: dict[str, Any], body: dict[str, Any], library: Library, device: Device, threads: int
) -> tuple[int, str]:
    result = oracle.check(library, device, cases.Case.parse(record["case"]), body["seed"], threads=threads)
    if result.status != record["status"]:
        return FAILED, f"was {record['status']}, is {result.status} {result.reason}".rstrip()
    same_bits = result.digest == record["digest"]
    if not same_bits and _same_place(record, body, library, device):
        return FAILED, "the same libraries gave other bits"
    again = {name: statement.part_record(part) for name, part in result.parts.items()}
    if again.keys() != record["parts"].keys():
        return FAILED, f"had the parts {', '.join(record['parts'])}, has {', '.join(again)}"
    for name, part in record["parts"].items():
        then, now = statement.worst_nmse(part), statement.worst_nmse(again[name])
        if (same_bits and not same_error(part, again[name])) or (not same_bits and _worse(then, now, body)):
            return FAILED, f"{name}: NMSE {now:.3g}, the receipt has {then:.3g}"
    worst = max(map(statement.worst_nmse, again.values()), default=float("nan"))
    bits = "same bits" if same_bits else "other bits, another build or device"
    return OK, f"{result.status} again, worst NMSE {worst:.3g}, {bits}"


def _same_place(record: dict[str, Any], body: dict[str, Any], library: Library, device: Device) -> bool:
    """Whether a record was made with these libraries on such a device: then its bits come again."""
    then, now = ({i["name"]: i["sha256"] for i in items} for items in (body["libraries"], statement.libraries(library)))
    return then == now and device.description in (
        d["description"] for d in body["devices"] if d["name"] == record["device"]
    )


def _worse(then: float, now: float, body: dict[str, Any]) -> bool:
    """Whether other bits have an error that another build or device of the same precision does not explain: ten times
    the recorded one, and more than a thousandth of the limit."""
    return not now <= max(10 * then, 1e-3 * float(body["limits"]["nmse"]))


def _replay_timing(
    record: dict[str, Any], body: dict[str, Any], library: Library, device: Device, threads: int
) -> tuple[int, str]:
    settings = perf.Settings(
        library=library,
        device=device,
        seed=body["seed"],
        threads=threads,
        runs=body["perf"]["runs"],
        cold=False,
        error="none" if not record["error"] else "full" if record["error"]["scope"] == "all heads" else "slice",
        peers=(),
        budget=float("inf"),
        ceilings=perf.NO_CEILINGS,
        monitor=monitor.Monitor(None, reason="a replay"),
        passes=(record["pass"],),
    )
    (again,) = perf.measure(cases.Case.parse(record["case"]), settings)
    if again["unavailable"]:
        return FAILED, f"ran then, now {again['unavailable']}"
    then, now = timing.best_clock(record, "warm"), timing.best_clock(again, "warm")
    ratio, verdict = timing.compare(now, then)
    text = f"{float(then['median_ns']) / 1e6:.4g} ms then, {float(now['median_ns']) / 1e6:.4g} ms now"
    for name, value in (record["error"] or {"nmse": {}})["nmse"].items():
        recorded, found = float(value), float(again["error"]["nmse"][name])
        same = math.isclose(recorded, found, rel_tol=1e-6, abs_tol=1e-25)
        if not same and (_same_place(record, body, library, device) or _worse(recorded, found, body)):
            return FAILED, f"{text}; {name}: NMSE {found:.3g}, the receipt has {recorded:.3g}"
    return FAILED if verdict != "undecided" and not 0.8 <= ratio <= 1.25 else OK, text
