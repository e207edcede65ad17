"""The contract of grouped products: rows in groups, each times a matrix of its own, the groups' sizes on the
device."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel
from fp8kit.formats import Format

GroupedLayout = Literal["nt", "nn", "tn"]


def _flops(a: Any) -> float:
    """A multiplication and an addition for each term, every row in one group."""
    out, inner = (a.b.shape[1], a.a.shape[1]) if a.layout == "tn" else (a.out.shape[1], a.a.shape[1])
    return float(2 * a.a.shape[0] * out * inner)


class GroupedProducts(Protocol):
    """Products of groups of rows."""

    @kernel(writes="out", ordered=True, flops=_flops)
    def grouped_gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        sizes: ArrayView,
        layout: GroupedLayout,
        slots: int,
        bias: ArrayView | None,
        a_format: Format | None,
        b_format: Format | None,
        a_scale_inv: ArrayView | None,
        b_scale_inv: ArrayView | None,
        a_tile: tuple[int, int],
        b_tile: tuple[int, int],
        stream: int,
    ) -> None:
        """Group e holds ``sizes[e]`` rows of a, one group after the other from row 0; with ``slots`` it
        begins at row e * slots. sizes: int32 (E,), read on the device; what they claim beyond the rows, or
        the slots, that there are does not count, a negative size is 0.

        * "nt": out[r] = a[r] b[e]^T: a (M, K), b (E, N, K), out (M, N), for the rows r of group e; rows of no
          group become 0. "nn": likewise with b (E, K, N).
        * "tn": out[e] = a[rows]^T b[rows] over the rows of group e: a (M, K), b (M, N), out (E, K, N).

        a, b: h, both the same, out of that dtype; then formats and scales are None, tiles (0, 0). Or uint8
        codes, E4M3 or E5M2 each but not E5M2 twice, out h, with a scale_inv, float32, for each ``tile``
        (rows, columns) of a, or of each matrix of b: as ``quantize`` has them. 0 in a tile is the whole
        extent; along the contraction a tile has 128 elements or all. bias: out's dtype (E, N) or None, added
        to the rows of a group; not with "tn". Sums are made in float32, those of codes anew every 128
        elements of the contraction, then scaled and added."""
