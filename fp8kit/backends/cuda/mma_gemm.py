"""FP8 products by a kernel of our own, for any chip with FP8 tensor cores (raw_kernels/mma_gemm.cu): the
contract's ``fp8_gemm`` and ``block_gemm`` without cuBLASLt, which has scales of blocks on Hopper alone.

A call is one launch, which writes M and N of any size at once; bias and addend are added in float32, and
every element is rounded once. The order of an element's sums does not depend on sizes or tiles.
"""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import gemm, launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.cuda.hopper_gemm import PROMOTE, SCALES
from fp8kit.backends.cuda.quantize import format_name
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import Format

_THREADS, _STAGES, _COLUMNS, _DEPTH = 256, 3, 128, 128  # of mma_gemm.cu
_TILE_ROWS = (128, 32)
_JOB = Packer("7P8q")  # struct Job


def tile_rows(m: int, n: int, multiprocessors: int) -> int:
    """Rows of the tiles that an m x n result is made in: the fewer ones where tiles of the others would
    leave more than half of the multiprocessors without work."""
    most, fewer = _TILE_ROWS
    tiles = ceil_div(m, most) * ceil_div(n, _COLUMNS)
    return most if 2 * tiles >= multiprocessors else fewer


def _run(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    bias: ArrayView | None,
    addend: ArrayView | None,
    stream: int,
    scales: str,
    steps: tuple[int, int],
    promote: int,
) -> None:
    """``steps``: strides of the scales of lines and squares."""
    (m, n), k = out.shape, a.shape[1]
    left, right = format_name(a_format), format_name(b_format)
    if left is None or right is None or left == right == "e5m2":
        raise BackendError("mma_gemm", "formats", f"{a_format}, {b_format}", "E4M3 or E5M2, not E5M2 twice")
    if bias is not None and bias.dtype is not out.dtype:
        raise BackendError("mma_gemm", "bias", bias.dtype.name, out.dtype.name)
    a_stride, b_stride = launch.row_stride(a), launch.row_stride(b)
    if (a.ptr | b.ptr | a_stride | b_stride | k) % 16:
        raise CannotTake("mma_gemm", "a, b", "addresses of rows", "multiples of 16, also of codes in a row")
    rows = tile_rows(m, n, launch.sm_count(out.device.index))
    defines = {"LEFT": left, "RIGHT": right, "SCALES": scales, "PROMOTE": str(promote), "BM": str(rows)}
    job = _JOB.pack(
        a.ptr,
        b.ptr,
        a_scale_inv.ptr,
        b_scale_inv.ptr,
        address(bias),
        address(addend),
        out.ptr,
        m,
        n,
        k,
        a_stride,
        b_stride,
        launch.row_stride(out),
        *steps,
    )
    tiles = ceil_div(m, rows) * ceil_div(n, _COLUMNS)
    shared = _STAGES * (rows + _COLUMNS) * _DEPTH
    launch.launch(kernel("mma_gemm.cu", "mma_gemm", out, **defines), tiles, _THREADS, (job,), stream, shared)


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
    """See ``backends.protocol``; needs no workspace. CannotTake for rows or addresses that are not multiples
    of 16 bytes."""
    operands = a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, bias, addend
    if not (out.size and a.shape[1]):  # nothing to multiply
        gemm.fp8_gemm(*operands, False, workspace, stream)
        return
    step = int(a_scale_inv.size > 1 or b_scale_inv.size > 1)
    _run(*operands, stream, "whole", (step, step), 0 if fast_accumulate else PROMOTE)


def block_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    a_tile: tuple[int, int],
    b_tile: tuple[int, int],
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
        raise BackendError("block_gemm", "tiles", f"{a_tile}, {b_tile}", "(1, 128) for at least one operand")
    steps = launch.row_stride(a_scale_inv), launch.row_stride(b_scale_inv)
    _run(*operands, stream, scales, steps, PROMOTE)
