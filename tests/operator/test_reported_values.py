"""Publicly reported failures whose kind is in the numbers, against float64."""

from __future__ import annotations

import pytest
from attention import Operator
from reports import REPORTS, SLOW, draft

from pyharness.case import reference
from pyharness.check import oracle


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in REPORTS])
def test_report(op: Operator, name: str) -> None:
    given = draft(name).inputs()
    op.take(given)
    result = op.library.run(op.device, given)
    assert not result.guards
    failed = [x for x in oracle.compare(given, result, reference.backward(given)).values() if not x.passed]
    assert not failed
