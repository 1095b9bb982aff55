from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attention import case, small

from pyharness.base import commands, digest, errors
from pyharness.case import cases, inputs
from pyharness.case.cases import PARTS
from pyharness.device import ggml
from pyharness.patch import tree
from pyharness.perf import pair as timed_pair
from pyharness.perf import peers


def test_layouts_and_values_come_from_the_headers(library: ggml.Library) -> None:
    tensor = library.ffi.new("struct ggml_tensor *")
    assert len(tensor.ne) == library.c.GGML_MAX_DIMS == 4
    assert len(tensor.src) == library.c.GGML_MAX_SRC
    assert library.text(library.c.ggml_op_name(library.c.GGML_OP_FLASH_ATTN_BACK)) == "FLASH_ATTN_BACK"
    assert len(PARTS) == library.c.GGML_FLASH_ATTN_BACK_PART_COUNT


def test_every_library_says_what_it_was_built_from(library: ggml.Library) -> None:
    sources = {library.source, *(device.source for device in library.devices())}
    assert len(sources) == 1
    assert len(library.source) == len(digest.patch_digest())


def test_the_mapped_libraries_are_those_of_the_directory(library: ggml.Library) -> None:
    mapped = library.mapped()
    assert {path.name.split(".")[0] for path in mapped} >= {"libggml", "libggml-base", "libggml-cpu"}
    assert {path.parent for path in mapped} == {library.directory}


def test_an_unknown_device_is_answered_with_the_known_ones(library: ggml.Library) -> None:
    assert library.device("cpu").name == "CPU"
    with pytest.raises(errors.Environment) as caught:
        library.device("CUDA7")
    assert "CPU" in caught.value.hint


def test_a_place_without_libraries_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libggml-base.a").touch()
    with pytest.raises(errors.Environment, match=r"no libggml-base\.so") as caught:
        ggml.find_libraries(tmp_path, "cpu")
    assert "shared ones (BUILD_SHARED_LIBS=ON)" in caught.value.hint
    with pytest.raises(errors.Environment) as caught:
        ggml.find_libraries(None, "nonexistent")
    assert caught.value.hint.startswith("presets: cpu, ")
    monkeypatch.setattr(ggml, "ROOT", tmp_path)
    with pytest.raises(errors.Environment) as caught:
        ggml.find_libraries(None, "cuda")
    assert caught.value.hint == commands.build("cuda")


@pytest.mark.parametrize("drifted", ["int32_t  kv_first;", "int64_t  kv_begin;"])
def test_headers_that_have_drifted_are_an_error_before_anything_runs(
    tmp_path: Path, library: ggml.Library, drifted: str
) -> None:
    headers = ggml.find_headers(library.directory)
    assert headers
    include = tmp_path / "include"
    include.mkdir()
    for header in headers.glob("*.h"):
        text = header.read_text()
        if header.name == "ggml-flash-attn-back.h":
            text = text.replace("int64_t  kv_first;", drifted)
        (include / header.name).write_text(text)
    with pytest.raises(errors.Environment) as caught:
        ggml.import_extension(ggml.build_extension(tmp_path))
    assert "drifted apart" in caught.value.hint


@pytest.mark.parametrize("found", [b"", b"no library", b"\x7fELF", "a cut binding", "another library"])
def test_a_binding_that_cannot_be_loaded_is_an_error_that_says_what_to_do(
    tmp_path: Path, library: ggml.Library, found: bytes | str
) -> None:
    names = {"a cut binding": f"{ggml.MODULE}.abi3.so", "another library": "libggml-base.so"}
    if isinstance(found, str):
        whole = (library.directory / names[found]).read_bytes()
        found = whole[: len(whole) // 2] if "cut" in found else whole
    extension = tmp_path / f"{ggml.MODULE}.abi3.so"
    extension.write_bytes(found)
    with pytest.raises(errors.Environment) as caught:
        ggml.import_extension(ggml.build_extension(tmp_path))
    assert str(caught.value).count(str(extension)) == 1
    assert "delete it" in caught.value.hint


def test_the_binding_is_built_once_and_again_when_a_header_changes(tmp_path: Path, library: ggml.Library) -> None:
    headers = ggml.find_headers(library.directory)
    assert headers
    include = tmp_path / "include"
    include.mkdir()
    for header in headers.glob("*.h"):
        (include / header.name).write_bytes(header.read_bytes())
    first = ggml.build_extension(tmp_path).stat().st_mtime_ns
    assert ggml.build_extension(tmp_path).stat().st_mtime_ns == first
    with (include / "ggml.h").open("a") as header_file:
        header_file.write("\n")
    assert ggml.build_extension(tmp_path).stat().st_mtime_ns != first


def test_no_compiler_is_an_error_that_says_what_to_do(
    tmp_path: Path, library: ggml.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = ggml.find_headers(library.directory)
    assert headers
    (tmp_path / "include").symlink_to(headers)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(errors.Environment) as caught:
        ggml.build_extension(tmp_path)
    assert "C compiler" in caught.value.hint


def test_a_process_holds_one_set_of_libraries(tmp_path: Path, library: ggml.Library) -> None:
    (tmp_path / "libggml-base.so").touch()
    with pytest.raises(errors.Environment, match="is loaded already"):
        ggml.Library.open(tmp_path)
    assert ggml.Library.open() is library


def test_libraries_are_found_through_the_environment(library: ggml.Library) -> None:
    program = "from pyharness.device import ggml; print(ggml.Library.open().directory)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYHARNESS_LIBS": str(library.directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == library.directory


@pytest.mark.parametrize("text", [str(c) for c in cases.load(cases.CASES)[::23] if not c.capture])
def test_the_node_reads_the_inputs_through_its_strides(library: ggml.Library, cpu: ggml.Device, text: str) -> None:
    given = inputs.make(cases.Case.parse(text), 0)
    with library.prepare(cpu, given) as session:
        for name, source in session.sources.items():
            array = getattr(given, name)
            raw = library.download(session.storages["k" if name == "v" and given.case.vview else name], np.uint8)
            size = array.dtype.itemsize
            strides = [int(source.nb[i]) for i in reversed(range(array.ndim))]
            if array.dtype == np.uint8:
                strides[-1] = 1
            read = np.lib.stride_tricks.as_strided(
                raw[int(source.view_offs) :][: max(raw.size // size * size, 0)].view(np.uint8),
                (*array.shape, size),
                (*strides, 1),
                writeable=False,
            )
            assert read.tobytes() == array.tobytes(), name


def test_the_cache_layout_has_nan_in_the_cells_around_the_keys(library: ggml.Library, cpu: ggml.Device) -> None:
    given = inputs.make(small(layout="cache"), 0)
    with library.prepare(cpu, given) as session:
        cells = library.download(session.storages["k"], np.float32).reshape(1, 20 + ggml.CACHE_CELLS, 2, 16)
    assert np.isnan(cells[:, :5]).all()
    assert np.isfinite(cells[:, 5:25]).all()
    assert np.isnan(cells[:, 25:]).all()


def test_guard_words_and_elements_that_are_not_written_are_noticed(library: ggml.Library, cpu: ggml.Device) -> None:
    given = inputs.make(small(sinks=1), 0)
    with library.prepare(cpu, given) as session:
        before = session.result()
        assert before.unwritten == {part: array.size for part, array in before.parts.items()}
        session.compute()
        assert not session.result().guards
        zero = np.zeros(1, np.uint8)
        for name, guard in session.guards.items():
            library.upload(guard, zero)
            assert session.result().guards == [name]
            library.upload(guard, np.full(1, ggml.GUARD_BYTE, np.uint8))


def test_results_have_the_shapes_of_the_parts(library: ggml.Library, cpu: ggml.Device) -> None:
    shape = small(ns=2, sinks=1, kv_first=3, kv_count=11, hsv=8)
    parts = library.run(cpu, inputs.make(shape, 0)).parts
    assert {part: array.shape for part, array in parts.items()} == {
        "dq": (2, 4, 7, 16),
        "dk": (2, 2, 11, 16),
        "dv": (2, 2, 11, 8),
        "lse": (2, 4, 7),
        "d": (2, 4, 7),
        "dsinks": (4,),
    }
    assert set(library.run(cpu, inputs.make(small(grads="v"), 0)).parts) == {"dv", "lse", "d"}


def test_the_digest_names_the_bits(library: ggml.Library, cpu: ggml.Device) -> None:
    first, again = (library.run(cpu, inputs.make(small(), 0)) for _ in range(2))
    other = library.run(cpu, inputs.make(small(), 1))
    assert first.digest == again.digest != other.digest
    assert set(first.digests) == set(first.parts)


def test_a_backend_that_contradicts_itself_is_a_failure(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "proc", lambda *_: lambda *_: library.ffi.new("char[]", b"not today"))
    with pytest.raises(errors.Failure, match="supports_op says yes, the refusal says 'not today'"):
        library.refusal(cpu, small())


def test_memory_that_cannot_be_had_is_an_error_in_words(library: ggml.Library, cpu: ggml.Device) -> None:
    huge = inputs.blank(case("hsk=576,hsv=576,nh=64,nhkv=64,kv=100000000,nb=1,type_K=f32,type_V=f32"))
    with pytest.raises((errors.Environment, MemoryError)):
        library.prepare(cpu, huge)


def test_ggml_s_own_cuda_forward_takes_a_softcap_at_some_head_sizes_only(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = library.handle(cpu)
    monkeypatch.setattr(library, "handle", lambda _: handle)
    cuda = dataclasses.replace(cpu, name="CUDA0")
    words = "ggml's own forward has no kernel for a softcap at head size 64"
    pair = small(hsk=64, hsv=64, softcap=20, pair=1)
    assert library.refusal(cuda, pair) == words
    assert library.refusal(cpu, pair) is None
    for changes in ({"hsk": 128, "hsv": 128}, {"softcap": 0}, {"pair": 0}):
        assert library.refusal(cuda, pair.replace(**changes)) is None, changes
    given = inputs.make(pair, 0)
    with timed_pair.Pair(library, cuda, given, peers.Plain(given).arrays) as timed:
        assert timed.refusal == words
    monkeypatch.setattr(library, "node_path", lambda *_: "mma")
    assert library.refusal(cuda, pair) is None


def test_the_head_sizes_with_a_softcap_are_those_of_the_pinned_ggml() -> None:
    kernels = ggml.ROOT / "build/upstream" / tree.base().folder / "ggml/src/ggml-cuda"
    for file in ("fattn-mma-f16.cuh", "fattn-tile.cuh"):
        found = re.findall(r"use_logit_softcap && !\(([^)]*)\)", (kernels / file).read_text())
        assert [tuple(map(int, re.findall(r"== (\d+)", sizes))) for sizes in found] == [ggml.GGML_SOFTCAP_HEADS], file
