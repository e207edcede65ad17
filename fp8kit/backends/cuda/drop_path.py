"""Stochastic depth: dropping whole samples of a residual branch."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel, part_of
from fp8kit.errors import BackendError


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
    """See ``backends.protocol``. BackendError for a p outside (0, 1)."""
    if not 0 < p < 1:
        raise BackendError("drop_path", "p", p, "a probability in (0, 1)")
    size = x.size
    arguments = (
        x.ptr,
        address(residual),
        y.ptr,
        address(starts),
        rng.ptr,
        size,
        max(x.shape[-1], 1),
        inner,
        count,
        int(p * 2.0**32),
        float(np.float32(1 / (1 - p))),
        part_of(rng),
    )
    launch.launch(kernel("drop_path.cu", "drop_path", x), ceil_div(size, 2048), 256, arguments, stream)
