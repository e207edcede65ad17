"""The contract of the product that sums as a chip's tensor cores do, bit for bit."""

from __future__ import annotations

from typing import Protocol

from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol.gemm import product_flops
from fp8kit.backends.protocol.spec import kernel
from fp8kit.formats import Format


class ModelledProducts(Protocol):
    """Products with another chip's arithmetic."""

    @kernel(writes="out", flops=product_flops, exact=True)
    def model_gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        a_format: Format,
        b_format: Format,
        a_scale_inv: ArrayView,
        b_scale_inv: ArrayView,
        a_tile: Tile,
        b_tile: Tile,
        accumulation: Accumulation,
        bias: ArrayView | None,
        addend: ArrayView | None,
        stream: int,
    ) -> None:
        """out = (a * its scales) (b * its scales)^T, summed as ``accumulation`` says (see there).

        a: uint8 (M or more, K), b: uint8 (N or more, K), codes of formats with at most 5 exponent bits; out:
        h (M, N). scale_inv: float32, a matrix of one a tile (rows, columns) of the operand, or larger, may
        be strided; a tile of (0, 0) is all of it, (r, 0) whole rows. bias: out's dtype (N,) or None, addend:
        out's shape and dtype, out itself among them, or None: added to the float32 result in this order.

        Tensors' scales: out = sum * (a's scale * b's), in float32, rounded to h. Rows' scales on one side or
        both: out = (sum * b's) * a's. A tile with columns on one side or both (the same number, then): each
        block of K is summed by itself, ``promote`` or not, and added in float32 in ascending order, total =
        fma(sum, a's * b's, total), or, where both tiles are of one row, fma(sum * a's, b's, total). These are
        cuBLASLt's orders on Hopper. Exact sums of blocks: total in float64 instead, rounded to float32 once.

        An ``accumulation`` with a ``group`` takes both operands in tiles with columns, whose number it
        divides; of a scale_inv, at least 0, the first four bits count (E8M0 and E4M3 have no others). NaN
        among the scales of a row makes its results NaN. Formats of a ``group`` of more than 1 have at most 3
        exponent bits. The sum of the instructions is the result."""
