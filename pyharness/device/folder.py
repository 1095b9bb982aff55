"""The libraries of a folder that this process does not load."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import psutil

from ..base import system
from . import environment

UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class _Device:
    name: str
    description: str
    memory_total: int
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Folder:
    """The libraries of a folder that nobody loaded."""

    directory: Path
    device: str
    source: None = None

    @property
    def version(self) -> str:
        """ggml's, from the file names."""
        named = (re.fullmatch(r"libggml-base\.so\.(\d+\.\d+\.\d+)", path.name) for path in self.mapped())
        return next((found[1] for found in named if found), UNKNOWN)

    def mapped(self) -> list[Path]:
        """Each file once."""
        return sorted({path.resolve() for path in system.libraries(self.directory, "ggml")})

    def devices(self) -> list[_Device]:
        """The one that is checked."""
        number = re.fullmatch(r"CUDA(\d+)", self.device)
        cards = environment.gpu()["devices"] or []
        if number and int(number[1]) < len(cards):
            card = cards[int(number[1])]
            return [_Device(self.device, card["name"] or UNKNOWN, card["memory_bytes"] or 0)]
        return [_Device(self.device, system.cpu_name(), psutil.virtual_memory().total)]
