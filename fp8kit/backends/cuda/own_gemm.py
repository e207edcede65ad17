"""What FP8 products by kernels of our own have in common (``hopper_gemm``, ``mma_gemm``): the contract's
``fp8_gemm`` and ``block_gemm``, made of a function that runs one product.

A call is one launch, which writes M and N of any size at once; bias and addend are added in float32, and
every element is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.cuda import gemm, launch
from fp8kit.backends.cuda.quantize import format_name
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import Format

PROMOTE = 128  # codes of the contraction whose sum is added to a float32 one
# scales by blocks: the operands' tiles -> the sources' name
SCALES = {
    ((1, 128), (128, 128)): "lines_squares",
    ((128, 128), (1, 128)): "squares_lines",
    ((1, 128), (1, 128)): "lines_lines",
}


class Product(NamedTuple):
    """A product that is not empty: the contract's arrays, the sources' names of the formats, and the sources'
    SCALES and PROMOTE. ``steps``: strides of the scales of a and b, by rows or by blocks."""

    a: ArrayView
    b: ArrayView
    out: ArrayView
    left: str
    right: str
    a_scale_inv: ArrayView
    b_scale_inv: ArrayView
    bias: ArrayView | None
    addend: ArrayView | None
    scales: str
    steps: tuple[int, int]
    promote: int


def contract(
    name: str, run: Callable[[Product, int], None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """``fp8_gemm`` and ``block_gemm`` by ``run``, which is given a product and a stream. BackendError, with
    the kernel's ``name``, for a problem that no such kernel takes."""

    def fp8_gemm(
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        a_format: Format,
        b_format: Format,
        a_scale_inv: ArrayView,
        b_scale_inv: ArrayView,
        bias: ArrayView | None,
        addend: ArrayView | None,
        fast_accumulate: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """See ``backends.protocol``; needs no workspace. CannotTake for rows or addresses that are not
        multiples of 16 bytes."""
        operands = a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, bias, addend
        if not (out.size and a.shape[1]):  # nothing to multiply
            gemm.fp8_gemm(*operands, False, workspace, stream)
            return
        step = int(a_scale_inv.size > 1 or b_scale_inv.size > 1)
        left, right = names(a_format, b_format, bias, out)
        scales, steps, promote = "whole", (step, step), 0 if fast_accumulate else PROMOTE
        whole = Product(
            a, b, out, left, right, a_scale_inv, b_scale_inv, bias, addend, scales, steps, promote
        )
        run(whole, stream)

    def block_gemm(
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
        """See ``backends.protocol``; needs no workspace. Refusals as ``fp8_gemm``'s."""
        operands = a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, bias, addend
        if not (out.size and a.shape[1]):
            gemm.fp8_gemm(*operands, False, workspace, stream)
            return
        scales = SCALES.get((a_tile, b_tile))
        if scales is None:
            kind = BackendError if a_tile[1] == b_tile[1] == PROMOTE else CannotTake
            wanted = "(1, 128) for at least one operand"
            raise kind("block_gemm", "tiles", f"{a_tile}, {b_tile}", wanted)
        steps = launch.row_stride(a_scale_inv), launch.row_stride(b_scale_inv)
        left, right = names(a_format, b_format, bias, out)
        blocks = Product(
            a, b, out, left, right, a_scale_inv, b_scale_inv, bias, addend, scales, steps, PROMOTE
        )
        run(blocks, stream)

    def names(a: Format, b: Format, bias: ArrayView | None, out: ArrayView) -> tuple[str, str]:
        """Returns the sources' names of the formats, where such a kernel takes them and the bias."""
        left, right = format_name(a), format_name(b)
        if left is None or right is None or left == right == "e5m2":
            raise BackendError(name, "formats", f"{a}, {b}", "E4M3 or E5M2, not E5M2 twice")
        if bias is not None and bias.dtype is not out.dtype:
            raise BackendError(name, "bias", bias.dtype.name, out.dtype.name)
        return left, right

    return fp8_gemm, block_gemm
