"""Inputs of a case: seeded numpy arrays with everything in them that has ever upset an attention backward."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import capture_file, quant, reference
from .cases import Case, block
from .operands import F32, Inputs


def make(case: Case, seed: int) -> Inputs:
    """The inputs of a case under a base seed (`--seed`): the same for every filter and order."""
    if case.capture:
        return capture_file.load(case)

    rng = np.random.default_rng(case.seed(seed))
    mask = _mask(case, rng)
    q, k, v, d = _values(case, rng)
    if case.layout == "bcast":
        d[:] = d.reshape(-1, case.hsv)[:1]
    if case.vview:
        v = k[..., : case.hsv]

    inputs = Inputs(
        case=case,
        q=q,
        k=quant.quantize(k, case.type_K, rng),
        v=quant.quantize(v, case.type_V, rng),
        mask=mask,
        sinks=_sinks(case, rng) if case.sinks else None,
        o=None,
        d=d,
        **_scalars(case),
    )
    del k, v
    if case.vview:
        inputs.v = inputs.k[..., : inputs.v.shape[-1]]

    spoil(inputs, rng)
    if case.o:
        inputs.o = reference.forward(inputs).astype(np.float32)
    return inputs


def spoil(inputs: Inputs, rng: np.random.Generator) -> None:
    """Overwrite in place what must not count: keys that no row sees, rows of q and d that see no key (half of them huge
    numbers, half NaN and Inf)."""
    unseen, blind = ~inputs.seen(), ~inputs.sees()
    if unseen.any():
        keys = [(inputs.k, inputs.type_K)] + [(inputs.v, inputs.type_V)] * (not inputs.case.vview)
        for data, kind in keys:
            rows = data[unseen]
            quant.spoil(rows, kind, rng)
            data[unseen] = rows
    if not blind.any():
        return
    for array in [inputs.q] + [inputs.d.transpose(0, 2, 1, 3)] * (inputs.case.layout != "bcast"):
        rows = array[blind] * np.float32(1e30)
        quant.spoil(rows[::2].view(np.uint8), "f32", rng)
        array[blind] = rows


def blank(case: Case) -> Inputs:
    """Inputs of a case in shape only, without memory behind them: enough to ask a backend whether it takes the node."""
    if case.capture:
        return make(case, 0)

    def zeros(dtype: type, *shape: int) -> NDArray[Any]:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def rows(type_name: str, width: int) -> NDArray[np.uint8]:
        values, size = block(type_name)
        return zeros(np.uint8, case.ns, case.nhkv, case.kv, width // values * size)

    mask = None if case.mask == "none" else zeros(np.float16, case.ms, case.mh, case.nb + case.mpad, case.kv)
    output = zeros(np.float32, case.ns, case.nb, case.nh, case.hsv)
    return Inputs(
        case=case,
        q=zeros(np.float32, case.ns, case.nh, case.nb, case.hsk),
        k=rows(case.type_K, case.hsk),
        v=rows(case.type_V, case.hsv),
        mask=mask,
        sinks=zeros(np.float32, case.nh) if case.sinks else None,
        o=output if case.o else None,
        d=output,
        **_scalars(case),
    )


def _scalars(case: Case) -> dict[str, Any]:
    return {
        "type_K": case.type_K,
        "type_V": case.type_V,
        "scale": float(np.float32(case.scale or 1 / math.sqrt(case.hsk))),
        "max_bias": float(np.float32(case.max_bias)),
        "softcap": float(np.float32(case.softcap)),
        "grads": case.wanted,
        "kv_first": case.window[0],
        "kv_count": case.window[1],
    }


def _values(case: Case, rng: np.random.Generator) -> tuple[F32, F32, F32, F32]:
    """q, k, v, d as float32 before quantisation."""

    def draw(*shape: int) -> F32:
        if case.data == "uniform":
            return rng.uniform(-1, 1, shape).astype(np.float32)
        return rng.standard_normal(shape, np.float32)

    s = case.ns
    q = draw(s, case.nh, case.nb, case.hsk)
    k = draw(s, case.nhkv, case.kv, case.hsk)
    v = draw(s, case.nhkv, 0 if case.vview else case.kv, case.hsv)
    d = draw(s, case.nb, case.nh, case.hsv)

    if case.data == "vconst":
        v *= np.float32(1e-3)
        v += np.float32(1)
    elif case.data == "kmean":
        k += 8 * draw(s, case.nhkv, 1, case.hsk)
    elif case.data == "tiny":
        d *= np.float32(1e-7)
    elif case.data == "huge":
        d *= np.float32(1e4)
    elif case.data == "logits":
        q *= np.float32(6)
        k *= np.float32(6)
    elif case.data == "outlier":
        q[..., :2] *= np.float32(30)
        k[..., :2] *= np.float32(10)
    elif case.data == "zero":
        d[:] = 0
    elif case.data == "wild":
        _wild(rng, q, k, v, d)
    return q, k, v, d


def _sinks(case: Case, rng: np.random.Generator) -> F32:
    """One number for each head; wild: up to the ends of float32."""
    sinks = rng.standard_normal(case.nh, np.float32)
    if case.data == "wild":
        ends = np.array([np.finfo(np.float32).max, 2.4e38, 1e30, 300, 20], np.float32)
        far = rng.random(case.nh) < 0.3
        sinks[far] = rng.choice(np.concatenate([ends, -ends]), int(far.sum()))
    return sinks


def _wild(rng: np.random.Generator, q: F32, k: F32, v: F32, d: F32) -> None:
    """Changes normal numbers in place to what models and losses have been seen to give: several of outlier channels and
    tokens, heavy tails, constants plus noise, pairs of channels that RoPE turns, a first key unlike the others,
    near-duplicate keys, and a loss scale."""

    def once(chance: float) -> bool:
        return bool(rng.random() < chance)

    rows = d.transpose(0, 2, 1, 3)
    for x, most in ((q, 4), (k, 7), (v, 7), (rows, 7)):
        width, count = x.shape[3], x.shape[2]
        if once(0.25):
            x[..., rng.integers(width, size=rng.integers(1, 4))] *= np.float32(2 ** rng.uniform(0, most))
        if once(0.25) and count:
            x[:, :, rng.integers(count, size=rng.integers(1, 4))] *= np.float32(2 ** rng.uniform(-most, most + 3))
        if once(0.15):
            x /= np.sqrt(rng.chisquare(4, (*x.shape[:3], 1)) / 4).astype(np.float32)
        if once(0.2):
            x *= np.float32(2 ** rng.uniform(-7, 0))
            x += rng.standard_normal((1, x.shape[1], 1, width), np.float32)
    size = min(q.shape[3], k.shape[3])
    if once(0.2) and size >= 2:
        pair = int(rng.integers(size // 2)) * 2
        turn, high = rng.uniform(0.01, 1), 2 ** rng.uniform(3, 9)
        for x, long in ((k, high), (q, 2 ** rng.uniform(0, 2))):
            place = turn * (np.arange(x.shape[2]) - x.shape[2])
            x[..., pair] += np.float32(long) * np.cos(place).astype(np.float32)
            x[..., pair + 1] += np.float32(long) * np.sin(place).astype(np.float32)
    if once(0.2) and k.shape[2]:
        channel = int(rng.integers(size))
        k[:, :, 0] = 0
        k[:, :, 0, channel] = np.float32(2 ** rng.uniform(3, 10) * size**0.5)
        q[..., channel] = np.float32(rng.uniform(1, 12)) / np.abs(k[0, 0, 0, channel]) * size**0.5
        v[:, :, :1] *= np.float32(0.01)
    if once(0.2) and k.shape[2] > 1:
        pairs = k.shape[2] // 2
        k[:, :, 1 : 2 * pairs : 2] = k[:, :, 0 : 2 * pairs : 2]
        k += np.float32(2 ** rng.uniform(-10, -1)) * rng.standard_normal(k.shape, np.float32)
    for x in (k, v):
        np.clip(x, -6e4, 6e4, out=x)  # finite in fp16
    if once(0.5):
        d *= np.float32(2 ** rng.uniform(-40, 60))


def _mask(case: Case, rng: np.random.Generator) -> NDArray[np.float16] | None:
    """The mask [ms, mh, nb + mpad, kv]; each head and sequence has its own, and rows beyond nb are NaN."""
    if case.mask == "none":
        return None
    mask = np.full((case.ms, case.mh, case.nb + case.mpad, case.kv), np.nan, np.float16)
    for index in np.ndindex(case.ms, case.mh):
        shift = index[0] * case.mh + index[1]
        for first in range(0, case.nb, 512):
            rows = np.arange(first, min(first + 512, case.nb))
            mask[index][rows] = _mask_rows(case, rows, shift, rng)
    return mask


def _mask_rows(case: Case, rows: NDArray[np.int64], shift: int, rng: np.random.Generator) -> NDArray[np.float16]:
    """Rows [n, kv] of the mask; shift moves the positions back, so that masks of different heads differ."""
    kind, _, width = case.mask.partition(":")
    shape = (len(rows), case.kv)
    keys = np.arange(case.kv)[None]
    position = (case.kv - case.nb + rows - shift)[:, None]
    hidden = keys > position
    values = np.zeros(shape, np.float16)

    if kind == "swa":
        hidden |= keys <= position - int(width)
    elif kind == "docs":
        hidden |= keys // int(width) != position // int(width)
    elif kind == "pad":
        hidden |= keys >= case.kv - case.kv // 4
    elif kind == "lowest":
        hidden &= (rows != 0)[:, None]
        values[rows == 0] = -65504
    elif kind == "bias":
        hidden = np.zeros(shape, bool)
        values = rng.standard_normal(shape, np.float32).astype(np.float16)
    elif kind == "random":
        hidden = rng.random(shape, np.float32) < 0.5
    elif kind == "rows":
        hidden = rng.random(shape, np.float32) < 0.3
        hidden |= ((rng.random(len(rows)) < 0.25) | (rows == 0))[:, None]

    if case.max_bias > 0 and kind != "lowest":
        values = -np.abs(position - keys).astype(np.float16)
    values[hidden] = -np.inf
    return values
