"""Receipts of runs: written, shown, verified, compared, signed, listed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import options
from ..base import cuda, errors
from ..base.digest import ROOT
from ..perf import plot
from ..receipts import commits, differences, pages, show, signing, statement, verify, writing
from ..receipts.statement import Document
from . import rerun

DIRECTORY = options.RECEIPTS
RECEIPT = "a file, or the id of a receipt in receipts/ or its first digits"


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

    index = verbs.add_parser("index", help=f"write {DIRECTORY.name}/{pages.INDEX}, the pages and their pictures")
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
        print(show.markdown(documents))
    else:
        print("\n\n".join(show.summary(d) for d in documents))
    if args.plot:
        for path in plot.draw(documents, args.plot):
            print(path, file=sys.stderr)
    return 0


def _verify(args: argparse.Namespace) -> int:
    codes, report = [], []
    for path in args.receipts:
        found = verify.check(path, key=args.key, libs=args.check_libs, sources_only=args.sources_only)
        if args.replay and verify.exit_code(found) not in (verify.INVALID,):
            library = options.library(args)
            writing.check_source(library)
            found += rerun.replay(statement.read(path), library, args.replay, args.threads)
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
    lines = list(differences.differences(statement.read(args.old), statement.read(args.new)))
    print("\n".join(lines) or "no difference in files, limits, cases, results, libraries or environment")
    return 1 if lines else 0


def _sign(args: argparse.Namespace) -> int:
    for path in args.receipts:
        statement.read(path)
        print(signing.sign(path, args.key))
    return 0


def _index(args: argparse.Namespace) -> int:
    shelf = pages.Shelf()
    wanted = {ROOT / "receipts" / pages.INDEX: pages.index(shelf)}
    wanted |= {page: pages.filled(page.read_text(encoding="utf-8"), shelf) for page in pages.pages()}
    wanted |= pages.drawings(shelf)
    changed = {
        path: text for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    if not args.check:
        for path, text in changed.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            statement.replace(path, text.encode())
            print(path.relative_to(ROOT))
        return 0
    problems = [f"{path.relative_to(ROOT)} is not current: python -m pyharness receipt index" for path in changed]
    problems += pages.quoted_problems(shelf)
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
        for old in pages.listed():
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
    for page in pages.pages():
        text = before = page.read_text(encoding="utf-8")
        for a, b in ((old.name, new.name), (options.label(old), options.label(new))):
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


# ---- diff ----


# ---- index ----
