"""Statistics of timings that do not flatter, and what may be said of two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import statement
from .statement import Document

UNSTABLE = 0.05
"""A median whose MAD is a larger fraction of it than this is reported as unstable."""


def interval(samples: Sequence[int]) -> list[int]:
    """95 % confidence interval of the median by order statistics: no assumption on the distribution.

    With fewer than six samples no such interval exists and the range is given."""
    ordered, n = sorted(samples), len(samples)
    below, k = 0, 0
    while k < n // 2 and (below + math.comb(n, k)) * 40 <= 2**n:
        below += math.comb(n, k)
        k += 1
    return [ordered[max(k - 1, 0)], ordered[n - max(k, 1)]]


def statistics(samples: Sequence[int]) -> dict[str, Any]:
    """What a timing says about its samples, nanoseconds; the receipt keeps both."""
    return {
        "median_ns": statement.median(samples),
        "mad_ns": statement.mad(samples),
        "min_ns": min(samples),
        "interval_ns": interval(samples),
    }


def unstable(timing: dict[str, Any]) -> str:
    """Why a timing's median is not to be relied on, "" if it is: "unstable: the MAD is 12 % of the median"."""
    fraction = float(timing["mad_ns"]) / float(timing["median_ns"])
    return f"unstable: the MAD is {fraction:.0%} of the median" if fraction > UNSTABLE else ""


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, str]:
    """How many times faster the first timing is than the second, and whether it is: "undecided" if intervals meet."""
    ratio = float(theirs["median_ns"]) / float(ours["median_ns"])
    if ours["interval_ns"][1] < theirs["interval_ns"][0]:
        return ratio, "faster"
    if ours["interval_ns"][0] > theirs["interval_ns"][1]:
        return ratio, "slower"
    return ratio, "undecided"


def verdict_text(found: tuple[float, str]) -> str:
    """ "2.31x faster", "0.8x, slower", "undecided"."""
    ratio, verdict = found
    return "undecided" if verdict == "undecided" else f"{ratio:.3g}x, {verdict}"


def best_clock(record: dict[str, Any], l2: str) -> dict[str, Any]:
    """The timing of a measurement to quote: the device's clock where there is one."""
    found = [t for t in record["timings"] if t["l2"] == l2] or record["timings"]
    timing: dict[str, Any] = min(found, key=lambda t: t["clock"] != "device")
    return timing


def against_base(measurements: Sequence[dict[str, Any]], base: Document, throttled: bool = False) -> dict[str, Any]:
    """Each timing against the same one of an earlier receipt; undecided where intervals meet or a GPU was throttled."""
    body = base["predicate"]["receipt"]
    earlier = {
        (r["case"], r["device"], r["who"], r["pass"], t["l2"], t["clock"]): t
        for r in (body["perf"] or {"measurements": []})["measurements"]
        for t in r["timings"]
    }
    comparisons = []
    for record in measurements:
        for t in record["timings"]:
            key = (record["case"], record["device"], record["who"], record["pass"], t["l2"], t["clock"])
            if key in earlier:
                ratio, verdict = compare(t, earlier[key])
                names = dict(zip(("case", "device", "who", "pass", "l2", "clock"), key, strict=True))
                settled = "undecided" if throttled or body["perf"]["throttled"] else verdict
                comparisons.append({**names, "ratio": statement.number(ratio), "verdict": settled})
    return {"id": body["id"], "comparisons": comparisons}
