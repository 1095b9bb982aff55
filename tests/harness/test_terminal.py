"""What a person sees on a terminal, read back from the screen of an emulated one."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator

import pyte
import pytest

from pyharness.base import errors
from pyharness.case import cases
from pyharness.device import ggml

pytestmark = pytest.mark.usefixtures("library")

ROWS = 24
BAR = "━"
WIDE = "FLASH_ATTN_BACK(hsk=16,hsv=16,nh=4,nhkv=2,kv=2000,nb=300,type_K=f32,type_V=f32,mask=swa:1000,sinks=1)"
LONG = "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=32,nhkv=1,kv=8000,nb=4000,type_K=f32,type_V=f32)"
VERBS = {
    "oracle": ["oracle", "-b", "CPU", "--no-receipt", "-o", f"hsk=16.hsv=16.nh=4,{WIDE}"],
    "grad": ["grad", "-b", "CPU", "--samples", "5", "-p", "hsk=16.*kv=9"],
    "replay": ["replay", "-b", "CPU", "--no-receipt"],
}
"""A run of each verb that has a progress bar; test_every_verb_with_a_bar_is_here says that none is missing."""


@dataclasses.dataclass
class Terminal:
    """A run on a terminal of some columns: its exit code, what it wrote, and what the terminal shows."""

    code: int
    written: bytes
    lines: list[str]

    @property
    def text(self) -> str:
        """Everything on the screen and above it, without white space: how a line wraps does not matter."""
        return squeeze("".join(self.lines))


def squeeze(text: str) -> str:
    """Text without white space and without what differs between two runs: times."""
    return re.sub(r"\s", "", re.sub(r"\d+\.\d+\s*m\s*s", "", text))


def shown(screen: pyte.HistoryScreen) -> list[str]:
    """The lines of a screen and of its scrollback."""
    above = ["".join(line[x].data for x in range(screen.columns)) for line in screen.history.top]
    return [line.rstrip() for line in [*above, *screen.display]]


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what would change colours and widths."""
    dropped = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"TERM": "xterm-256color"} | variables


def chunks(terminal: int) -> Iterator[bytes]:
    """What a process writes to its terminal, until it ends."""
    try:
        while data := os.read(terminal, 65536):
            yield data
    except OSError:  # how Linux says that nobody holds the other end any more
        return


def run(
    words: list[str],
    columns: int,
    watch: Callable[[pyte.HistoryScreen, int], None] = lambda *_: None,
    *,
    piped: bool = False,
    **variables: str,
) -> Terminal:
    """Run the command line on a terminal (`piped`: its results go elsewhere); watch sees each change of the screen."""
    terminal, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    screen = pyte.HistoryScreen(columns, ROWS, history=5000)
    stream, written = pyte.ByteStream(screen), b""
    process = subprocess.Popen(
        [sys.executable, "-m", "pyharness", *words],
        stdin=slave,
        stdout=subprocess.DEVNULL if piped else slave,
        stderr=slave,
        cwd=ggml.ROOT,
        env=environment(**variables),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
    )
    os.close(slave)
    try:
        for data in chunks(terminal):
            written += data
            stream.feed(data)
            watch(screen, terminal)
    finally:
        os.close(terminal)  # which hangs up on what still runs
        code = process.wait()
    return Terminal(code, written, shown(screen))


@functools.cache
def piped(*words: str) -> str:
    """What the same run writes where there is no terminal, without the lines that stand in for the bar."""
    command = [sys.executable, "-m", "pyharness", *words]
    variables = environment(PYTHONUNBUFFERED="1")
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ggml.ROOT, env=variables, check=True
    )
    return re.sub(r"(?m)^\d+/\d+ .*\n", "", done.stdout)


def test_every_verb_with_a_bar_is_here() -> None:
    """The verbs whose module makes a Reporter, itself or through another."""
    users = {path.stem for path in (ggml.ROOT / "pyharness").rglob("*.py") if "report.Reporter(" in path.read_text()}
    assert users == {"oracle", "gradcheck"}
    assert set(VERBS) == {"oracle", "grad", "replay"}


@pytest.mark.parametrize("columns", [80, 100, 140])
@pytest.mark.parametrize("verb", VERBS)
def test_a_terminal_shows_what_a_file_gets_and_nothing_else(verb: str, columns: int) -> None:
    def watch(screen: pyte.HistoryScreen, _: int) -> None:
        glued = [line for line in screen.display if BAR in line and cases.OP in line]
        assert not glued

    seen = run(VERBS[verb], columns, watch)
    want = piped(*VERBS[verb])
    assert seen.code == 0
    assert BAR.encode() in seen.written
    assert seen.text == squeeze(want)
    starts = {line[:20].rstrip() for line in seen.lines}
    assert {line[:20].rstrip() for line in want.splitlines()} <= starts


@pytest.mark.parametrize("output", ["csv", "json", "md"])
def test_every_format_survives_the_bar(output: str) -> None:
    words = [*VERBS["grad"], "--output", output]
    seen, want = run(words, 80), piped(*words)
    timed = re.compile(r"\d\.[\d.e-]+")  # seconds: all other figures are the same in every run
    assert timed.sub("", seen.text) == timed.sub("", squeeze(want))


def test_results_in_a_file_leave_the_bar_on_the_terminal() -> None:
    seen = run(VERBS["oracle"], 80, piped=True)
    assert BAR.encode() in seen.written
    assert seen.text == ""


def test_no_color_leaves_no_colour_and_no_weight() -> None:
    seen = run(VERBS["oracle"], 80, NO_COLOR="1")
    assert BAR.encode() in seen.written
    assert not re.search(rb"\x1b\[[\d;]*m", seen.written)
    assert re.search(rb"\x1b\[[\d;]*m", run(VERBS["oracle"], 80).written)


@pytest.mark.parametrize("results_piped", [False, True])
def test_a_dumb_terminal_gets_no_escape_sequence(results_piped: bool) -> None:
    seen = run(VERBS["oracle"], 80, piped=results_piped, TERM="dumb")
    assert b"\x1b" not in seen.written
    assert BAR.encode() not in seen.written


def test_ctrl_c_leaves_the_terminal_in_order() -> None:
    pressed: list[bool] = []

    def press(screen: pyte.HistoryScreen, terminal: int) -> None:
        if not pressed and any("2/3" in line for line in screen.display):
            pressed.append(True)
            os.write(terminal, b"\x03")

    words = ["oracle", "-b", "CPU", "--no-receipt", "-o", f"hsk=16.hsv=16.nh=4,{LONG}"]
    seen = run(words, 80, press)
    assert seen.code == errors.INTERRUPTED
    assert any(line.startswith("stopped after ") for line in seen.lines)
    assert not [line for line in seen.lines if BAR in line or "^C" in line]
    assert seen.written.count(b"\x1b[?25l") == seen.written.count(b"\x1b[?25h")  # the cursor is back
