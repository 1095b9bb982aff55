"""Errors that end a run: each kind has its exit code, a message (what, where, why) and a hint (what next)."""

from __future__ import annotations


class Failure(Exception):
    """Base of the errors that the command line prints in words."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Usage(Failure):
    """The command line or a case string is wrong."""

    exit_code = 2


class Environment(Failure):
    """Something that the run needs is missing: a build, a device, a library that fits the tree."""

    exit_code = 3


class Lost(Environment):
    """The device stopped working in the middle of a run."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{LOST}: {message}", hint)


class Invalid(Failure):
    """A receipt is malformed or contradicts itself."""

    exit_code = 4


class Empty(Failure):
    """The filters select nothing."""

    exit_code = 5


class Stale(Failure):
    """A receipt is about other bytes than the tree's."""

    exit_code = 6


def exit_code(error: BaseException) -> int:
    """The exit code of a run that ends with this error."""
    if isinstance(error, Failure):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else Environment.exit_code


def reason(error: BaseException | None) -> str:
    """Why a run ended with this error, in a line; nothing without one."""
    if error is None:
        return ""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or "out of memory"


INTERRUPTED = 130
LOST = "the device was lost"
