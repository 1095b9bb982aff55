"""Tables of timings: each pass beside its like, names that fit a cell."""

from __future__ import annotations

from typing import Any

import pytest

from pyharness.case import cases
from pyharness.receipts import statement, tables, timing

LARGE = "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=32,nhkv=8,kv=4096,nb=4096)"
WINDOW = "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=32,nhkv=8,kv=4096,nb=4096,kv_first=1,kv_count=9)"


def record(who: str, way: str, ms: float = 0.0, case: str = LARGE, spread: float = 0.0, **errors: float) -> Any:
    ns = [round(1e6 * (ms + spread * step)) for step in (-1, 0, 1)]
    timings = [{"l2": "warm", "clock": "device", "warmups": 3, "samples_ns": ns, **timing.statistics(ns)}]
    return {
        "case": case,
        "device": "CUDA0",
        "who": who,
        "pass": way,
        "path": "hopper" if "back" in who else "",
        "unavailable": "" if ms else "no kernel for this shape",
        "timings": timings if ms else [],
        "work": {"flop": 10**12},
        "memory": {"peak_bytes": None},
        "floor": None,
        "error": {"scope": "", "nmse": {name: str(value) for name, value in errors.items()}} if errors else None,
    }


def perf(*records: Any, base: Any = None) -> Any:
    return {"measurements": list(records), "throttled": False, "base": base}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hsk=128,hsv=128,nh=32,nhkv=8,kv=8192,nb=8192", "H32/8 D128 8192"),
        ("hsk=256,hsv=256,nh=24,nhkv=4,kv=75520,nb=2048,type_K=q8_0,type_V=q8_0", "H24/4 D256 N2048 M75520 q8_0"),
        ("hsk=192,hsv=128,nh=16,nhkv=16,kv=64,nb=1,type_K=q8_0", "H16 D192/128 N1 M64 q8_0/f16"),
        (
            "hsk=64,hsv=64,nh=4,nhkv=2,kv=9,nb=9,mask=swa:4,max_bias=8,sinks=1",
            "H4/2 D64 9 mask=swa:4 max_bias=8 sinks=1",
        ),
        ("hsk=64,hsv=64,nh=4,nhkv=2,kv=9,nb=9,kv_first=2,kv_count=3", "H4/2 D64 9 keys 2-4"),
        ("capture=smollm2-l0,prec=f32", "smollm2-l0 prec=f32"),
        ("hsk=64,what=1", "FLASH_ATTN_BACK(hsk=64,what=1)"),
    ],
)
def test_a_shape_has_a_short_name(text: str, name: str) -> None:
    assert tables.shape_name(f"FLASH_ATTN_BACK({text})") == name


@pytest.mark.parametrize("path", [cases.PERF, cases.PERF_CPU, cases.CASES], ids=lambda path: path.stem)
def test_no_two_cases_have_one_name(path: Any) -> None:
    listed = cases.load(path)
    assert len({tables.shape_name(str(case)) for case in listed}) == len(listed)


def test_every_pass_of_ours_stands_beside_the_same_pass_of_the_others() -> None:
    own = [
        record(who, way, ms, o=1e-7, dq=2e-7)
        for (way, who), ms in zip(statement.OURS.items(), (1.0, 2.0, 3.0), strict=True)
    ]
    theirs = [record("fa3", way, ms) for way, ms in zip(statement.OURS, (0.25, 0.5, 0.75), strict=True)]
    head, _, *rows, _, notes = tables.peers_table(perf(*own, *theirs)).splitlines()
    assert head == "| shape | pass | path | ours: ms ± MAD, NMSE | fa3 |"
    assert rows == [
        "| H32/8 D128 4096 | forward+backward | hopper | 3 ± 0, 2.0e-07 | 0.75 ± 0 |",
        "| H32/8 D128 4096 | forward |  | 1 ± 0, 2.0e-07 | 0.25 ± 0 |",
        "| H32/8 D128 4096 | backward | hopper | 2 ± 0, 2.0e-07 | 0.5 ± 0 |",
    ]
    assert notes == "Passes: " + "; ".join(f"`{way}`: {note}" for way, note in tables.NOTES.items()) + "."


def test_a_receipt_without_the_pair_has_no_rows_for_it_and_adds_nothing_up() -> None:
    measured = [
        record("flash_attn_back", "backward", 2.0, dq=2e-7),
        record("torch flash float16", "forward", 1.0),
        record("torch flash float16", "backward", 2.5, dq=3e-7),
    ]
    _, _, *rows, _, notes = tables.peers_table(perf(*measured)).splitlines()
    assert rows == [
        "| H32/8 D128 4096 | forward |  | - | 1 ± 0 |",
        "| H32/8 D128 4096 | backward | hopper | 2 ± 0, 2.0e-07 | 2.5 ± 0, 3.0e-07 |",
    ]
    assert "forward+backward" not in notes


def test_what_did_not_run_leaves_its_cell_empty_and_a_case_its_row() -> None:
    measured = [
        record("flash_attn_back", "backward", 2.0),
        record("fa3 deterministic", "forward+backward"),
        record("flash_attn_back", "backward", case=WINDOW),
    ]
    _, _, *rows, _, _ = tables.peers_table(perf(*measured)).splitlines()
    assert rows == [
        "| H32/8 D128 4096 | backward | hopper | 2 ± 0 | - |",
        "| H32/8 D128 4096 keys 1-9 | backward | hopper | - | - |",
    ]


def test_an_unstable_median_is_marked() -> None:
    measured = perf(record("flash_attn_back", "backward", 2.0, spread=0.2), record("fa3", "backward", 2.0, spread=0.09))
    row = tables.peers_table(measured).splitlines()[2]
    assert row.endswith("| 2 ± 0.2 (unstable) | 2 ± 0.09 |")
    ours, theirs = tables.performance_table([measured]).splitlines()[2:]
    assert "| 2 (unstable) | 0.2 |" in ours
    assert "unstable" not in theirs


def test_the_table_to_paste_compares_like_with_like() -> None:
    pair = statement.OURS["forward+backward"]
    compared = {"case": LARGE, "device": "CUDA0", "l2": "warm", "clock": "device", "verdict": "faster", "ratio": "1.5"}
    measured = perf(
        record("flash_attn_back", "backward", 2.0, dq=1e-7, dk=2e-7),
        record(pair, "forward+backward", 3.0, o=1e-7),
        record("fa3", "forward", 1.0),
        record("fa3", "backward", 1.0),
        record("fa3", "forward+backward", 6.0),
        base={"comparisons": [compared | {"who": pair, "pass": "forward+backward"}]},
    )
    backward, both, *fa3 = tables.performance_table([measured]).splitlines()[2:]
    assert backward.endswith("| dq 1.0e-07, dk 2.0e-07 |  |")
    assert both.endswith("| o 1.0e-07 | base: 1.5x, faster |")
    assert [row.rsplit("| ", 1)[1] for row in fa3] == [" |", "0.5x, slower |", "2x, faster |"]
