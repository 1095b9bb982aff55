"""Sets up everything that the scripts need, each step once: Python packages, the patched tree, the build.

Runs on any Python with the standard library alone, and then on the virtual environment's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PROGRAMS = "Scripts" if sys.platform == "win32" else "bin"
"""Folder of a virtual environment that holds its programs."""

PYTHON_NAME = "python.exe" if sys.platform == "win32" else "python"
PYTHON = VENV / PROGRAMS / PYTHON_NAME
COMPILERS = (
    ("CC", "cc", "gcc", "c11", "int a;"),
    ("CXX", "c++", "g++", "c++17", "#include <charconv>\nint main() { if constexpr (true) { return 0; } }"),
)
"""Variable, default, Debian's package, the standard that ggml needs and a program that needs it too."""

SCRIPTS = {"oracle": "oracle", "test": "test", "gpucheck": "gpu-check", "train": "train-demo"}
"""The script of each verb that has one."""

TESTED = ("test-backend-ops", "test-flash-attn-back-meta", "flash-attn-train", "ggml-rpc-server")
"""Programs of the preset cpu that tests ask for beside its libraries."""

WORKERS = ("-n", "logical", "--maxprocesses", "8", "--dist", "loadgroup")
"""How pytest-xdist shares all tests out: over the cores, those of an xdist_group on one worker."""

SECONDS = {"cpu": 8.0, "cuda": 30.0}
"""About how long one core compiles one of ggml's and llama.cpp's files."""


class SetupError(Exception):
    """A step failed; the message says what to do."""


def main(verb: str, args: list[str]) -> int:
    """Set up what a verb needs, then run it with its arguments; returns the exit code.

    The verbs are those of pyharness that have a script, `test`, `install EXTRA...`, and `interpreter DIR`, which prints
    a Python that can run pyharness.patch.tree and makes one in DIR where this one cannot."""
    try:
        if verb == "interpreter":
            print(interpreter(Path(args[0])))
            return 0
        if verb in ("gpucheck", "train"):
            python = _set_up(verb, args)
        else:
            check_machine()
            with _lock("setup"):
                install(*{"install": args, "test": ["test"]}.get(verb, []))
            if verb == "oracle" and not {"-h", "--help"} & set(args):
                build("cpu", "ggml")
            python = PYTHON
        if verb in ("install", "test"):
            return test(args) if verb == "test" else 0
        command = [str(python), "-m", "pyharness", verb, *args]
        if sys.platform == "win32":  # where the shell would not wait for what takes this process's place
            return subprocess.call(command)
        os.execv(python, command)
    except KeyboardInterrupt:
        return 130
    except (SetupError, OSError) as error:
        print(f"{f'scripts/{SCRIPTS[verb]}' if verb in SCRIPTS else 'error'}: {error}", file=sys.stderr)
        return 3


def _set_up(verb: str, args: list[str]) -> Path:
    """What gpucheck or train needs, before there are the packages to read all of its options; returns its Python."""
    parser = argparse.ArgumentParser(prog=f"scripts/{SCRIPTS[verb]}", add_help=False)
    parser.add_argument("-b", default="CUDA0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--libs")
    parser.add_argument("--preset", default="cuda")
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_known_args(args)[0]
    if not options.help:
        require_gpu(options.b if verb == "gpucheck" else options.device)
    if options.libs is not None:
        return Path(sys.executable)
    check_machine()
    with _lock("setup"):
        install(*["plot"] * (verb == "train"))
    if verb == "gpucheck" and not options.help:
        build(options.preset, "ggml")
    return PYTHON


def require_gpu(device: str) -> None:
    """Raise SetupError where a CUDA device (`CUDA1`, or `cuda` for the first) is wanted and the driver has none."""
    from pyharness.base import cuda, errors  # no part of a bare Python's path unless a script puts it there

    try:
        cuda.require("CUDA0" if device == "cuda" else device)
    except errors.Environment as error:
        raise SetupError(f"{error}\n  {error.hint}") from None


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Lets one process at a time do what the name stands for in this checkout."""
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        file = (ROOT / f"build/.{name}.lock").open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write below {ROOT / 'build'}: {error.strerror}; work in a copy of this checkout that you may write"
            " to, or use libraries built elsewhere: python -m pyharness oracle --libs DIR --receipts DIR"
        ) from error
    with file as lock:
        if not hold(lock.fileno(), wait=False):
            with Progress(f"waiting for another {name} of this checkout"):
                hold(lock.fileno())
        yield


def hold(descriptor: int, wait: bool = True) -> bool:
    """Hold what is open until it is closed, as one process at a time may; False if one does and this is not to wait."""
    while True:
        try:
            if sys.platform == "win32":
                os.lseek(descriptor, 0, os.SEEK_SET)
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except (BlockingIOError, PermissionError):  # the latter is Windows' word
            if not wait:
                return False
            time.sleep(0.1)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time into a folder, and writes nothing there."""
    if sys.platform == "win32":  # where no folder can be opened
        name = hashlib.sha256(os.path.normcase(folder.resolve()).encode()).hexdigest()[:16]
        path, flags = Path(tempfile.gettempdir()) / f"flash-attn-back-{name}.lock", os.O_RDWR | os.O_CREAT
    else:
        path, flags = folder, os.O_RDONLY | os.O_DIRECTORY
    descriptor = os.open(path, flags)
    try:
        hold(descriptor)
        yield
    finally:
        os.close(descriptor)


def check_machine() -> None:
    """Raise SetupError where Python or the compilers are missing or too old."""
    if sys.version_info < (3, 10):  # noqa: UP036 (runs on whatever python3 is)
        raise SetupError(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}; set PYTHON to a newer one")
    if sys.platform == "win32":  # CMake finds out what the compiler can do
        if not any(map(shutil.which, ("cl", "clang", "gcc"))):
            raise SetupError("no compiler: run this in a Developer Command Prompt of Visual Studio")
        return
    for variable, default, package, language, program in COMPILERS:
        command = os.environ.get(variable, default).split()
        if not shutil.which(command[0]):
            raise SetupError(f"no compiler {command[0]}; install one (Debian: apt install {package}) or set {variable}")
        options = [f"-std={language}", "-x", language.rstrip("0123456789"), "-fsyntax-only", "-"]
        compiled = subprocess.run([*command, *options], input=program, text=True, capture_output=True)
        if compiled.returncode != 0:
            raise SetupError(
                f"{' '.join(command)} does not compile {language}; install gcc 8, clang 7 or newer"
                f" (Debian: apt install {package}) or set {variable} to one:\n{compiled.stderr.strip()}"
            )


def install(*extras: str) -> None:
    """The virtual environment .venv with pyharness and the packages of extras of pyproject.toml."""
    named = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "pyharness/__init__.py")]  # with the version
    wanted = hashlib.sha256(b"".join(named) + sys.version.encode()).hexdigest()
    stamps = {path: set(path.name.split("-", 1)[1].split(",")) for path in VENV.glob("installed-*")}
    named_here = str(VENV) in _text(VENV / PROGRAMS / "activate")  # its programs name the place it was made in
    whole = PYTHON.exists() and named_here
    if whole and any(set(extras) <= found and _text(path) == wanted for path, found in stamps.items()):
        return
    if not whole:
        shutil.rmtree(VENV, ignore_errors=True)
        _venv(VENV)
    _packages(PYTHON, "--editable", f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT))
    (VENV / f"installed-{','.join(extras)}").write_text(wanted)


def interpreter(folder: Path) -> Path:
    """A Python with the packages of pyharness.patch: this one, or that of a virtual environment made as `folder`."""
    own = folder / PROGRAMS / PYTHON_NAME
    usable = "import pip; from pyharness.patch import hooks; hooks.tree_sitter.QueryCursor"  # of tree-sitter 0.25
    for python in (Path(sys.executable), own):
        if python.exists() and subprocess.run([python, "-c", usable], cwd=ROOT, capture_output=True).returncode == 0:
            return python
    shutil.rmtree(folder, ignore_errors=True)
    _venv(folder)
    _packages(own, *re.findall('^ *"((?:tomli|tree-sitter).*)",$', _text(ROOT / "pyproject.toml"), re.MULTILINE))
    return own


def _venv(folder: Path) -> None:
    hint = "Python's venv module is missing or broken (Debian: apt install python3-venv)"
    base = getattr(sys, "_base_executable", sys.executable)  # this one may just have been deleted
    step("virtual environment", [base, "-m", "venv", str(folder)], hint)


def _packages(python: Path, *wanted: str) -> None:
    hint = "check the network and pip's settings (`pip config list`; PIP_INDEX_URL, HTTPS_PROXY, PIP_CERT are honoured)"
    step("Python packages", [str(python), "-m", "pip", "install", "--disable-pip-version-check", *wanted], hint)


def build(preset: str, *targets: str) -> Path:
    """Configure a preset of CMakePresets.json if it is not yet as it is there, and build targets of it; returns
    build/PRESET."""
    folder = ROOT / "build" / preset
    presets = hashlib.sha256((ROOT / "CMakePresets.json").read_bytes()).hexdigest()
    with _lock(f"build-{preset}"):
        cache = _text(folder / "CMakeCache.txt")
        if cache and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache:  # the checkout was moved or copied
            shutil.rmtree(folder)
        configured = (folder / "build.ninja").exists()
        if not configured or _text(folder / "presets.sha256") != presets:
            command = ["cmake", "--preset", preset, *["--fresh"] * (not configured)]
            step(f"configuration of build/{preset}", command)
            (folder / "presets.sha256").write_text(presets)
        compile_(f"build of build/{preset}", folder, *targets)
    return folder


def compile_(name: str, folder: Path, *targets: str) -> None:
    """Build targets in a configured folder, and say before how many files that compiles and about how long it takes."""
    command = ["cmake", "--build", str(folder)]
    known = [*command, "--", "-t", "commands", *targets]  # of ninja; whatever state the targets are in
    commands = subprocess.run(known, cwd=ROOT, env=environment(), capture_output=True, text=True).stdout.splitlines()
    made = [re.search(r" -o (\S+\.o)(?: |$)", line) for line in commands]
    new = [found.string for found in made if found and not (folder / found[1]).exists()]
    minutes = sum(SECONDS["cuda" if ".cu " in line else "cpu"] for line in new) / (os.cpu_count() or 1) / 60
    if minutes > 0.5:
        less = ", less if ccache has them" if shutil.which("ccache") else ""
        plan = f"{name}: {len(new)} files for {', '.join(targets)}, about {max(minutes, 1):.0f} min{less}"
        print(plan, file=sys.stderr, flush=True)
    step(name, [*command, "--target", *targets])


def pip(extra: str = "") -> str:
    """The command that gives the running Python the packages of pyharness, or of an extra of pyproject.toml."""
    return f"{shlex.quote(sys.executable)} -m pip install -e {shlex.quote(f'{ROOT}[{extra}]' if extra else str(ROOT))}"


def environment() -> dict[str, str]:
    """The process environment with the virtual environment's programs first."""
    return os.environ | {"PATH": f"{VENV / PROGRAMS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def test(args: list[str]) -> int:
    """The linters, then pytest; returns 1 if any failed.

    --quick leaves out the tests marked slow, -x stops at the first failure, of a linter too. With other arguments,
    which are pytest's, only pytest runs. Leaves build/junit.xml."""
    quick, first = "--quick" in args, {"-x", "--exitfirst"} & set(args)
    words = [word for word in args if word != "--quick"]
    folders = [ROOT / name for name in ("examples", "fuzz", "ggml", "tests")]
    suffixes = (".c", ".cpp", ".cu", ".cuh", ".h")
    sources = [str(path) for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in suffixes]
    checks = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy"],
        "clang-format": ["clang-format", "--dry-run", "--Werror", *sources],
    }
    whole = not set(words) - first
    if not whole:
        checks = {}
    build("cpu", *(("ggml", *TESTED) if whole and not quick else ("ggml",)))
    chosen = [*["-m", "not slow"] * quick, *(WORKERS if whole else ())]
    checks["pytest"] = ["pytest", f"--junit-xml={ROOT / 'build/junit.xml'}", *chosen, *words]
    failed = []
    for name, command in checks.items():
        print(f"--- {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environment()).returncode != 0:
            failed.append(name)
            if first:
                break
    if failed:
        print(f"--- failed: {', '.join(failed)}")
    return 1 if failed else 0


# ---- long work ----


class Progress:
    """Shows on stderr that long work lives: the time and its latest line, in place on a terminal, else now and then."""

    every = 30.0
    """Seconds between the lines where stderr is no terminal."""

    def __init__(self, name: str) -> None:
        self._name, self._line, self._shown, self._begin = name, "", "", time.monotonic()
        self._terminal, self._ended = sys.stderr.isatty() and os.environ.get("TERM") != "dumb", threading.Event()
        self._counts: re.Match[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Progress:
        self._show(f"{self._name} ...")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._show(f"{self._name}: {'failed after' if kind else 'done in'} {self._elapsed()}", end="\n")

    def say(self, line: str) -> None:
        """The latest line of the work's output; between the steps that ninja counts, warnings are left out."""
        counts = re.match(r"\[\d+/\d+\] ", line)
        if counts or not self._counts:
            self._line, self._counts = line.strip() or self._line, counts

    def print(self, text: str) -> None:
        """Print a line of results on stdout, above the line in place."""
        with self._lock:
            if self._terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
                self._shown = ""
            print(text, flush=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

    def _run(self) -> None:
        while not self._ended.wait(0.2 if self._terminal else self.every):
            self._show(f"{self._name} ... {self._elapsed()}  {self._line}")

    def _show(self, text: str, end: str = "") -> None:
        with self._lock:
            if not self._terminal:
                print(text, file=sys.stderr, flush=True)
            elif text != self._shown or end:
                width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
                printable = "".join(c if c.isprintable() else " " for c in text)
                print(f"\r\x1b[K{printable if end else printable[: width - 1]}", end=end, file=sys.stderr, flush=True)
                self._shown = text


def step(name: str, command: Sequence[str], hint: str = "", env: Mapping[str, str] | None = None) -> None:
    """Run a command in the checkout under a `Progress`; its whole output is in the SetupError of one that fails."""
    lines: list[str] = []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    try:
        with (
            Progress(name) as progress,
            subprocess.Popen(command, cwd=ROOT, env=environment() if env is None else env, **pipes) as process,
        ):
            try:
                for line in process.stdout or ():
                    lines.append(line)
                    progress.say(line)
            except BaseException:
                process.kill()
                raise
            if process.wait() != 0:
                output = "".join(lines).strip()
                raise SetupError(f"{name} failed (exit {process.returncode}):\n{output}\n{hint}".rstrip())
    except OSError as error:
        raise SetupError(f"{name}: {error}") from error


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
