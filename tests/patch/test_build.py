"""What the build makes: libraries that know their sources, a package for trainers, scripts that say what is missing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from pyharness.base import build, cuda, digest, errors
from pyharness.base.digest import ROOT
from pyharness.patch import tree

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
    return build.build(request.param, "all", "test-backend-ops")


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
        ROOT / "examples/consumer",
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
    for name in ("CMakeLists.txt", "CMakePresets.json", "cmake", "ggml", "pyharness", "pyproject.toml", "examples"):
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
    if not any(option.startswith("-DPython3") for option in options):
        options = (*options, f"-DPython3_EXECUTABLE={sys.executable}")
    run("cmake", "-G", "Ninja", "-S", repository, "-B", folder, *options)
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


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without packages, pip among them."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python"


TAKEN_IN = {
    "add_subdirectory": 'add_subdirectory("{repository}" operator)',
    "FetchContent": """include(FetchContent)
FetchContent_Declare(operator GIT_REPOSITORY "file://{repository}" GIT_TAG main BINARY_DIR operator)
FetchContent_MakeAvailable(operator)""",
}


@pytest.mark.network
@pytest.mark.parametrize("how", TAKEN_IN)
def test_a_project_without_packages_takes_this_one_in(repository: Path, bare: Path, tmp_path: Path, how: str) -> None:
    """It builds this one's tree, patched by a Python below its own build folder."""
    git: list[str | Path] = ["git", "-C", repository, "-c", "user.name=a", "-c", "user.email=a@b"]
    run(*git, "init", "-q", "-b", "main")
    run(*git, "add", "--force", ".")
    run(*git, "commit", "-qm", "all")
    outer = tmp_path / "a trainer"
    outer.mkdir()
    (outer / "CMakeLists.txt").write_text(
        f"""cmake_minimum_required(VERSION 3.21)
project(trainer CXX)
{TAKEN_IN[how].format(repository=repository)}
add_executable(train "{ROOT}/examples/consumer/train.cpp")
target_compile_features(train PRIVATE cxx_std_17)
target_link_libraries(train PRIVATE ggml)
"""
    )
    configure(outer, "-DGGML_UPSTREAM=ggml-python", f"-DPython3_EXECUTABLE={bare}")
    described = json.loads((outer / "build/test/operator/flash-attn-back.json").read_text())
    assert Path(described["tree"]).is_relative_to(outer if how == "FetchContent" else repository)
    assert tree.check(Path(described["tree"]))
    assert (outer / "build/test/operator/venv/bin/python").exists()
    assert not (outer / "build/test/bin").exists()


def test_a_build_makes_what_the_readme_names(built: Path) -> None:
    """The libraries; the programs of tests and libllama are built by their targets."""
    planned = run("cmake", "--build", built, "--", "-t", "commands", "all")
    assert "libggml-base.so" in planned
    assert not re.search("test-backend-ops|bench-|libllama|flash-attn-train", planned)


def test_a_misspelt_option_is_named(repository: Path) -> None:
    options = ["-DGGML_UPSTREAM=ggml-python", "-DGGML_UPSTREM_DIR=elsewhere", f"-DPython3_EXECUTABLE={sys.executable}"]
    command = ["cmake", "-G", "Ninja", "-S", str(repository), "-B", str(repository / "build/test"), *options]
    said = subprocess.run(command, env=build.environment(), capture_output=True, text=True, check=True).stderr
    assert "GGML_UPSTREM_DIR is no option of this build" in said
    assert said.count("is no option") == 1


def test_a_python_without_the_packages_is_told_which(bare: Path) -> None:
    done = subprocess.run([bare, "-m", "pyharness.patch.tree", "ensure"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.match(r"error: no Python package tree_sitter; .*pip install -e", done.stderr)


def test_packages_that_cannot_be_had_stop_the_configuration(repository: Path, bare: Path, tmp_path: Path) -> None:
    options = ("-G", "Ninja", "-S", str(repository), "-B", str(tmp_path / "build"), f"-DPython3_EXECUTABLE={bare}")
    with pytest.raises(AssertionError, match="check the network and pip's settings"):
        run("cmake", *options, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0")


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
    monkeypatch.setattr(build, "step", lambda _, command, __: steps.append(command))
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
    command = [str(ROOT / "scripts/oracle"), "-o", "no such case"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(run.communicate(), run.returncode)[1] for run in runs] == [5, 5]


def test_arguments_reach_the_oracle() -> None:
    done = script("oracle", "-o", "no such case")
    assert done.returncode == 5
    assert "no case matches" in done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu-check", []),
        ("gpu-check", ["-b", "CUDA1", "info"]),
        ("gpu-check", ["--libs", "."]),
        ("train-demo", ["--device", "cuda"]),
        ("train-demo", ["--device=cuda", "--libs", "."]),
    ],
)
def test_without_a_gpu_a_script_says_so_before_it_sets_anything_up(tmp_path: Path, name: str, words: list[str]) -> None:
    for folder in ("scripts", "pyharness"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    begin = time.monotonic()
    command = [str(tmp_path / "scripts" / name), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert time.monotonic() - begin < 5  # seconds under load; 0.2 otherwise
    assert done.returncode == 3
    assert re.fullmatch(rf"scripts/{name}: no CUDA\d: .+\n  this needs an NVIDIA GPU.*\n", done.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {"scripts", "pyharness"}


def test_a_device_that_the_driver_does_not_list_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(name: str, count: object) -> None:
        assert name == "cuDeviceGetCount"
        count._obj.value = 2  # type: ignore[attr-defined]

    monkeypatch.setattr(cuda, "_call", call)
    for device in ("CPU", "ROCm7", "CUDA0", "CUDA1"):
        cuda.require(device)
    with pytest.raises(errors.Environment, match="no CUDA2: the driver lists 2 devices"):
        cuda.require("CUDA2")


# ---- long work ----

LONG = """import sys, time
for i in range(1, 4):
    print(f"[{i}/3] Building {'x' * 200}\\na warning", flush=True)
    time.sleep(0.4)
sys.exit(int(sys.argv[1]))
"""


def worked(code: int, terminal: bool) -> str:
    """Stderr of a step that ends with a code, 80 columns wide."""
    program = f"""import sys
from pyharness.base import build
build.Progress.every = 0.1
try:
    build.step("work", [sys.executable, "-c", {LONG!r}, "{code}"], "a hint")
except build.SetupError as error:
    print(error, file=sys.stderr)
"""
    return transcript(program, terminal)


def transcript(program: str, terminal: bool) -> str:
    """What a Python program writes to stdout and stderr, a terminal of 80 columns or a pipe."""
    master, slave = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TERM": "xterm"}, stdout=slave, stderr=slave):
        os.close(slave)
        said = b""
        try:
            while more := os.read(master, 4096):
                said += more
        except OSError:  # how a terminal ends
            pass
    os.close(master)
    return said.decode()


def test_on_a_terminal_long_work_shows_its_last_line_and_the_time_in_place() -> None:
    *shown, last = worked(0, terminal=True).split("\r\x1b[K")[1:]
    assert shown[0] == "work ..."
    for i in (1, 2, 3):
        assert any(re.match(rf"work \.\.\. \d+ s  \[{i}/3\] Building xxx", text) for text in shown)
    assert all(len(text) < 80 and "\n" not in text for text in shown)
    assert re.fullmatch(r"work: done in \d+ s\r\n", last)


def test_results_have_lines_of_their_own_on_a_terminal() -> None:
    program = """import time
from pyharness.base import build
with build.Progress("work") as progress:
    for i in range(2):
        progress.say(f"step {i}")
        time.sleep(0.5)
        progress.print(f"result {i}")
"""
    *lines, end = transcript(program, terminal=True).split("\r\n")
    screen = [line.split("\r\x1b[K")[-1] for line in lines]
    assert screen[:2] == ["result 0", "result 1"]
    assert re.fullmatch(r"work: done in \d+ s", screen[2])
    assert end == ""
    assert "step 1" in lines[1]


def test_elsewhere_long_work_shows_a_line_now_and_then() -> None:
    first, *shown, last = worked(0, terminal=False).splitlines()
    assert first == "work ..."
    assert all(re.fullmatch(r"work \.\.\. \d+ s  (\[\d/3\] Building x{200})?", line) for line in shown)
    assert re.fullmatch(r"work: done in \d+ s", last)
    assert len(shown) > 2


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_that_fails_prints_its_whole_output(terminal: bool) -> None:
    said = worked(2, terminal).replace("\r\n", "\n")
    printed = "".join(f"[{i}/3] Building {'x' * 200}\na warning\n" for i in (1, 2, 3))
    assert re.search(r"work: failed after \d+ s\n", said)
    assert said.endswith(f"work failed (exit 2):\n{printed}a hint\n")


def test_a_build_says_what_it_compiles_and_how_long_that_takes(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "step", lambda *_: None)
    build.compile_("build", built, "ggml")
    assert not capsys.readouterr().err
    for file in ("build.ninja", "CMakeCache.txt"):
        shutil.copy(built / file, tmp_path)
    (tmp_path / "CMakeFiles").mkdir()
    shutil.copy(built / "CMakeFiles/rules.ninja", tmp_path / "CMakeFiles")
    build.compile_("build", tmp_path, "ggml")
    assert re.match(r"build: \d\d files for ggml, about \d+ min", capsys.readouterr().err)


# ---- scripts/test ----


@pytest.mark.parametrize(
    ("words", "checks", "options"),
    [
        ([], 5, [*build.WORKERS]),
        (["-x"], 5, [*build.WORKERS, "-x"]),
        (["--quick"], 5, ["-m", "not slow", *build.WORKERS]),
        (["--quick", "-x"], 5, ["-m", "not slow", *build.WORKERS, "-x"]),
        (["--lf", "-x"], 1, ["--lf", "-x"]),
        (["-k", "tree"], 1, ["-k", "tree"]),
    ],
)
def test_arguments_reach_pytest(
    monkeypatch: pytest.MonkeyPatch, words: list[str], checks: int, options: list[str]
) -> None:
    commands: list[list[str]] = []

    def execute(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(build, "build", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", execute)
    assert build.test(words) == 0
    assert len(commands) == checks
    assert commands[-1] == ["pytest", f"--junit-xml={ROOT}/build/junit.xml", *options]


@pytest.mark.parametrize(("words", "ran"), [([], 5), (["-x"], 1)])
def test_the_first_failure_ends_the_checks_under_x(monkeypatch: pytest.MonkeyPatch, words: list[str], ran: int) -> None:
    commands: list[str] = []

    def execute(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command[0])
        return subprocess.CompletedProcess(command, int(command[0] == "ruff"))

    monkeypatch.setattr(build, "build", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", execute)
    assert build.test(words) == 1
    assert len(commands) == ran
