"""The shapes of the long runs of gpucheck: those that are repeated and soaked, and any number of random ones."""

from __future__ import annotations

import itertools
import random

from ..base import errors
from ..case import cases
from ..case.cases import Case

# with enough blocks for the fused kernels of the mma path and, at head size 256, for dS in memory on the hopper path,
# where dQ is added up over three ranges of keys
REPEATED = (
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=22,nhkv=11,kv=1000,nb=200,ns=4)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=8,nhkv=2,kv=2048,nb=64)",
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=22,nhkv=11,kv=1000,nb=200,ns=4,type_K=q8_0,type_V=q8_0,mask=swa:64)",
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=12,nhkv=2,kv=20000,nb=256,type_K=q8_0,type_V=q8_0,sinks=1)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=8,nhkv=2,kv=9600,nb=256)",
    "FLASH_ATTN_BACK(hsk=80,hsv=80,nh=4,nhkv=2,kv=333,nb=77,type_K=f32,type_V=bf16,mask=docs:50,softcap=20)",
)
SOAKED = (
    *REPEATED,
    "FLASH_ATTN_BACK(hsk=256,hsv=256,nh=24,nhkv=4,kv=8192,nb=256,type_K=q8_0,type_V=q8_0)",
    "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=14,nhkv=2,kv=2048,nb=2048,sinks=1)",
    "FLASH_ATTN_BACK(hsk=112,hsv=112,nh=8,nhkv=8,kv=700,nb=700,type_K=bf16,type_V=bf16,mask=none)",
    "FLASH_ATTN_BACK(hsk=192,hsv=128,nh=16,nhkv=1,kv=1500,nb=150,mask=bias,max_bias=8)",
    "FLASH_ATTN_BACK(hsk=576,hsv=512,nh=16,nhkv=1,kv=900,nb=40,vview=1)",
    "FLASH_ATTN_BACK(hsk=128,hsv=128,nh=8,nhkv=2,kv=8192,nb=1,type_K=q4_0,type_V=q5_1)",
)
SOAKED_RANDOM = 20
"""Random shapes of a soak beside SOAKED."""

_SIZES = (8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576)
_TYPES = ("f16", "f32", "bf16", "q8_0") * 4 + tuple(cases.TYPES)


def random_cases(rng: random.Random, count: int) -> list[Case]:
    """Different small cases: of three, two that the paths on tensor cores take but for softcaps and head sizes."""
    made = (random_case(rng) if i % 3 == 0 else tiled_case(rng) for i in itertools.count())
    return list(itertools.islice(dict.fromkeys(itertools.islice(made, 2 * count)), count))


def tiled_case(rng: random.Random) -> Case:
    """A case with 64 queries and keys or more, half of them with numbers as wild as models and losses give."""
    while True:
        hkv, group = rng.randint(1, 3), rng.choice((1, 1, 2, 3, 4))
        hsk = rng.choice((64, 64, 128, 128, 256, rng.choice((40, 80, 96, 112, 192))))
        nb, kv = rng.randint(64, 200), rng.choice((rng.randint(64, 300), rng.randint(300, 1500)))
        ns = rng.choice((1, 1, 1, 2))
        mask = rng.choice(("causal", "causal", *cases.MASKS))
        mask = mask.replace("W", str(rng.randint(64, kv))).replace("L", str(rng.randint(64, kv)))
        masked, kind = mask != "none", rng.choice(_TYPES)
        window = rng.random() < 0.15
        first = rng.randint(0, kv - 64) if window else 0
        sinks = int(rng.random() < 0.3)
        try:
            return Case(
                hsk=hsk,
                hsv=hsk if rng.random() < 0.9 else rng.choice((64, 128)),
                nh=hkv * group,
                nhkv=hkv,
                kv=kv,
                nb=nb,
                ns=ns,
                type_K=kind,
                type_V=kind if rng.random() < 0.7 else rng.choice(_TYPES),
                mask=mask,
                mh=rng.choice((1, 1, hkv * group)) if masked else 1,
                ms=rng.choice((1, ns)) if masked else 1,
                max_bias=rng.choice((0.0, 0.0, 8.0)) if masked else 0.0,
                softcap=0.0 if sinks or rng.random() < 0.85 else rng.choice((2.0, 15.0, 50.0)),
                sinks=sinks,
                kv_first=first,
                kv_count=rng.randint(64, kv - first) if window else 0,
                prec=rng.choice(("default", "default", "f32")),
                data=rng.choice(("wild", rng.choice(cases.TAME))),
                layout=rng.choice(("cont",) * 4 + cases.LAYOUTS),
                pair=int(rng.random() < 0.3),
            )
        except errors.Usage:
            continue


def random_case(rng: random.Random) -> Case:
    """A small case from the whole grammar but captures.

    Left out is what float32 cannot hold in few rows: outliers, large logits, near-constant V, a finite lowest mask."""
    while True:
        hkv, group = rng.randint(1, 4), rng.choice((1, 1, 2, 3, 4, 6, 8))
        hsk = rng.choice(_SIZES)
        kv = rng.choice((rng.randint(1, 70), rng.randint(1, 400)))
        nb = rng.choice((1, rng.randint(1, 40), rng.randint(1, 150)))
        ns = rng.choice((1, 1, 1, 2, 3))
        mask = rng.choice([m for m in cases.MASKS if m != "lowest" or nb >= 32])
        mask = mask.replace("W", str(rng.randint(1, kv))).replace("L", str(rng.randint(1, kv)))
        masked = mask != "none"
        first = rng.randint(0, kv - 1) if rng.random() < 0.2 else 0
        count = rng.randint(1, kv - first) if first or rng.random() < 0.1 else 0
        sinks = int(rng.random() < 0.3)
        kind = rng.choice(_TYPES)
        try:
            return Case(
                hsk=hsk,
                hsv=hsk if rng.random() < 0.7 else rng.choice(_SIZES),
                nh=hkv * group,
                nhkv=hkv,
                kv=kv,
                nb=nb,
                ns=ns,
                type_K=kind,
                type_V=kind if rng.random() < 0.6 else rng.choice(_TYPES),
                mask=mask,
                mh=rng.choice((1, 1, hkv * group)) if masked else 1,
                ms=rng.choice((1, ns)) if masked else 1,
                mpad=rng.choice((0, 0, 3)) if masked else 0,
                max_bias=rng.choice((0.0, 0.0, 8.0)) if masked else 0.0,
                softcap=rng.choice((0.0, 0.0, 0.0, 15.0)),
                sinks=sinks,
                grads="".join(x for x in "qkvs"[: 3 + sinks] if rng.random() < 0.7) or "q"
                if rng.random() < 0.25
                else "",
                kv_first=first,
                kv_count=count,
                o=int(rng.random() < 0.2),
                prec=rng.choice(("default", "default", "f32")),
                data=rng.choice(("normal", "normal", "normal", "uniform", "kmean", "tiny", "huge", "zero")),
                layout=rng.choice(("cont",) * 4 + cases.LAYOUTS),
            )
        except errors.Usage:
            continue
