"""What pages take from receipts, how receipts take the place of older ones, and gpu-check's summary as a receipt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from receipt_world import CASES, KERNEL, World, change, libraries

from pyharness.base import errors
from pyharness.receipts import differences, figures, pages, show, statement, summary, verify

RANDOM = {"state": "ok", "exit_code": 0, "text": "7 ok, 2 refused", "seconds": 1.5, "counts": {"ok": 7, "refused": 2}}
FAILED = {"state": "FAILED", "exit_code": 1, "text": f"{libraries()} | wrong", "seconds": 2.25}


@pytest.fixture
def world(world: World) -> World:
    world.git("add", "receipts")
    return world


def checked(world: World, steps: dict[str, dict[str, Any]], asked: tuple[str, ...] = (), finished: str = "") -> Path:
    """A check's summary among the world's receipts, as gpu-check writes it."""
    folder = world.root / "out"
    folder.mkdir(exist_ok=True)
    code = max((step["exit_code"] for step in steps.values()), default=0)
    written = summary.Summary(folder, libraries(), "CPU", 0, asked or tuple(steps))
    document = written.write(steps, code, world.root)
    if finished:
        body = document["predicate"]["receipt"]
        body["started"] = body["finished"] = finished
        document = statement.seal({k: v for k, v in body.items() if k not in ("id", "seals", "harness")}, 0)
    path = statement.save(world.root / "receipts", document)
    world.git("add", "receipts")
    return path


def id12(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def filled(world: World, text: str) -> str:
    return pages.filled(text, pages.Shelf(world.root))


# ---- gpu-check's summary ----


def test_a_summary_is_a_receipt_of_its_steps(world: World) -> None:
    path = checked(world, {"random": RANDOM, "soak": FAILED})
    document = statement.read(path)
    body = document["predicate"]["receipt"]
    assert document["predicate"]["result"] == "FAILED"
    assert (document["predicate"]["passedTests"], document["predicate"]["failedTests"]) == (["random"], ["soak"])
    assert body["check"]["steps"]["random"]["seconds"] == "1.5"
    assert {item["name"] for item in body["libraries"]} == {p.resolve().name for p in libraries().glob("libggml*.so*")}
    assert body["upstream"]["ggml"] == "0.25.3"
    found = verify.check(path, sources_only=True, root=world.root)
    assert verify.exit_code(found) == 0
    assert "FAILED, exit code 1: soak" in [finding.text for finding in found]
    world.edit(KERNEL, lambda data: data + b"\n")
    assert verify.exit_code(verify.check(path, sources_only=True, root=world.root)) == verify.STALE


def test_a_summary_is_whole_after_every_step(world: World) -> None:
    checked(world, {"random": RANDOM}, asked=("random", "soak"))
    path = world.root / "out" / summary.FILE
    found = verify.check(path, sources_only=True, root=world.root)
    assert verify.exit_code(found) == 0
    assert "partial: the run ended early" in [finding.text for finding in found]
    assert statement.read(path)["predicate"]["result"] == "WARNED"


def test_a_summary_names_the_receipts_of_its_steps(world: World) -> None:
    folder = world.root / "out"
    folder.mkdir()
    written = summary.Summary(folder, libraries(), "CPU", 0, ("random",))
    shutil.copy(world.oracle, folder)
    document = written.write({"random": RANDOM}, 0, world.root)
    assert document["predicate"]["receipt"]["check"]["receipts"] == [world.oracle.name]
    (folder / world.oracle.name).unlink()
    found = verify.check(folder / summary.FILE, sources_only=True, root=world.root)
    assert f"receipts of its steps that do not lie beside it: {world.oracle.name}" in [f.text for f in found]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda check: check["steps"]["soak"].update(state="ok"), "exit code 1 without a reason"),
        (
            lambda check: check["steps"].pop("random"),
            "step random was to run and is missing, but the run is not partial",
        ),
    ],
)
def test_a_summary_that_contradicts_itself(world: World, edit: Callable[[Any], Any], words: str) -> None:
    path = checked(world, {"random": RANDOM, "soak": FAILED})
    path = change(path, lambda body: edit(body["check"]), seal=True)
    assert words in [finding.text for finding in verify.check(path, root=world.root) if finding.code == verify.INVALID]


def test_a_summary_is_shown_listed_and_compared(world: World) -> None:
    path = checked(world, {"random": RANDOM, "soak": FAILED})
    document = statement.read(path)
    assert "| random | ok | 2 | 7 ok, 2 refused |" in show.summary(document)
    assert "gpucheck: 1 of 2 steps ok | CPU " in pages.index(pages.Shelf(world.root))
    other = statement.read(path)
    other["predicate"]["receipt"]["check"]["steps"]["soak"].update(state="ok", text="80 runs")
    (line,) = differences.differences(document, other)
    assert line.startswith("step     soak: FAILED ")
    assert line.endswith(" | wrong -> ok 80 runs")


# ---- figures ----


def test_a_figure_is_taken_from_its_receipt(world: World) -> None:
    oracle, perf = id12(world.oracle), id12(world.perf)
    check = id12(checked(world, {"random": RANDOM}))
    page = world.root / "README.md"
    page.write_text(
        f"<!-- receipt {oracle} ok -->?<!-- /receipt --> of <!-- receipt {oracle} listed -->?<!-- /receipt --> pass, "
        f"dk <!-- receipt {oracle} nmse dk -->?<!-- /receipt -->, "
        f"<!-- receipt {perf} ms swa:7 -->?<!-- /receipt --> ms, "
        f"<!-- receipt {check} random.counts.ok -->?<!-- /receipt -->.\n"
    )
    assert world.run("receipt", "index", "--check").returncode == 6
    world.run("receipt", "index")
    text = page.read_text()
    parts = [record["parts"]["dk"] for record in statement.read(world.oracle)["predicate"]["receipt"]["cases"]]
    assert text.startswith(f"<!-- receipt {oracle} ok -->3<!-- /receipt --> of <!-- receipt {oracle} listed -->")
    assert f"nmse dk -->{max(map(statement.worst_nmse, parts)):.2g}<!--" in text
    assert f"<!-- receipt {check} random.counts.ok -->7<!-- /receipt -->" in text
    assert world.run("receipt", "index", "--check").returncode == 0
    page.write_text(text.replace(" ok -->3<", " ok -->4<"))
    done = world.run("receipt", "index", "--check")
    assert done.returncode == 6
    assert "README.md is not current" in done.stderr


def test_a_figure_that_a_receipt_does_not_have_is_an_error_in_words(world: World) -> None:
    for name in ("nothing", "nmse dx", "ms kv=", "mib on", "random"):
        with pytest.raises(errors.Usage, match="has no figure") as caught:
            filled(world, f"<!-- receipt {id12(world.oracle)} {name} -->?<!-- /receipt -->\n")
        assert "nmse [PART]" in caught.value.hint


def test_memory_of_a_training_is_that_of_its_context_or_its_runs() -> None:
    def body(**members: Any) -> statement.Document:
        return {"predicate": {"receipt": {"counts": {}, "cases": [], "perf": None, **members}}}

    def run(mib: int) -> dict[str, Any]:
        return {"memory_bytes": {"compute": mib << 20}}

    trained = body(train={"runs": {"off": run(9), "on": run(3)}})
    assert [figures.figure(trained, f"mib {state}") for state in ("off", "on")] == ["9", "3"]
    timed = body(
        bench={"runs": [run(8) | {"ctx": 512, "flash_attn": False}, run(2) | {"ctx": 512, "flash_attn": True}]}
    )
    assert [figures.figure(timed, f"mib {state} 512") for state in ("off", "on")] == ["8", "2"]
    assert figures.figure(body(train={"runs": {"on": run(7 << 9)}}), "gib on") == "3.5"
    with pytest.raises(KeyError):
        figures.figure(timed, "mib on 1024")


# ---- the newest check that ran a step ----


def test_a_page_takes_each_step_from_the_newest_check_that_ran_it(world: World) -> None:
    block = "<!-- receipt gpucheck -->\nby hand\n<!-- /receipt -->\n"
    inline = "<!-- receipt gpucheck soak.runs -->80<!-- /receipt -->\n"
    assert filled(world, block + inline) == block + inline
    shelf = pages.Shelf(world.root)
    assert pages.unfilled(block + inline, shelf) == ["by hand\n", "80"]
    old = checked(
        world, {"random": RANDOM | {"text": "old"}, "soak": FAILED | {"runs": 90}}, finished="2026-01-01T00:00:00Z"
    )
    new = checked(world, {"random": RANDOM})
    text = filled(world, block + inline)
    assert text.index("| random | ok | 2 | 7 ok, 2 refused |") > 0
    assert "| soak | FAILED | 2 | " in text
    assert r" \| wrong |" in text
    assert "old |" not in text
    assert f"From receipts [`{id12(new)}`](/receipts/{new.name}), [`{id12(old)}`](/receipts/{old.name}).\n<!--" in text
    assert "soak.runs -->90<" in text
    shelf = pages.Shelf(world.root)
    assert shelf.quoted(inline) == [id12(old)]
    assert shelf.quoted(text) == sorted([id12(old), id12(new)])


# ---- receipts that take the place of older ones ----


def test_a_receipt_takes_the_place_of_an_older_one_of_the_same_run(world: World) -> None:
    page = world.root / "README.md"
    page.write_text(f"<!-- receipt {id12(world.oracle)} ok -->3<!-- /receipt -->, receipts/{world.oracle.name}\n")
    document = statement.read(world.oracle)
    words = [word for word in document["predicate"]["receipt"]["argv"] if not word.startswith("--receipts")]
    assert "--libs" in words
    out = world.root / "elsewhere"
    where = ("--libs", str(libraries()), "--threads", "2", "--receipts", str(out))
    assert world.run("oracle", "-b", "CPU", *where, "-o", ",".join(CASES)).returncode == 0
    (new,) = out.iterdir()
    done = world.run("receipt", "add", str(new))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"receipts/{new.name}\n  in the place of receipts/{world.oracle.name}\n"
    assert not world.oracle.exists()
    assert world.perf.exists()
    assert page.read_text() == f"<!-- receipt {id12(new)} ok -->3<!-- /receipt -->, receipts/{new.name}\n"


def test_a_receipt_of_another_run_takes_no_place(world: World) -> None:
    other = world.root / "other"
    where = ("--libs", str(libraries()), "--receipts", str(other))
    assert world.run("oracle", "-b", "CPU", *where, "-o", CASES[0]).returncode == 0
    (new,) = other.iterdir()
    assert world.run("receipt", "add", str(new)).stdout == f"receipts/{new.name}\n"
    assert world.oracle.exists()


def test_an_invalid_receipt_is_not_added(world: World) -> None:
    before = sorted((world.root / "receipts").iterdir())
    other = world.root / world.oracle.name
    shutil.copy(world.oracle, other)
    change(other, lambda body: body["limits"].update(nmse="0.001"))
    done = world.run("receipt", "add", str(world.perf), str(other))
    assert done.returncode == 4
    assert "changed after it was written: limits" in done.stderr
    assert sorted((world.root / "receipts").iterdir()) == before


def test_a_summary_is_added_under_its_name(world: World) -> None:
    path = checked(world, {"random": RANDOM})
    path.unlink()
    done = world.run("receipt", "add", str(world.root / "out" / summary.FILE))
    assert done.stdout == f"receipts/{path.name}\n"
