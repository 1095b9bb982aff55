"""The operator as Windows has it: sources that MSVC takes, a cross build, and its programs under Wine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyharness.base import build, digest, system
from pyharness.base.build import ROOT
from pyharness.patch import tree

CASES = r"hsk=64,hsv=64,nh=4,nhkv=2,|type_K=q8_0.*kv_first|capture="
"""Cases that take seconds on emulated Windows and a processor of which ggml assumes nothing."""

pytestmark = pytest.mark.xdist_group("windows")


# ---- the sources ----


@pytest.mark.parametrize("path", [path for path in digest.sources() if path.endswith((".c", ".cpp"))])
def test_sources_keep_to_what_every_compiler_takes(path: str, tmp_path: Path) -> None:
    if not (clang := shutil.which("clang")):
        pytest.skip("no clang, whose warnings name the extensions")
    root = tree.ensure()
    ggml = tree.ggml_root(root)
    source = (root if path.startswith("tests/") else ggml) / path
    (tmp_path / "ggml-flash-attn-back-source.h").write_text('#define GGML_FLASH_ATTN_BACK_SOURCE ""\n')
    folders = [tmp_path, ggml / "include", ggml / "src", ggml / "src/ggml-cpu", root / "tests"]
    standard = "c11" if path.endswith(".c") else "c++17"
    command = [clang, "-fsyntax-only", f"-std={standard}", "-Wpedantic", "-Wgnu", "-Wvla"]
    done = subprocess.run([*command, *(f"-I{folder}" for folder in folders), source], capture_output=True, text=True)
    ours = {Path(name).name for name in digest.sources()}
    found = re.findall(r"^(\S+?):\d+:\d+: (?:warning|error): .*", done.stderr, re.MULTILINE)
    assert not [name for name in found if Path(name).name in ours], done.stderr
    assert done.returncode == 0, done.stderr


# ---- a cross build ----


@pytest.fixture(scope="module")
def built() -> Path:
    compiler = "x86_64-w64-mingw32-g++-posix"
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} (Debian: apt install g++-mingw-w64-x86-64-posix)")
    return build.build("mingw", "ggml", "test-backend-ops")


@pytest.fixture(scope="module")
def wine(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program of Windows and returns what it prints; fails if it fails."""
    program = next(filter(None, map(shutil.which, ("wine64", "wine", "/usr/lib/wine/wine64"))), None)
    if program is None:
        pytest.skip("no Wine (Debian: apt install wine64)")
    compiler = "x86_64-w64-mingw32-g++-posix"
    runtimes = ("libgcc_s_seh-1.dll", "libstdc++-6.dll", "libwinpthread-1.dll")
    files = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in runtimes]
    folders = {built / "bin", *(Path(file).resolve().parent for file in files)}
    variables = {
        "WINEPREFIX": str(tmp_path_factory.mktemp("wine") / "prefix"),
        "WINEDEBUG": "-all",
        "WINEPATH": ";".join(f"Z:{folder}".replace("/", "\\") for folder in folders),
    }

    def run(*words: str | Path) -> str:
        command = [program, *map(str, words)]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_the_operator_runs_on_windows(built: Path, wine: Callable[..., str]) -> None:
    output = wine(built / "bin/test-backend-ops.exe", "test", "-o", "FLASH_ATTN_BACK", "-b", "CPU", "-p", CASES)
    counts = re.search(r"(\d+)/(\d+) tests passed", output)
    assert counts, output
    assert counts[1] == counts[2]
    assert int(counts[1]) > 20


@pytest.mark.slow
def test_a_trainer_links_and_learns_on_windows(built: Path, wine: Callable[..., str], tmp_path: Path) -> None:
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    found = (
        f"-DCMAKE_PREFIX_PATH={prefix} -DCMAKE_FIND_ROOT_PATH={prefix}",
        f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/cmake/mingw.cmake",
    )
    for command in (
        f"cmake --install {built} --prefix {prefix}",
        f"cmake -G Ninja -S {ROOT}/examples/consumer -B {consumer} {' '.join(found)}",
        f"cmake --build {consumer}",
    ):
        done = subprocess.run(command.split(), env=build.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"source {digest.patch_digest()}" in wine(consumer / "train.exe")


# ---- the harness ----


@pytest.mark.parametrize(
    ("platform", "name", "file"),
    [
        ("linux", "ggml-base", "libggml-base.so"),
        ("darwin", "ggml-base", "libggml-base.dylib"),
        ("win32", "ggml-base", "ggml-base.dll"),
    ],
)
def test_libraries_have_the_names_of_their_system(platform: str, name: str, file: str) -> None:
    assert system.library(name, platform) == file
    assert system.stem(file) == name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("libggml-base.so.0.25.3", "ggml-base"),
        ("libggml.0.25.3.dylib", "ggml"),
        ("libggml-cuda.so.0", "ggml-cuda"),
        ("libggml-base.a", ""),
        ("ggml-base.dll.a", ""),
        ("ggml.so.txt", ""),
    ],
)
def test_versions_and_other_files_are_told_apart(file: str, name: str) -> None:
    assert system.stem(file) == name


def test_mapped_files_are_those_of_the_process() -> None:
    assert any(path.name.startswith("libc") for path in system.mapped_files())


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_types_hold_on_other_systems(platform: str) -> None:
    command = [sys.executable, "-m", "mypy", "--platform", platform, "pyharness"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_script_has_one_for_the_shell_of_windows() -> None:
    scripts = ROOT / "scripts"
    for verb, name in build.SCRIPTS.items():
        text = (scripts / f"{name}.cmd").read_bytes()
        assert f'build.py" {verb} %*\r\n'.encode() in text
        assert f'build.py" {verb} "$@"' in (scripts / name).read_text()
