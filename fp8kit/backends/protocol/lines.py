"""The contract of scales of lines: rows or columns of a matrix that are scaled as a whole."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class Lines(Protocol):
    """Scales of lines, made and applied."""

    @kernel(writes="scales", exact=True)
    def line_scales(
        self, x: ArrayView, bias: ArrayView | None, scales: ArrayView, axis: int, power_2: bool, stream: int
    ) -> None:
        """scales[i] = m, or with ``power_2`` 2^floor(log2 m), held between 2^-100 and 2^100, with m the
        largest |x + bias| of row i (axis 0) or of column i (axis 1), NaN left out; 1 where m is 0 or the line
        is empty. x: h (M, N), rows may be strided; bias: h (N,), added in float32; scales: float32 (M,) or
        (N,)."""

    @kernel(writes="out", exact=True)
    def scale_lines(
        self,
        x: ArrayView,
        scales: ArrayView | None,
        out: ArrayView,
        axis: int,
        factor: float,
        divide: bool,
        stream: int,
    ) -> None:
        """out = (x float32(factor)) scales[i], or with ``divide`` (x float32(factor)) / scales[i]: two
        float32 operations and one rounding to h; i is the row (axis 0) or the column (axis 1). x, out: h (M,
        N); out may be x's memory. scales: float32 (M,) or (N,), or None: 1."""
