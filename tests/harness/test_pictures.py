"""Pictures of the pages: drawn from receipts, current, the same bytes from the same receipt."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from receipt_world import World, change, timed

from pyharness.base import errors
from pyharness.base.digest import ROOT
from pyharness.receipts import pages, pictures, statement

SVG = "{http://www.w3.org/2000/svg}"
LARGE = "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=32,nhkv=8,kv={n},nb={n})"
PAIR, BACKWARD = "forward+backward", "backward"


def record(who: str, way: str, ms: float, case: str = LARGE.format(n=4096), path: str = "") -> dict[str, Any]:
    clock = {"l2": "warm", "clock": "device", "median_ns": str(ms * 1e6), "mad_ns": "0"}
    why, times = ("", [clock]) if ms else ("no kernel for this shape", list[dict[str, str]]())
    return {
        "case": case,
        "device": "CUDA0",
        "who": who,
        "pass": way,
        "path": path,
        "unavailable": why,
        "timings": times,
    }


def ours(way: str, ms: float, path: str = "hopper", **case: str) -> dict[str, Any]:
    return record(statement.OURS[way], way, ms, path=path, **case)


def body(*records: dict[str, Any], **members: Any) -> statement.Document:
    devices = [{"name": "CUDA0", "description": "NVIDIA H200"}]
    perf = {"measurements": list(records)} if records else None
    return {"id": "0123456789ab" + 52 * "0", "devices": devices, "perf": perf, **members}


def training(*runs: dict[str, Any], peers: tuple[dict[str, Any], ...] = (), device: str = "cuda") -> statement.Document:
    bench = {"device": device, "shape": {"name": "smollm2-135m"}, "runs": list(runs)}
    return body(bench=bench | ({"peers": list(peers)} if peers else {}))


def step(ctx: int, ms: float, gib: float, problem: str = "", **names: Any) -> dict[str, Any]:
    steps = [] if problem else [9 * 10**9, *([round(ms * 1e6)] * 3)]
    memory = {"compute": 1, "peak": round(gib * 2**30)}
    return {"ctx": ctx, "exit_code": int(bool(problem)), "problem": problem, "steps_ns": steps} | {
        "memory_bytes": memory,
        **names,
    }


def words(svg: str | None) -> list[str]:
    """The texts of a picture, after its title, from the top."""
    assert svg is not None
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def widths(svg: str | None) -> list[float]:
    assert svg is not None
    bars = [rect.attrib for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.attrib["class"] != "page"]
    return [float(bar["width"]) for bar in bars]


# ---- of the repository ----


def test_the_pictures_of_the_repository_are_current() -> None:
    drawn = {path.name: text for path, text in pages.drawings(pages.Shelf()).items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/pictures").iterdir()} == drawn


def test_the_readme_has_both_pictures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^<!-- picture (\w+) -->$", text, re.MULTILINE) == list(pages.DRAWN)


# ---- the pair ----


def test_both_passes_of_a_shape_stand_beside_each_other() -> None:
    found = pictures.pair(
        body(
            ours(BACKWARD, 2.0),
            ours(PAIR, 3.0),
            *(
                record(who, way, ms)
                for who, ms in {
                    "mma": 4.0,
                    "rows": 900.0,
                    "torch flash float16": 3.5,
                    "torch cudnn float16 (heads expanded)": 2.5,
                    "torch efficient float16": 9.0,
                    "fa3": 1.5,
                    "fa3 deterministic": 1.75,
                }.items()
                for way in (PAIR, BACKWARD)
            ),
        )
    )
    title, about, both, backward, shape, *rest = words(found)
    assert title == "Attention of a training step"
    assert about.startswith("NVIDIA H200, medians, receipt 0123456789ab.")
    assert (both, backward) == ("forward and backward, ms", "backward, ms")
    assert shape == "H32/8 D128 4096"
    rows = [tuple(rest[i : i + 3]) for i in range(0, 18, 3)]
    assert rows == [
        ("ours, hopper", "3.00", "2.00"),
        ("ours, mma", "4.00", "4.00"),
        ("FA-3 deterministic", "1.75", "1.75"),
        ("FA-3", "1.50", "1.50"),
        ("FA-2", "3.50", "3.50"),
        ("cuDNN", "2.50", "2.50"),
    ]


def test_bars_are_as_long_as_times_and_each_shape_has_its_scale() -> None:
    small = LARGE.format(n=64)
    found = pictures.pair(
        body(
            ours(PAIR, 2.0),
            ours(BACKWARD, 1.0),
            record("mma", PAIR, 4.0),
            record("mma", BACKWARD, 4.0),
            ours(PAIR, 0.02, case=small),
            ours(BACKWARD, 0.01, case=small),
        )
    )
    half, quarter, *longest = widths(found)
    assert len(set(longest)) == 1
    assert (half / longest[0], quarter / longest[0]) == pytest.approx((0.5, 0.25), abs=1e-3)


def test_who_was_not_timed_is_said_in_words_or_left_out() -> None:
    found = pictures.pair(
        body(
            ours(PAIR, 3.0, path="mma"),
            ours(BACKWARD, 2.0, path="mma"),
            *(record("mma", way, 3.0) for way in (PAIR, BACKWARD)),
            record("fa3", PAIR, 0.0),
            record("fa3", BACKWARD, 1.0),
            *(record("torch flash float16", way, 0.0) for way in (PAIR, BACKWARD)),
        )
    )
    assert words(found)[5:11] == ["ours, mma", "3.00", "2.00", "FA-3", "not timed", "1.00"]
    assert not {"FA-2", "cuDNN"} & set(words(found))


def test_a_picture_shows_the_first_shapes_whose_pair_was_timed() -> None:
    cases = [LARGE.format(n=64 * (i + 1)) for i in range(pictures.MOST + 2)]
    window = cases[0].replace(")", ",kv_first=1,kv_count=9)")
    found = words(pictures.pair(body(ours(BACKWARD, 1.0, case=window), *(ours(PAIR, 1.0, case=c) for c in cases))))
    assert [word for word in found if word.startswith("H32/8")] == [
        f"H32/8 D128 {64 * (i + 1)}" for i in range(pictures.MOST)
    ]


def test_without_a_pair_on_a_gpu_there_is_no_picture() -> None:
    on_cpu = ours(PAIR, 1.0) | {"device": "CPU"}
    assert [pictures.pair(body(*records)) for records in ([], [ours(BACKWARD, 1.0)], [on_cpu])] == [None] * 3


# ---- training ----


def test_a_step_of_training_stands_beside_pytorch() -> None:
    found = words(
        pictures.training(
            training(
                step(512, 41, 2.8, flash_attn=False),
                step(512, 43, 2.6, flash_attn=True),
                step(16384, 0, 0, "exit 1: CUDA error: out of memory", flash_attn=False),
                step(16384, 1760, 28, flash_attn=True),
                peers=(
                    step(512, 30, 3, name="torch", mode="tf32"),
                    step(16384, 0, 0, "exit 2: error: ImportError: no torch", name="torch", mode="bf16"),
                ),
            )
        )
    )
    assert found[0] == "A step of training, smollm2-135m"
    assert found[2:4] == ["time of a step, ms", "peak memory of the device, GiB"]
    assert found[4:14] == [
        "512 tokens",
        *("llama.cpp, FA on", "43.0", "2.60"),
        *("llama.cpp, FA off", "41.0", "2.80"),
        *("PyTorch TF32", "30.0", "3.00"),
    ]
    assert found[14:24] == [
        "16384 tokens",
        *("llama.cpp, FA on", "1760", "28.0"),
        *("llama.cpp, FA off", "does not fit", "does not fit"),
        *("PyTorch BF16", "did not finish", "did not finish"),
    ]


def test_without_a_benchmark_on_a_gpu_there_is_no_picture() -> None:
    failed = step(512, 0, 0, "exit 1", flash_attn=True)
    on_cpu = training(step(512, 1, 1, flash_attn=True), device="cpu")
    assert [pictures.training(found) for found in (body(), on_cpu, training(failed))] == [None] * 3


# ---- the file ----


def test_the_same_receipt_gives_the_same_bytes_and_text_is_escaped() -> None:
    given = training(step(512, 1, 1, flash_attn=True))
    given["bench"]["shape"]["name"] = "<&>"
    found = pictures.training(given)
    assert found == pictures.training(copy.deepcopy(given))
    assert words(found)[0] == "A step of training, <&>"


def test_a_picture_keeps_to_its_width() -> None:
    found = pictures.pair(
        body(
            *(record(who, way, 1e4 / 3) for who in ("fa3", "fa3 deterministic") for way in (PAIR, BACKWARD)),
            ours(PAIR, 1e4 / 7),
            ours(BACKWARD, 1e4 / 7),
        )
    )
    assert found is not None
    root = ElementTree.fromstring(found)
    assert root.attrib["width"] == "800"
    for text in root.iter(f"{SVG}text"):
        length = 6.6 * len(text.text or "")  # more than 12 px of a wide font take on average
        assert float(text.attrib["x"]) + (0 if text.attrib.get("class") == "end" else length) <= 800, text.text
    for bar in root.iter(f"{SVG}rect"):
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= 800


# ---- on pages ----


def test_a_page_shows_a_picture_and_links_its_receipt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.git("add", "receipts")
    monkeypatch.setitem(pages.DRAWN, "pair", (lambda found: "<svg/>" if found["perf"] else None, "words"))
    page = world.root / "README.md"
    page.write_text(
        "<!-- picture pair -->\nold\n<!-- /picture -->\n\n<!-- picture training -->\nold\n<!-- /picture -->\n"
    )
    shelf = pages.Shelf(world.root)
    id12 = world.perf.stem.rpartition("-")[2]
    assert pages.filled(page.read_text(), shelf) == (
        f"<!-- picture pair -->\n![words](/docs/pictures/pair.svg)\n\nDrawn from receipt "
        f"[`{id12}`](/receipts/{world.perf.name}).\n<!-- /picture -->\n\n<!-- picture training -->\n<!-- /picture -->\n"
    )
    assert pages.drawings(shelf) == {world.root / "docs/pictures/pair.svg": "<svg/>"}
    assert shelf.quoting(id12) == [page]
    with pytest.raises(errors.Usage, match="no picture 'none'"):
        pages.filled("<!-- picture none -->\n<!-- /picture -->\n", shelf)


def test_a_picture_is_of_the_receipt_that_shows_the_most_and_of_the_newest_of_equals(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewritten(bars: int, finished: str) -> str:
        there = shutil.copy(world.perf, world.root)
        made = change(Path(there), lambda found: found.update(finished=finished, argv=["perf"] * bars), seal=True)
        shutil.move(made, world.root / "receipts")
        return made.stem.rpartition("-")[2]

    monkeypatch.setitem(pages.DRAWN, "pair", (lambda found: "<rect/>" * found["argv"].count("perf"), "words"))
    rewritten(1, "2030-01-03T00:00:00Z")
    rewritten(2, "2030-01-01T00:00:00Z")
    newest = rewritten(2, "2030-01-02T00:00:00Z")
    world.git("add", "receipts")
    assert pages.Shelf(world.root).pictures["pair"][0].id12 == newest


def test_the_index_draws_and_checks_the_picture(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = change(timed(tmp_path, monkeypatch), lambda found: found["bench"].update(device="cuda"), seal=True)
    shutil.copy(made, world.root / "receipts")
    world.git("add", "receipts")
    page, picture = world.root / "README.md", world.root / "docs/pictures/training.svg"
    page.write_text("<!-- picture training -->\n<!-- /picture -->\n")
    assert "docs/pictures/training.svg\n" in world.run("receipt", "index").stdout
    assert made.name in page.read_text()
    assert f"[`{made.stem.rpartition('-')[2]}`]({made.name})" in (world.root / "receipts/README.md").read_text()
    assert "PyTorch BF16" in words(picture.read_text())
    assert world.run("receipt", "index").stdout == ""
    picture.write_text(picture.read_text().replace("PyTorch", "PyLamp"))
    done = world.run("receipt", "index", "--check")
    assert done.returncode == 6
    assert "docs/pictures/training.svg is not current" in done.stderr
