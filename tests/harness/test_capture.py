"""Capture files: what is written is read back, what is wrong is named, and the real captures agree with torch."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import random
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from pyharness.base import build, errors
from pyharness.base.digest import ROOT
from pyharness.case import capture, capture_file, cases, quant, reference
from pyharness.case.capture_file import Capture
from pyharness.case.cases import Case
from pyharness.case.operands import Inputs
from pyharness.check import oracle
from pyharness.cli import cli
from pyharness.device import ggml

Array = npt.NDArray[Any]
NAMES = sorted(file.stem for file in capture_file.DATA.glob("*.gguf"))


def example(type_k: str = "f16", type_v: str = "f32", width: int = 32, **changes: Any) -> Capture:
    """S2 H4 Hkv2 N3 M5 with every optional tensor; the last key is hidden from all rows of the first sequence."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    mask = np.zeros((2, 2, 4, 5), np.float16)
    mask[:, :, 0, 3:] = -np.inf
    mask[0, :, :, 4] = -np.inf
    inputs = Inputs(
        case=Case(capture="-"), q=draw(2, 4, 3, width), k=quant.quantize(draw(2, 2, 5, width), type_k, rng),
        v=quant.quantize(draw(2, 2, 5, 2 * width), type_v, rng), mask=mask, sinks=draw(4), o=draw(2, 3, 4, 2 * width),
        d=draw(2, 3, 4, 2 * width), type_K=type_k, type_V=type_v, scale=0.125, max_bias=8.0, softcap=15.0,
        grads=("dq", "dk", "dv", "dsinks"), kv_first=0, kv_count=5,
    )  # fmt: skip
    gradients = {"dq": draw(2, 4, 3, width), "dsinks": draw(4)}
    return Capture(dataclasses.replace(inputs, **changes), gradients, {"model": "none", "layer": "7"})


# ggml's names and numpy's dtypes, for files that capture_file.write would not write
TENSORS: dict[str, Array] = {
    "q": np.ones((1, 4, 3, 32), np.float32),
    "k": np.ones((1, 2, 5, 32), np.float16),
    "v": np.ones((1, 2, 5, 16), np.float32),
    "d": np.ones((1, 3, 4, 16), np.float32),
}
KEYS: dict[str, Any] = {"version": 1, "scale": 0.25}


def raw(file: Path, tensors: Mapping[str, Array | None], keys: Mapping[str, Any], **options: Any) -> Path:
    """A GGUF file of TENSORS and KEYS with changes; None leaves one out."""
    writer = gguf.GGUFWriter(file, "flash_attn_back", **options)
    for name, value in {**KEYS, **keys}.items():
        if value is not None:
            add: dict[type, Callable[[str, Any], None]] = {
                int: writer.add_int64,
                float: writer.add_float32,
                str: writer.add_string,
                bool: writer.add_bool,
                list: writer.add_array,
            }
            add[type(value)](name if "." in name else f"flash_attn_back.{name}", value)
    for name, array in {**TENSORS, **tensors}.items():
        if array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def refused(file: Path, *words: str) -> errors.Usage:
    """Reading fails in words: the file's name and these."""
    with pytest.raises(errors.Usage) as caught:
        capture_file.read(file)
    for word in (str(file), *words):
        assert word in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


# ---- round trip ----


@pytest.mark.parametrize("type_k", cases.TYPES)
def test_round_trip_of_every_type(tmp_path: Path, type_k: str) -> None:
    width = cases.block(type_k)[0] * (1 if cases.block(type_k)[0] > 1 else 24)
    written = example(type_k, "q8_0" if type_k == "f32" and width % 32 == 0 else "f16", width)
    capture_file.write(tmp_path / "a.gguf", written)
    found = capture_file.read(tmp_path / "a.gguf")
    for name in ("q", "k", "v", "mask", "sinks", "o", "d"):
        np.testing.assert_array_equal(getattr(found.inputs, name), getattr(written.inputs, name))
    for name in ("type_K", "type_V", "scale", "max_bias", "softcap", "grads", "kv_first", "kv_count"):
        assert getattr(found.inputs, name) == getattr(written.inputs, name)
    assert found.gradients.keys() == written.gradients.keys()
    assert found.notes == written.notes
    case = found.inputs.case
    assert (case.hsk, case.hsv, case.nh, case.nhkv, case.kv, case.nb, case.ns) == (width, 2 * width, 4, 2, 5, 3, 2)
    assert (case.mh, case.ms, case.mpad, case.sinks, case.o) == (2, 2, 1, 1, 1)


def test_round_trip_of_the_least(tmp_path: Path) -> None:
    least = example(mask=None, sinks=None, o=None, max_bias=0.0, softcap=0.0, grads=("dq", "dk", "dv"))
    capture_file.write(tmp_path / "a.gguf", Capture(least.inputs))
    found = capture_file.read(tmp_path / "a.gguf")
    assert (found.inputs.mask, found.inputs.sinks, found.inputs.o, found.gradients, found.notes) == (None,) * 3 + (
        {},
        {},
    )
    assert found.inputs.grads == ("dq", "dk", "dv")
    assert found.inputs.case.mask == "none"


def test_round_trip_of_window_grads_and_precision(tmp_path: Path) -> None:
    case = Case(capture="-", kv_first=1, kv_count=3, grads="ks", prec="f32")
    capture_file.write(tmp_path / "a.gguf", example(case=case))
    found = capture_file.read(tmp_path / "a.gguf").inputs
    assert (found.kv_first, found.kv_count, found.grads, found.case.prec) == (1, 3, ("dk", "dsinks"), "f32")


def test_same_capture_same_bytes(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        capture_file.write(tmp_path / name, example())
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_what_read_refuses_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"older")
    with pytest.raises(errors.Usage, match="tensor d holds nan"):
        capture_file.write(tmp_path / "a.gguf", example(d=np.full((2, 3, 4, 64), np.nan, np.float32)))
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]
    assert (tmp_path / "a.gguf").read_bytes() == b"older"


def test_outer_dimensions_of_one_may_be_left_out(tmp_path: Path) -> None:
    short = {"q": np.ones((3, 32), np.float32), "k": np.ones((5, 32), np.float32), "v": np.ones((5, 16), np.float32)}
    found = capture_file.read(raw(tmp_path / "a.gguf", short | {"d": np.ones((3, 1, 16), np.float32)}, {})).inputs
    assert found.q.shape == (1, 1, 3, 32)
    assert found.d.shape == (1, 3, 1, 16)


def test_keys_of_other_tools_are_left_alone(tmp_path: Path) -> None:
    file = raw(tmp_path / "a.gguf", {}, {"general.name": "x", "trainer.steps": 5, "layer": 3})
    assert capture_file.read(file).notes == {"layer": "3"}


# ---- safetensors ----


def safe(file: Path, tensors: Mapping[str, Array | None], keys: Mapping[str, str]) -> Path:
    """A safetensors file of TENSORS and KEYS with changes."""
    from safetensors.numpy import save_file

    arrays = {name: array for name, array in {**TENSORS, **tensors}.items() if array is not None}
    save_file(arrays, file, {f"flash_attn_back.{name}": str(value) for name, value in {**KEYS, **keys}.items()})
    return file


def test_safetensors_holds_the_same(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    mask = np.zeros((1, 1, 3, 5), np.float16)
    keys = {"kv_first": "2", "kv_count": "1", "prec": "f32", "logit_softcap": "20.5"}
    from_safe = capture_file.read(safe(tmp_path / "a.safetensors", {"mask": mask}, keys)).inputs
    numbers = {"kv_first": 2, "kv_count": 1, "prec": "f32", "logit_softcap": 20.5}
    from_gguf = capture_file.read(raw(tmp_path / "a.gguf", {"mask": mask}, numbers)).inputs
    for field in dataclasses.fields(Inputs):
        if field.name != "case":
            np.testing.assert_array_equal(getattr(from_safe, field.name), getattr(from_gguf, field.name))
    assert dataclasses.replace(from_safe.case, capture="-") == dataclasses.replace(from_gguf.case, capture="-")


def test_safetensors_is_refused_in_words(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    file = tmp_path / "a.safetensors"
    refused(safe(file, {"q": TENSORS["q"].astype(np.float64)}, {}), "tensor q is f64, expected f32")
    refused(safe(file, {}, {"scale": "one"}), "flash_attn_back.scale is 'one', not a number")
    refused(safe(file, {}, {"kv_first": "1.5"}), "flash_attn_back.kv_first is '1.5', not an integer")
    whole = safe(file, {}, {}).read_bytes()
    for size in (0, 5, 8, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(file, "not a whole safetensors file")


# ---- wrong tensors ----

WRONG: list[tuple[Mapping[str, Array | None], str]] = [
    ({"q": None}, "tensor q [Dk, N, H, S] is missing"),
    ({"k": None}, "tensor k [Dk, M, Hkv, S] is missing"),
    ({"v": None}, "tensor v [Dv, M, Hkv, S] is missing"),
    ({"d": None}, "tensor d [Dv, H, N, S] is missing"),
    ({"sink": np.ones(4, np.float32)}, "unknown tensor sink"),
    ({"q": np.ones((1, 4, 3, 32), np.float16)}, "tensor q is f16, expected f32"),
    ({"d": np.ones((1, 3, 4, 16), np.float64)}, "tensor d is f64, expected f32"),
    ({"k": np.ones((1, 2, 5, 32), np.int32)}, "tensor k is i32, expected f32, f16"),
    ({"mask": np.ones((1, 1, 3, 5), np.float32)}, "tensor mask is f32, expected f16"),
    ({"sinks": np.ones(4, np.float16)}, "tensor sinks is f16, expected f32"),
    (
        {"k": np.ones((1, 2, 5, 16), np.float16)},
        "tensor k [16, 5, 2, 1], read as [Dk, M, Hkv, S], has Dk = 16, expected 32 as in q",
    ),
    (
        {"k": np.ones((1, 3, 5, 32), np.float16)},
        "tensor v [16, 5, 2, 1], read as [Dv, M, Hkv, S], has Hkv = 2, expected 3 as in k",
    ),
    ({"v": np.ones((1, 2, 6, 16), np.float32)}, "has M = 6, expected 5 as in k"),
    (
        {"d": np.ones((1, 4, 3, 16), np.float32)},
        "tensor d [16, 3, 4, 1], read as [Dv, H, N, S], has N = 4, expected 3 as in q",
    ),
    (
        {"o": np.ones((1, 3, 4, 32), np.float32)},
        "tensor o [32, 4, 3, 1], read as [Dv, H, N, S], has Dv = 32, expected 16 as in v",
    ),
    ({"q": np.ones((2, 4, 3, 32), np.float32)}, "has S = 1, expected 2 as in q"),
    (
        {"q": np.ones((1, 3, 3, 32), np.float32), "d": np.ones((1, 3, 3, 16), np.float32)},
        "tensor k has Hkv = 2, which does not divide H = 3 of q",
    ),
    ({"mask": np.ones((1, 3, 3, 5), np.float16)}, "tensor mask has Hm = 3, which does not divide H = 4"),
    ({"mask": np.ones((2, 1, 3, 5), np.float16)}, "tensor mask has Sm = 2, which does not divide S = 1"),
    ({"mask": np.ones((1, 1, 2, 5), np.float16)}, "tensor mask has 2 rows, expected at least N = 3"),
    ({"mask": np.ones((1, 1, 5, 3), np.float16)}, "has M = 3, expected 5 as in k"),
    ({"sinks": np.ones(2, np.float32)}, "tensor sinks [2], read as [H], has H = 2, expected 4 as in q"),
    ({"sinks": np.ones((2, 2), np.float32)}, "tensor sinks has 2 dimensions [2, 2], expected 1: [H]"),
    ({"q": np.ones((1, 4, 0, 32), np.float32)}, "is empty: N of [Dk, N, H, S]"),
    ({"dk": np.ones((1, 2, 4, 32), np.float32)}, "has W = 4, expected 5 as in the key window"),
    ({"dsinks": np.ones(4, np.float32)}, "tensor dsinks without a tensor sinks"),
]


@pytest.mark.parametrize(("tensors", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_tensor_is_named(tmp_path: Path, tensors: Mapping[str, Array | None], words: str) -> None:
    assert refused(raw(tmp_path / "a.gguf", tensors, {}), words)


def test_hint_names_the_tensor_that_was_meant(tmp_path: Path) -> None:
    assert refused(raw(tmp_path / "a.gguf", {"sink": np.ones(4, np.float32)}, {})).hint == "did you mean sinks?"


# ---- wrong metadata ----

METADATA: list[tuple[dict[str, Any], str]] = [
    ({"version": None}, "flash_attn_back.version is missing"),
    ({"scale": None}, "flash_attn_back.scale is missing"),
    ({"version": 2}, "capture format version 2, this program reads 1"),
    ({"version": 2, "novelty": 1}, "capture format version 2, this program reads 1"),
    ({"version": "one"}, "flash_attn_back.version is 'one', not an integer"),
    ({"scale": [1, 2]}, "flash_attn_back.scale is [1, 2], not a number"),
    ({"scale": True}, "flash_attn_back.scale is True, not a number"),
    ({"scale": 0.0}, "flash_attn_back.scale is 0.0, must be finite and not 0"),
    ({"scale": float("nan")}, "flash_attn_back.scale is nan"),
    ({"scale": float("inf")}, "flash_attn_back.scale is inf"),
    ({"logit_softcap": -1.0}, "flash_attn_back.logit_softcap is -1.0, must be finite and at least 0"),
    ({"max_bias": float("nan")}, "flash_attn_back.max_bias is nan"),
    ({"max_bias": 8.0}, "flash_attn_back.max_bias is 8.0, must be 0 without a tensor mask"),
    ({"kv_first": 1.0}, "flash_attn_back.kv_first is 1.0, not an integer"),
    ({"kv_first": 1}, "key window kv_first = 1, kv_count = 0 does not lie in 5 keys"),
    ({"kv_first": 3, "kv_count": 3}, "key window kv_first = 3, kv_count = 3 does not lie in 5 keys"),
    ({"kv_first": -1, "kv_count": 2}, "key window kv_first = -1"),
    ({"kv_count": -5}, "key window kv_first = 0, kv_count = -5"),
    ({"grads": "qx"}, "grads is 'qx', expected letters of qkv"),
    ({"grads": "s"}, "grads is 's', expected letters of qkv"),
    ({"grads": 7}, "flash_attn_back.grads is 7, not text"),
    ({"prec": "f64"}, "prec is 'f64', expected one of default, f32"),
    ({"softcap": 15.0}, "unknown metadata key flash_attn_back.softcap"),
]


@pytest.mark.parametrize(("keys", "words"), METADATA, ids=[words for _, words in METADATA])
def test_wrong_metadata_is_named(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    refused(raw(tmp_path / "a.gguf", {}, keys), words)


def test_hint_names_the_key_that_was_meant(tmp_path: Path) -> None:
    error = refused(raw(tmp_path / "a.gguf", {}, {"softcap": 15.0}))
    assert error.hint == "did you mean flash_attn_back.logit_softcap?"


# ---- wrong values ----


@pytest.mark.parametrize("name", ["q", "d", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_value_that_is_not_finite_is_named_with_its_place(tmp_path: Path, name: str, value: float) -> None:
    array = TENSORS[name].copy()
    array[0, 1, 2, 3] = value
    axes = {"q": "S 0, H 1, N 2, Dk 3", "d": "S 0, N 1, H 2, Dv 3", "k": "Hkv 1, M 2, Dk 3", "v": "Hkv 1, M 2, Dv 3"}
    refused(raw(tmp_path / "a.gguf", {name: array}, {}), f"tensor {name} holds {value}", axes[name])


def test_mask_and_sinks_are_numbers(tmp_path: Path) -> None:
    mask = np.zeros((1, 1, 3, 5), np.float16)
    mask[0, 0, 1, 2] = np.nan
    refused(raw(tmp_path / "a.gguf", {"mask": mask}, {}), "tensor mask holds nan at Sm 0, Hm 0, Nm 1, M 2")
    refused(raw(tmp_path / "a.gguf", {"sinks": np.full(4, np.inf, np.float32)}, {}), "tensor sinks holds inf at H 0")


def test_what_no_row_sees_may_hold_anything(tmp_path: Path) -> None:
    mask = np.zeros((1, 1, 4, 5), np.float16)
    mask[..., 3:] = -np.inf
    mask[..., 3, :] = np.nan  # a row beyond N
    k = TENSORS["k"].copy()
    k[:, :, 3], k[:, :, 4] = np.nan, np.inf
    capture_file.read(raw(tmp_path / "a.gguf", {"k": k, "mask": mask}, {}))
    mask[0, 0, 1, 4] = -65504  # finite: the key is seen
    refused(raw(tmp_path / "a.gguf", {"k": k, "mask": mask}, {}), "tensor k holds inf at S 0, Hkv 0, M 4")


# ---- damaged files ----


def test_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = raw(tmp_path / "a.gguf", {}, {"grads": "qk", "model": "x"}).read_bytes()
    last = max(tensor.data_offset + int(tensor.n_bytes) for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors)
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 800, 7), *range(800, last, 211), last - 1]:
        cut.write_bytes(whole[:size])
        refused(cut)
    cut.write_bytes(whole[:last])  # only the padding after the last tensor is gone
    capture_file.read(cut)


def test_damaged_header_is_read_or_refused_but_never_an_accident(tmp_path: Path) -> None:
    whole = raw(tmp_path / "a.gguf", {}, {"grads": "qk", "model": "x"}).read_bytes()
    rng = random.Random(0)
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(700)] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        (tmp_path / "b.gguf").write_bytes(damaged)
        message = ""
        try:
            capture_file.read(tmp_path / "b.gguf")
        except errors.Usage as error:
            message = str(error)
        assert not message or str(tmp_path / "b.gguf") in message


@pytest.mark.parametrize("offset", [8, 16], ids=["tensors", "keys"])
def test_absurd_counts_are_refused(tmp_path: Path, offset: int) -> None:
    file = raw(tmp_path / "a.gguf", {}, {})
    whole = bytearray(file.read_bytes())
    whole[offset : offset + 8] = (2**62).to_bytes(8, "little")
    file.write_bytes(whole)
    refused(file, "not a whole GGUF file")


def test_duplicates_are_refused(tmp_path: Path) -> None:
    file = raw(tmp_path / "a.gguf", {"o": TENSORS["d"]}, {"kv_first": 0, "kv_count": 0})
    whole = file.read_bytes()
    for old, new in ((b"kv_count", b"kv_first"), (b"\x01" + bytes(7) + b"o", b"\x01" + bytes(7) + b"d")):
        assert whole.count(old) == 1
        file.write_bytes(whole.replace(old, new))
        assert re.search("[Dd]uplicate", str(refused(file, "not a whole GGUF file")))


def test_other_byte_order_and_other_files_are_refused(tmp_path: Path) -> None:
    refused(raw(tmp_path / "a.gguf", {}, {}, endianess=gguf.GGUFEndian.BIG), "byte order")
    (tmp_path / "b.gguf").write_bytes(b"not GGUF at all")
    refused(tmp_path / "b.gguf", "GGUF magic invalid")
    refused(tmp_path, "directory")
    assert "did you mean minilm-l5?" in refused(capture_file.path("minilm-15")).hint


# ---- cases ----


def test_name_and_path() -> None:
    assert capture_file.path("minilm-l0") == ROOT / "tests" / "data" / "minilm-l0.gguf"
    assert capture_file.path("x/minilm") == Path("x/minilm")
    assert capture_file.path("mine.safetensors") == Path("mine.safetensors")


def test_case_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    capture_file.write(file, example(case=Case(capture="-", kv_first=1, kv_count=3, grads="qk")))
    plain = capture_file.load(Case.parse(f"FLASH_ATTN_BACK(capture={file})"))
    assert (plain.kv_first, plain.kv_count, plain.grads, plain.o, plain.case.prec) == (
        1,
        3,
        ("dq", "dk"),
        None,
        "default",
    )
    text = f"FLASH_ATTN_BACK(capture={file},grads=vs,kv_first=2,kv_count=2,o=1,prec=f32,layout=perm)"
    told = capture_file.load(Case.parse(text))
    assert (told.kv_first, told.kv_count, told.grads) == (2, 2, ("dv", "dsinks"))
    assert told.o is not None
    assert (told.case.prec, told.case.layout) == ("f32", "perm")
    assert str(told.case) == text


def test_case_that_the_file_cannot_serve_is_refused(tmp_path: Path) -> None:
    file = raw(tmp_path / "a.gguf", {}, {})
    for beside, words in (
        ("o=1", "holds no tensor o"),
        ("grads=s", "expected letters of qkv"),
        ("kv_first=4,kv_count=2", "does not lie in 5 keys"),
    ):
        with pytest.raises(errors.Usage, match=words):
            capture_file.load(Case.parse(f"FLASH_ATTN_BACK(capture={file},{beside})"))


# ---- the captures in tests/data ----


def nmse(got: Array, want: Array) -> float:
    return float(np.square(got - want).sum() / np.square(want).sum())


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("llamacpp-")])
def test_committed_capture_is_consistent_and_agrees_with_torch(name: str) -> None:
    """o was computed in float64 and dq, dk, dv by torch's float64 autograd: only float32's rounding may differ."""
    found = capture_file.read(capture_file.path(name))
    assert found.inputs.o is not None
    assert nmse(found.inputs.o, reference.forward(found.inputs)) < 1e-14
    want = reference.backward(dataclasses.replace(found.inputs, o=None))
    assert found.gradients.keys() == {"dq", "dk", "dv"}
    for part, stored in found.gradients.items():
        assert nmse(stored, want[part]) < 1e-14
    text = capture_file.DATA / "text" / found.notes["text"]
    assert hashlib.sha256(text.read_bytes()).hexdigest() == found.notes["text_sha256"]


def test_committed_captures_are_small_and_cover_what_real_models_do() -> None:
    assert len(NAMES) == 6
    assert sum(file.stat().st_size for file in capture_file.DATA.glob("*.gguf")) < 3_300_000
    found = {name: capture_file.read(capture_file.path(name)).inputs for name in NAMES}
    assert any((~inputs.seen()).any() for inputs in found.values())  # padding
    assert any(inputs.mask is not None and inputs.mask.shape[0] > 1 for inputs in found.values())
    assert any(inputs.sizes[1] > inputs.sizes[2] and inputs.sizes[3] < inputs.sizes[4] for inputs in found.values())
    assert {inputs.type_K for inputs in found.values()} == {"f32", "f16", "q8_0"}


# ---- replay ----


def replayed(*arguments: str) -> int:
    return cli.main(["replay", *arguments, "--no-receipt"])


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the oracle's run: takes every case and finds no fault."""
    seen: list[str] = []

    def execute(_args: argparse.Namespace, selected: list[Case], checks: list[dict[str, Any]]) -> int:
        seen.extend(map(str, selected))
        return int(not all(check["passed"] for check in checks))

    monkeypatch.setattr(oracle, "execute", execute)
    return seen


def test_replay_runs_names_and_files(executed: list[str], tmp_path: Path) -> None:
    file = raw(tmp_path / "a.gguf", {}, {})
    assert replayed("minilm-l0", str(file)) == 0
    assert executed == ["FLASH_ATTN_BACK(capture=minilm-l0,o=1)", f"FLASH_ATTN_BACK(capture={file})"]


def test_replay_without_names_runs_all_of_tests_data(executed: list[str]) -> None:
    assert replayed() == 0
    assert len(executed) == len(NAMES)


def test_replay_refuses_a_bad_file_before_anything_runs(
    executed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = raw(tmp_path / "a.gguf", {"q": None}, {})
    assert replayed("minilm-l0", str(file)) == 2
    assert executed == []
    assert "tensor q [Dk, N, H, S] is missing" in capsys.readouterr().err
    assert replayed(str(tmp_path / "nowhere.gguf")) == 2


@pytest.mark.usefixtures("executed")
def test_replay_fails_when_the_files_own_gradients_are_of_another_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = capture_file.read(capture_file.path("minilm-l0"))
    wrong = dataclasses.replace(found.inputs, scale=0.2)
    capture_file.write(tmp_path / "a.gguf", dataclasses.replace(found, inputs=wrong))
    assert replayed(str(tmp_path / "a.gguf")) == 1
    assert "the file's own gradients differ (limit 1e-05) from float64: dq" in capsys.readouterr().err


def test_replay_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ggml.Library.open()
    except errors.Environment as error:
        pytest.skip(str(error))
    assert replayed("-b", "CPU") == 0
    assert f"{len(NAMES)} ok, 0 failed" in capsys.readouterr().out


def test_replay_refuses_a_path_that_a_case_string_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a,b.gguf", os.fsdecode(b"gr\xfcn.gguf")):
        file = tmp_path / name
        file.write_bytes(capture_file.path("minilm-l0").read_bytes())
        assert replayed(str(file)) == 2
        assert "rename it" in capsys.readouterr().err


# ---- capturing ----


@pytest.mark.parametrize("package", ["", "no_such_package", "no_such_package.inside", "json.decoder"])
def test_a_model_in_no_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    monkeypatch.setitem(sys.modules, "transformers", MagicMock())
    monkeypatch.setattr(capture, "Recorder", MagicMock())
    text = capture_file.DATA / "text" / "zen-of-python.txt"
    words = ["capture", str(tmp_path / "a.gguf"), "--model", f"package:{package}/model", "--text", str(text)]
    assert cli.main(words) == 3
    assert "no Python package" in capsys.readouterr().err


def test_capture_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = capture_file.DATA / "text" / "zen-of-python.txt"
    arguments = ["capture", str(tmp_path / "a.gguf"), "--model", "m", "--text"]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main([*arguments, str(text)]) == 3
    assert build.pip("capture") in capsys.readouterr().err
    assert cli.main([*arguments, str(tmp_path / "nowhere.txt")]) == 2
    assert cli.main(["capture", "minilm-l0", "--model", "m", "--text", str(text)]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["capture", str(tmp_path / "no/a.gguf"), "--model", "m", "--text", str(text)]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16, "sliding_window": 3},
    "GptOssForCausalLM": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 3},
}


@pytest.mark.parametrize("kind", MODELS)
def test_recorder_on_small_models(tmp_path: Path, kind: str) -> None:
    """GQA; softcap and a sliding window; sinks: what the model's attention read is FLASH_ATTN_EXT's formula."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = model_class.config_class(**sizes, **heads, **MODELS[kind], pad_token_id=0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    recorder = capture.Recorder()
    model.set_attn_implementation(recorder.name)
    ids = torch.arange(1, 13).reshape(2, 6)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(recorder) == 2
    capture_file.write(tmp_path / "a.gguf", recorder.capture(-1, rows=4, kv_heads=[1], type_k="q8_0", type_v="bf16"))
    found = capture_file.read(tmp_path / "a.gguf")
    assert found.inputs.sizes == (2, 2, 1, 4, 6)
    assert (found.inputs.type_K, found.inputs.type_V) == ("q8_0", "bf16")
    assert (found.inputs.softcap > 0) == (kind == "Gemma2ForCausalLM")
    assert ("dsinks" in found.gradients) == (kind == "GptOssForCausalLM")
    want = reference.backward(dataclasses.replace(found.inputs, o=None))
    for part, stored in found.gradients.items():
        assert nmse(stored, want[part]) < 1e-13
    with pytest.raises(errors.Usage, match="ran 2 attentions"):
        recorder.capture(2)
    with pytest.raises(errors.Usage, match="KV heads 0 to 1"):
        recorder.capture(0, kv_heads=[2])


# ---- docs ----


def blocks() -> list[str]:
    text = (ROOT / "docs" / "captures.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("number", "needs", "file"), [(0, "gguf", "mine.gguf"), (1, "torch", "mine.safetensors")])
def test_documented_recipe_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[str], number: int, needs: str, file: str
) -> None:
    pytest.importorskip(needs)
    monkeypatch.chdir(tmp_path)
    exec(blocks()[number], {})
    assert replayed(file) == 0
    assert len(executed) == 1


def test_docs_name_every_tensor_and_key() -> None:
    text = (ROOT / "docs" / "captures.md").read_text(encoding="utf-8")
    for name in (*capture_file.AXES, *capture_file.KEYS, *capture_file.NOTES):
        assert f"`{name}`" in text or f".{name}`" in text
