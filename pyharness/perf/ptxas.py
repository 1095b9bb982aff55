"""What the operator's CUDA kernels take of a multiprocessor, as ptxas reports it, held in docs/ptxas.csv.

`python -m pyharness.perf.ptxas` compiles the operator's CUDA files for every architecture of ARCHS, prints what differs
from the file and exits 1 on a difference; with --write it writes the file anew.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pyharness.base import build, digest, errors
from pyharness.base.digest import ROOT
from pyharness.patch import tree

ARCHS = ("80", "89", "90a", "120a")
REPORT = ROOT / "docs/ptxas.csv"
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-use_fast_math",
    "-extended-lambda",
    "-D_GNU_SOURCE",
    "-DGGML_CUDA_USE_GRAPHS",
    "-Xcompiler=-fPIC,-w",
    "-w",
]


class Kernel(NamedTuple):
    """One kernel instance on one architecture; sizes in bytes, smem without what a launch adds."""

    arch: str
    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem: int


def find_nvcc() -> Path:
    """The CUDA compiler: $CUDACXX, on the PATH, below $CUDA_HOME or /usr/local/cuda, or PyPI's. errors.Environment."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    candidates += [f"{home}/bin/nvcc" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    candidates += [f"{folder}/nvidia/cu13/bin/nvcc" for folder in sys.path]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    raise errors.Environment("no nvcc", f"install the CUDA toolkit, or set CUDACXX, or {build.pip('cuda')}")


def version(nvcc: Path) -> str:
    """The compiler's version, as in V13.0.88."""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", _output([str(nvcc), "--version"]))
    if not found:
        raise errors.Environment(f"{nvcc} --version names no version")
    return found[1]


def sources() -> list[str]:
    """The operator's CUDA files."""
    return [Path(path).name for path in digest.sources() if path.startswith("src/ggml-cuda/") and path.endswith(".cu")]


def compile_all(nvcc: Path, base: str | None = None, archs: Sequence[str] = ARCHS) -> list[Kernel]:
    """Compiles the operator and the file with its hooks in a pinned tree; the kernels, sorted. errors.Failure."""
    src = tree.ggml_root(tree.ensure(base)) / "src"
    generated = ROOT / "build/ptxas"
    generated.mkdir(parents=True, exist_ok=True)
    header = generated / "ggml-flash-attn-back-source.h"
    header.write_text(f'#define GGML_FLASH_ATTN_BACK_SOURCE "{digest.patch_digest()}"\n')
    flags = [*_FLAGS, f"-I{src}", f"-I{src.parent / 'include'}", f"-I{generated}", "-Xptxas=-v", "-c"]
    launcher = [ccache] if (ccache := shutil.which("ccache")) else []

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_one(source: str, arch: str) -> str:
            target = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", f"{folder}/{source}.{arch}.o"]
            return _output([*launcher, str(nvcc), *flags, *target, str(src / "ggml-cuda" / source)])

        hooks = pool.submit(compile_one, "ggml-cuda.cu", archs[0])  # calls the operator and has no kernel of it
        jobs = [pool.submit(compile_one, source, arch) for arch in archs for source in sources()]
        try:
            hooks.result()
            return sorted(kernel for job in jobs for kernel in parse(job.result()))
        except errors.Failure:
            pool.shutdown(cancel_futures=True)
            raise


def parse(report: str) -> list[Kernel]:
    """The kernels of `ptxas -v`, their names demangled and without parameters."""
    found = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        report,
        re.DOTALL,
    )
    names = _output(["c++filt", "-p"], "\n".join(match[0] for match in found)).splitlines()
    kernels = []
    for name, (_, arch, stack, stores, loads, registers, rest) in zip(names, found, strict=True):
        smem = re.search(r"(\d+) bytes smem", rest)
        numbers = map(int, (registers, stack, stores, loads, smem[1] if smem else 0))
        kernels.append(Kernel(arch, name, *numbers))
    return kernels


def read(path: Path = REPORT) -> tuple[str, list[Kernel]]:
    """The compiler's version and the kernels that a report holds."""
    with path.open(newline="") as file:
        first, *rows = csv.reader(file)
    return first[0].removeprefix("nvcc "), [Kernel(arch, name, *map(int, rest)) for arch, name, *rest in rows[1:]]


def write(compiler: str, kernels: Iterable[Kernel], path: Path = REPORT) -> None:
    """Writes a report."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([[f"nvcc {compiler}"], Kernel._fields, *kernels])


def compare(want: list[Kernel], got: list[Kernel]) -> list[str]:
    """The lines of a diff from one report to another, none when they are the same."""
    old, new = ([",".join(map(str, kernel)) for kernel in kernels] for kernels in (want, got))
    return list(difflib.unified_diff(old, new, "docs/ptxas.csv", "this build", n=0, lineterm=""))


def _output(command: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise errors.Environment(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise errors.Failure(f"{' '.join(command)} failed (exit {done.returncode}):\n{done.stdout}")
    return done.stdout


def main(argv: list[str] | None = None) -> int:
    """Compare the operator's kernels with the report, or write the report."""
    parser = argparse.ArgumentParser(prog="python -m pyharness.perf.ptxas", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    try:
        nvcc = find_nvcc()
        kernels = compile_all(nvcc)
    except errors.Failure as failure:
        print(f"pyharness.perf.ptxas: {failure}", *filter(None, [failure.hint]), sep="\n  ", file=sys.stderr)
        return failure.exit_code
    if args.write:
        write(version(nvcc), kernels)
        return 0
    difference = compare(read()[1], kernels)
    print("\n".join(difference) or f"{len(kernels)} kernels as in {REPORT.relative_to(ROOT)}")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
