"""Softmax over rows, and its gradient: a block a row."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import ceil_div, kernel, whole_warps


def _launch(function: str, views: tuple[ArrayView, ...], stream: int) -> None:
    rows, columns = views[0].shape
    if rows and columns:
        threads = whole_warps(ceil_div(columns, 4), 512)
        arguments = (*(view.ptr for view in views), columns)
        launch.launch(kernel("softmax.cu", function, views[0]), rows, threads, arguments, stream)


def softmax_fwd(x: ArrayView, y: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    _launch("softmax_fwd", (x, y), stream)


def softmax_bwd(y: ArrayView, dy: ArrayView, dx: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    _launch("softmax_bwd", (y, dy, dx), stream)
