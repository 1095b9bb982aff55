"""Cases on a device whose memory is full but for a share of what they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from pyharness.base import errors
from pyharness.case import inputs, operands
from pyharness.case.cases import Case
from pyharness.check import oracle
from pyharness.device import ggml

MIB = 1 << 20


def squeezed(library: ggml.Library, device: ggml.Device, case: Case, share: float) -> tuple[bool, str]:
    """Whether a case goes right, or fails in words, where a share of what its workspace takes is free; and words."""
    given = inputs.make(case, 0)

    def free() -> int:
        return library.device(device.name).memory_free

    with library.prepare(device, given) as session:
        session.compute()  # loads the kernels
    with library.prepare(device, given) as session:
        before = free()
        session.compute()
        workspace = before - free()
        want = session.result()
    with library.prepare(device, given) as session:
        library.c.ggml_backend_synchronize(session.backend)  # makes its stream, which takes memory too
        with fill(library, session, int(workspace * share), free):
            left = free()
            words = f"workspace {workspace / MIB:.0f} MiB, {left / MIB:.0f} MiB free: "
            try:
                session.compute()
                words += f"{(left - free()) / MIB:.0f} MiB taken, "
                failed = False
            except errors.Lost as error:
                return False, words + str(error)
            except errors.Environment as error:
                words += f"{error}, afterwards "
                failed = True
        if failed:  # there is memory again, and the same graph
            session.compute()
        return judged(given, session.result(), want, words)


def judged(given: operands.Inputs, got: ggml.Result, want: ggml.Result, words: str) -> tuple[bool, str]:
    """Whether two results agree, and words."""
    if got.digest == want.digest:
        return True, words + "the same bits"
    parts = oracle.compare(given, got, {part: array.astype(np.float64) for part, array in want.parts.items()})
    wrong = [f"{part.part} {part.why or part.nmse}" for part in parts.values() if not part.passed] + got.guards
    worst = max(part.nmse for part in parts.values())
    return not wrong, words + (f"wrong: {', '.join(wrong)}" if wrong else f"right, NMSE {worst:.1e}")


@contextlib.contextmanager
def fill(library: ggml.Library, session: ggml.Session, room: int, free: Callable[[], int]) -> Iterator[None]:
    """Takes the device's memory but `room` bytes, in blocks that halve as they stop fitting, and gives it back."""
    blocks, size = [], max(free() - room, 0)
    try:
        while size >= 2 * MIB and free() - room >= 2 * MIB:
            size = min(size, free() - room)
            block = library.c.ggml_backend_alloc_buffer(session.backend, size)
            if block:
                blocks.append(block)
            else:
                size //= 2
        yield
    finally:
        for block in blocks:
            library.c.ggml_backend_buffer_free(block)
