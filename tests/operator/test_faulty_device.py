"""A device without memory and one that fails in the middle of a run: right, or an end in words. For GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from squeeze import squeezed

from pyharness.base.digest import ROOT
from pyharness.case.cases import Case
from pyharness.device import ggml
from pyharness.receipts import statement

SQUEEZED = (
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=32,nhkv=8,kv=4096,nb=4096)",
    "FLASH_ATTN_BACK(hsk=80,hsv=80,nh=16,nhkv=4,kv=4096,nb=2048)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=6,nhkv=1,kv=32768,nb=64,type_K=q8_0,type_V=q8_0)",
    "FLASH_ATTN_BACK(hsk=576,hsv=512,nh=16,nhkv=1,kv=4096,nb=256,vview=1)",
)
BROKEN = ",".join(f"FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nhkv=2,kv={keys},nb=70)" for keys in (80, 81, 82))

WILD = """
import itertools, sys
from pyharness.cli import cli
from pyharness.device import ggml
compute, runs = ggml.Session.compute, itertools.count()
def wild(session):
    if next(runs) == 1:
        session.sources["q"].data = session.library.ffi.cast("void *", 1 << 20)
    return compute(session)
ggml.Session.compute = wild
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def gpu(device: ggml.Device) -> ggml.Device:
    if not device.name.startswith("CUDA"):
        pytest.skip(f"{device.name} has no memory of its own")
    return device


@pytest.mark.parametrize("share", [0.9, 0.5, 0.25, 0.06, 0.0])
@pytest.mark.parametrize("text", SQUEEZED)
def test_with_little_memory_a_result_is_right_or_the_graph_fails_in_words(
    library: ggml.Library, gpu: ggml.Device, text: str, share: float
) -> None:
    case = Case.parse(text)
    assert library.refusal(gpu, case) is None
    right, words = squeezed(library, gpu, case, share)
    assert right, words


def test_a_wild_address_in_the_second_case_ends_in_words_and_a_partial_receipt(
    library: ggml.Library, gpu: ggml.Device, tmp_path: Path
) -> None:
    words = ["-b", gpu.name, "-o", BROKEN, "--receipts", str(tmp_path), "--no-monitor"]
    words += ["--libs", str(library.directory)]
    command = [sys.executable, "-c", WILD, "oracle", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "error" in (done.stdout + done.stderr).lower()
    (path,) = tmp_path.glob("*.json")
    body = statement.read(path)["predicate"]["receipt"]
    assert body["partial"] is True
    assert [record["status"] for record in body["cases"]] == ["ok", "failed"]
