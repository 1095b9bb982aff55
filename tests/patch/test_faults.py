"""Faults of the machine: full disks, killed runs, two runs at once, no permission, a bad network, old programs.

Nothing half-written is taken for whole, nothing that was there is lost, and the error says what to do.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import hashlib
import http.server
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import readers
from test_tree import SDIST, archive

from pyharness.base import build, errors
from pyharness.base.digest import ROOT
from pyharness.case import capture_file
from pyharness.device import ggml
from pyharness.patch import tree
from pyharness.patch.common import TreeError
from pyharness.receipts import signing, statement, verify

CASE = "FLASH_ATTN_BACK(hsk=32,hsv=32,nh=2,nhkv=1,kv=40,nb=8)"


# ---- a full disk ----


@contextlib.contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file can become larger than `size` bytes; what the kernel then says is EFBIG, and not ENOSPC."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def write_receipt(folder: Path) -> None:
    statement.save(folder, readers.RECEIPTS[0])


def write_signature(folder: Path) -> None:
    signing.sign(folder / "file", folder / "key.pem")


def write_capture(folder: Path) -> None:
    capture_file.write(folder / "new.gguf", capture_file.read(folder / "a.gguf"))


def write_tree(folder: Path) -> None:
    tree.patch(folder / "tree", folder / "repository")


def write_unpacked(folder: Path) -> None:
    tree.unpack(folder / "a.tar.gz", "vendor/tree", folder / "unpacked")


@pytest.mark.parametrize("size", [0, 10, 200])
@pytest.mark.parametrize("write", [write_receipt, write_signature, write_capture, write_tree, write_unpacked])
def test_a_full_disk_leaves_everything_as_it_was(
    write: Callable[[Path], None], size: int, repository: Path, tmp_path: Path
) -> None:
    if write is write_signature:
        (tmp_path / "file").write_bytes(b"x")
        (tmp_path / "key.pem").write_bytes(readers.KEYS[0])
        write_signature(tmp_path)
        (tmp_path / "file").write_bytes(b"y")
    (tmp_path / "a.gguf").write_bytes(readers.GGUF)
    readers.lay(repository / "ggml", {"src/large.c": b"x" * 1000})
    archive(tmp_path, SDIST | {"some_tree-1.0/vendor/tree/large": b"x" * 1000})
    (tmp_path / "some_tree-1.0.tar.gz").rename(tmp_path / "a.tar.gz")
    before = readers.contents(tmp_path)
    with full_after(size), pytest.raises(errors.Environment, match=os.strerror(errno.EFBIG)):
        write(tmp_path)
    assert readers.contents(tmp_path) == before
    write(tmp_path)  # and with room it is written
    assert readers.contents(tmp_path) != before


# ---- kill -9 ----


def started(action: Callable[[], object]) -> int:
    """The id of a process that does something, and ends with 0 if it could."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the action does not use
        child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            action()
            code = 0
        os._exit(code)
    return child


def killed(write: Callable[[int], object], check: Callable[[], object], times: int, longest: float) -> None:
    """Kill a process that writes again and again, after times up to `longest` seconds, and check what each leaves."""
    for moment in (longest * (i + 1) / times for i in range(times)):
        child = started(lambda: [write(i) for i in range(1_000_000)])
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        check()


def test_receipts_of_killed_runs_are_whole_or_not_there(tmp_path: Path) -> None:
    def write(number: int) -> None:
        document = copy.deepcopy(readers.RECEIPTS[0])
        body = document["predicate"]["receipt"]
        body["argv"] = [str(os.getpid()), str(number)]
        body["id"] = statement.identify(document)
        statement.save(tmp_path, document)

    whole = 0

    def check() -> None:
        nonlocal whole
        for path in tmp_path.glob("*.json"):
            document = statement.read(path)
            assert statement.identify(document) == document["predicate"]["receipt"]["id"]
            path.unlink()
            whole += 1

    killed(write, check, times=24, longest=0.15)
    assert whole > 0


def test_signatures_of_killed_runs_are_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "key.pem").write_bytes(readers.KEYS[0])
    (tmp_path / "key.pub.pem").write_bytes(readers.KEYS[1])
    write_signature(tmp_path)
    killed(
        lambda _: write_signature(tmp_path),
        lambda: signing.check(tmp_path / "file", tmp_path / "key.pub.pem"),
        times=20,
        longest=0.03,
    )


@pytest.mark.parametrize("finish", [tree.patch, readers.reverse])
def test_a_killed_patch_is_finished_or_undone(
    finish: Callable[[Path, Path], object], repository: Path, tmp_path: Path
) -> None:
    target = tmp_path / "tree"
    before = readers.contents(target)
    newer = shutil.copytree(repository, tmp_path / "newer")
    readers.lay(
        newer / "ggml", {"src/ggml-flash-attn-back.c": b"int c;\n", "src/ggml-flash-attn-back-new.c": b"int d;\n"}
    )
    (newer / "ggml/tests/a.def").unlink()
    actions = (
        functools.partial(tree.patch, target, repository),
        functools.partial(tree.patch, target, newer),
        functools.partial(tree.reverse, target),
    )

    def check() -> None:
        finish(target, repository)
        if finish != readers.reverse:
            assert tree.check(target, repository)
        tree.reverse(target)
        found = readers.contents(target)
        assert {name: data for name, data in found.items() if data is not None or name != "tests"} == before

    killed(lambda i: actions[i % 3](), check, times=40, longest=0.04)


def test_a_killed_unpacking_leaves_no_tree(tmp_path: Path) -> None:
    members = {f"some_tree-1.0/vendor/tree/{i}": b"x" * 1000 for i in range(200)}
    archive(tmp_path, members)
    whole = {str(i): b"x" * 1000 for i in range(200)}

    def write(number: int) -> None:
        tree.unpack(tmp_path / "some_tree-1.0.tar.gz", "vendor/tree", tmp_path / f"trees/{os.getpid()}-{number}")

    def check() -> None:
        for path in (tmp_path / "trees").glob("[0-9]*"):
            assert readers.contents(path) == whole
            shutil.rmtree(path)

    killed(write, check, times=12, longest=0.2)


def test_a_stamp_that_is_cut_off_is_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").touch()
    (venv / "bin/activate").write_text(str(venv))
    steps: list[str] = []
    monkeypatch.setattr(build, "VENV", venv)
    monkeypatch.setattr(build, "PYTHON", venv / "bin/python")
    monkeypatch.setattr(build, "step", lambda name, *_: steps.append(name))
    build.install()
    assert steps == ["Python packages"]
    build.install()
    assert steps == ["Python packages"]
    stamp = (venv / "installed-").read_text()
    for length in (0, 1, len(stamp) - 1):
        steps.clear()
        (venv / "installed-").write_text(stamp[:length])
        build.install()
        assert steps == ["Python packages"]
        assert (venv / "installed-").read_text() == stamp


def kill_build(command: list[str], number: int) -> None:
    run = subprocess.Popen(command, env=build.environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    time.sleep(0.06 * number)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def fill_build(command: list[str], number: int) -> None:
    with full_after(700 * number):
        run = subprocess.run(command, env=build.environment() | {"CCACHE_DISABLE": "1"}, capture_output=True)
    assert run.returncode != 0


@pytest.mark.parametrize("stop", [kill_build, fill_build])
def test_a_stopped_build_is_finished_by_the_next(stop: Callable[[list[str], int], None], tmp_path: Path) -> None:
    """A library with the operator's own build rules, whose sources change between the kills."""
    source, folder = tmp_path / "source", tmp_path / "build"
    rules = "src/ggml-flash-attn-back.cmake"
    code = b'#include "ggml-flash-attn-back-source.h"\nconst char * f(void) { return GGML_FLASH_ATTN_BACK_SOURCE; }\n'
    files = {
        "src/ggml-flash-attn-back.c": code,
        "include/ggml-flash-attn-back.h": b"",
        "src/ggml-flash-attn-back-impl.h": b"",
    }
    readers.lay(source, files | {rules: (ROOT / "ggml" / rules).read_bytes(), "src/ggml-cpu/flash-attn-back.cpp": b""})
    readers.lay(source, {f"src/{i}.c": b"#include <stdio.h>\n" * 50 for i in range(4)})
    sources = " ".join(f"{i}.c" for i in range(4))
    (source / "src/CMakeLists.txt").write_text(
        f"add_library(ggml-base SHARED {sources})\ninclude(ggml-flash-attn-back.cmake)\n"
    )
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(a C)\nadd_subdirectory(src)\n"
    )

    def edit(number: int) -> str:
        readers.lay(source, {"include/ggml-flash-attn-back.h": b"// %d\n" % number})
        lines = [
            f"{hashlib.sha256((source / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted([*files, rules])
        ]
        (source / "src/ggml-flash-attn-back.sha256").write_text("".join(lines))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    edit(0)
    command = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder)]
    subprocess.run(command, env=build.environment(), check=True, capture_output=True)
    compile_ = ["cmake", "--build", str(folder)]
    for number in range(1, 9):
        digest = edit(number)
        for path in source.glob("src/?.c"):
            path.touch()
        stop(compile_, number)
        subprocess.run(compile_, env=build.environment(), check=True, capture_output=True)
        assert digest.encode() in (folder / "src/libggml-base.so").read_bytes()


# ---- two at once ----


def pyharness(*words: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pyharness", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_two_runs_at_once_write_two_whole_receipts(tmp_path: Path, library: ggml.Library) -> None:
    words = ("oracle", "--libs", str(library.directory), "-b", "CPU", "-o", CASE, "--receipts", str(tmp_path))
    runs = [pyharness(*words, "--seed", str(seed)) for seed in range(2)]
    outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    receipts = list(tmp_path.glob("*.json"))
    assert len(receipts) == 2
    for path in receipts:
        assert verify.exit_code(verify.check(path)) == verify.OK


def test_two_patches_of_a_tree_at_once_both_hold(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "tree"
    before = readers.contents(target)
    for _ in range(20):
        actions = (tree.patch, tree.patch, readers.reverse)
        children = [started(functools.partial(action, target, repository)) for action in actions]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        tree.patch(target, repository)
        assert tree.check(target, repository)
        tree.reverse(target)
        assert readers.contents(target) == before


def test_one_process_at_a_time_works_below_build(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        for _ in range(30):
            with tree.lock(tmp_path):
                counter.write_text(str(int(counter.read_text()) + 1))

    children = [started(count) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert counter.read_text() == "90"


# ---- a checkout that may not be written to ----


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A checkout without write permission, and the command prefix under which that holds for root too."""
    checkout = tmp_path / "checkout"
    for folder in ("scripts", "pyharness", "ggml"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "CMakePresets.json"):
        shutil.copy(ROOT / file, checkout)
    prefix = []
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root may write everywhere, and there is no setpriv to change that (Debian: util-linux)")
        prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]
        if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
            pytest.skip("root may write everywhere, and may not give that up here (no CAP_SETPCAP)")
    folders = [checkout, *(path for path in checkout.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    yield checkout, prefix
    for path in folders:
        path.chmod(0o755)


def test_a_read_only_checkout_says_where_else_to_work(read_only: tuple[Path, list[str]]) -> None:
    checkout, prefix = read_only
    for script in ("oracle", "test"):
        done = subprocess.run([*prefix, str(checkout / "scripts" / script)], capture_output=True, text=True)
        assert done.returncode == 3
        assert (
            f"scripts/{script}: cannot write below {checkout}/build: Permission denied; work in a copy" in done.stderr
        )
        assert "--libs DIR --receipts DIR" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_read_only_checkout_runs_with_libraries_from_elsewhere(
    read_only: tuple[Path, list[str]], tmp_path: Path, library: ggml.Library
) -> None:
    checkout, prefix = read_only
    words = ["oracle", "--libs", str(library.directory), "-b", "CPU", "-o", CASE]
    command = [*prefix, sys.executable, "-m", "pyharness", *words]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 3
    assert f"cannot write a receipt below {checkout}/receipts: Permission denied\n" in done.stderr
    assert "--receipts DIR, or --no-receipt" in done.stderr
    done = subprocess.run([*command, "--receipts", str(tmp_path / "out")], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*.json"))) == 1


# ---- the network ----


class Index(http.server.BaseHTTPRequestHandler):
    """A package index, or a proxy in front of one, with one archive, which it serves as `fault` says."""

    content = b""
    fault = "whole"

    def do_GET(self) -> None:
        """Answer with the list of files or with the archive."""
        if not urlsplit(self.path).path.endswith(".tar.gz"):
            self.answer(
                b'<!DOCTYPE html><html><body><a href="some_tree-1.0.tar.gz">some_tree-1.0.tar.gz</a></body></html>'
            )
        elif self.fault == "file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
        elif self.fault == "gone":
            self.send_error(503)
        else:
            half = self.content[: len(self.content) // 2]
            body = {"whole": self.content, "wrong": self.content[:-1] + b"x", "short": half, "cut": half}[self.fault]
            self.answer(body, len(self.content) if self.fault == "cut" else len(body))

    def answer(self, body: bytes, length: int | None = None) -> None:
        """A response that says it has `length` bytes; then the connection ends."""
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if body.startswith(b"<") else "application/octet-stream")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an `Index` that pip takes for its only one."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{running.server_port}"
        for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        for name, value in {
            "CONFIG_FILE": os.devnull,
            "NO_CACHE_DIR": "1",
            "RETRIES": "0",
            "TIMEOUT": "60",
            "INDEX_URL": address,
        }.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        yield address
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("fault", ["cut", "short", "wrong", "file", "gone", "proxy"])
def test_a_bad_download_is_refused_and_the_next_one_is_kept(
    fault: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    pin = archive(tmp_path / "index", SDIST | {"some_tree-1.0/vendor/tree/large": os.urandom(300_000)})
    monkeypatch.setattr(Index, "content", (tmp_path / "index/some_tree-1.0.tar.gz").read_bytes())
    if fault == "proxy":
        monkeypatch.setenv("http_proxy", server)
        monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid")
        monkeypatch.setenv("PIP_TRUSTED_HOST", "index.invalid")
    monkeypatch.setattr(Index, "fault", "cut" if fault == "proxy" else fault)
    with pytest.raises(TreeError) as error:
        tree.fetch(pin, tmp_path)
    assert "Check the network" in str(error.value)
    assert str(tmp_path / "build/cache/some-tree-1.0.tar.gz") in str(error.value)
    assert list((tmp_path / "build/cache").iterdir()) == []
    monkeypatch.setattr(Index, "fault", "whole")
    kept = tree.fetch(pin, tmp_path)
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == pin.sha256


# ---- old programs ----


def program(path: Path, text: str) -> str:
    """A shell script that stands for a program; returns its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script", ["oracle", "test", "gpu-check", "train-demo"])
def test_an_old_python_is_named(script: str, tmp_path: Path) -> None:
    program(
        tmp_path / "python3", 'case $1 in -V) echo "Python 3.8.10" ;; -c) exit 1 ;; *) echo SyntaxError; exit 1 ;; esac'
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHON"} | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if script in ("gpu-check", "train-demo"):  # they take the checkout's own if there is one
        environment["PYTHON"] = "python3"
    done = subprocess.run([str(ROOT / "scripts" / script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    wanted = f"scripts/{script}: Python 3.10 or newer is needed, this is Python 3.8.10; set PYTHON to a newer one\n"
    assert done.stderr == wanted


@pytest.mark.parametrize(("variable", "standard", "package"), [("CC", "c11", "gcc"), ("CXX", "c++17", "g++")])
def test_an_old_compiler_is_named(variable: str, standard: str, package: str, tmp_path: Path) -> None:
    old = program(tmp_path / "old", 'echo "cc1: error: unrecognized command line option $1" >&2; exit 1')
    done = subprocess.run(
        [str(ROOT / "scripts/oracle")], env=os.environ | {variable: old}, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert (
        f"{old} does not compile {standard}; install gcc 8, clang 7 or newer (Debian: apt install {package})"
        in done.stderr
    )
    assert f"unrecognized command line option -std={standard}" in done.stderr
