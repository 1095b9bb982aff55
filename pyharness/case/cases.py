"""Cases as data: the grammar of FLASH_ATTN_BACK(key=value,...), the case lists, and how a user selects from them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import random
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import gguf

from ..base import commands, errors

T = TypeVar("T")

OP = "FLASH_ATTN_BACK"
PARTS = ("dq", "dk", "dv", "lse", "d", "dsinks")
CHECKED = (*PARTS, "o")
GRAPHS = ("backward", "pair")
GGML = "ggml"
"""What runs a forward that no path of the operator runs."""
LETTERS = {"q": "dq", "k": "dk", "v": "dv", "s": "dsinks"}

TESTS = Path(__file__).resolve().parents[2] / "ggml" / "tests"
CASES = TESTS / "flash-attn-back-cases.def"
PERF = TESTS / "flash-attn-back-perf.def"
PERF_CPU = TESTS / "flash-attn-back-perf-cpu.def"
GRAD = TESTS / "flash-attn-back-grad.def"
LIMITS = TESTS / "flash-attn-back-limits.def"

NUMBER = r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?"
FLOAT_MAX = 3.4028234663852886e38
VALUES = {
    "mask": {
        "none": "no mask",
        "causal": "a query sees the keys up to its own position; the queries are the last nb positions",
        "swa:W": "causal, and of those only the last W keys",
        "random": "50 % of all pairs at random",
        "rows": "70 % of all pairs at random; a quarter of the queries, the first among them, see nothing",
        "docs:L": "causal within documents of L keys",
        "lowest": "causal, but the first query sees every key, with -65504 added to its scores",
        "bias": "every pair, with a random number added to its score",
        "pad": "causal, but the last quarter of the keys is never seen",
    },
    "data": {
        "normal": "standard normal q, k, v and dO",
        "uniform": "uniform between -1 and 1",
        "vconst": "V is 1 with a spread of 1e-3",
        "kmean": "the keys of a head share a large mean",
        "tiny": "dO times 1e-7",
        "huge": "dO times 1e4",
        "logits": "Q and K times 6, so large scores",
        "outlier": "two channels of Q times 30, of K times 10",
        "zero": "dO is zero",
        "wild": "what models and losses give: outliers, heavy tails, turned pairs, near-duplicate keys, loss scales",
    },
    "layout": {
        "cont": "contiguous",
        "perm": "q, k, v and dO are permuted: in memory the heads of a position are neighbours",
        "cache": "k and v are views into a cache with other cells around them",
        "strided": "q and dO occupy every second number of their memory, rows of the mask are padded",
        "bcast": "one row in memory is all of dO",
    },
    "prec": {"default": "the backend chooses", "f32": "products in F32 (GGML_PREC_F32)"},
}
"""The values of the keys that name one of a few."""

MASKS, DATA, LAYOUTS, PRECISIONS = (tuple(VALUES[key]) for key in ("mask", "data", "layout", "prec"))
TAME = tuple(data for data in DATA if data != "wild")
"""Kinds of data that the case list has; the wild ones are drawn."""

# ggml's names of the types that k and v may have: those that the gguf package can read and a test can make
TYPES = {
    name: gguf.GGMLQuantizationType[name.upper()]
    for name in (
        *("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
        *("iq4_nl", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "tq1_0", "tq2_0", "mxfp4"),
    )
}

SHAPE = ("hsk", "hsv", "nh", "nhkv", "kv", "nb")
BESIDE_CAPTURE = ("capture", "grads", "kv_first", "kv_count", "o", "prec", "layout", "pair")


def block(type_name: str) -> tuple[int, int]:
    """Values and bytes of one block of a ggml type."""
    values, size = gguf.GGML_QUANT_SIZES[TYPES[type_name]]
    return values, size


def _key(default: T, text: str) -> T:
    """A key of the grammar: its default and what it means."""
    field: T = dataclasses.field(default=default, metadata={"text": text})
    return field


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention backward. Keys, defaults and their order are the grammar; `str()` leaves defaults out."""

    hsk: int = _key(0, "head size of q and k")
    hsv: int = _key(0, "head size of v and of the output")
    nh: int = _key(0, "query heads")
    nhkv: int = _key(0, "KV heads, a divisor of nh: fewer than nh is GQA, one is MQA")
    kv: int = _key(0, "keys")
    nb: int = _key(0, "queries")
    ns: int = _key(1, "sequences")
    type_K: str = _key("f16", "ggml type of K")
    type_V: str = _key("f16", "ggml type of V")
    mask: str = _key("causal", "which keys a query sees")
    mh: int = _key(1, "heads of the mask, a divisor of nh; head h uses h mod mh")
    ms: int = _key(1, "sequences of the mask, a divisor of ns; sequence s uses s mod ms")
    mpad: int = _key(0, "rows of the mask beyond nb")
    max_bias: float = _key(0.0, "ALiBi's max_bias, 0 is off; needs a mask")
    softcap: float = _key(0.0, "cap of the logits, 0 is off")
    sinks: int = _key(0, "1: every query head has an attention sink")
    scale: float = _key(0.0, "factor of the scores, 0 is 1/sqrt(hsk)")
    grads: str = _key("", "wanted gradients: letters of q, k, v and s (sinks), none is all")
    kv_first: int = _key(0, "first key that gets dK and dV")
    kv_count: int = _key(0, "number of keys that get dK and dV, 0 is all")
    o: int = _key(0, "1: the forward's output is given, not recomputed")
    prec: str = _key("default", "precision of the products")
    data: str = _key("normal", "the numbers in the inputs")
    layout: str = _key("cont", "how the inputs lie in memory")
    vview: int = _key(0, "1: v is a view of the first hsv components of k")
    pair: int = _key(0, "1: the forward is in the graph and saves what it can for the gradient")
    capture: str = _key("", "inputs from a file instead: NAME for tests/data/NAME.gguf, or a path")

    def __post_init__(self) -> None:
        _check_choices(self)
        if not self.capture:
            _check(self)
        if self.grads:
            allowed = "qkvs" if self.sinks or self.capture else "qkv"
            _expect(set(self.grads) <= set(allowed), "grads", self.grads, f"letters of {allowed}")
            grads = "".join(c for c in "qkvs" if c in self.grads)
            object.__setattr__(self, "grads", "" if grads == allowed and not self.capture else grads)

    @staticmethod
    def parse(text: str) -> Case:
        """The case that a string names. Raises errors.Usage that names the key and its allowed values."""
        match = re.fullmatch(rf"\s*{OP}\((.*)\)\s*", text, re.DOTALL)
        if not match:
            raise errors.Usage(
                f"not a case string: {text.strip()!r}", f"write {OP}(hsk=64,hsv=64,nh=4,nhkv=2,kv=128,nb=32,...)"
            )
        values: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in match[1].split(","))):
            key, equals, value = item.partition("=")
            if key not in FIELDS or not equals:
                close = difflib.get_close_matches(key, FIELDS, n=1)
                hint = f"did you mean {close[0]}?" if close else "keys: " + ", ".join(FIELDS)
                raise errors.Usage(f"{text.strip()}: unknown key {key!r}", hint)
            if key in values:
                raise errors.Usage(f"{text.strip()}: {key} is given twice")
            values[key] = _convert(key, value)
        if values.get("capture"):
            beside = [key for key in values if key not in BESIDE_CAPTURE]
            if beside:
                raise errors.Usage(
                    f"{text.strip()}: {beside[0]} comes from the capture",
                    "keys allowed with capture: " + ", ".join(BESIDE_CAPTURE[1:]),
                )
        else:
            missing = [key for key in SHAPE if key not in values]
            if missing:
                raise errors.Usage(f"{text.strip()}: {', '.join(missing)} missing", "a case needs " + ", ".join(SHAPE))
        return Case(**values)

    def __str__(self) -> str:
        if self.capture:
            keys = [key for key in BESIDE_CAPTURE if getattr(self, key) != DEFAULTS[key]]
        else:
            keys = [key for key in FIELDS if key in SHAPE or getattr(self, key) != DEFAULTS[key]]
        return f"{OP}({','.join(f'{key}={_text(getattr(self, key))}' for key in keys)})"

    def seed(self, base: int) -> int:
        """Seed of the case's inputs: it depends on the case and the base seed, not on what else is selected."""
        data = f"{self.replace(pair=0)}#{base}"  # the same with and without the forward
        return int.from_bytes(hashlib.sha256(data.encode(errors="backslashreplace")).digest()[:8], "little")

    @property
    def wanted(self) -> tuple[str, ...]:
        """The wanted gradients, of "dq", "dk", "dv", "dsinks", in this order."""
        letters = self.grads or ("qkvs" if self.sinks else "qkv")
        return tuple(LETTERS[c] for c in letters)

    @property
    def window(self) -> tuple[int, int]:
        """First key and number of keys that get dK and dV."""
        return self.kv_first, self.kv_count or self.kv

    def replace(self, **changes: Any) -> Case:
        """The case with some keys changed."""
        return dataclasses.replace(self, **changes)


_FIELDS = dataclasses.fields(Case)
FIELDS = [f.name for f in _FIELDS]
DEFAULTS: dict[str, Any] = {f.name: f.default for f in _FIELDS}
KEYS: dict[str, str] = {f.name: f.metadata["text"] for f in _FIELDS}
"""What each key means."""


def _default(key: str) -> str:
    """What a case has where it leaves the key out, in words."""
    if key in SHAPE:
        return "required"
    return f"default: {_text(DEFAULTS[key])}" if DEFAULTS[key] != "" else "optional"


def explain() -> str:
    """The keys of a case string and their values, for a terminal."""
    lines = ["keys of a case string"]
    for key, text in KEYS.items():
        lines.append(f"  {key:<9} {text} ({_default(key)})")
        lines += [f"{'':<12}{value:<8}  {meaning}" for value, meaning in VALUES.get(key, {}).items()]
    return "\n".join([*lines, f"  {'types':<9} {', '.join(TYPES)}"])


def markdown() -> str:
    """The same as tables, for docs/cases.md."""
    lines = ["| key | meaning | |", "|---|---|---|"]
    lines += [f"| `{key}` | {text} | {_default(key)} |" for key, text in KEYS.items()]
    for key, values in VALUES.items():
        lines += ["", f"| `{key}` | {KEYS[key]} |", "|---|---|"]
        lines += [f"| `{value}` | {meaning} |" for value, meaning in values.items()]
    return "\n".join([*lines, "", "Types of K and V:", ", ".join(f"`{name}`" for name in TYPES) + "."])


def _text(value: Any) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _convert(key: str, value: str) -> Any:
    kind: Callable[[str], Any] = type(DEFAULTS[key])
    if kind is int and not re.fullmatch(r"-?[0-9]{1,10}", value):
        raise errors.Usage(f"{key}={value}: not an integer of at most 10 digits")
    if kind is float and not (re.fullmatch(NUMBER, value) and abs(float(value)) <= FLOAT_MAX):
        raise errors.Usage(f"{key}={value}: not a number that a float holds")
    return kind(value)


def _expect(ok: bool, key: str, value: Any, allowed: str) -> None:
    if not ok:
        raise errors.Usage(f"{key}={_text(value)}: must be {allowed}")


def _check_choices(case: Case) -> None:
    """What holds beside a capture too, whose shapes are not known yet."""
    for key in ("kv_first", "kv_count"):
        _expect(getattr(case, key) >= 0, key, getattr(case, key), "at least 0")
    for key in ("sinks", "o", "vview", "pair"):
        _expect(getattr(case, key) in (0, 1), key, getattr(case, key), "0 or 1")
    for key, names in (("data", DATA), ("layout", LAYOUTS), ("prec", PRECISIONS)):
        _expect(getattr(case, key) in names, key, getattr(case, key), "one of " + ", ".join(names))
    if case.pair:
        _expect(not case.o, "o", case.o, "0 with pair=1")
        _expect(case.layout != "strided", "layout", case.layout, "one that ggml's forward takes with pair=1")


def _check(case: Case) -> None:
    def expect(key: str, ok: bool, allowed: str) -> None:
        _expect(ok, key, getattr(case, key), allowed)

    for key in ("hsk", "hsv", "nh", "nhkv", "ns", "mh", "ms"):
        expect(key, getattr(case, key) >= 1, "at least 1")
    for key in ("kv", "nb", "mpad"):
        expect(key, getattr(case, key) >= 0, "at least 0")
    for key, size in (("type_K", case.hsk), ("type_V", case.hsv)):
        expect(key, getattr(case, key) in TYPES, "one of " + ", ".join(TYPES))
        values = block(getattr(case, key))[0]
        expect(key, size % values == 0, f"a type whose blocks of {values} divide the head size {size}")
    expect("nhkv", case.nh % case.nhkv == 0, f"a divisor of nh={case.nh}")
    mask, _, width = case.mask.partition(":")
    known = any(mask == name.partition(":")[0] and bool(width) == (":" in name) for name in MASKS)
    expect(
        "mask",
        known and (not width or re.fullmatch("0*[1-9][0-9]{0,9}", width) is not None),
        "one of " + ", ".join(MASKS),
    )
    if case.mask == "none":
        for key in ("mh", "ms", "mpad", "max_bias"):
            expect(key, getattr(case, key) == DEFAULTS[key], f"{_text(DEFAULTS[key])} without a mask")
    expect("mh", case.nh % case.mh == 0, f"a divisor of nh={case.nh}")
    expect("ms", case.ns % case.ms == 0, f"a divisor of ns={case.ns}")
    for key in ("max_bias", "softcap"):
        expect(key, getattr(case, key) >= 0, "at least 0")
    expect("kv_first", case.kv_first == 0 or case.kv_count > 0, "0 without kv_count")
    expect("kv_count", case.kv_first + case.kv_count <= case.kv, f"a window inside kv={case.kv}")
    expect("pair", not case.pair or min(case.kv, case.nb) > 0, "0 without keys or queries, which ggml's forward needs")
    if case.vview:
        expect("vview", case.hsv <= case.hsk and case.type_V == case.type_K, "0 unless hsv <= hsk and type_V = type_K")


def load(path: Path) -> list[Case]:
    """The cases of a .def file, one a line, with `//` comments. Raises errors.Usage with file and line."""
    found: dict[Case, int] = {}
    for number, case in _lines(path, Case.parse):
        if case in found:
            raise errors.Usage(f"{path}:{number}: {case} is already in line {found[case]}")
        found[case] = number
    return list(found)


def in_graphs(cases: Iterable[Case], graphs: Iterable[str]) -> list[Case]:
    """Each case in those of GRAPHS that it can be in."""
    found = []
    for case in cases:
        for graph in graphs:
            with contextlib.suppress(errors.Usage):
                found.append(case.replace(pair=GRAPHS.index(graph)))
    return list(dict.fromkeys(found))


def limits(path: Path = LIMITS) -> dict[str, float]:
    """The limits of a .def file, `LIMIT(name, value)` a line."""
    return {name: float(value) for kind, name, value in _limit_lines(path) if kind == "LIMIT"}


@functools.cache
def f32_paths(path: Path = LIMITS) -> frozenset[str]:
    """The kernel paths that compute in F32, `F32_PATH(name)` a line of the limits."""
    return frozenset(name for kind, name, _ in _limit_lines(path) if kind == "F32_PATH")


def limit(bounds: Mapping[str, T], path: str) -> T:
    """The NMSE that a part may have on a kernel path."""
    return bounds.get("f32_nmse", bounds["nmse"]) if path in f32_paths() else bounds["nmse"]


def _limit_lines(path: Path) -> list[tuple[str, str, str]]:
    def parse(line: str) -> tuple[str, str, str]:
        match = re.fullmatch(rf"(?:(LIMIT)\((\w+),\s*({NUMBER})|(F32_PATH)\((\w+))\)", line)
        if not match:
            raise errors.Usage(f"not a limit: {line!r}", "write LIMIT(name, value) or F32_PATH(name)")
        return match[1] or match[4], match[2] or match[5], match[3] or ""

    return [item for _, item in _lines(path, parse)]


def _lines(path: Path, parse: Callable[[str], T]) -> list[tuple[int, T]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise errors.Usage(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise errors.Usage(f"{path}: not text in UTF-8") from None
    items = []
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.partition("//")[0].strip()
        if line:
            try:
                items.append((number, parse(line)))
            except errors.Usage as error:
                raise errors.Usage(f"{path}:{number}: {error}", error.hint) from None
    return items


def select(cases: Iterable[Case], op: str | None, params: str | None) -> list[Case]:
    """The cases that the filters leave, in order.

    op is a comma list of: the operator's name, a whole case string (which need not be in the list), or a regular
    expression that is searched for in the case string. params is a regular expression on the case string.
    Raises errors.Usage for a bad expression, errors.Empty (with a suggestion) when nothing is left.
    """
    listed = list(cases)
    chosen = listed
    if op:
        chosen = []
        for item in re.split(r",(?![^(]*\))", op):
            if item.strip().startswith(OP + "("):
                matches = [Case.parse(item)]
            elif item.strip() == OP:
                matches = listed
            else:
                pattern = _regex("-o", item.strip())
                matches = [case for case in listed if pattern.search(str(case))]
            if not matches:
                raise errors.Empty(f"no case matches -o {item.strip()}", _suggest(listed, item.strip()))
            chosen += [case for case in matches if case not in chosen]
    if params:
        pattern = _regex("-p", params)
        chosen = [case for case in chosen if pattern.search(str(case))]
        if not chosen:
            raise errors.Empty(f"no case matches -p {params}", _suggest(listed, params))
    if not chosen:
        raise errors.Empty("the case list is empty")
    return chosen


def random_cases(count: int, seed: int) -> list[Case]:
    """Cases with every key drawn at random, small enough to run by the thousand; the same for the same seed."""
    rng = random.Random(f"cases {seed}")
    found: dict[Case, None] = {}
    while len(found) < count:
        type_k, type_v = (rng.choice(("f32", "f16", "bf16", "q8_0", rng.choice(list(TYPES)))) for _ in range(2))
        hsk = hsv = rng.choice((32, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256, 256, 320, 512, 576))
        if rng.random() < 0.2:
            hsv = rng.choice((32, 64, 96, 128, 256, 512))
        vview = int(rng.random() < 0.1)
        kv_heads = rng.choice((1, 1, 2, 3, 4))
        heads = kv_heads * rng.choice((1, 2, 3, 4, 6, 7, 8))
        sequences = rng.choice((1, 1, 1, 2, 3))
        keys, queries = rng.choice((rng.randint(1, 40), rng.randint(1, 400))), rng.choice((1, rng.randint(1, 150)))
        if rng.random() < 0.03:
            keys, queries = rng.choice(((rng.randint(5000, 15000), rng.randint(1, 20)), (rng.randint(1, 200), 2000)))
        mask = rng.choice(MASKS).replace("W", str(rng.randint(1, 100))).replace("L", str(rng.randint(1, 100)))
        count_window = rng.choice((0, 0, rng.randint(1, keys)))
        values: dict[str, Any] = {
            "mask": mask,
            "softcap": rng.choice((0.0, 0.0, 0.0, 15.0, 30.0, 50.0)),
            "sinks": int(rng.random() < 0.3),
            "kv_first": rng.randint(0, keys - count_window) if count_window else 0,
            "kv_count": count_window,
            "o": int(rng.random() < 0.2),
            "prec": rng.choice(PRECISIONS),
            "data": rng.choice(("normal", "normal", rng.choice(TAME))),
            "layout": rng.choice(("cont", rng.choice(LAYOUTS))),
            "vview": vview,
            "grads": "".join(c for c in "qkv" if rng.random() < 0.7),
        }
        if mask != "none":
            values["mh"] = rng.choice((1, 1, heads))
            values["ms"] = rng.choice((1, sequences))
            values["mpad"] = rng.choice((0, 0, rng.randint(1, 70)))
            values["max_bias"] = rng.choice((0.0, 0.0, 8.0))
        try:
            case = Case(
                hsk, hsv, heads, kv_heads, keys, queries, sequences, type_k, type_k if vview else type_v, **values
            )
        except errors.Usage:
            continue
        # a head of a few rows at the edge of float32 has a gradient that float32 cannot hold to the limit
        edge = case.mask == "lowest" or case.data in ("logits", "outlier", "kmean", "vconst")
        if not edge or (min(case.nb, case.kv) >= 32 and not case.o):
            found[case] = None
    return list(found)


def _regex(option: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise errors.Usage(f"{option} {text}: not a regular expression: {error}") from None


def _suggest(cases: list[Case], text: str) -> str:
    words = {OP} | {item for case in cases for item in str(case)[len(OP) + 1 : -1].split(",")}
    close = difflib.get_close_matches(text, sorted(words), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"{commands.python()} -m pyharness list prints the cases"
