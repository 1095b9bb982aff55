"""The patch on trees between the pinned and the oldest: they compile, and get their bytes back."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyharness.base import build, errors
from pyharness.base.digest import ROOT
from pyharness.check import trees
from pyharness.patch import tree
from pyharness.perf import ptxas

OLDEST = "stable-diffusion-cpp-python-0.4.3"
ARCHIVES = [
    pytest.param(name, marks=pytest.mark.xdist_group(name))  # one worker for a tree
    for name in (OLDEST, "llama-cpp-python-0.3.30", "xllamacpp-2026.10.11549")
]


@pytest.fixture(scope="module", params=ARCHIVES)
def unpatched(request: pytest.FixtureRequest) -> Iterator[tuple[tree.Base, Path]]:
    """An archive and its tree; that the patch gave the bytes back is seen when the module is done with it."""
    (pin,) = (pin for pin in trees.listed() if pin.folder == request.param)
    with trees.unpacked(pin) as folder:
        yield pin, folder


@pytest.mark.slow
@pytest.mark.network
def test_a_tree_gets_its_layers_and_compiles(unpatched: tuple[tree.Base, Path]) -> None:
    pin, folder = unpatched
    nvcc, missing = None, ""
    if pin.folder == OLDEST:  # CUDA has changed most since
        try:
            nvcc = ptxas.find_nvcc()
        except errors.Environment as error:
            missing = str(error)
    plan = tree.patch(folder)
    assert plan.layers[:3] == ["operator", "training", "llama"]
    assert trees.compile_(folder, plan, nvcc) == []
    line = trees.markdown([trees.row(pin, folder)]).splitlines()[-1]
    assert line in trees.TABLE.read_text().splitlines()
    assert tree.check(folder)
    if missing:
        pytest.skip(f"{missing}: the files of CUDA were not compiled")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("unpatched", ARCHIVES[:1], indirect=True)
def test_the_operator_runs_in_the_oldest_tree(unpatched: tuple[tree.Base, Path]) -> None:
    folder = ROOT / "build/oldest"
    options = [f"-DGGML_UPSTREAM_DIR={unpatched[1]}", "-DFLASH_ATTN_BACK_LAYER=operator"]
    options += ["-DGGML_CPU_REPACK=OFF", "-DGGML_LLAMAFILE=OFF"]
    for command in (
        ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--target", "test-backend-ops"],
    ):
        done = subprocess.run(command, env=build.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not list((folder / "upstream").rglob("*train*"))  # nor anything else of the layers above
    command = [str(folder / "bin/test-backend-ops"), "-o", "FLASH_ATTN_BACK", "-b", "CPU", "-p", "kv=[0-9]{1,3},"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    passed = re.search(r"(\d+)/\1 tests passed", output)
    assert passed, output[-2000:]
    assert int(passed[1]) > 100


def test_a_file_that_does_not_compile_is_named(tmp_path: Path) -> None:
    readers_tree = {
        "ggml/include/ggml.h": "",
        "ggml/src/ggml.c": "int f(void) { return g(); }\n",
        "src/x.cpp": "int x;\n",
    }
    for name, text in readers_tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    changes = [tree.Change(tmp_path / name, b"", b"") for name in readers_tree]
    (said,) = trees.compile_(tmp_path, tree.Plan(changes, []))
    assert re.match(rf"{tmp_path}/ggml/src/ggml.c does not compile:\n.*implicit declaration of function", said)


def test_the_table_is_of_the_archives_that_are_listed() -> None:
    lines = trees.TABLE.read_text().split("<!-- trees -->\n")[1].split("<!-- /trees -->")[0].splitlines()[2:]
    assert sorted(line.split(" | ")[0].removeprefix("| ") for line in lines) == sorted(
        pin.folder for pin in trees.listed()
    )
