"""Permutations of rows: gathers by a map, and sums in the order of the rows."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array, Float32, blocks, f32, quiet, result, store
from fp8kit.backends.reference.threads import njit
from fp8kit.formats import uint8


def _rows_of(row_map: ArrayView, tokens: int, slots: int | None) -> tuple[Array, Array, Array]:
    """(rows that are not empty, their tokens, their slots). ``slots``: None where any will do."""
    token, slot = row_map.numpy().T
    filled = (token >= 0) & (token < tokens)
    if slots is not None:
        filled &= (slot >= 0) & (slot < slots)
    rows = np.flatnonzero(filled)
    return rows, token[rows], slot[rows]


def _factors(probs: ArrayView | None, token: Array, slot: Array) -> Float32:
    """A factor for each row, float32; none without ``probs``."""
    return np.empty(0, np.float32) if probs is None else f32(probs)[token, slot]


@quiet
def permute_rows(
    x: ArrayView, row_map: ArrayView, probs: ArrayView | None, out: ArrayView, stream: int
) -> None:
    """See ``protocol.Kernels.permute_rows``."""
    rows, token, slot = _rows_of(row_map, x.shape[0], None if probs is None else probs.shape[1])
    source, to, factors = x.numpy(), out.numpy(), _factors(probs, token, slot)
    to[...] = 0
    for part in blocks(len(rows), x.shape[1]):
        found = source[token[part]]
        to[rows[part]] = found if probs is None else found.astype(np.float32) * factors[part, None]


@quiet
def unpermute_rows(
    x: ArrayView, row_map: ArrayView, probs: ArrayView | None, out: ArrayView, stream: int
) -> None:
    """See ``protocol.Kernels.unpermute_rows``."""
    rows, token, slot = _rows_of(row_map, out.shape[0], None if probs is None else probs.shape[1])
    total = result(out)
    total[...] = 0
    _add_rows(f32(x), rows, token, _factors(probs, token, slot), total)
    store(out, total)


@njit
def _add_rows(x: Float32, rows: Array, token: Array, factors: Float32, total: Float32) -> None:
    scaled = len(factors) == len(rows)
    for i in range(len(rows)):
        for j in range(x.shape[1]):
            value = x[rows[i], j]
            total[token[i], j] += value * factors[i] if scaled else value


@quiet
def permute_probs(probs: ArrayView, row_map: ArrayView, out: ArrayView, stream: int) -> None:
    """See ``protocol.Kernels.permute_probs``."""
    rows, token, slot = _rows_of(row_map, *probs.shape)
    to = out.numpy()
    to[...] = 0
    to[rows] = probs.numpy()[token, slot]


@quiet
def unpermute_probs(
    rows: ArrayView, x: ArrayView | None, row_map: ArrayView, out: ArrayView, stream: int
) -> None:
    """See ``protocol.Kernels.unpermute_probs``."""
    filled, token, slot = _rows_of(row_map, *out.shape)
    sums = np.zeros(out.shape, np.float32)
    for part in blocks(len(filled), rows.shape[1]):
        values = rows.numpy()[filled[part]].astype(np.float32)
        if x is not None:
            values = values * x.numpy()[token[part]].astype(np.float32)
        sums[token[part], slot[part]] = values.sum(1)
    store(out, sums)


def expert_rows(
    routing: ArrayView, row_map: ArrayView, sizes: ArrayView, counts: ArrayView, align: int, stream: int
) -> None:
    """See ``protocol.Kernels.expert_rows``."""
    given, out, experts = routing.numpy(), row_map.numpy(), counts.size
    if routing.dtype is uint8:
        expert, token = np.nonzero(given.T)
        slot = expert
    else:
        flat = given.reshape(-1)
        places = np.flatnonzero((flat >= 0) & (flat < experts))
        places = places[np.argsort(flat[places], kind="stable")]
        expert, (token, slot) = flat[places], np.divmod(places, max(given.shape[1], 1))
    counts.numpy()[...] = count = np.bincount(expert, minlength=experts)
    ends = np.cumsum(-(-count // align) * align)
    starts = ends - -(-count // align) * align
    sizes.numpy()[...] = np.diff(np.minimum(ends, len(out)), prepend=0)
    row = np.arange(len(expert)) + (starts - (np.cumsum(count) - count))[expert]
    kept = row < len(out)
    out[...] = -1
    out[row[kept]] = np.stack((token, slot), 1)[kept]
