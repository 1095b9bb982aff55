"""Show what each backend supports and on which kernel path, and its reason where it does not."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter

from .. import options
from ..base import errors
from ..case.cases import TYPES, Case, block
from ..device import ggml

HEAD_SIZES = [(size, size) for size in (32, 40, 64, 72, 80, 88, 96, 112, 128, 256, 512)] + [(192, 128), (576, 512)]

Row = tuple[str, Case, str, str]  # device, case, path ("" = refused), reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `support`."""
    options.selection(parser)
    options.seed(parser)
    options.backend(parser)
    options.strict(parser)
    options.output(parser)
    parser.add_argument("--matrix", action="store_true", help="print a table of K/V types by head sizes instead")
    parser.add_argument("--all", action="store_true", help="print every case, not only unsupported ones")


def run(args: argparse.Namespace) -> int:
    """Print what the devices support; under --strict an unsupported case is a failure."""
    if args.matrix and (
        args.op or args.params or args.random or args.all or args.strict or args.output in ("json", "csv")
    ):
        raise errors.Usage(
            "--matrix does not combine with filters and formats: it prints a Markdown table of fixed shapes",
            "give it -b, --libs, --preset and --threads only",
        )
    library = options.library(args)
    devices = options.devices(args, library)
    if args.matrix:
        for device in devices:
            print(matrix(library, device), end="\n\n")
        return 0
    rows = [query(library, device, case) for case in options.select(args) for device in devices]
    if args.output == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(("device", "case", "supported", "path", "reason"))
        writer.writerows((name, case, int(bool(path)), path, reason) for name, case, path, reason in rows)
    elif args.output == "json":
        keys = ("device", "case", "path", "reason")
        print(json.dumps([dict(zip(keys, (d, str(c), p, r), strict=True)) for d, c, p, r in rows], indent=1))
    elif args.output == "md":
        print("| device | case | path | why not |\n|---|---|---|---|")
        for name, case, path, reason in rows:
            print(f"| {name} | `{case}` | {path} | {reason} |")
    else:
        for name, case, path, reason in rows:
            if args.all or not path:
                print(f"{name:<8} {path or 'no':<8} {case}{': ' + reason if reason else ''}")
        for (name, path, reason), count in sorted(Counter((d, p, r) for d, _, p, r in rows).items()):
            print(
                f"{name}: {count} case{'s' * (count != 1)} {f'on path {path}' if path else f'not supported: {reason}'}"
            )
    return 1 if args.strict and any(not path for _, _, path, _ in rows) else 0


def query(library: ggml.Library, device: ggml.Device, case: Case) -> Row:
    """Whether a device supports a case."""
    try:
        reason = library.refusal(device, case)
    except errors.Usage as error:
        return device.name, case, "", str(error)
    return device.name, case, "" if reason else library.path(device, case) or "yes", reason or ""


def matrix(library: ggml.Library, device: ggml.Device) -> str:
    """A Markdown table: the path by type of K and V and by head size; empty where blocks do not divide the head."""
    lines = [f"| {device.name} | " + " | ".join(f"{k}" if k == v else f"{k}/{v}" for k, v in HEAD_SIZES) + " |"]
    lines.append("|---" * (len(HEAD_SIZES) + 1) + "|")
    for name in TYPES:
        cells = []
        for hsk, hsv in HEAD_SIZES:
            if hsk % block(name)[0] or hsv % block(name)[0]:
                cells.append("")
                continue
            case = Case(hsk=hsk, hsv=hsv, nh=8, nhkv=2, kv=256, nb=64, type_K=name, type_V=name)
            cells.append(query(library, device, case)[2] or "no")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
