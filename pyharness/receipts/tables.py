"""Timings as Markdown tables: every pass of ours beside the same pass of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..base import errors
from ..case.cases import DEFAULTS, FIELDS, SHAPE, Case
from . import timing
from .statement import OURS

NOTES = {
    "forward+backward": "the attention of a training step in one graph, ours with F32 K and V unless quantised",
    "forward": "O",
    "backward": "dQ, dK and dV, ours from q, k, v and dO alone, a peer's given O and LSE of its forward",
}
"""What each pass is, in the order of the tables."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def shape_name(text: str) -> str:
    """A case string as tables name it: "H32/8 D128 4096", "H8/2 D128 N64 M8192 q8_0 mask=none"; query heads, KV heads,
    head size, queries, keys, and what is not the default."""
    try:
        case = Case.parse(text)
    except errors.Usage:  # a receipt that somebody wrote
        return text
    if case.capture:
        words = [case.capture]
    else:
        heads = f"H{case.nh}/{case.nhkv}" if case.nh != case.nhkv else f"H{case.nh}"
        size = f"D{case.hsk}" if case.hsk == case.hsv else f"D{case.hsk}/{case.hsv}"
        words = [heads, size, str(case.kv) if case.nb == case.kv else f"N{case.nb} M{case.kv}"]
        if case.type_K == case.type_V != DEFAULTS["type_K"]:
            words.append(case.type_K)
        elif case.type_K != case.type_V:
            words.append(f"{case.type_K}/{case.type_V}")
    if case.kv_count:
        words.append(f"keys {case.kv_first}-{case.kv_first + case.kv_count - 1}")
    named = {*SHAPE, "type_K", "type_V", "capture", "kv_first", "kv_count"}
    for key in (key for key in FIELDS if key not in named and getattr(case, key) != DEFAULTS[key]):
        value = getattr(case, key)
        words.append(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}")
    return " ".join(words)


def _cell(record: dict[str, Any] | None) -> str:
    """Median and MAD in ms, the worst NMSE, and whether the median is unstable; "-" without a time."""
    if record is None or record["unavailable"]:
        return "-"
    found = timing.best_clock(record, "warm")
    text = f"{float(found['median_ns']) / 1e6:.4g} ± {float(found['mad_ns']) / 1e6:.2g}"
    text += " (unstable)" if timing.unstable(found) else ""
    worst = max((float(e) for e in record["error"]["nmse"].values()), default=None) if record["error"] else None
    return text if worst is None else f"{text}, {worst:.1e}"


def peers_table(perf: dict[str, Any]) -> str:
    """A row for each case and pass, ours and every peer: median ms, MAD, and the worst NMSE of what the pass computes;
    and a sentence that says what the passes are."""
    who = [name for name in dict.fromkeys(r["who"] for r in perf["measurements"]) if name not in OURS.values()]
    cases: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for record in perf["measurements"]:
        name = "ours" if record["who"] in OURS.values() else record["who"]
        cases.setdefault(record["case"], {})[name, record["pass"]] = record
    rows, shown = [], set()
    for case, found in cases.items():
        passes = [way for way in NOTES if any(w == way and not r["unavailable"] for (_, w), r in found.items())]
        for way in passes or ["backward"]:
            own = found.get(("ours", way))
            cells = [_cell(found.get((name, way))) for name in ("ours", *who)]
            rows.append((shape_name(case), way, own["path"] if own else "", *cells))
            shown.add(way)
    notes = "; ".join(f"`{way}`: {note}" for way, note in NOTES.items() if way in shown)
    return table(("shape", "pass", "path", "ours: ms ± MAD, NMSE", *who), rows) + f"\n\nPasses: {notes}."


def performance_table(timed: Sequence[dict[str, Any]]) -> str:
    """Time, speed, memory and error of ours and the peers, warm L2, the device's clock where there is one."""
    head = (
        "shape",
        "who",
        "pass",
        "time, ms",
        "MAD",
        "TFLOP/s",
        "of the floor",
        "peak MiB",
        "NMSE",
        "ours against it",
    )
    return table(head, (row for perf in timed for row in _performance(perf)))


def _performance(found: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    own = {(r["device"], r["case"], r["pass"]): r for r in found["measurements"] if r["who"] in OURS.values()}
    base = {
        (c["device"], c["case"], c["who"], c["pass"]): c
        for c in (found["base"] or {"comparisons": []})["comparisons"]
        if c["l2"] == "warm"
    }
    for record in found["measurements"]:
        name = shape_name(record["case"])
        if record["unavailable"]:
            yield name, record["who"], record["pass"], record["unavailable"], *[""] * 6
            continue
        time = timing.best_clock(record, "warm")
        ours = own.get((record["device"], record["case"], record["pass"]))
        earlier = base.get((record["device"], record["case"], record["who"], record["pass"]))
        ratio = ""
        if ours is record:
            if earlier:
                ratio = f"base: {timing.verdict_text((float(earlier['ratio']), earlier['verdict']))}"
        elif ours and not ours["unavailable"]:
            verdict = timing.compare(timing.best_clock(ours, "warm"), time)
            ratio = "undecided (throttled)" if found["throttled"] else timing.verdict_text(verdict)
        flop, peak = record["work"]["flop"], record["memory"]["peak_bytes"]
        error = record["error"]["nmse"] if record["error"] else {}
        unstable = " (unstable)" if timing.unstable(time) else ""
        yield (
            name,
            record["who"],
            record["pass"],
            f"{float(time['median_ns']) / 1e6:.4g}{unstable}",
            f"{float(time['mad_ns']) / 1e6:.2g}",
            f"{flop / float(time['median_ns']) / 1e3:.4g}" if flop else "unavailable",
            f"{float(record['floor']['fraction']):.0%}" if record["floor"] and record["floor"]["fraction"] else "",
            f"{peak / 2**20:.0f}" if isinstance(peak, int) else peak or "",
            ", ".join(f"{part} {float(error[part]):.1e}" for part in ("o", "dq", "dk", "dv") if part in error),
            ratio,
        )
