"""Which commit the files of a tree or of a receipt are, told by git or by what a copy carries."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from receipt_world import CASES, KERNEL, World, change, libraries

from pyharness.base import errors
from pyharness.receipts import commits, pages, statement, verify


def head(world: World) -> str:
    return world.git("rev-parse", "HEAD").strip()


def commit(world: World, message: str = "next") -> str:
    world.git("add", "-A")
    world.git("commit", "-q", "--allow-empty", "-m", message)
    return head(world)


def about(world: World, path: Path) -> list[str]:
    """What verify says of the receipt's commit."""
    return [f.text for f in verify.check(path, sources_only=True, root=world.root) if f.step == "commit"]


# ---- a copy that carries its commit ----


@pytest.fixture
def copied(world: World, tmp_path: Path) -> World:
    """What `git archive` gives of the checkout's commit, and build/commit.json; no git."""
    world.git("rm", "-r", "-q", "--cached", "--ignore-unmatch", "receipts")
    (world.root / "folder").mkdir()
    (world.root / "folder.txt").write_text("sorts between folder and folder/\n")
    (world.root / "folder/link").symlink_to("nowhere")
    (world.root / "grün").write_text("a name that is not ASCII\n")
    (world.root / "run").write_text("#!/bin/sh\n")
    (world.root / "run").chmod(0o755)
    with (world.root / ".gitignore").open("a") as file:
        file.write("/build/\n")
    world.git("add", "-A")
    world.git("rm", "-r", "-q", "--cached", "receipts")
    world.git("commit", "-q", "-m", "links, names")
    done = world.run("receipt", "commit")
    assert (done.returncode, done.stdout, done.stderr) == (0, "build/commit.json\n", "")
    root = tmp_path / "copy"
    root.mkdir()
    archive = subprocess.run(["git", "-C", str(world.root), "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(root)], input=archive, check=True)
    (root / "build").mkdir()
    shutil.copy(world.root / commits.CARRIED, root / "build")
    return World(root, root, root)


def test_a_copy_without_git_proves_its_commit(world: World, copied: World) -> None:
    assert commits.revision(copied.root) == {
        "commit": head(world),
        "tree": world.git("rev-parse", "HEAD^{tree}").strip(),
        "dirty": None,
    }


def test_a_run_in_such_a_copy_leaves_a_receipt_of_that_commit(world: World, copied: World, tmp_path: Path) -> None:
    words = ("-b", "CPU", "--libs", str(libraries()), "-o", CASES[0], "--receipts", str(tmp_path / "out"))
    done = copied.run("oracle", *words)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").iterdir()
    found = statement.read(path)["predicate"]["receipt"]["revision"]
    assert (found["commit"], found["dirty"]) == (head(world), None)
    assert about(world, path) == [f"the files are those of commit {head(world)[:12]}"]
    assert about(copied, path) == [
        f"the files are those of commit {head(world)[:12]}, which the history here does not tell"
    ]


def test_what_differs_in_a_copy_is_named(copied: World) -> None:
    copied.edit(KERNEL, lambda data: data + b"\n")
    (copied.root / "grün").unlink()
    (copied.root / "folder/link").unlink()
    (copied.root / "folder/link").symlink_to("elsewhere")
    (copied.root / "receipts").mkdir()
    (copied.root / "receipts/new.json").write_text("{}")
    new = "ggml/src/ggml-cuda/new.cu"
    (copied.root / new).write_text("\n")
    found = commits.revision(copied.root, [KERNEL, new])
    assert found is not None
    assert found["dirty"]["paths"] == ["folder/link", KERNEL, new, "grün"]


def test_a_copy_whose_git_stands_elsewhere_is_what_it_carries(world: World, copied: World) -> None:
    old = world.git("rev-list", "--max-parents=0", "HEAD").strip()
    shutil.copytree(world.root / ".git", copied.root / ".git")
    copied.git("reset", "-q", old)
    found = commits.revision(copied.root)
    assert found is not None
    assert (found["commit"], found["dirty"]) == (head(world), None)
    (copied.root / commits.CARRIED).unlink()
    found = commits.revision(copied.root)
    assert found is not None
    assert found["commit"] == old
    assert "grün" in found["dirty"]["paths"]


def test_a_carried_commit_does_not_hide_a_newer_one(world: World) -> None:
    world.run("receipt", "commit")
    world.edit(KERNEL, lambda data: data + b"\n")
    new = commit(world)
    found = commits.revision(world.root)
    assert found is not None
    assert (found["commit"], found["dirty"]) == (new, None)


def reword(document: dict[str, Any]) -> None:
    document["object"] = document["object"].replace("links, names", "other words")


def rename(document: dict[str, Any]) -> None:
    document["files"][0][2] += "x"


def lead_out(document: dict[str, Any]) -> None:
    document["files"].append(["100644", "0" * 40, "../file"])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda document: document.update(commit="0" * 40), "the commit object is not that of 000"),
        (reword, "the commit object is not that of"),
        (rename, "the files are not those of commit"),
        (lambda document: document["files"].pop(), "the files are not those of commit"),
        (lead_out, "../file lies outside the tree"),
        (lambda document: document.pop("files"), "not readable: KeyError('files')"),
        (lambda document: document["files"].append(["100644", "no id", "x"]), "not readable: ValueError"),
    ],
)
def test_an_edited_proof_stops_a_run_before_it_starts(copied: World, edit: Callable[[Any], Any], words: str) -> None:
    file = copied.root / commits.CARRIED
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))
    with pytest.raises(errors.Environment, match="proves no commit") as caught:
        commits.read(copied.root)
    assert words in str(caught.value)
    done = copied.run("oracle", "-b", "CPU", "--libs", str(libraries()), "-o", CASES[0])
    assert (done.returncode, done.stdout) == (errors.Environment.exit_code, "")
    assert "write it again in the checkout: python -m pyharness receipt commit" in done.stderr


def test_what_is_not_committed_is_said_when_a_proof_is_written(world: World) -> None:
    world.edit(KERNEL, lambda data: data + b"\n")
    done = world.run("receipt", "commit")
    assert done.returncode == 0
    assert f"DIRTY: 1 paths differ from commit {head(world)[:12]}; commit first" in done.stderr


def test_no_proof_is_written_outside_git(world: World) -> None:
    shutil.rmtree(world.root / ".git")
    done = world.run("receipt", "commit")
    assert done.returncode == errors.Environment.exit_code
    assert "is no git checkout with a commit" in done.stderr


def test_a_source_that_git_ignores_makes_a_checkout_dirty(world: World) -> None:
    new = "ggml/src/ggml-cuda/new.cu"
    (world.root / new).write_text("\n")
    (world.root / ".git/info/exclude").write_text("new.cu\n")
    assert commits.revision(world.root, [KERNEL]) == {**commits.revision(world.root), "dirty": None}  # type: ignore[dict-item]
    found = commits.revision(world.root, [KERNEL, new])
    assert found is not None
    assert found["dirty"]["paths"] == [new]


# ---- the commit of a receipt ----


def dirty(body: dict[str, Any]) -> None:
    body["revision"]["dirty"] = {"diff_sha256": "0" * 64, "paths": ["README.md", KERNEL]}


def test_a_dirty_receipt_is_that_of_the_first_commit_that_has_its_files(world: World) -> None:
    first = head(world)
    (world.root / "notes.txt").write_text("touches nothing\n")
    commit(world)

    def elsewhere(body: dict[str, Any]) -> None:
        dirty(body)
        body["revision"]["commit"] = "1" * 40

    path = change(world.oracle, elsewhere, seal=True)
    assert about(world, path) == [
        f"the files are those of commit {first[:12]}",
        "the run's checkout was at commit 111111111111, which differed in 2 paths",
    ]


def test_a_dirty_receipt_whose_files_no_commit_has_is_dirty(world: World) -> None:
    def uncommitted(body: dict[str, Any]) -> None:
        dirty(body)
        next(f for f in body["inputs"] if f["path"] == "pyharness/cli/receipt.py")["git_blob"] = "0" * 40

    path = change(world.oracle, uncommitted, seal=True)
    (text,) = about(world, path)
    assert text.startswith(
        f"DIRTY: the checkout differed from commit {head(world)[:12]} in README.md, {KERNEL}, and no"
    )
    (world.root / "receipts").joinpath("README.md").unlink(missing_ok=True)
    world.git("add", "receipts")
    assert f"| {head(world)[:12]}, DIRTY |" in pages.index(pages.Shelf(world.root))


def test_a_commit_with_another_source_of_the_operator_is_not_the_receipts(world: World) -> None:
    (world.root / "ggml/src/ggml-cuda/new.cu").write_text("\n")
    world.git("add", "ggml")
    world.git("commit", "-q", "--amend", "-m", "with one more")
    path = change(world.oracle, dirty, seal=True)
    assert about(world, path)[0].startswith("DIRTY: ")


def test_a_clean_receipt_whose_commit_has_other_files_is_invalid(world: World) -> None:
    world.edit(KERNEL, lambda data: data + b"\n")
    new = commit(world)
    path = change(world.oracle, lambda body: body["revision"].update(commit=new), seal=True)
    found = verify.check(path, sources_only=True, root=world.root)
    words = f"the run found commit {new[:12]} unchanged, which has other contents of {KERNEL}"
    assert [(f.code, f.text) for f in found if f.step == "commit"] == [(verify.INVALID, words)]


def test_line_ends_of_a_clean_checkout_are_no_contradiction(world: World) -> None:
    def checked_out(body: dict[str, Any]) -> None:
        (file,) = (f for f in body["inputs"] if f["path"] == KERNEL)
        file["git_blob"] = "0" * 40  # core.autocrlf: other bytes, the same text

    path = change(world.oracle, checked_out, seal=True)
    assert about(world, path) == [f"the files are those of commit {head(world)[:12]}"]


def test_a_rebased_commit_is_found_by_its_files(world: World) -> None:
    world.git("commit", "-q", "--amend", "-m", "other words")
    assert about(world, world.oracle)[0] == f"the files are those of commit {head(world)[:12]}"


def test_a_shallow_clone_tells_no_commit(world: World, tmp_path: Path) -> None:
    commit(world)
    subprocess.run(["git", "clone", "-q", "--depth", "1", world.root.as_uri(), str(tmp_path / "shallow")], check=True)
    with commits.History(tmp_path / "shallow") as history:
        assert not history


def test_without_a_history_the_index_keeps_the_commits_that_it_names(world: World) -> None:
    world.oracle = change(world.oracle, dirty, seal=True)
    commit(world)
    world.run("receipt", "index")
    text = (world.root / "receipts/README.md").read_text()
    assert "DIRTY |" not in text
    shutil.rmtree(world.root / ".git")
    assert pages.index(pages.Shelf(world.root)) == text
