"""Receipts as text and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..device import monitor
from . import commits, statement
from .losses import apart, severity
from .statement import Document
from .tables import performance_table, table


def summary(document: Document) -> str:
    """A receipt in a few lines."""
    body = document["predicate"]["receipt"]
    counts = body["counts"]
    count_text = ", ".join(f"{counts[state]} {state}" for state in ("ok", "failed", "unsupported", "skipped"))
    lines = [
        f"receipt   {body['id']}",
        f"run       {body['mode']}, {body['started']} to {body['finished']}{', PARTIAL' if body['partial'] else ''}",
        f"command   pyharness {' '.join(body['argv'])}",
        f"result    {document['predicate']['result']}: {count_text} of {counts['listed']} listed",
        f"patch     {body['patch']}",
        f"commit    {commits.named(body).removeprefix('commit ')}",
        f"upstream  ggml {body['upstream']['ggml']}"
        + (
            f" ({body['upstream']['pin']['name']} {body['upstream']['pin']['version']})"
            if body["upstream"]["pin"]
            else ""
        ),
        *(f"library   {item['name']}  {item['sha256']}" for item in body["libraries"]),
        *(f"device    {d['name']}: {d['description']}" for d in body["devices"]),
        f"GPU       {_gpu(body)}",
    ]
    for record in body["cases"]:
        if record["status"] != "ok":
            bad = [
                f"{name} {part['nmse']} at {part['worst_index']}"
                for name, part in record["parts"].items()
                if not part["passed"]
            ]
            lines.append(f"{record['status']:11} {statement.name_of(record)}: {record['reason'] or ', '.join(bad)}")
    tables = markdown([document])
    return "\n".join(lines) + "\n\n" + tables


def _gpu(body: Document) -> str:
    gpu = body["environment"]["gpu"]
    names = ", ".join(d["name"] for d in gpu["devices"] or []) or f"none ({gpu['reason']})"
    return names + (f", driver {gpu['driver']}" if gpu["driver"] else "") + clocks(body, ", ")


def clocks(body: Document, before: str) -> str:
    """What limited the GPU's clocks, where it was watched."""
    device = body["monitor"]["device"]
    return "" if device is None else before + monitor.clocks(device)


def markdown(documents: Sequence[Document]) -> str:
    """Two tables to paste: correctness by part, performance against base and peers; then one line per receipt."""
    sections = []
    if any(d["predicate"]["receipt"]["cases"] for d in documents):
        sections.append(correctness_table(documents))
    timed = [d["predicate"]["receipt"]["perf"] for d in documents if d["predicate"]["receipt"]["perf"]]
    if timed:
        sections.append(performance_table(timed))
    for document in documents:
        if "check" in document["predicate"]["receipt"]:
            sections.append(steps_table(document["predicate"]["receipt"]["check"]))
        if "bench" in document["predicate"]["receipt"]:
            sections.append(bench_table(document["predicate"]["receipt"]["bench"]))
        if "train" in document["predicate"]["receipt"]:
            sections.append(training(document["predicate"]["receipt"]["train"]))
            sections.append(runs_table(document["predicate"]["receipt"]["train"]))
            sections.append(checks_table(document["predicate"]["receipt"]["train"]))
    for document in documents:
        body = document["predicate"]["receipt"]
        main = max(
            body["libraries"],
            key=lambda item: (item["source"] is not None, "cuda" in item["name"], "cpu" in item["name"]),
        )
        result = document["predicate"]["result"] + (", partial" if body["partial"] else "")
        sections.append(
            f"receipt `{body['id'][:12]}` ({body['mode']}, {result}); "
            f"patch `{body['patch'][:12]}`, {commits.named(body)}; "
            f"{main['name']} `{main['sha256'][:12]}`{clocks(body, '; GPU ')}"
        )
    return "\n\n".join(sections)


def correctness_table(documents: Sequence[Document]) -> str:
    """The worst error of each part, or of one of its heads, on each device."""
    rows = (row for document in documents for row in _correctness(document))
    return table(("device", "part", "cases", "passed", "worst NMSE", "limit", "case of the worst"), rows)


def training(train: dict[str, Any]) -> str:
    """What was trained, on which text, with which schedule."""
    shape = ", ".join(f"{name} {size}" for name, size in train["shape"].items() if name != "name")
    plan = train.get("schedule")
    schedule = (
        f"{plan['steps']} steps of AdamW over {plan['tokens']} tokens in windows of {plan['ctx']}, "
        f"learning rate {plan['lr']}" + (f" after {plan['warmup']} steps of warm-up" if plan["warmup"] else "")
        if plan
        else "schedule not recorded"
    )
    return (
        f"training, {train['shape']['name']} on {train['device']}: {shape}; {schedule}; "
        f"text `{train['text_sha256'][:12]}`, model `{train['model_sha256'][:12]}`"
    )


def runs_table(train: dict[str, Any]) -> str:
    """The runs of a training: losses, how far they part from those without flash attention, time and memory."""
    losses = {name: [float(loss) for loss in run["losses"]] for name, run in train["runs"].items()}

    def row(name: str, label: str) -> Sequence[str]:
        run, found = train["runs"][name], losses[name]
        difference = apart(losses["off"], found)
        step = max(range(len(found)), key=lambda i: severity(difference[i]))
        compute = run["memory_bytes"].get("compute")
        return (
            label,
            f"{found[0]:.6g}",
            f"{found[-1]:.6g}",
            "" if name == "off" else f"{difference[step]:.2g} in step {step + 1}",
            f"{statistics.median(run['steps_ns']) / 1e6:.4g}",
            "" if compute is None else f"{compute / 2**20:.1f}",
        )

    labels = {"off": "off", "on": "on", "control": f"off, weights {train.get('noise', '?')} apart"}
    head = ("flash attention", "first loss", "last loss", "furthest from off", "step, ms", "compute buffers, MiB")
    return table(head, (row(name, label) for name, label in labels.items() if name in losses))


def bench_table(bench: dict[str, Any]) -> str:
    """Memory and time of a training step by context, flash attention off and on, its variants and PyTorch."""
    runs = {(run["ctx"], run["flash_attn"]): run for run in bench["runs"]}

    def memory(run: dict[str, Any], key: str) -> str:
        fits = "" if run["exit_code"] == 0 else ", does not fit"
        return f"{run['memory_bytes'][key] / 2**20:.0f}{fits}" if run["memory_bytes"].get(key) else "-"

    def step(run: dict[str, Any]) -> str:
        times = [nanoseconds / 1e9 for nanoseconds in run["steps_ns"][1:]]
        return f"{statistics.median(times):.3g} ({min(times):.3g} .. {max(times):.3g})" if times else "-"

    rows = []
    for ctx in sorted({ctx for ctx, _ in runs}):
        off, on = runs[ctx, False], runs[ctx, True]
        cells = [memory(run, key) for key in ("compute", "peak") for run in (off, on)]
        rows.append((str(ctx), *cells, step(off), step(on)))
    head = ("compute buffers off, MiB", "on", "peak of the device off, MiB", "on", "step off, s", "on")
    text = table(("context", *head), rows)
    own = {run["ctx"]: step(run) for run in bench["runs"] if run["flash_attn"]}
    if variants := bench.get("variants"):
        rows = [
            (str(v["ctx"]), v["name"], step(v), *(memory(v, key) for key in ("compute", "peak")), own[v["ctx"]])
            for v in variants
        ]
        memories = ("compute buffers, MiB", "peak of the device, MiB")
        text += "\n" + table(("context", "with", "step, s", *memories, "flash attention on, s"), rows)
    if peers := bench.get("peers"):
        rows = [(str(p["ctx"]), f"PyTorch {p['mode']}", step(p), memory(p, "peak"), own[p["ctx"]]) for p in peers]
        text += "\n" + table(("context", "peer", "step, s", "peak of the device, MiB", "flash attention on, s"), rows)
    return text


def steps_table(check: dict[str, Any]) -> str:
    """What each step of gpu-check found."""
    rows = (
        (name, step["state"], f"{float(step['seconds']):.0f}", step["text"].replace("|", r"\|"))
        for name, step in check["steps"].items()
    )
    return table(("step", "state", "seconds", "result"), rows)


def checks_table(train: dict[str, Any]) -> str:
    """What a training run was checked for, and the limits."""
    rows = [
        (c["name"], f"{float(c['found']):.2g}", f"{float(c['limit']):.2g}", "ok" if c["passed"] else "FAILED")
        for c in train["checks"]
    ]
    return table((f"training, {train['shape']['name']} on {train['device']}", "found", "at most", ""), rows)


def _correctness(document: Document) -> Iterable[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[tuple[float, dict[str, Any], str]]] = {}
    for record in document["predicate"]["receipt"]["cases"]:
        for name, part in record["parts"].items():
            groups.setdefault((record["device"], name), []).append((statement.worst_nmse(part), part, record["case"]))
    for (device, name), found in groups.items():
        worst = max(found, key=lambda item: (item[0] != item[0], item[0]))
        passed = sum(part["passed"] for _, part, _ in found)
        yield device, name, str(len(found)), str(passed), f"{worst[0]:.2g}", worst[1]["limit"], f"`{worst[2]}`"
