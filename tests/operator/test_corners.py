"""Every corner of corners.py against float64, in small workspaces too; on CUDA thrice: plain, captured and replayed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from attention import Operator
from corners import CORNERS, ON_CPU, SHAPES, Draft
from numpy.typing import NDArray

from pyharness.case import reference
from pyharness.case.operands import Inputs
from pyharness.check import oracle
from pyharness.device import ggml

WORKSPACE = "GGML_CUDA_FATTN_BACK_WORKSPACE_MIB"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "corner" not in metafunc.fixturenames:
        return
    on_cpu = metafunc.config.getoption("--device").upper() == "CPU"
    metafunc.parametrize(
        ("corner", "shape", "workspace"),
        [
            pytest.param(name, shape, workspace, id=f"{name}-{shape}" + f"-{workspace}" * (not on_cpu))
            for name, (_, shapes) in CORNERS.items()
            for shape in shapes
            if shape in ON_CPU or not on_cpu
            for workspace in SHAPES[shape][1][: 1 if on_cpu else None]
        ],
    )


@functools.lru_cache(maxsize=2)
def prepared(corner: str, shape: str, on_cpu: bool) -> tuple[Draft, Inputs, dict[str, NDArray[np.float64]]]:
    """A corner's draft, its inputs and all their parts in float64."""
    draft = Draft(corner, shape, on_cpu)
    CORNERS[corner][0](draft)
    given = draft.inputs()
    return draft, given, reference.backward(given)


def thrice(op: Operator, given: Inputs) -> ggml.Result:
    """A run; on CUDA one that is captured as a graph and one of that graph follow, and give the same bits."""
    with op.library.prepare(op.device, given) as session:
        session.compute()
        result = session.result()
        for _ in range(0 if op.on_cpu else 2):
            session.poison()
            session.compute()
            assert session.result().digest == result.digest
    assert not result.guards
    return result


def test_corner(op: Operator, corner: str, shape: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, whole, want = prepared(corner, shape, op.on_cpu)
    arrange = ggml._operands

    def arranged(given: Inputs) -> dict[str, ggml._Operand]:
        operands = arrange(given)
        for name, own in draft.arranged.items():
            operands[name] = ggml._Operand(*own(getattr(given, name)), operands[name].type_name)
        return operands

    monkeypatch.setattr(ggml, "_operands", arranged)
    monkeypatch.setenv(WORKSPACE, str(workspace))
    for changes in draft.runs:
        given = dataclasses.replace(whole, **changes)
        op.take(given)
        keys = slice(given.kv_first, given.kv_first + given.kv_count)
        parts = {part: array[:, :, keys] if part in ("dk", "dv") else array for part, array in want.items()}
        parts = {part: array for part, array in parts.items() if part in (*given.grads, "lse", "d")}
        for found in oracle.compare(given, thrice(op, given), parts).values():
            assert found.passed, (changes, found)
