"""Mutants are found where they should be, the library that holds them all runs the one it is told to."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import mutate
import pytest

CODE = b"""
constexpr int WIDTH = 4;
static int sum(const int * x, int n, int k) {
    int total = 0;
    for (int i = 0; i < n; ++i) {
        total += x[i] - k; // of k
    }
    if (total == 7) {
        return -1;
    }
    total = total > 9 ? 9 : total;
    return total;
}
extern "C" int probe() {
    const int x[WIDTH] = { 1, 2, 3, 4 };
    return sum(x, 3, 1) + 100 * sum(x, 4, -3) + 10000 * sum(x, 2, -2);
}
"""


def texts(source: mutate.Source) -> set[tuple[str, str]]:
    """What stands in the source and what its mutants put there."""
    return {(source.text(mutant.start, mutant.end), mutant.text) for mutant in source.found}


def test_mutants_of_cpp() -> None:
    found = texts(mutate.of_cpp(CODE))
    for mutant in (
        ("x[i] - k", "x[i] + k"),
        ("x[i] - k", "k - x[i]"),
        ("i", "(i) + 1"),
        ("i", "(i) - 1"),
        ("i < n", "i <= n"),
        ("i < n", "i >= n"),
        ("n", "m"),
        ("total += x[i] - k", "total -= x[i] - k"),
        ("total += x[i] - k;", ""),
        ("total == 7", "true"),
        ("total > 9 ? 9 : total", "total > 9 ? total : 9"),
        ("100", "(100 - 1)"),
        ("-1", "1"),
        ("sum(x, 3, 1)", "sum(x, 1, 3)"),
    ):
        assert mutant in found, mutant
    assert not [mutant for mutant in found if "WIDTH" in mutant[0] or "++i" in mutant[0]]


def test_every_mutant_of_a_library_runs_when_its_turn_comes(tmp_path: Path) -> None:
    source = mutate.of_cpp(CODE)
    mutants = mutate.compile_schema(source, ["c++", "-fPIC"], tmp_path / "code.o")
    assert not [mutant for mutant in mutants if mutant.text == "m"]  # there is no m
    subprocess.run(["c++", "-shared", "-o", tmp_path / "code.so", tmp_path / "code.o"], check=True)
    library = ctypes.CDLL(str(tmp_path / "code.so"))
    turn = ctypes.c_int.in_dll(library, "flash_attn_back_mutant")

    def probe(number: int) -> str:
        turn.value = number
        return "" if library.probe() == -9097 else "probe"

    assert not probe(0)
    outcomes = list(mutate.attempts(range(1, len(mutants) + 1), probe, 4))
    assert len(outcomes) == len(mutants) > 40
    lived = {mutants[outcome.number - 1].text for outcome in outcomes if not outcome.by}
    assert "total >= 9" in lived  # the same
    assert not lived & {"x[i] + k", "k - x[i]", "(i) + 1", "i <= n", "total > 9 ? total : 9", "sum(x, 1, 3)", "true"}


def test_mutants_of_python() -> None:
    source = mutate.of_python(b'def f(k: int) -> int:\n    """2"""\n    k -= 1\n    return g(k, 2) if k < 3 else -k\n')
    assert texts(source) == {
        ("k -= 1", "k += 1"),
        ("k -= 1", ""),
        ("k", "v"),
        ("k", "q"),
        ("1", "(1 + 1)"),
        ("1", "(1 - 1)"),
        ("return g(k, 2) if k < 3 else -k", ""),
        ("g(k, 2) if k < 3 else -k", "(-k) if k < 3 else (g(k, 2))"),
        ("g(k, 2)", "g(2, k)"),
        ("2", "(2 + 1)"),
        ("2", "(2 - 1)"),
        ("k < 3", "(k) <= (3)"),
        ("k < 3", "(k) >= (3)"),
        ("3", "(3 + 1)"),
        ("3", "(3 - 1)"),
        ("-k", "(k)"),
    }


def test_a_rule_excludes_mutants_by_function_line_and_text() -> None:
    rules = [mutate.Rule("a bound", function="f", line="limit", text="<=")]
    code = b"bool %b(int limit, int x) {\n    return x < limit;\n}\n"
    source = mutate.of_cpp(code % b"f" + code % b"g", rules)
    assert source.excluded == {"a bound": 1}
    assert [source.line(mutant)[0] for mutant in source.found if "<=" in mutant.text] == [5]


@pytest.mark.parametrize(
    ("end", "by"),
    [("os.abort()", "SIGABRT"), ("os._exit(3)", "exit"), ("1 / 0", "exit"), ("while True: pass", "no end"), ("", "")],
)
def test_what_ends_a_mutant_is_told(end: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "SECONDS", 1)

    def tests(_: int) -> str:
        exec(end, {"os": os})
        return ""

    (outcome,) = mutate.attempts([5], tests, 1)
    assert (outcome.number, outcome.by) == (5, by)
