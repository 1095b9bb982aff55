"""The operator compiles in ggml's HIP backend, which takes the CUDA backend's files, for waves of 32 and 64 lanes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pyharness import ptxas, tree
from pyharness.digest import ROOT

# code for the device stops at assembly, which needs no ROCm beside the headers
PASSES = {
    "gfx1100": ["--offload-device-only", "--offload-arch=gfx1100", "-S", "-o", "/dev/null"],
    "gfx90a": ["--offload-device-only", "--offload-arch=gfx90a", "-S", "-o", "/dev/null"],
    "host": ["--offload-host-only", "-fsyntax-only"],
}
FLAGS = ["-x", "hip", "-nogpulib", "-std=c++17", "-O3", "-w", "-DNDEBUG", "-D_GNU_SOURCE"]
DEFINES = ["-D__HIP_PLATFORM_AMD__", "-DGGML_USE_HIP", "-DGGML_HIP_GRAPHS", "-DGGML_HIP_NO_VMM"]

Compile = Callable[[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def compile_file(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    roots = [Path(root) for root in (os.environ.get("ROCM_PATH"), ROOT / "build/hip/usr", "/opt/rocm") if root]
    root = next((root for root in roots if (root / "include/hip/hip_runtime.h").is_file()), None)
    compilers = (os.environ.get("HIPCXX"), "/opt/rocm/llvm/bin/clang++", "clang++-19")
    compiler = next(filter(None, (shutil.which(name) for name in compilers if name)), None)
    if root is None or compiler is None:
        pytest.skip("no HIP: set HIPCXX to a clang++ and ROCM_PATH to a folder with HIP's include/, or run .ci/run")
    src = tree.ggml_root(tree.ensure()) / "src"
    generated = tmp_path_factory.mktemp("hip")
    (generated / "ggml-flash-attn-back-source.h").write_text('#define GGML_FLASH_ATTN_BACK_SOURCE ""\n')
    rocm = [f"--rocm-path={root}", f"-isystem{root}/include"]
    include = [f"-I{src}", f"-I{src.parent / 'include'}", f"-I{generated}", *rocm]

    def run(source: str, target: str) -> subprocess.CompletedProcess[str]:
        command = [compiler, *FLAGS, *DEFINES, *include, *PASSES[target], str(src / "ggml-cuda" / source)]
        return subprocess.run(command, capture_output=True, text=True)

    for target in PASSES:
        upstream = run("clamp.cu", target)
        if upstream.returncode != 0:
            pytest.skip(f"{compiler} with the headers of {root} compiles no file of ggml's own:\n{upstream.stderr}")
    return run


@pytest.mark.parametrize("target", PASSES)
@pytest.mark.parametrize("source", [*ptxas.sources(), "ggml-cuda.cu"])
def test_a_file_compiles(compile_file: Compile, source: str, target: str) -> None:
    done = compile_file(source, target)
    assert done.returncode == 0, done.stderr
