"""What a check of a case finds."""

from __future__ import annotations

import dataclasses

from .cases import Case

AXES = {"dq": "shic", "dk": "sgjc", "dv": "sgjc", "lse": "shi", "d": "shi", "dsinks": "h", "o": "shic"}


def named_units(units: dict[str, int]) -> str:
    """How many units (a KV head of a sequence of a node) took more than fp16 operands, as it follows a path's name."""
    return "".join(f", {count} {name}" for name, count in units.items())


@dataclasses.dataclass(frozen=True)
class PartResult:
    """How one part compares. Indices are logical: (s, h, i, c), (s, g, j, c) with j from key 0, (s, h, i), (h)."""

    part: str
    nmse: float
    worst_head: tuple[int, ...]
    worst_head_nmse: float
    worst_row: tuple[int, ...]
    worst_row_nmse: float
    worst_index: tuple[int, ...]
    got: float
    want: float
    limit: float
    passed: bool
    why: str = ""  # what other than the NMSE failed

    def place(self) -> str:
        """The worst index with its axes named."""
        return ", ".join(f"{axis}={i}" for axis, i in zip(AXES[self.part], self.worst_index, strict=True))


@dataclasses.dataclass(frozen=True)
class Forward:
    """Whose forward a pair ran, ggml's own or a path's, and the NMSE of its output; a path's is a part, too."""

    by: str
    nmse: float
    worst_head_nmse: float


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """How one case went on one device."""

    case: Case
    device: str
    seed: int  # the case's own
    status: str  # "ok", "failed", "unsupported" or "skipped"
    reason: str = ""
    parts: dict[str, PartResult] = dataclasses.field(default_factory=dict)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""
    path: str = ""
    seconds: float = 0.0  # of the computation, not of the reference
    repeats: int = 1
    distinct: int = 1  # different digests among the repeats
    forward: Forward | None = None  # of a pair
    units: dict[str, int] = dataclasses.field(default_factory=dict)  # that took more than fp16, by what they took

    def path_and_units(self) -> str:
        """The path, and how many units took more than fp16 operands."""
        return self.path + named_units(self.units)
