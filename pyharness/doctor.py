"""What is built, which devices there are and which kernel paths they take, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import sys
from collections import Counter
from importlib.metadata import version

from . import cases, digest, errors, ggml, options, support

OPTIONAL = {
    "pynvml": "nvidia-ml-py: perf and receipts watch the GPU",
    "matplotlib": "matplotlib: receipt show --plot",
    "securesystemslib": "securesystemslib: signed receipts",
    "torch": "torch: capture, perf --peer torch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    options.backend(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of the tree, the build and the devices; 3 when the oracle could not run."""
    tree = digest.patch_digest()
    packages = " ".join(f"{name} {version(name)}" for name in ("numpy", "cffi", "gguf"))
    print(f"python    {platform.python_version()}, {packages}")
    print(f"tree      {ggml.ROOT}, sources {tree[:12]}")
    print(f"builds    {', '.join(presets()) or 'none'}")
    code = 0
    try:
        library = options.library(args)
    except errors.Environment as error:
        print(f"library   {error}\n          {error.hint}")
        return error.exit_code
    print(f"library   ggml {library.version} in {library.directory}")
    for mapped in library.mapped():
        print(f"          {mapped.name}")
    sources = {"libggml-base": library.source} | {d.name: d.source for d in library.devices()}
    for name, source in sources.items():
        if source == tree:
            print(f"source    {name}: the tree's")
        elif source is None:
            print(f"source    {name}: knows no FLASH_ATTN_BACK")
        else:
            print(f"source    {name}: {source[:12]}, not the tree's; build again: ./scripts/oracle")
            code = errors.Environment.exit_code
    for device in options.devices(args, library):
        print(f"device    {device.name}: {device.description}, {memory(device)}")
        rows = [support.ask(library, device, case) for case in cases.load(cases.CASES)]
        for (path, reason), count in Counter((path, reason) for _, _, path, reason in rows).most_common():
            print(f"          {count} of {len(rows)} cases: {'path ' + path if path else 'refused: ' + reason}")
    for text in missing():
        print(f"missing   {text}")
    return code


def presets() -> list[str]:
    """Names of the CMake presets that are built."""
    return sorted(path.parent.name for path in (ggml.ROOT / "build").glob("*/flash-attn-back.json"))


def memory(device: ggml.Device) -> str:
    """Free and total memory in words."""
    return f"{device.memory_free / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB free"


def missing() -> list[str]:
    """What this machine lacks, and what it would be for."""
    lines = [f"{text} (pip install)" for module, text in OPTIONAL.items() if importlib.util.find_spec(module) is None]
    if not shutil.which("nvcc"):
        lines.append("nvcc: the CUDA backend (CUDA toolkit; then --preset cuda)")
    elif not any("cuda" in name for name in presets()):
        lines.append("a CUDA build: cmake --preset cuda && cmake --build build/cuda --target ggml")
    if sys.platform != "linux":
        lines.append("Linux: the mapped libraries are read from /proc/self/maps")
    return lines
