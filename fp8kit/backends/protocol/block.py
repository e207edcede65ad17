"""The contract of scaling by blocks of 128 elements, casts and the product of such operands, and of products
of codes by blocks of 32 and 16."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView, Shape, Tile
from fp8kit.backends.protocol.gemm import product_flops, product_workspace
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import DType, Format

BLOCK = 128  # elements along the contraction that share a scale in ``block_quantize`` and ``block_gemm``


def block_shapes(rows: int, columns: int, tile: Tile) -> tuple[Shape, Shape]:
    """Shapes of an operand of ``block_gemm`` for a matrix of (rows, columns): of its codes, uint8, and of its
    scale_inv, float32. With a tile (1, 32) or (1, 16): of its codes and of the scales' codes, both uint8."""
    r = -(-rows // 16) * 16
    if tile[1] < BLOCK:
        k = -(-columns // 32) * 32
        return (r, k * tile[1] // 32), (-(-r // 128) * -(-k // (4 * tile[1])) * 512,)
    k = -(-columns // BLOCK) * BLOCK
    scales = (k // BLOCK, r) if tile[0] == 1 else (-(-r // BLOCK), -(-k // (4 * BLOCK)) * 4)
    return (r, k), scales


class Blocks(Protocol):
    """Scaling by blocks of 128, and products of codes by smaller ones."""

    @kernel(writes="q scale_inv q_t scale_inv_t", exact=True)
    def block_quantize(
        self,
        x: ArrayView,
        q: ArrayView | None,
        scale_inv: ArrayView | None,
        q_t: ArrayView | None,
        scale_inv_t: ArrayView | None,
        format: Format,
        tile: Tile,
        power_2: bool,
        epsilon: float,
        stream: int,
    ) -> None:
        """Current scaling by blocks, x and its transpose each as an operand of ``block_gemm``; E4M3 or E5M2.
        x: h (M, N), rows of 1 x 128 or squares of 128 x 128 elements share a scale: ``tile``. q: uint8 (M up
        to 16, N up to 128: the next multiples), q_t: uint8 (N up to 16, M up to 128), either may be None;
        zero codes beyond x. A scale is ``scale_from_amax`` of its tile's amax with fp8_max = format.max and
        value_for_inf = the largest finite value of x's dtype; the code is ``encode(x * scale)``, saturating.

        Tile (1, 128) runs along the contraction: q has a scale for 128 neighbours of a row of x, q_t, cast
        from x as well, one for 128 neighbours of a column. Tile (128, 128): q_t is q transposed. Layouts
        (cuBLASLt's), of an operand (R, Kp): tile (1, 128): float32 (Kp / 128, R); tile (128, 128): float32
        (ceil(R / 128), Kp / 128 up to 4). Every element is written, 1 for a tile outside x."""

    @kernel(writes="q scale_inv q_t scale_inv_t", exact=True)
    def block_quantize_stack(
        self,
        x: ArrayView,
        q: ArrayView | None,
        scale_inv: ArrayView | None,
        q_t: ArrayView | None,
        scale_inv_t: ArrayView | None,
        format: Format,
        tile: Tile,
        power_2: bool,
        epsilon: float,
        stream: int,
    ) -> None:
        """``block_quantize`` of several matrices: x: h (E, M, N), none of them 0; each array that is written
        has a first dimension E too, and there is of it what ``block_quantize`` writes for that matrix."""

    @kernel(writes="out", workspace=product_workspace, flops=product_flops)
    def block_gemm(
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
        bias: ArrayView | None,
        addend: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """FP8 product of operands scaled by blocks: out = (a * its scales) (b * its scales)^T. a: uint8 (Mp,
        Kp), b: uint8 (Np, Kp) with their scale_inv, both as ``block_quantize`` writes them; tiles (1, 128) or
        (128, 128), not both (128, 128). out, bias, addend, formats, alignment as in ``fp8_gemm``; partial
        sums are promoted to float32 at every block (split accumulator). Workspace: ``fp8_gemm_workspace``.

        Both tiles (1, 32) or (1, 16): OCP's MXFP8, and NVFP4 without the scales of its tensors. An engine
        that has no product on such codes raises CannotTake. scale_inv: uint8 (n,), the scales' codes, of E8M0
        with (1, 32), of E4M3 with (1, 16), as ``fp8kit.packing.swizzle`` lays them out. Kp is a multiple of
        32. (1, 32): E4M3 or E5M2; (1, 16): E2M1 for both, two codes in a byte, a: uint8 (Mp, Kp / 2), as
        ``fp8kit.packing.pack`` gives them."""

    @workspace_of("block_gemm")
    def scaled_gemm_workspace(
        self,
        rows: int,
        columns: int,
        contraction: int,
        a_format: Format,
        b_format: Format,
        width: int,
        out: DType,
    ) -> int:
        """Bytes of workspace for a product of codes with tiles (1, ``width``), 32 or 16, into (rows, columns)
        of dtype ``out``, over a ``contraction`` before it is padded; 0 where the engine has no tensor cores
        for it, or does not take it: layers then multiply values."""

    @kernel(writes="q q_scales", exact=True)
    def block_operand(
        self,
        codes: ArrayView,
        scales: ArrayView,
        q: ArrayView,
        q_scales: ArrayView,
        tile: Tile,
        along: int,
        stream: int,
    ) -> None:
        """An operand of ``block_gemm`` with the tile (1, 32) or (1, 16), of what ``cast_blocks`` writes for a
        matrix (M, N). codes: uint8 (M, N), scales: uint8, one code a tile, as the tiles lie. ``tile``: (1,
        32), (32, 32), (1, 16) or (16, 16) with ``along`` 1, the contraction being the matrix's last
        dimension; with 0 it is the first, tiles lie likewise, and the operand is the transpose. q, q_scales:
        of ``block_shapes`` of (M, N), or of (N, M), and (1, tile[1]). Of codes of 4 bits, tile[1] = 16, two
        are in a byte. Codes and scales beyond the matrix are 0."""
