"""Options that several verbs share, and what they stand for."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path

from .base import errors, system
from .case import capture_file, cases
from .device import ggml

OUTPUTS = ("console", "json", "csv", "md")
RECEIPTS = ggml.ROOT / "receipts"


def selection(parser: argparse.ArgumentParser, default_file: Path = cases.CASES) -> None:
    """-o, -p, --case-file: which cases."""
    parser.add_argument(
        "-o",
        dest="op",
        metavar="OP",
        help="cases by operator name, regular expression or case string (`list --help` explains its keys); "
        "several are separated by commas",
    )
    parser.add_argument("-p", dest="params", metavar="REGEX", help="of these only cases that match this expression")
    parser.add_argument(
        "--case-file", type=Path, default=default_file, metavar="FILE", help="case list (default: %(default)s)"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="N random cases instead of those in the list"
    )


def graph(parser: argparse.ArgumentParser) -> None:
    """--graph: with or without the forward."""
    parser.add_argument(
        "--graph",
        dest="forward",
        choices=(*cases.GRAPHS, "both"),
        default="backward",
        help="the listed cases with the forward in the graph (pair), or without it (default: %(default)s)",
    )


def seed(parser: argparse.ArgumentParser) -> None:
    """--seed."""
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="base seed; each case's own follows from it and the case string (default: 0)",
    )


def strict(parser: argparse.ArgumentParser) -> None:
    """--strict."""
    parser.add_argument("--strict", action="store_true", help="count unsupported and skipped cases as failures")


def backend(parser: argparse.ArgumentParser) -> None:
    """-b, --libs, --preset, --threads: which libraries and device."""
    parser.add_argument(
        "-b",
        dest="backend",
        metavar="DEVICE",
        help="device name; several are separated by commas (default: all devices)",
    )
    parser.add_argument(
        "--libs", type=Path, metavar="DIR", help="directory of libraries built elsewhere (default: $PYHARNESS_LIBS)"
    )
    parser.add_argument("--preset", default="cpu", help="CMake preset whose build is used (default: cpu)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of the CPU device (default: all cores)"
    )


def output(parser: argparse.ArgumentParser) -> None:
    """--output: how results are written to stdout."""
    parser.add_argument(
        "--output", choices=OUTPUTS, default="console", help="format of the results on stdout (default: console)"
    )


def listed(args: argparse.Namespace) -> list[cases.Case]:
    """The cases that the filters select from. Raises errors.Usage."""
    known = cases.random_cases(args.random, args.seed) if args.random else cases.load(args.case_file)
    return cases.in_graphs(known, graphs(args)) if graphs(args) else known


def graphs(args: argparse.Namespace) -> tuple[str, ...]:
    """Which of cases.GRAPHS the listed cases run in; none where they run as they are listed."""
    if "forward" not in args:
        return ()
    return cases.GRAPHS if args.forward == "both" else (args.forward,)


def receipt(name: str) -> Path:
    """The file of a receipt that is given by its path, or by its id or the first digits of that.

    Raises errors.Usage where no receipt in `receipts`, or more than one, has such an id."""
    path = Path(name)
    if path.exists() or not re.fullmatch("[0-9a-f]{1,64}", name):
        return path
    known = {label(file): file for file in sorted(RECEIPTS.glob("*.json")) if label(file) != file.name}
    found = {id12: file for id12, file in known.items() if id12.startswith(name[:12])}
    if len(name) > 12:
        found = {id12: file for id12, file in found.items() if f'"id":"{name}' in file.read_text(encoding="utf-8")}
    if len(found) > 1:
        raise errors.Usage(f"receipt {name} is not unique", f"give more digits: {', '.join(found)}")
    if not found:
        close = difflib.get_close_matches(name, [id12[: len(name)] for id12 in known], n=1)
        hint = f"did you mean {close[0]}?" if close else "receipts/README.md lists their ids; elsewhere give the file"
        raise errors.Usage(f"no receipt {name} in {RECEIPTS}", hint)
    return next(iter(found.values()))


def label(path: Path) -> str:
    """How messages name a receipt: by the id in its file's name, by the whole name where there is none."""
    found = re.fullmatch(r".*-([0-9a-f]{12})\.json", path.name)
    return found[1] if found else path.name


def select(args: argparse.Namespace) -> list[cases.Case]:
    """The selected cases; a capture that -o names can be read. Raises errors.Usage or errors.Empty."""
    known = listed(args)
    selected = cases.select(known, args.op, args.params)
    for case in selected:
        if case.capture and case not in known:
            capture_file.load(case)
    return selected


def library(args: argparse.Namespace) -> ggml.Library:
    """The libraries that the options name, all of one folder. Raises errors.Environment."""
    library = ggml.Library.open(args.libs, args.preset)
    inside = {path.resolve() for path in system.libraries(library.directory, "ggml")}
    for path in library.mapped():
        if path not in inside:  # a library names the folder that it was built in
            raise errors.Environment(
                f"{library.directory} has no {path.name}; the loader found it at {path}",
                "put all libraries of one build into the folder",
            )
    return library


def devices(args: argparse.Namespace, lib: ggml.Library) -> list[ggml.Device]:
    """The devices that the options name, all of them by default. Raises errors.Environment."""
    if args.backend is not None:
        return list(dict.fromkeys(_device(lib, name.strip()) for name in args.backend.rstrip(",").split(",")))
    found = lib.devices()
    if not found:
        raise errors.Environment(f"no device in {lib.directory}", f"build again: {lib.rebuild}")
    return found


def _device(lib: ggml.Library, name: str) -> ggml.Device:
    """A device of the libraries. Raises errors.Environment, which names the preset that a CUDA device needs."""
    try:
        return lib.device(name)
    except errors.Environment as error:
        if name.upper().startswith("CUDA") and "cuda" not in lib.directory.as_posix():
            raise errors.Environment(str(error), f"{error.hint}; --preset cuda selects the CUDA build") from None
        raise
