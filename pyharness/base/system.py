"""Where Linux, macOS and Windows differ: names of libraries and programs, search paths, mapped files, CPU names."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

LIBRARY_PATH = {"win32": "PATH", "darwin": "DYLD_LIBRARY_PATH"}.get(sys.platform, "LD_LIBRARY_PATH")
"""The variable whose folders the loader searches for libraries."""


def library(name: str, system: str = sys.platform) -> str:
    """File name of a shared library that CMake calls `name`: libggml-base.so, libggml-base.dylib, ggml-base.dll."""
    return f"{name}.dll" if system == "win32" else f"lib{name}.{'dylib' if system == 'darwin' else 'so'}"


def stem(file: str) -> str:
    """The name of a shared library by that of its file, with or without a version: ggml-base; "" for other files."""
    found = re.fullmatch(r"(?:lib)?(.+?)\.(?:dll|so(?:\.[0-9.]+)?|(?:[0-9.]+\.)?dylib)", file)
    return found[1] if found else ""


def belongs(path: Path, name: str) -> bool:
    """Whether a file is a shared library, whatever its version, whose name is `name` or begins with it and a dash."""
    return stem(path.name) == name or stem(path.name).startswith(f"{name}-")


def libraries(folder: Path, name: str) -> Iterator[Path]:
    """The shared libraries of a folder, links and versions too, that belong to `name`."""
    yield from (path for path in (sorted(folder.iterdir()) if folder.is_dir() else ()) if belongs(path, name))


def search(folder: Path, variable: str = LIBRARY_PATH) -> dict[str, str]:
    """The environment in which a folder is the first of a search path, of libraries unless another is named."""
    return {variable: os.pathsep.join(filter(None, (str(folder), os.environ.get(variable))))}


def program(name: str, system: str = sys.platform) -> str:
    """File name of a program."""
    return f"{name}.exe" if system == "win32" else name


def mapped_files() -> list[Path]:
    """Every file that this process has mapped, sorted, each once."""
    if sys.platform == "darwin":  # where psutil has none
        dyld = ctypes.CDLL(None)
        dyld._dyld_get_image_name.restype = ctypes.c_char_p
        named = (dyld._dyld_get_image_name(i) for i in range(dyld._dyld_image_count()))
        return sorted({Path(os.fsdecode(name)) for name in named if name})
    return sorted({path for region in psutil.Process().memory_maps() if (path := Path(region.path)).is_absolute()})


def cpu_name() -> str:
    """The processor's own name, its architecture where it has none."""
    name = ""
    if sys.platform == "darwin":
        name = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout
    elif sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = found[1] if (found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)) else ""
    return name.strip() or platform.processor() or platform.machine()
