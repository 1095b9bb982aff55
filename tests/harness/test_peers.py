"""Peers on a GPU, with stand-ins for PyTorch and FlashAttention-3's library: what they are given and what they say."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_in_torch

from pyharness.base import cuda
from pyharness.case import inputs, reference
from pyharness.case.cases import Case
from pyharness.device.ggml import Device
from pyharness.perf import fa3, peers, perf

SQUARE = "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=40,nb=40,ns=2)"
TAIL = "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=96,nb=32,kv_first=5,kv_count=60)"
GPU = Device("CUDA0", "a stand-in", 1 << 30, 1 << 30, None)

STAND_IN = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
%s
static char heard[8192];
const char * stand_in_heard(void) { return heard; }
void stand_in_forget(void) { heard[0] = 0; }

#define SAY(...) snprintf(heard + strlen(heard), sizeof(heard) - strlen(heard), __VA_ARGS__)

static void say_buffer(const char * what, const buffer_t * b) {
    SAY("%%s %%d", what, b->dtype);
    for (int64_t i = 0; i < b->rank; ++i) {
        SAY(" %%d", (int) b->dims[i]);
    }
    SAY("\\n");
}

static void copy(const buffer_t * to, const buffer_t * from) {
    size_t bytes = 2;
    for (int64_t i = 0; i < from->rank; ++i) {
        bytes *= from->dims[i];
    }
    memcpy(to->data, from->data, bytes);
}

// what FlashAttention asks its caller for: its stream, its device, two pieces of memory, of which it may get none
static void * ask(const api_t * api, void * context) {
    stream_t stream = { sizeof(stream), NULL, context, NULL };
    ordinal_t ordinal = { sizeof(ordinal), NULL, context, -1 };
    api->calls[4](&stream);
    api->calls[17](&ordinal);
    SAY("stream %%d, device %%d\\n", (int) (intptr_t) stream.stream, ordinal.ordinal);
    for (int i = 0; i < 2; ++i) {
        memory_t memory = { sizeof(memory), NULL, context, 1000 + i, 128, NULL };
        void * error = api->calls[9](&memory);
        if (error) {
            return error;
        }
        memset(memory.data, 1, memory.bytes);
    }
    return NULL;
}

static void * handle(const frame_t * frame, int args, int rets) {
    if (frame->size != offsetof(frame_t, future) || frame->stage != 3) {
        return NULL;
    }
    if (frame->args.count != args || frame->rets.count != rets) {
        error_create_t error = { sizeof(error), NULL, "Wrong number of arguments", 3 };
        return frame->api->calls[0](&error);
    }
    for (int64_t i = 0; i < args; ++i) {
        say_buffer("argument", frame->args.items[i]);
    }
    for (int64_t i = 0; i < rets; ++i) {
        say_buffer("result", frame->rets.items[i]);
    }
    for (int64_t i = 0; i < frame->attrs.count; ++i) {
        const scalar_t * value = frame->attrs.items[i];
        SAY("%%.*s ", (int) frame->attrs.names[i]->length, frame->attrs.names[i]->text);
        switch (value->dtype) {
            case 1:  SAY("%%s\\n", *(bool *) value->value ? "true" : "false"); break;
            case 5:  SAY("%%d\\n", (int) *(int64_t *) value->value); break;
            case 12: SAY("%%g\\n", *(double *) value->value); break;
        }
    }
    return ask(frame->api, frame->context);
}

void * dew_flash3_mha_fwd(frame_t * frame) {
    void * error = handle(frame, 3, 4);
    if (!error) {
        copy(frame->rets.items[0], frame->args.items[0]); // o = q
    }
    return error;
}

void * dew_flash3_mha_bwd(frame_t * frame) {
    void * error = handle(frame, 6, 5);
    if (!error) {
        copy(frame->rets.items[0], frame->args.items[0]); // dq = d
        copy(frame->rets.items[1], frame->args.items[2]); // dk = k
        copy(frame->rets.items[2], frame->args.items[3]); // dv = v
    }
    return error;
}

void %s(
    error_t * error, void * stream, scratch_t * scratch, int ordinal,
    buffer_t * d, buffer_t * q, buffer_t * k, buffer_t * v, buffer_t * o, buffer_t * lse,
    buffer_t * q_starts, buffer_t * k_starts, buffer_t * q_used, buffer_t * k_used,
    int64_t max_q, bool has_q_starts, int64_t max_k, bool has_k_starts,
    double scale, bool zero_tensors, bool causal, int64_t left, int64_t right, double softcap, bool deterministic,
    int64_t sm_margin,
    buffer_t * dq, buffer_t * dk, buffer_t * dv, buffer_t * softmax_d, buffer_t * lse_log2) {
    if (scratch->diagnostics->text != scratch->diagnostics->rest || scratch->diagnostics->length != 0) {
        error->code = 13;
        error->message.text = "the diagnostics are no empty string";
        return;
    }
    if (ask(scratch->api, scratch->context)) {
        error->code = 8;
        error->message.text = "Failed to allocate";
        return;
    }
    SAY("scale %%g, causal %%d, window %%d %%d, deterministic %%d, stream %%d, device %%d\\n", scale, causal,
        (int) left, (int) right, deterministic, (int) (intptr_t) stream, ordinal);
    SAY("packed %%d %%d, starts of rank %%d\\n", has_q_starts, has_k_starts, (int) q_starts->rank);
    say_buffer("statistics", softmax_d);
    copy(dq, d);
    copy(dk, k);
    copy(dv, v);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds a package `dew_flash_attn` with a stand-in for FlashAttention-3's library."""
    folder = tmp_path_factory.mktemp("fa3")
    (folder / "dew_flash_attn").mkdir()
    (folder / "dew_flash_attn/__init__.py").write_text("raise ImportError('it wants JAX')\n")
    (folder / "a.c").write_text(STAND_IN % (fa3.CDEF, fa3.IMPLEMENTATION))
    compiler = shlex.split(os.environ.get("CC", "cc"))
    out = folder / "dew_flash_attn" / fa3.LIBRARY
    subprocess.run([*compiler, "-shared", "-fPIC", "-Wall", str(folder / "a.c"), "-o", str(out)], check=True)
    return folder


@pytest.fixture
def installed(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.syspath_prepend(str(library))
    lib = ctypes.CDLL(str(library / "dew_flash_attn" / fa3.LIBRARY))
    lib.stand_in_heard.restype = ctypes.c_char_p
    lib.stand_in_forget()
    yield lib
    sys.modules.pop("dew_flash_attn", None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """PyTorch's stand-in, and what it was asked for."""
    return stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    heard: list[str] = []
    for name, module in stand_in_torch.modules(heard, **options).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda, "l2_bytes", lambda _: 4096)
    return heard


def plain(text: str) -> peers.Plain:
    return peers.Plain(inputs.make(Case.parse(text), 0))


def unavailable(peer: peers.Peer) -> str:
    with pytest.raises(peers.Unavailable) as caught, peer:
        pass
    return str(caught.value)


def instead(text: str, **changes: Any) -> peers.Plain:
    return plain(str(Case.parse(text).replace(**changes)))


# ---- PyTorch ----


@pytest.mark.parametrize("text", [SQUARE, TAIL, SQUARE[:-1] + ",mask=none)"])
@pytest.mark.parametrize("grouped", [True, False])
def test_torch_computes_output_and_gradients_on_every_pass(
    monkeypatch: pytest.MonkeyPatch, text: str, grouped: bool
) -> None:
    stand_in(monkeypatch, grouped=grouped)
    case = plain(text)
    want = reference.backward(case.given) | {"o": reference.forward(case.given)}
    for peer in peers.torch_peers(GPU, case, "float32"):
        with peer:
            assert peer.who.endswith("(heads expanded)") is not grouped
            for way in peers.PASSES:
                assert peer.time(way) == (None, 1_500_000)
            peer.flush()
            got = peer.parts()
        assert set(got) == {"o", *case.given.grads}
        for name, array in got.items():
            assert array.shape == want[name].shape
            assert perf.nmse(array, want[name]) < 1e-12, name


def test_passes_of_torch_run_what_they_say_behind_a_spin(calls: list[str]) -> None:
    flash, *_ = peers.torch_peers(GPU, plain(SQUARE), "float16")
    assert flash.who == "torch flash float16"
    with flash:
        for way in peers.PASSES:
            calls.clear()
            flash.time(way)
            ran = [call for call in calls if not call.startswith("kernel")]
            assert ran == [f"spin {peers.LEAD}", *way.split("+")]
    assert set(calls[1:]) == {"kernel FLASH_ATTENTION", "forward", "backward"}


def test_what_torch_has_no_kernel_for_says_so(calls: list[str]) -> None:
    flash, *_ = peers.torch_peers(GPU, instead(SQUARE, mask="swa:9"))
    assert unavailable(flash) == "no mask but a causal one there"
    flash, *_ = peers.torch_peers(GPU, instead(SQUARE, softcap=3.0))
    assert unavailable(flash) == "no softcap there"
    assert calls == []


def test_the_first_line_of_what_torch_says_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory\nTry less")

    monkeypatch.setattr(sys.modules["torch"].autograd, "grad", fail)
    flash, *_ = peers.torch_peers(GPU, plain(SQUARE))
    assert unavailable(flash) == "CUDA out of memory"


@pytest.mark.parametrize("mask", ["causal", "none", "swa:9"])
def test_torch_on_the_cpu_computes_the_same_gradient(mask: str) -> None:
    pytest.importorskip("torch")
    case = plain(f"FLASH_ATTN_BACK(hsk=64,hsv=64,nh=4,nhkv=2,kv=96,nb=32,mask={mask})")
    want = reference.backward(case.given) | {"o": reference.forward(case.given)}
    (peer,) = peers.torch_peers(Device("CPU", "", 0, 0, None), case)
    with peer:
        for way in peers.PASSES:
            assert (peer.time(way)[0] or 0) > 0
        for name, array in peer.parts().items():
            assert perf.nmse(array, want[name]) < 1e-9, name


# ---- FlashAttention-3 ----


def test_the_library_is_found_without_importing_the_package(installed: ctypes.CDLL) -> None:
    del installed
    found = fa3.find()
    assert found
    assert found.name == fa3.LIBRARY
    assert "dew_flash_attn" not in sys.modules


def test_the_forward_is_called_with_its_buffers_and_attributes(calls: list[str], installed: ctypes.CDLL) -> None:
    case = plain(SQUARE)
    with peers.Fa3(GPU, case, "float16") as peer:
        installed.stand_in_forget()
        calls.clear()
        assert peer.time("forward") == (None, 1_500_000)
        assert calls == [f"spin {peers.LEAD}"]
        assert installed.stand_in_heard().decode().splitlines() == [
            "argument 10 2 40 4 64",
            "argument 10 2 40 2 64",
            "argument 10 2 40 2 64",
            "result 10 2 40 4 64",
            "result 11 2 4 40",
            "result 11 1 1 1 1",
            "result 11 1 1 1",
            "is_causal true",
            "softmax_scale 0.125",
            "window_size_left -1",
            "window_size_right -1",
            "stream 4711, device 0",
        ]
        np.testing.assert_array_equal(peer.parts()["o"], case.given.q.transpose(0, 2, 1, 3).astype(np.float16))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_is_called_with_its_buffers(calls: list[str], installed: ctypes.CDLL, deterministic: bool) -> None:
    del calls
    case = plain(TAIL)
    with peers.Fa3(GPU, case, "float16", deterministic) as peer:
        installed.stand_in_forget()
        peer.time("backward")
        heard = installed.stand_in_heard().decode().splitlines()
        got = peer.parts()
    q, d = "10 1 32 4 64", "10 1 32 4 64"
    kv, rows = "10 1 96 2 64", f"11 {4 * 2 * fa3.ROWS}"
    if deterministic:
        assert heard == [
            "stream 4711, device 0",
            "scale 0.125, causal 1, window -1 -1, deterministic 1, stream 4711, device 0",
            "packed 0 0, starts of rank 1",
            f"statistics {rows}",
        ]
    else:
        inside = [*(f"argument {x}" for x in (d, q, kv, kv, q)), "argument 11 1 4 32"]
        assert heard[:6] == inside
        assert heard[6:11] == [f"result {x}" for x in (q, kv, kv, rows, rows)]
    given = case.given
    half = [x.astype(np.float16) for x in given.shown()]
    np.testing.assert_array_equal(got["dq"], half[3].transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(got["dk"], half[1][:, :, 5:65])
    np.testing.assert_array_equal(got["dv"], half[2][:, :, 5:65])


def test_both_passes_are_one_sample(calls: list[str], installed: ctypes.CDLL) -> None:
    with peers.Fa3(GPU, plain(SQUARE), "float16") as peer:
        installed.stand_in_forget()
        calls.clear()
        peer.time("forward+backward")
        assert calls == [f"spin {peers.LEAD}"]
        assert installed.stand_in_heard().decode().count("stream") == 2


def test_scratch_memory_is_kept_from_one_call_to_the_next(
    calls: list[str], installed: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    del calls, installed
    with peers.Fa3(GPU, plain(SQUARE), "float16") as peer:

        def no_memory(*_: Any, **__: Any) -> None:
            raise AssertionError

        monkeypatch.setattr(sys.modules["torch"], "empty", no_memory)
        peer.time("forward+backward")


@pytest.mark.parametrize(("kind", "who"), [("float16", "fa3"), ("bfloat16", "fa3 bfloat16")])
def test_both_modes_are_peers(kind: str, who: str, library: Any) -> None:
    del library
    case = instead(SQUARE, type_K="bf16" if kind == "bfloat16" else "f16")
    found = list(peers.all_of(("fa3",), None, GPU, case, 1))  # type: ignore[arg-type]
    assert [peer.who for peer in found] == [who, f"{who} deterministic"]
    assert {peer.passes for peer in found} == {peers.PASSES}


def test_what_a_handler_says_is_the_reason(calls: list[str], installed: ctypes.CDLL) -> None:
    del calls, installed
    path = fa3.find()
    assert path
    library = fa3.Library(path, 0, lambda: 0, lambda *_: 0)
    with pytest.raises(fa3.Failed, match="Wrong number of arguments"):
        library.forward([], [], scale=1.0, causal=True)()


@pytest.mark.parametrize(("deterministic", "reason"), [(False, "no memory left"), (True, "no memory left; Failed")])
def test_no_scratch_memory_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, installed: ctypes.CDLL, deterministic: bool, reason: str
) -> None:
    del installed
    stand_in(monkeypatch)
    torch = sys.modules["torch"]
    empty = torch.empty

    def full(shape: Any, **options: Any) -> Any:
        if shape in (1000, 1001):
            raise RuntimeError("no memory left")
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", full)
    peer = peers.Fa3(GPU, plain(SQUARE), "float16", deterministic)
    if deterministic:
        monkeypatch.setattr(peer, "_forward", lambda: None)
    assert unavailable(peer).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "deterministic", "reason"),
    [
        ({"hsk": 80, "hsv": 80}, False, "no head sizes but 64, 128, 192, 256 there, one for K and V"),
        ({"hsv": 128}, False, "no head sizes but 64, 128, 192, 256 there, one for K and V"),
        ({"hsk": 256, "hsv": 256}, True, "not deterministic at head size 256"),
        ({"mask": "swa:9"}, False, "no mask but a causal one there"),
        ({"sinks": 1}, False, "no sinks there"),
        ({"max_bias": 8.0}, False, "no ALiBi there"),
    ],
)
def test_what_flash_attention_3_does_not_take_says_so(
    calls: list[str], installed: ctypes.CDLL, changes: dict[str, Any], deterministic: bool, reason: str
) -> None:
    del calls, installed
    assert unavailable(peers.Fa3(GPU, instead(SQUARE, **changes), "float16", deterministic)) == reason


def test_a_device_or_machine_without_it_says_so(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    stand_in(monkeypatch, capability=(8, 9))
    monkeypatch.setattr(fa3, "find", lambda: None)
    assert unavailable(peers.Fa3(GPU, plain(SQUARE), "float16")) == (
        "FlashAttention-3 is not installed: it is in the package dew-flash-attn-cu13"
    )
    cpu = Device("CPU", "", 0, 0, None)
    assert unavailable(peers.Fa3(cpu, plain(SQUARE), "float16")) == "CPU is no GPU"
    monkeypatch.setattr(fa3, "find", lambda: library / "dew_flash_attn" / fa3.LIBRARY)
    assert unavailable(peers.Fa3(GPU, plain(SQUARE), "float16")) == "FlashAttention-3 needs compute capability 9.0"
    stand_in(monkeypatch)
    monkeypatch.setattr(fa3, "find", lambda: library / "a.c")
    assert unavailable(peers.Fa3(GPU, plain(SQUARE), "float16")).startswith("a.c: ")
