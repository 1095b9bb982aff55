"""The oracle passes what is right and names part and place of what is wrong."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention import attention, case, heads, small
from numpy.typing import NDArray

from pyharness.case import cases, inputs, reference, result
from pyharness.case.cases import Case
from pyharness.check import oracle, report
from pyharness.cli import cli
from pyharness.device import ggml
from pyharness.receipts import statement

Parts = dict[str, NDArray[np.float32]]

SHAPE = "hsk=16,hsv=16,nh=4,nhkv=2,kv=24,nb=20,ns=2,type_K=f32,type_V=f32,sinks=1,kv_first=4,kv_count=20"


class Run:
    """A case that ran on the CPU, its result free to be spoilt."""

    def __init__(self, library: ggml.Library, shape: Case) -> None:
        self.given = inputs.make(shape, 0)
        self.result = copy.deepcopy(library.run(library.device("CPU"), self.given))
        self.result.parts = {part: array.copy() for part, array in self.result.parts.items()}
        self.want = reference.backward(self.given)

    def compare(self) -> dict[str, result.PartResult]:
        return oracle.compare(self.given, self.result, self.want)

    def failed(self) -> set[str]:
        return {name for name, part in self.compare().items() if not part.passed}


@pytest.fixture
def run(library: ggml.Library) -> Run:
    return Run(library, case(SHAPE))


def test_a_right_result_passes_in_every_part(run: Run) -> None:
    parts = run.compare()
    assert set(parts) == set(cases.PARTS)
    for part in parts.values():
        assert part.passed
        assert 0 <= part.nmse < 1e-11
        assert part.worst_head_nmse >= part.nmse


WRONG: dict[str, tuple[str, Callable[[NDArray[np.float32]], object]]] = {
    "scale left out": ("dq", lambda x: np.multiply(x, 4, out=x)),
    "all zeros": ("dq", lambda x: x.fill(0)),
    "sign": ("dsinks", lambda x: np.negative(x, out=x)),
    "one head of one sequence": ("dv", lambda x: x[1, 0].fill(0)),
    "rows of the window shifted by one key": ("dk", lambda x: x.__setitem__(..., np.roll(x, 1, axis=2))),
    "heads of a group swapped": ("lse", lambda x: x.__setitem__(..., x[:, [1, 0, 2, 3]])),
    "queries reversed": ("d", lambda x: x.__setitem__(..., x[..., ::-1].copy())),
    "half a percent off": ("dk", lambda x: np.multiply(x, np.float32(1.005), out=x)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_fails_alone(run: Run, name: str) -> None:
    part, spoil = WRONG[name]
    spoil(run.result.parts[part])
    assert run.failed() == {part}


def test_the_worst_element_is_named_in_logical_coordinates(run: Run) -> None:
    run.result.parts["dk"][1, 0, 3, 5] += 100
    part = run.compare()["dk"]
    assert not part.passed
    assert part.worst_index == (1, 0, 7, 5)  # the window starts at key 4
    assert part.worst_row == (1, 0, 7)
    assert part.worst_head == (1, 0)
    assert part.got == pytest.approx(part.want + 100)
    assert part.place() == "s=1, g=0, j=7, c=5"


def test_a_head_that_is_small_is_not_hidden_by_the_others(library: ggml.Library) -> None:
    q, k, v, d = np.random.default_rng(0).standard_normal((4, 1, 2, 8, 16))
    given = attention(q, k, v, d)
    given.d[:, :, 0] *= 1e-4
    result = library.run(library.device("CPU"), given)
    result.parts = {part: array.copy() for part, array in result.parts.items()}
    result.parts["dq"][0, 0] = 0
    part = oracle.compare(given, result, reference.backward(given))["dq"]
    assert part.nmse < 1e-5
    assert (part.passed, part.worst_head) == (False, (0, 0))
    assert part.worst_index[:2] == (0, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", cases.PARTS)
def test_what_is_not_finite_never_passes(run: Run, part: str, value: float) -> None:
    run.result.parts[part].flat[1] = value
    found = run.compare()[part]
    assert (found.passed, found.why) == (False, "not finite")
    assert found.nmse == np.inf


def test_an_element_that_was_not_written_fails_whatever_it_holds(run: Run) -> None:
    run.result.unwritten["dv"] = 1
    assert run.compare()["dv"].why == "1 elements not written"


def test_the_lse_of_a_row_without_keys_must_be_minus_infinity(library: ggml.Library) -> None:
    run = Run(library, small(mask="rows"))
    assert not run.failed()
    run.result.parts["lse"][:, :, 0] = -1e30
    assert run.compare()["lse"].why == "not infinite where no key counts"


@pytest.mark.parametrize(
    ("shape", "part", "index"),
    [
        (small(mask="pad"), "dk", (0, 1, 17, 3)),
        (small(mask="pad"), "dv", (0, 0, 19, 0)),
        (small(mask="rows"), "dq", (0, 2, 0, 9)),
        (small(mask="rows"), "d", (0, 3, 0)),
        (small(data="zero"), "dq", (0, 0, 4, 1)),
        (small(data="zero", sinks=1), "dsinks", (2,)),
    ],
)
def test_what_must_be_exactly_zero_fails_when_it_is_nearly_so(
    library: ggml.Library, shape: Case, part: str, index: tuple[int, ...]
) -> None:
    run = Run(library, shape)
    assert not run.failed()
    run.result.parts[part][index] = 1e-30
    found = run.compare()[part]
    assert (found.passed, found.why, found.worst_index) == (False, "not exactly 0", index)


@pytest.mark.parametrize("path", ["cpu", "rows", "mma", "hopper"])
@pytest.mark.parametrize("part", cases.PARTS)
def test_a_part_that_is_off_by_a_thousandth_fails_where_f32_computes(run: Run, part: str, path: str) -> None:
    run.result.path = path
    run.result.parts[part] *= np.float32(1.001)
    assert run.failed() == ({part} if path in ("cpu", "rows") else set())


@pytest.mark.parametrize(("path", "right", "wrong"), [("cpu", 2e-7, 2e-6), ("rows", 2e-7, 2e-6), ("mma", 1e-6, 1e-4)])
def test_a_gradient_that_cancels_is_measured_against_its_operands(
    library: ggml.Library, path: str, right: float, wrong: float
) -> None:
    given = attention(heads([[3], [2]]), heads([[5], [1]]), heads([[7], [2]]), heads([[11], [4]]))
    result = library.run(library.device("CPU"), given)
    result.parts = {part: array.copy() for part, array in result.parts.items()}
    want = reference.backward(given)
    size = 5 * 7 * 11  # k * v * dO
    result.path = path
    for error, passes in ((right, True), (wrong, False)):
        result.parts["dq"][0, 0, 0, 0] = size * error
        assert oracle.compare(given, result, want)["dq"].passed == passes


def test_units_beyond_fp16_follow_the_path() -> None:
    plain = result.CaseResult(case("hsk=64,hsv=64,nh=2,nhkv=2,kv=64,nb=64"), "CUDA0", 0, "ok", path="mma")
    assert plain.path_and_units() == "mma"
    units = {"halves": 2, "f32": 1}
    hard = dataclasses.replace(plain, units=units)
    assert hard.path_and_units() == "mma, 2 halves, 1 f32"
    assert statement.case_record(hard)["units"] == units
    assert "units" not in statement.case_record(plain)


def test_a_case_that_fails_says_how_to_see_it_again(library: ggml.Library, cpu: ggml.Device) -> None:
    shape = case(SHAPE)
    found = oracle.check(library, cpu, shape, 7, limits={"nmse": 1e-30, "zero": 1e-10})
    assert found.status == "failed"
    assert found.reason.startswith("dq: NMSE")
    text = report.failure(found, 7)
    for expected in ("dq: NMSE ", "limit 1e-30", "worst at (s=", "got ", "want ", f"seed {shape.seed(7)} (--seed 7)"):
        assert expected in text
    assert f" -m pyharness oracle -b CPU --seed 7 -o '{shape}'" in text


def test_a_case_that_is_refused_is_unsupported_with_the_reason(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "refusal", lambda *_: "the moon is full")
    found = oracle.check(library, cpu, small(), 0)
    assert (found.status, found.reason) == ("unsupported", "the moon is full")


def test_overwritten_guard_words_fail_the_case(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ggml.Session.result

    def overwritten(session: ggml.Session) -> ggml.Result:
        result = whole(session)
        result.guards = ["k"]
        return result

    monkeypatch.setattr(ggml.Session, "result", overwritten)
    assert oracle.check(library, cpu, small(), 0).reason == "guard words of k overwritten"


@pytest.mark.parametrize(
    ("states", "strict", "code"),
    [
        (["ok"], False, 0),
        (["ok", "failed"], False, 1),
        (["ok", "unsupported"], False, 0),
        (["ok", "unsupported"], True, 1),
        (["ok", "skipped"], True, 1),
        (["unsupported"], False, 3),
    ],
)
def test_exit_code(states: list[str], strict: bool, code: int) -> None:
    results = [result.CaseResult(small(), "CPU", 0, state) for state in states]
    assert oracle.exit_code(results, strict) == code


@pytest.mark.parametrize("text", [str(c) for c in cases.random_cases(60, 20)])
def test_random_cases_pass(library: ggml.Library, cpu: ggml.Device, text: str) -> None:
    found = oracle.check(library, cpu, Case.parse(text), 0)
    assert found.status == "ok", report.failure(found, 0)


def test_a_run_stops_at_the_first_failure_and_the_next_repeats_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: ggml.Library
) -> None:
    listed = [str(small(kv=kv)) for kv in (20, 21, 22)]
    common = ["--libs", str(library.directory), "-b", "CPU", "--no-monitor", "--receipts", str(tmp_path)]
    words = ["oracle", "-o", ",".join(listed), *common]

    def states(*more: str) -> dict[str, str]:
        before = set(tmp_path.iterdir())
        cli.main([*words, *more])
        (path,) = set(tmp_path.iterdir()) - before
        records = statement.read(path)["predicate"]["receipt"]["cases"]
        return {record["case"]: record["status"] for record in records}

    check = oracle.check

    def fails(library: ggml.Library, device: ggml.Device, case: Case, *more: Any) -> result.CaseResult:
        found = check(library, device, case, *more)
        return found if str(case) == listed[0] else dataclasses.replace(found, status="failed", reason="so")

    monkeypatch.setattr(oracle, "check", fails)
    assert states("--lf", "-x") == {listed[0]: "ok", listed[1]: "failed"}
    monkeypatch.undo()
    assert states("--lf") == {listed[1]: "ok"}
    assert states("--lf") == dict.fromkeys(listed, "ok")
