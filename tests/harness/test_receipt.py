"""What a receipt holds, how it is written, read, shown, compared, signed and replayed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from receipt_world import CASES, KERNEL, World, change, libraries, make

from pyharness.base import digest, errors
from pyharness.case import capture_file, result
from pyharness.check import oracle
from pyharness.cli import cli
from pyharness.patch import hooks
from pyharness.receipts import commits, differences, pages, signing, statement, verify


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make(tmp_path_factory.mktemp("receipts") / "checkout")


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def body_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(path)["predicate"]["receipt"]
    return found


# ---- the document ----


def test_the_document_is_an_in_toto_statement_with_a_test_result(world: World) -> None:
    document = load(world.oracle)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert document["predicate"]["result"] == "PASSED"
    assert document["predicate"]["passedTests"] == [f"{case} on CPU" for case in CASES]
    assert all(set(s["digest"]) == {"sha256"} for s in document["subject"])
    assert {s["name"] for s in document["subject"]} >= {KERNEL, "libggml.so.0.25.3", "libggml-cpu.so.0.25.3"}


def test_the_file_is_canonical_and_named_by_its_id(world: World) -> None:
    for path in (world.oracle, world.perf):
        document = load(path)
        assert path.read_bytes() == statement.canonical(document) + b"\n"
        body = document["predicate"]["receipt"]
        bare = json.loads(path.read_bytes())
        del bare["predicate"]["receipt"]["id"]
        assert body["id"] == hashlib.sha256(statement.canonical(bare)).hexdigest()
        stamp = body["finished"].replace("-", "").replace(":", "")
        assert path.name == f"{stamp}-{body['mode']}-{body['id'][:12]}.json"


def test_no_measured_number_is_a_json_float(world: World) -> None:
    def walk(value: Any) -> Iterator[Any]:
        yield value
        for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from walk(child)

    for path in (world.oracle, world.perf):
        assert not any(isinstance(value, float) for value in walk(load(path)))


def test_a_part_says_how_far_it_is_off_and_where(world: World) -> None:
    record = body_of(world.oracle)["cases"][0]
    assert set(record["parts"]) == {"dq", "dk", "dv", "lse", "d"}
    part = record["parts"]["dk"]
    assert 0 < float(part["nmse"]) <= float(part["limit"]) == 1e-10
    assert len(part["worst_index"]) == 4
    assert float(part["got"]) == pytest.approx(float(part["want"]), rel=1e-2)
    assert re.fullmatch(r"[0-9a-f]{64}", record["digests"]["dk"])


def test_files_are_listed_by_bytes_by_text_and_as_git_names_them(world: World) -> None:
    listed = {f["path"]: f for f in body_of(world.oracle)["inputs"]}
    data = (world.root / KERNEL).read_bytes()
    assert listed[KERNEL]["sha256"] == hashlib.sha256(data).hexdigest()
    assert listed[KERNEL]["sha256_lf"] == listed[KERNEL]["sha256"]
    assert listed[KERNEL]["git_blob"] == world.git("hash-object", KERNEL).strip()
    assert listed["tests/data/minilm-l0.gguf"]["role"] == "data"
    assert listed["pyharness/case/reference.py"]["role"] == "measure"
    assert listed["pyharness/receipts/statement.py"]["role"] == "harness"
    listed_hooks = {f"ggml/edits/{layer}.toml" for layer in hooks.LAYERS}
    assert listed_hooks | {"ggml/upstream.toml", "pyharness/receipts/schema/receipt-1.json"} <= listed.keys()


def test_crlf_changes_the_bytes_and_the_blob_but_not_the_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x\ny\n")
    (tmp_path / "b").write_bytes(b"x\r\ny\r\n")
    a, b = statement.fingerprint(tmp_path, "a"), statement.fingerprint(tmp_path, "b")
    assert a["sha256"] != b["sha256"]
    assert a["git_blob"] != b["git_blob"]
    assert a["sha256_lf"] == b["sha256_lf"]


def test_the_libraries_are_those_that_the_process_mapped(world: World) -> None:
    listed = {item["name"]: item for item in body_of(world.oracle)["libraries"]}
    assert listed.keys() == {path.resolve().name for path in libraries().glob("libggml*.so")}
    for name, item in listed.items():
        assert item["sha256"] == statement.sha256(libraries() / name)
        assert item["source"] == (None if name.startswith("libggml.") else digest.patch_digest())


def test_the_environment_names_compilers_flags_and_packages(world: World) -> None:
    environment = body_of(world.oracle)["environment"]
    assert environment["build"]["options"]["CMAKE_BUILD_TYPE"] == "Release"
    assert re.match(r"(GNU|Clang|AppleClang) \d", environment["build"]["compilers"]["CXX"])
    assert environment["python"]["packages"]["numpy"]
    assert str(world.root) not in world.oracle.read_text()
    assert str(Path.home()) not in world.oracle.read_text()


def test_the_command_line_names_no_folder_of_the_machine_and_no_user_of_a_url(world: World, tmp_path: Path) -> None:
    url = "http://user:secret@localhost:9/up?key=secret"
    words = (f"--libs={libraries()}", f"--receipts={tmp_path}", "--health-url", url)
    assert world.run("oracle", "-b", "CPU", "-o", CASES[0], *words).returncode == 0
    (path,) = tmp_path.glob("*.json")
    folders = [f"--libs=.../{libraries().name}", f"--receipts=.../{tmp_path.name}"]
    assert body_of(path)["argv"][-4:] == [*folders, "--health-url", "http://localhost:9/up"]
    assert "secret" not in path.read_text()


def test_upstream_and_commit_are_named(world: World) -> None:
    body = body_of(world.oracle)
    assert body["upstream"]["pin"]["name"] == "llama-cpp-python"
    assert body["upstream"]["ggml"] == "0.25.3"
    assert body["revision"] == {
        "commit": world.git("rev-parse", "HEAD").strip(),
        "tree": world.git("rev-parse", "HEAD^{tree}").strip(),
        "dirty": None,
    }


def test_no_nvml_is_null_with_the_reason(world: World) -> None:
    report = body_of(world.oracle)["monitor"]
    assert (report["device"] is None) == bool(report["device_reason"])


def test_a_dirty_tree_carries_the_digest_of_its_diff(world: World, tmp_path: Path) -> None:
    dirty = world.copy(tmp_path / "checkout")
    dirty.edit(KERNEL, lambda data: data + b"\n")
    (dirty.root / "new.txt").write_text("new")
    (dirty.root / "link").symlink_to(tmp_path)
    first = commits.revision(dirty.root)
    assert first is not None
    assert first["dirty"]["paths"] == [KERNEL, "link", "new.txt"]
    (dirty.root / "new.txt").write_text("newer")
    second = commits.revision(dirty.root)
    assert second is not None
    assert second["dirty"]["diff_sha256"] != first["dirty"]["diff_sha256"]


def test_without_git_a_receipt_has_no_revision_and_verifies(world: World, tmp_path: Path) -> None:
    plain = world.copy(tmp_path / "checkout")
    shutil.rmtree(plain.root / ".git")
    out = plain.root / "more"
    done = plain.run("oracle", "-b", "CPU", "--libs", str(libraries()), "-o", CASES[0], "--receipts", str(out))
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.json")
    assert body_of(path)["revision"] is None
    assert plain.verify(path)[0] == 0
    assert plain.verify(plain.oracle)[0] == 0  # and so does one that was made in git


# ---- writing ----


def test_a_receipt_is_never_overwritten(world: World, tmp_path: Path) -> None:
    document = load(world.oracle)
    path = statement.save(tmp_path, document)
    assert path.read_bytes() == world.oracle.read_bytes()
    with pytest.raises(errors.Environment, match="never overwritten"):
        statement.save(tmp_path, document)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_document_that_breaks_the_schema_is_not_written(world: World, tmp_path: Path) -> None:
    document = load(world.oracle)
    document["predicate"]["receipt"]["cases"][0]["status"] = "fine"
    with pytest.raises(errors.Invalid, match="status"):
        statement.save(tmp_path, document)
    assert list(tmp_path.iterdir()) == []


def test_nan_and_infinity_are_words() -> None:
    assert [statement.number(x) for x in (float("nan"), float("inf"), -float("inf"), 1e-5)] == [
        "nan",
        "inf",
        "-inf",
        "1e-05",
    ]


def test_an_interrupted_run_leaves_a_partial_receipt(world: World, tmp_path: Path) -> None:
    for verb, rest in (
        ("oracle", ()),
        ("perf", ("--runs", "100000", "--no-cold", "--error", "none", "--ceiling-gbs", "1")),
    ):
        out = tmp_path / verb
        command = [
            sys.executable,
            "-m",
            "pyharness",
            verb,
            "-b",
            "CPU",
            "--libs",
            str(libraries()),
            "--receipts",
            str(out),
        ]
        case_file = ("--case-file", str(world.root / "ggml/tests/flash-attn-back-cases.def"))
        process = subprocess.Popen(
            [*command, *case_file, *rest], cwd=world.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        (process.stdout if verb == "oracle" else process.stderr).readline()  # it has begun
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        (path,) = out.glob("*.json")
        document = load(path)
        assert document["predicate"]["receipt"]["partial"] is True
        assert document["predicate"]["result"] == "WARNED"
        code, text = world.verify(path)
        assert code == 0
        assert "note     run: partial: the run ended early" in text
        assert "note     run: WARNED, exit code 130: interrupted" in text


def test_a_replay_of_wrong_gradients_leaves_a_receipt_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = capture_file.read(capture_file.path("minilm-l0"))
    found.gradients["dq"][0, 0, 0] += 1
    capture_file.write(tmp_path / "wrong.gguf", found)
    out = tmp_path / "receipts"
    assert cli.main(["replay", str(tmp_path / "wrong.gguf"), "-b", "CPU", "--receipts", str(out)]) == 1
    (path,) = out.iterdir()
    document = load(path)
    body = document["predicate"]["receipt"]
    assert (body["mode"], body["ended"]["exit_code"], document["predicate"]["result"]) == ("replay", 1, "FAILED")
    assert [check["passed"] for check in body["checks"]] == [False, True, True]
    (failed,) = document["predicate"]["failedTests"]
    assert failed.endswith("wrong.gguf: the file's own dq against float64")
    capsys.readouterr()
    assert cli.main(["receipt", "verify", "--sources-only", str(path)]) == 0
    assert f"note     run: FAILED, exit code 1: {failed}\n" in capsys.readouterr().out
    assert pages._what(body).startswith("replay: 1 of 1 cases ok on cpu, 2 of 3 checks")


@pytest.mark.parametrize("status", ["ok", "failed", "unsupported", "skipped"])
@pytest.mark.parametrize("strict", [(), ("--strict",)])
def test_a_receipt_has_the_exit_code_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, strict: tuple[str, ...]
) -> None:
    right, tried = oracle.check, iter((status, "ok"))

    def check(*words: Any) -> result.CaseResult:
        result, state = right(*words), next(tried)
        return result if state == "ok" else dataclasses.replace(result, status=state, reason="because", parts={})

    monkeypatch.setattr(oracle, "check", check)
    code = cli.main(["oracle", "-b", "CPU", "--receipts", str(tmp_path), "-o", ",".join(CASES[:2]), *strict])
    (path,) = tmp_path.iterdir()
    document = statement.read(path)
    assert document["predicate"]["receipt"]["ended"]["exit_code"] == code
    assert (document["predicate"]["result"] == "FAILED") == (code == 1)
    assert (document["predicate"]["result"] == "PASSED") == (status == "ok")
    assert [f for f in verify.check(path, sources_only=True) if f.code == verify.INVALID] == []


# ---- checking ----


def test_a_file_that_is_no_receipt_is_invalid(world: World, tmp_path: Path) -> None:
    texts = ("", "[]", "{}", '{"a": NaN}', '{"a": 1, "a": 2}', world.oracle.read_text()[:-100])
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        found = verify.check(path, root=world.root)
        assert verify.exit_code(found) == 4, text[:40]
        assert ("receipts are the files receipts/*.json" in found[0].text) == (text != "{}")


@pytest.mark.parametrize("action", [["verify"], ["verify", "--json"], ["show"]])
def test_a_signature_beside_receipts_is_left_out(world: World, tmp_path: Path, action: list[str]) -> None:
    path = Path(shutil.copy(world.oracle, tmp_path))
    signature = signing.envelope_path(path)
    signature.write_text("{}")
    done = world.run("receipt", *action, str(signature), str(path))
    assert done.returncode == 0
    assert signature.name not in done.stdout
    assert f"{signature.name}: a signature, not a receipt: left out" in done.stderr
    done = world.run("receipt", *action, str(signature))
    assert done.returncode == errors.Usage.exit_code
    assert "give its receipt" in done.stderr


def test_libraries_in_no_folder_are_an_error_in_words(world: World) -> None:
    code, text = world.verify(world.oracle, "--check-libs", "nosuch")
    assert code == errors.Usage.exit_code
    assert "nosuch: not a folder" in text


def test_a_receipt_is_not_written_below_a_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(errors.Environment, match="cannot write a receipt below") as caught:
            statement.save(folder, load(world.oracle))
        assert "--receipts DIR" in caught.value.hint


def test_an_unknown_member_breaks_the_schema(world: World, tmp_path: Path) -> None:
    path = Path(shutil.copy(world.oracle, tmp_path))
    change(path, lambda body: body.update(note="fine"))
    found = verify.check(path, root=world.root)
    assert [f.step for f in found] == ["schema"]
    assert "note" in found[0].text


def test_what_does_not_add_up_is_said(world: World) -> None:
    def sums(source: Path, *keys: str | int, value: Any) -> list[str]:
        document = load(source)
        place: Any = document["predicate"]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return list(verify.sums(document))

    assert sums(world.oracle, "receipt", "counts", "ok", value=4) == ["counts: 4 ok, but 3 are listed"]
    assert sums(world.oracle, "failedTests", value=["x"]) == ["failedTests is 1 entries, but the cases give 0 entries"]
    assert "patch is not the digest" in sums(world.oracle, "receipt", "patch", value="0" * 64)[0]
    assert "not from the patch" in sums(world.oracle, "receipt", "libraries", 0, "source", value="0" * 64)[0]
    assert (
        "not canonical"
        in sums(world.oracle, "receipt", "cases", 0, "case", value=CASES[0].replace(",nb=8", ",nb=8,ns=1"))[2]
    )
    assert (
        "unsupported without a reason" in sums(world.oracle, "receipt", "cases", 0, "status", value="unsupported")[-1]
    )
    assert "status is ok" in sums(world.oracle, "receipt", "cases", 0, "distinct", value=2)[-1]
    assert "or neither" in sums(world.perf, "receipt", "perf", "measurements", 0, "timings", value=[])[-1]


def test_verify_speaks_json(world: World) -> None:
    done = world.run("receipt", "verify", "--json", str(world.oracle), str(world.perf))
    assert done.returncode == 0
    assert [(r["receipt"], r["verdict"]) for r in json.loads(done.stdout)] == [
        (world.oracle.name, "FRESH"),
        (world.perf.name, "FRESH"),
    ]


def test_replay_runs_the_cases_again(world: World, tmp_path: Path) -> None:
    again = ("--replay", "2", "--threads", "1", "--libs", str(libraries()))
    code, text = world.verify(world.oracle, *again)
    assert code == 0
    assert len(re.findall(r"note     replay: FLASH_ATTN_BACK\(.*\) on CPU: ok again, .* same bits", text)) == 2

    def other_bits(body: dict[str, Any]) -> None:
        for record in body["cases"]:
            record["digest"] = "0" * 64

    path = Path(shutil.copy(world.oracle, tmp_path))
    code, text = world.verify(change(path, other_bits, seal=True), *again)
    assert code == 1
    assert text.count("the same libraries gave other bits") == 2


def test_replay_compares_errors_with_the_record(world: World, tmp_path: Path) -> None:
    def better(body: dict[str, Any]) -> None:
        for record in body["cases"]:
            record["parts"]["dk"].update(nmse="1e-20", worst_head_nmse="1e-20")

    path = change(Path(shutil.copy(world.oracle, tmp_path)), better, seal=True)
    code, text = world.verify(path, "--replay", "3", "--threads", "1", "--libs", str(libraries()))
    assert code == 1
    assert len(re.findall(r"FAILED   replay: .* on CPU: dk: NMSE [\d.e-]+, the receipt has 1e-20", text)) == 3


def test_errors_of_the_same_bits_may_round_and_no_more() -> None:
    def same(then: str, now: str) -> bool:
        return verify.same_error(*({"nmse": error, "worst_head_nmse": error} for error in (then, now)))

    assert same("1.5366945864e-11", "1.5366945776e-11")
    assert same("3.50e-29", "2.19e-29")  # the reference's own rounding
    assert same("nan", "nan")
    assert not same("1.537e-11", "1.536e-11")
    assert not same("0.0", "1e-20")
    assert not same("nan", "1.0")


def test_replay_times_a_perf_receipt_again(world: World) -> None:
    code, text = world.verify(world.perf, "--replay", "1", "--threads", "1", "--libs", str(libraries()))
    assert code in (0, 1)  # the machine may be busier now
    assert re.search(r"replay: FLASH_ATTN_BACK\(.*\) on CPU: .* ms then, .* ms now", text)


def test_a_library_of_other_sources_is_refused_with_the_file_named(world: World, tmp_path: Path) -> None:
    changed = world.copy(tmp_path / "checkout")
    changed.edit("ggml/include/ggml-flash-attn-back.h", lambda data: data + b"\n")
    for verb in ("oracle", "perf"):
        done = changed.run(verb, "-b", "CPU", "--libs", str(libraries()), "-o", CASES[0])
        assert done.returncode == 3
        assert "libggml-base.so.0.25.3 was built from sources" in done.stderr
        assert ": ggml/include/ggml-flash-attn-back.h" in done.stderr
    assert list((changed.root / "receipts").iterdir()) == list((changed.root / "receipts").glob("*-*-*.json"))


# ---- showing ----


def test_show_prints_what_ran_and_what_came_out(world: World) -> None:
    done = world.run("receipt", "show", str(world.oracle))
    assert done.returncode == 0
    assert "result    PASSED: 3 ok, 0 failed, 0 unsupported, 0 skipped of" in done.stdout
    assert f"patch     {digest.patch_digest()}" in done.stdout


def test_show_md_prints_the_two_tables_and_one_line_a_receipt(world: World) -> None:
    done = world.run("receipt", "show", "--md", str(world.oracle), str(world.perf))
    blocks = done.stdout.strip().split("\n\n")
    assert len(blocks) == 4
    assert blocks[0].startswith("| device | part | cases | passed | worst NMSE | limit |")
    assert re.search(r"\| CPU \| dq \| 3 \| 3 \| [\d.e-]+ \| 1e-10 \|", blocks[0])
    assert blocks[1].startswith("| shape | who | pass | time, ms |")
    assert "| unfused | backward |" in blocks[1]
    assert blocks[2].startswith(f"receipt `{body_of(world.oracle)['id'][:12]}` (oracle, PASSED); patch `")


def test_show_plot_draws_pictures_with_the_numbers_behind(world: World, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def sweep(body: dict[str, Any]) -> None:
        for record in list(body["perf"]["measurements"]):
            if record["case"] == CASES[0]:
                body["perf"]["measurements"].append(record | {"case": CASES[0].replace("kv=40", "kv=80")})

    path = Path(shutil.copy(world.perf, tmp_path))
    change(path, sweep)
    done = world.run("receipt", "show", "--plot", str(tmp_path / "plots"), str(world.oracle), str(path))
    assert done.returncode == 0, done.stderr
    stems = ("errors", "kv-backward-0", "kv-forward-1", "kv-forward+backward-2")
    names = {p.name[13:] for p in (tmp_path / "plots").iterdir()}
    assert names == {f"{stem}{end}" for stem in stems for end in (".png", ".svg", ".csv")}
    (csv,) = (tmp_path / "plots").glob("*kv-backward-0.csv")
    assert csv.read_text().startswith("key,value,who,median_ns,low_ns,high_ns,tflops\nkv,40,flash_attn_back,")


def test_diff_names_limits_files_cases_and_results(world: World) -> None:
    assert list(differences.differences(load(world.oracle), load(world.oracle))) == []
    other = load(world.oracle)
    body = other["predicate"]["receipt"]
    body["limits"]["nmse"] = "0.001"
    body["cases"][0].update(status="failed", reason="dq: NMSE")
    body["cases"][1]["parts"]["dk"]["nmse"] = "2e-09"
    del body["cases"][2]
    next(f for f in body["inputs"] if f["path"] == KERNEL)["sha256_lf"] = "0" * 64
    body["libraries"][0]["sha256"] = "0" * 64
    lines = list(differences.differences(load(world.oracle), other))
    assert lines[0] == "limit    nmse: 1e-05 -> 0.001"
    assert f"file     {KERNEL}: changed" in lines
    assert "library  libggml-base.so.0.25.3: changed" in lines
    assert f"case     {CASES[2]} on CPU: gone" in lines
    assert f"result   {CASES[0]} on CPU: ok -> failed dq: NMSE" in lines
    assert any(re.match(r"result   .*mask=swa:7,sinks=1\) on CPU: NMSE dk .* -> 2e-09", line) for line in lines)


def test_diff_compares_bits_as_bits_and_errors_as_numbers(world: World) -> None:
    other = load(world.oracle)
    records = other["predicate"]["receipt"]["cases"]
    for part in records[0]["parts"].values():  # another BLAS
        part["nmse"] = repr(float(part["nmse"]) * (1 + 1e-9))
        part["want"] = repr(float(part["want"]) * (1 + 1e-15))
    assert list(differences.differences(load(world.oracle), other)) == []
    records[0]["digests"]["dv"] = "0" * 64
    assert list(differences.differences(load(world.oracle), other)) == [f"result   {CASES[0]} on CPU: other bits in dv"]


def test_diff_exits_1_when_something_differs(world: World, tmp_path: Path) -> None:
    assert world.run("receipt", "diff", str(world.oracle), str(world.oracle)).returncode == 0
    path = Path(shutil.copy(world.oracle, tmp_path))
    change(path, lambda body: body["limits"].update(nmse="0.001"))
    done = world.run("receipt", "diff", str(world.oracle), str(path))
    assert done.returncode == 1
    assert done.stdout == "limit    nmse: 1e-05 -> 0.001\n"


def test_two_runs_of_one_build_give_the_same_bits(world: World, tmp_path: Path) -> None:
    out = tmp_path / "again"
    words = ("-b", "CPU", "--threads", "2", "--libs", str(libraries()), "--receipts", str(out), "-o", ",".join(CASES))
    assert world.run("oracle", *words).returncode == 0
    (path,) = out.glob("*.json")
    assert not [line for line in differences.differences(load(world.oracle), load(path)) if line.startswith("result")]
