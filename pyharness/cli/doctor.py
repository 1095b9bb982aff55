"""Show what is built, the devices and the kernel paths that they support, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version

from .. import __version__, options
from ..base import build, commands, digest, errors
from ..case import cases
from ..check import support
from ..device import ggml

OPTIONAL = {
    "pynvml": ("nvidia-ml-py: perf and receipts watch the GPU", ""),
    "matplotlib": ("matplotlib: receipt show --plot", "plot"),
    "securesystemslib": ("securesystemslib: signed receipts", "sign"),
    "torch": ("torch: capture, perf --peer torch", "capture"),
}
"""What each module is for, and the extra of pyproject.toml that brings it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    options.backend(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of the tree, the build and the devices; 3 when the oracle could not run."""
    tree = digest.patch_digest()
    packages = " ".join(f"{name} {version(name)}" for name in ("numpy", "cffi", "gguf"))
    _print("pyharness", __version__)
    _print("python", f"{platform.python_version()}, {packages}")
    _print("tree", f"{ggml.ROOT}, sources {tree[:12]}")
    _print("builds", ", ".join(presets()) or "none")
    code = 0
    try:
        library = options.library(args)
    except errors.Environment as error:
        _print("library", str(error), error.hint)
        return error.exit_code
    _print("library", f"ggml {library.version} in {library.directory}", *(path.name for path in library.mapped()))
    sources = {"libggml-base": library.source} | {d.name: d.source for d in library.devices()}
    for name, source in sources.items():
        if source == tree:
            _print("source", f"{name}: the tree's")
        elif source is None:
            _print("source", f"{name}: has no FLASH_ATTN_BACK")
        else:
            _print("source", f"{name}: {source[:12]}, not the tree's; build again:", library.rebuild)
            code = errors.Environment.exit_code
    for device in options.devices(args, library):
        rows = [support.query(library, device, case) for case in cases.load(cases.CASES)]
        counts = Counter((path, reason) for _, _, path, reason in rows).most_common()
        lines = [
            f"{n} of {len(rows)} cases: {f'path {path}' if path else f'not supported: {why}'}"
            for (path, why), n in counts
        ]
        _print("device", f"{device.name}: {device.description}, {memory(device)}", *lines)
    for lack in missing():
        _print("missing", *lack)
    return code


def _print(name: str, *lines: str) -> None:
    for label, line in zip([name, *[""] * len(lines)], filter(None, lines), strict=False):
        print(f"{label:<9} {line}")


def presets() -> list[str]:
    """Names of the CMake presets that are built."""
    return sorted(path.parent.name for path in (ggml.ROOT / "build").glob("*/flash-attn-back.json"))


def memory(device: ggml.Device) -> str:
    """Free and total memory in words."""
    return f"{device.memory_free / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB free"


def missing() -> Iterator[tuple[str, ...]]:
    """What this machine lacks and what it would be for, each with the command that gets it where there is one."""
    for module, (text, extra) in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield text, build.pip(extra)
    if not shutil.which("nvcc"):
        yield "nvcc: the CUDA backend", "install the CUDA toolkit: https://developer.nvidia.com/cuda-downloads"
    elif not any("cuda" in name for name in presets()):
        yield "a CUDA build: the CUDA backend", commands.build("cuda")
