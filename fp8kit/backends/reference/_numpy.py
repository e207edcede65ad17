"""How this engine goes between views and NumPy arithmetic: widen to float32, compute, round once.

Everything works on float32 arrays; 16-bit inputs are widened first (exact) and results are rounded on the way
out. Large arrays are walked in blocks of rows that stay in a core's cache, because a NumPy expression passes
over its operands once per operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8kit import arrays, formats
from fp8kit.arrays import CPU, ArrayView, Shape
from fp8kit.backends.protocol import Cast
from fp8kit.backends.reference import quantize, scales
from fp8kit.formats import DType

Float32 = NDArray[np.float32]
Array = NDArray[Any]

# Overflow, division by zero and NaN are values here, as on a GPU, not warnings. Decorates every kernel.
quiet = np.errstate(all="ignore")

_BITS = {1: formats.uint8, 2: formats.uint16, 4: formats.uint32}
# Elements of a block: with a few temporaries of 4 bytes an element it fits a 1 MiB L2 cache.
BLOCK = 1 << 16
# Rows added up one after the other in a column sum; blocks of rows are then added. Bounds the error by this
# plus M / this.
SUM_BLOCK = 128


def f32(view: ArrayView) -> Float32:
    """Returns the view's values as float32: its own memory where it is float32, else a widened copy."""
    return view.numpy().astype(np.float32, copy=False)


def bits_of(view: ArrayView) -> Array:
    """Returns the elements as integers of their size: what is moved is not looked at."""
    return view.view(_BITS[view.dtype.itemsize]).numpy()


def result(view: ArrayView) -> Float32:
    """Returns a float32 array to compute the view's new values in: its own memory where it is float32, else
    scratch. End with ``store``."""
    return view.numpy() if view.dtype is formats.float32 else np.empty(view.shape, np.float32)


def store(view: ArrayView, values: Array) -> None:
    """Write values into the view, rounded once to nearest even; nothing to do for the array that ``result``
    returned for a float32 view."""
    if view.dtype is formats.float32 and values.dtype == np.float32 and values.ctypes.data == view.ptr:
        return
    np.copyto(view.numpy(), values, casting="unsafe")


def blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Slices over the rows of a matrix, of about ``elements`` elements each."""
    step = max(1, elements // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def column_sum(x: Float32) -> Float32:
    """Sums over the rows of a float32 (M, N) matrix, in a fixed order (see ``SUM_BLOCK``)."""
    rows, columns = x.shape
    whole = rows - rows % SUM_BLOCK
    if not whole:
        return np.add.reduce(x, axis=0)  # type: ignore[no-any-return]
    partial = np.add.reduce(x[:whole].reshape(-1, SUM_BLOCK, columns), axis=1)
    total: Float32 = np.add.reduce(partial, axis=0)
    if whole < rows:
        total += np.add.reduce(x[whole:], axis=0)
    return total


class Sink:
    """Where a kernel's high-precision result goes: ``y``, ``cast``, or both, and its amax.

    The kernel computes into ``values`` (float32) and calls ``finish``, which rounds to the high-precision
    dtype once, and makes amax and cast from what was rounded: so a fused kernel equals its unfused pair bit
    for bit.
    """

    def __init__(self, y: ArrayView | None, shape: Shape, dtype: DType) -> None:
        self.view = arrays.empty(shape, dtype, CPU) if y is None else y
        self.values = result(self.view)

    def finish(self, amax: ArrayView | None, cast: Cast | None) -> None:
        """Store, then take the amax and write the cast where they are wanted."""
        store(self.view, self.values)
        if amax is not None:
            scales.amax(self.view, amax, (max(self.view.shape[0], 1), max(self.view.shape[1], 1)), 0)
        if cast is not None:
            quantize.quantize_transpose(self.view, cast, None, None, 0)
