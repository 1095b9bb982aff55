"""The receipts of the repository: their index, and what the pages take from them."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import options
from ..base import errors
from ..base.digest import ROOT
from . import commits, figures, pictures, show, signing, statement, tables, verify
from .statement import Document

INDEX = "README.md"
DRAWN = {
    "pair": (pictures.pair, "Time of the attention of a training step, by shape"),
    "training": (pictures.training, "Time and peak memory of a training step, by context"),
}
"""The pictures of docs/pictures by name: what draws them, and their words for who cannot see them."""


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
        return options.label(self.path)

    @property
    def as_of(self) -> str:
        """What a page has to say where it quotes this receipt although the sources have changed since."""
        return f"as of commit `{self.origin.commit[:7]}`" if self.state == "stale" and self.origin.commit else ""


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

    @functools.cached_property
    def pictures(self) -> dict[str, tuple[Kept, str]]:
        """The pictures that can be drawn, each from the receipt that gives it the most bars: a fresh one where
        there is any, the newest of equals."""
        found = dict[str, tuple[Kept, str]]()
        for name, (draw, _) in DRAWN.items():
            bodies = [
                (one, one.document["predicate"]["receipt"]) for one in self.kept.values() if one.state != "invalid"
            ]
            drawn = [(one, body["finished"], text) for one, body in bodies if (text := draw(body))]
            if drawn:
                kept, _, text = max(drawn, key=lambda one: (one[0].state == "fresh", one[2].count("<rect"), one[1]))
                found[name] = kept, text
        return found

    def quoted(self, text: str) -> list[str]:
        """The receipts that a page takes figures or pictures from, or quotes by path or by id: 12 digits of each."""
        text = _pictured(text, self)
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
    table = tables.table(head, sorted(rows, reverse=True))
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
    """The pages that may quote receipts: README.md and those in docs/."""
    return [page for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if page.is_file()]


_MARKED = re.compile(
    r"(<!-- receipt ([0-9a-f]{12}|gpucheck)(?: ([^\n]+?))? -->)(\n?)(.*?)(<!-- /receipt -->)", re.DOTALL
)
"""What a page takes from receipts: a table between lines, or a figure by its name inside a line."""


_PICTURE = re.compile(r"(<!-- picture (\w+) -->\n).*?(<!-- /picture -->)", re.DOTALL)
"""A picture of a page, by its name."""


def _pictured(text: str, shelf: Shelf) -> str:
    """A page with its pictures and the receipts that they are drawn from; nothing between the marks where there is no
    such receipt. errors.Usage for a picture that there is not."""

    def fill(mark: re.Match[str]) -> str:
        head, name, end = mark.groups()
        if name not in DRAWN:
            raise errors.Usage(f"no picture {name!r}", f"the pictures are: {', '.join(DRAWN)}")
        if name not in shelf.pictures:
            return head + end
        kept, words = shelf.pictures[name][0], DRAWN[name][1]
        link = f"[`{kept.id12}`](/receipts/{kept.path.name})"
        when = f", {kept.as_of}" if kept.as_of else ""
        return f"{head}![{words}](/docs/pictures/{name}.svg)\n\nDrawn from receipt {link}{when}.\n{end}"

    return _PICTURE.sub(fill, text)


def filled(text: str, shelf: Shelf) -> str:
    """A page with its pictures, and with what stands between `<!-- receipt ID -->` and `<!-- /receipt -->` filled from
    that receipt: the tables that fit it, or with `<!-- receipt ID NAME -->` a figure (`figures.NAMES`).

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

    return _MARKED.sub(fill, _pictured(text, shelf))


def drawings(shelf: Shelf) -> dict[Path, str]:
    """The files of the pictures and their text."""
    return {shelf.root / f"docs/pictures/{name}.svg": text for name, (_, text) in shelf.pictures.items()}


def _quotation(kept: Sequence[Kept]) -> str:
    """The tables of a receipt, or of the newest checks that ran each step, and links to them."""
    body = kept[0].document["predicate"]["receipt"]
    links = ", ".join(f"[`{one.id12}`](/receipts/{one.path.name})" for one in kept)
    if "check" in body:
        steps: dict[str, Any] = {}
        for one in kept:
            steps = {**one.document["predicate"]["receipt"]["check"]["steps"], **steps}
        table = show.steps_table({"steps": steps})
    elif "bench" in body:
        table = show.bench_table(body["bench"])
    elif "train" in body:
        table = show.runs_table(body["train"])
    else:
        table = tables.peers_table(body["perf"]) if body["perf"] else show.correctness_table([kept[0].document])
    clocks = show.clocks(body, "; GPU ") if body["perf"] else ""
    when = "".join(sorted({f", {one.as_of}" for one in kept if one.as_of}))
    return f"{table}\n\nFrom receipt{'s' if len(kept) > 1 else ''} {links}{when}{clocks}."


def unfilled(text: str, shelf: Shelf) -> list[str]:
    """What a page would take from checks that no receipt here holds: the text that stands there in its place."""
    return [mark[5] for mark in _MARKED.finditer(text) if mark[2] == "gpucheck" and not shelf.of(mark[2], mark[3])]


def quoted_problems(shelf: Shelf) -> Iterable[str]:
    """Receipts that README.md and docs/*.md quote and that are not fresh, but for stale ones of which the page says so:
    `as of commit` and the commit that has their files."""
    for page in pages(shelf.root):
        text = page.read_text(encoding="utf-8")
        said = re.sub(r"\s+", " ", text).lower()
        for name in shelf.quoted(text):
            kept = shelf.kept.get(name)
            state = kept.state if kept else "missing"
            if state != "fresh" and not (kept and kept.as_of and kept.as_of in said):
                hint = f"; redo it, or say that it is {kept.as_of}" if kept and kept.as_of else ""
                yield f"{page.relative_to(shelf.root)} quotes receipt {name}, which is {state}{hint}"
