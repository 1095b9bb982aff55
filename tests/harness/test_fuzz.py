"""Damaged input is read right or refused in words: the faults that fuzzing found, and a minute of fuzzing."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import readers
from hypothesis import given, settings
from hypothesis import strategies as st

from pyharness.base import build, errors
from pyharness.base.digest import ROOT
from pyharness.case import capture_file
from pyharness.patch import tree
from pyharness.patch.common import TreeError
from pyharness.receipts import signing, statement, verify

CORPUS = ROOT / "fuzz/corpus"
EXAMPLES = {
    "gguf": 800,
    "safetensors": 800,
    "receipts": 80,
    "signatures": 400,
    "hooks": 400,
    "trees": 300,
    "archives": 600,
}


@pytest.mark.parametrize("name", readers.TARGETS)
def test_what_is_damaged_is_read_right_or_refused(name: str) -> None:
    corpus = sorted((CORPUS / name).iterdir())
    assert corpus
    for file in corpus:
        readers.TARGETS[name](file.read_bytes())

    @settings(max_examples=EXAMPLES[name], deadline=None, derandomize=True, database=None)
    @given(st.binary(min_size=1, max_size=80))
    def damage(data: bytes) -> None:
        readers.TARGETS[name](data)

    damage()


# ---- the constructor and the CPU backend ----


def test_fuzz_targets_find_nothing(tmp_path: Path) -> None:
    text = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }'
    clang = shutil.which("clang++") or ""
    command = [clang, "-x", "c++", "-", "-fsanitize=fuzzer,address,undefined", "-o", "/dev/null"]
    if not clang or subprocess.run(command, input=text, text=True, capture_output=True).returncode != 0:
        pytest.skip("no clang with libFuzzer (Debian: apt install clang)")
    programs = build.build("fuzz", "fuzz") / "bin"
    options = ["-max_total_time=20", "-max_len=400", "-len_control=0", "-timeout=60", f"-artifact_prefix={tmp_path}/"]
    runs = []
    for source in (ROOT / "fuzz").glob("fuzz-*.cpp"):
        corpus = shutil.copytree(CORPUS / source.stem.removeprefix("fuzz-"), tmp_path / source.stem)
        command = [str(programs / source.stem), *options, str(corpus)]
        runs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    for run in runs:
        errors_ = run.communicate()[1]
        assert run.returncode == 0, errors_[-4000:]
    assert len(runs) == 2


# ---- captures ----


def test_a_count_that_the_capture_does_not_hold_is_refused_at_once(tmp_path: Path) -> None:
    array = struct.pack("<QcIIQ", 1, b"a", 9, 0, 2**60)  # key a: an array of 2^60 bytes
    (tmp_path / "a.gguf").write_bytes(readers.GGUF[:16] + struct.pack("<Q", 1) + array + b"\0" * 64)
    with pytest.raises(errors.Usage, match=r"not a whole GGUF file \(\d+ bytes\): it ends before byte"):
        capture_file.read(tmp_path / "a.gguf")


# ---- receipts ----


def damaged(folder: Path, edit: Callable[[dict[str, Any]], Any], of: int = 0) -> Path:
    """A whole receipt after an edit of its members."""
    document = json.loads(json.dumps(readers.RECEIPTS[of]))
    edit(document["predicate"]["receipt"])
    path = folder / "receipt.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":' * 50_000, "recursion"),
        ("[" * 100_000, "recursion"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1e999}', "1e999 is no finite number"),
        ('{"a": 9007199254740993}', "not exact in a float64"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"a": 1', "Expecting"),
    ],
)
def test_text_that_is_no_receipt_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(text)
    (finding,) = verify.check(path)
    assert finding.code == verify.INVALID
    assert words in finding.text
    with pytest.raises(errors.Invalid, match=words):
        statement.read(path)


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc/passwd", "a\\b", "a\0b", "a" * 2000])
@pytest.mark.parametrize("member", ["inputs", "libraries"])
def test_a_receipt_names_no_file_outside_the_tree(path: str, member: str, tmp_path: Path) -> None:
    file = damaged(tmp_path, lambda body: body[member][0].update(path=path))
    found = verify.check(file)
    assert verify.exit_code(found) == verify.INVALID
    assert f"receipt/{member}/0/path: " in found[0].text


@pytest.mark.parametrize("member", ["inputs", "libraries"])
def test_a_file_whose_name_the_system_does_not_take_is_not_here(member: str, tmp_path: Path) -> None:
    path = damaged(tmp_path, lambda body: body[member][-1].update(path="a" * 300))
    path.write_text(json.dumps(readers._sealed(json.loads(path.read_text()))))
    assert any("not here" in f.text or "a" * 300 in f.text for f in verify.check(path))


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda body: body["environment"].update(gpu=None), "environment/gpu"),
        (lambda body: body["environment"]["gpu"].update(devices=[1]), "environment/gpu/devices"),
        (lambda body: body["limits"].clear(), "limits"),
    ],
)
def test_members_that_are_shown_have_the_type_that_is_shown(
    edit: Callable[[dict[str, Any]], Any], place: str, tmp_path: Path
) -> None:
    path = damaged(tmp_path, edit)
    with pytest.raises(errors.Invalid, match=place):
        statement.read(path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda record: record.update(who="x"), "/0: the operator itself was not measured there"),
        (lambda record: record.update(timings=[]), "/0/timings: no time"),
        (lambda record: record["timings"][0].update(median_ns="0"), "/0/timings: no time"),
        (lambda record: record["timings"][0].update(median_ns="nan"), "/0/timings: no time"),
    ],
)
def test_measurements_fit_each_other(edit: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path) -> None:
    (of,) = (i for i, r in enumerate(readers.RECEIPTS) if r["predicate"]["receipt"]["perf"])

    def all_of_a_case(body: dict[str, Any]) -> None:
        measurements = body["perf"]["measurements"]
        for record in [record for record in measurements if record["case"] == measurements[0]["case"]]:
            edit(record)

    path = damaged(tmp_path, all_of_a_case, of)
    with pytest.raises(errors.Invalid, match=f"measurements{words}"):
        statement.read(path)
    assert verify.exit_code(verify.check(path, sources_only=True)) == verify.INVALID


def test_a_seal_of_measurements_that_are_not_there_is_an_edit(tmp_path: Path) -> None:
    path = damaged(tmp_path, lambda body: (body.update(perf=None), body["seals"].update({"perf/0": "0" * 16})))
    found = verify.check(path, sources_only=True)
    assert found[0].code == verify.INVALID
    assert "perf/0" in found[0].text


@pytest.mark.parametrize("value", [None, 1, [], "x"])
def test_a_signature_of_another_type_is_refused(value: object, tmp_path: Path) -> None:
    file, private, public = (tmp_path / name for name in ("a.json", "key.pem", "key.pub.pem"))
    file.write_bytes(b"{}\n")
    private.write_bytes(readers.KEYS[0])
    public.write_bytes(readers.KEYS[1])
    path = signing.sign(file, private)
    for key in ("payload", "payloadType", "signatures"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        with pytest.raises(errors.Invalid):
            signing.check(file, public)
        signing.sign(file, private)
    assert signing.check(file, public)


# ---- the patch ----


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[edit]]", "[[edits]]", "must hold \\[\\[edit\\]\\] tables"),
        ('language = "c"', 'language = "d"', "language must be one of"),
        ('action = "before"', 'action = "instead"', "action must be one of"),
        ('"function f"', '"procedure f"', "anchor needs steps"),
        ('name = "switch"', 'nam = "switch"', "unknown key 'nam'"),
        ('name = "switch"', "name = 1", "name is 1, expected str"),
        ('name = "switch"\n', "", "missing 1 required"),
        ('text = "    case 0: break;"', 'text = "// ggml-flash-attn-back }"', "marks of a block"),
        ('file = "src/ggml.c"', 'file = "../outside"', "leads out of the tree"),
        ('anchor = ["function f", "for"]', 'anchor = ["function f", "switch x", "case 1"]', "has no { } to insert in"),
        ('anchor = ["command add_library"]', 'anchor = ["struct a"]', "no anchor 'struct' in cmake"),
        ("optional = true", "optional = true\noptional = true", "is not TOML"),
        ("optional = true", "optional = " + "[" * 5000, "is not TOML"),
    ],
)
def test_a_wrong_hook_is_named(old: str, new: str, words: str, repository: Path) -> None:
    file = repository / "ggml/edits/operator.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    before = readers.contents(repository.parent / "tree")
    with pytest.raises(TreeError, match=words):
        tree.patch(repository.parent / "tree", repository)
    assert readers.contents(repository.parent / "tree") == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('default = "llama-cpp-python"', "", "default is None, expected one of llama-cpp-python, ggml-python"),
        ('sha256 = "', 'sha256 = "x', "sha256 must be 64 hexadecimal digits"),
        ('subdir = "vendor/', 'subdir = "../', "must be plain names"),
        ('version = "', 'version = "/', "must be plain names"),
        ("[ggml-python]", "[ggml-python]\nurl = 1", "unknown key 'url'"),
    ],
)
def test_a_wrong_pin_is_named(old: str, new: str, words: str, repository: Path) -> None:
    file = repository / "ggml/upstream.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(TreeError, match=words):
        tree.base(root=repository)


@pytest.mark.parametrize("line", [b"short", b"\xff\xfe", b"#", b"0" * 64 + b"  ", b"# .", b"# " + b"a" * 300])
def test_a_damaged_list_of_what_was_patched_is_named(line: bytes, repository: Path) -> None:
    target = repository.parent / "tree"
    tree.patch(target, repository)
    with (target / tree.MANIFEST).open("ab") as manifest:
        manifest.write(line + b"\n")
    before = readers.contents(target)
    for action in (tree.patch, readers.reverse, tree.check):
        with pytest.raises(TreeError):
            action(target, repository)
    assert readers.contents(target) == before


def test_a_linked_folder_of_a_tree_is_not_written_through(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "tree"
    shutil.move(target / "src", tmp_path / "outside")
    (target / "src").symlink_to("../outside")
    before = readers.contents(tmp_path)
    for action in (tree.patch, readers.reverse):
        with pytest.raises(TreeError, match="symbolic link"):
            action(target, repository)
    assert readers.contents(tmp_path) == before
