"""What SECURITY.md promises of the sources: no shell, no code in data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyharness.base.digest import ROOT

SOURCES = sorted((ROOT / "pyharness").rglob("*.py"))
SCRIPTS = [*sorted((ROOT / "scripts").iterdir()), *sorted((ROOT / "pyharness").rglob("*.sh")), ROOT / ".ci/run"]
MODULES = {"pickle", "marshal", "shelve", "dill", "yaml", "xmlrpc", "code", "codeop"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput", "tempfile.mktemp"}
FLAGS = {"shell", "allow_pickle", "trust_remote_code"}


def found(path: Path) -> Iterator[str]:
    """Imports, calls and arguments that turn data into code or a string into a command line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield f"from {node.module} import"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                yield name
            yield from (f"{name}({word.arg}=)" for word in node.keywords if word.arg in FLAGS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_shell_and_no_code_in_data(path: Path) -> None:
    assert list(found(path)) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_runs_a_string(path: Path) -> None:
    assert not re.search(r"\beval\b|\b(ba|da)?sh -c\b", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run('ls', shell=True)",
        "np.load(file, allow_pickle=True)",
        "import pickle",
        "from yaml import load",
        "os.system(name)",
        "eval(text)",
    ],
)
def test_what_is_promised_away_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(line)
    assert len(list(found(tmp_path / "a.py"))) == 1


LATE = {
    *("data_filter", "tar_filter", "fully_trusted_filter", "extraction_filter"),  # 3.10.12, 3.11.4
    *("get_int_max_str_digits", "set_int_max_str_digits"),  # 3.10.7
}
"""What patch releases of a supported Python added."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_needs_a_patch_release_of_python(path: Path) -> None:
    names = {getattr(node, "attr", "") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))}
    assert not names & LATE


def test_every_proof_that_the_page_names_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "tests/" in line]
    assert len(rows) == 8
    for row in rows:
        for proof in row.split("|")[3].split("tests/")[1:]:
            file, _, names = proof.partition(" ")
            text = (ROOT / "tests" / file.rstrip(", ")).read_text(encoding="utf-8")
            for name in names.strip().strip("(),").replace("`", "").split(", ") if "(" in names else []:
                assert name.strip("() ") in text, f"{file} has no {name}"
