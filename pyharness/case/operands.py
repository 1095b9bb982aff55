"""What a FLASH_ATTN_BACK node reads, as numpy arrays.

Axis order is the reverse of ggml's: q [S, H, N, Dk], k and v [S, Hkv, M, bytes], mask [Sm, Hm, rows, M],
d and o [S, N, H, Dv].
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from . import quant
from .cases import Case

F32 = NDArray[np.float32]


@dataclasses.dataclass
class Inputs:
    """What a FLASH_ATTN_BACK node reads. Scalars are values that a float32 holds exactly."""

    case: Case  # for a capture: with the file's shapes
    q: F32  # [S, H, N, Dk]
    k: NDArray[np.uint8]  # [S, Hkv, M, row bytes]
    v: NDArray[np.uint8]  # [S, Hkv, M, row bytes]
    mask: NDArray[np.float16] | None  # [Sm, Hm, rows >= N, M]
    sinks: F32 | None  # [H]
    o: F32 | None  # [S, N, H, Dv]
    d: F32  # [S, N, H, Dv]
    type_K: str
    type_V: str
    scale: float
    max_bias: float
    softcap: float
    grads: tuple[str, ...]  # of "dq", "dk", "dv", "dsinks"
    kv_first: int
    kv_count: int

    def k_f32(self) -> F32:
        """K as ggml dequantises it, [S, Hkv, M, Dk]; keys that no row sees may hold NaN."""
        return quant.dequantize(self.k, self.type_K)

    def v_f32(self) -> F32:
        """V as ggml dequantises it, [S, Hkv, M, Dv]; keys that no row sees may hold NaN."""
        return quant.dequantize(self.v, self.type_V)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sequences, query heads, KV heads, queries, keys."""
        s, h, n, _ = self.q.shape
        return s, h, self.k.shape[1], n, self.k.shape[2]

    def seen(self) -> NDArray[np.bool_]:
        """Which keys some row sees, [S, Hkv, M]."""
        s, h, hkv, n, m = self.sizes
        if self.mask is None:
            return np.full((s, hkv, m), n > 0)
        by_head = (self.mask[:, :, :n].view(np.uint16) != 0xFC00).any(axis=2)
        whole = by_head[np.arange(s)[:, None] % by_head.shape[0], np.arange(h)[None] % by_head.shape[1]]
        return np.asarray(whole.reshape(s, hkv, h // hkv, m).any(axis=2))

    def sees(self) -> NDArray[np.bool_]:
        """Which rows see some key, [S, H, N]."""
        s, h, _, n, m = self.sizes
        if self.mask is None:
            return np.full((s, h, n), m > 0)
        by_head = (self.mask[:, :, :n].view(np.uint16) != 0xFC00).any(axis=3)
        return np.asarray(by_head[np.arange(s)[:, None] % by_head.shape[0], np.arange(h)[None] % by_head.shape[1]])

    def shown(self) -> tuple[F32, F32, F32, F32]:
        """q, k, v [.., D] and d as they count: zeros where no row sees the key or the row sees no key."""
        keys, rows = self.seen()[..., None], self.sees()[..., None]

        def where(seen: NDArray[np.bool_], values: F32) -> F32:
            return values if seen.all() else np.where(seen, values, np.float32(0))

        return (
            where(rows, self.q),
            where(keys, self.k_f32()),
            where(keys, self.v_f32()),
            where(rows.transpose(0, 2, 1, 3), self.d),
        )

    def unmasked(self) -> int:
        """Pairs (sequence, query head, query, key) that the mask leaves."""
        s, h, _, n, m = self.sizes
        if self.mask is None:
            return s * h * n * m
        sm, hm = self.mask.shape[:2]
        visible = int(np.count_nonzero(self.mask[:, :, :n].view(np.uint16) != 0xFC00))
        return visible * int((s // sm) * (h // hm))
