"""Small things: copies and conversions, sums, the generator's state."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import bits_of, column_sum, f32, quiet, result, store


@quiet
def copy(x: ArrayView, y: ArrayView, stream: int) -> None:
    """``y = x`` converted to y's dtype; see ``protocol.Kernels.copy``."""
    if x.dtype is y.dtype:
        np.copyto(bits_of(y), bits_of(x))
    else:
        store(y, f32(x))


@quiet
def add(a: ArrayView, b: ArrayView, out: ArrayView, stream: int) -> None:
    """``out = a + b``, b repeated; see ``protocol.Kernels.add``."""
    if not a.size:
        return
    values = result(out).reshape(-1, b.size)
    np.add(f32(a).reshape(-1, b.size), f32(b).reshape(1, -1), out=values)
    store(out, values.reshape(out.shape))


@quiet
def sum_rows(x: ArrayView, out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
    """Column sums; see ``protocol.Kernels.sum_rows``."""
    store(out, column_sum(f32(x)))


def rng_next_(state: ArrayView, out: ArrayView, stream: int) -> None:
    """``out = state; state[1] += 1``; see ``protocol.Kernels.rng_next_``."""
    values = state.numpy()
    out.numpy()[:] = values
    values[1] += 1
