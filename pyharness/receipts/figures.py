"""Single figures of receipts by name, for the pages that quote them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from . import statement, timing
from .statement import Document

NAMES = """ok, failed, unsupported, skipped, listed
               how many cases, checks or steps of the receipt
repeats        runs of each case
nmse [PART]    the worst NMSE of a part, of all by default
ms REGEX       median of the operator's backward, warm L2, of the one case that the expression finds
mib|gib on|off [CONTEXT]
               compute buffers of a training with flash attention on or off
STEP[.MEMBER]...
               what a step of gpu-check says, or a member of what it found
"""


def figure(document: Document, name: str) -> str:
    """A figure as text; KeyError where the receipt has none of this name."""
    body = document["predicate"]["receipt"]
    kind, _, rest = name.partition(" ")
    if kind in body["counts"] and not rest:
        return str(body["counts"][kind])
    found = {"repeats": _repeats, "nmse": _nmse, "ms": _ms, "mib": _memory(20), "gib": _memory(30)}.get(kind, _step)(
        body, rest or kind
    )
    if found is None:
        raise KeyError(name)
    return found


def _repeats(body: Document, _: str) -> str | None:
    counts = {record["repeats"] for record in body["cases"] if record["parts"]}
    return str(counts.pop()) if len(counts) == 1 else None


def _nmse(body: Document, part: str) -> str | None:
    parts = (item for record in body["cases"] for item in record["parts"].items())
    errors = [statement.worst_nmse(found) for name, found in parts if part in (name, "nmse")]
    return f"{max(errors, key=lambda error: (error != error, error)):.2g}" if errors else None


def _ms(body: Document, pattern: str) -> str | None:
    measured = (body["perf"] or {"measurements": []})["measurements"]
    found = [r for r in measured if r["who"] == statement.OPERATOR and re.search(pattern, r["case"]) and r["timings"]]
    return f"{float(timing.best_clock(found[0], 'warm')['median_ns']) / 1e6:.3g}" if len(found) == 1 else None


def _memory(unit: int) -> Callable[[Document, str], str | None]:
    """Of 2^unit bytes."""

    def figure(body: Document, which: str) -> str | None:
        state, _, context = which.partition(" ")
        if "bench" in body:
            runs = [r for r in body["bench"]["runs"] if (str(r["ctx"]), r["flash_attn"]) == (context, state == "on")]
        else:
            trained = body["train"]["runs"] if "train" in body and not context else {}
            runs = [trained[state]] if state in trained else []
        return f"{runs[0]['memory_bytes']['compute'] / 2**unit:.{unit // 30}f}" if len(runs) == 1 else None

    return figure


def _step(body: Document, path: str) -> str | None:
    step, *members = path.split(".")
    value: Any = body.get("check", {"steps": {}})["steps"].get(step)
    if value is not None and not members:
        members = ["text"]
    for member in members:
        value = value.get(member) if isinstance(value, dict) else None
    return str(value) if isinstance(value, str | int) else None
