"""Small things: copies and conversions, sums, the generator's state."""

from __future__ import annotations

import struct
from typing import NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import TYPE_CODES, ceil_div, column_sums, column_sums_bytes, kernel
from fp8kit.errors import BackendError
from fp8kit.lru import memoized

_LAYOUT = struct.Struct("=16q")  # raw_kernels/layout.cuh


class _Merged(NamedTuple):
    """A copy's dimensions, brought to five; ``step`` is the largest power of two, up to 8, that divides the
    rows and every stride."""

    shape: Shape
    source: Shape
    target: Shape
    step: int
    dense: bool


@memoized("copies")
def _merge(shape: Shape, source: Shape, target: Shape) -> _Merged:
    """Dimensions of size 1 dropped, neighbours that both sides walk alike made one."""
    merged: list[tuple[int, int, int]] = []
    for n, a, b in zip(shape, source, target, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1] == n * a and merged[-1][2] == n * b:
            merged[-1] = (merged[-1][0] * n, a, b)
        else:
            merged.append((n, a, b))
    if not merged:
        merged = [(1, 1, 1)]
    if len(merged) > 5:
        raise BackendError("copy", "shape", shape, "at most 5 dimensions")
    n, a, b = merged[-1]
    step = 1
    if a == b == 1:
        step = next(
            s
            for s in (8, 4, 2, 1)
            if all(v % s == 0 for v in (n, *(stride for row in merged[:-1] for stride in row[1:])))
        )
    padded = [(1, 0, 0)] * (5 - len(merged)) + merged
    sizes, sources, targets = (tuple(row[i] for row in padded) for i in range(3))
    return _Merged(sizes, sources, targets, step, len(merged) == 1 and a == b == 1)


def copy(x: ArrayView, y: ArrayView, stream: int) -> None:
    """See ``backends.protocol``. BackendError for conversions from or to types that the contract does not
    name."""
    size = y.size
    if size == 0:
        return
    itemsize = y.dtype.itemsize
    if x.dtype is y.dtype and itemsize == 1 and _turns(x, y):
        (rows, columns), steps = y.shape, (x.strides[1], y.strides[0])
        blocks = ceil_div(rows, 64) * ceil_div(columns, 64)
        turn = launch.kernel("elementwise.cu", "turn1", y.device.index, T="f32")
        launch.launch(turn, blocks, 256, (x.ptr, y.ptr, rows, columns, *steps), stream)
        return
    merged = _merge(y.shape, x.strides, y.strides)
    if x.dtype is y.dtype:
        # never cudaMemcpyAsync: it refuses what lies in two allocations side by side, as joined weights may
        if merged.dense and itemsize > 4:
            itemsize, size = 4, size * itemsize // 4
            merged = _merge((size,), (1,), (1,))
        if itemsize > 4:
            raise BackendError("copy", "dtype", y.dtype, "elements of 1, 2 or 4 bytes")
        unit = 8 // itemsize if merged.step * itemsize >= 8 and (x.ptr | y.ptr) % 8 == 0 else 1
        function = launch.kernel("elementwise.cu", f"move{itemsize}", y.device.index, T="f32")
        scalars: tuple[int, ...] = (size // unit,)
    else:
        if y.dtype.name not in TYPE_CODES:
            raise BackendError("copy", "y", y.dtype, f"{x.dtype}, or one of {', '.join(TYPE_CODES)}")
        unit = 8 if merged.step == 8 and (x.ptr | y.ptr) % 16 == 0 and x.dtype.itemsize < 8 else 1
        function, scalars = kernel("convert.cu", "convert", x), (size // unit, TYPE_CODES[y.dtype.name])
    layout = _LAYOUT.pack(*merged.shape, *merged.source, *merged.target, unit)
    launch.launch(function, ceil_div(size // unit, 256), 256, (x.ptr, y.ptr, *scalars, layout), stream)


def _turns(x: ArrayView, y: ArrayView) -> bool:
    """Whether a copy of bytes is a transposition that ``turn1`` does."""
    if len(y.shape) != 2 or x.strides[0] != 1 or y.strides[1] != 1:
        return False
    steps = *y.shape, x.strides[1], y.strides[0], x.ptr, y.ptr
    return min(y.shape) > 1 and min(steps) > 0 and not any(step % 4 for step in steps)


def add(a: ArrayView, b: ArrayView, out: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    size = a.size
    launch.launch(
        kernel("elementwise.cu", "add", a),
        ceil_div(size, 2048),
        256,
        (a.ptr, b.ptr, out.ptr, size, b.size),
        stream,
    )


def sum_rows(x: ArrayView, out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
    """See ``backends.protocol``. BackendError for a missing workspace."""
    column_sums(x, None, out, 0, 0, 1.0, 0, workspace, stream)


def column_sum_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``."""
    return column_sums_bytes(rows, columns)


def rng_next_(state: ArrayView, out: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    launch.launch(
        launch.kernel("elementwise.cu", "rng_next", state.device.index, T="f32"),
        1,
        1,
        (state.ptr, out.ptr),
        stream,
    )
