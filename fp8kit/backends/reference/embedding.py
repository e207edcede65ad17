"""Embedding look-up and its gradient."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array, Float32, f32, quiet, result, store
from fp8kit.backends.reference.threads import njit


@quiet
def embedding_fwd(ids: ArrayView, table: ArrayView, out: ArrayView, stream: int) -> None:
    """``out[i] = table[ids[i]]``, NaN for an id out of range; see ``protocol.Kernels.embedding_fwd``."""
    rows, values, found = table.numpy(), ids.numpy(), out.numpy()
    known = (values >= 0) & (values < len(rows))
    if known.all():
        found[...] = rows[values]
    else:
        found[known] = rows[values[known]]
        found[~known] = np.nan


@quiet
def embedding_bwd(ids: ArrayView, dout: ArrayView, dtable: ArrayView, stream: int) -> None:
    """``dtable[v]`` = sum of ``dout[i]`` over ``ids[i] == v``, in the order of i; see
    ``protocol.Kernels.embedding_bwd``."""
    total = result(dtable)
    total[...] = 0
    _scatter_add(ids.numpy().astype(np.int64, copy=False), f32(dout), total)
    store(dtable, total)


@njit
def _scatter_add(ids: Array, rows: Float32, total: Float32) -> None:
    for i in range(len(ids)):
        v = ids[i]
        if 0 <= v < len(total):
            for j in range(rows.shape[1]):
                total[v, j] += rows[i, j]
