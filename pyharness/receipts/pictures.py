"""Receipts as SVG for the pages: bars in groups, two measures side by side. The same receipt gives the same bytes.

The few elements are written here and not by a plotting library, whose output changes with its version. A picture has
its own background and follows the reader's colour scheme, so that it can be read on a light page and on a dark one.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from . import statement, tables, timing
from .statement import Document

MOST = 6
"""How many shapes a picture shows, in the order of the receipt."""

_WIDTH, _EDGE, _LINE, _BAR = 800, 20, 16, 11
_PANELS = (192, 500)
"""Where the bars of the two measures begin."""
_LONGEST = 215
"""The length of the longest bar of a group; its value stands behind it."""

_STYLE = """\
text { font: 12px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.head { font-weight: 600 }
.note { fill: #59636e }
.end { text-anchor: end }
.page { fill: #ffffff; stroke: #d1d9e0 }
.ours { fill: #0969da }
.second { fill: #79b0ee }
.other { fill: #aab3bd }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.note { fill: #9198a1 }
.page { fill: #0d1117; stroke: #3d444d }
.ours { fill: #4493f8 }
.second { fill: #2a5a9e }
.other { fill: #656c76 }
}"""


@dataclass(frozen=True)
class Row:
    """One contender: its colour (`ours`, `second`, `other`) and its two measures, words where there is no number."""

    name: str
    colour: str
    values: tuple[float | str, float | str]


@dataclass(frozen=True)
class Chart:
    """What a picture shows: two measures, named with their units, of rows in groups, and notes below."""

    title: str
    subtitle: str
    measures: tuple[str, str]
    groups: Sequence[tuple[str, Sequence[Row]]]
    notes: Sequence[str]


def svg(chart: Chart) -> str:
    """The text of an SVG file. Bars of a group and measure share a scale that begins at zero."""
    lines = [_text(_EDGE, 32, chart.title, "title"), _text(_EDGE, 52, chart.subtitle, "note")]
    lines += [_text(x, 82, measure, "head") for x, measure in zip(_PANELS, chart.measures, strict=True)]
    y = 82
    for name, rows in chart.groups:
        y += 24
        lines.append(_text(_EDGE, y, name, "head"))
        longest = [max((r.values[i] for r in rows if not isinstance(r.values[i], str)), default=0) for i in (0, 1)]
        for row in rows:
            y += _LINE
            lines.append(_text(_PANELS[0] - 8, y, row.name, "end"))
            for x, value, whole in zip(_PANELS, row.values, longest, strict=True):
                lines += _bar(x, y, value, float(whole), row.colour)
    y += 12
    for note in chart.notes:
        y += 17
        lines.append(_text(_EDGE, y, note, "note"))
    height = y + 18
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img">\n<title>{escape(chart.title)}</title>\n<style>\n{_STYLE}\n</style>\n'
        f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: int, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y}"{named}>{escape(text)}</text>'


def _bar(x: int, y: int, value: float | str, longest: float, colour: str) -> list[str]:
    if isinstance(value, str):
        return [_text(x, y, value, "note")]
    width = max(round(_LONGEST * value / longest, 1), 1)
    bar = f'<rect class="{colour}" x="{x}" y="{y - _BAR + 1}" width="{width:g}" height="{_BAR}" rx="1"/>'
    return [bar, _text(round(x + width + 6, 1), y, _number(value))]


def _number(value: float) -> str:
    """Three digits or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


# ---- time of an attention, by shape ----

_PAIR, _BACKWARD = "forward+backward", "backward"
_PEERS = (
    (r"fa3.* deterministic", "FA-3 deterministic"),
    (r"fa3.*", "FA-3"),
    (r"torch flash .*", "FA-2"),
    (r"torch cudnn .*", "cuDNN"),
)
"""Who is drawn beside the operator, by the names of `perf`."""


def pair(body: Document) -> str | None:
    """Time of forward and backward and of the backward alone on a GPU, beside its peers; None where nothing of it was
    measured."""
    measured = [r for r in (body["perf"] or {"measurements": []})["measurements"] if r["device"].startswith("CUDA")]
    timed = [r for r in measured if not r["unavailable"] and r["pass"] in (_PAIR, _BACKWARD)]
    groups = []
    for case in dict.fromkeys(r["case"] for r in timed if (r["who"], r["pass"]) == (statement.OURS[_PAIR], _PAIR)):
        found = {(r["who"], r["pass"]): r for r in timed if r["case"] == case}
        groups.append((tables.shape_name(case), _contenders(found)))
    if not groups:
        return None
    device = next(d["description"] for d in body["devices"] if d["name"] == timed[0]["device"])
    chart = Chart(
        "Attention of a training step",
        f"{device}, medians, receipt {body['id'][:12]}. Shorter is faster; each shape has its own scale.",
        ("forward and backward, ms", "backward, ms"),
        groups[:MOST],
        (
            "H query heads / KV heads, D head size, then queries and keys: one number or N and M. Causal masks.",
            "Ours gives the same bits in every run. Forward and backward take K and V in F32 unless quantised;",
            "the backward alone starts from q, k, v and dO, where that of a peer is given O and LSE of its forward.",
        ),
    )
    return svg(chart)


def _contenders(found: dict[tuple[str, str], dict[str, Any]]) -> list[Row]:
    """The path that the device chooses, the other tensor-core path, the peers; who was timed in neither pass is left
    out."""
    own = {way: found.get((statement.OURS[way], way)) for way in (_PAIR, _BACKWARD)}
    path = next(r["path"] for r in own.values() if r)
    rows = [Row(f"ours, {path}" if path else "ours", "ours", _times(own))]
    names = {who for who, _ in found}
    listed: list[tuple[str, str, str]] = [
        (who, f"ours, {who}", "second") for who in ("hopper", "mma") if who in names and who != path
    ]
    for pattern, name in _PEERS:
        known = {who for who, _, _ in listed}
        listed += [(who, name, "other") for who in sorted(names - known) if re.fullmatch(pattern, who)]
    for who, name, colour in listed:
        rows.append(Row(name, colour, _times({way: found.get((who, way)) for way in (_PAIR, _BACKWARD)})))
    return rows


def _times(records: dict[str, dict[str, Any] | None]) -> tuple[float | str, float | str]:
    both, backward = (
        float(timing.best_clock(record, "warm")["median_ns"]) / 1e6 if record else "not timed"
        for record in records.values()
    )
    return both, backward


# ---- a step of training, by context ----


def training(body: Document) -> str | None:
    """Time and peak memory of a training step on a GPU by context, beside PyTorch; None where none was timed."""
    bench = body.get("bench")
    if not bench or bench["device"] != "cuda":
        return None
    groups = []
    for ctx in sorted({run["ctx"] for run in bench["runs"]}):
        runs = {run["flash_attn"]: run for run in bench["runs"] if run["ctx"] == ctx}
        listed = [("llama.cpp, FA on", "ours", runs.get(True)), ("llama.cpp, FA off", "second", runs.get(False))]
        peers = (peer for peer in bench.get("peers", ()) if peer["ctx"] == ctx)
        listed += [(f"PyTorch {peer['mode'].upper()}", "other", peer) for peer in peers]
        rows = [Row(name, colour, _step(run)) for name, colour, run in listed if run]
        groups.append((f"{ctx} tokens", rows))
    if all(isinstance(value, str) for _, rows in groups for row in rows for value in row.values):
        return None
    device = next((d["description"] for d in body["devices"] if d["name"].startswith("CUDA")), "CUDA")
    chart = Chart(
        f"A step of training, {bench['shape']['name']}",
        f"{device}, medians, receipt {body['id'][:12]}. Shorter is better; each context has its own scale.",
        ("time of a step, ms", "peak memory of the device, GiB"),
        groups,
        ("llama.cpp with flash attention (FA) on and off; PyTorch (eager, SDPA) trains the same shape. F32 weights.",),
    )
    return svg(chart)


def _step(run: dict[str, Any]) -> tuple[float | str, float | str]:
    steps = run["steps_ns"][1:]
    if run["exit_code"] or not steps:
        words = "does not fit" if "memory" in run["problem"].lower() else "did not finish"
        return words, words
    peak = run["memory_bytes"]["peak"]
    return statistics.median(steps) / 1e6, peak / 2**30 if peak else "unknown"
