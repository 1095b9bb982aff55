"""List the cases that the filters select, with their seeds on request."""

from __future__ import annotations

import argparse

from .. import options
from ..case import cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `list`."""
    parser.epilog = f"{cases.explain()}\n\ndocs/cases.md has examples."
    options.selection(parser)
    options.seed(parser)
    parser.add_argument("--seeds", action="store_true", help="print the seed of each case before it")


def run(args: argparse.Namespace) -> int:
    """Print one case a line."""
    for case in options.select(args):
        print(f"{case.seed(args.seed):020d} {case}" if args.seeds else case)
    return 0
