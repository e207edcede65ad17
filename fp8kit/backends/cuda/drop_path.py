"""Stochastic depth: dropping whole samples of a residual branch."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, drawn, kernel
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
    size, (state, *rest) = x.size, drawn(p, rng)
    arrays = x.ptr, address(residual), y.ptr, address(starts), state
    arguments = (*arrays, size, max(x.shape[-1], 1), inner, count, *rest)
    launch.launch(kernel("drop_path.cu", "drop_path", x), ceil_div(size, 2048), 256, arguments, stream)
