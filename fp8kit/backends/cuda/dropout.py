"""Dropout with bias and residual, and its gradient. The mask is never stored: backward draws the same Philox
words again."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, column_sums, drawn, kernel
from fp8kit.errors import BackendError


def _draw(p: float, rng: ArrayView | None) -> tuple[int, int, float, int]:
    """As ``drawn``; nothing of all that where p is 0."""
    if p == 0:
        return 0, 0, 1.0, 0
    if rng is None or not 0 < p < 1:
        raise BackendError("dropout", "p", f"{p} with rng {rng}", "0, or a number below 1 and an rng")
    return drawn(p, rng)


def dropout_add(
    x: ArrayView,
    bias: ArrayView | None,
    residual: ArrayView | None,
    y: ArrayView,
    p: float,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for a p outside [0, 1) or without its rng."""
    state, *rest = _draw(p, rng)
    size = x.size
    arguments = (x.ptr, address(bias), address(residual), y.ptr, state, size, x.shape[-1], *rest)
    launch.launch(kernel("dropout.cu", "dropout_add", x), ceil_div(size, 2048), 256, arguments, stream)


def dropout_bwd(
    dy: ArrayView,
    dx: ArrayView | None,
    dbias: ArrayView | None,
    p: float,
    rng: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``; dbias sums the gradients before they are rounded. BackendError as above, and
    for a missing workspace."""
    column_sums(dy, dx, dbias, *_draw(p, rng), workspace, stream)
