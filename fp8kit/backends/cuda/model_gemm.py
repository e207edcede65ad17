"""The contract's product with another chip's arithmetic."""

from __future__ import annotations

from fp8kit import accumulation as models
from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.cuda.quantize import narrow
from fp8kit.backends.cuda.structures import Packer
from fp8kit.formats import Format

_TILE, _THREADS = 64, 256
_TENSORS, _ROWS, _BLOCKS_OF_ROWS, _BLOCKS = range(4)  # the order of scales (model_gemm.cu)
_JOB = Packer("4P17q")  # of model_gemm.cu, behind the formats
_NARROW_BITS = 19  # fraction bits up to which sums of 256 products fit into 32 bits


def model_gemm(
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
    """See ``backends.protocol``."""
    if not out.size:
        return
    (m, n), k = out.shape, a.shape[1]
    widths = [tile[1] for tile in (a_tile, b_tile) if tile[1]]
    block = widths[0] if widths else max(k, 1)
    bits = 0 if accumulation.fraction_bits is None else accumulation.fraction_bits
    job = (
        narrow(a_format, True)
        + narrow(b_format, True)
        + _JOB.pack(
            a_scale_inv.ptr,
            b_scale_inv.ptr,
            address(bias),
            address(addend),
            m,
            n,
            k,
            a_tile[0] or m,
            b_tile[0] or n,
            a_scale_inv.strides[0],
            b_scale_inv.strides[0],
            a_scale_inv.strides[1] if a_tile[1] else 0,
            b_scale_inv.strides[1] if b_tile[1] else 0,
            block,
            _order(a_tile, b_tile),
            bits,
            a_format.mantissa_bits + b_format.mantissa_bits,
            accumulation.chunk,
            accumulation.promote or (max(k, 1) if accumulation.group else block),
            models.lowest_bit(a_format, b_format),
            accumulation.group,
        )
    )
    function, grid = "model_gemm", ceil_div(m, _TILE) * ceil_div(n, _TILE)
    if accumulation.group:
        function, grid = "model_gemm_scaled", launch.blocks(m * n, _THREADS, out.device.index)
    elif accumulation.exact:
        function, grid = "model_gemm_exact", launch.blocks(m * n, _THREADS, out.device.index)
    how = kernel("model_gemm.cu", function, out, WIDE=str(int(bits > _NARROW_BITS)))
    launch.launch(how, grid, _THREADS, (a.ptr, b.ptr, out.ptr, job), stream)


def _order(a_tile: Tile, b_tile: Tile) -> int:
    """Returns the order in which the kernel multiplies the scales."""
    if a_tile[1] or b_tile[1]:
        return _BLOCKS_OF_ROWS if a_tile[0] == b_tile[0] == 1 else _BLOCKS
    return _ROWS if a_tile[0] or b_tile[0] else _TENSORS
