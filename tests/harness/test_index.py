"""receipts/README.md and the receipts that the pages quote."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest
from receipt_world import KERNEL, World

from pyharness.base import errors
from pyharness.base.digest import ROOT
from pyharness.receipts import pages, statement


@pytest.fixture
def world(world: World) -> World:
    world.git("add", "receipts")
    return world


def test_the_repository_has_a_current_index() -> None:
    assert (ROOT / "receipts/README.md").read_text() == pages.index(pages.Shelf())


def test_no_page_of_the_repository_quotes_a_receipt_that_is_not_fresh() -> None:
    assert list(pages.quoted_problems(pages.Shelf())) == []


def test_the_index_lists_what_ran_on_what_and_whether_it_still_holds(world: World) -> None:
    done = world.run("receipt", "index")
    assert (done.returncode, done.stdout) == (0, "receipts/README.md\n")
    text = (world.root / "receipts/README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| 20")]
    assert len(rows) == 2
    perf, oracle = rows  # newest first
    assert re.search(r"\| oracle: 3 of 3 cases ok on cpu, worst NMSE [\d.e-]+ \| CPU [^|]+ \| PASSED \|", oracle)
    assert "| perf: 2 shapes, with unfused |" in perf
    assert f"({world.oracle.name}) | {world.git('rev-parse', 'HEAD')[:12]} | fresh |" in oracle
    assert world.run("receipt", "index", "--check").returncode == 0

    world.edit(KERNEL, lambda data: data + b"\n")
    done = world.run("receipt", "index", "--check")
    assert done.returncode == 6
    assert "receipts/README.md is not current" in done.stderr
    world.run("receipt", "index")
    assert (world.root / "receipts/README.md").read_text().count("| stale |") == 2


def test_an_edited_receipt_is_listed_as_invalid(world: World) -> None:
    world.oracle.write_text(world.oracle.read_text().replace('"ok":3', '"ok":2'))
    world.run("receipt", "index")
    assert "| invalid |" in (world.root / "receipts/README.md").read_text()


def test_receipts_that_git_does_not_track_are_not_listed(world: World) -> None:
    before = pages.index(pages.Shelf(world.root))
    shutil.copy(world.oracle, world.oracle.with_name("20200101T000000Z-oracle-000000000000.json"))
    assert pages.index(pages.Shelf(world.root)) == before
    world.git("add", "receipts")
    assert pages.index(pages.Shelf(world.root)) != before


def test_a_checkout_whose_git_cannot_be_asked_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.root / ".git/HEAD").unlink()
    with pytest.raises(errors.Environment, match="which receipts git tracks cannot be told: fatal"):
        pages.listed(world.root)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(errors.Environment, match="git is missing"):
        pages.listed(world.root)
    shutil.rmtree(world.root / ".git")
    assert len(pages.listed(world.root)) == 2


def test_a_quoted_receipt_must_be_there_and_fresh(world: World) -> None:
    id12 = world.oracle.stem.rsplit("-", 1)[1]
    (world.root / "docs").mkdir()
    (world.root / "README.md").write_text(f"All pass (receipt `{id12}`).\n")
    (world.root / "docs/performance.md").write_text(f"See [the receipt](../receipts/{world.perf.name}).\n")
    assert list(pages.quoted_problems(pages.Shelf(world.root))) == []
    (world.root / "docs/old.md").write_text("receipt `0123456789ab`\n")
    assert list(pages.quoted_problems(pages.Shelf(world.root))) == [
        "docs/old.md quotes receipt 0123456789ab, which is missing"
    ]
    (world.root / "docs/old.md").unlink()
    world.edit(KERNEL, lambda data: data + b"\n")
    stale = f"which is stale; redo it, or say that it is as of commit `{world.git('rev-parse', 'HEAD')[:7]}`"
    assert list(pages.quoted_problems(pages.Shelf(world.root))) == [
        f"README.md quotes receipt {id12}, {stale}",
        f"docs/performance.md quotes receipt {world.perf.stem.rsplit('-', 1)[1]}, {stale}",
    ]
    world.run("receipt", "index")
    assert world.run("receipt", "index", "--check").returncode == 6


def test_a_stale_receipt_is_quoted_with_its_commit_alone(world: World) -> None:
    id12 = world.oracle.stem.rsplit("-", 1)[1]
    head = world.git("rev-parse", "HEAD")[:7]
    world.edit(KERNEL, lambda data: data + b"\n")
    page = world.root / "README.md"
    page.write_text(f"<!-- receipt {id12} -->\n<!-- /receipt -->\n")
    world.run("receipt", "index")
    assert f"({world.oracle.name}), as of commit `{head}`.".replace("(", "(/receipts/") in page.read_text()
    assert list(pages.quoted_problems(pages.Shelf(world.root))) == []
    page.write_text(f"All pass, as of\ncommit `{head}` (receipt `{id12}`).\n")
    assert list(pages.quoted_problems(pages.Shelf(world.root))) == []
    page.write_text(f"All pass, as of commit `0123456` (receipt `{id12}`).\n")
    assert len(list(pages.quoted_problems(pages.Shelf(world.root)))) == 1


def test_a_page_shows_the_tables_of_the_receipts_that_it_names(world: World) -> None:
    perf, oracle = (path.stem.rsplit("-", 1)[1] for path in (world.perf, world.oracle))
    page = world.root / "README.md"
    page.write_text(
        f"# A\n<!-- receipt {perf} -->\n<!-- /receipt -->\n<!-- receipt {oracle} -->\nold\n<!-- /receipt -->\nend\n"
    )
    assert world.run("receipt", "index", "--check").returncode == 6
    assert "README.md" in world.run("receipt", "index").stdout
    text = page.read_text()
    assert "| shape | pass | path | ours: ms ± MAD, NMSE | unfused |" in text
    assert "| CPU | dq | 3 | 3 |" in text
    assert "old" not in text
    assert text.endswith("<!-- /receipt -->\nend\n")
    assert world.run("receipt", "index", "--check").returncode == 0
    page.write_text(text.replace("| CPU | dq | 3 | 3 |", "| CPU | dq | 3 | 4 |"))
    assert world.run("receipt", "index", "--check").returncode == 6


def test_each_receipt_is_read_once_and_each_problem_listed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    id12 = world.oracle.stem.rpartition("-")[2]
    (world.root / "README.md").write_text(f"receipt `{id12}`, [file](receipts/{world.oracle.name}), receipt {id12}\n")
    world.edit(KERNEL, lambda data: data + b"\n")
    read, validate, checked = list[Path](), statement.schema_errors, itertools.count()

    def parse(path: Path) -> statement.Document:
        read.append(path)
        return parsed(path)

    def schema_errors(document: statement.Document) -> list[str]:
        next(checked)
        return validate(document)

    parsed = statement.parse
    monkeypatch.setattr(statement, "parse", parse)
    monkeypatch.setattr(statement, "schema_errors", schema_errors)
    shelf = pages.Shelf(world.root)
    pages.index(shelf)
    pages.filled((world.root / "README.md").read_text(), shelf)
    (problem,) = pages.quoted_problems(shelf)
    assert problem.startswith(f"README.md quotes receipt {id12}, which is stale; ")
    assert sorted(read) == sorted([world.oracle, world.perf])
    assert next(checked) == 2


def test_the_index_names_the_pages_that_quote_a_receipt(world: World) -> None:
    id12 = world.oracle.stem.rpartition("-")[2]
    (world.root / "docs").mkdir()
    for page in ("README.md", "docs/a.md"):
        (world.root / page).write_text(f"receipt `{id12}`\n")
    rows = {row.split(" | ")[1]: row for row in pages.index(pages.Shelf(world.root)).splitlines() if "| fresh |" in row}
    perf, oracle = sorted(rows.values(), reverse=True)
    assert oracle.endswith("| fresh | [README.md](../README.md), [docs/a.md](../docs/a.md) |")
    assert perf.endswith("| fresh |  |")
