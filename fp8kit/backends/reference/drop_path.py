"""Stochastic depth (Huang et al. 2016): dropping whole samples of a residual branch."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import f32, quiet, result, store
from fp8kit.backends.reference.dropout import Dropout
from fp8kit.errors import BackendError


@quiet
def drop_path(
    x: ArrayView,
    residual: ArrayView | None,
    y: ArrayView,
    starts: ArrayView | None,
    inner: int,
    count: int,
    p: float,
    rng: ArrayView,
    stream: int,
) -> None:
    """``y = residual + x * factor of its sample``; see ``protocol.Kernels.drop_path``. BackendError for a p
    outside (0, 1)."""
    if not 0 < p < 1:
        raise BackendError("drop_path", "p", p, "a probability in (0, 1)")
    rows = np.arange(x.shape[0])
    if starts is None:
        samples = rows // inner % count
    else:
        samples = np.clip(np.searchsorted(starts.numpy(), rows, side="right") - 1, 0, count - 1)
    drawn = Dropout(p, rng, count)
    factors = drawn.factors(np.array([drawn.first]), count)[0][samples][:, None]
    values = result(y)
    np.multiply(f32(x), factors, out=values)
    values[factors[:, 0] == 0] = 0  # also what is not finite
    if residual is not None:
        values += f32(residual)
    store(y, values)
