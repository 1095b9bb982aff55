"""What may not be imported after ggml's libraries, whose symbols are global, is imported before them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyharness.base.digest import ROOT
from pyharness.device import ggml

CASE = "FLASH_ATTN_BACK(hsk=16,hsv=16,nh=4,nhkv=2,kv=20,nb=7,type_K=f32,type_V=f32)"
STAND_IN = """
import os
with open("/proc/self/maps") as maps, open(os.environ["HEARD"], "a") as heard:
    heard.write("after\\n" if "libggml" in maps.read() else "before\\n")
raise ImportError("a stand-in")
"""

PERF = "import sys; from pyharness.cli import cli; sys.exit(cli.main(sys.argv[1:]))"
TRAIN = """
import argparse, sys
from pathlib import Path
from pyharness.training import train
train.writing.check_source = lambda _: None
train.execute = lambda *_, **__: sys.exit(0 if "libggml" in Path("/proc/self/maps").read_text() else 1)
args = argparse.Namespace(no_receipt=False, tokens=0, ctx=64, lr=0, warmup=0, out=Path("."), steps=1, recompute=None)
train.demo(args, Path(sys.argv[1]) / "flash-attn-train", Path("model"), Path("text"), {})
"""


def heard(folder: Path, module: str, program: str, *words: str) -> list[str]:
    """Whether a process imports a module before or after it has loaded ggml's libraries, each time that it tries."""
    (folder / f"{module}.py").write_text(STAND_IN)
    variables = {**os.environ, "PYTHONPATH": str(folder), "HEARD": str(folder / "heard")}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (folder / "heard").read_text().split() if (folder / "heard").exists() else []


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["-b", "CPU", "--peer", "torch"], ["before"]),
        (["--peer", "fa3"], ["before"]),
        (["-b", "CPU"], []),
    ],
    ids=["torch", "fa3", "neither"],
)
def test_perf_imports_torch_before_ggml(
    tmp_path: Path, library: ggml.Library, words: list[str], first: list[str]
) -> None:
    times = ["--runs", "3", "--no-cold", "--error", "none", "--ceiling-tflops", "1", "--no-receipt"]
    common = ["perf", "--libs", str(library.directory), *times, "-o", CASE]
    assert heard(tmp_path, "torch", PERF, *common, *words)[:1] == first


def test_ceilings_of_a_gpu_import_torch_before_ggml(tmp_path: Path, library: ggml.Library) -> None:
    times = ["--runs", "3", "--no-cold", "--error", "none", "--no-receipt"]
    assert heard(tmp_path, "torch", PERF, "perf", "--libs", str(library.directory), *times, "-o", CASE)[0] == "before"


def test_train_imports_matplotlib_before_ggml(tmp_path: Path, library: ggml.Library) -> None:
    assert heard(tmp_path, "matplotlib", TRAIN, str(library.directory)) == ["before"]
