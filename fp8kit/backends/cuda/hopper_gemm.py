"""FP8 products by a kernel of our own, for Hopper (raw_kernels/hopper_gemm.cu): the contract's ``fp8_gemm``
and ``block_gemm`` without cuBLASLt.

A call is one launch, which writes M and N of any size at once; bias and addend are added in float32, and
every element is rounded once. The order of sums does not depend on sizes, tiles or the device: an element is
what ``fk.Accumulation``'s "hopper_fast" or "hopper_split" says, bit for bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import gemm, launch
from fp8kit.backends.cuda._rows import address, ceil_div
from fp8kit.backends.cuda.quantize import format_name
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.cuda.tensor_maps import CODES, NONE, tensor_map
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import Format
from fp8kit.lru import memoized

CAPABILITY = (9, 0)
PROMOTE = 128  # codes of the contraction whose sum is added to a float32 one
_SOURCE, _THREADS, _SHARED = "hopper_gemm.cu", 384, 227 * 1024
_DEPTH = 128  # codes of a row in a tile
_JOB = Packer(4 * CODES + "5P9q16x")  # struct Job, a multiple of 64 bytes
# scales by blocks: the operands' tiles -> the sources' name
SCALES = {
    ((1, 128), (128, 128)): "lines_squares",
    ((128, 128), (1, 128)): "squares_lines",
    ((1, 128), (1, 128)): "lines_lines",
}


class Tiling(NamedTuple):
    """How the result is cut: ``rows`` x ``columns`` a block at a time, ``cluster`` blocks that share what
    they load."""

    rows: int
    columns: int
    cluster: int


class _Plan(NamedTuple):
    """What follows from shapes and types: the kernel, its blocks, the maps without addresses, sizes."""

    kernel: launch.Kernel
    blocks: int
    maps: tuple[bytes, bytes, bytes, bytes]
    sizes: tuple[int, ...]


# What a tile costs, by its elements: to write it, and for each 128 codes of the contraction. Microseconds of
# an H200, of which only the ratios count (benchmarks/NOTES.md).
_COSTS = {32768: (0.9, 0.72), 16384: (0.5, 0.38), 8192: (0.3, 0.27)}
_SMALL = {"whole": (128, 64), "lines_squares": (128, 64)}  # columns of the other tiles that are compiled


def tiling(m: int, n: int, k: int, scales: str, promote: int, multiprocessors: int) -> Tiling:
    """The tiling that a product of m x n elements, k terms each, is made by: the one whose tiles' costs, by
    rounds of all multiprocessors, are the least."""
    large = Tiling(256, 128, 1) if promote else Tiling(128, 256, 1)
    tilings = [large, *(Tiling(128, columns, 1) for columns in _SMALL.get(scales, ()))]

    def cost(one: Tiling) -> float:
        first, each = _COSTS[one.rows * one.columns]
        tiles = ceil_div(m, one.rows) * ceil_div(n, one.columns)
        return ceil_div(tiles, multiprocessors) * (first + ceil_div(k, _DEPTH) * each)

    return min(tilings, key=cost)


@memoized("Hopper products by call")
def _plan(
    index: int,
    m: int,
    n: int,
    k: int,
    a_stride: int,
    b_stride: int,
    out_stride: int,
    a_rows: int,
    b_rows: int,
    left: str | None,
    right: str | None,
    out: str,
    scales: str,
    steps: tuple[int, int],
    promote: int,
    tiles: Tiling | None = None,
) -> _Plan:
    """``a_rows``, ``b_rows``: of the operands, with their padding; ``left``, ``right``, ``out``: the sources'
    names of their types; ``steps``: strides of scales of rows and squares."""
    if launch.capability(index) != CAPABILITY:
        major, minor = launch.capability(index)
        raise CannotTake("hopper_gemm", "device", f"compute capability {major}.{minor}", "9.0")
    if left is None or right is None or left == right == "e5m2":
        raise BackendError("hopper_gemm", "formats", f"{left}, {right}", "E4M3 or E5M2, not E5M2 twice")
    if (a_stride | b_stride | k) % 16:
        raise CannotTake(
            "hopper_gemm", "a, b", f"rows {a_stride} and {b_stride} codes apart", "multiples of 16"
        )
    at = tiles or tiling(m, n, k, scales, promote, launch.sm_count(index))
    tall, wide = ceil_div(m, at.rows), ceil_div(n, at.columns)  # in tiles of clusters
    if at.rows >= at.columns:
        wide = ceil_div(wide, at.cluster)
    else:
        tall = ceil_div(tall, at.cluster)
    clusters = min(tall * wide, launch.sm_count(index) // at.cluster)
    # what clusters work on at once is about square, so that the L2 cache serves most of it
    across = at.rows * (1 if at.rows >= at.columns else at.cluster)
    down = at.columns * (at.cluster if at.rows >= at.columns else 1)
    band = max(1, min(tall, round(math.sqrt(clusters * down / across))))
    lines = [NONE[1], NONE[1]]
    if scales != "whole":
        for i, (kind, rows, box) in enumerate(
            zip(scales.split("_"), (a_rows, b_rows), (at.rows, at.columns), strict=True)
        ):
            if kind == "lines":
                lines[i] = tensor_map("float32", rows, ceil_div(k, _DEPTH), rows, box, 1)
    maps = (
        tensor_map("uint8", k, m, a_stride, _DEPTH, _box(at.rows, at, at.rows >= at.columns), True),
        tensor_map("uint8", k, n, b_stride, _DEPTH, _box(at.columns, at, at.rows < at.columns), True),
        *lines,
    )
    kernel = launch.kernel(
        _SOURCE,
        "hopper_gemm",
        index,
        LEFT=left,
        RIGHT=right,
        T=out,
        SCALES=scales,
        PROMOTE=str(promote),
        BM=str(at.rows),
        BN=str(at.columns),
        CLUSTER=str(at.cluster),
    )
    sizes = m, n, out_stride, ceil_div(k, _DEPTH), *steps, tall, wide, band
    return _Plan(kernel, clusters * at.cluster, maps, sizes)  # type: ignore[arg-type]


def _box(rows: int, tiles: Tiling, shared: bool) -> int:
    """Rows of an operand that are copied at once: a block's share of those that its cluster has in common."""
    return rows // tiles.cluster if shared else rows


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
    tiles: Tiling | None = None,
) -> None:
    (m, n), k = out.shape, a.shape[1]
    if bias is not None and bias.dtype is not out.dtype:
        raise BackendError("hopper_gemm", "bias", bias.dtype.name, out.dtype.name)
    if (a.ptr | b.ptr | a_scale_inv.ptr | b_scale_inv.ptr) % 16:
        raise CannotTake("hopper_gemm", "a, b, scales", "addresses", "multiples of 16")
    plan = _plan(
        out.device.index,
        m,
        n,
        k,
        launch.row_stride(a),
        launch.row_stride(b),
        launch.row_stride(out),
        a.shape[0],
        b.shape[0],
        format_name(a_format),
        format_name(b_format),
        launch.type_name(out.dtype),
        scales,
        steps,
        promote,
        tiles,
    )
    a_map, b_map, a_lines, b_lines = plan.maps
    job = _JOB.pack(
        a.ptr,
        a_map,
        b.ptr,
        b_map,
        a_scale_inv.ptr if any(a_lines) else 0,
        a_lines,
        b_scale_inv.ptr if any(b_lines) else 0,
        b_lines,
        a_scale_inv.ptr,
        b_scale_inv.ptr,
        address(bias),
        address(addend),
        out.ptr,
        *plan.sizes,
    )
    launch.launch(plan.kernel, plan.blocks, _THREADS, (job,), stream, _SHARED)


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
    """See ``backends.protocol``; needs no workspace. CannotTake on devices that are not of compute capability
    9.0, and for rows or addresses that are not multiples of 16 bytes."""
    if not (out.size and a.shape[1]):  # nothing to multiply
        gemm.fp8_gemm(
            a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, bias, addend, False, workspace, stream
        )
        return
    step = int(a_scale_inv.size > 1 or b_scale_inv.size > 1)
    promote = 0 if fast_accumulate else PROMOTE
    operands = a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, bias, addend
    _run(*operands, stream, "whole", (step, step), promote)


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
    operands = a, b, out, a_format, b_format, a_scale_inv, b_scale_inv
    if not (out.size and a.shape[1]):
        gemm.fp8_gemm(*operands, bias, addend, False, workspace, stream)
        return
    scales = SCALES.get((a_tile, b_tile))
    if scales is None:
        raise BackendError("block_gemm", "tiles", f"{a_tile}, {b_tile}", "(1, 128) for at least one operand")
    steps = launch.row_stride(a_scale_inv), launch.row_stride(b_scale_inv)
    _run(*operands, bias, addend, stream, scales, steps, PROMOTE)
