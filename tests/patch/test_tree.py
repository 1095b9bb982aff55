"""Patching upstream trees: what goes in comes out again, all or nothing."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from pyharness.base import digest
from pyharness.cli.cli import main
from pyharness.patch import hooks, tree
from pyharness.patch.common import TreeError
from pyharness.patch.tree import MANIFEST, Base

Files = dict[str, bytes]


def files(folder: Path) -> Files:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="session")
def pristine_ggml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pristine("ggml-python", tmp_path_factory)


@pytest.fixture(scope="session", params=["llama-cpp-python", "ggml-python"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pristine(request.param, tmp_path_factory)


def make_pristine(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a pinned tree that the patch touches or looks at, as upstream has them."""
    pin = tree.base(name)
    whole = tmp_path_factory.mktemp("whole") / "tree"
    tree.unpack(tree.fetch(pin), pin.subdir, whole)
    small = tmp_path_factory.mktemp("small") / "tree"
    forms = [form for edit in hooks.edits() for form in (edit, *edit.forms)]
    for file in {form.file for form in forms} | {need.partition(" ")[0] for form in forms for need in form.needs}:
        source = tree.place(whole, file)
        target = small / source.relative_to(whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            shutil.copyfile(source, target)
    return small


@pytest.fixture
def checkout(pristine: Path, tmp_path: Path) -> Path:
    """A tree of each pinned version."""
    return Path(shutil.copytree(pristine, tmp_path / "checkout"))


@pytest.fixture
def ggml(pristine_ggml: Path, tmp_path: Path) -> Path:
    """A ggml tree."""
    return Path(shutil.copytree(pristine_ggml, tmp_path / "checkout"))


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def refused(checkout: Path, *words: str) -> None:
    """Patching raises an error with these words and changes nothing."""
    before = files(checkout)
    with pytest.raises(TreeError) as error:
        tree.patch(checkout)
    for word in words:
        assert word in str(error.value)
    assert files(checkout) == before


# ---- into a tree and out again ----


def test_reverse_restores_every_byte(checkout: Path, pristine: Path) -> None:
    tree.patch(checkout)
    assert files(checkout) != files(pristine)
    tree.reverse(checkout)
    assert files(checkout) == files(pristine)
    assert {p.name for p in checkout.rglob("*")} == {p.name for p in pristine.rglob("*")}  # no empty folders either


def block_of(form: hooks.Edit) -> str:
    """The lines of a hook in a tree, "" where it has none."""
    if form.action == "none":
        return ""
    comment = "#" if form.language == "cmake" else "//"
    lines = [*filter(None, form.text.rstrip("\n").split("\n")), *(["#if 0"] if form.action == "disable" else [])]
    return "\n".join([f"{comment} ggml-flash-attn-back {{", *lines, f"{comment} ggml-flash-attn-back }}"])


def test_every_edit_is_put_in_between_marks(checkout: Path) -> None:
    tree.patch(checkout)
    for edit in hooks.edits():
        path = tree.place(checkout, edit.file)
        assert path.exists() or edit.optional
        assert not path.exists() or any(block_of(form) in path.read_text() for form in (edit, *edit.forms))


def test_hopper_gets_the_code_that_its_path_needs(tmp_path: Path) -> None:
    """What CMake finds on a Hopper machine, what a user may ask for, and architectures that stay."""
    hook = next(edit for edit in hooks.edits() if edit.name == "CMake code for Hopper")
    script = tmp_path / "architectures.cmake"
    script.write_text(
        'set(CMAKE_CUDA_ARCHITECTURES "80-virtual;90;90a-real;100")\n'
        'set(CMAKE_CUDA_ARCHITECTURES_NATIVE "89-real;90-real")\n'
        + hook.text
        + 'message("${CMAKE_CUDA_ARCHITECTURES} ${CMAKE_CUDA_ARCHITECTURES_NATIVE}")\n'
        + "unset(CMAKE_CUDA_ARCHITECTURES)\n"
        + hook.text
    )
    done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["80-virtual;90a-real;90-virtual;100", "89-real;90a-real"]


def test_the_operator_s_files_are_copied(ggml: Path) -> None:
    tree.patch(ggml)
    for path in digest.sources():
        assert tree.place(ggml, path).read_bytes() == (digest.ROOT / "ggml" / path).read_bytes()


def test_manifest_is_what_the_digest_is_of(ggml: Path) -> None:
    tree.patch(ggml)
    lines = (tree.ggml_root(ggml) / MANIFEST).read_text().splitlines(keepends=True)
    listing = "".join(line for line in lines if not line.startswith("#"))
    assert hashlib.sha256(listing.encode()).hexdigest() == digest.patch_digest()


def test_patching_twice_changes_nothing(ggml: Path) -> None:
    assert tree.patch(ggml).changes
    after = files(ggml)
    assert tree.patch(ggml).changes == []
    assert files(ggml) == after


@pytest.mark.parametrize(("there", "back"), [(".", "ggml"), ("ggml", ".")])
@pytest.mark.parametrize("pristine", ["llama-cpp-python"], indirect=True)
def test_the_ggml_folder_of_a_llama_checkout_stands_for_the_whole(
    checkout: Path, pristine: Path, there: str, back: str
) -> None:
    tree.patch(checkout / there)
    assert tree.check(checkout)
    assert tree.check(checkout / "ggml")
    assert not tree.diff(checkout / "ggml")
    tree.reverse(checkout / back)
    assert files(checkout) == files(pristine)


def test_check_tells_patched_from_unpatched_and_from_outdated(ggml: Path) -> None:
    assert not tree.check(ggml)
    tree.patch(ggml)
    assert tree.check(ggml)
    rewrite(tree.ggml_root(ggml) / "src/ggml.c", b"the mask has no gradient", b"the mask has none")
    assert not tree.check(ggml)


def test_diff_is_what_patch_does(checkout: Path, tmp_path: Path) -> None:
    by_diff = Path(shutil.copytree(checkout, tmp_path / "by-diff"))
    text = tree.diff(checkout)
    subprocess.run(["git", "apply", "-p1"], cwd=by_diff, input=text.encode(), check=True)
    tree.patch(checkout)
    assert files(by_diff) == files(checkout)
    assert tree.diff(checkout) == ""


def test_edits_of_the_user_survive_patch_and_reverse(ggml: Path) -> None:
    ggml_c = tree.ggml_root(ggml) / "src/ggml.c"
    tree.patch(ggml)
    ggml_c.write_bytes(b"// mine\n" + ggml_c.read_bytes() + b"// mine too\n")
    tree.patch(ggml)
    tree.reverse(ggml)
    lines = ggml_c.read_bytes().splitlines()
    assert lines[0] == b"// mine"
    assert lines[-1] == b"// mine too"
    assert b"ggml-flash-attn-back" not in ggml_c.read_bytes()


def test_crlf_trees_keep_their_line_ends(checkout: Path) -> None:
    for path in checkout.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = files(checkout)
    plan = tree.patch(checkout)
    changed = [change for change in plan.changes if change.old is not None]
    assert changed
    for change in changed:
        data = change.path.read_bytes()
        assert data.count(b"\n") == data.count(b"\r\n")
    tree.reverse(checkout)
    assert files(checkout) == before


def test_a_tree_of_an_older_operator_is_brought_up_to_date(ggml: Path) -> None:
    tree.patch(ggml)
    current = files(ggml)
    root = tree.ggml_root(ggml)
    header, gone = root / "include/ggml-flash-attn-back.h", root / "src/ggml-flash-attn-back-gone.c"
    old_digest = hashlib.sha256(header.read_bytes()).hexdigest().encode()
    header.write_bytes(b"// older\n")
    gone.write_bytes(b"// gone\n")
    rewrite(root / MANIFEST, old_digest, hashlib.sha256(b"// older\n").hexdigest().encode())
    with (root / MANIFEST).open("a") as manifest:
        manifest.write(f"{hashlib.sha256(b'// gone' + bytes([10])).hexdigest()}  src/{gone.name}\n")
    rewrite(root / "src/ggml.c", b"the mask has no gradient", b"the mask has none")
    tree.patch(ggml)
    assert files(ggml) == current


def test_a_tree_without_tests_and_cuda_is_patched(checkout: Path) -> None:
    shutil.rmtree(checkout / "tests")
    shutil.rmtree(tree.ggml_root(checkout) / "src/ggml-cuda")
    before = files(checkout)
    tree.patch(checkout)
    assert tree.check(checkout)
    tree.reverse(checkout)
    assert files(checkout) == before


def test_a_patched_copy_leaves_the_user_s_tree_alone(ggml: Path, tmp_path: Path) -> None:
    before = files(ggml)
    copy = tree.copy(ggml, tmp_path / "copy", root=tmp_path)
    assert files(ggml) == before
    assert tree.check(copy)


def test_a_patched_copy_follows_the_user_s_tree(ggml: Path, tmp_path: Path) -> None:
    copy = tree.copy(ggml, tmp_path / "copy", root=tmp_path)
    ggml_c = tree.ggml_root(copy) / "src/ggml.c"
    header = tree.ggml_root(copy) / "include/ggml.h"
    untouched = header.stat().st_mtime_ns
    rewrite(tree.ggml_root(ggml) / "src/ggml.c", b"#include <assert.h>", b"#include <assert.h> // mine")
    tree.copy(ggml, copy, root=tmp_path)
    assert b"#include <assert.h> // mine" in ggml_c.read_bytes()
    assert header.stat().st_mtime_ns == untouched  # so that nothing else is compiled again


# ---- layers ----

HOOKS_OF_BUILD = [edit.name for edit in hooks.layers()[1].edits if any("ggml_opt_build" in s for s in edit.anchor)]


def test_a_layer_that_does_not_fit_is_left_out_with_its_files(ggml: Path) -> None:
    rewrite(tree.ggml_root(ggml) / "src/ggml-opt.cpp", b"ggml_opt_build(", b"ggml_opt_make(")
    before = files(ggml)
    plan = tree.patch(ggml)
    assert plan.layers == ["operator"]
    named = [reason.split("'")[1] for reason in plan.left_out["training"]]
    assert named == HOOKS_OF_BUILD  # every one, not the first
    assert "edit 'ggml-opt.cpp loss of ids': no anchor 'function ggml_opt_build'" in tree.explain(plan.left_out)
    assert "layer llama does not fit:\n  it needs the layer training\n" in tree.explain(plan.left_out)
    assert not list(ggml.rglob("*train*"))
    assert tree.held(ggml) == ["operator"]
    assert tree.check(ggml)
    tree.reverse(ggml)
    assert files(ggml) == before


def test_a_layer_that_is_asked_for_fits_or_fails(ggml: Path) -> None:
    rewrite(tree.ggml_root(ggml) / "src/ggml-opt.cpp", b"ggml_opt_build(", b"ggml_opt_make(")
    before = files(ggml)
    with pytest.raises(TreeError, match=r"layer training does not fit:\n  edit "):
        tree.patch(ggml, layer="training")
    assert files(ggml) == before
    assert tree.patch(ggml, layer="operator").left_out == {}


def test_layers_are_put_in_and_taken_out(ggml: Path) -> None:
    tree.patch(ggml)
    whole = files(ggml)
    assert tree.patch(ggml, layer="operator").layers == ["operator"]
    assert tree.check(ggml)
    assert not list(ggml.rglob("*train*"))
    assert b"ggml-opt-keep.h" not in (tree.ggml_root(ggml) / "src/ggml-opt.cpp").read_bytes()
    tree.patch(ggml)
    assert files(ggml) == whole


def test_what_a_hook_needs_is_looked_for_before_anything_is_written(ggml: Path) -> None:
    common = tree.ggml_root(ggml) / "src/ggml-cuda/common.cuh"
    rewrite(common, b"warmup_complete", b"warmed_up")
    refused(ggml, "'ggml-cuda.cu out of memory'", "no 'warmup_complete' in src/ggml-cuda/common.cuh", "(ggml 0.9.5)")


def test_a_fork_is_named_with_what_it_lacks(ggml: Path) -> None:
    rewrite(tree.ggml_root(ggml) / "src/ggml.c", b"ggml_compute_backward(", b"ggml_differentiate(")
    (ggml / "koboldcpp.py").touch()
    refused(ggml, "this is koboldcpp: it builds ggml by a Makefile", "docs/trees.md")
    shutil.rmtree(tree.ggml_root(ggml) / "src")
    refused(ggml, "no ggml or llama.cpp checkout", "this is koboldcpp")


def test_check_lists_layers_and_every_hook_that_does_not_fit(ggml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(tree.ggml_root(ggml) / "src/ggml-opt.cpp", b"ggml_opt_build(", b"ggml_opt_make(")
    assert main(["patch", str(ggml), "--check"]) == 1
    said = capsys.readouterr().out
    assert "not patched with the current operator\noperator fits\nlayer training does not fit:\n" in said
    assert [name for name in HOOKS_OF_BUILD if f"  edit {name!r}: " not in said] == []
    assert main(["patch", str(ggml)]) == 0
    assert f"{ggml}: patched with operator\nlayer training does not fit:\n" in capsys.readouterr().out
    assert main(["patch", str(ggml), "--check"]) == 0
    assert f"{ggml}: patched with operator\nlayer training does not fit:\n" in capsys.readouterr().out
    assert main(["patch", str(ggml), "--check", "--layer", "training"]) == 1


@pytest.mark.parametrize("layer", ["training", "llama"])
def test_a_layer_has_files_that_only_it_needs(layer: str) -> None:
    known = hooks.layers()
    of_layer = [path for path in digest.sources() if hooks.layer_of(path, known) == layer]
    assert of_layer
    for path in (path for path in digest.sources() if hooks.layer_of(path, known) == "operator"):
        text = (digest.ROOT / "ggml" / path).read_text()
        assert not [name for name in map(os.path.basename, of_layer) if f'"{name}"' in text], path


# ---- refusals ----


def test_a_tree_that_lost_an_anchor_is_refused_by_the_edit_s_name(ggml: Path) -> None:
    rewrite(tree.ggml_root(ggml) / "src/ggml.c", b"ggml_compute_backward(", b"ggml_differentiate(")
    refused(ggml, "'ggml.c gradient of copies and views'", "no anchor 'function ggml_compute_backward'", "src/ggml.c")


def test_a_tree_with_two_such_anchors_is_refused(ggml: Path) -> None:
    path = tree.ggml_root(ggml) / "src/ggml-cpu/ops.h"
    path.write_bytes(path.read_bytes() + b"void ggml_compute_forward_flash_attn_back(void);\n")
    refused(ggml, "'ops.h declaration'", "2 anchors 'declaration ggml_compute_forward_flash_attn_back'")


def test_an_anchor_beside_other_code_is_refused(ggml: Path) -> None:
    path = tree.ggml_root(ggml) / "src/ggml.c"
    rewrite(
        path,
        b"    switch (tensor->op) {\n        case GGML_OP_DUP: {",
        b"    x(); switch (tensor->op) {\n        case GGML_OP_DUP: {",
    )
    refused(ggml, "'ggml.c gradient of copies and views'", "shares its lines")


def test_a_missing_file_is_refused(ggml: Path) -> None:
    (tree.ggml_root(ggml) / "src/ggml-backend.cpp").unlink()
    refused(ggml, "'ggml-backend.cpp placement'", "no src/ggml-backend.cpp")


def test_an_edited_file_of_the_operator_is_refused(ggml: Path) -> None:
    tree.patch(ggml)
    header = tree.ggml_root(ggml) / "include/ggml-flash-attn-back.h"
    header.write_bytes(header.read_bytes() + b"// mine\n")
    refused(ggml, str(header), "not as the patch left it")
    with pytest.raises(TreeError, match="not as the patch left it"):
        tree.reverse(ggml)


def test_a_torn_block_is_refused(ggml: Path) -> None:
    tree.patch(ggml)
    rewrite(tree.ggml_root(ggml) / "src/ggml-backend.cpp", b"// ggml-flash-attn-back }\n", b"")
    refused(ggml, "src/ggml-backend.cpp", "block")


def test_symbolic_links_are_not_written_through(ggml: Path, tmp_path: Path) -> None:
    path = tree.ggml_root(ggml) / "src/ggml.c"
    shutil.move(path, tmp_path / "elsewhere.c")
    path.symlink_to(tmp_path / "elsewhere.c")
    refused(ggml, str(path), "symbolic link")


def test_a_manifest_that_leads_out_of_the_tree_is_refused(ggml: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    tree.patch(ggml)
    with (tree.ggml_root(ggml) / MANIFEST).open("a") as manifest:
        manifest.write(f"{hashlib.sha256(b'precious').hexdigest()}  ../../outside\n")
    refused(ggml, "leads out of the tree")
    with pytest.raises(TreeError):
        tree.reverse(ggml)
    assert outside.read_bytes() == b"precious"


def test_a_folder_that_is_no_tree_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "no ggml or llama.cpp checkout")


@pytest.mark.parametrize("successes", [0, 5, 20])
def test_a_write_that_fails_leaves_the_tree_as_it_was(
    ggml: Path, monkeypatch: pytest.MonkeyPatch, successes: int
) -> None:
    replace, calls = os.replace, iter(range(1000))

    def full(source: Path, target: Path) -> None:
        if next(calls) == successes:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    refused(ggml, "No space left on device", "left as it was")


def test_a_folder_that_cannot_be_made_leaves_the_tree_as_it_was(ggml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(ggml / "tests")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    refused(ggml, "No space left on device", "left as it was")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("a file")
    with pytest.raises(TreeError, match="cannot write below"):
        tree.ensure(root=tmp_path)


# ---- the verb ----


def test_the_verb_patches_checks_and_reverses(ggml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(ggml)
    assert main(["patch", str(ggml), "--check"]) == 1
    assert main(["patch", str(ggml), "--diff"]) == 0
    assert files(ggml) == before
    assert main(["patch", str(ggml)]) == 0
    assert main(["patch", str(ggml), "--check"]) == 0
    assert main(["patch", str(ggml), "--reverse"]) == 0
    assert files(ggml) == before
    assert "restored" in capsys.readouterr().out


def test_the_verb_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", str(tmp_path)]) == 3
    assert "no ggml or llama.cpp checkout" in capsys.readouterr().err


# ---- pinned archives ----


def archive(path: Path, members: Files, *more: tarfile.TarInfo) -> Base:
    """A source archive with the given members, as pip would find it, and its pin."""
    with tarfile.open(path / "some_tree-1.0.tar.gz", "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in more:
            tar.addfile(info, io.BytesIO())
    sha256 = hashlib.sha256((path / "some_tree-1.0.tar.gz").read_bytes()).hexdigest()
    return Base("some-tree", "1.0", sha256, "vendor/tree", "some.backend", "0.0.0")


PYPROJECT = b'[build-system]\nrequires = ["not-there"]\nbuild-backend = "some.backend"\n'
SDIST = {
    "some_tree-1.0/PKG-INFO": b"Metadata-Version: 2.1\nName: some-tree\nVersion: 1.0\n",
    "some_tree-1.0/pyproject.toml": PYPROJECT,
    "some_tree-1.0/vendor/tree/file": b"content",
    "some_tree-1.0/other": b"not in the tree",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_an_archive_is_fetched_once_and_its_subdir_unpacked(index: Path, tmp_path: Path) -> None:
    pin = archive(index, SDIST)
    found = tree.fetch(pin, tmp_path)
    shutil.rmtree(index)
    assert tree.fetch(pin, tmp_path) == found
    tree.unpack(found, pin.subdir, tmp_path / "tree")
    assert files(tmp_path / "tree") == {"file": b"content"}
    assert [p.name for p in found.parent.iterdir()] == ["some-tree-1.0.tar.gz"]


def test_a_wrong_hash_is_refused_and_nothing_kept(index: Path, tmp_path: Path) -> None:
    pin = archive(index, SDIST)
    archive(index, SDIST | {"some_tree-1.0/vendor/tree/file": b"tampered"})
    with pytest.raises(TreeError, match=r"(?i)hash"):
        tree.fetch(pin, tmp_path)
    assert list((tmp_path / "build/cache").iterdir()) == []


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    pin = Base("some-tree", "1.0", "0" * 64, "vendor/tree", "some.backend", "0.0.0")
    with pytest.raises(TreeError, match=r"Check the network.*PIP_INDEX_URL") as error:
        tree.fetch(pin, tmp_path)
    assert str(tmp_path / "build/cache/some-tree-1.0.tar.gz") in str(error.value)
    assert list((tmp_path / "build/cache").iterdir()) == []


def test_a_damaged_cached_archive_is_fetched_again(index: Path, tmp_path: Path) -> None:
    pin = archive(index, SDIST)
    found = tree.fetch(pin, tmp_path)
    whole = found.read_bytes()
    found.write_bytes(whole[: len(whole) // 2])
    assert tree.fetch(pin, tmp_path).read_bytes() == whole


def test_half_an_archive_leaves_nothing_behind(index: Path, tmp_path: Path) -> None:
    pin = archive(index, SDIST | {"some_tree-1.0/vendor/tree/large": os.urandom(1 << 20)})
    half = index / "some_tree-1.0.tar.gz"
    half.write_bytes(half.read_bytes()[: 1 << 19])
    with pytest.raises(TreeError, match=r"cannot unpack .* delete it"):
        tree.unpack(half, pin.subdir, tmp_path / "upstream/tree")
    assert list((tmp_path / "upstream").iterdir()) == []


UNSAFE = {
    "parent": tarfile.TarInfo("some_tree-1.0/vendor/tree/../../../../escaped"),
    "absolute": tarfile.TarInfo("/vendor/tree/escaped"),
    **{name: tarfile.TarInfo("some_tree-1.0/vendor/tree/link") for name in ("symbolic", "hard", "fifo", "device")},
}
for _name, _type in {
    "symbolic": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "fifo": tarfile.FIFOTYPE,
    "device": tarfile.CHRTYPE,
}.items():
    UNSAFE[_name].type, UNSAFE[_name].linkname = _type, "../../../../escaped"


@pytest.fixture(params=["filter", "no filter"])
def tarfile_of_any_release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tarfile of this Python, then one without filters, as before 3.10.12 and 3.11.4."""
    if request.param == "no filter":
        for name in ("data_filter", "tar_filter", "fully_trusted_filter"):
            monkeypatch.delattr(tarfile, name, raising=False)


@pytest.mark.usefixtures("tarfile_of_any_release")
@pytest.mark.parametrize("name", UNSAFE)
def test_an_archive_that_leads_out_of_its_folder_is_refused(index: Path, tmp_path: Path, name: str) -> None:
    archive(index, SDIST, UNSAFE[name])
    with pytest.raises(TreeError, match=r"leads out of|is a link or a device"):
        tree.unpack(index / "some_tree-1.0.tar.gz", "vendor/tree", tmp_path / "upstream/tree")
    assert list((tmp_path / "upstream").iterdir()) == []
    assert not (tmp_path / "escaped").exists()


@pytest.mark.usefixtures("tarfile_of_any_release")
def test_unpacked_files_have_the_user_and_no_mode_but_executable(index: Path, tmp_path: Path) -> None:
    program = tarfile.TarInfo("some_tree-1.0/vendor/tree/program")
    program.mode, program.uid, program.gid = 0o7777, 12345, 12345
    archive(index, SDIST, program)
    tree.unpack(index / "some_tree-1.0.tar.gz", "vendor/tree", tmp_path / "tree")
    found = {path.name: path.stat() for path in (tmp_path / "tree").iterdir()}
    assert {name: stat.S_IMODE(of.st_mode) & ~0o022 for name, of in found.items()} == {"file": 0o644, "program": 0o755}
    assert {of.st_uid for of in found.values()} == {os.getuid()}


def test_the_system_s_python_unpacks(index: Path, tmp_path: Path) -> None:
    """Debian 12's is 3.11.2, the oldest patch release that a distribution ships, whose tarfile has no filters."""
    python = Path("/usr/bin/python3")
    lacks = "import sys, tarfile; sys.exit(sys.version_info < (3, 10) or hasattr(tarfile, 'data_filter'))"
    if not python.exists() or subprocess.run([python, "-c", lacks]).returncode != 0:
        pytest.skip("no /usr/bin/python3 from before tarfile had filters")
    archive(index, SDIST)
    code = """import sys, unittest.mock
for name in ("tree_sitter", "tree_sitter_c", "tree_sitter_cmake", "tree_sitter_cpp"):
    sys.modules[name] = unittest.mock.MagicMock()
from pathlib import Path
from pyharness.patch import tree
tree.unpack(Path(sys.argv[1]), "vendor/tree", Path(sys.argv[2]))"""
    command = [str(python), "-c", code, str(index / "some_tree-1.0.tar.gz"), str(tmp_path / "tree")]
    subprocess.run(command, cwd=digest.ROOT, env={"PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    assert files(tmp_path / "tree") == {"file": b"content"}


def test_an_archive_without_the_tree_is_refused(index: Path, tmp_path: Path) -> None:
    archive(index, {"some_tree-1.0/other": b"x"})
    with pytest.raises(TreeError, match="no folder vendor/tree"):
        tree.unpack(index / "some_tree-1.0.tar.gz", "vendor/tree", tmp_path / "upstream/tree")


def test_an_unknown_pin_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TreeError, match="llama-cpp-python, ggml-python"):
        tree.base("whisper")
