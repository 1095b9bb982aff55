"""Receipts as pictures (matplotlib; the extra `plot`), each a PNG and an SVG with the CSV behind it.

Time and TFLOP/s against keys and queries with the floors; error by part against the limit.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base import build, errors
from ..case import cases
from ..receipts import commits, timing
from ..receipts.statement import Document, worst_nmse

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")  # Okabe and Ito
_MARKS = "osD^vPX*"
_AXES = {"kv": "keys M", "nb": "queries N"}


def draw(documents: Sequence[Document], directory: Path) -> list[Path]:
    """Draw what the receipts hold into `directory`; returns the files. errors.Environment without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as e:
        raise errors.Environment("plots need matplotlib", build.pip("plot")) from e
    mpl.use("Agg")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise errors.Environment(f"cannot draw into {directory}: {e.strerror}", "give another folder") from e
    found: list[Path] = []
    for document in documents:
        body = document["predicate"]["receipt"]
        found += _errors(body, directory)
        if body["perf"]:
            for number, (key, sweep) in enumerate(_sweeps(body["perf"]["measurements"])):
                found += _sweep(body, key, sweep, directory / f"{body['id'][:12]}-{key}-{sweep[0]['pass']}-{number}")
    return found


def _sweeps(measurements: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Measurements of one pass whose cases differ in one of kv and nb alone."""
    measured = [r for r in measurements if not r["unavailable"]]
    for key in _AXES:

        def others(record: dict[str, Any], key: str = key) -> tuple[str, str, str]:
            return record["device"], without(record["case"], key), record["pass"]

        shaped = [r for r in measured if not cases.Case.parse(r["case"]).capture]
        for _, group in itertools.groupby(sorted(shaped, key=others), key=others):
            records = list(group)
            if len({r["case"] for r in records}) > 1:
                yield key, records


def without(case: str, key: str) -> str:
    """A case string with the value of a key left open."""
    return re.sub(rf"(?<=[(,]){key}=\d+", f"{key}=*", case)


def _title(body: dict[str, Any], device: str) -> str:
    name = next(d["description"] for d in body["devices"] if d["name"] == device)
    return f"{name}, {commits.named(body)}, receipt {body['id'][:12]}"


def _save(figure: Any, path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Path]:
    from matplotlib import pyplot

    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg", ".csv")]
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1])
    pyplot.close(figure)
    with paths[2].open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
    return paths


def _sweep(body: dict[str, Any], key: str, records: list[dict[str, Any]], path: Path) -> list[Path]:
    from matplotlib import pyplot

    figure, (times, speeds) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    rows = []
    for number, who in enumerate(dict.fromkeys(r["who"] for r in records)):
        points = []
        for record in records:
            if record["who"] == who:
                best = timing.best_clock(record, "warm")
                at = int(getattr(cases.Case.parse(record["case"]), key))
                flop = record["work"]["flop"]
                median = float(best["median_ns"])
                points.append((at, median, *best["interval_ns"], flop / median / 1e3 if flop else float("nan")))
        points.sort()
        rows += [(key, at, who, median, low, high, speed) for at, median, low, high, speed in points]
        x, y, low, high, speed = zip(*points, strict=True)
        style: dict[str, Any] = {"color": _COLOURS[number % 8], "marker": _MARKS[number % 8], "markersize": 5}
        times.plot(x, [v / 1e6 for v in y], label=who, **style)
        times.fill_between(x, [v / 1e6 for v in low], [v / 1e6 for v in high], color=style["color"], alpha=0.2)
        speeds.plot(x, speed, label=who, **style)
    own = sorted((getattr(cases.Case.parse(r["case"]), key), r) for r in records if r["floor"])
    for name, dashes in (("memory_ns", ":"), ("compute_ns", "--")):
        line = [(x, float(r["floor"][name]) / 1e6) for x, r in own if r["floor"][name]]
        if line:
            times.plot(
                *zip(*line, strict=True), color="gray", linestyle=dashes, label=f"{name.removesuffix('_ns')} floor"
            )
    rate = body["perf"]["ceilings"][records[0]["device"]]["compute_flop_per_s"]
    if rate:
        speeds.axhline(
            float(rate) / 1e12,
            color="gray",
            linestyle="--",
            label="compute ceiling",
        )
    shape = cases.Case.parse(records[0]["case"])
    rest = ", ".join(part for part in str(shape)[len(cases.OP) + 1 : -1].split(",") if not part.startswith(f"{key}="))
    figure.suptitle(f"{_title(body, records[0]['device'])}\n{rest}", fontsize=10)
    times.set(xlabel=_AXES[key], ylabel=f"{records[0]['pass']}, ms (median, 95 % interval)", xscale="log", yscale="log")
    speeds.set(xlabel=_AXES[key], ylabel="TFLOP/s, each product once, over unmasked pairs", xscale="log")
    speeds.set_ylim(bottom=0)
    for axes in (times, speeds):
        axes.grid(alpha=0.3)
    times.legend(fontsize=8)
    return _save(figure, path, ("key", "value", "who", "median_ns", "low_ns", "high_ns", "tflops"), rows)


def _errors(body: dict[str, Any], directory: Path) -> list[Path]:
    """NMSE of every case by part (of its worst head where that is larger), one column a device and part, or a peer and
    part in a perf receipt."""
    from matplotlib import pyplot

    rows = [(r["device"], part, r["case"], worst_nmse(p)) for r in body["cases"] for part, p in r["parts"].items()]
    for record in (body["perf"] or {"measurements": []})["measurements"]:
        if record["error"]:
            label = f"{record['device']} {record['who']}"
            rows += [(label, part, record["case"], float(value)) for part, value in record["error"]["nmse"].items()]
    if not rows:
        return []
    columns = sorted({(who, part) for who, part, _, _ in rows}, key=lambda c: (c[0], cases.CHECKED.index(c[1])))
    figure, axes = pyplot.subplots(figsize=(max(6, 0.6 * len(columns) + 3), 5), layout="constrained")
    least = 1e-18  # where zero is drawn
    for number, column in enumerate(columns):
        values = [max(value, least) for who, part, _, value in rows if (who, part) == column]
        spread = [number + 0.5 * ((i * 0.618) % 1 - 0.5) for i in range(len(values))]
        axes.scatter(spread, values, s=12, color=_COLOURS[cases.CHECKED.index(column[1])], alpha=0.7)
    limits = {part["limit"] for record in body["cases"] for part in record["parts"].values()}
    for limit in map(float, limits or {body["limits"]["nmse"]}):
        axes.axhline(limit, color="black", linestyle="--")
        axes.text(0, limit, f"limit {limit:g}", va="bottom", fontsize=8)
    labels = [f"{who} {part}" for who, part in columns]
    axes.set_xticks(range(len(columns)), labels, fontsize=7, rotation=30, ha="right")
    axes.set(yscale="log", ylabel=f"NMSE against float64 (0 drawn at {least:g})")
    axes.set_title(f"{body['mode']}, {commits.named(body)}, receipt {body['id'][:12]}", fontsize=10)
    axes.grid(alpha=0.3, axis="y")
    return _save(figure, directory / f"{body['id'][:12]}-errors", ("who", "part", "case", "nmse"), rows)
