"""python -m pyharness: the command line as a process; a closed stream or a signal does no more harm than Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import Any

from .base import errors


class _Stream(io.FileIO):
    """A standard stream that lets the run go on when it cannot be written: results and exit code are still wanted."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def _open(descriptor: int) -> tuple[_Stream, io.TextIOWrapper]:
    """A standard stream, in the encoding that Python chose; what that cannot say is written as \\x.., never refused."""
    old = sys.stdout if descriptor == 1 else sys.stderr
    stream = _Stream(descriptor, "w", closefd=False)
    at_once = descriptor == 2 or (isinstance(old, io.TextIOWrapper) and (old.line_buffering or old.write_through))
    encoding = old.encoding if old else "utf-8"
    return stream, io.TextIOWrapper(io.BufferedWriter(stream), encoding, "backslashreplace", line_buffering=at_once)


def _main() -> int:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which a file of the run would get otherwise
    (output, sys.stdout), (_, sys.stderr) = _open(1), _open(2)
    stops = ("SIGTERM", "SIGHUP", "SIGBREAK")
    for number in (getattr(signal, name) for name in stops if hasattr(signal, name)):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        from .cli import cli

        code = cli.main()
        sys.stdout.flush()
    except KeyboardInterrupt:  # before the command line was read, or after the run
        return errors.INTERRUPTED
    if output.failure and output.failure.errno != errno.EPIPE:
        print(f"pyharness: standard output is incomplete: {output.failure.strerror}", file=sys.stderr)
        return code or errors.Environment.exit_code
    return code


sys.exit(_main())
