"""A receipt may be named by its id wherever its file may be given, and messages name it so."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyharness import options
from pyharness.base import errors
from pyharness.cli import cli, receipt
from pyharness.perf import perf
from pyharness.receipts import pages

IDS = ("0123456789ab", "0123ffffffff", "89abcdef0123")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of receipts with these ids, one of them signed, and what else may lie there."""
    for id12 in IDS:
        whole = f'{{"id":"{id12}{"0" * 52}"}}'
        (tmp_path / f"20261201T000000Z-oracle-{id12}.json").write_text(whole)
    (tmp_path / f"20261201T000000Z-oracle-{IDS[2]}.dsse.json").write_text("{}")
    (tmp_path / "README.md").write_text(IDS[2])
    monkeypatch.setattr(options, "RECEIPTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["8", "89ab", "89abcdef", IDS[2], IDS[2] + "0" * 20, IDS[2] + "0" * 52])
def test_an_id_names_its_receipt_however_much_of_it_is_given(folder: Path, name: str) -> None:
    assert options.receipt(name) == folder / f"20261201T000000Z-oracle-{IDS[2]}.json"


def test_a_file_is_itself_even_where_an_id_would_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "89ab").write_text("{}")
    for name in ("89ab", str(folder / "README.md"), "nowhere/20261201T000000Z-oracle-89abcdef0123.json"):
        assert options.receipt(name) == Path(name)


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("0123", "receipt 0123 is not unique", f"give more digits: {IDS[0]}, {IDS[1]}"),
        ("89abcdfe", "no receipt 89abcdfe in", "did you mean 89abcdef?"),
        ("eeee", "no receipt eeee in", "receipts/README.md lists their ids"),
        (IDS[2] + "1", f"no receipt {IDS[2]}1 in", ""),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_id_that_names_no_receipt_or_several_is_a_usage_error(name: str, said: str, hint: str) -> None:
    with pytest.raises(errors.Usage) as caught:
        options.receipt(name)
    assert str(caught.value).startswith(said)
    assert hint in caught.value.hint


def arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from arguments(sub)
        else:
            yield action


def test_every_argument_that_is_a_receipt_takes_an_id() -> None:
    parser = cli.Parser()
    receipt.add_arguments(parser)
    perf.add_arguments(parser)
    found = [a for a in arguments(parser) if a.metavar in ("RECEIPT", "OLD", "NEW")]
    assert len(found) == 6  # show, verify, sign, both of diff, perf --base
    assert {a.type for a in found} == {options.receipt}


def test_verify_takes_an_id_and_names_the_receipt_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    path = pages.listed()[0]
    id12 = path.stem.rpartition("-")[2]
    cli.main(["receipt", "verify", "--sources-only", id12[:8]])
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"[A-Z]+  {id12}", verdict)


def test_a_file_without_an_id_in_its_name_keeps_its_name() -> None:
    assert options.label(Path("x/20261201T000000Z-oracle-89abcdef0123.json")) == "89abcdef0123"
    for name in ("gone.json", "20261201T000000Z-oracle-89abcdef0123.dsse.json", "89abcdef0123"):
        assert options.label(Path("x") / name) == name
