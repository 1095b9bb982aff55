"""Exit codes, streams and formats of the command line."""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from attention import small
from numpy.typing import NDArray

from pyharness.base import commands, errors
from pyharness.case import cases
from pyharness.check import oracle, report
from pyharness.cli import cli, listing
from pyharness.device import ggml

CASE = "FLASH_ATTN_BACK(hsk=16,hsv=16,nh=4,nhkv=2,kv=20,nb=7,type_K=f32,type_V=f32)"
pytestmark = pytest.mark.usefixtures("library")

ORACLE = ["oracle", "-b", "CPU", "--no-receipt"]


def process(*words: str, program: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, *(["-c", program] if program else ["-m", "pyharness"]), *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ggml.ROOT, check=False)


def test_help_lists_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"  {verb} " in text
    assert "130  interrupted" in text


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"python -m pyharness {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["", *cli.VERBS])
def test_help_fits_the_terminal_and_leaves_commands_whole(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*verb.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 80 and " " in line.strip() and "python -m" not in line]


def test_no_verb_at_all_is_exit_2_and_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "  oracle " in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pyharness {importlib.metadata.version('pyharness')}\n"


def wrong(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a wrong command line says."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == errors.Usage.exit_code
    streams = capsys.readouterr()
    assert not streams.out
    return streams.err


def misspelt(word: str) -> str:
    """A word with its first two letters swapped."""
    dashes, letters = word[: -len(word.lstrip("-"))], word.lstrip("-")
    return dashes + letters[1] + letters[0] + letters[2:]


def options(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[str, ...]]:
    """Every option of three letters or more that help shows, after the words that lead to it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from options(sub, *words, name)
        elif action.help != argparse.SUPPRESS:
            yield from ((*words, name) for name in action.option_strings if re.match("--...", name))


def every_option() -> Iterator[tuple[str, ...]]:
    for verb, (module, _) in cli.VERBS.items():
        parser = cli.Parser()
        importlib.import_module(f"pyharness.{module}").add_arguments(parser)
        yield from options(parser, verb)


@pytest.mark.parametrize("words", list(every_option()), ids=" ".join)
def test_an_option_that_is_misspelt_is_suggested(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    *before, option = words
    said = wrong([*before, misspelt(option)], capsys)
    assert f"pyharness {' '.join(before)}: unknown option {misspelt(option)}; did you mean {option}?" in said
    assert f"-m pyharness {' '.join(before)} --help" in said


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_verb_that_is_misspelt_is_suggested(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"did you mean {verb}?" in wrong([misspelt(verb)], capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("receipt verfy some.json", "did you mean verify?"),
        ("--versoin", "did you mean --version?"),
        ("oracle --output jsno", "'jsno' is none of console, json, csv, md; did you mean json?"),
        ("oracle --output xml", "'xml' is none of console, json, csv, md\n"),
        ("oracle --frobnicate", "unknown option --frobnicate\n"),
        ("oracle -y", "unknown option -y\n"),
        ("list hsk=64", "unexpected argument 'hsk=64'"),
        ("capture --modle m", "did you mean --model?"),  # not that --model is missing
        ("gpucheck --iner soak", "unknown option --iner\n"),  # the hidden ones stay hidden
        ("receipt", "the following arguments are required: ACTION"),
    ],
)
def test_what_is_wrong_in_a_command_line_is_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in wrong(words.split(), capsys)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-o", "("], 2, "not a regular expression"),
        (["-p", "hsk=65"], 5, "did you mean"),
        (["-o", "FLASH_ATTN_BAK"], 5, "did you mean FLASH_ATTN_BACK"),
        (["-o", CASE.replace("nhkv=2", "nhkv=3")], 2, "nhkv=3: must be a divisor of nh=4"),
        (["--case-file", "/nonexistent.def"], 2, "/nonexistent.def"),
        (["-o", CASE, "-b", "CUDA9"], 3, "no device CUDA9"),
        (["-o", CASE, "--libs", "/nonexistent"], 3, "no libggml-base.so"),
        (["-o", CASE, "--preset", "nonexistent"], 3, "preset nonexistent is not built"),
    ],
)
def test_what_is_wrong_has_its_exit_code_and_is_said_on_stderr(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert cli.main(["oracle", "--no-receipt", *words]) == code
    streams = capsys.readouterr()
    assert said in streams.err
    assert not streams.out


def test_a_case_that_passes_is_exit_0_and_shows_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ORACLE, "-o", CASE]) == 0
    out = capsys.readouterr().out
    assert f"ok          CPU {CASE}" in out
    for part in ("dq", "dk", "dv", "lse", "d"):
        assert f"{part} " in out
    assert "1 case: 1 ok, 0 failed, 0 unsupported, 0 skipped" in out


def test_a_case_that_fails_is_exit_1_and_stands_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "limits", lambda *_: {"nmse": 1e-30, "zero": 1e-30})
    assert cli.main([*ORACLE, "-o", CASE]) == 1
    out = capsys.readouterr().out
    assert f" -m pyharness oracle -b CPU --seed 0 -o '{CASE}'" in out
    assert out.splitlines()[-1].startswith(f"  failed CPU {CASE}: dq: NMSE")


def test_strict_makes_what_does_not_run_a_failure(
    library: ggml.Library, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = CASE.replace("hsk=16,hsv=16", "hsk=8,hsv=8")
    refuse = lambda _, shape: "too small" if getattr(shape, "hsk", 16) == 8 else None  # noqa: E731
    monkeypatch.setattr(library, "refusal", refuse)
    words = [*ORACLE, "-o", f"{CASE},{other}"]
    assert cli.main(words) == 0
    assert "CPU: 1 not run: too small" in capsys.readouterr().out
    assert cli.main([*words, "--strict"]) == 1
    assert cli.main([*ORACLE, "-o", other]) == 3


def test_json_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ORACLE, "-o", CASE, "--output", "json", "--seed", "5"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["seed"]) == (report.SCHEMA_VERSION, 5)
    (result,) = document["results"]
    assert result["case"] == CASE
    assert result["seed"] == small().seed(5)
    assert set(result["parts"]) == {"dq", "dk", "dv", "lse", "d"}
    assert result["parts"]["dq"]["limit"] == 1e-10
    assert len(result["digest"]) == 64


def test_csv_has_a_row_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ORACLE, "-o", CASE, "--output", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["part"] for row in rows] == ["dq", "dk", "dv", "lse", "d"]
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["nmse"]) < 1e-5 for row in rows)


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ORACLE, "-o", CASE, "--output", "md"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1
    assert f"`{CASE}`" in lines[2]


def test_list_prints_cases_that_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "-p", "mask=docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        assert str(cases.Case.parse(line)) == line
    assert cli.main(["list", "--seeds", "--seed", "3", "-o", CASE]) == 0
    assert capsys.readouterr().out.split() == [f"{small().seed(3):020d}", CASE]


def test_doctor_names_devices_paths_and_sources(library: ggml.Library, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "-b", "CPU"])
    out = capsys.readouterr().out
    assert code == (0 if "not the tree's" not in out else 3)
    assert f"library   ggml {library.version}" in out
    assert "device    CPU" in out
    assert "cases: path cpu" in out


def test_doctor_without_a_build_is_exit_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--libs", str(tmp_path)]) == 3
    assert "no libggml-base.so" in capsys.readouterr().out


def test_there_is_no_colour_and_no_progress_bar_without_a_terminal() -> None:
    done = process(*ORACLE, "-o", CASE)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


def test_colour_can_be_forced_and_forbidden() -> None:
    assert "\x1b[32m" in process(*ORACLE, "-o", CASE, FORCE_COLOR="1").stdout
    assert "\x1b[32m" not in process(*ORACLE, "-o", CASE, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_a_receipt_is_written_and_named_on_stderr(tmp_path: Path) -> None:
    done = process("oracle", "-b", "CPU", "-o", CASE, "--receipts", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-oracle-*.json")
    assert f"receipt {path.stem.rpartition('-')[2]} ({path})" in done.stderr
    assert CASE in path.read_text()


LONG = "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=32,nhkv=1,kv=8000,nb=4000,type_K=f32,type_V=f32)"


def test_an_interrupt_reports_what_was_done_and_is_exit_130() -> None:
    command = [sys.executable, "-m", "pyharness", *ORACLE, "-o", f"{CASE},{LONG}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ggml.ROOT
    ) as running:
        assert running.stdout
        assert CASE in running.stdout.readline()
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=60)
        code = running.returncode
    assert code == errors.INTERRUPTED
    assert "stopped after 1 of 2 cases" in out
    assert "1 case: 1 ok" in out


def test_a_case_that_does_not_end_is_ended_by_the_watchdog() -> None:
    done = process(*ORACLE, "-o", f"{LONG},{CASE}", "--timeout", "1")
    assert done.returncode == 1
    assert "not finished within 1 s" in done.stdout
    assert "stopped after 1 of 2 cases" in done.stdout


ABORT = """
import sys
from pyharness.cli import cli
from pyharness.device import ggml
run = ggml.Session.compute
def compute(session):
    if session.inputs.case.hsk == 8:
        session.library.c.ggml_flash_attn_back_use_saved(session.sources["q"])
    return run(session)
ggml.Session.compute = compute
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_failed_assertion_of_ggml_is_a_failed_case_with_its_message() -> None:
    other = CASE.replace("hsk=16,hsv=16", "hsk=8,hsv=8")
    done = process(*ORACLE, "-o", f"{CASE},{other},{CASE.replace('nb=7', 'nb=3')}", program=ABORT)
    assert done.returncode == 1
    assert "ggml aborted" in done.stdout
    assert 'GGML_ASSERT(back->op == GGML_OP_FLASH_ATTN_BACK && "not a FLASH_ATTN_BACK node")' in done.stdout
    assert "stopped after 2 of 3 cases" in done.stdout
    assert f"  failed CPU {other}" in done.stdout


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (errors.Environment("no memory"), "skipped", 3),
        (MemoryError(), "skipped", 3),
        (errors.Failure("broke"), "failed", 1),
    ],
)
def test_a_case_that_could_not_run_is_skipped_and_one_that_broke_has_failed(
    library: ggml.Library,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    state: str,
    code: int,
) -> None:
    def prepare(*_: object) -> None:
        raise error

    monkeypatch.setattr(library, "prepare", prepare)
    assert cli.main([*ORACLE, "-o", CASE]) == code
    assert f"{state:<11} CPU {CASE}" in capsys.readouterr().out


def test_results_are_the_same_whatever_else_is_selected(capsys: pytest.CaptureFixture[str]) -> None:
    digests = []
    for words in (["-o", CASE], ["-o", f"{CASE.replace('nb=7', 'nb=3')},{CASE}"]):
        assert cli.main([*ORACLE, *words, "--output", "json"]) == 0
        results = json.loads(capsys.readouterr().out)["results"]
        digests.append(next(result["digest"] for result in results if result["case"] == CASE))
    assert digests[0] == digests[1]


def test_repeats_are_compared_bit_by_bit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ORACLE, "-o", CASE, "--repeat", "10", "--output", "json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["repeats"], result["distinct"]) == (10, 1)


def test_different_bits_in_repeats_fail_the_case(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, count = ggml.Session.again, itertools.count()

    def changing(session: ggml.Session) -> NDArray[np.uint32]:
        words = again(session)
        words[0] ^= next(count)
        return words

    monkeypatch.setattr(ggml.Session, "again", changing)
    found = oracle.check(library, cpu, small(), 0, repeats=4)
    assert (found.status, found.reason) == ("failed", "3 different results in 4 runs")


# ---- wrong input ----


@pytest.mark.parametrize(
    "words",
    [
        "oracle --threads -1",
        "oracle --threads 513",
        "oracle --repeat 0",
        "oracle --timeout -1",
        "oracle --timeout inf",
        "oracle --timeout nan",
        "oracle --random -1",
        "grad --samples -1",
        "perf --ceiling-tflops 0",
        "perf --ceiling-gbs nan",
        "perf --budget -1",
        "receipt verify some.json --replay -1",
        "train --steps 0",
        "capture out.gguf --model m --text t --rows -1",
    ],
)
def test_a_number_that_no_run_can_use_is_refused_before_anything_runs(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words.split())
    assert caught.value.code == errors.Usage.exit_code
    option, number = words.split()[-2:]
    said = capsys.readouterr().err
    assert f"argument {option}: {float(number):g}" in said.replace(f"{number} must", f"{float(number):g} must")


def test_a_seed_may_be_negative() -> None:
    assert cli.main([*ORACLE, "-o", CASE, "--seed", "-1"]) == 0


@pytest.mark.parametrize("verb", ["oracle", "perf"])
def test_a_folder_that_takes_no_receipt_is_refused_before_the_run(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main([verb, "-o", CASE, "--receipts", str(tmp_path / "file/below")]) == errors.Environment.exit_code
    out, err = capsys.readouterr()
    assert not out
    assert "below: Not a directory" in err
    assert "--receipts DIR, or --no-receipt" in err


def test_a_folder_that_only_looks_writable_is_refused_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["oracle", "-o", CASE, "--receipts", "/proc/receipts"]) == errors.Environment.exit_code
    out, err = capsys.readouterr()
    assert not out
    assert "cannot write a receipt below /proc/receipts: " in err


@pytest.mark.parametrize("verb", ["oracle", "support", "list"])
def test_a_case_whose_capture_cannot_be_read_is_exit_2(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    case = f"FLASH_ATTN_BACK(capture={tmp_path / 'empty.gguf'})"
    assert cli.main([verb, "-o", f"{CASE},{case}"]) == errors.Usage.exit_code
    out, err = capsys.readouterr()
    assert not out
    assert "not a whole GGUF file" in err


def test_a_case_file_that_is_no_text_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert cli.main(["list", "--case-file", str(tmp_path / "picture.png")]) == errors.Usage.exit_code
    assert "picture.png: not text in UTF-8" in capsys.readouterr().err


def test_a_device_that_is_named_twice_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["oracle", "--no-receipt", "-b", "CPU,cpu", "-o", CASE]) == 0
    assert "1 case: 1 ok" in capsys.readouterr().out


def test_devices_may_be_written_with_spaces_and_a_last_comma(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "-b", " CPU, cpu,", "-o", CASE]) == 0
    assert capsys.readouterr().out == "CPU: 1 case on path cpu\n"


def test_a_cuda_device_in_a_build_without_cuda_names_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "-b", "cuda0", "-o", CASE]) == errors.Environment.exit_code
    assert "devices: CPU; --preset cuda selects the CUDA build" in capsys.readouterr().err


def test_a_device_without_a_name_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["oracle", "--no-receipt", "-b", "", "-o", CASE]) == errors.Environment.exit_code
    assert "devices: CPU" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["-p", "sinks=1"], ["--output", "json"], ["--all"], ["--strict"], ["--random", "3"]])
def test_the_matrix_refuses_a_filter_that_it_would_ignore(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "--matrix", *more]) == errors.Usage.exit_code
    assert "--matrix does not combine with" in capsys.readouterr().err


def test_libraries_of_two_folders_are_refused(library: ggml.Library, tmp_path: Path) -> None:
    libs = Path(shutil.copytree(library.directory, tmp_path / "libs", symlinks=True))
    for path in libs.glob("libggml-cpu*"):
        path.unlink()
    done = process(*ORACLE, "-o", CASE, "--libs", str(libs))
    assert done.returncode == errors.Environment.exit_code
    assert f"{libs} has no libggml-cpu.so" in done.stderr
    assert "put all libraries of one build into the folder" in done.stderr


def test_an_error_of_the_system_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    words = ["train", "--no-receipt", "--libs", str(tmp_path), "--out", str(tmp_path / "file")]
    assert cli.main(words) == errors.Environment.exit_code
    assert f"{tmp_path / 'file'}: File exists" in capsys.readouterr().err


def test_an_interrupt_is_named_whether_a_verb_raises_or_returns_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    for run in (raises, lambda _: errors.INTERRUPTED):
        monkeypatch.setattr(listing, "run", run)
        assert cli.main(["list"]) == errors.INTERRUPTED
        assert capsys.readouterr().err == "pyharness list: interrupted\n"


# ---- the process ----


def test_a_missing_package_is_named_with_what_to_do() -> None:
    program = "import sys; sys.modules['gguf'] = None; from pyharness.cli import cli; sys.exit(cli.main())"
    done = process("list", program=program)
    assert done.returncode == errors.Environment.exit_code
    assert "no Python package gguf" in done.stderr
    assert commands.packages() in done.stderr
    assert "Traceback" not in done.stderr


def piped(*words: str, stdout: str) -> subprocess.CompletedProcess[str]:
    """The command line with its standard output closed, full, or read by nobody."""
    redirect = {"closed": ">&-", "full": ">/dev/full", "unread": "| true"}[stdout]
    command = f'set -o pipefail; "$0" -m pyharness "$@" {redirect}'
    run = ["bash", "-c", command, sys.executable, *words]
    return subprocess.run(run, stderr=subprocess.PIPE, text=True, cwd=ggml.ROOT, check=False)


@pytest.mark.parametrize(("stdout", "code"), [("closed", 0), ("unread", 0), ("full", 3)])
def test_a_run_whose_output_nobody_takes_still_leaves_its_receipt(tmp_path: Path, stdout: str, code: int) -> None:
    done = piped("oracle", "-b", "CPU", "-o", CASE, "--receipts", str(tmp_path), stdout=stdout)
    assert done.returncode == code, done.stderr
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert "Traceback" not in done.stderr
    assert ("standard output is incomplete: No space left on device" in done.stderr) == (stdout == "full")


def test_a_verdict_that_nobody_reads_is_still_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    assert piped("receipt", "verify", str(tmp_path / "broken.json"), stdout="unread").returncode == 4


def test_text_that_the_terminal_cannot_show_does_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "gr\xfcn.json").write_text("{}")
    done = process("receipt", "verify", str(tmp_path / "gr\xfcn.json"), PYTHONIOENCODING="ascii")
    assert done.returncode == errors.Invalid.exit_code
    assert "INVALID  gr\\xfcn.json" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_run_leaves_a_partial_receipt(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "pyharness", "oracle", "-o", f"{CASE},{LONG}", "--receipts", str(tmp_path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ggml.ROOT) as running:
        assert running.stdout
        assert CASE in running.stdout.readline()
        time.sleep(0.5)
        running.send_signal(number)
        running.communicate(timeout=60)
    assert running.returncode == errors.INTERRUPTED
    (receipt,) = tmp_path.glob("*.json")
    assert '"partial":true' in receipt.read_text()
