"""Scales of lines: rows or columns of a matrix that are scaled as a whole."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel


def line_scales(
    x: ArrayView, bias: ArrayView | None, scales: ArrayView, axis: int, power_2: bool, stream: int
) -> None:
    """See ``backends.protocol``."""
    rows, columns = x.shape
    arguments = (x.ptr, address(bias), scales.ptr, rows, columns, x.strides[0], int(power_2))
    if axis:
        launch.launch(
            kernel("lines.cu", "column_scales", x), ceil_div(columns, 32), (32, 8), arguments, stream
        )
    else:
        launch.launch(kernel("lines.cu", "row_scales", x), rows, 256, arguments, stream)


def scale_lines(
    x: ArrayView,
    scales: ArrayView | None,
    out: ArrayView,
    axis: int,
    factor: float,
    divide: bool,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    columns = max(x.shape[1], 1)
    arguments = (x.ptr, address(scales), out.ptr, x.size, columns, axis, float(factor), int(divide))
    launch.launch(kernel("lines.cu", "scale_lines", x), ceil_div(x.size, 2048), 256, arguments, stream)
