"""Mutation testing: breaks every formula and index, one at a time, and tells which breaks no test notices.

    python tests/mutate.py kernel        # ggml/src/ggml-cpu/flash-attn-back.cpp
    python tests/mutate.py reference     # pyharness/case/reference.py

A mutant is an operator that becomes its neighbour or loses an operand's place, an index or a constant one off (1 % off
where it is no integer), a name that becomes its twin (k and v, h and s), a condition that always or never holds, two
arguments swapped, or a statement left out. All mutants of the kernel are compiled into one library, in which a variable
picks one: a mutant costs a fork and the tests that run until one fails. Exit code 1 if a mutant lives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import dataclasses
import faulthandler
import itertools
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tree_sitter
import tree_sitter_cpp

ROOT = Path(__file__).resolve().parent.parent
KERNEL = ROOT / "ggml/src/ggml-cpu/flash-attn-back.cpp"
REFERENCE = ROOT / "pyharness/case/reference.py"
BUILD = ROOT / "build/cpu"
MUTANTS = ROOT / "build/mutants"

SECONDS = 30  # of CPU time that the tests of one mutant may take; a mutant that takes more is caught
PATIENCE = 20  # times as much wall time
WORK = 10_000_000  # products that S and dP of a case may have
FAST = "not thirty_runs and not (every_chunk and (3.0 or 65504))"

# what an operator may become: its neighbour, or its opposite
OPERATORS = {
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "%": ("/",),
    "//": ("/",),
    "**": ("*",),
    "@": ("*",),
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "and": ("or",),
    "or": ("and",),
    "is": ("is not",),
    "is not": ("is",),
    "&": ("|",),
    "|": ("&",),
    "^": ("&",),
    "<<": (">>",),
    ">>": ("<<",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("/=",),
    "/=": ("*=",),
    "|=": ("&=",),
}
ORDERED = {"-", "/", "%", "//", "<<", ">>", "@"}  # operands may not be swapped

TWINS: dict[str, list[str]] = {}  # names that one may take for each other
for _pair in (
    *(
        "k v",
        "q d",
        "q k",
        "Dk Dv",
        "ldk ldv",
        "kj vj",
        "dk dv",
        "want_dk want_dv",
        "want_dq want_dk",
        "h s",
        "i j",
        "N M",
    ),
    *(
        "block_k block_v",
        "block_q block_do",
        "qr dor",
        "qt dot",
        "l a",
        "n m",
        "ih it",
        "it jt",
        "head0 row0",
        "row0 key0",
    ),
    *("n_rows n_lanes", "rows keys", "low high", "p ds", "dst_row dst_col", "top total", "lse D", "lse d_sum", "H Hkv"),
):
    _a, _b = _pair.split()
    TWINS.setdefault(_a, []).append(_b)
    TWINS.setdefault(_b, []).append(_a)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A piece of the source, in bytes, and what stands there instead; "" leaves a statement out."""

    start: int
    end: int
    text: str
    statement: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """Mutants that change no result, or none that a test can see."""

    why: str
    function: str = ""  # the name of one that they stand in, a regular expression
    line: str = ""  # found in their line
    text: str = ""  # found in what they put there

    def holds(self, function: str, line: str, text: str) -> bool:
        """Whether a mutant is one of them."""
        return bool(
            re.fullmatch(self.function or ".*", function) and re.search(self.line, line) and re.search(self.text, text)
        )


_BLOCKING = "blocks of any size give the same result"
_SPARE = "memory that nobody uses"
_SHORTCUT = "a short cut past work that changes nothing"
_ROUNDING = "below F32's rounding"
_LIMIT = "within the limit of F32, 1e-10"
_BOUNDS = "the address sanitizer's to find"

KERNEL_RULES = [
    Rule(_BLOCKING, "share"),
    Rule(_BLOCKING, "make_plan", r"max_keys|p\.keys  |n_chunks  |row_bytes|max_tiles|p\.tiles  |p\.heads  |kv_bytes "),
    Rule(_SPARE, "make_plan", r"p\.ld[kv]  .*max", r"1 [+-] 1"),
    Rule(_SPARE, "make_plan", "p.planes ", r">= 0|[23] \+ 1"),
    Rule(_SHORTCUT, "gemm|gemm_panel", r"if \([mn] > 0\)", r"true|>=|m > 0|0 \+ 1"),
    Rule(_ROUNDING, "exp_nonpositive", "float z = ", r"1\.01"),
    Rule(_ROUNDING, "exp_nonpositive", "float c = ", r"r \* 1.98|1\.39.*1\.01|1\.98.*1\.01"),
    Rule(
        _LIMIT, "softcap", "float poly ", r"\((315|2835|155925) [+-] 1|\(-?(2|17|62|1382)\.0f \* 1\.01|(315|2835) - z"
    ),
    Rule(_ROUNDING, "softcap", "z < 0.0625f", r"<=|0\.0625f \* 1\.01"),
    Rule(
        "within what reference.rounding allows scores of that size",
        "fp16_order",
        r"bits \^",
        r"<<|15 >>|15 [+-] 1|0x7fff - 1",
    ),
    Rule("beside zeros of K and V", "load_row", "c < n", r"<=|^1\.0f$"),
    Rule("one key that outweighs all has P = 1 however its score is rounded", "find_bias", "key = 0", r"0 \+ 1"),
    Rule(_BOUNDS, "find_bias", "i < x.n", "<="),
    Rule("beside zeros of K and V", "do_rows", "load_row", r"p\.ld[kv], node\.D[kv]"),
    Rule("lanes behind the rows of a tile, which nobody reads", "do_rows", r"std::fill\((qt|bias), "),
    Rule("a slope times -inf is -inf, too", "scores", r"m\[j\] == -INFINITY", "^INFINITY$"),
    Rule("equal either way", "find_bias", "order > max|bias > sink", ">="),
    Rule(_SHORTCUT, "scores", r"if \(with_dp\)", "^true$"),
    Rule(_BOUNDS, "scores", "j < nk", "<="),
    Rule("alignment changes no result", line="params->wdata", text="^round_up"),
    Rule("set before it is read", line=r"^(int64_t|bool) \w+ += (0|false);", text=r"0 \+ 1"),
    Rule("copysign gives the sign", "softcap", "float t  ", r"^\(?e - 1"),
    Rule(_BOUNDS, "softmax_back", "i < n_lanes", "<="),
    Rule("exp(-inf) is 0 whatever is taken from it", "softmax_back", "== -INFINITY", "1\\.0f$"),
    Rule(_ROUNDING, "exp_nonpositive", "-87", r"<=|-87.0f \* 1\.01"),
]
REFERENCE_RULES = [
    Rule("the module in which mutants are tried has it already", "()", text="^$"),
    Rule(_BLOCKING, "()", "^(ROWS|KEYS) = "),
    Rule(_SHORTCUT, "()", "^_MASKED = "),
    Rule(_SHORTCUT, "scores", r"bits\.any|part = None|return None|== _MASKED", r"^(?!\(\(?bits\)? !=)"),
    Rule(_SHORTCUT, "work", r"not owed|return \[\]", "^(False|)$"),
    Rule(_SHORTCUT, "work", "low < high", "<="),
    Rule(_SHORTCUT, "work", 'if "d[kv]" in owed', "^True$"),
    Rule("0 by the formula, too", "slopes", "max_bias <= 0", r"\) < \("),
    Rule("exp(-inf) is 0 whatever is taken from it", "work", "isneginf", r"0 \+ 1"),
    Rule("times a P of 0", "_rounding", "of_score = ", r"0 \+ 1"),
    Rule("squared", "_rounding", "ds, square = |into_d ", r"^\(row_d\) - \(dp\)$"),
    Rule("a sink is never above the LSE that it is part of", "_rounding", "sink = ", r"0 \+ 1"),
    Rule("squared", "_rounding", r"by_d_q \+=", "-="),
    Rule("nothing of a row without keys counts", "_rounding", "top, row_d", r"0 \+ 1"),
    Rule("products in another order", line="einsum", text=r"shn\", o"),
    Rule("progress is no result", line=r"report\("),
    Rule("every row is set", "_forward", r"lse = np\.full", r"^\(?np\.inf"),
    Rule(
        "a row without keys: 0 over anything, and the log of 0",
        "work",
        r"np\.where\(total > 0",
        r"\(0 \+ 1\)|\(1 \+ 1\)",
    ),
    Rule("the log of 0", "work", r"rows\] = np\.where\(total > 0", ">="),
    Rule(_BLOCKING, "_ordered", r"workers|threadpool_limits|future\.cancel"),
]


class Source:
    """A file and its mutants."""

    def __init__(self, data: bytes, rules: Iterable[Rule] = ()) -> None:
        self.data, self.rules = data, list(rules)
        self.found: dict[Mutant, None] = {}
        self.excluded: dict[str, int] = {}
        self.function = ""

    def add(self, start: int, end: int, *texts: str, statement: bool = False) -> None:
        """Mutants of a piece, but those that a rule excludes."""
        for text in texts:
            mutant = Mutant(start, end, " ".join(text.split()), statement)
            rule = next((r for r in self.rules if r.holds(self.function, self.line(mutant)[1], mutant.text)), None)
            if rule is None:
                self.found[mutant] = None
            else:
                self.excluded[rule.why] = self.excluded.get(rule.why, 0) + 1

    def text(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def line(self, mutant: Mutant) -> tuple[int, str]:
        """Number and text of the line in which a mutant starts."""
        first = self.data.rfind(b"\n", 0, mutant.start) + 1
        return self.data.count(b"\n", 0, first) + 1, self.data[first:].split(b"\n", 1)[0].decode().strip()

    def diff(self, mutant: Mutant) -> str:
        """The lines of a mutant, before and after."""
        first = self.data.rfind(b"\n", 0, mutant.start) + 1
        last = self.data.find(b"\n", mutant.end)
        before, after = self.text(first, mutant.start), self.text(mutant.end, last)
        old = (before + self.text(mutant.start, mutant.end) + after).splitlines()
        return "\n".join([f"    -{line}" for line in old] + [f"    +{before}{mutant.text or '/* left out */'}{after}"])

    def binary(self, node: tuple[int, int], left: str, operator: str, right: str) -> None:
        """Mutants of an operation and of its operands' order."""
        self.add(*node, *(f"{left} {other} {right}" for other in OPERATORS.get(operator, ())))
        if operator in ORDERED:
            self.add(*node, f"{right} {operator} {left}")

    def number(self, start: int, end: int) -> None:
        """Mutants of a constant."""
        text = self.text(start, end)
        if text.startswith("-"):
            self.add(start, end, text[1:])
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|[0-9]+)u?", text):
            self.add(start, end, f"({text} + 1)", *[f"({text} - 1)"] * (text.strip("0xu") != ""))
        else:
            zero = float_of(text) == 0
            self.add(start, end, "1.0f" if zero else f"({text} * 1.01{'f' * text.endswith('f')})")

    def arguments(self, call: tuple[int, int], arguments: list[tuple[int, int]]) -> None:
        """Neighbouring arguments swapped."""
        for (a, b), (c, d) in itertools.pairwise(arguments):
            if self.text(a, b) != self.text(c, d):
                parts = (call[0], a), (c, d), (b, c), (a, b), (d, call[1])
                self.add(*call, "".join(self.text(*part) for part in parts))


def float_of(text: str) -> float:
    """The value of a constant of C or Python."""
    text = text.rstrip("fF") if not text.startswith("0x") or "p" in text else text
    return float.fromhex(text) if text.startswith("0x") else float(text)


def of_cpp(data: bytes, rules: Iterable[Rule] = ()) -> Source:
    """The mutants of C++ code outside of #if, constant expressions and for's own update."""
    source = Source(data, rules)
    language = tree_sitter.Language(tree_sitter_cpp.language())
    parsed = data.replace(b"GGML_RESTRICT", b"__restrict__ ")
    walk_cpp(source, tree_sitter.Parser(language).parse(parsed).root_node)
    return source


# nodes whose constants and names are not expressions of the running code
CONSTANT = {
    "array_declarator",
    "enumerator_list",
    "parameter_list",
    "preproc_if",
    "preproc_include",
    "sizeof_expression",
}
CONSTANT |= {"static_assert_declaration", "string_literal", "template_argument_list", "template_parameter_list"}
CONSTANT |= {"template_function", "type_descriptor"}
DROPPED = {"expression_statement", "continue_statement", "break_statement", "return_statement"}
SKIPPED = {("for_statement", "update"), ("case_statement", "value"), ("call_expression", "function")}
COMMUTATIVE = {
    "min",
    "max",
    "np.minimum",
    "np.maximum",
    "std::min",
    "std::max",
    "std::min<int64_t>",
    "std::max<int64_t>",
    "vec_fma",
}


def walk_cpp(source: Source, node: tree_sitter.Node) -> None:
    """Adds the mutants of a node and of what is in it."""
    kind, at = node.type, (node.start_byte, node.end_byte)

    def text(child: tree_sitter.Node | None) -> str:
        assert child is not None
        return source.text(child.start_byte, child.end_byte)

    def field(name: str) -> tree_sitter.Node:
        child = node.child_by_field_name(name)
        assert child is not None, (kind, name)
        return child

    if kind in CONSTANT or (kind == "declaration" and any(text(child) == "constexpr" for child in node.children)):
        return
    outer = source.function
    if kind == "function_definition":
        source.function = re.findall(r"(\w+)\s*\(", text(field("declarator")))[0]
    elif kind in ("binary_expression", "assignment_expression") and text(field("operator")) != "=":
        source.binary(at, text(field("left")), text(field("operator")), text(field("right")))
    elif kind == "unary_expression":
        source.add(*at, text(field("argument")))
    elif kind == "number_literal":
        source.number(*at)
    elif kind == "identifier":
        source.add(*at, *TWINS.get(text(node), ()))
    elif kind == "field_expression":
        name = field("field")
        source.add(*at, *(source.text(at[0], name.start_byte) + twin for twin in TWINS.get(text(name), ())))
    elif kind == "subscript_argument_list":
        (index,) = node.named_children
        if index.type != "number_literal":
            source.add(index.start_byte, index.end_byte, f"({text(index)}) + 1", f"({text(index)}) - 1")
    elif kind == "if_statement" and text(node.children[1]) != "constexpr":
        (condition,) = field("condition").named_children
        source.add(condition.start_byte, condition.end_byte, "true", "false")
    elif kind == "conditional_expression":
        source.add(*at, f"{text(field('condition'))} ? {text(field('alternative'))} : {text(field('consequence'))}")
    elif kind == "call_expression" and text(field("function")) not in COMMUTATIVE:
        given = field("arguments").named_children
        if not any(argument.type == "lambda_expression" for argument in given):
            source.arguments(at, [(argument.start_byte, argument.end_byte) for argument in given])
    if kind in DROPPED and not (kind == "return_statement" and node.named_children):
        source.add(*at, "", statement=True)
    skipped = SKIPPED | {("if_statement", "condition")} if "constexpr" in map(text, node.children) else SKIPPED
    for i, child in enumerate(node.children):
        name_of = node.field_name_for_child(i)
        target = kind == "assignment_expression" and name_of == "left" and child.type == "identifier"
        declared = name_of == "declarator" and child.type != "init_declarator"
        if (kind, name_of) not in skipped and name_of != "field" and not target and not declared:
            walk_cpp(source, child)
    source.function = outer


def schema(source: Source, mutants: list[Mutant]) -> tuple[str, dict[int, int]]:
    """The code with all mutants in it, each where MUTANT(its number) holds, and the mutant that begins a line."""
    groups: dict[tuple[int, int], list[int]] = {}
    for n, mutant in enumerate(mutants, 1):
        groups.setdefault((mutant.start, mutant.end), []).append(n)
    order = sorted(groups, key=lambda at: (at[0], -at[1]))

    def render(start: int, end: int, position: int) -> tuple[str, int]:
        """A piece, and the first group behind it; position: the first group that starts in it."""
        pieces, at = [], start
        while position < len(order) and order[position][0] < end:
            low, high = order[position]
            numbers = groups[low, high]
            inner, following = render(low, high, position + 1)
            for n in numbers:
                mutant = mutants[n - 1]
                if mutant.statement:
                    inner = f"\n/*{n}*/ if (!MUTANT({n})) {{\n{inner}\n}}\n"
                else:
                    inner = f"(\n/*{n}*/ MUTANT({n}) ? ({uncommented(mutant.text)}) :\n({inner}))"
            pieces += [source.text(at, low), inner]
            at, position = high, following
        return "".join([*pieces, source.text(at, end)]), position

    text = render(0, len(source.data), 0)[0]
    lines = {
        i: int(found[1]) for i, line in enumerate(text.splitlines(), 1) if (found := re.match(r"/\*(\d+)\*/", line))
    }
    return text, lines


def uncommented(text: str) -> str:
    return re.sub(r"//.*|/\*.*?\*/", "", text)


HEAD = """extern "C" __attribute__((visibility("default"))) int flash_attn_back_mutant = 0;
#define MUTANT(n) __builtin_expect(flash_attn_back_mutant == (n), 0)
#line 1
"""


def compile_schema(source: Source, compiler: list[str], out: Path) -> list[Mutant]:
    """Compiles the mutants that the compiler takes, and returns them."""
    mutants = list(source.found)
    code = out.with_suffix(".cpp")
    while True:
        text, lines = schema(source, mutants)
        code.write_text(HEAD + text)
        done = subprocess.run(
            [*compiler, "-w", "-O1", "-fmax-errors=0", "-o", str(out), "-c", str(code)], capture_output=True, text=True
        )
        if done.returncode == 0:
            return mutants
        wrong = {
            lines[int(n)]
            for n in re.findall(rf"^{re.escape(str(code))}:(\d+):\d+: error", done.stderr, re.MULTILINE)
            if int(n) in lines
        }
        if not wrong:
            raise SystemExit(done.stderr)
        mutants = [mutant for n, mutant in enumerate(mutants, 1) if n not in wrong]


def build_kernel(source: Source) -> list[Mutant]:
    """Libraries in MUTANTS whose kernel holds the mutants; the others are the CPU build's."""
    built = (BUILD / "bin/libggml-cpu.so").resolve()
    listing = ["ninja", "-C", str(BUILD), "-t", "commands", f"bin/{built.name}"]
    lines = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    compiling = shlex.split(next(line for line in lines if line.endswith(f"/{KERNEL.name}")))
    linking = shlex.split(next(line for line in lines if f"-o bin/{built.name}" in line))[2:-2]
    folder, made = MUTANTS / "bin", MUTANTS / "flash-attn-back.o"
    folder.mkdir(parents=True, exist_ok=True)
    mutants = compile_schema(
        source, [linking[0], *(w for w in compiling if w.startswith(("-D", "-I", "-std", "-m", "-f")))], made
    )
    objects = {f"bin/{built.name}": str(folder / "libggml-cpu.so"), compiling[compiling.index("-o") + 1]: str(made)}
    subprocess.run([objects.get(word, word) for word in linking], cwd=BUILD, check=True)
    for other in (BUILD / "bin").glob("libggml*.so"):
        if other.name != "libggml-cpu.so":
            (folder / other.name).unlink(missing_ok=True)
            (folder / other.name).symlink_to(other.resolve())
    shutil.copy(BUILD / "flash-attn-back.json", MUTANTS)
    return mutants


@dataclasses.dataclass
class Outcome:
    """What became of a mutant."""

    number: int
    by: str  # what noticed it, "" if nothing did
    seconds: float  # of CPU time


def attempt(number: int, tests: Callable[[int], str]) -> Callable[[], Outcome | None]:
    """Starts the tests of a mutant in a process of their own; what to call for the outcome, None while they run."""
    reading, writing = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            os.write(writing, tests(number).encode() or b"-")
        os._exit(0)
    os.close(writing)

    def outcome() -> Outcome | None:
        done, status, used = os.wait4(child, os.WNOHANG)
        if not done:
            if time.monotonic() - began > SECONDS * PATIENCE:
                os.kill(child, signal.SIGKILL)
            return None
        said = os.read(reading, 4096).decode()
        os.close(reading)
        seconds = used.ru_utime + used.ru_stime
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            said = "no end" if name in ("SIGKILL", "SIGXCPU") else name
        return Outcome(number, said.removeprefix("-") if said else "exit", seconds)

    return outcome


def attempts(numbers: Iterable[int], tests: Callable[[int], str], jobs: int) -> Iterator[Outcome]:
    """The outcomes of all, some at a time."""
    waiting = iter(numbers)
    running: list[Callable[[], Outcome | None]] = []
    while True:
        running += [attempt(n, tests) for n in itertools.islice(waiting, jobs - len(running))]
        if not running:
            return
        time.sleep(0.01)
        for one in list(running):
            if outcome := one():
                running.remove(one)
                yield outcome


def first_failure(tests: list[str], *options: str) -> str:
    """The first of some tests that fails, "" if none does."""
    failed: list[str] = []

    class Plugin:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *options, *tests], plugins=[Plugin()])
    return failed[0] if failed else "" if code == 0 else f"pytest {code}"


def named(*files: str) -> list[str]:
    """Files of tests."""
    return [str(ROOT / "tests" / name) for name in files]


def kernel_tests() -> Callable[[int], str]:
    """The oracle on the small cases of its list and on corners, then the tests of what it does not see."""
    from corners import CORNERS, ON_CPU, Draft

    from pyharness.case import cases, inputs, operands, reference
    from pyharness.check import oracle
    from pyharness.device import ggml

    def work(given: operands.Inputs) -> int:
        s, h, _, n, m = given.sizes
        return s * h * n * m * int(given.q.shape[3] + given.d.shape[3])

    given = [inputs.make(c, 0) for c in cases.load(cases.CASES) if not c.capture]
    for name, (build, shapes) in CORNERS.items():
        for shape in set(shapes) & {"few", "long"} & ON_CPU.keys():
            draft = Draft(name, shape, True)
            build(draft)
            if not draft.arranged:
                whole = draft.inputs()
                given += [dataclasses.replace(whole, **changes) for changes in draft.runs]
    small = sorted((x for x in given if work(x) < WORK), key=work)
    wanted = [reference.backward(x) for x in small]
    roundings = {id(x): reference.rounding(x, want["lse"], want["d"]) for x, want in zip(small, wanted, strict=True)}
    reference.rounding = lambda x, *_: roundings[id(x)]

    os.environ["PYHARNESS_LIBS"] = str(MUTANTS / "bin")
    library = ggml.Library.open()
    cpu = library.device("CPU")
    mutant = ctypes.c_int.in_dll(ctypes.CDLL(str(MUTANTS / "bin/libggml-cpu.so")), "flash_attn_back_mutant")
    files = named("operator/test_hand.py", "operator/test_invariants.py", "harness/test_support.py")

    def tests(number: int) -> str:
        mutant.value = number
        for x, want in zip(small, wanted, strict=True):
            result = library.run(cpu, x, 1)
            parts = oracle.compare(x, result, want)
            if result.guards or not all(part.passed for part in parts.values()):
                return str(x.case)
        return first_failure(files, "-k", FAST)

    return tests


def reference_tests(mutants: list[Mutant], source: Source) -> Callable[[int], str]:
    """The tests of the reference, on a module in which a mutant stands."""
    from pyharness.case import reference

    files = named("operator/test_reference.py", "operator/test_hand.py")

    def tests(number: int) -> str:
        data = source.data
        if number:
            mutant = mutants[number - 1]
            data = data[: mutant.start] + (mutant.text or "pass").encode() + data[mutant.end :]
        exec(compile(data, str(REFERENCE), "exec"), reference.__dict__)
        return first_failure(files, "-k", "reference or rounding", "-W", "ignore")

    return tests


def of_python(data: bytes, rules: Iterable[Rule] = ()) -> Source:
    """The mutants of Python code but its annotations and imports."""
    source = Source(data, rules)
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.AST) -> str:
        return source.text(*at(node))

    def operator(left: ast.AST, right: ast.AST) -> str:
        """The operator's text between two operands, without their parentheses."""
        return re.sub(r"[()]|#.*", "", source.text(at(left)[1], at(right)[0])).strip()

    def walk(node: ast.AST) -> None:
        outer = source.function
        if isinstance(node, ast.FunctionDef):
            source.function = node.name
        elif isinstance(node, ast.BinOp):
            source.binary(at(node), f"({text(node.left)})", operator(node.left, node.right), f"({text(node.right)})")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            right = node.comparators[0]
            source.binary(at(node), f"({text(node.left)})", operator(node.left, right), f"({text(right)})")
        elif isinstance(node, ast.BoolOp):
            first, second = node.values[:2]
            source.binary(at(node), f"({text(first)})", operator(first, second), f"({text(second)})")
        elif isinstance(node, ast.UnaryOp):
            source.add(*at(node), f"({text(node.operand)})")
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        ):
            source.number(*at(node))
        elif isinstance(node, ast.Name):
            source.add(*at(node), *TWINS.get(node.id, ()))
        elif isinstance(node, ast.If):
            source.add(*at(node.test), "True", "False")
        elif isinstance(node, ast.IfExp):
            source.add(*at(node), f"({text(node.orelse)}) if {text(node.test)} else ({text(node.body)})")
        elif isinstance(node, ast.Call) and text(node.func) not in COMMUTATIVE:
            source.arguments(at(node), [at(argument) for argument in node.args])
        elif isinstance(node, ast.AugAssign):
            source.binary(at(node), text(node.target), operator(node.target, node.value), text(node.value))
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Continue, ast.Return)):
            source.add(*at(node), "", statement=True)
        for name, value in ast.iter_fields(node):
            if name not in (
                "annotation",
                "returns",
                "args" if isinstance(node, ast.FunctionDef) else "",
                "decorator_list",
            ):
                for child in value if isinstance(value, list) else [value]:
                    documents = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                    if (
                        isinstance(child, ast.AST)
                        and not documents
                        and not isinstance(child, (ast.Import, ast.ImportFrom))
                    ):
                        walk(child)
        source.function = outer

    walk(ast.parse(data))
    return source


def main() -> int:
    """Runs what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernel", "reference"))
    parser.add_argument("--lines", default="1-", metavar="A-B", help="only mutants in these lines")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="mutants tried at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants instead of trying them")
    args = parser.parse_args()
    first, last = (int(x) if x else sys.maxsize for x in args.lines.split("-"))
    if args.what == "kernel":
        source = of_cpp(KERNEL.read_bytes(), KERNEL_RULES)
    else:
        source = of_python(REFERENCE.read_bytes(), REFERENCE_RULES)
    if args.list:
        for mutant in source.found:
            if first <= source.line(mutant)[0] <= last:
                print(source.line(mutant)[0], source.diff(mutant), sep="\n")
        return 0
    mutants = build_kernel(source) if args.what == "kernel" else list(source.found)
    tests = kernel_tests() if args.what == "kernel" else reference_tests(mutants, source)
    (whole,) = attempts([0], tests, 1)
    print(f"{len(mutants)} mutants; the code as it is: {whole.by or 'passes'}, {whole.seconds:.0f} CPU s", flush=True)
    if whole.by:
        return 1
    chosen = [n for n, mutant in enumerate(mutants, 1) if first <= source.line(mutant)[0] <= last]
    outcomes = []
    for outcome in attempts(chosen, tests, args.jobs):
        outcomes.append(outcome)
        mutant = mutants[outcome.number - 1]
        if not outcome.by:
            print(
                f"{args.what} line {source.line(mutant)[0]}, mutant {outcome.number} lives",
                source.diff(mutant),
                sep="\n",
                flush=True,
            )
    lived = sum(not outcome.by for outcome in outcomes)
    slowest = max(outcome.seconds for outcome in outcomes if outcome.by)
    print(f"{len(outcomes)} mutants, {len(outcomes) - lived} caught within {slowest:.0f} CPU s each, {lived} live")
    for why, count in source.excluded.items():
        print(f"{count} not tried: {why}")
    return int(lived > 0)


if __name__ == "__main__":
    sys.exit(main())
