"""One thing is changed at a time; `receipt verify` names it."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from receipt_world import CASES, KERNEL, World, change, libraries, timed, trained

from pyharness import options
from pyharness.base import errors
from pyharness.base.digest import ROOT
from pyharness.case import cases
from pyharness.device import ggml
from pyharness.receipts import differences, losses, pages, show, signing, statement, verify


def test_nothing_changed(world: World) -> None:
    for path in (world.oracle, world.perf):
        code, text = world.verify(path, "--check-libs", str(libraries()))
        commit = world.git("rev-parse", "HEAD")[:12]
        notes = ["note     signature: unsigned"]
        notes.append(f"note     commit: the files are those of commit {commit}")
        found = [line for line in text.splitlines() if " run: " not in line]
        assert (code, found) == (0, [*notes, f"FRESH  {options.label(path)}"])


def test_a_byte_in_a_kernel(world: World) -> None:
    world.edit(KERNEL, lambda data: data[:-2] + b" \n")
    code, text = world.verify(world.oracle)
    assert code == 6
    assert f"STALE    files: {KERNEL} has changed" in text
    assert text.count("STALE ") == 2  # the finding and the verdict


def test_a_kernel_that_differs_from_the_library_stops_a_run_before_it_starts(world: World) -> None:
    world.edit(KERNEL, lambda data: data + b"\n")
    done = world.run(
        "oracle", "-b", "CPU", "--libs", str(libraries()), "-p", "kv=40", "--receipts", str(world.root / "no")
    )
    assert done.returncode == 3
    assert "was built from sources" in done.stderr
    assert KERNEL in done.stderr
    assert done.stdout == ""
    assert not (world.root / "no").exists()


def test_a_limit_in_the_tree(world: World) -> None:
    world.edit(
        "ggml/tests/flash-attn-back-limits.def", lambda data: data.replace(b"LIMIT(nmse, 1e-5)", b"LIMIT(nmse, 1e-4)")
    )
    code, text = world.verify(world.oracle)
    assert code == 6
    assert "STALE    files: ggml/tests/flash-attn-back-limits.def has changed" in text
    assert "STALE    files: limit nmse was 1e-05 in the receipt and is 0.0001 here" in text


def test_a_limit_in_the_receipt(world: World) -> None:
    change(world.oracle, lambda body: body["limits"].update(f32_nmse="0.001"))
    code, text = world.verify(world.oracle)
    assert code == 4
    assert "INVALID  id: changed after it was written: limits" in text
    assert "dq: limit 1e-10, but the limits say 0.001" in text


def test_a_case_in_the_list(world: World) -> None:
    world.edit(
        "ggml/tests/flash-attn-back-cases.def",
        lambda data: data + b"FLASH_ATTN_BACK(hsk=64,hsv=64,nh=1,nhkv=1,kv=3,nb=2)\n",
    )
    code, text = world.verify(world.oracle)
    assert code == 6
    assert "STALE    files: ggml/tests/flash-attn-back-cases.def has changed" in text


@pytest.mark.parametrize("seal", [False, True])
def test_a_case_in_the_receipt(world: World, seal: bool) -> None:
    other = "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=41,nb=8)"
    path = change(world.oracle, lambda body: body["cases"][0].update(case=other), seal)
    code, text = world.verify(path)
    assert code == 4
    assert (f"INVALID  id: changed after it was written: cases/0 ({other} on CPU)" in text) != seal
    assert f"INVALID  sums: {other} on CPU: seed" in text


@pytest.mark.parametrize("seal", [False, True])
def test_a_result(world: World, seal: bool) -> None:
    path = change(world.oracle, lambda body: body["cases"][1]["parts"]["dk"].update(nmse="0.5"), seal)
    code, text = world.verify(path)
    assert code == 4
    assert ("id: changed after it was written: cases/1 (FLASH_ATTN_BACK(hsk=32," in text) != seal
    assert "mask=swa:7,sinks=1) on CPU: dk: NMSE 0.5" in text


def test_a_better_result(world: World) -> None:
    change(world.oracle, lambda body: body["cases"][1]["parts"]["dk"].update(nmse="0.0"))
    code, text = world.verify(world.oracle)
    assert code == 4
    assert "id: changed after it was written: cases/1 (FLASH_ATTN_BACK(hsk=32," in text


def test_a_failure_turned_into_a_pass(world: World) -> None:
    def fail(body: dict[str, Any]) -> None:
        body["cases"][0].update(status="failed", reason="dq: NMSE")
        body["ended"]["exit_code"] = 1

    path = change(world.oracle, fail, seal=True)
    code, text = world.verify(path)
    assert code == 0  # an honest failure is a valid receipt
    assert f"note     run: FAILED, exit code 1: {CASES[0]} on CPU" in text
    assert text.endswith(f"FRESH  {options.label(path)} (of a run that FAILED)\n")
    path.write_text(path.read_text().replace('"result":"FAILED"', '"result":"PASSED"'))
    code, text = world.verify(path)
    assert code == 4
    assert "sums: result is PASSED, but the cases give FAILED" in text


def test_a_name(world: World) -> None:
    other = world.oracle.rename(world.oracle.with_name("20260101T000000Z-oracle-0123456789ab.json"))
    code, text = world.verify(other)
    assert code == 4
    assert f"INVALID  id: the file of this receipt is named {world.oracle.name}" in text


def test_a_case_that_stands_twice(world: World) -> None:
    path = change(world.oracle, lambda body: body["cases"].append(body["cases"][0]), seal=True)
    code, text = world.verify(path)
    assert code == 4
    assert f"INVALID  sums: {CASES[0]} on CPU: 2 times" in text


def test_a_measurement_that_stands_twice(world: World) -> None:
    def twice(body: dict[str, Any]) -> None:
        body["perf"]["measurements"].append(body["perf"]["measurements"][0])

    code, text = world.verify(change(world.perf, twice, seal=True))
    assert code == 4
    assert f"INVALID  sums: {CASES[0]} on CPU, {statement.OPERATOR} backward: 2 times" in text


def test_an_end_before_the_start(world: World) -> None:
    path = change(world.oracle, lambda body: body.update(finished="2020-01-01T00:00:00Z"), seal=True)
    code, text = world.verify(path)
    assert code == 4
    assert "INVALID  sums: finished 2020-01-01T00:00:00Z before it started" in text


# ---- cases that are left out ----

FILTER = "hsk=64,.*kv=1,"
LISTED = len(cases.load(cases.CASES))


def body_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = statement.read(path)["predicate"]["receipt"]
    return found


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory, original: World) -> World:
    """A checkout whose oracle's receipt is about the part of the list that a filter selects."""
    world = original.copy(tmp_path_factory.mktemp("filtered") / "checkout")
    out = world.root / "filtered"
    words = ("-b", "CPU", "--libs", str(libraries()), "--receipts", str(out), "-p", FILTER)
    assert world.run("oracle", *words).returncode == 0
    (world.oracle,) = out.iterdir()
    return world


def leave_out(body: dict[str, Any]) -> None:
    del body["cases"][1]


def leave_out_and_say_so(body: dict[str, Any]) -> None:
    leave_out(body)
    body["selection"]["selected"] = statement.cases_digest(record["case"] for record in body["cases"])


def leave_out_of_the_list(body: dict[str, Any]) -> None:
    leave_out_and_say_so(body)
    body["selection"]["listed"] = body["selection"]["selected"]
    body["counts"]["listed"] = len(body["cases"])


def test_a_filter_is_named(filtered: World) -> None:
    code, text = filtered.verify(filtered.oracle)
    assert code == 0
    assert f"note     run: {len(body_of(filtered.oracle)['cases'])} of {LISTED} cases: -p {FILTER!r}" in text


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (leave_out, "INVALID  sums: {left} cases on CPU are not the {all} that were selected"),
        (
            leave_out_and_say_so,
            "INVALID  sums: selection: -p {filter} selects {all} cases of {file}, the receipt is about {left}",
        ),
        (
            leave_out_of_the_list,
            "INVALID  sums: selection: {left} cases listed are not those of {file}",
        ),
        (
            lambda body: body["selection"]["filter"].update(params=None),
            "INVALID  sums: selection: no filter selects {listed}",
        ),
        (
            lambda body: body["selection"]["devices"].append("CUDA0"),
            "INVALID  sums: 0 cases on CUDA0 are not the {all}",
        ),
        (lambda body: body["selection"].update(devices=[]), "INVALID  sums: cases on CPU, which was not selected"),
    ],
)
def test_cases_that_are_left_out(filtered: World, tmp_path: Path, edit: Callable[[Any], Any], words: str) -> None:
    path = change(Path(shutil.copy(filtered.oracle, tmp_path)), edit, seal=True)
    code, text = filtered.verify(path)
    count, file = len(body_of(filtered.oracle)["cases"]), cases.CASES.relative_to(ROOT)
    assert code == 4
    assert words.format(left=count - 1, all=count, listed=LISTED, filter=repr(FILTER), file=file) in text


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda chosen: chosen["filter"].update(params="(" + "[^!]*" * 40 + ")*!"), "TimeoutError"),
        (lambda chosen: chosen["filter"].update(params="a{99999999999}"), "OverflowError"),
        (lambda chosen: chosen["filter"].update(params="("), "not a regular expression"),
        (lambda chosen: chosen["filter"].update(random=10**15), "TimeoutError"),
        (lambda chosen: chosen.update(file=KERNEL), "not a case"),
    ],
)
def test_a_selection_that_nobody_can_apply(
    filtered: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Any], Any], words: str
) -> None:
    monkeypatch.setattr(verify, "SECONDS", 0.5)
    path = change(Path(shutil.copy(filtered.oracle, tmp_path)), lambda body: edit(body["selection"]), seal=True)
    found = verify.check(path, sources_only=True, root=filtered.root)
    assert [f.code for f in found if words in f.text] == [verify.INVALID], [f.text for f in found]


def test_an_early_receipt_says_what_it_does_not_hold(filtered: World, tmp_path: Path) -> None:
    def early(body: dict[str, Any]) -> None:
        body["schema"] = "1.0.0"
        for name in ("ended", "selection", "checks"):
            del body[name]

    path = change(Path(shutil.copy(filtered.oracle, tmp_path)), early, seal=True)
    code, text = filtered.verify(path)
    assert code == 0
    assert "note     run: an early receipt (schema 1.0.0) that does not hold the run's exit code" in text
    count, listed = len(body_of(filtered.oracle)["cases"]), len(cases.load(cases.CASES))
    assert f"note     run: {count} of {listed} cases\n" in text
    path = change(path, lambda body: body.update(schema="1.1.0"), seal=True)
    assert "'ended' is a required property" in filtered.verify(path)[1]


# ---- how a run ended ----


def fail_and_say_nothing(body: dict[str, Any]) -> None:
    body["cases"][0].update(status="failed", reason="dq: NMSE")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (fail_and_say_nothing, "exit code 0, but 1 cases or checks failed"),
        (lambda body: body["ended"].update(exit_code=1), "exit code 1 without a reason"),
        (lambda body: body.update(partial=True), "exit code 0, but the run is partial"),
        (
            lambda body: body["checks"].append({"name": "x", "found": "1.0", "limit": "1e-05", "passed": True}),
            "x: 1.0 of at most 1e-05 is not what passed or the limits say",
        ),
    ],
)
def test_an_exit_code_that_contradicts_the_cases(world: World, edit: Callable[[Any], Any], words: str) -> None:
    code, text = world.verify(change(world.oracle, edit, seal=True))
    assert code == 4
    assert f"INVALID  sums: {words}" in text


@pytest.mark.parametrize("seal", [False, True])
def test_a_sample(world: World, seal: bool) -> None:
    def faster(body: dict[str, object]) -> None:
        samples = body["perf"]["measurements"][0]["timings"][0]["samples_ns"]  # type: ignore[index]
        samples[:] = [1, 1, 1, 1, *samples[4:]]

    code, text = world.verify(change(world.perf, faster, seal))
    assert code == 4
    assert ("id: changed after it was written: perf/0 (FLASH_ATTN_BACK(hsk=64," in text) != seal
    assert "flash_attn_back: warm L2, host clock: median_ns is" in text


def test_a_library(world: World) -> None:
    libs = world.root / "libs"
    shutil.copytree(libraries(), libs, symlinks=True)
    assert world.verify(world.oracle, "--check-libs", str(libs))[0] == 0
    path = next(libs.glob("libggml-cpu.so.0.*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, text = world.verify(world.oracle, "--check-libs", str(libs))
    assert code == 6
    assert f"STALE    libraries: {path.name} here is not the library that ran" in text
    path.unlink()
    code, text = world.verify(world.oracle, "--check-libs", str(libs))
    assert code == 4
    assert f"INVALID  libraries: not here, so not compared: {path.name}" in text
    assert world.verify(world.oracle)[0] == 0  # nothing is asked of libraries that do not lie where they ran


def test_a_missing_file(world: World) -> None:
    (world.root / KERNEL).unlink()
    code, text = world.verify(world.oracle)
    assert code == 4
    assert f"INVALID  files: {KERNEL} is missing here" in text


def test_a_new_file(world: World) -> None:
    (world.root / "ggml/src/ggml-cuda/fattn-back-other.cu").write_text("\n")
    code, text = world.verify(world.oracle)
    assert code == 6
    assert "STALE    files: ggml/src/ggml-cuda/fattn-back-other.cu is new since the receipt" in text


def test_a_capture(world: World) -> None:
    world.edit("tests/data/minilm-l0.gguf", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    code, text = world.verify(world.oracle)
    assert code == 6
    assert "STALE    files: tests/data/minilm-l0.gguf has changed" in text


def test_a_wrong_key(world: World, tmp_path: Path) -> None:
    ours, theirs = keypair(tmp_path / "ours"), keypair(tmp_path / "theirs")
    assert world.run("receipt", "sign", str(world.oracle), "--key", str(ours[0])).returncode == 0
    code, text = world.verify(world.oracle, "--key", str(ours[1]))
    assert code == 0
    assert "signature: signed by ours.pub.pem, key" in text
    code, text = world.verify(world.oracle, "--key", str(theirs[1]))
    assert code == 4
    assert f"INVALID  signature: {signing.envelope_path(world.oracle).name} is not signed by theirs.pub.pem" in text
    code, text = world.verify(world.perf, "--key", str(ours[1]))
    assert code == 4
    assert "INVALID  signature: no signature" in text


def test_a_key_of_the_repository(world: World, tmp_path: Path) -> None:
    ours, theirs = keypair(tmp_path / "ours"), keypair(tmp_path / "theirs")
    signing.sign(world.oracle, ours[0])
    assert "note     signature: not checked: no key in receipts/keys" in world.verify(world.oracle)[1]
    keys = world.root / signing.KEYS
    keys.mkdir()
    shutil.copy(theirs[1], keys)
    code, text = world.verify(world.oracle)
    assert code == 4
    assert "is not signed by theirs.pub.pem" in text
    shutil.copy(ours[1], keys)
    code, text = world.verify(world.oracle)
    assert code == 0
    assert "note     signature: signed by ours.pub.pem, key" in text
    assert "note     signature: unsigned" in world.verify(world.perf)[1]


def test_keys_of_a_kind_that_nobody_knows(world: World, tmp_path: Path) -> None:
    private, public = keypair(tmp_path / "ours")
    signing.sign(world.oracle, private)
    for path in (private, public):
        label, *body, end = path.read_text().splitlines()
        der = base64.b64decode("".join(body)).replace(b"\x2b\x65\x70", b"\x2b\x65\x01")
        path.write_text("\n".join((label, base64.b64encode(der).decode(), end)) + "\n")
    with pytest.raises(errors.Usage, match="not a readable ed25519 public key"):
        signing.check(world.oracle, public)
    with pytest.raises(errors.Usage, match="not a readable ed25519 private key"):
        signing.sign(world.oracle, private)


def test_keys_of_another_kind(world: World, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa

    private, public = keypair(tmp_path / "theirs", rsa.generate_private_key(65537, 2048))
    with pytest.raises(errors.Usage, match="not a readable ed25519 private key in PEM form: it is of type rsa"):
        signing.sign(world.oracle, private)
    with pytest.raises(errors.Usage, match="not a readable ed25519 public key in PEM form: it is of type rsa"):
        signing.check(world.oracle, public)
    assert not signing.envelope_path(world.oracle).exists()


def test_a_signature_of_other_bytes(world: World, tmp_path: Path) -> None:
    private, public = keypair(tmp_path / "ours")
    signing.sign(world.oracle, private)
    world.oracle.write_bytes(world.oracle.read_bytes() + b"\n")
    code, text = world.verify(world.oracle, "--key", str(public))
    assert code == 4
    assert "signs other bytes" in text


def test_line_ends_only(world: World) -> None:
    for path in (KERNEL, "ggml/tests/flash-attn-back-limits.def"):
        world.edit(path, lambda data: data.replace(b"\n", b"\r\n"))
    code, text = world.verify(world.oracle, "--sources-only")
    assert code == 0
    assert [line for line in text.splitlines() if " files: " in line] == [
        f"note     files: {KERNEL} differs in line ends only",
        "note     files: ggml/tests/flash-attn-back-limits.def differs in line ends only",
    ]


def test_a_receipt_for_another_commit(world: World) -> None:
    commit = world.git("rev-parse", "HEAD").strip()
    world.edit(KERNEL, lambda data: data + b"// faster\n")
    world.git("commit", "-q", "-a", "-m", "change the kernel")
    code, text = world.verify(world.oracle)
    assert code == 6
    assert f"STALE    files: {KERNEL} has changed (the receipt is about commit {commit[:12]})" in text


def test_a_commit_that_touches_nothing_the_receipt_stands_on(world: World) -> None:
    (world.root / "README.md").write_text("hello\n")
    world.edit("pyharness/check/report.py", lambda data: data + b"\n")
    world.git("add", ".")
    world.git("commit", "-q", "-m", "words")
    code, text = world.verify(world.oracle)
    assert code == 0
    assert "note     files: pyharness/check/report.py has changed (decides no result)" in text


def test_the_module_that_decides_results(world: World) -> None:
    world.edit("pyharness/case/reference.py", lambda data: data + b"\n")
    code, text = world.verify(world.oracle)
    assert code == 6
    assert "STALE    files: pyharness/case/reference.py has changed" in text


# ---- a training ----


@pytest.fixture(scope="module")
def original_training(library: ggml.Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("training"), library)


@pytest.fixture
def training(original_training: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original_training, tmp_path))


def told(path: Path) -> list[str]:
    """What verify finds wrong, in words."""
    return [f"{finding.step}: {finding.text}" for finding in verify.check(path) if finding.code]


def test_a_training_shows_its_schedule_and_how_far_each_run_parts(training: Path) -> None:
    assert told(training) == []
    text = show.summary(statement.read(training))
    assert "training, tiny on cpu: arch llama, " in text
    schedule = "4 steps of AdamW over 600 tokens in windows of 256, learning rate 0.0003 after 2 steps of warm-up"
    assert schedule in text
    assert "| on | 9.5 | 8.0004 | 5e-05 in step 4 | 250 |" in text
    assert "| off, weights 1e-06 apart | 9.5 | 8 | 0.0001 in step 2 | 250 |" in text


@pytest.mark.parametrize(
    "edit",
    [
        lambda body: body["schedule"].update(lr="0.001"),
        lambda body: body["schedule"].update(warmup=0),
        lambda body: body["schedule"].update(tokens=2),
        lambda body: body["runs"]["control"]["losses"].reverse(),
        lambda body: body.update(noise="1e-05"),
        lambda body: body.pop("schedule"),
    ],
)
def test_what_a_training_recorded(training: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    change(training, lambda body: edit(body["train"]))
    assert told(training)[0] == "id: changed after it was written: train"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda body: body["runs"]["control"]["losses"].__setitem__(3, "8.1"), "the same of two runs with it off"),
        (lambda body: body["runs"]["on"]["losses"].__setitem__(3, "8.0"), "losses, relative error: is 5.0"),
        (lambda body: body["runs"]["on"]["losses"].__setitem__(1, "nan"), "but losses and gradients give nan"),
        (lambda body: body["gradients"].update({"blk.0.attn_q.weight": "nan"}), "(blk.0.attn_q.weight): is missing"),
        (lambda body: body["checks"].pop(2), "loss falls: mean of the last quarter over that of the first: is missing"),
        (lambda body: body["checks"][1].update(found="5e-05"), "weights 1e-06 apart: is 5e-05, but"),
        (lambda body: body.update(noise="1e-05"), "weights 1e-05 apart: is missing"),
        (lambda body: body.pop("schedule"), "training: no schedule, which receipts hold by now"),
        (lambda body: body["runs"].pop("control"), "training: no losses of the control run, which"),
        (lambda body: body["schedule"].update(steps=5), ": not 5 steps"),
        (lambda body: body["runs"]["control"]["losses"].pop(), "runs/control: not 4 steps"),
    ],
)
def test_a_training_that_contradicts_itself(training: Path, edit: Callable[[dict[str, Any]], Any], words: str) -> None:
    path = change(training, lambda body: edit(body["train"]), seal=True)
    assert verify.exit_code(verify.check(path)) == verify.INVALID
    assert words in told(path)[0]


def test_a_limit_of_a_training(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.LIMITS, "cpu", losses.Limits(1e-5, 1e-6))
    assert told(training)[0] == "files: limit losses, relative error was 0.0001 in the receipt and is 1e-05 here"
    assert verify.exit_code(verify.check(training)) == verify.STALE


def test_a_training_of_an_early_receipt_is_shown_and_is_invalid_in_words(training: Path) -> None:
    def early(body: dict[str, Any]) -> None:
        for name in ("schedule", "noise"):
            del body["train"][name]
        del body["train"]["runs"]["control"]

    path = change(training, early, seal=True)
    assert told(path) == [
        "sums: training: no schedule, no noise, no losses of the control run, which receipts hold by now; train again"
    ]
    assert "schedule not recorded" in show.summary(statement.read(path))


def test_two_trainings_that_differ(training: Path) -> None:
    other = training.with_name("other.json")
    shutil.copy(training, other)
    other = change(other, lambda body: body["train"]["schedule"].update(lr="0.001"), seal=True)
    lines = differences.differences(statement.read(training), statement.read(other))
    assert list(lines) == ["train    lr: 0.0003 -> 0.001"]


# ---- a training benchmark ----


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: ggml.Library) -> Path:
    del library
    return timed(tmp_path, monkeypatch)


def test_a_benchmark_shows_memory_and_time_by_context(benchmark: Path) -> None:
    assert told(benchmark) == []
    document = statement.read(benchmark)
    text = show.summary(document)
    assert "| 512 | 1024 | 512 | 2048 | 1024 | 0.4 (0.31 .. 0.49) | 0.4 (0.31 .. 0.49) |" in text
    assert "| 2048 | 4096, does not fit | 2048 | 8192, does not fit | 4096 | - | 0.46 (0.43 .. 0.49) |" in text
    assert "| 1024 | layers | 0.44 (0.39 .. 0.49) | 1024 | 2048 | 0.44 (0.39 .. 0.49) |" in text
    assert "| 512 | PyTorch bf16 | 0.1 (0.1 .. 0.1) | 512 | 0.4 (0.31 .. 0.49) |" in text
    assert "| 2048 | PyTorch tf32 | - | 2048, does not fit | 0.46 (0.43 .. 0.49) |" in text
    assert pages._what(document["predicate"]["receipt"]) == "train: tiny, contexts of 512, 1024, 2048"
    assert document["predicate"]["warnedTests"] == [f"context {ctx}, flash attention off" for ctx in (1024, 2048)]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda body: body["runs"].pop(), "not one run with flash attention off and one with it on"),
        (lambda body: body["runs"].append(body["runs"][0]), "not one run with flash attention off and one with it on"),
        (lambda body: body["runs"][1]["steps_ns"].pop(), "bench/runs/1: no loss and time of each step"),
        (lambda body: body["variants"][1]["steps_ns"].pop(), "bench/variants/1: no loss and time of each step"),
        (lambda body: body["variants"][2].update(ctx=4096), "bench/variants/2: a context that has no run of ours"),
        (lambda body: body["peers"][1]["steps_ns"].pop(), "bench/peers/1: no loss and time of each step"),
        (lambda body: body["peers"][0].update(ctx=4096), "bench/peers/0: a context that has no run of ours"),
    ],
)
def test_a_benchmark_that_contradicts_itself(benchmark: Path, edit: Callable[[Any], Any], words: str) -> None:
    path = change(benchmark, lambda body: edit(body["bench"]), seal=True)
    assert verify.exit_code(verify.check(path)) == verify.INVALID
    assert words in " ".join(told(path))


def keypair(stem: Path, key: Any = None) -> tuple[Path, Path]:
    """A key pair as PEM files, a new one of ed25519 by default."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = key or Ed25519PrivateKey.generate()
    private, public = stem.with_suffix(".pem"), stem.with_suffix(".pub.pem")
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return private, public
