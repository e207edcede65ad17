"""Grouped products whose sizes lie on the device: one kernel for every layout and granularity of scales.

It is written to be read and to be right on every chip, not to be the fastest: on Hopper codes are multiplied
by ``hopper_grouped``, and groups whose sizes the host knows one by one by cuBLASLt (``ops.grouped_linear``).
"""

from __future__ import annotations

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.cuda import block, launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.cuda.quantize import format_name
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.protocol.grouped import GroupedAlong, GroupedLayout
from fp8kit.errors import BackendError
from fp8kit.formats import Format

COUNTER = 16  # bytes of workspace, of which ``hopper_grouped`` counts tiles in the first four
_TILE = 64  # rows and columns of a block's part of the result: raw_kernels/grouped.cu
_GROUPED = Packer("2P8q2P8q6q")  # struct Grouped there


def _matrix(view: ArrayView, scale_inv: ArrayView | None, tile: Tile, transposed: bool) -> tuple[int, ...]:
    """struct Matrix: (rows, columns), or (E, rows, columns), whose contraction is its last dimension, or, if
    ``transposed``, the one before."""
    rows, columns = view.shape[-2:]
    step_i, step_k = (1, columns) if transposed else (columns, 1)
    # tiles of a scale, and how far scales lie apart: along i, along k, from matrix to matrix
    tile_i, tile_k, scale_i, scale_k, scale_e = max(rows, 1), max(columns, 1), 0, 0, 1
    if tile == (1, 0):
        tile_i, scale_i, scale_e = 1, 1, rows
    elif scale_inv is not None and tile != (0, 0):
        down, across = scale_inv.shape[-2:]
        tile_i, tile_k, scale_e = tile[0], tile[1], down * across
        scale_i, scale_k = (1, across) if tile[0] == 1 else (across, 1)
    steps = step_i, step_k, rows * columns
    return (view.ptr, address(scale_inv), *steps, tile_i, tile_k, scale_i, scale_k, scale_e)


def _run(
    a: tuple[ArrayView, ArrayView | None, tuple[int, int], bool],
    b: tuple[ArrayView, ArrayView | None, tuple[int, int], bool],
    names: tuple[str, str],
    out: ArrayView,
    sizes: ArrayView,
    slots: int,
    bias: ArrayView | None,
    by_depth: bool,
    stream: int,
) -> None:
    """``a`` and ``b``: what ``_matrix`` takes; ``names``: the source's names of their types."""
    groups, (rows, columns) = sizes.size, out.shape[-2:]
    depth = a[0].shape[-2] if a[3] else a[0].shape[-1]
    down = groups * ceil_div(rows, _TILE) if by_depth else ceil_div(rows, _TILE) + groups + 1
    function = launch.kernel(
        "grouped.cu",
        "grouped_gemm",
        out.device.index,
        LEFT=names[0],
        RIGHT=names[1],
        T=launch.type_name(out.dtype),
    )
    problem = _GROUPED.pack(*_matrix(*a), *_matrix(*b), groups, rows, columns, depth, slots, int(by_depth))
    grid = down * ceil_div(columns, _TILE)
    launch.launch(function, grid, 128, (sizes.ptr, address(bias), out.ptr, problem), stream)


def grouped_gemm_workspace(groups: int) -> int:
    """See ``backends.protocol``."""
    return COUNTER


def grouped_gemm(
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
    """See ``backends.protocol``."""
    by_depth, name = layout == "tn", launch.type_name(out.dtype)
    left, right = (a, None, (0, 0), by_depth), (b, None, (0, 0), layout != "nt")
    _run(left, right, (name, name), out, sizes, slots, bias, by_depth, stream)


def grouped_fp8_gemm(
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
    """See ``backends.protocol``; sums are float32's, whatever ``fast_accumulate`` says. BackendError for
    formats that it does not take."""
    names = format_name(a_format), format_name(b_format)
    if names[0] is None or names[1] is None or names[0] == names[1] == "e5m2":
        wanted = "E4M3 or E5M2, not E5M2 twice"
        raise BackendError("grouped_fp8_gemm", "formats", f"{a_format}, {b_format}", wanted)
    left, right = (a, a_scale_inv, a_tile, False), (b, b_scale_inv, b_tile, False)
    _run(left, right, (names[0], names[1]), out, sizes, slots, bias, along == "terms", stream)


def group_amax(x: ArrayView, amax: ArrayView, sizes: ArrayView, tile: Tile, slots: int, stream: int) -> None:
    """See ``backends.protocol``."""
    rows, columns = x.shape
    if not x.size:
        return
    across = 1
    while across < 256 and across * 8 < columns:
        across *= 2
    chunk = 16 * 256 // across  # rows of a block, of which each thread takes 16
    grid = ceil_div(rows, chunk) * ceil_div(columns, 8 * across)
    by_column = int(tile[1] == 1 < columns)
    numbers = sizes.size, rows, columns, slots, across, chunk, by_column
    function = kernel("amax.cu", "amax_groups", x)
    launch.launch(function, grid, 256, (x.ptr, amax.ptr, sizes.ptr, *numbers), stream)


def block_quantize_groups(
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
    """See ``backends.protocol``."""
    made, groups = (q, scale_inv, q_t, scale_inv_t), (sizes.ptr, sizes.size, slots)
    how = format, tile, power_2, epsilon
    block.cast_squares("block_quantize_groups", x, made, 1, (), how, stream, groups)
