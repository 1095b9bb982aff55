"""Commands that messages print can be pasted: in any folder, whatever the checkout is called."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyharness.base import build, commands, errors
from pyharness.case.cases import Case
from pyharness.case.result import CaseResult
from pyharness.check import report
from pyharness.cli import cli, doctor
from pyharness.device import ggml

CASE = "FLASH_ATTN_BACK(hsk=16,hsv=16,nh=4,nhkv=2,kv=20,nb=7)"


def paste(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a shell in a folder makes of a command."""
    environment = os.environ | variables
    return subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose path needs quotes, with a cmake of its own that says where and how it was called."""
    root = tmp_path / "my checkout's folder"
    program(root / ".venv/bin/cmake", 'echo "$PWD: $*"')
    monkeypatch.setattr(commands, "ROOT", root)
    monkeypatch.setattr(commands, "VENV", root / ".venv")
    return root


def test_a_build_runs_in_the_checkout_with_its_cmake(checkout: Path, tmp_path: Path) -> None:
    done = paste(commands.build("cuda") + "; pwd", tmp_path)
    assert done.stdout.splitlines() == [
        f"{checkout}: --preset cuda",
        f"{checkout}: --build build/cuda --target ggml",
        str(tmp_path),
    ]


def test_libraries_are_built_again_by_the_preset_that_built_them(checkout: Path) -> None:
    assert commands.rebuild(checkout / "build/cuda-sm90a/bin") == commands.build("cuda-sm90a")
    assert commands.rebuild(Path("/opt/ggml/lib")) == commands.script("oracle")


def test_a_script_is_found_from_every_folder(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(checkout / "scripts/oracle", "echo here")
    for folder in (checkout, tmp_path):
        monkeypatch.chdir(folder)
        assert paste(commands.script("oracle"), folder).stdout == "here\n"
    assert commands.script("oracle").startswith("'/")
    monkeypatch.chdir(checkout)
    assert commands.script("oracle") == "./scripts/oracle"


def test_python_is_the_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    assert commands.python() == "python"
    program(tmp_path / "other/python", "")
    monkeypatch.setenv("PATH", str(tmp_path / "other"), prepend=os.pathsep)
    assert shlex.split(commands.python()) == [sys.executable]
    monkeypatch.setattr(sys, "executable", "/with space/python")
    assert shlex.split(commands.python()) == ["/with space/python"]


def test_packages_come_from_the_environment_that_is_there(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "PYTHON", checkout / ".venv/bin/python")
    assert commands.packages() == commands.script("oracle")  # which makes one
    program(checkout / ".venv/bin/python", "")
    program(checkout / ".venv/bin/activate", "echo active")
    assert paste(commands.packages(), tmp_path).stdout == "active\n"
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    assert commands.packages() == build.pip()


def test_a_failure_can_be_pasted_outside_the_checkout(tmp_path: Path) -> None:
    line = report.replay(Case.parse(CASE), "CPU", 3, "list").replace(" -b CPU", "")
    assert paste(line, tmp_path).stdout == f"{CASE}\n"
    failed = CaseResult(Case.parse(CASE), "CPU", 0, "failed", "why")
    assert report.replay(failed.case, "CPU", 3) in report.failure(failed, 3)


@pytest.mark.usefixtures("library")
def test_doctor_prints_commands_that_a_shell_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(doctor, "presets", list)
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/{name}")
    monkeypatch.setattr(ggml.Library, "source", "0" * 64)
    assert cli.main(["doctor", "-b", "CPU"]) == errors.Environment.exit_code
    lines = capsys.readouterr().out.splitlines()
    said = {line: after.strip() for line, after in itertools.pairwise(lines)}
    pips = [command for line, command in said.items() if line.startswith("missing") and "CUDA" not in line]
    assert len(pips) == len(doctor.OPTIONAL)
    for command in pips:
        python, *words = shlex.split(command)
        assert python == sys.executable
        assert words[:4] == ["-m", "pip", "install", "-e"]
        assert Path(words[4].partition("[")[0]) == build.ROOT
    assert said["missing   a CUDA build: the CUDA backend"] == commands.build("cuda")
    again = next(command for line, command in said.items() if "not the tree's; build again:" in line)
    assert again == commands.build("cpu")


def literals(module: Path) -> list[str]:
    """The text of a module's messages: its strings without the docstrings."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docs
    ]


def test_no_message_writes_a_command_of_its_own() -> None:
    """What sets up, builds or installs comes from commands.py and build.py, which know paths and quote them."""
    shared = {"commands.py", "build.py", "tree.py"}  # tree.py runs where these have set nothing up
    for module in sorted((ggml.ROOT / "pyharness").rglob("*.py")):
        if module.name not in shared:
            bare = [
                text
                for text in literals(module)
                for word in ("./scripts/", "pip install", "cmake --preset")
                if word in text
            ]
            assert not bare, module.name
