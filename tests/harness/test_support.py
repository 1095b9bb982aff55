from __future__ import annotations

import csv
import io
import json

import pytest
from attention import case

from pyharness.case import cases
from pyharness.check import support
from pyharness.cli import cli
from pyharness.device import ggml

pytestmark = pytest.mark.usefixtures("library")


def test_the_cpu_takes_every_listed_case(library: ggml.Library, cpu: ggml.Device) -> None:
    refused = [row for row in (support.query(library, cpu, c) for c in cases.load(cases.CASES)) if not row[2]]
    assert not refused


def test_every_answer_is_a_path_or_a_reason(library: ggml.Library, cpu: ggml.Device) -> None:
    for shape in cases.random_cases(1000, 1):
        _, _, path, reason = support.query(library, cpu, shape)
        assert bool(path) != bool(reason), shape


def test_the_matrix_has_a_row_for_each_type(library: ggml.Library, cpu: ggml.Device) -> None:
    lines = support.matrix(library, cpu).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(cases.TYPES)
    assert lines[2].count("cpu") == len(support.HEAD_SIZES)
    assert lines[-1].split("|")[3].strip() == ""  # mxfp4 has no head size 40


def test_a_refusal_is_shown_with_its_reason(
    library: ggml.Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "refusal", lambda *_: "no such kernel")
    text = str(case("hsk=64,hsv=64,nh=4,nhkv=2,kv=128,nb=32"))
    assert cli.main(["support", "-o", text]) == 0
    assert f"{text}: no such kernel" in capsys.readouterr().out
    assert cli.main(["support", "-o", text, "--strict"]) == 1


def test_csv_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "-p", "hsk=96", "--output", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert cli.main(["support", "-p", "hsk=96", "--output", "json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in rows] == [entry["case"] for entry in entries]
    assert {row["supported"] for row in rows} == {"1"}
    assert {entry["path"] for entry in entries} == {"cpu"}
