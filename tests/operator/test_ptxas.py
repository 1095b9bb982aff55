"""The operator's CUDA code compiles for every architecture and takes the registers and memory that are on record."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyharness.base import errors
from pyharness.perf import ptxas
from pyharness.perf.ptxas import Kernel

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6kernelILi64ELb1EEvPf' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelILi64ELb1EEvPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes stack frame, 512 bytes smem
ptxas info    : Compile time = 22.640 ms
ptxas info    : Compiling entry function '_Z5otherPf' for 'sm_90a'
ptxas info    : Function properties for _Z5otherPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
"""

KERNELS = [Kernel("90a", "kernel<64, true>", 40, 8, 4, 12, 512), Kernel("90a", "other", 255, 0, 0, 0, 0)]


@pytest.fixture(scope="module")
def nvcc() -> Path:
    try:
        return ptxas.find_nvcc()
    except errors.Environment as missing:
        pytest.skip(str(missing))


def test_every_kernel_takes_what_is_on_record(nvcc: Path) -> None:
    compiler, want = ptxas.read()
    if ptxas.version(nvcc) != compiler:
        pytest.skip(f"the record is of nvcc {compiler}, this is {ptxas.version(nvcc)}")
    difference = ptxas.compare(want, ptxas.compile_all(nvcc))
    assert not difference, "\n".join(["run `python -m pyharness.perf.ptxas --write` if this is meant:", *difference])


def test_every_architecture_is_on_record() -> None:
    assert {kernel.arch for kernel in ptxas.read()[1]} == set(ptxas.ARCHS)


def test_the_older_pinned_tree_compiles(nvcc: Path) -> None:
    assert ptxas.compile_all(nvcc, "ggml-python", archs=("90a",))


def test_the_report_of_ptxas_is_read() -> None:
    assert ptxas.parse(REPORT) == KERNELS


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    ptxas.write("13.0.88", KERNELS, tmp_path / "ptxas.csv")
    assert ptxas.read(tmp_path / "ptxas.csv") == ("13.0.88", KERNELS)


def test_a_difference_names_the_kernel_and_both_figures() -> None:
    more = [KERNELS[0]._replace(registers=48), KERNELS[1]]
    assert [line for line in ptxas.compare(KERNELS, more) if line[1:].startswith("90a")] == [
        "-90a,kernel<64, true>,40,8,4,12,512",
        "+90a,kernel<64, true>,48,8,4,12,512",
    ]
    assert ptxas.compare(KERNELS, KERNELS) == []


def test_a_file_that_does_not_compile_is_an_error_with_the_compiler_s_words(nvcc: Path) -> None:
    with pytest.raises(errors.Failure, match="no-such-option"):
        ptxas._output([str(nvcc), "--no-such-option"])


def test_no_nvcc_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    with pytest.raises(errors.Environment, match="no nvcc") as missing:
        ptxas.find_nvcc()
    assert "cuda" in missing.value.hint
