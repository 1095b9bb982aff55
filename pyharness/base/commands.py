"""Commands to paste, for messages: quoted, and right in whatever folder and environment they are pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from .build import PROGRAMS, PYTHON, ROOT, VENV, pip


def python() -> str:
    """The Python that runs: by its name where that finds it, by its path otherwise."""
    found = shutil.which("python")
    same = found is not None and Path(found).parent == Path(sys.executable).parent
    return "python" if same else shlex.quote(sys.executable)


def script(name: str) -> str:
    """A script of scripts/."""
    path = Path("scripts") / name
    return f"./{path}" if os.path.samefile(".", ROOT) else shlex.quote(str(ROOT / path))


def packages() -> str:
    """Get the packages of pyharness: into the checkout's virtual environment, or that environment itself."""
    if Path(sys.prefix) == VENV:
        return pip()
    return f". {shlex.quote(str(VENV / PROGRAMS / 'activate'))}" if PYTHON.exists() else script("oracle")


def rebuild(libraries: Path) -> str:
    """Build the libraries of a folder again; those of no preset's build are replaced by the CPU's."""
    folder = libraries.parent
    return build(folder.name) if folder.parent == ROOT / "build" else script("oracle")


def build(preset: str) -> str:
    """Configure and build the libraries of a CMake preset."""
    path = f'export PATH={shlex.quote(str(VENV / PROGRAMS))}:"$PATH"'
    name = shlex.quote(preset)
    return (
        f"(cd {shlex.quote(str(ROOT))} && {path} && cmake --preset {name} && cmake --build build/{name} --target ggml)"
    )
