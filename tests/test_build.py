"""What the build makes: libraries that know their sources, a package for trainers, scripts that say what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyharness import build, digest, tree
from pyharness.digest import ROOT

PRESETS = {"cpu": "llama-cpp-python", "cpu-ggml-python": "ggml-python"}


def run(*command: str | Path, **env: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=build.environment() | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_of(library: Path) -> str:
    """What ggml_flash_attn_back_source() of a library returns, asked in a process of its own."""
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ggml_flash_attn_back_source; f.restype = ctypes.c_char_p; "
    return run(sys.executable, "-c", code + "print(f().decode())", library).strip()


@pytest.fixture(scope="module", params=PRESETS)
def built(request: pytest.FixtureRequest) -> Path:
    return build.build(request.param)


# ---- libraries ----


def test_library_was_built_from_the_sources_in_the_repository(built: Path) -> None:
    assert source_of(built / "bin/libggml-base.so") == digest.patch_digest()


def test_backend_ops_knows_the_cases(built: Path) -> None:
    lines = run(built / "bin/test-backend-ops", "support", "-o", "FLASH_ATTN_BACK", "-b", "CPU").splitlines()
    cases = [line for line in lines if "FLASH_ATTN_BACK(" in line]
    assert len(cases) > 100
    assert all("FLASH_ATTN_BACK(hsk=" in line for line in cases)


def test_backend_ops_finds_the_gradients_by_finite_differences(built: Path) -> None:
    output = run(built / "bin/test-backend-ops", "grad", "-o", "FLASH_ATTN_EXT_GRAD", "-b", "CPU")
    assert "sinks=1" in output
    assert "FAIL" not in output
    assert "OK" in output


def test_a_trainer_builds_against_the_installed_package_and_learns(built: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    run("cmake", "--install", built, "--prefix", prefix)
    assert (prefix / "include/ggml-flash-attn-back.h").is_file()
    run(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        ROOT / "tests/consumer",
        "-B",
        tmp_path / "consumer",
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    run("cmake", "--build", tmp_path / "consumer")
    output = run(tmp_path / "consumer/train")  # fails unless the loss falls
    assert f"source {digest.patch_digest()}" in output
    assert [line.partition(":")[0] for line in output.splitlines()[1:]] == ["f32", "f16", "bf16"]


def preloaded(*names: str) -> dict[str, str]:
    """The environment in which Python can load libraries with these sanitizers; skips where they do not run."""
    cc = os.environ.get("CC", "cc")
    libraries = [run(cc, f"-print-file-name=lib{name}.so").strip() for name in names]
    if not all(Path(library).is_file() for library in libraries):
        pytest.skip(f"{cc} comes without sanitizers (Debian: apt install gcc)")
    preload = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}  # Python's own
    tried = subprocess.run(
        [sys.executable, "-c", ""], env=build.environment() | preload, capture_output=True, text=True
    )
    if "memory mapping" in tried.stderr or "Shadow memory" in tried.stderr:
        pytest.skip("the sanitizer finds no room in this kernel's address space (sysctl vm.mmap_rnd_bits=28)")
    return preload


def test_address_and_undefined_behaviour_sanitizers_find_nothing() -> None:
    environment = preloaded("asan", "ubsan")
    build.build("asan", "ggml")
    options = ["--preset", "asan", "-b", "CPU", "--no-receipt", "--no-monitor"]
    output = run(sys.executable, *("-m", "pyharness", "oracle", *options), **environment)
    assert " 0 failed, 0 unsupported, 0 skipped" in output


def test_thread_sanitizer_finds_nothing() -> None:
    environment = preloaded("tsan")
    build.build("tsan", "ggml")
    several_tiles = r"kv=1[0-9][0-9],.*sinks=1|hsk=40,"
    options = ["--preset", "tsan", "-b", "CPU", "--threads", "3", "--no-receipt", "--no-monitor", "-p", several_tiles]
    output = run(sys.executable, *("-m", "pyharness", "oracle", *options), **environment)
    assert " 0 failed, 0 unsupported, 0 skipped" in output


# ---- configuring ----


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what CMake reads of this repository, with the smaller upstream archive in its cache."""
    copy = tmp_path / "repository"
    for name in ("CMakeLists.txt", "CMakePresets.json", "cmake", "ggml", "pyharness", "train"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name)
        elif (ROOT / name).is_file():
            copy.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    archive = tree.fetch(tree.base("ggml-python"))
    (copy / "build/cache").mkdir(parents=True)
    shutil.copyfile(archive, copy / "build/cache" / archive.name)
    return copy


def configure(repository: Path, *options: str) -> Path:
    folder = repository / "build/test"
    run("cmake", "-G", "Ninja", "-S", repository, "-B", folder, f"-DPython3_EXECUTABLE={sys.executable}", *options)
    return folder


def test_an_edited_file_of_the_operator_is_built_by_the_next_build(repository: Path) -> None:
    folder = configure(repository, "-DGGML_UPSTREAM=ggml-python")
    run("cmake", "--build", folder, "--target", "ggml-base")
    assert source_of(folder / "bin/libggml-base.so") == digest.patch_digest(repository)
    with (repository / "ggml/include/ggml-flash-attn-back.h").open("a") as header:
        header.write("// edited\n")
    run("cmake", "--build", folder, "--target", "ggml-base")
    assert source_of(folder / "bin/libggml-base.so") == digest.patch_digest(repository) != digest.patch_digest()
    assert "no work to do" in run("cmake", "--build", folder, "--target", "ggml-base")


def test_a_user_s_own_tree_is_built_from_a_patched_copy(repository: Path, tmp_path: Path) -> None:
    pin = tree.base("ggml-python")
    own = tmp_path / "own"
    tree.unpack(tree.fetch(pin), pin.subdir, own)
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    folder = configure(repository, f"-DGGML_UPSTREAM_DIR={own}")
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before
    assert tree.check(folder / "upstream")
    assert str(folder / "upstream/src") in (folder / "build.ninja").read_text()


def test_a_project_that_takes_this_one_in_builds_this_one_s_tree(repository: Path, tmp_path: Path) -> None:
    outer = tmp_path / "a trainer"
    outer.mkdir()
    (outer / "CMakeLists.txt").write_text(
        f"""cmake_minimum_required(VERSION 3.21)
project(trainer CXX)
add_subdirectory("{repository}" operator)
add_executable(train "{ROOT}/tests/consumer/train.cpp")
target_compile_features(train PRIVATE cxx_std_17)
target_link_libraries(train PRIVATE ggml)
"""
    )
    configure(outer, "-DGGML_UPSTREAM=ggml-python")
    described = json.loads((outer / "build/test/operator/flash-attn-back.json").read_text())
    assert Path(described["tree"]).is_relative_to(repository)
    assert not (outer / "build/test/bin").exists()


def test_a_misspelt_option_is_named(repository: Path) -> None:
    options = ["-DGGML_UPSTREAM=ggml-python", "-DGGML_UPSTREM_DIR=elsewhere", f"-DPython3_EXECUTABLE={sys.executable}"]
    command = ["cmake", "-G", "Ninja", "-S", str(repository), "-B", str(repository / "build/test"), *options]
    said = subprocess.run(command, env=build.environment(), capture_output=True, text=True, check=True).stderr
    assert "GGML_UPSTREM_DIR is no option of this build" in said
    assert said.count("is no option") == 1


def test_a_python_without_the_packages_is_told_which(repository: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(AssertionError, match=r"error: no Python package tree_sitter; .*pip install -e"):
        run("cmake", "-G", "Ninja", "-S", repository, "-B", tmp_path / "build", f"-DPython3_EXECUTABLE={bare}")


def test_a_tree_that_cannot_be_patched_stops_the_configuration_with_the_reason(
    repository: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"no ggml or llama\.cpp checkout"):
        configure(repository, f"-DGGML_UPSTREAM_DIR={tmp_path}")


# ---- scripts ----


def script(name: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ROOT / "scripts" / name), *args], env=os.environ | env, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["oracle", "test"])
def test_script_without_python_says_so(name: str) -> None:
    done = script(name, PYTHON="no-such-python")
    assert done.returncode == 3
    assert f"scripts/{name}: no no-such-python; install Python 3.10" in done.stderr


@pytest.mark.parametrize("name", ["oracle", "test", "gpu-check", "train-demo"])
def test_script_is_found_through_a_symbolic_link(tmp_path: Path, name: str) -> None:
    link = tmp_path / name
    link.symlink_to(ROOT / "scripts" / name)
    done = subprocess.run([link], env=os.environ | {"PYTHON": "no-such-python"}, capture_output=True, text=True)
    assert done.returncode == 3
    assert "no no-such-python; install Python 3.10" in done.stderr


@pytest.mark.parametrize("name", ["gpu-check", "train-demo"])
def test_script_without_wheels_says_so(tmp_path: Path, name: str) -> None:
    for words in ([], [str(tmp_path)]):
        done = script(name, "--wheels", *words)
        assert done.returncode == 2
        assert f"scripts/{name}: --wheels: no .whl files in" in done.stderr


def test_set_up_by_the_python_of_a_moved_environment_makes_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[str]] = []
    monkeypatch.setattr(build, "VENV", tmp_path / "venv")
    monkeypatch.setattr(build, "PYTHON", tmp_path / "venv/bin/python")
    monkeypatch.setattr(build, "_step", lambda _, command, __: steps.append(command))
    build.PYTHON.parent.mkdir(parents=True)
    build.PYTHON.write_text("")
    (build.VENV / "bin/activate").write_text("VIRTUAL_ENV=/elsewhere")
    monkeypatch.setattr(sys, "executable", str(build.PYTHON))
    with pytest.raises(FileNotFoundError):  # nothing made the folder of the stamp
        build.install()
    assert Path(steps[0][0]).exists()


def test_script_without_a_compiler_says_so() -> None:
    done = script("oracle", CXX="no-such-compiler")
    assert done.returncode == 3
    assert "no compiler no-such-compiler; install one (Debian: apt install g++) or set CXX" in done.stderr


def test_script_with_an_old_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(build.SetupError, match=r"Python 3\.10 or newer is needed"):
        build.check_machine()


def test_set_up_without_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "VENV", tmp_path / "venv")
    monkeypatch.setattr(build, "PYTHON", tmp_path / "venv/bin/python")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(build.SetupError, match="check the network and pip's settings"):
        build.install()


def test_two_runs_at_once_both_succeed() -> None:
    command = [str(ROOT / "scripts/oracle"), "--help"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(run.communicate(), run.returncode)[1] for run in runs] == [0, 0]


def test_arguments_reach_the_oracle() -> None:
    done = script("oracle", "-o", "no such case")
    assert done.returncode == 5
    assert "no case matches" in done.stderr
