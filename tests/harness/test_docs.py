"""What the pages name is there: links, files, options, tests."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyharness import __version__
from pyharness.base.digest import ROOT
from pyharness.case import cases
from pyharness.cli import cli
from pyharness.receipts import commits, pages

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests/data/README.md"]
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@pytest.fixture(scope="module")
def shelf() -> pages.Shelf:
    return pages.Shelf()


def anchors(page: Path) -> set[str]:
    """The headings of a page as its links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = ROOT / file[1:] if file.startswith("/") else page.parent / file if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@each_page
def test_every_file_that_is_named_is_there(page: Path) -> None:
    folders, suffixes = (
        "ggml|pyharness|tests|examples|fuzz|cmake|docs|receipts",
        "py|cpp|cuh?|[ch]|md|toml|def|csv|json|cmake",
    )
    for name in re.findall(rf"\b(?:{folders})/[\w./-]+\.(?:{suffixes})\b", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists() or (page.parent / name).exists(), name


@each_page
def test_prose_ends_before_column_120(page: Path) -> None:
    text = re.sub(r"(?ms)^<!-- (\w+)[^>]*-->$.*?^<!-- /\1 -->$", "", page.read_text(encoding="utf-8"))
    long = [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]
    assert not long


def test_the_picture_of_the_data_flow_is_a_graph_of_its_nodes() -> None:
    (picture,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.DOTALL)
    head, *lines = picture.splitlines()
    assert head == "flowchart TB"
    nodes, ends, depth = set[str](), set[str](), 0
    for line in map(str.strip, lines):
        if node := re.fullmatch(r'(subgraph )?(\w+)\["[^"]+"\]', line):
            assert node[2] not in {*nodes, "end"}, line
            nodes.add(node[2])
            depth += bool(node[1])
        elif edge := re.fullmatch(r"(\w+) --> (\w+)", line):
            assert set(edge.groups()) <= nodes, line
            ends.update(edge.groups())
        else:
            assert line == "end", line
            depth -= 1
    assert depth == 0
    assert nodes - ends == {"inputs", "prep", "fwd", "back"}


def test_the_changelog_has_the_version_that_the_harness_says_it_is() -> None:
    released = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == __version__


GITHUB = ROOT / ".github"


def test_the_workflow_runs_what_a_person_runs() -> None:
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    programs = [word for step in job["steps"] for word in step.get("run", "").split() if word.startswith("./")]
    assert programs == ["./.ci/run"]
    assert "./scripts/test" in (ROOT / programs[0]).read_text(encoding="utf-8")


@pytest.mark.parametrize("form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda form: form.stem)
def test_an_issue_form_asks_for_what_can_be_run_and_read(form: Path) -> None:
    text = form.read_text(encoding="utf-8")
    fields = pytest.importorskip("yaml").safe_load(text)["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    for name in re.findall(r"docs/[\w.-]+", text):
        assert (ROOT / name.rstrip(".")).exists(), name
    for verb, named in commands(form):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"pyharness.{cli.VERBS[verb][0]}").add_arguments(parser)
        assert set(named) <= options(parser), verb


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Verb and options of each command of pyharness or of a script that hands its options to one."""
    verbs = {"gpu-check": "gpucheck", "train-demo": "train"}
    written = r"(?:python -m pyharness |scripts/)(oracle|gpu-check|train-demo|(?<=pyharness )[a-z]+)\b([^`\n]*)"
    for name, rest in re.findall(written, page.read_text(encoding="utf-8")):
        yield verbs.get(name, name), re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest.partition(" #")[0])


def options(parser: argparse.ArgumentParser) -> set[str]:
    """All options of a verb and of the actions below it."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*(options(sub) for sub in action.choices.values()))
    return found


@each_page
def test_every_option_that_is_named_is_one(page: Path) -> None:
    for verb, named in commands(page):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"pyharness.{cli.VERBS[verb][0]}").add_arguments(parser)
        assert set(named) <= options(parser), verb


def test_every_test_of_a_public_report_is_there() -> None:
    page = (ROOT / "docs/public-failures.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| U\d+ .*$", page, re.MULTILINE):
        for proof in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1]):
            file, _, name = proof.rpartition("::")
            if filters := re.fullmatch("oracle -p '?([^']+)'?", proof):
                assert cases.select(cases.load(cases.CASES), None, filters[1])
            if not re.match("u[0-9]", name) and not file:
                continue
            (path,) = (ROOT / "tests").rglob(file or "test_public_reports.py")
            source = path.read_text(encoding="utf-8")
            assert f"def test_{re.split('[.[]', name)[0]}" in source, proof


@each_page
def test_a_figure_that_no_receipt_holds_yet_names_its_commit(page: Path, shelf: pages.Shelf) -> None:
    text = page.read_text(encoding="utf-8")
    for figure in pages.unfilled(text, shelf):
        assert re.search("commit `[0-9a-f]{7,40}`", figure), figure


@each_page
def test_no_figure_begins_a_line_which_would_end_the_paragraph(page: Path) -> None:
    assert not re.findall(r"^ {0,3}<!-- receipt \w+ [^-].*", page.read_text(encoding="utf-8"), re.MULTILINE)


@each_page
def test_every_commit_that_is_named_is_in_the_history(page: Path) -> None:
    with commits.History(ROOT) as history:
        if not history:
            pytest.skip("no history")
        for commit in re.findall(r"commit `([0-9a-f]{7,40})`", page.read_text(encoding="utf-8")):
            assert any(known.startswith(commit) for known in history), commit
