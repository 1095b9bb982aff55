"""The command line: finds the verb's module, parses, calls, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import re
import sys
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..base import commands, errors

VERBS = {
    "doctor": (
        "cli.doctor",
        "show what is built, the devices and their kernel paths, what is missing and how to get it",
    ),
    "oracle": ("check.oracle", "check backends against float64, part by part"),
    "grad": ("check.gradcheck", "check ggml's own autodiff against finite differences"),
    "perf": ("perf.perf", "time the operator, and peers beside it"),
    "support": ("check.support", "show what each backend supports, and why not"),
    "list": ("cli.listing", "list the cases that the filters select; --help explains their keys"),
    "capture": ("case.capture", "store a model's attention inputs and gradient in a file"),
    "replay": ("check.replay", "run the oracle on captured tensors"),
    "patch": ("patch.tree", "put the operator into a ggml or llama.cpp checkout"),
    "train": ("training.train", "train a small model in llama.cpp with flash attention off and on"),
    "gpucheck": ("check.gpucheck", "check a CUDA device end to end"),
    "soak": ("check.soak", "mixed shapes on two streams for minutes: the same bits, no growth"),
    "receipt": ("cli.receipt", "show, verify and compare receipts"),
}

EPILOG = """exit codes:
  0    ok
  1    a case failed
  2    usage: a wrong option, argument or file
  3    environment: a build, a device or a package is missing
  4    receipt invalid
  5    nothing selected
  6    receipt stale
  130  interrupted

examples:
  python -m pyharness doctor
  python -m pyharness oracle
  python -m pyharness oracle -b CPU -p 'type_K=q8_0' --output md
  python -m pyharness oracle -o 'FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=128,nb=32)'
  python -m pyharness grad -p sinks=1
  python -m pyharness support --output csv
"""

FREE = ("seed", "layer")
"""Numbers that may be negative."""
AT_LEAST_1 = ("ctx", "examples", "jobs", "lanes", "repeat", "repeats", "steps", "stride")
ABOVE_0 = ("ceiling_gbs", "ceiling_tflops", "lr", "timeout")
AT_MOST = {"threads": 512, "timeout": threading.TIMEOUT_MAX}
"""Bounds of all other numbers by the names of their options, 0 and up where none is given; threads are ggml's."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help at the width of the terminal: prose is filled, indented lines keep their columns, commands stay whole."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(self._block(block, width, indent) for block in blocks)

    def _block(self, block: str, width: int, indent: str) -> str:
        lines = block.splitlines()
        if not any(line.startswith(" ") for line in lines):
            return textwrap.fill(block, width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(line if "python -m" in line else self._row(line, width) for line in lines)

    @staticmethod
    def _row(line: str, width: int) -> str:
        """An indented line, its continuation below the second column."""
        column = re.match(r" *\S.*?  +", line)
        return textwrap.fill(line, width, subsequent_indent=" " * (column.end() if column else 0))


class Parser(argparse.ArgumentParser):
    """Errors as the rest of the command line prints them, with what was probably meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help} | options)

    def error(self, message: str) -> NoReturn:
        """Print the message and the command that lists the options; exit 2."""
        name = self.prog.removeprefix("python -m ")
        self.exit(errors.Usage.exit_code, f"{name}: {message}\n  {commands.python()} -m {name} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's, but an argument that this parser does not know is an error, before one that is missing."""
        words = sys.argv[1:] if args is None else list(args)
        own = itertools.takewhile(lambda word: word != "--" and (self._subparsers is None or word[:1] == "-"), words)
        for word in own:  # an action's options are its parser's to judge
            if word.startswith("--") and not self._options(word):
                self._unknown(word)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._unknown(unknown[0])
        return found, unknown

    def _options(self, word: str) -> list[str]:
        """The options that a word may stand for: it may be cut short."""
        names = (name for action in self._actions for name in action.option_strings)
        return [name for name in names if name.startswith(word.partition("=")[0])]

    def _unknown(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        option = word.partition("=")[0]
        shown = {
            name.lstrip("-"): name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
        }
        close = difflib.get_close_matches(option.lstrip("-"), shown, n=1)
        self.error(f"unknown option {option}" + (f"; did you mean {shown[close[0]]}?" if close else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            close = difflib.get_close_matches(str(value), names, n=1)
            message = f"{value!r} is none of {', '.join(names)}" + (f"; did you mean {close[0]}?" if close else "")
            raise argparse.ArgumentError(action, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    width = max(map(len, VERBS))
    listing = "\n".join(f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items())
    parser = Parser(
        prog="python -m pyharness",
        description="Checks and times FLASH_ATTN_BACK of a patched ggml.\n\n"
        f"verbs (VERB --help lists its options):\n{listing}",
        epilog=EPILOG,
        usage="%(prog)s VERB [options]",
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB", nargs="?", help="one of the verbs above")
    parser.add_argument("--version", action="version", version=f"pyharness {__version__}")
    verb = parser.parse_args(words[:1]).verb
    if verb is None:
        parser.print_help(sys.stderr)
        return errors.Usage.exit_code

    try:
        module = importlib.import_module(f"pyharness.{VERBS[verb][0]}")
        verb_parser = Parser(prog=f"python -m pyharness {verb}", description=module.__doc__ or VERBS[verb][1])
        verb_parser.set_defaults(verb=verb)
        module.add_arguments(verb_parser)
        args = verb_parser.parse_args(words[1:])
        _check(verb_parser, args)
        code = int(module.run(args))
        if code == errors.INTERRUPTED:
            raise KeyboardInterrupt
        return code
    except errors.Failure as failure:
        print(f"pyharness {verb}: {failure}", file=sys.stderr)
        if failure.hint:
            print(f"  {failure.hint}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        after = "\n" if sys.stderr.isatty() else ""  # the terminal has echoed Ctrl-C
        print(f"{after}pyharness {verb}: interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except MemoryError as error:
        print(f"pyharness {verb}: {error or 'out of memory'}", file=sys.stderr)
        print("  choose smaller cases, or a machine with more memory", file=sys.stderr)
        return errors.Environment.exit_code
    except OSError as error:  # what no module foresaw: a program or a folder that is not there, a full disk
        place = f"{error.filename}: " if error.filename else ""
        print(f"pyharness {verb}: {place}{error.strerror or error}", file=sys.stderr)
        return errors.Environment.exit_code
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "pyharness":
            raise
        print(f"pyharness {verb}: no Python package {error.name}", file=sys.stderr)
        print(f"  {commands.packages()}", file=sys.stderr)
        return errors.Environment.exit_code


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse, before anything runs, numbers that no run can use and a folder that no receipt can be written to."""
    for name, value in vars(args).items():
        if type(value) in (int, float) and name not in FREE:
            least = 1 if name in AT_LEAST_1 else 0
            most = AT_MOST.get(name, sys.float_info.max)
            if not least <= value <= most or (value == 0 and name in ABOVE_0):
                bound = "above 0" if name in ABOVE_0 else f"at least {least}"
                limit = f" and at most {most:g}" if name in AT_MOST else ""
                parser.error(f"argument --{name.replace('_', '-')}: {value} must be {bound}{limit}")
    folder = getattr(args, "receipts", None)
    if isinstance(folder, Path) and not args.no_receipt:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            why = f"cannot write a receipt below {folder}: {error.strerror}"
            raise errors.Environment(why, "choose another folder with --receipts DIR, or --no-receipt") from error
