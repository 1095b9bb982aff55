from __future__ import annotations

import re
from pathlib import Path

import pytest
from attention import case, small
from hypothesis import given, settings
from hypothesis import strategies as st

from pyharness.base import errors
from pyharness.base.digest import ROOT
from pyharness.case import cases
from pyharness.case.cases import Case
from pyharness.cli import cli

PLAIN = "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=128,nb=32)"


@pytest.mark.parametrize("path", [cases.CASES, cases.PERF, cases.GRAD])
def test_lists_are_written_in_the_canonical_form(path: Path) -> None:
    lines = [line.partition("//")[0].strip() for line in path.read_text().splitlines()]
    assert [str(c) for c in cases.load(path)] == [line for line in lines if line]


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_case_is_what_its_string_says(seed: int) -> None:
    for made in cases.random_cases(20, seed):
        assert Case.parse(str(made)) == made


def test_defaults_are_left_out_and_keys_stand_in_one_order() -> None:
    text = "FLASH_ATTN_BACK(nb=32,kv=128,sinks=1,hsk=64,hsv=64,nh=4,nhkv=2,ns=1,type_K=f16,softcap=30.0,grads=skvq)"
    assert str(Case.parse(text)) == PLAIN[:-1] + ",softcap=30,sinks=1)"


def test_letters_of_grads_are_sorted_and_all_of_them_are_the_default() -> None:
    assert small(grads="vq").wanted == ("dq", "dv")
    assert str(small(grads="vkq")) == str(small())
    assert small(sinks=1).wanted == ("dq", "dk", "dv", "dsinks")


def test_the_seed_depends_on_the_case_and_the_base_seed_only() -> None:
    assert Case.parse(PLAIN).seed(0) == Case.parse(PLAIN).seed(0)
    assert len({Case.parse(PLAIN).seed(0), Case.parse(PLAIN).seed(1), small().seed(0)}) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FLASH_ATTN_BAK(hsk=64)", "not a case string"),
        (PLAIN[:-1] + ",mask=circular)", "mask=circular: must be one of none, causal"),
        (PLAIN[:-1] + ",mask=swa)", "mask=swa: must be"),
        (PLAIN[:-1] + ",mask=swa:0)", "mask=swa:0: must be"),
        (PLAIN[:-1] + ",type_K=q9_0)", "type_K=q9_0: must be one of f32, f16"),
        (PLAIN[:-1] + ",type_K=q4_K)", "blocks of 256 divide the head size 64"),
        (PLAIN[:-1] + ",nh=4)", "nh is given twice"),
        (PLAIN[:-1] + ",sinks=2)", "sinks=2: must be 0 or 1"),
        (PLAIN[:-1] + ",nb2=2)", "unknown key 'nb2'"),
        (PLAIN[:-1] + ",softcap=big)", "softcap=big: not a number"),
        (PLAIN[:-1] + ",mh=1.5)", "mh=1.5: not an integer"),
        (PLAIN[:-1] + ",mh=1_0)", "mh=1_0: not an integer"),
        (PLAIN[:-1] + f",mpad={'9' * 30})", "not an integer of at most 10 digits"),
        (PLAIN[:-1] + ",softcap=inf)", "softcap=inf: not a number that a float holds"),
        (PLAIN[:-1] + ",scale=1e300)", "scale=1e300: not a number that a float holds"),
        (PLAIN[:-1] + ",mask=swa:\u00b2)", "mask=swa:\u00b2: must be one of"),
        (PLAIN[:-1] + ",grads=s)", "grads=s: must be letters of qkv"),
        (PLAIN[:-1] + ",kv_first=3)", "kv_first=3: must be 0 without kv_count"),
        (PLAIN[:-1] + ",kv_first=3,kv_count=126)", "kv_count=126: must be a window inside kv=128"),
        (PLAIN[:-1] + ",mask=none,max_bias=8)", "max_bias=8: must be 0 without a mask"),
        (PLAIN[:-1] + ",vview=1,type_V=f32)", "vview=1: must be 0 unless"),
        (PLAIN.replace("nhkv=2", "nhkv=3"), "nhkv=3: must be a divisor of nh=4"),
        ("FLASH_ATTN_BACK(hsk=64,nb=3)", "hsv, nh, nhkv, kv missing"),
        ("FLASH_ATTN_BACK(capture=x,hsk=64)", "hsk comes from the capture"),
        ("FLASH_ATTN_BACK(capture=x,layout=upside)", "layout=upside: must be one of cont, perm"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(errors.Usage) as caught:
        Case.parse(text)
    assert said in str(caught.value)


def test_an_unknown_key_gets_a_suggestion() -> None:
    with pytest.raises(errors.Usage) as caught:
        Case.parse(PLAIN[:-1] + ",soft_cap=30)")
    assert caught.value.hint == "did you mean softcap?"


def test_a_capture_prints_only_what_may_stand_beside_it() -> None:
    text = "FLASH_ATTN_BACK(capture=x,grads=q,o=1)"
    filled = Case.parse(text).replace(hsk=64, hsv=64, nh=2, nhkv=1, kv=8, nb=4)
    assert str(filled) == text


def test_errors_in_a_list_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.def"
    path.write_text(f"// nothing wrong here\n{PLAIN}\n{PLAIN[:-1]},mask=square)\n")
    with pytest.raises(errors.Usage, match=r"bad\.def:3: mask=square"):
        cases.load(path)
    path.write_text(f"{PLAIN}\n{PLAIN}\n")
    with pytest.raises(errors.Usage, match=r"bad\.def:2: .* is already in line 1"):
        cases.load(path)


def test_limits_are_read_from_their_file() -> None:
    limits = cases.limits()
    found = {path: cases.limit(limits, path) for path in ("cpu", "rows", "mma", "hopper")}
    assert found == {"cpu": 1e-10, "rows": 1e-10, "mma": 1e-5, "hopper": 1e-5}


def test_receipts_without_a_limit_of_f32_have_one_for_all_paths() -> None:
    assert cases.limit({"nmse": "1e-05", "zero": "1e-10"}, "cpu") == "1e-05"


LISTED = [case("hsk=64,hsv=64,nh=4,nhkv=2,kv=128,nb=32"), small(), small(mask="swa:5")]


@pytest.mark.parametrize(
    ("op", "params", "count"),
    [
        (None, None, 3),
        ("FLASH_ATTN_BACK", None, 3),
        ("swa", None, 1),
        (None, "hsk=16", 2),
        (None, "hsk=16.*swa:[0-9]", 1),
        (f"swa,{PLAIN}", None, 2),
        ("FLASH_ATTN_BACK", "hsk=64", 1),
    ],
)
def test_filters_select(op: str | None, params: str | None, count: int) -> None:
    assert len(cases.select(LISTED, op, params)) == count


def test_a_whole_case_string_runs_though_it_is_not_in_the_list() -> None:
    text = "FLASH_ATTN_BACK(hsk=8,hsv=8,nh=1,nhkv=1,kv=3,nb=2,mask=docs:2)"
    assert cases.select(LISTED, text, None) == [Case.parse(text)]


@pytest.mark.parametrize(
    ("op", "params", "hint"),
    [("FLASH_ATTN_BAK", None, "FLASH_ATTN_BACK"), (None, "hsk=65", "hsk=64"), (None, "mask=swa:50", "mask=swa:5")],
)
def test_a_filter_that_selects_nothing_suggests(op: str | None, params: str | None, hint: str) -> None:
    with pytest.raises(errors.Empty) as caught:
        cases.select(LISTED, op, params)
    assert hint in caught.value.hint


@pytest.mark.parametrize(("op", "params"), [("(", None), (None, "[")])
def test_a_bad_expression_is_a_usage_error(op: str | None, params: str | None) -> None:
    with pytest.raises(errors.Usage, match="not a regular expression"):
        cases.select(LISTED, op, params)


def test_every_key_and_value_is_explained() -> None:
    assert list(cases.KEYS) == cases.FIELDS
    assert all(cases.KEYS.values())
    for names, key in (
        (cases.MASKS, "mask"),
        (cases.DATA, "data"),
        (cases.LAYOUTS, "layout"),
        (cases.PRECISIONS, "prec"),
    ):
        assert tuple(cases.VALUES[key]) == names
        assert all(cases.VALUES[key].values())


def test_list_help_explains_every_key_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["list", "--help"])
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    explained = [*cases.KEYS, *(value for values in cases.VALUES.values() for value in values)]
    assert set(explained) <= set(words)


def test_the_page_has_the_table_of_the_keys() -> None:
    page = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    assert f"<!-- keys -->\n{cases.markdown()}\n<!-- /keys -->" in page
    assert "(docs/cases.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_of_the_page_is_canonical() -> None:
    page = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    for text in re.findall(r"FLASH_ATTN_BACK\([^)]*\)", page):
        assert str(Case.parse(text)) == text
