"""The operator compiles in ggml's HIP backend, which takes the CUDA backend's files, for waves of 32 and 64 lanes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pyharness.base.digest import ROOT
from pyharness.patch import tree
from pyharness.perf import ptxas

# code for the device stops at assembly, which needs no ROCm beside the headers
PASSES = {
    "gfx1100": ["--offload-device-only", "--offload-arch=gfx1100", "-S"],
    "gfx90a": ["--offload-device-only", "--offload-arch=gfx90a", "-S"],
    "host": ["--offload-host-only", "-fsyntax-only"],
}
FLAGS = ["-x", "hip", "-nogpulib", "-std=c++17", "-O3", "-w", "-DNDEBUG", "-D_GNU_SOURCE"]
DEFINES = ["-D__HIP_PLATFORM_AMD__", "-DGGML_USE_HIP", "-DGGML_HIP_GRAPHS", "-DGGML_HIP_NO_VMM"]
SOURCES = [*ptxas.sources(), "ggml-cuda.cu"]

pytestmark = pytest.mark.xdist_group("hip")

Compiled = dict[tuple[str, str], Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """The compiler's run by source and pass; all cores work on them."""
    roots = [Path(root) for root in (os.environ.get("ROCM_PATH"), ROOT / "build/hip/usr", "/opt/rocm") if root]
    root = next((root for root in roots if (root / "include/hip/hip_runtime.h").is_file()), None)
    compilers = (os.environ.get("HIPCXX"), "/opt/rocm/llvm/bin/clang++", "clang++-19")
    compiler = next(filter(None, (shutil.which(name) for name in compilers if name)), None)
    if root is None or compiler is None:
        pytest.skip("no HIP: set HIPCXX to a clang++ and ROCM_PATH to a folder with HIP's include/, or run .ci/run")
    src = tree.ggml_root(tree.ensure()) / "src"
    generated = ROOT / "build/hip-source"  # the same place in every run, for ccache
    generated.mkdir(parents=True, exist_ok=True)
    (generated / "ggml-flash-attn-back-source.h").write_text('#define GGML_FLASH_ATTN_BACK_SOURCE ""\n')
    rocm = [f"--rocm-path={root}", f"-isystem{root}/include"]
    include = [f"-I{src}", f"-I{src.parent / 'include'}", f"-I{generated}", *rocm]
    launcher = [ccache] if (ccache := shutil.which("ccache")) else []
    out = tmp_path_factory.mktemp("hip")

    def run(source: str, target: str) -> subprocess.CompletedProcess[str]:
        command = [*launcher, compiler, *FLAGS, *DEFINES, *include, *PASSES[target]]
        command += [str(src / "ggml-cuda" / source), "-o", str(out / f"{source}.{target}")]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for upstream in pool.map(lambda target: run("clamp.cu", target), PASSES):
            if upstream.returncode != 0:
                pytest.skip(f"{compiler} with the headers of {root} compiles no file of ggml's own:\n{upstream.stderr}")
        pairs = [(source, target) for source in SOURCES for target in PASSES]
        yield {pair: pool.submit(run, *pair) for pair in pairs}
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", PASSES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_file_compiles(compiled: Compiled, source: str, target: str) -> None:
    done = compiled[source, target].result()
    assert done.returncode == 0, done.stderr
