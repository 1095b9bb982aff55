"""Captures: the attention inputs of a real model in a GGUF or safetensors file, read, validated and written.

A file holds tensors by name (`AXES`, numpy order; GGUF's own order is the reverse) and metadata under
`flash_attn_back.` (`KEYS`). docs/captures.md shows how to write one from any framework. `read` gives back a capture
that the operator can run, or says which tensor or key is wrong, what was expected and what to do; never half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ..base import build, errors
from . import cases
from .cases import Case
from .operands import Inputs

Array = npt.NDArray[Any]

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
VERSION = 1
PREFIX = "flash_attn_back."

# S sequences, H query heads, Hkv KV heads, N queries, M keys, W keys of the window, Dk and Dv head sizes;
# Sm, Hm, Nm sequences, heads and rows of the mask
AXES: dict[str, tuple[str, ...]] = {
    "q": ("S", "H", "N", "Dk"),
    "k": ("S", "Hkv", "M", "Dk"),
    "v": ("S", "Hkv", "M", "Dv"),
    "d": ("S", "N", "H", "Dv"),
    "o": ("S", "N", "H", "Dv"),
    "mask": ("Sm", "Hm", "Nm", "M"),
    "sinks": ("H",),
    "dq": ("S", "H", "N", "Dk"),
    "dk": ("S", "Hkv", "W", "Dk"),
    "dv": ("S", "Hkv", "W", "Dv"),
    "dsinks": ("H",),
}
REQUIRED = ("q", "k", "v", "d")
GRADIENTS = ("dq", "dk", "dv", "dsinks")
NOTES = ("source", "model", "layer", "kv_heads", "text", "text_sha256", "loss", "licence")

# what the operator needs to know: type and default; None = has to be there
KEYS: dict[str, tuple[type, int | float | str | None]] = {
    "version": (int, None),
    "scale": (float, None),
    "max_bias": (float, 0.0),
    "logit_softcap": (float, 0.0),
    "kv_first": (int, 0),
    "kv_count": (int, 0),
    "grads": (str, ""),
    "prec": (str, "default"),
}


@dataclasses.dataclass(frozen=True)
class Capture:
    """What a capture file holds."""

    inputs: Inputs  # with o when the file has it; inputs.case has the file's shapes, grads, key window and precision
    gradients: Mapping[str, Array] = dataclasses.field(default_factory=dict)  # f32, the framework's own, of GRADIENTS
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where it comes from, keys of NOTES


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor as the file has it: ggml's type name, shape in numpy order, bytes."""

    type: str
    shape: tuple[int, ...]
    data: Array


def path(name: str) -> Path:
    """The file of a capture: tests/data/NAME.gguf, or the path itself when it has a folder or a capture's suffix."""
    given = Path(name)
    return given if given.name != name or given.suffix in (".gguf", ".safetensors") else DATA / f"{name}.gguf"


def load(case: Case) -> Inputs:
    """The inputs of a case with `capture=`. What the case leaves at its default the file decides.

    Raises errors.Usage when the file is missing or malformed, or has not what the case asks for.
    """
    file = path(case.capture)
    inputs = read(file).inputs
    own = inputs.case
    if case.o and inputs.o is None:
        raise errors.Usage(f"{case}: {file} holds no tensor o", f"leave o out of the case, or store o {_order('o')}")
    window = case if case.kv_first or case.kv_count else own
    changes = {
        "grads": case.grads or own.grads,
        "prec": own.prec if case.prec == "default" else case.prec,
        "kv_first": window.kv_first,
        "kv_count": window.kv_count,
    }
    try:
        _check_choices(changes, own.kv, bool(own.sinks))
    except errors.Usage as error:
        raise errors.Usage(f"{case}: {error}", error.hint) from None
    filled = own.replace(capture=case.capture, o=case.o, layout=case.layout, pair=case.pair, **changes)
    first, count = filled.window
    o = inputs.o if case.o else None
    return dataclasses.replace(inputs, case=filled, o=o, grads=filled.wanted, kv_first=first, kv_count=count)


# ---- reading ----


def read(file: Path) -> Capture:
    """Everything in a capture file, validated. Raises errors.Usage that names what is wrong with it."""
    try:
        size = file.stat().st_size
        tensors, metadata = (_read_safetensors if file.suffix == ".safetensors" else _read_gguf)(file, size)
        values, notes = _metadata(metadata)
        capture = _capture(tensors, values, notes)
    except OSError as error:
        close = difflib.get_close_matches(file.stem, [other.stem for other in DATA.glob("*.gguf")], n=1)
        hint = f"did you mean {close[0]}?" if close else f"name a capture in {DATA} or a .gguf or .safetensors file"
        raise errors.Usage(f"{file}: {error.strerror or error}", hint) from None
    except errors.Usage as error:
        raise errors.Usage(f"{file}: {error}", error.hint) from None
    capture.inputs.case = capture.inputs.case.replace(capture=str(file))
    return capture


class _Reader(gguf.GGUFReader):
    """Stops where the file does: gguf's own takes what is left there for what it counts, and goes on counting."""

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> Array:
        found: Array = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError(f"it ends before byte {offset + found.itemsize * int(count)}")
        return found


def _read_gguf(file: Path, size: int) -> tuple[dict[str, _Stored], dict[str, Any]]:
    try:
        with np.errstate(all="ignore"):
            reader = _Reader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        infos = [
            (t, t.tensor_type.name.lower().replace("_k", "_K"), t.data_offset, int(t.n_bytes)) for t in reader.tensors
        ]
    # the reader checks little and fails in its own ways on bytes that are not what they say
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, RecursionError, TypeError) as error:
        reason = str(error.args[0]) if error.args else type(error).__name__
        raise errors.Usage(
            f"not a whole GGUF file ({size} bytes): {reason}", "copy or write it again; it may be cut off"
        ) from None
    if reader.byte_order != "I":
        raise errors.Usage("the file's byte order is not this machine's", "write it as little-endian GGUF")
    end = reader.data_offset
    for tensor, _, offset, length in sorted(infos, key=lambda info: info[2]):
        if offset % int(reader.alignment) or offset < end or offset + length > size:
            raise errors.Usage(
                f"tensor {tensor.name} lies at byte {offset}, over its neighbours or misaligned",
                "write it again",
            )
        end = offset + length
    return {
        tensor.name: _Stored(
            kind, tuple(reversed(tensor.shape.tolist())), np.array(tensor.data).reshape(-1).view(np.uint8)
        )
        for tensor, kind, _, _ in infos
    }, metadata


def _read_safetensors(file: Path, size: int) -> tuple[dict[str, _Stored], dict[str, Any]]:
    try:
        import safetensors
    except ImportError:
        raise errors.Environment("safetensors is not installed", build.pip()) from None
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            metadata: dict[str, Any] = dict(opened.metadata() or {})
        entries: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise errors.Usage(f"not a whole safetensors file ({size} bytes): {error}", "copy or write it again") from None
    return {
        name: _Stored(entry["dtype"].lower(), tuple(entry["shape"]), np.frombuffer(bytearray(entry["data"]), np.uint8))
        for name, entry in entries
    }, metadata


def _metadata(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The operator's parameters and the notes. Other tools' keys (outside `flash_attn_back.`) are left alone."""
    own = {name.removeprefix(PREFIX): value for name, value in metadata.items() if name.startswith(PREFIX)}
    if "version" in own and (version := _convert("version", own["version"], int)) != VERSION:
        raise errors.Usage(
            f"capture format version {version}, this program reads {VERSION}",
            "capture again, or use the program that wrote it",
        )
    for name in own:
        if name not in KEYS and name not in NOTES:
            close = difflib.get_close_matches(name, [*KEYS, *NOTES], n=1)
            known = ", ".join(PREFIX + key for key in (*KEYS, *NOTES))
            hint = f"did you mean {PREFIX}{close[0]}?" if close else f"keys: {known}"
            raise errors.Usage(f"unknown metadata key {PREFIX}{name}", hint)
    values: dict[str, Any] = {}
    for name, (kind, default) in KEYS.items():
        if default is None and name not in own:
            raise errors.Usage(
                f"metadata key {PREFIX}{name} is missing",
                "docs/captures.md lists the keys that a capture needs",
            )
        values[name] = _convert(name, own.get(name, default), kind)
    return values, {name: str(own[name]) for name in NOTES if name in own}


def _convert(name: str, value: Any, kind: type) -> Any:
    """A metadata value as int, float (what a float32 holds) or str; safetensors has strings only."""
    kinds: dict[type, tuple[tuple[type, ...], str]] = {
        int: ((int, str), "an integer"),
        float: ((int, float, str), "a number"),
        str: ((str,), "text"),
    }
    accepted, words = kinds[kind]
    try:
        if type(value) not in accepted:
            raise ValueError
        with np.errstate(over="ignore"):
            return float(np.float32(value)) if kind is float else kind(value)
    except ValueError:
        raise errors.Usage(f"metadata key {PREFIX}{name} is {value!r}, not {words}") from None


# ---- rules ----


def _capture(tensors: Mapping[str, _Stored], values: Mapping[str, Any], notes: dict[str, str]) -> Capture:
    for name in tensors:
        if name not in AXES:
            close = difflib.get_close_matches(name, AXES, n=1)
            raise errors.Usage(
                f"unknown tensor {name}",
                f"did you mean {close[0]}?" if close else "tensors: " + ", ".join(AXES),
            )
    for name in REQUIRED:
        if name not in tensors:
            raise errors.Usage(f"tensor {name} {_order(name)} is missing", "a capture needs " + ", ".join(REQUIRED))
    shapes = _shapes(tensors, values)
    for name, stored in tensors.items():
        allowed = list(cases.TYPES) if name in "kv" else ["f16"] if name == "mask" else ["f32"]
        if stored.type not in allowed:
            raise errors.Usage(
                f"tensor {name} is {stored.type}, expected {', '.join(allowed)}",
                "convert it and store it again",
            )
    keys, sinks = shapes["k"][2], "sinks" in tensors
    _check_choices(values, keys, sinks)
    _check_numbers(values, "mask" in tensors)
    if "dsinks" in tensors and not sinks:
        raise errors.Usage("tensor dsinks without a tensor sinks", "store sinks too")

    dtypes = {"f32": np.float32, "f16": np.float16}
    arrays: dict[str, Any] = {
        name: stored.data.reshape(*shapes[name][:-1], -1)
        if name in "kv"
        else stored.data.view(dtypes[stored.type]).reshape(shapes[name])
        for name, stored in tensors.items()
    }
    (s, h, n, dk), mask = shapes["q"], shapes.get("mask")
    case = Case(
        capture="-", hsk=dk, hsv=shapes["v"][3], nh=h, nhkv=shapes["k"][1], kv=keys, nb=n, ns=s,
        type_K=tensors["k"].type, type_V=tensors["v"].type, scale=values["scale"], max_bias=values["max_bias"],
        softcap=values["logit_softcap"], sinks=int(sinks), o=int("o" in tensors), prec=values["prec"],
        grads=values["grads"], kv_first=values["kv_first"], kv_count=values["kv_count"],
    )  # fmt: skip
    case = case.replace(ms=mask[0], mh=mask[1], mpad=mask[2] - n) if mask else case.replace(mask="none")
    first, count = case.window
    inputs = Inputs(
        case=case, q=arrays["q"], k=arrays["k"], v=arrays["v"], d=arrays["d"], mask=arrays.get("mask"),
        sinks=arrays.get("sinks"), o=arrays.get("o"), type_K=case.type_K, type_V=case.type_V, scale=case.scale,
        max_bias=case.max_bias, softcap=case.softcap, grads=case.wanted, kv_first=first, kv_count=count,
    )  # fmt: skip
    gradients = {name: arrays[name] for name in GRADIENTS if name in arrays}
    _check_values(inputs, gradients)
    return Capture(inputs, gradients, notes)


def _order(name: str) -> str:
    return f"[{', '.join(reversed(AXES[name]))}]"


def _shapes(tensors: Mapping[str, _Stored], values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes with the outer dimensions of 1 that GGUF leaves out, checked against each other.

    Messages are in ggml's order.
    """
    sizes: dict[str, tuple[int, str]] = {}
    shapes = {}
    for name in (name for name in AXES if name in tensors):
        axes, shape = AXES[name], tensors[name].shape
        found = f"[{', '.join(map(str, reversed(shape)))}]"
        while len(shape) > len(axes) and shape[0] == 1:
            shape = shape[1:]
        if len(shape) > len(axes):
            raise errors.Usage(
                f"tensor {name} has {len(shape)} dimensions {found}, expected {len(axes)}: {_order(name)}"
            )
        shape = (1,) * (len(axes) - len(shape)) + shape
        for axis, size in zip(axes, shape, strict=True):
            expected, origin = sizes.setdefault(axis, (size, name))
            if size < 1:
                raise errors.Usage(f"tensor {name} {found} is empty: {axis} of {_order(name)} must be at least 1")
            if size != expected:
                raise errors.Usage(
                    f"tensor {name} {found}, read as {_order(name)}, has {axis} = {size}, "
                    f"expected {expected} as in {origin}",
                    "store it in this order, first dimension innermost, as ggml and GGUF write shapes",
                )
        if name == "k":
            sizes["W"] = (values["kv_count"] or shape[2], "the key window")
        shapes[name] = shape
    for whole, part, of in (("H", "Hkv", "k"), ("H", "Hm", "mask"), ("S", "Sm", "mask")):
        if part in sizes and sizes[whole][0] % sizes[part][0]:
            raise errors.Usage(
                f"tensor {of} has {part} = {sizes[part][0]}, which does not divide {whole} = {sizes[whole][0]} of q",
                f"store {of} {_order(of)}",
            )
    if "mask" in shapes and sizes["Nm"][0] < sizes["N"][0]:
        raise errors.Usage(f"tensor mask has {sizes['Nm'][0]} rows, expected at least N = {sizes['N'][0]}")
    return shapes


def _check_choices(values: Mapping[str, Any], keys: int, sinks: bool) -> None:
    allowed = "qkvs" if sinks else "qkv"
    if not set(values["grads"]) <= set(allowed):
        raise errors.Usage(f"grads is {values['grads']!r}, expected letters of {allowed}", "s needs a tensor sinks")
    if values["prec"] not in cases.PRECISIONS:
        raise errors.Usage(f"prec is {values['prec']!r}, expected one of {', '.join(cases.PRECISIONS)}")
    first, count = values["kv_first"], values["kv_count"]
    if not 0 <= first <= first + count <= keys or (first and not count):
        raise errors.Usage(
            f"key window kv_first = {first}, kv_count = {count} does not lie in {keys} keys",
            "kv_count 0 means all keys",
        )


def _check_numbers(values: Mapping[str, Any], mask: bool) -> None:
    for name, ok, expected in (
        ("scale", math.isfinite(values["scale"]) and values["scale"] != 0, "finite and not 0"),
        ("max_bias", 0 <= values["max_bias"] < math.inf, "finite and at least 0"),
        ("logit_softcap", 0 <= values["logit_softcap"] < math.inf, "finite and at least 0"),
        ("max_bias", mask or not values["max_bias"], "0 without a tensor mask"),
    ):
        if not ok:
            raise errors.Usage(f"metadata key {PREFIX}{name} is {values[name]}, must be {expected}")


def _check_values(inputs: Inputs, gradients: Mapping[str, Array]) -> None:
    """No NaN and no infinity where the result would see one; keys that every row masks may hold anything."""
    for name, array in [*((name, getattr(inputs, name)) for name in ("q", "d", "o", "sinks")), *gradients.items()]:
        if array is not None:
            _expect(name, np.isfinite(array), array)
    if inputs.mask is not None:
        rows = inputs.mask[:, :, : inputs.case.nb]
        _expect("mask", rows < np.inf, rows)
    unseen = ~inputs.seen()[..., None]
    for name, kind, convert in (("k", inputs.type_K, inputs.k_f32), ("v", inputs.type_V, inputs.v_f32)):
        try:
            values = convert()
        except NotImplementedError:
            raise errors.Usage(
                f"tensor {name} is {kind}, which cannot be converted to f32 here", "store it as f16"
            ) from None
        _expect(name, np.isfinite(values) | unseen, values)


def _expect(name: str, ok: Array, values: Array) -> None:
    if not ok.all():
        index = np.unravel_index(int(np.argmin(ok)), ok.shape)
        where = ", ".join(f"{axis} {i}" for axis, i in zip(AXES[name], index, strict=True))
        raise errors.Usage(f"tensor {name} holds {values[index]} at {where}", "capture finite values")


# ---- writing ----


def write(file: Path, capture: Capture) -> None:
    """Writes a GGUF capture, and only one that `read` takes.

    Raises errors.Usage as `read` does and errors.Environment where it cannot write, and leaves nothing behind then.
    """
    try:
        _write(file, capture)
    except OSError as error:
        hint = "make room, or name a folder that you can write to"
        raise errors.Environment(f"cannot write {file}: {error.strerror}", hint) from error


def _write(file: Path, capture: Capture) -> None:
    inputs, case = capture.inputs, capture.inputs.case
    types = {"k": inputs.type_K, "v": inputs.type_V}
    arrays = {name: getattr(inputs, name) for name in AXES if name not in GRADIENTS} | dict(capture.gradients)
    values = {
        "scale": inputs.scale,
        "max_bias": inputs.max_bias,
        "logit_softcap": inputs.softcap,
        "kv_first": case.kv_first,
        "kv_count": case.kv_count,
        "grads": case.grads,
        "prec": case.prec,
    }
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=file.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with contextlib.closing(gguf.GGUFWriter(temporary, "flash_attn_back")) as writer:
            writer.add_uint32(PREFIX + "version", VERSION)
            add: dict[type, Callable[[str, Any], None]] = {
                float: writer.add_float32,
                int: writer.add_uint64,
                str: writer.add_string,
            }
            for key, value in values.items():
                if value != KEYS[key][1]:
                    add[KEYS[key][0]](PREFIX + key, value)
            for key in (key for key in NOTES if key in capture.notes):
                writer.add_string(PREFIX + key, capture.notes[key])
            for tensor, array in arrays.items():
                if array is not None:
                    kind = cases.TYPES[types[tensor]] if tensor in types else None
                    writer.add_tensor(tensor, np.ascontiguousarray(array), raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        read(temporary)
        temporary.chmod(0o644)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
