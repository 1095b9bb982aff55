"""Receipts of runs: written, shown, verified, compared, signed, listed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import commits, cuda, digest, errors, figures, monitor, options, signing, statement, verify
from .digest import ROOT
from .statement import Document
from .tables import peers_table, performance_table
from .tables import table as _table

if TYPE_CHECKING:
    from .cases import Case
    from .ggml import Device, Library
    from .oracle import CaseResult

DIRECTORY = options.RECEIPTS
RECEIPT = "a file, or the id of a receipt in receipts/ or its first digits"
INDEX = "README.md"


# ---- for the verbs that run something ----


def check_source(library: Library, root: Path = ROOT) -> None:
    """That every loaded library was built from the tree's sources, and that a carried commit is proved;
    errors.Environment names the files that differ."""
    commits.read(root)
    want = digest.files(root)
    tree = digest.patch_digest(root)
    for item in statement.libraries(library, root):
        if item["source"] == tree or item["name"].startswith("libggml."):
            continue
        if item["source"] is None:
            raise errors.Environment(
                f"{item['name']} does not say what it was built from",
                hint=f"build it from this tree: {library.rebuild}",
            )
        directory = library.directory
        build = [directory.parent] if (directory.parent / "CMakeCache.txt").is_file() else []
        built = verify.manifest_of(item["source"], [directory, *build, root / "build/upstream"])
        differing = [p for p in sorted(want.keys() | (built or {}).keys()) if built and want.get(p) != built.get(p)]
        files = (
            ", ".join(f"ggml/{p}" for p in differing)
            or "the build left no list of its files, so which one is not known"
        )
        raise errors.Environment(
            f"{item['name']} was built from sources {item['source'][:12]}, the tree has {tree[:12]}: {files}",
            hint=f"build again: {library.rebuild}",
        )


def write(
    directory: Path,
    mode: str,
    library: Library,
    results: Sequence[CaseResult],
    seed: int,
    partial: bool,
    started: float,
    finished: float,
    case_files: Sequence[Path],
    *,
    exit_code: int,
    reason: str = "",
    selection: dict[str, Any] | None = None,
    checks: Sequence[dict[str, Any]] = (),
    monitor: dict[str, Any] | None = None,
    perf: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    bench: dict[str, Any] | None = None,
) -> Path:
    """Write the receipt of a run below `directory` and return its path; see statement.build."""
    document = statement.build(
        mode,
        library,
        results,
        seed=seed,
        partial=partial,
        started=started,
        finished=finished,
        case_files=case_files,
        exit_code=exit_code,
        reason=reason,
        selection=selection,
        checks=checks,
        perf=perf,
        monitor=monitor,
        train=train,
        bench=bench,
    )
    return statement.save(directory, document)


def selection(
    args: argparse.Namespace, selected: Sequence[Case], devices: Iterable[Device], root: Path = ROOT
) -> dict[str, Any]:
    """What a run with these options was to try; without the options of a case list, just the selected cases."""
    names = [device.name for device in devices]
    if "case_file" not in args:
        return statement.selection(selected, selected, names)
    if getattr(args, "last_failed", False):  # which these were, no list and no filter tells
        return statement.selection(options.listed(args), selected, names)
    file = args.case_file.resolve()
    inside = file.is_relative_to(root.resolve())
    return statement.selection(
        options.listed(args),
        selected,
        names,
        file=file.relative_to(root.resolve()).as_posix() if inside else file.name,
        op=args.op,
        params=args.params,
        random=args.random,
        graphs=options.graphs(args),
    )


# ---- the verb ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """receipt show | verify | diff | sign | index."""
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    show = verbs.add_parser("show", help="print receipts")
    show.add_argument("receipts", nargs="+", type=options.receipt, metavar="RECEIPT", help=RECEIPT)
    form = show.add_mutually_exclusive_group()
    form.add_argument("--md", action="store_true", help="the reviewer's two tables: correctness by part, performance")
    form.add_argument("--json", action="store_true", help="the documents")
    show.add_argument("--plot", type=Path, metavar="DIR", help="draw time, TFLOP/s and errors into DIR (PNG, SVG, CSV)")

    check = verbs.add_parser(
        "verify", help="schema, id, signature, sums, files, libraries; exit 0, 4 invalid, 6 stale, 1 not reproduced"
    )
    check.add_argument("receipts", nargs="+", type=options.receipt, metavar="RECEIPT", help=RECEIPT)
    check.add_argument("--key", type=Path, metavar="PEM", help="require a signature by this ed25519 public key")
    check.add_argument("--check-libs", type=Path, metavar="DIR", help="require the libraries that ran in DIR")
    check.add_argument("--sources-only", action="store_true", help="do not compare libraries")
    check.add_argument("--replay", type=int, default=0, metavar="N", help="run N of the cases again")
    check.add_argument("--json", action="store_true", help="the findings as JSON")
    options.backend(check)

    diff = verbs.add_parser(
        "diff", help="what differs between two receipts: limits, cases, files, results; exit 1 when something does"
    )
    diff.add_argument("old", type=options.receipt, metavar="OLD", help=RECEIPT)
    diff.add_argument("new", type=options.receipt, metavar="NEW", help=RECEIPT)

    sign = verbs.add_parser("sign", help="sign a receipt with an ed25519 key (DSSE)")
    sign.add_argument("receipts", nargs="+", type=options.receipt, metavar="RECEIPT", help=RECEIPT)
    sign.add_argument(
        "--key", type=Path, required=True, metavar="PEM", help="private key: openssl genpkey -algorithm ed25519"
    )

    add = verbs.add_parser(
        "add",
        help=f"put receipts into {DIRECTORY.name}/, each in the place of an older one of the same run, on pages too",
    )
    add.add_argument("receipts", nargs="+", type=Path, metavar="FILE")

    verbs.add_parser(
        "commit", help=f"write {commits.CARRIED}, from which a copy of this checkout without its git proves its commit"
    )

    index = verbs.add_parser("index", help=f"write {DIRECTORY.name}/{INDEX}")
    index.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 6 when it is not current or a quoted receipt is stale or missing",
    )


def run(args: argparse.Namespace) -> int:
    """Dispatch on the action."""
    if "receipts" in args:
        args.receipts = _without_signatures(args.receipts)
    verbs = {
        "show": _show,
        "verify": _verify,
        "diff": _diff,
        "sign": _sign,
        "index": _index,
        "commit": _commit,
        "add": _add,
    }
    return verbs[args.action](args)


def _without_signatures(paths: Sequence[Path]) -> list[Path]:
    """What receipts/*.json names but for the signatures that lie there too."""
    signatures = [path for path in paths if path.name.endswith(signing.SUFFIX)]
    if len(signatures) == len(paths):
        raise errors.Usage(f"{paths[0]}: a signature", "give its receipt; verify --key PUBLIC.pem checks the signature")
    for path in signatures:
        print(f"note     {path.name}: a signature, not a receipt: left out", file=sys.stderr)
    return [path for path in paths if path not in signatures]


def _show(args: argparse.Namespace) -> int:
    documents = [statement.read(path) for path in args.receipts]
    if args.json:
        print(json.dumps(documents if len(documents) > 1 else documents[0], indent=1))
    elif args.md:
        print(markdown(documents))
    else:
        print("\n\n".join(summary(d) for d in documents))
    if args.plot:
        from . import plot

        for path in plot.draw(documents, args.plot):
            print(path, file=sys.stderr)
    return 0


def _verify(args: argparse.Namespace) -> int:
    codes, report = [], []
    for path in args.receipts:
        found = verify.check(path, key=args.key, libs=args.check_libs, sources_only=args.sources_only)
        if args.replay and verify.exit_code(found) not in (verify.INVALID,):
            library = options.library(args)
            check_source(library)
            found += verify.replay(statement.read(path), library, args.replay, args.threads)
        code = verify.exit_code(found)
        codes.append(code)
        report.append(
            {"receipt": path.name, "exit_code": code, "verdict": _verdict(code), "findings": [vars(f) for f in found]}
        )
        if not args.json:
            for finding in found:
                print(f"{'note' if finding.code == 0 else _verdict(finding.code):8} {finding.step}: {finding.text}")
            print(f"{_verdict(code)}  {options.label(path)}{_outcome(path, code)}")
    if args.json:
        print(json.dumps(report, indent=1))
    return next((code for code in codes if code), 0)


def _outcome(path: Path, code: int) -> str:
    """What a receipt that holds says of a run that did not pass."""
    failed = code in (verify.OK, verify.STALE) and statement.parse(path)["predicate"]["result"] == "FAILED"
    return " (of a run that FAILED)" if failed else ""


def _verdict(code: int) -> str:
    return {0: "FRESH", verify.FAILED: "FAILED", verify.INVALID: "INVALID", verify.STALE: "STALE"}[code]


def _diff(args: argparse.Namespace) -> int:
    lines = list(differences(statement.read(args.old), statement.read(args.new)))
    print("\n".join(lines) or "no difference in files, limits, cases, results, libraries or environment")
    return 1 if lines else 0


def _sign(args: argparse.Namespace) -> int:
    for path in args.receipts:
        statement.read(path)
        print(signing.sign(path, args.key))
    return 0


def _index(args: argparse.Namespace) -> int:
    shelf = Shelf()
    wanted = {ROOT / "receipts" / INDEX: index(shelf)}
    wanted |= {page: tables(page.read_text(encoding="utf-8"), shelf) for page in pages()}
    changed = {
        path: text for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    if not args.check:
        for path, text in changed.items():
            path.parent.mkdir(exist_ok=True)
            statement.replace(path, text.encode())
            print(path.relative_to(ROOT))
        return 0
    problems = [f"{path.relative_to(ROOT)} is not current: python -m pyharness receipt index" for path in changed]
    problems += quoted_problems(shelf)
    if problems:
        raise errors.Stale("; ".join(problems))
    return 0


def _add(args: argparse.Namespace) -> int:
    """Every receipt first, then the changes: a wrong one changes nothing."""
    read = [(path, statement.read(path)) for path in args.receipts]
    for path, _ in read:
        wrong = [f for f in verify.check(path, sources_only=True) if f.code == verify.INVALID]
        if wrong:
            raise errors.Invalid(f"{path.name}: {wrong[0].text}")
    for _, document in read:
        new = statement.save(DIRECTORY, document)
        print(new.relative_to(ROOT))
        for old in listed():
            if old != new and old.exists() and _same(statement.read(old)) == _same(document) and old.name < new.name:
                _supersede(old, new)
    return 0


_WHERE = {"--receipts", "--out", "--libs", "--timeout", "--threads", "--vocabulary", "--text"}
"""Options that say where and how long a run may work."""


def _same(document: Document) -> tuple[Any, ...]:
    """What receipts of the same run share: verb, options but for _WHERE, the kernel path that CUDA was held to."""
    body = document["predicate"]["receipt"]
    words, kept = iter(body["argv"]), []
    for word in words:
        if word in _WHERE:
            next(words, None)
        elif word.partition("=")[0] not in _WHERE:
            kept.append(word)
    return body["mode"], body["environment"]["variables"].get(cuda.KERNEL_PATH), "bench" in body, *kept


def _supersede(old: Path, new: Path) -> None:
    """Quote a receipt in the place of an older one of the same run, and delete that."""
    for page in pages():
        text = before = page.read_text(encoding="utf-8")
        for a, b in ((old.name, new.name), (_id12(old), _id12(new))):
            text = text.replace(a, b)
        if text != before:
            statement.replace(page, text.encode())
    for path in (old, signing.envelope_path(old)):
        path.unlink(missing_ok=True)
    print(f"  in the place of {old.relative_to(ROOT)}")


def _commit(_: argparse.Namespace) -> int:
    print(commits.carry(ROOT).relative_to(ROOT))
    found = commits.revision(ROOT, [f["path"] for f in statement.inputs("oracle")])
    if found and found["dirty"]:
        many = len(found["dirty"]["paths"])
        print(f"note     DIRTY: {many} paths differ from commit {found['commit'][:12]}; commit first", file=sys.stderr)
    return 0


# ---- show ----


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
    return names + (f", driver {gpu['driver']}" if gpu["driver"] else "") + _clocks(body, ", ")


def _clocks(body: Document, before: str) -> str:
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
            f"{main['name']} `{main['sha256'][:12]}`{_clocks(body, '; GPU ')}"
        )
    return "\n\n".join(sections)


def correctness_table(documents: Sequence[Document]) -> str:
    """The worst error of each part, or of one of its heads, on each device."""
    rows = (row for document in documents for row in _correctness(document))
    return _table(("device", "part", "cases", "passed", "worst NMSE", "limit", "case of the worst"), rows)


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
    from .train import apart, severity

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
    return _table(head, (row(name, label) for name, label in labels.items() if name in losses))


def bench_table(bench: dict[str, Any]) -> str:
    """Memory and time of a training step by context, flash attention off and on."""
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
    return _table(("context", *head), rows)


def steps_table(check: dict[str, Any]) -> str:
    """What each step of gpu-check found."""
    rows = (
        (name, step["state"], f"{float(step['seconds']):.0f}", step["text"].replace("|", r"\|"))
        for name, step in check["steps"].items()
    )
    return _table(("step", "state", "seconds", "result"), rows)


def checks_table(train: dict[str, Any]) -> str:
    """What a training run was checked for, and the limits."""
    rows = [
        (c["name"], f"{float(c['found']):.2g}", f"{float(c['limit']):.2g}", "ok" if c["passed"] else "FAILED")
        for c in train["checks"]
    ]
    return _table((f"training, {train['shape']['name']} on {train['device']}", "found", "at most", ""), rows)


def _correctness(document: Document) -> Iterable[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[tuple[float, dict[str, Any], str]]] = {}
    for record in document["predicate"]["receipt"]["cases"]:
        for name, part in record["parts"].items():
            groups.setdefault((record["device"], name), []).append((statement.worst_nmse(part), part, record["case"]))
    for (device, name), found in groups.items():
        worst = max(found, key=lambda item: (item[0] != item[0], item[0]))
        passed = sum(part["passed"] for _, part, _ in found)
        yield device, name, str(len(found)), str(passed), f"{worst[0]:.2g}", worst[1]["limit"], f"`{worst[2]}`"


# ---- diff ----


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
        from . import perf

        for found in perf.against_base(b["perf"]["measurements"], old)["comparisons"]:
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


# ---- index ----


def listed(root: Path = ROOT) -> list[Path]:
    """The receipts that belong to the repository: those that git tracks, all that lie there outside git.
    Raises errors.Environment where a checkout's git cannot be asked."""
    found = sorted((root / "receipts").glob("*.json"))
    try:
        run = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "receipts"], capture_output=True, check=True, text=True
        )
        tracked = {root / name for name in run.stdout.split("\0") if name}
        found = [path for path in found if path in tracked]
    except (OSError, subprocess.CalledProcessError) as error:
        if (root / ".git").exists():
            said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else "git is missing"
            raise errors.Environment(f"which receipts git tracks cannot be told: {said}") from None
    return [path for path in found if not path.name.endswith(signing.SUFFIX)]


def _id12(path: Path) -> str:
    return path.stem.rpartition("-")[2]


@dataclasses.dataclass(frozen=True)
class Kept:
    """A receipt of the repository, read and verified by sources alone."""

    path: Path
    document: Document
    origin: commits.Origin
    state: str
    """ "fresh", "stale" or "invalid"."""

    @property
    def id12(self) -> str:
        """The first 12 digits of its id, as its file name has them."""
        return _id12(self.path)


class Shelf:
    """The receipts of a tree by the first 12 digits of their ids, each read and verified once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.kept: dict[str, Kept] = {}
        with commits.History(root) as history:
            self.has_history = bool(history)
            for path in listed(root):
                document = statement.read(path)
                code = verify.exit_code(verify.examine(document, path, history, sources_only=True, root=root))
                origin = commits.origin(document["predicate"]["receipt"], history)
                state = {0: "fresh", verify.STALE: "stale"}.get(code, "invalid")
                kept = Kept(path, document, origin, state)
                self.kept[kept.id12] = kept
        self._quoting: dict[str, list[Path]] = {}
        for page in pages(root):
            for id12 in self.quoted(page.read_text(encoding="utf-8")):
                self._quoting.setdefault(id12, []).append(page)

    def of(self, name: str, figure: str | None = None) -> list[Kept]:
        """The receipt of an id; of `gpucheck` those of the newest checks, as many as give every step once, or the one
        that ran the figure's step."""
        if name != "gpucheck":
            return [self.kept[name]] if name in self.kept else []
        found, known = [], set[str]()
        checks = [one for one in self.kept.values() if "check" in one.document["predicate"]["receipt"]]
        for one in sorted(checks, key=lambda one: one.path.name, reverse=True):
            steps = one.document["predicate"]["receipt"]["check"]["steps"].keys()
            if steps - known and (figure is None or figure.partition(".")[0] in steps - known):
                found.append(one)
            known |= steps
        return found

    def quoted(self, text: str) -> list[str]:
        """The receipts that a page takes figures from, or quotes by path or by id: 12 digits of each."""
        found = re.findall(r"receipts/[\w.-]+-([0-9a-f]{12})\.json|receipt `?([0-9a-f]{12})\b", text)
        marks = [one.id12 for mark in _MARKED.finditer(text) for one in self.of(mark[2], mark[3])]
        return sorted({*marks, *(by_path or by_id for by_path, by_id in found)})

    def quoting(self, id12: str) -> list[Path]:
        """The pages that quote a receipt."""
        return self._quoting.get(id12, [])


def index(shelf: Shelf) -> str:
    """The text of receipts/README.md."""
    told = {} if shelf.has_history else _told(shelf.root)
    rows = []
    for id12, kept in shelf.kept.items():
        body = kept.document["predicate"]["receipt"]
        used = {record["device"] for record in statement.tried(body)}
        if "check" in body:
            used = {device["name"] for device in body["devices"]}
        if trained := body.get("train") or body.get("bench"):
            used.add({"cpu": "CPU", "cuda": "CUDA0"}[trained["device"]])
        devices = "; ".join(f"{d['name']} {d['description']}" for d in body["devices"] if d["name"] in used)
        result = kept.document["predicate"]["result"] + (", partial" if body["partial"] else "")
        link = f"[`{id12}`]({kept.path.name})"
        names = [page.relative_to(shelf.root).as_posix() for page in shelf.quoting(id12)]
        links = ", ".join(f"[{name}](../{name})" for name in names)
        commit = told.get(id12) or str(kept.origin).removeprefix("commit ")
        rows.append((body["finished"], _what(body), devices, result, link, commit, kept.state, links))
    signed = sum(signing.envelope_path(kept.path).exists() for kept in shelf.kept.values())
    head = ("when", "what", "device", "result", "id", "commit", "state", "quoted in")
    table = _table(head, sorted(rows, reverse=True))
    return (
        "# Receipts\n\n"
        "Written by runs, listed by `python -m pyharness receipt index`. Fresh: every file that the receipt stands on\n"
        "lies in this tree with the same content. The commit has all these files; DIRTY: none is known to.\n"
        f"{signed} of {len(rows)} are signed. `python -m pyharness receipt verify FILE` checks one.\n\n"
        + (table if rows else "None yet.")
        + "\n"
    )


def _told(root: Path) -> dict[str, str]:
    """The commit of each receipt as the index has it: without the history nobody can tell it again."""
    page = root / "receipts" / INDEX
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return {row[1]: row[2] for row in re.finditer(r"\[`([0-9a-f]{12})`\]\([^)]*\) \| ([^|]+) \|", text)}


def _what(body: Document) -> str:
    counts = body["counts"]
    ran = counts["ok"] + counts["failed"]
    if body["perf"]:
        ours = set(statement.OURS.values())
        peers = sorted({r["who"].partition(" ")[0] for r in body["perf"]["measurements"] if r["who"] not in ours})
        return f"perf: {ran} shapes" + (f", with {', '.join(peers)}" if peers else "")
    if "check" in body:
        rest = f", {counts['skipped']} not run" if counts["skipped"] else ""
        return f"{body['mode']}: {counts['ok']} of {ran} steps ok{rest}"
    if "bench" in body:
        contexts = sorted({run["ctx"] for run in body["bench"]["runs"]})
        return f"train: {body['bench']['shape']['name']}, contexts of {', '.join(map(str, contexts))}"
    if "train" in body:
        return f"train: {body['train']['shape']['name']}, {counts['ok']} of {ran} checks ok"
    records = [r for r in body["cases"] if r["parts"]]
    paths = ", ".join(sorted({r["path"] for r in records if r["path"]}))
    repeats = max((r["repeats"] for r in records), default=1)
    worst = max((statement.worst_nmse(p) for r in records for p in r["parts"].values()), default=float("nan"))
    ran = [record for record in body["cases"] if record["status"] in ("ok", "failed")]
    checks = body.get("checks", ())
    return (
        f"{body['mode']}: {sum(record['status'] == 'ok' for record in ran)} of {len(ran)} cases ok"
        + (f" on {paths}" if paths else "")
        + (f", {sum(check['passed'] for check in checks)} of {len(checks)} checks" if checks else "")
        + (f", {repeats} runs each" if repeats > 1 else "")
        + (f", {counts['unsupported']} refused" if counts["unsupported"] else "")
        + f", worst NMSE {worst:.2g}"
    )


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that may quote receipts: README.md and docs/*.md."""
    return [page for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))] if page.is_file()]


_MARKED = re.compile(
    r"(<!-- receipt ([0-9a-f]{12}|gpucheck)(?: ([^\n]+?))? -->)(\n?)(.*?)(<!-- /receipt -->)", re.DOTALL
)
"""What a page takes from receipts: a table between lines, or a figure by its name inside a line."""


def tables(text: str, shelf: Shelf) -> str:
    """A page with what stands between `<!-- receipt ID -->` and `<!-- /receipt -->` filled from that receipt: the
    tables that fit it, or with `<!-- receipt ID NAME -->` a figure (`figures.NAMES`).

    In the place of an id, `gpucheck` is the newest check that ran a step. errors.Usage for a figure that it lacks."""

    def fill(mark: re.Match[str]) -> str:
        head, name, figure, line, _, end = mark.groups()
        kept = shelf.of(name, figure)
        if not kept:
            return mark[0]
        if not figure:
            return f"{head}\n{_quotation(kept)}\n{end}"
        try:
            return f"{head}{line}{figures.figure(kept[0].document, figure)}{end}"
        except KeyError:
            raise errors.Usage(
                f"receipt {name} has no figure {figure!r}", f"the figures are:\n{figures.NAMES}"
            ) from None

    return _MARKED.sub(fill, text)


def _quotation(kept: Sequence[Kept]) -> str:
    """The tables of a receipt, or of the newest checks that ran each step, and links to them."""
    body = kept[0].document["predicate"]["receipt"]
    links = ", ".join(f"[`{one.id12}`](/receipts/{one.path.name})" for one in kept)
    if "check" in body:
        steps: dict[str, Any] = {}
        for one in kept:
            steps = {**one.document["predicate"]["receipt"]["check"]["steps"], **steps}
        table = steps_table({"steps": steps})
    elif "bench" in body:
        table = bench_table(body["bench"])
    elif "train" in body:
        table = runs_table(body["train"])
    else:
        table = peers_table(body["perf"]) if body["perf"] else correctness_table([kept[0].document])
    clocks = _clocks(body, "; GPU ") if body["perf"] else ""
    return f"{table}\n\nFrom receipt{'s' if len(kept) > 1 else ''} {links}{clocks}."


def unfilled(text: str, shelf: Shelf) -> list[str]:
    """What a page would take from checks that no receipt here holds: the text that stands there in its place."""
    return [mark[5] for mark in _MARKED.finditer(text) if mark[2] == "gpucheck" and not shelf.of(mark[2], mark[3])]


def quoted_problems(shelf: Shelf) -> Iterable[str]:
    """Receipts that README.md and docs/*.md quote and that are not fresh."""
    for page in pages(shelf.root):
        for name in shelf.quoted(page.read_text(encoding="utf-8")):
            state = shelf.kept[name].state if name in shelf.kept else "missing"
            if state != "fresh":
                yield f"{page.relative_to(shelf.root)} quotes receipt {name}, which is {state}"
