"""Run the oracle on captures: the attention inputs of real models, stored in files.

A file that also holds its framework's gradients (tensors dq, dk, dv, dsinks) is checked against float64 first: if they
differ, scale, mask or layout of the file are not those that made them, and the operator is not to blame.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base import errors
from ..case import capture_file, cases, reference
from ..case.capture_file import Capture
from ..case.cases import Case
from ..receipts import statement
from . import oracle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `replay`."""
    parser.add_argument(
        "captures", nargs="*", metavar="FILE|NAME", help="capture files, or names in tests/data (default: all of those)"
    )
    oracle.add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Checks the captures on the devices that the options name; the exit code.

    Raises errors.Usage for a file that is missing or malformed, before anything runs.
    """
    names = args.captures or sorted(file.stem for file in capture_file.DATA.glob("*.gguf"))
    if not names:
        raise errors.Empty(f"no capture in {capture_file.DATA}", "name a file")
    captures = {name: capture_file.read(capture_file.path(name)) for name in names}
    selected = [_case(name, capture) for name, capture in captures.items()]
    checks = [check for name, capture in captures.items() for check in _checks(name, capture)]
    return oracle.execute(args, selected, checks)


def _case(name: str, capture: Capture) -> Case:
    """A capture as a case, the output given when the file has it."""
    if set(name) & set(",()") or not name.isprintable():  # what is no UTF-8 is not printable either
        raise errors.Usage(
            f"{name!r}: a case string cannot hold this path", "rename it: in UTF-8, without comma and parentheses"
        )
    return Case(capture=name, o=int(capture.inputs.o is not None))


def _checks(name: str, capture: Capture) -> list[dict[str, Any]]:
    """The gradients stored in the file against float64's, as a receipt records them; says so on stderr."""
    about = ", ".join(
        f"{key} {capture.notes[key]}" for key in ("model", "layer", "text", "loss") if key in capture.notes
    )
    print(f"{name}: {about or 'no notes'}", file=sys.stderr)
    limit = cases.limits()["nmse"]
    want = reference.backward(capture.inputs) if capture.gradients else {}
    found = {part: _nmse(stored, want[part]) for part, stored in capture.gradients.items() if part in want}
    agreed = all(error <= limit for error in found.values())
    if found:
        figures = " ".join(f"{part} {error:.1e}" for part, error in found.items())
        verdict = "agree with" if agreed else f"differ (limit {limit:g}) from"
        print(f"{name}: the file's own gradients {verdict} float64: {figures}", file=sys.stderr)
    if not agreed:
        print("  check the file's scale, mask, softcap and order of dimensions (docs/captures.md)", file=sys.stderr)
    return [
        {
            "name": f"{name}: the file's own {part} against float64",
            "found": statement.number(error),
            "limit": statement.number(limit),
            "passed": error <= limit,
        }
        for part, error in found.items()
    ]


def _nmse(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    return float(np.square(got - want).sum() / max(np.square(want).sum(), sys.float_info.min))
