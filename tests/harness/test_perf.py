"""perf: statistics that do not flatter, work that is counted, peers on the same tensors."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyharness.base import errors
from pyharness.base.digest import ROOT
from pyharness.case import cases, inputs, reference
from pyharness.case.cases import Case
from pyharness.check import gpucheck
from pyharness.cli import cli
from pyharness.device import monitor
from pyharness.device.ggml import Device, Library
from pyharness.perf import bench, peers, perf, plot
from pyharness.receipts import statement, timing

SMALL = "FLASH_ATTN_BACK(hsk=64,hsv=32,nh=4,nhkv=2,kv=96,nb=32)"

# ---- statistics ----


def test_the_interval_of_the_median_is_that_of_the_binomial() -> None:
    assert timing.interval(range(1, 21)) == [6, 15]  # the textbook ranks for 20 samples at 95 %
    assert timing.interval(range(1, 7)) == [1, 6]
    assert timing.interval([3, 1, 2]) == [1, 3]
    assert timing.interval([7]) == [7, 7]


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(2000):
        low, high = timing.interval([int(rng.expovariate(1e-6)) for _ in range(25)])
        covered += low <= 1e6 * np.log(2) <= high
    assert 0.94 <= covered / 2000 <= 0.99


def test_statistics_are_robust_and_exact() -> None:
    found = timing.statistics([10, 12, 11, 500])
    assert found == {"median_ns": "11.5", "mad_ns": "1.0", "min_ns": 10, "interval_ns": [10, 500]}


def samples(*ns: int) -> dict[str, Any]:
    return {"samples_ns": list(ns), "l2": "warm", "clock": "host", **timing.statistics(ns)}


def test_a_difference_is_called_only_where_intervals_part() -> None:
    slow, fast, wide = samples(*range(100, 120)), samples(*range(50, 60)), samples(*range(60, 160))
    assert timing.compare(fast, slow)[1] == "faster"
    assert timing.compare(fast, slow)[0] == pytest.approx(109.5 / 54.5)
    assert timing.compare(slow, fast)[1] == "slower"
    assert timing.compare(wide, slow)[1] == timing.compare(slow, slow)[1] == "undecided"
    assert timing.verdict_text((2.0, "undecided")) == "undecided"


def test_a_median_whose_mad_is_beyond_five_percent_is_called_unstable() -> None:
    assert timing.unstable(samples(100, 105, 95)) == ""
    assert timing.unstable(samples(100, 112, 88)) == "unstable: the MAD is 12% of the median"


def record(name: str, *ns: int, throttled: bool = False) -> dict[str, Any]:
    measurement = {
        "case": SMALL,
        "device": "CPU",
        "who": name,
        "pass": "backward",
        "unavailable": "",
        "timings": [samples(*ns)],
    }
    return {"measurements": [measurement], "throttled": throttled, "base": None}


def test_base_compares_the_same_timings_and_nothing_under_throttled_clocks() -> None:
    now = record(statement.OPERATOR, *range(50, 70))
    for throttled, want in ((False, "faster"), (True, "undecided")):
        before = {
            "predicate": {
                "receipt": {"id": "0" * 64, "perf": record(statement.OPERATOR, *range(100, 120), throttled=throttled)}
            }
        }
        (found,) = timing.against_base(now["measurements"], before)["comparisons"]
        assert found["verdict"] == want
        assert float(found["ratio"]) == pytest.approx(109.5 / 59.5)
    assert timing.against_base(record("unfused", 1, 2)["measurements"], before)["comparisons"] == []


# ---- work ----


@pytest.mark.parametrize(
    "text",
    [
        SMALL,
        "FLASH_ATTN_BACK(hsk=32,hsv=64,nh=4,nhkv=2,kv=20,nb=12,ns=2,mask=swa:5,mh=4,ms=2,mpad=3)",
        "FLASH_ATTN_BACK(hsk=32,hsv=32,nh=2,nhkv=2,kv=20,nb=12,mask=docs:6,kv_first=4,kv_count=9)",
        "FLASH_ATTN_BACK(hsk=32,hsv=32,nh=2,nhkv=1,kv=20,nb=30,mask=rows,grads=qv)",
        "FLASH_ATTN_BACK(hsk=32,hsv=32,nh=2,nhkv=1,kv=20,nb=30,mask=none,grads=k,kv_first=19,kv_count=1)",
        "FLASH_ATTN_BACK(hsk=32,hsv=32,nh=2,nhkv=1,kv=20,nb=30,mask=lowest)",
    ],
)
def test_work_is_counted_pair_by_pair(text: str) -> None:
    given = inputs.make(Case.parse(text), 0)
    s, h, _, n, m = given.sizes
    dk, dv = given.q.shape[3], given.d.shape[3]
    pairs = flop = forward = 0
    for a, b, i, j in itertools.product(range(s), range(h), range(n), range(m)):
        mask = given.mask
        if mask is not None and np.isneginf(mask[a % mask.shape[0], b % mask.shape[1], i, j]):
            continue
        pairs += 1
        forward += 2 * (dk + dv)
        inside = given.kv_first <= j < given.kv_first + given.kv_count
        flop += 2 * (dk + dv) + 2 * dk * ("dq" in given.grads)
        flop += 2 * inside * (dk * ("dk" in given.grads) + dv * ("dv" in given.grads))
    found = perf.work(given)
    assert (found["pairs"], found["flop"], found["reason"]) == (pairs, flop, "")
    assert perf.work(given, "forward")["flop"] == forward
    assert perf.work(given, "forward+backward")["flop"] == forward + flop


def test_all_gradients_are_five_products() -> None:
    given = inputs.make(Case.parse("FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nhkv=2,kv=30,nb=10,mask=none)"), 0)
    assert perf.work(given)["flop"] == 5 * 2 * 64 * 2 * 30 * 10


def test_a_mask_that_cannot_be_counted_gives_no_work() -> None:
    given = inputs.make(Case.parse(SMALL), 0)
    assert given.mask is not None
    given.mask[0, 0, 3, 3] = np.nan
    found = perf.work(given)
    assert (found["pairs"], found["flop"], found["reason"]) == (None, None, "unavailable: the mask holds NaN")


def test_the_floor_is_the_larger_of_traffic_and_products() -> None:
    ceilings = {"compute_flop_per_s": "1e12", "memory_bytes_per_s": "1e9"}
    found = perf.floor(2_000_000, 10**9, ceilings, median_ns=8e6)
    assert found == {"bytes": 2_000_000, "memory_ns": "2000000.0", "compute_ns": "1000000.0", "fraction": "0.25"}
    assert perf.floor(2_000_000, None, perf.NO_CEILINGS, 8e6)["fraction"] is None


@pytest.mark.parametrize("ceiling", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ceiling_that_bounds_nothing_is_refused(ceiling: float) -> None:
    for args in ({"ceiling_tflops": ceiling, "ceiling_gbs": None}, {"ceiling_tflops": 1.0, "ceiling_gbs": ceiling}):
        with pytest.raises(errors.Usage, match="must be above 0"):
            perf._given_ceilings(argparse.Namespace(**args))


# ---- sampling ----


def test_samples_exclude_warm_ups_and_flush_when_cold() -> None:
    calls: list[str] = []

    def run() -> bench.Sample:
        calls.append("run")
        return 2_000, 1_000

    timings = perf.sample(run, lambda: calls.append("flush"), runs=4, cold=True)
    assert calls == ["run"] * (3 + 4) + ["run"] * 3 + ["flush", "run"] * 4
    assert [(t["l2"], t["clock"], len(t["samples_ns"]), t["warmups"]) for t in timings] == [
        ("warm", "device", 4, 3),
        ("warm", "host", 4, 3),
        ("cold", "device", 4, 3),
        ("cold", "host", 4, 3),
    ]
    assert timings[0]["samples_ns"] == [1_000] * 4


def test_without_runs_there_are_at_least_twenty_samples_and_at_most_two_hundred() -> None:
    (found,) = perf.sample(lambda: (1, None), lambda: None, runs=0, cold=False)
    assert len(found["samples_ns"]) == 200
    assert found["clock"] == "host"


def test_the_cache_is_flushed_by_twice_its_size() -> None:
    assert bench.last_level_cache() >= 2**18


# ---- peers ----


@pytest.mark.parametrize(
    "text",
    [
        SMALL,
        "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=6,nhkv=2,kv=50,nb=20,ns=2,type_K=q8_0,type_V=f32,mask=none)",
        "FLASH_ATTN_BACK(hsk=32,hsv=64,nh=4,nhkv=4,kv=60,nb=21,ns=2,mask=random,mh=4,ms=2,mpad=5,grads=qv)",
        "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=1,kv=80,nb=16,mask=pad,layout=cache,scale=0.3)",
    ],
)
def test_the_unfused_graph_computes_the_same_gradient(library: Library, cpu: Device, text: str) -> None:
    given = inputs.make(Case.parse(text), 0)
    want = reference.backward(given)
    want["o"] = reference.forward(given)
    with peers.Unfused(library, cpu, peers.Plain(given), 2) as peer:
        assert peer.bytes is not None
        assert peer.bytes > 4 * np.prod(given.sizes[:2]) * np.prod(given.sizes[3:])
        for _ in range(2):  # a second run reads nothing that the first overwrote
            host, device = peer.time("forward+backward")
            assert host is not None
            assert host > 0
            assert device is None
        got = peer.parts()
    assert set(got) == {"o", *given.grads}
    for name, array in got.items():
        assert perf.nmse(array, want[name]) < 1e-10, name


@pytest.mark.parametrize(
    ("extra", "reason"),
    [("sinks=1", "sinks"), ("softcap=20", "softcap"), ("max_bias=8", "ALiBi"), ("kv_count=9", "window")],
)
def test_what_the_unfused_graph_cannot_do_it_says(library: Library, cpu: Device, extra: str, reason: str) -> None:
    given = inputs.make(Case.parse(SMALL[:-1] + f",{extra})"), 0)
    with pytest.raises(peers.Unavailable, match=reason), peers.Unfused(library, cpu, peers.Plain(given), 2):
        pass


def test_the_unfused_graph_is_not_tried_where_memory_is_short(library: Library, cpu: Device) -> None:
    given = inputs.make(Case.parse(SMALL), 0)
    small = dataclasses.replace(cpu, memory_free=1000)
    with pytest.raises(peers.Unavailable, match=r"needs .* GiB"), peers.Unfused(library, small, peers.Plain(given), 2):
        pass


@pytest.mark.parametrize(
    ("mask", "tail"), [("causal", True), ("none", False), ("swa:5", False), ("swa:96", True), ("pad", False)]
)
def test_a_causal_tail_is_recognised(mask: str, tail: bool) -> None:
    assert peers.causal_tail(inputs.make(Case.parse(SMALL[:-1] + f",mask={mask})"), 0)) is tail


# ---- errors ----


@pytest.mark.parametrize("extra", ["", ",ns=2,mask=random,mh=4,ms=2,sinks=1,softcap=9"])
def test_the_error_of_a_slice_is_that_of_the_whole(extra: str) -> None:
    given = inputs.make(Case.parse(SMALL[:-1] + extra + ")"), 0)
    whole = reference.backward(given)
    rng = np.random.default_rng(0)
    parts = {
        name: (whole[name] * (1 + 1e-3 * rng.standard_normal(whole[name].shape))).astype(np.float32)
        for name in ("dq", "dk", "dv")
    }
    truth = perf.Truth(given, "slice")
    assert truth.scope == "sequence 0, KV head 0 of 2 with its 2 query heads"
    found = truth.error(parts)["nmse"]
    for name, heads in (("dq", 2), ("dk", 1), ("dv", 1)):
        want = perf.nmse(parts[name][:1, :heads], whole[name][:1, :heads])
        assert float(found[name]) == pytest.approx(want, rel=1e-6)


def test_a_case_with_alibi_is_checked_whole() -> None:
    biased = inputs.make(Case.parse(SMALL[:-1] + ",max_bias=8)"), 0)
    assert perf.Truth(biased, "slice").scope == "all heads"  # a slope depends on the number of heads


# ---- the verb ----


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[int, str]:
    common = ("-b", "CPU", "--threads", "1", "--runs", "6", "--ceiling-tflops", "1", "--ceiling-gbs", "100")
    code = cli.main(["perf", *common, "--receipts", str(tmp_path / "receipts"), *words])
    return code, capsys.readouterr().out


def test_perf_prints_times_work_floor_error_and_peers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text = run(capsys, tmp_path, "-o", SMALL, "--peer", "unfused")
    assert code == 0
    number = r"[\d.e-]+"
    times = rf"median {number} ms \[{number}, {number}\], MAD {number}, min {number}, n=6  {number} TFLOP/s"
    assert re.search(f"warm L2, host   clock: {times}", text)
    assert "cold L2, host" in text
    assert "floor: memory" in text
    assert "% of it reached" in text
    assert "NMSE dq" in text
    for way, who in statement.OURS.items():
        assert f"  {who} {way}" in text
        assert f"  unfused {way}" in text
        assert re.search(
            rf"{re.escape(SMALL)}: {re.escape(way)}: against unfused: (undecided|[\d.]+x, (faster|slower))", text
        )
        assert f"work, {way}: {perf.FORMULA[way]}" in text
    assert re.search(r"GPU (not watched: |not throttled|throttled)", text)


def test_an_unstable_median_says_so_on_the_console(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("-o", SMALL, "--pass", "backward", "--no-cold", "--no-receipt", "--error", "none")
    for spread, want in ((9, True), (4, False)):
        ends = itertools.cycle((100 - spread, 100, 100 + spread))
        monkeypatch.setattr(bench.Bench, "time", lambda *_, ends=ends: (next(ends), None))
        _, text = run(capsys, tmp_path, *words)
        assert (f"    unstable: the MAD is {spread}% of the median" in text) is want


@pytest.mark.parametrize("passes", [("forward",), ("backward",), ("forward+backward", "backward")])
def test_passes_can_be_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path, passes: tuple[str, ...]) -> None:
    chosen = [word for way in passes for word in ("--pass", way)]
    code, text = run(capsys, tmp_path, "-o", SMALL, "--output", "json", "--peer", "unfused", *chosen)
    assert code == 0
    measured = json.loads(text)["measurements"]
    ours = {(statement.OURS[way], way) for way in passes}
    assert {(r["who"], r["pass"]) for r in measured} == ours | {("unfused", way) for way in passes}
    wanted = {"forward": {"o"}, "backward": {"dq", "dk", "dv"}, "forward+backward": {"o", "dq", "dk", "dv"}}
    for found in measured:
        assert set(found["error"]["nmse"]) == wanted[found["pass"]]
    paths = {"forward": "ggml", "backward": "cpu", "forward+backward": "ggml + cpu"}
    assert all(found["path"] == ("" if found["who"] == "unfused" else paths[found["pass"]]) for found in measured)
    (path,) = (tmp_path / "receipts").iterdir()
    assert statement.read(path)["predicate"]["passedTests"] == [f"{SMALL} on CPU"]


@pytest.mark.parametrize(("path", "status"), [("ggml", "ok"), ("ggml + cpu", "ok"), ("hopper", "failed")])
def test_the_limit_is_one_on_the_output_of_an_own_forward(path: str, status: str) -> None:
    record = {"unavailable": "", "path": path, "error": {"nmse": {"o": "1e-3"}}}
    assert statement.measured_status(record, 1e-5) == status


def test_the_cpu_has_a_list_of_its_own_where_no_case_is_chosen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "PERF_CPU", tmp_path / "cpu.def")
    (tmp_path / "cpu.def").write_text(SMALL)
    code, text = run(capsys, tmp_path, "--no-cold", "--pass", "backward", "--output", "json")
    assert code == 0
    assert [r["case"] for r in json.loads(text)["measurements"]] == [SMALL]
    (path,) = (tmp_path / "receipts").iterdir()
    assert statement.read(path)["predicate"]["receipt"]["counts"]["listed"] == 1
    one = "hsk=128,hsv=128,nh=8,nhkv=2,kv=512,nb=64,type_K=q8_0"
    code, text = run(capsys, tmp_path, "--no-cold", "--pass", "backward", "--output", "json", "-p", one)
    assert [r["case"] for r in json.loads(text)["measurements"]] == [f"FLASH_ATTN_BACK({one},type_V=q8_0)"]


def test_the_list_of_the_cpu_is_one_that_a_cpu_gets_through() -> None:
    listed = cases.load(cases.PERF_CPU)
    for case in listed:
        products = 7 * 2 * max(case.hsk, case.hsv) * case.nh * case.ns * case.nb * case.kv
        assert products < 1e11, case  # half a second at 200 GFLOP/s
    for key in ("kv", "nb"):
        assert max(Counter(plot.without(str(case), key) for case in listed).values()) >= 4


def test_perf_compares_with_an_earlier_receipt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, tmp_path, "-o", SMALL, "--no-cold")
    (first,) = (tmp_path / "receipts").iterdir()
    _, text = run(capsys, tmp_path, "-o", SMALL, "--no-cold", "--base", str(first), "--output", "json")
    base = json.loads(text)["base"]
    assert base["id"].startswith(first.stem.rsplit("-", 1)[1])
    compared = {(c["who"], c["pass"]): (c["l2"], c["clock"]) for c in base["comparisons"]}
    assert compared == {(who, way): ("warm", "host") for way, who in statement.OURS.items()}


def test_perf_speaks_csv_and_markdown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, text = run(capsys, tmp_path, "-o", SMALL, "--output", "csv", "--no-receipt", "--pass", "backward")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert tuple(rows[0]) == perf.COLUMNS
    assert [(row["who"], row["l2"], row["samples"]) for row in rows] == [
        (statement.OPERATOR, "warm", "6"),
        (statement.OPERATOR, "cold", "6"),
    ]
    _, text = run(capsys, tmp_path, "-o", SMALL, "--output", "md", "--no-receipt")
    assert text.startswith("| shape | who | pass | time, ms |")
    assert not (tmp_path / "receipts").exists()


def test_a_case_that_would_take_too_long_is_left_out_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, text = run(capsys, tmp_path, "-o", SMALL, "--budget", "1e-9", "--ceiling-tflops", "1e-6")
    assert code == errors.Environment.exit_code
    assert "unavailable: not run: by the compute floor it takes" in text
    (path,) = (tmp_path / "receipts").iterdir()
    document = statement.read(path)
    assert document["predicate"]["warnedTests"] == [f"{SMALL} on CPU"]


def test_perf_refuses_a_base_that_is_no_perf_receipt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("-b", "CPU", "--threads", "1", "--receipts", str(tmp_path), "-o", SMALL)
    assert cli.main(["oracle", *words]) == 0
    (path,) = tmp_path.iterdir()
    code, _ = run(capsys, tmp_path, "-o", SMALL, "--base", str(path))
    assert code == errors.Usage.exit_code


def test_an_abort_of_ggml_leaves_a_partial_receipt(tmp_path: Path) -> None:
    script = """
import sys
from pyharness.cli import cli
from pyharness.perf import perf
measure = perf.measure
def aborting(case, settings):
    yield from measure(case, settings)
    settings.library.on_abort("GGML_ASSERT(false) failed")
perf.measure = aborting
sys.exit(cli.main(["perf", *sys.argv[1:]]))
"""
    words = ("-b", "CPU", "--runs", "3", "--no-cold", "--ceiling-gbs", "1", "--receipts", str(tmp_path), "-o", SMALL)
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ggml aborted: GGML_ASSERT(false) failed" in done.stderr
    (path,) = tmp_path.iterdir()
    body = statement.read(path)["predicate"]["receipt"]
    assert body["partial"] is True
    assert body["ended"] == {"exit_code": 1, "reason": "ggml aborted: GGML_ASSERT(false) failed"}
    assert len(body["perf"]["measurements"]) == 3


@pytest.mark.parametrize("error", [errors.Failure("wrong"), errors.Lost("gone"), MemoryError(), KeyboardInterrupt()])
def test_a_receipt_has_the_exit_code_of_a_run_that_an_error_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    measure = perf.measure

    def failing(case: Case, settings: perf.Settings) -> Iterator[dict[str, Any]]:
        yield from measure(case, settings)
        raise error

    monkeypatch.setattr(perf, "measure", failing)
    code, _ = run(capsys, tmp_path, "-o", SMALL)
    (path,) = (tmp_path / "receipts").iterdir()
    document = statement.read(path)
    assert document["predicate"]["receipt"]["ended"] == {"exit_code": code, "reason": errors.reason(error)}
    assert document["predicate"]["result"] == ("FAILED" if code == 1 else "WARNED")


def test_memory_is_that_of_the_buffers_and_what_the_gpu_showed(library: Library, cpu: Device) -> None:
    used = [100]

    def read() -> monitor.Reading:
        return (used[0], *[None] * 7)

    with monitor.Monitor(read, period=60) as watch:
        used[0] = 400
        settings = perf.Settings(library, cpu, 0, 1, 3, False, "none", (), 60, perf.NO_CEILINGS, watch)
        measured = list(perf.measure(Case.parse(SMALL), settings))
    assert len(measured) == 3
    for found in measured:
        assert found["memory"]["buffers_bytes"] > 0
        assert found["memory"]["peak_bytes"] == 0  # nothing was added after the case began


BARS = (
    "hsk=256,hsv=256,nh=24,nhkv=4,kv=75520,nb=2048,type_K=q8_0,type_V=q8_0",
    "hsk=128,hsv=128,nh=32,nhkv=8,kv=8192,nb=8192",
    "hsk=128,hsv=128,nh=32,nhkv=8,kv=4096,nb=4096",
    "hsk=64,hsv=64,nh=32,nhkv=8,kv=4096,nb=4096",
    "hsk=256,hsv=256,nh=16,nhkv=8,kv=4096,nb=4096",
    "hsk=128,hsv=128,nh=8,nhkv=2,kv=8192,nb=64",
    "hsk=128,hsv=128,nh=32,nhkv=8,kv=16384,nb=16384",
    "hsk=64,hsv=64,nh=9,nhkv=3,kv=16384,nb=16384,type_K=f32,type_V=f32",
    "hsk=128,hsv=128,nh=32,nhkv=8,kv=8192,nb=128,max_bias=8",
)


def test_the_perf_list_holds_the_training_shapes_and_sweeps() -> None:
    listed = cases.load(cases.PERF)
    assert {Case.parse(f"FLASH_ATTN_BACK({text})") for text in BARS} <= set(listed)
    assert Case.parse(gpucheck.TARGET) in listed
    for key in ("kv", "nb"):
        assert max(Counter(plot.without(str(case), key) for case in listed).values()) >= 4
