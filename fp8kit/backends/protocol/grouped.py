"""The contract of grouped products: rows in groups, each times a matrix of its own, the groups' sizes on the
device."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import Format

GroupedLayout = Literal["nt", "nn", "tn"]
GroupedAlong = Literal["rows", "terms"]


def _flops(a: Any) -> float:
    """A multiplication and an addition for each term, every row in one group."""
    out, inner = (a.b.shape[1], a.a.shape[1]) if a.layout == "tn" else (a.out.shape[1], a.a.shape[1])
    return float(2 * a.a.shape[0] * out * inner)


def _workspace(kernels: Any, a: Any) -> int:
    """Bytes of a grouped product's workspace."""
    return int(kernels.grouped_gemm_workspace(a.sizes.size))


def _fp8_flops(a: Any) -> float:
    """A multiplication and an addition for each term, every row, or term, in one group."""
    return float(2 * a.out.shape[-2] * a.out.shape[-1] * a.a.shape[1])


class GroupedProducts(Protocol):
    """Products of groups of rows. Group e holds ``sizes[e]`` of them, one group after the other from row 0;
    with ``slots`` it begins at row e * slots. sizes: int32 (E,), read on the device, more than once:
    nothing may write them while the product runs. What they claim beyond the rows, or the slots, that there
    are does not count, a negative size is 0."""

    @kernel(writes="out", ordered=True, workspace=_workspace, flops=_flops)
    def grouped_gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        sizes: ArrayView,
        layout: GroupedLayout,
        slots: int,
        bias: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """In high precision: a, b, out: h, all the same. Groups as this class says.

        * "nt": out[r] = a[r] b[e]^T: a (M, K), b (E, N, K), out (M, N), for the rows r of group e; rows of no
          group become 0. "nn": likewise with b (E, K, N).
        * "tn": out[e] = a[rows]^T b[rows] over the rows of group e: a (M, K), b (M, N), out (E, K, N).

        bias: h (E, N) or None, added to the rows of a group; not with "tn". Sums are made in float32.
        Workspace: uint8, ``grouped_gemm_workspace``."""

    @workspace_of("grouped_gemm", "grouped_fp8_gemm")
    def grouped_gemm_workspace(self, groups: int) -> int:
        """Bytes of workspace that ``grouped_gemm`` and ``grouped_fp8_gemm`` want for so many groups."""

    @kernel(writes="out", ordered=True, workspace=_workspace, flops=_fp8_flops)
    def grouped_fp8_gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        sizes: ArrayView,
        along: GroupedAlong,
        slots: int,
        bias: ArrayView | None,
        a_format: Format,
        b_format: Format,
        a_scale_inv: ArrayView,
        b_scale_inv: ArrayView,
        a_tile: Tile,
        b_tile: Tile,
        fast_accumulate: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Of codes, each product as ``fp8_gemm`` or ``block_gemm`` makes it: rows of both operands run along
        the contraction. Groups as this class says.

        * along "rows": out[r] = a[r] b[e]^T for the rows r of group e: a uint8 (Mp, Kp), b (E, Np, Kp), out h
          (M, N); rows of no group become 0.
        * along "terms": out[e] = a[:, terms] b[:, terms]^T: the groups' rows are a's and b's columns: a uint8
          (Kp, Mp), b (Np, Mp), out h (E, K, N). Codes of other groups count for nothing, NaN among them.

        Mp >= M, Np >= N, Kp >= K; what lies beyond is not computed into out. Formats: E4M3 or E5M2 each, not
        both E5M2. Scales by the operand's tile, float32, for each matrix of b apart: (0, 0) one, (1, 0) one
        for each of its rows, padding included, (1, 128) and (128, 128) as ``block_quantize`` writes them.
        Blocks along the terms of groups are counted from the first term of all, and may hold terms of two.
        bias: out's dtype (E, N) or None, added to the rows of a group; not along "terms". fast_accumulate: as
        in ``fp8_gemm``; without effect on scales of blocks. Workspace: uint8, ``grouped_gemm_workspace``."""

    @kernel(updates="amax", exact=True)
    def group_amax(
        self, x: ArrayView, amax: ArrayView, sizes: ArrayView, tile: Tile, slots: int, stream: int
    ) -> None:
        """``amax`` over the rows of groups alone. x: h (M, N); tile: (M, N) for all of them, amax float32 of
        one element, or (M, 1) for each column, of N."""

    @kernel(writes="q scale_inv q_t scale_inv_t", exact=True)
    def block_quantize_groups(
        self,
        x: ArrayView,
        q: ArrayView | None,
        scale_inv: ArrayView | None,
        q_t: ArrayView | None,
        scale_inv_t: ArrayView | None,
        sizes: ArrayView,
        slots: int,
        format: Format,
        tile: Tile,
        power_2: bool,
        epsilon: float,
        stream: int,
    ) -> None:
        """``block_quantize`` of x: h (M, N), in which rows of no group count as zeros."""
