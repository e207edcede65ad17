"""Philox4x32-10, the counter-based generator of the contract (Salmon, Moraes, Dror, Shaw, SC'11; constants of
Random123)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference.threads import njit, prange

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_32 = np.uint64(32)


@njit
def philox4(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Four random words of the counter (c0, c1, c2, c3) under the key (k0, k1). All uint32, in and out."""
    for _ in range(10):
        p0 = _M0 * np.uint64(c0)
        p1 = _M1 * np.uint64(c2)
        c0, c1, c2, c3 = (
            np.uint32((p1 >> _32) ^ c1 ^ k0),
            np.uint32(p1),
            np.uint32((p0 >> _32) ^ c3 ^ k1),
            np.uint32(p0),
        )
        k0 = np.uint32(k0 + _W0)
        k1 = np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@njit
def words(rng_seed: Any, rng_offset: Any, start: Any, out: Any) -> None:
    """Fill ``out``, uint32 (n,), with the words of elements ``start`` ... ``start + n - 1`` of the stream
    (seed, offset), all int64.

    Element i has word ``i % 4`` of the counter ``(lo(i // 4), hi(i // 4), lo(offset), hi(offset))`` under the
    key ``(lo(seed), hi(seed))``.
    """
    seed, offset = np.uint64(rng_seed), np.uint64(rng_offset)
    k0, k1 = np.uint32(seed), np.uint32(seed >> _32)
    c2, c3 = np.uint32(offset), np.uint32(offset >> _32)
    at = 0
    n = len(out)
    while at < n:
        block = np.uint64(start + at) >> np.uint64(2)
        lane = int((start + at) & 3)
        four = philox4(np.uint32(block), np.uint32(block >> _32), c2, c3, k0, k1)
        for j in range(lane, 4):
            if at < n:
                out[at] = four[j]
                at += 1


@njit(parallel=True)
def _row_words(rng_seed: Any, rng_offset: Any, starts: Any, out: Any) -> None:
    for i in prange(out.shape[0]):
        words(rng_seed, rng_offset, starts[i], out[i])


def row_words(rng: ArrayView, starts: Any, columns: int) -> Any:
    """Returns the words of rows, uint32 (M, columns), whose first elements are ``starts``, int64 (M,), of the
    stream ``rng``."""
    out = np.empty((len(starts), columns), np.uint32)
    seed, offset = rng.numpy()[:2]
    _row_words(seed, offset, starts, out)
    return out
