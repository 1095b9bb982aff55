"""Sets up everything that the scripts need, each step once: Python packages, the patched tree, the build.

Runs on any Python with the standard library alone, and then on the virtual environment's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
COMPILERS = (
    ("CC", "cc", "gcc", "c11", "int a;"),
    ("CXX", "c++", "g++", "c++17", "#include <charconv>\nint main() { if constexpr (true) { return 0; } }"),
)
"""Variable, default, Debian's package, the standard that ggml needs and a program that needs it too."""


class SetupError(Exception):
    """A step failed; the message says what to do."""


def main(verb: str, args: list[str]) -> int:
    """Set up, then run `oracle` or `test` with its arguments, or only `install` the extras; returns the exit code."""
    try:
        check_machine()
        with _lock():
            install(*{"install": args, "test": ["test"], "oracle": []}[verb])
            if verb == "install":
                return 0
            build("cpu", "all" if verb == "test" else "ggml")
        return test(args) if verb == "test" else os.execv(PYTHON, [str(PYTHON), "-m", "pyharness", verb, *args])
    except KeyboardInterrupt:
        return 130
    except (SetupError, OSError) as error:
        print(f"scripts/{verb}: {error}", file=sys.stderr)
        return 3


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Lets one set-up at a time into a checkout."""
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        file = (ROOT / "build/.setup.lock").open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write below {ROOT / 'build'}: {error.strerror}; work in a copy of this checkout that you may write"
            " to, or use libraries built elsewhere: python -m pyharness oracle --libs DIR --receipts DIR"
        ) from error
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up of this checkout ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_machine() -> None:
    """Raise SetupError where Python or the compilers are missing or too old."""
    if sys.version_info < (3, 10):  # noqa: UP036 (runs on whatever python3 is)
        raise SetupError(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}; set PYTHON to a newer one")
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
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + sys.version.encode()).hexdigest()
    stamps = {path: set(path.name.split("-", 1)[1].split(",")) for path in VENV.glob("installed-*")}
    whole = PYTHON.exists() and str(VENV) in _text(VENV / "bin/activate")  # its programs name the place it was made in
    if whole and any(set(extras) <= found and _text(path) == wanted for path, found in stamps.items()):
        return
    if not whole:
        shutil.rmtree(VENV, ignore_errors=True)
        hint = "Python's venv module is missing or broken (Debian: apt install python3-venv)"
        base = getattr(sys, "_base_executable", sys.executable)  # this one may just have been deleted
        _step("virtual environment", [base, "-m", "venv", str(VENV)], hint)
    hint = "check the network and pip's settings (`pip config list`; PIP_INDEX_URL, HTTPS_PROXY, PIP_CERT are honoured)"
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--editable"]
    _step("Python packages", [*pip, f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)], hint)
    (VENV / f"installed-{','.join(extras)}").write_text(wanted)


def build(preset: str, target: str = "all") -> Path:
    """Configure a preset of CMakePresets.json if it is not yet, and build a target of it; returns build/PRESET."""
    folder = ROOT / "build" / preset
    cache = _text(folder / "CMakeCache.txt")
    if cache and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache:  # the checkout was moved or copied
        shutil.rmtree(folder)
    if not (folder / "build.ninja").exists():
        _step(f"configuration of build/{preset}", ["cmake", "--preset", preset, "--fresh"])
    _step(f"build of build/{preset}", ["cmake", "--build", str(folder), "--target", target])
    return folder


def pip(extra: str = "") -> str:
    """The command that gives the running Python the packages of pyharness, or of an extra of pyproject.toml."""
    return f"{shlex.quote(sys.executable)} -m pip install -e {shlex.quote(f'{ROOT}[{extra}]' if extra else str(ROOT))}"


def environment() -> dict[str, str]:
    """The process environment with the virtual environment's programs first."""
    return os.environ | {"PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def test(args: list[str]) -> int:
    """The linters, then pytest; with arguments only pytest with them. Runs all of them, returns 1 if any failed."""
    folders = [ROOT / name for name in ("fuzz", "ggml", "tests", "train")]
    suffixes = (".c", ".cpp", ".cu", ".cuh", ".h")
    sources = [str(path) for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in suffixes]
    checks = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy"],
        "clang-format": ["clang-format", "--dry-run", "--Werror", *sources],
        "pytest": ["pytest"],
    }
    if args:
        checks = {"pytest": ["pytest", *args]}
    failed = []
    for name, command in checks.items():
        print(f"--- {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environment()).returncode != 0:
            failed.append(name)
    if failed:
        print(f"--- failed: {', '.join(failed)}")
    return 1 if failed else 0


def _step(name: str, command: list[str], hint: str = "") -> None:
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise SetupError(f"{name}: {error}") from error
    if done.returncode != 0:
        raise SetupError(f"{name} failed (exit {done.returncode}):\n{done.stdout.strip()}\n{hint}".rstrip())


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
