"""The contract's scaling by blocks of 128: the cast of both orientations in one launch, and the block-scaled
product: cuBLASLt's on Hopper, which alone it takes these scales on (compute capability 9.0, cuBLAS 12.9 and
later), elsewhere that of ``mma_gemm``.
"""

from __future__ import annotations

from typing import Any

from fp8kit import scaled_products
from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.cuda import gemm, launch, mma_gemm
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.cuda.cublaslt import Scaling
from fp8kit.backends.cuda.quantize import format_name
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import DType, Format

CAPABILITY = (9, 0)  # compute capability, the only one on which cuBLASLt has the product with float32 scales
_BLOCK = 128
_THREADS = 256
_SCALINGS: dict[tuple[int, int], Scaling] = {
    (1, 128): "block_1x128",
    (128, 128): "block_128x128",
    (1, 32): "mx",
    (1, 16): "nvfp4",
}


def block_quantize(
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
    """See ``backends.protocol``."""
    how = format, tile, power_2, epsilon
    cast_squares("block_quantize", x, (q, scale_inv, q_t, scale_inv_t), 1, (), how, stream)


def block_quantize_stack(
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
    """See ``backends.protocol``."""
    count, how = x.shape[0], (format, tile, power_2, epsilon)
    scales = tuple(0 if view is None else view.size // count for view in (scale_inv, scale_inv_t))
    cast_squares("block_quantize_stack", x, (q, scale_inv, q_t, scale_inv_t), count, scales, how, stream)


def cast_squares(
    operation: str,
    x: ArrayView,
    made: tuple[ArrayView | None, ...],
    count: int,
    scales: tuple[int, ...],
    how: tuple[Format, tuple[int, int], bool, float],
    stream: int,
    groups: tuple[int, ...] = (),
) -> None:
    """Launch the kernel of ``operation`` for ``count`` matrices, of which each has so many ``scales``.
    ``made``: what is written, in the operation's order; ``how``: its format, tile, power_2 and epsilon;
    ``groups``: what it is told of groups, at the end."""
    (rows, columns), (format, tile, power_2, epsilon) = x.shape[-2:], how
    name = format_name(format)
    if name is None:
        raise BackendError(operation, "format", format, "E4M3 or E5M2")
    args = (
        x.ptr,
        *map(address, made),
        rows,
        columns,
        *(0 if codes is None else codes.shape[-2] for codes in (made[0], made[2])),
        *scales,
        int(_SCALINGS[tile] == "block_128x128"),
        format.max,
        epsilon,
        x.dtype.max,
        int(power_2),
        *groups,
    )
    function = kernel("block.cu", operation, x, FORMAT=name)
    launch.launch(
        function, count * ceil_div(rows, _BLOCK) * ceil_div(columns, _BLOCK), _THREADS, args, stream
    )


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
    timed: bool = False,
) -> None:
    """See ``backends.protocol``. BackendError when cuBLASLt is missing or refuses, for two operands scaled by
    squares as well. Products of MX and NVFP4 codes (from CUDA 12.8 on) have not been run: no such chip was at
    hand."""
    operands, scales = (a, b, out, a_format, b_format), (a_scale_inv, b_scale_inv)
    capability, scaled = launch.capability(out.device.index), a_tile[1] < _BLOCK or b_tile[1] < _BLOCK
    if scaled and (capability < scaled_products.CAPABILITY or a_tile != b_tile):
        got = f"{a_tile}, {b_tile} on compute capability {'.'.join(map(str, capability))}"
        raise CannotTake("block_gemm", "tiles", got, "(1, 32) or (1, 16) twice, from 10.0 on")
    if not scaled and capability != CAPABILITY:
        mma_gemm.block_gemm(*operands, *scales, a_tile, b_tile, bias, addend, workspace, stream)
        return
    scaling = _SCALINGS[a_tile], _SCALINGS[b_tile]
    gemm.fp8_gemm(*operands, *scales, bias, addend, False, workspace, stream, timed, scaling)


def scaled_gemm_workspace(
    rows: int, columns: int, contraction: int, a_format: Format, b_format: Format, width: int, out: DType
) -> int:
    """See ``backends.protocol``. Of the current device: what cuBLASLt has an algorithm for."""
    index = launch.runtime().getDevice()
    if launch.capability(index) < scaled_products.CAPABILITY:
        return 0
    mode = _SCALINGS[1, width]
    return gemm.scaled_workspace(index, (rows, columns, contraction), (a_format, b_format), out, (mode, mode))


def block_operand(
    codes: ArrayView,
    scales: ArrayView,
    q: ArrayView,
    q_scales: ArrayView,
    tile: Tile,
    along: int,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    jobs, index = q.size // 16 + q_scales.size, codes.device.index
    if jobs:
        function = launch.kernel("block_operand.cu", "block_operand", index, WIDTH=str(tile[1]))
        pointers = codes.ptr, scales.ptr, q.ptr, q_scales.ptr
        arguments = *pointers, *codes.shape, *q.shape, q_scales.size, tile[0], along
        launch.launch(function, launch.blocks(jobs, _THREADS, index), _THREADS, arguments, stream)


def sums(call: Any) -> Accumulation | None:
    """See ``gemm.sums``."""
    return gemm.sums(call, (_SCALINGS[call.a_tile], _SCALINGS[call.b_tile]))


block_gemm._sums = sums  # type: ignore[attr-defined]
