"""Softmax over rows, and its gradient, over blocks of rows: NumPy's float32 exp uses SIMD."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import blocks, f32, quiet, result, store


@quiet
def softmax_fwd(x: ArrayView, y: ArrayView, stream: int) -> None:
    """See ``protocol.Kernels.softmax_fwd``."""
    values, found = f32(x), result(y)
    for part in blocks(*x.shape):
        block = values[part] - values[part].max(axis=1, keepdims=True, initial=-np.inf)
        np.exp(block, out=block)
        found[part] = block / np.add.reduce(block, axis=1, keepdims=True)
    store(y, found)


@quiet
def softmax_bwd(y: ArrayView, dy: ArrayView, dx: ArrayView, stream: int) -> None:
    """See ``protocol.Kernels.softmax_bwd``."""
    weights, upstream, found = f32(y), f32(dy), result(dx)
    for part in blocks(*y.shape):
        sums = np.add.reduce(weights[part] * upstream[part], axis=1, keepdims=True)
        found[part] = weights[part] * (upstream[part] - sums)
    store(dx, found)
