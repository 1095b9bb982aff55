"""What a run needs to leave a receipt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import options
from ..base import digest, errors, system
from ..base.digest import ROOT
from ..case.cases import Case
from ..device.ggml import Device, Library
from . import commits, statement, verify
from .statement import Document


def check_source(library: Library, root: Path = ROOT) -> None:
    """That every loaded library was built from the tree's sources, and that a carried commit is proved;
    errors.Environment names the files that differ."""
    commits.read(root)
    want = digest.files(root)
    tree = digest.patch_digest(root)
    for item in statement.libraries(library, root):
        if item["source"] == tree or system.stem(item["name"]) == "ggml":
            continue
        if item["source"] is None:
            raise errors.Environment(
                f"{item['name']} does not say what it was built from",
                hint=f"build it from this tree: {library.rebuild}",
            )
        directory = library.directory
        build = [directory.parent] if (directory.parent / "CMakeCache.txt").is_file() else []
        built = verify.manifest_of(item["source"], [directory, *build, root / "build/upstream"])
        differing = [p for p in sorted(want.keys() | (built or {}).keys()) if built and want.get(p) != built.get(p)]
        files = (
            ", ".join(f"ggml/{p}" for p in differing)
            or "the build left no list of its files, so which one is not known"
        )
        raise errors.Environment(
            f"{item['name']} was built from sources {item['source'][:12]}, the tree has {tree[:12]}: {files}",
            hint=f"build again: {library.rebuild}",
        )


def save(directory: Path, document: Document) -> None:
    """Write a receipt below `directory` and say which."""
    path = statement.save(directory, document)
    print(f"receipt {options.label(path)} ({path})", file=sys.stderr, flush=True)


def selection(
    args: argparse.Namespace, selected: Sequence[Case], devices: Iterable[Device], root: Path = ROOT
) -> dict[str, Any]:
    """What a run with these options was to try; without the options of a case list, just the selected cases."""
    names = [device.name for device in devices]
    if "case_file" not in args:
        return statement.selection(selected, selected, names)
    if getattr(args, "last_failed", False):  # which these were, no list and no filter tells
        return statement.selection(options.listed(args), selected, names)
    file = args.case_file.resolve()
    inside = file.is_relative_to(root.resolve())
    return statement.selection(
        options.listed(args),
        selected,
        names,
        file=file.relative_to(root.resolve()).as_posix() if inside else file.name,
        op=args.op,
        params=args.params,
        random=args.random,
        graphs=options.graphs(args),
    )
