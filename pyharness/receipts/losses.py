"""What the losses and gradients of a training must be like; a receipt holds them, so that this can be checked again."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Limits:
    """How far flash attention on may be from off: relative error of a loss, NMSE of a parameter's gradient."""

    loss: float
    gradient: float


LIMITS = {"cpu": Limits(1e-4, 1e-6), "cuda": Limits(1e-3, 1e-5)}


NOISE = 1e-6
"""Relative change of the weights of a control run: a training that lets it grow past the limit cannot tell a fault."""


def apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Relative error of another run's loss in each step."""
    with np.errstate(all="ignore"):
        return [float(np.divide(abs(b - a), abs(a))) for a, b in zip(one, other, strict=True)]


def severity(error: float) -> tuple[bool, float]:
    """Orders errors: NaN is the worst."""
    return error != error, error


@dataclasses.dataclass(frozen=True)
class Check:
    """One claim of the demonstration: what was found, what it may be at most."""

    name: str
    found: float
    limit: float

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.found <= self.limit


def compare(
    losses: Mapping[str, Sequence[float]], gradients: Mapping[str, float], noise: float, limits: Limits
) -> list[Check]:
    """What follows from the losses of the runs off, on and control and from the gradients' errors alone.

    A receipt holds these, so that whoever reads it can ask again."""
    off, on = losses["off"], losses["on"]
    fourth = max(len(on) // 4, 1)
    with np.errstate(all="ignore"):
        fall = float(np.divide(statistics.mean(on[-fourth:]), statistics.mean(on[:fourth])))
    on_off, control = (max(apart(off, other), key=severity) for other in (on, losses["control"]))
    worst = max(sorted(gradients), key=lambda name: severity(gradients[name]))
    return [
        Check("losses, relative error", on_off, limits.loss),
        Check(f"the same of two runs with it off, weights {noise} apart", control, limits.loss),
        Check("loss falls: mean of the last quarter over that of the first", fall, 0.99),
        Check(f"gradients of {len(gradients)} parameters, worst NMSE ({worst})", gradients[worst], limits.gradient),
    ]
