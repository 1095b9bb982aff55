"""The packages of pyharness stand on each other in one direction: the contracts of pyproject.toml."""

from __future__ import annotations

import pytest
from importlinter.cli import lint_imports

from pyharness.base.digest import ROOT


def test_imports_go_down_the_layers_and_never_round(capsys: pytest.CaptureFixture[str]) -> None:
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)
    assert code == 0, capsys.readouterr().out
