"""The contract of statistics: one pass over a tensor, its blocks, its cast, or it and another."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol.cast import Rule
from fp8kit.backends.protocol.spec import kernel, measured, workspace_of
from fp8kit.formats import Format

# Places in ``counts`` and what their lengths are. Exponents: 256 of float32, then the zeros.
EXPONENTS = 257
TENSOR_COUNTS = EXPONENTS + 3  # NaN, Inf, -Inf
CODE_COUNTS = 5  # elements, values that are not 0, codes that are not 0, saturated, overflowed
CAST_COUNTS = EXPONENTS + CODE_COUNTS
BRIEF_COUNTS = 4  # elements, NaN, Inf, -Inf
# how far beyond the largest value that a scale allows a value may lie before it has overflowed: the roundings
# of the scale and of its inverse
OVERFLOW_SLACK = 2.0**-22


def tile_within(tile: Tile, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile that is no larger than its matrix, at least 1."""
    return max(min(tile[0], rows), 1), max(min(tile[1], columns), 1)


class Statistics(Protocol):
    """Statistics. Counts are int64 and added to what is there; sums are float64, in a fixed order. x is h (M,
    N), rows may be strided. Exponents are those of float32: bin e, 0 to 255, counts the numbers with the
    exponent field e, so 2^(e-127) <= |x| < 2^(e-126), 0 the subnormal ones, 255 Inf and NaN; bin 256 the
    zeros, -0 too."""

    @kernel(writes="moments", updates="counts", ordered=True, workspace=measured("statistics_workspace", "x"))
    def tensor_statistics(
        self, x: ArrayView, counts: ArrayView, moments: ArrayView, workspace: ArrayView | None, stream: int
    ) -> None:
        """counts: int64 [260], the exponents, then NaN, Inf and -Inf. moments: float64 [8], of the finite
        values alone: least, largest, least magnitude that is not 0, sum |x|, sum x^2, sum x^4, mean, sum (x -
        mean)^2. Of none they are Inf, -Inf, Inf and zeros. The last two lose nothing where the mean is large:
        they come of differences from a value among them."""

    @kernel(updates="ratios", ordered=True)
    def tile_statistics(self, x: ArrayView, ratios: ArrayView, tile: Tile, stream: int) -> None:
        """ratios: float64 [2], max-accumulated over tiles of (rows, columns), smaller at the end, of their
        finite values: n amax^2 / sum x^2, the square of amax over the root of the mean square; amax over the
        least magnitude that is not 0. Tiles without any give nothing."""

    @kernel(writes="sums", updates="counts", ordered=True, workspace=measured("statistics_workspace", "x"))
    def cast_statistics(
        self,
        x: ArrayView,
        q: ArrayView,
        scale_inv: ArrayView,
        counts: ArrayView,
        sums: ArrayView,
        format: Format,
        tile: Tile,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """x against its codes q, uint8 (M, N), rows may be strided. scale_inv: float32, one element a tile of
        (rows, columns), row-major. v = decode(q) * scale_inv in float32.

        counts: int64 [262], the exponents of the scale_invs, then elements: all; with x not 0; with a code
        that is not 0 (-0 is 0, and so is every code where scale_inv is 0); with a code of +- the format's
        largest value; with |x| (1 - 2^-22) > largest value * scale_inv > 0, of finite x. sums: float64 [4],
        sum (x - v)^2 and sum x^2, as IEEE 754 has them with NaN and Inf; the least and the largest scale_inv,
        NaN ignored, Inf and -Inf where there is none."""

    @kernel(writes="sums", ordered=True, workspace=measured("statistics_workspace", "x"))
    def pair_statistics(
        self, x: ArrayView, twin: ArrayView, sums: ArrayView, workspace: ArrayView | None, stream: int
    ) -> None:
        """x against another of its shape, twin: h (M, N), rows may be strided, of any dtype. sums: float64
        [4], sum x twin, sum x^2, sum twin^2, sum (x - twin)^2, as IEEE 754 has them with NaN and Inf."""

    @kernel(
        writes="counts moments codes scale_inv", ordered=True, workspace=measured("statistics_workspace", "x")
    )
    def brief_statistics(
        self,
        x: ArrayView,
        counts: ArrayView | None,
        moments: ArrayView | None,
        codes: ArrayView | None,
        scale_inv: ArrayView | None,
        scale: ArrayView | None,
        amax: ArrayView | None,
        rule: Rule | None,
        format: Format | None,
        deep: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """What ``tensor_statistics`` and ``cast_statistics`` find of x but the histograms, in one reading of
        it, which makes no codes.

        counts: int64 [4], elements, NaN, Inf, -Inf; moments: float64 [8], as there; both or neither. Unless
        ``deep``, the least magnitude is Inf and sum x^4 is 0. Eight numbers may be added in float32.

        codes: int64 [5], the last five counts of x's cast by one scale, nearest even, saturating; scale_inv:
        float64 [2], its inverse twice, the least and the largest, Inf and -Inf where x is empty; both or
        neither. format: E4M3 or E5M2. ``scale``: float32 [1]; or ``rule``, which makes it of ``amax``,
        float32 [1], the tensor's (``Cast``)."""

    @workspace_of("tensor_statistics", "cast_statistics", "pair_statistics", "brief_statistics")
    def statistics_workspace(self, rows: int, columns: int) -> int:
        """Bytes of workspace of any of these for x (rows, columns)."""
