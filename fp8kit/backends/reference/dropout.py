"""Dropout with bias and residual, and its gradient. The mask is never stored: backward draws the same Philox
words again."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array, Float32, blocks, column_sum, f32, quiet, result, store
from fp8kit.backends.reference.philox import words
from fp8kit.backends.reference.threads import njit, prange


class Dropout:
    """The keep-factors of one operation's dropout: 0, or float32(1 / (1 - p)), by element index (see the
    protocol's conventions). ``first``: index of the first of ``count`` elements."""

    def __init__(self, p: float, rng: ArrayView, count: int = 0) -> None:
        self.seed, self.offset, *part = (int(v) for v in rng.numpy())
        self.first = part[0] * count if part else 0
        self.threshold = np.uint32(int(p * 2.0**32))
        self.factor = np.float32(1.0 / (1.0 - p))

    def factors(self, starts: Array, columns: int) -> Float32:
        """Factors, float32 (rows, columns), of rows whose first elements have the indices ``starts``, int64
        (rows,)."""
        found = np.empty((len(starts), columns), np.float32)
        _factors(self.seed, self.offset, starts, self.threshold, self.factor, found)
        return found

    def block(self, rows: slice, columns: int) -> Float32:
        """Factors of some rows of a matrix."""
        return self.factors(self.first + np.arange(rows.start, rows.stop) * columns, columns)


def dropout(p: float, rng: ArrayView | None, count: int = 0) -> Dropout | None:
    """Returns the dropout of a call, None where p is 0."""
    return Dropout(p, rng, count) if p > 0 and rng is not None else None


@quiet
def dropout_add(
    x: ArrayView,
    bias: ArrayView | None,
    residual: ArrayView | None,
    y: ArrayView,
    p: float,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """``y = residual + dropout(x + bias)``; see ``protocol.Kernels.dropout_add``."""
    rows, columns = x.shape
    mask = dropout(p, rng, x.size)
    source, values = f32(x), result(y)
    shift = None if bias is None else f32(bias)
    base = None if residual is None else f32(residual)
    for part in blocks(rows, columns):
        block = source[part]
        if shift is not None:
            block = block + shift
        if mask is not None:
            block = block * mask.block(part, columns)
        if base is not None:
            np.add(base[part], block, out=values[part])
        elif block.ctypes.data != values[part].ctypes.data:
            values[part] = block
    store(y, values)


@quiet
def dropout_bwd(
    dy: ArrayView,
    dx: ArrayView | None,
    dbias: ArrayView | None,
    p: float,
    rng: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """``dx = dy * mask / (1 - p)`` and its column sums; see ``protocol.Kernels.dropout_bwd``."""
    rows, columns = dy.shape
    mask = dropout(p, rng, dy.size)
    values = f32(dy)
    if mask is not None:
        source = values
        values = np.empty(dy.shape, np.float32) if dx is None else result(dx)
        for part in blocks(rows, columns):
            np.multiply(source[part], mask.block(part, columns), out=values[part])
    if dx is not None:
        store(dx, values)
    if dbias is not None:
        store(dbias, column_sum(values))


@njit(parallel=True)
def _factors(seed: Any, offset: Any, starts: Array, threshold: Any, factor: Any, out: Array) -> None:
    for i in prange(out.shape[0]):
        drawn = np.empty(out.shape[1], np.uint32)
        words(seed, offset, starts[i], drawn)
        for j in range(out.shape[1]):
            out[i, j] = factor if drawn[j] >= threshold else np.float32(0)
