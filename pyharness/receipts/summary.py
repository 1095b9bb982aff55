"""gpu-check's summary.json: a receipt of mode `gpucheck` with the state and the figures of each step.

The steps run in processes of their own, so the libraries are those of the folder, which this process does not load.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import errors
from ..base.digest import ROOT
from ..device.folder import Folder
from . import commits, statement

FILE = "summary.json"
MODE = "gpucheck"


class Summary:
    """Writes a check's summary.json, a whole receipt after each step."""

    def __init__(self, directory: Path, libs: Path, device: str, seed: int, asked: Sequence[str]) -> None:
        """`libs`: the folder of the libraries; `asked`: the steps that are to run.

        Says on stderr when the receipts will be DIRTY; errors.Environment for a carried commit that is not proved."""
        self._directory, self._libs, self._seed, self._asked = directory, Folder(libs, device), seed, list(asked)
        self._started, self._before = time.time(), set(directory.glob("*-*.json"))
        commits.read(ROOT)
        found = commits.revision(ROOT, [f["path"] for f in statement.inputs(MODE)])
        if found and found["dirty"]:
            differ = f"{len(found['dirty']['paths'])} paths differ from commit {found['commit'][:12]}"
            print(f"note: DIRTY, and so its receipts: {differ} (docs/receipts.md, On a GPU machine)", file=sys.stderr)

    def write(self, steps: Mapping[str, Mapping[str, Any]], code: int, root: Path = ROOT) -> statement.Document:
        """Write what the steps so far found and the exit code that they give; returns the document."""
        left = [step for step in self._asked if step not in steps]
        made = sorted(path.name for path in set(self._directory.glob("*-*.json")) - self._before)
        document = statement.build(
            MODE,
            self._libs,
            [],
            seed=self._seed,
            partial=bool(left),
            started=self._started,
            finished=time.time(),
            case_files=[],
            exit_code=code or (errors.INTERRUPTED if left else 0),
            check={"asked": self._asked, "steps": _plain(steps, root), "receipts": made},
            root=root,
        )
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        statement.replace(self._directory / FILE, text.encode())
        return document


def _plain(value: Any, root: Path) -> Any:
    """Measured numbers as a receipt has them, no folder of the machine."""
    if isinstance(value, float):
        return statement.number(value)
    if isinstance(value, str):
        return value.replace(f"{root}/", "")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, root) for key, item in value.items()}
    return [_plain(item, root) for item in value] if isinstance(value, list | tuple) else value
