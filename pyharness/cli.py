"""The command line: finds the verb's module, parses, calls, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from . import build, errors

VERBS = {
    "doctor": ("doctor", "what is built, which devices, which paths, what is missing and how to get it"),
    "oracle": ("oracle", "correctness: a backend against float64, part by part"),
    "grad": ("gradcheck", "finite differences through ggml's own autodiff"),
    "perf": ("perf", "timings"),
    "support": ("support", "what each backend says yes to, and why not"),
    "list": ("listing", "the cases that the filters select"),
    "capture": ("capture", "store a model's attention inputs and gradient in a file"),
    "replay": ("replay", "run the oracle on captured tensors"),
    "patch": ("tree", "put the operator into a ggml or llama.cpp checkout"),
    "train": ("train", "train a small model in llama.cpp with flash attention off and on"),
    "gpucheck": ("gpucheck", "check a CUDA device end to end"),
    "receipt": ("receipt", "show, verify and compare receipts"),
}

EPILOG = """exit codes:
  0 ok   1 a case failed   2 usage   3 environment   4 receipt invalid   5 nothing selected   6 receipt stale
  130 interrupted

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
"""Bounds of all other numbers by the names of their options, 0 and up where nothing is said; threads are ggml's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    width = max(map(len, VERBS))
    listing = "\n".join(f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="python -m pyharness",
        description=f"Checks and times FLASH_ATTN_BACK of a patched ggml.\n\nverbs (VERB --help says more):\n{listing}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s VERB [options]",
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="one of the verbs above")
    verb = parser.parse_args(words[:1]).verb

    try:
        module = importlib.import_module(f".{VERBS[verb][0]}", __package__)
        verb_parser = argparse.ArgumentParser(
            prog=f"python -m pyharness {verb}",
            description=(module.__doc__ or VERBS[verb][1]).strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb_parser.set_defaults(verb=verb)
        module.add_arguments(verb_parser)
        args = verb_parser.parse_args(words[1:])
        _check(verb_parser, args)
        return int(module.run(args))
    except errors.Failure as failure:
        print(f"pyharness {verb}: {failure}", file=sys.stderr)
        if failure.hint:
            print(f"  {failure.hint}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print(f"pyharness {verb}: interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except MemoryError as error:
        print(f"pyharness {verb}: {error or 'out of memory'}", file=sys.stderr)
        print("  choose smaller cases, or a machine with more memory", file=sys.stderr)
        return errors.Environment.exit_code
    except OSError as error:  # what no module foresaw: a program or a folder that is not there, a full disk
        print(f"pyharness {verb}: {error}", file=sys.stderr)
        return errors.Environment.exit_code
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == __package__:
            raise
        print(f"pyharness {verb}: no Python package {error.name}", file=sys.stderr)
        print(f"  run . {build.VENV}/bin/activate, which ./scripts/oracle makes, or {build.pip()}", file=sys.stderr)
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
        wrong = (
            errno.ENOTDIR if not existing.is_dir() else 0 if os.access(existing, os.W_OK | os.X_OK) else errno.EACCES
        )
        if wrong:
            why = f"cannot write a receipt below {folder}: {os.strerror(wrong)}"
            raise errors.Environment(why, "--receipts DIR, or --no-receipt")
