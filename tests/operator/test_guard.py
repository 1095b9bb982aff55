"""The bound from which on the paths on tensor cores form a unit in F32, by an emulation of their arithmetic (fp16.py).

What the emulation finds beyond the limit must be beyond the bound, too; N(0,1) never is.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import fp16
import numpy as np
import pytest
from attention import case
from corners import CORNERS, Draft
from reports import draft

from pyharness.base.digest import ROOT
from pyharness.case import inputs, reference
from pyharness.case.operands import Inputs
from pyharness.check import oracle

HEADER = ROOT / "ggml/src/ggml-cuda/fattn-back-guard.cuh"

HARD = (  # corners that fp16 operands cannot hold
    "last_k_is_huge_and_seen_once",
    "last_v_is_huge_and_seen_once",
    "longest_do_where_q_is_smallest",
    "longest_do_where_q_is_zero",
    "sinks_outweigh_keys",
    "softcap_small",
    "softcap_saturated_at_8",
    "whole_block_of_rows_without_keys",
)
EASY = ("bias_positive", "few_random_keys_a_row", "logits_of_50", "keys_with_a_mean_of_100", "sinks_and_constant_v")
REPORTED = (
    "n12_rope_f32",
    "n12_bos_f32",
    "n12_bos_d128",
    "n01_shared_maximum_short",
    "n02_cancelled_sinks",
    "n05_sinks_of_3.4e+38",
    "n11_do_of_3.5e35_short",
    "n11_do_of_1e-36_short",
)
NEED = (  # of these such as fail in the emulation
    "last_k_is_huge_and_seen_once",
    "longest_do_where_q_is_zero",
    "softcap_small",
    "softcap_saturated_at_8",
    "n02_cancelled_sinks",
    "n11_do_of_3.5e35_short",
)


def failed(given: Inputs, bound: fp16.Bound | None) -> tuple[list[str], list[tuple[int, fp16.Measured]]]:
    """Parts that miss the limit of a path on tensor cores, and what became of the units."""
    exact = reference.backward(given)
    parts, units = fp16.run(given, bound, exact)
    found: Any = types.SimpleNamespace(
        parts={name: x.astype(np.float32) for name, x in parts.items()},
        unwritten=defaultdict(int),
        path="mma",
        forward="",
    )
    with np.errstate(all="ignore"):
        compared = oracle.compare(given, found, exact)
    return [name for name, part in compared.items() if not part.passed], units


def corner(name: str, shape: str = "few") -> Inputs:
    made = Draft(name, shape, True)
    CORNERS[name][0](made)
    return made.inputs()


def test_the_kernels_have_the_same_bound() -> None:
    defined = dict(re.findall(r"#define FATTN_BACK_GUARD_(\w+) +([\w.+-]+)", HEADER.read_text()))
    names = {field.name: field.name.upper() for field in dataclasses.fields(fp16.Bound)}
    names["d"] = "MEAN"

    def number(text: str) -> float:
        text = text.removesuffix("f")
        return float.fromhex(text) if text.startswith("0x") else float(text)

    assert {name: number(defined[there]) for name, there in names.items()} == dataclasses.asdict(fp16.Bound())


@pytest.mark.parametrize("name", [*HARD, *EASY])
def test_corners_hold_the_limit(name: str) -> None:
    assert not failed(corner(name), fp16.Bound())[0]


@pytest.mark.parametrize("name", REPORTED)
def test_reports_hold_the_limit(name: str) -> None:
    assert not failed(draft(name).inputs(), fp16.Bound())[0]


@pytest.mark.parametrize("seed", range(24))
def test_wild_numbers_hold_the_limit(seed: int) -> None:
    sinks = seed % 3 == 0
    text = f"hsk=64,hsv=64,nh=4,nhkv=2,kv=150,nb=90,type_K=f32,type_V=f32,data=wild,sinks={int(sinks)}"
    assert not failed(inputs.make(case(text), seed), fp16.Bound())[0]


@pytest.mark.parametrize("name", NEED)
def test_without_the_guard_they_do_not(name: str) -> None:
    assert failed(draft(name).inputs() if name in REPORTED else corner(name), None)[0]


@pytest.mark.parametrize(
    "text",
    [
        "hsk=64,hsv=64,nh=4,nhkv=2,kv=64,nb=64",
        "hsk=128,hsv=128,nh=2,nhkv=2,kv=700,nb=64,mask=none",
        "hsk=256,hsv=256,nh=2,nhkv=1,kv=300,nb=300",
        "hsk=64,hsv=64,nh=1,nhkv=1,kv=3000,nb=100,type_K=q8_0,type_V=q8_0",
        "hsk=80,hsv=80,nh=2,nhkv=1,kv=200,nb=200,softcap=20",
        "hsk=128,hsv=128,nh=8,nhkv=4,kv=200,nb=200,sinks=1",
        "hsk=64,hsv=64,nh=4,nhkv=2,kv=200,nb=200,mask=docs:50",
        "hsk=8,hsv=8,nh=4,nhkv=2,kv=200,nb=100",
    ],
)
def test_normal_numbers_are_within_the_bound(text: str) -> None:
    missed, units = failed(inputs.make(case(text), 1), fp16.Bound())
    assert not missed
    assert {level for level, _ in units} == {fp16.FP16}


@pytest.mark.parametrize("seed", range(4))
def test_lengths_of_a_training_are_within_the_bound(seed: int) -> None:
    """Rows of V less their mean, and of dO, as training from random weights has them: few are 30 times the others."""
    given = inputs.make(case("hsk=64,hsv=64,nh=4,nhkv=2,kv=256,nb=256,type_K=f32,type_V=f32"), seed)
    random = np.random.default_rng(seed)
    v, d = given.v.view(np.float32), given.d
    lengths = [np.exp2(2 * random.standard_normal(x.shape[:-1])[..., None]) for x in (v, d)]
    v, d = (3 + x * length if x is v else x * length for x, length in zip((v, d), lengths, strict=True))
    given = dataclasses.replace(given, v=v.astype(np.float32).view(np.uint8), d=d.astype(np.float32))
    missed, units = failed(given, fp16.Bound())
    assert not missed
    assert {level for level, _ in units} == {fp16.FP16}
    assert max(measured.spread_v for _, measured in units) > fp16.Bound().v


def test_captures_are_within_the_bound_but_for_one_d() -> None:
    """Of 32 units of real models one has a D that is small beside the mean of V: its D is formed in F32."""
    levels = []
    for file in sorted(Path(ROOT / "tests/data").glob("*.gguf")):
        given = inputs.make(case(f"capture={file.stem}"), 0)
        levels += [level for level, _ in failed(given, fp16.Bound())[1]]
    assert levels.count(fp16.F32) == 0
    assert levels.count(fp16.D_IN_F32) <= 1
