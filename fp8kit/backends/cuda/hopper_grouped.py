"""FP8 products of groups on Hopper, whose sizes the device alone knows: the kernel of ``hopper_gemm``, one
launch for all groups, and where these are rows a memset of the counter of tiles before it.

Each group's product has the bits of a product of its own: a result's row depends on no other row, and an
element is what ``fk.Accumulation``'s "hopper_fast" or "hopper_split" says.
"""

from __future__ import annotations

from typing import Any

from fp8kit import arrays
from fp8kit.accumulation import Accumulation, on_chip
from fp8kit.arrays import ArrayView, Shape, Tile
from fp8kit.backends.cuda import grouped, launch
from fp8kit.backends.cuda._rows import ceil_div
from fp8kit.backends.cuda.grouped import COUNTER
from fp8kit.backends.cuda.hopper_gemm import (
    ARCHS,
    CAPABILITY,
    DEPTH,
    KINDS,
    SHARED,
    THREADS,
    Planned,
    Tiling,
    band_of,
    blocks_together,
    compiled,
    cost,
    packed,
    result_map,
    rows_map,
    want_hopper,
)
from fp8kit.backends.cuda.own_gemm import PROMOTE
from fp8kit.backends.cuda.quantize import format_name
from fp8kit.backends.cuda.tensor_maps import NONE, tensor_map
from fp8kit.backends.protocol.grouped import GroupedAlong, GroupedLayout
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import Format, uint8
from fp8kit.lru import memoized

__all__ = ["ARCHS", "grouped_fp8_gemm", "tiling"]

_LINE, _SQUARE = (1, 128), (128, 128)
_TERMS = 64  # of 16 bits, in a tile
# what groups run along, and the operands' tiles -> the source's SCALES
_SCALES = {
    **{(along, (tile, tile)): "whole" for along in ("rows", "terms") for tile in ((0, 0), (1, 0))},
    ("rows", (_LINE, _SQUARE)): "lines_squares",
    ("terms", (_LINE, _LINE)): "lines_lines",
}


def tiling(
    along: GroupedAlong, m: int, n: int, k: int, groups: int, promote: int, multiprocessors: int
) -> Tiling:
    """The tiling that groups are made by, as ``hopper_gemm.tiling``, of two. ``m``, ``n``, ``k``: rows of all
    groups, or terms of all groups where they run ``along`` these: how they are shared out nobody knows, so it
    is taken to be evenly, and a group's last tile to be half full. Where rows are groups, of that tile's rows
    those alone are copied and multiplied that there are, 64 at a time."""
    large = Tiling(256, 128) if promote else Tiling(128, 256)

    def of(one: Tiling) -> float:
        down, depths = ceil_div(m, one.rows) * groups, k / groups / DEPTH + 0.5
        if along == "rows":
            down = max(groups, round(m / one.rows + groups / 2))
            filled = min(1.0, (m + 32 * groups) / (down * one.rows))
            depths = ceil_div(k, DEPTH) * (0.95 * filled + 0.05)  # the rest is every tile's
        return cost(one, down * ceil_div(n, one.columns), depths, promote, along, multiprocessors)

    return min((large, Tiling(128, 128)), key=of)


@memoized("Hopper products of groups by call")
def _plan(
    index: int,
    along: GroupedAlong,
    out_shape: Shape,
    out_stride: int,
    a_shape: Shape,
    b_shape: Shape,
    groups: int,
    slots: int,
    left: str,
    right: str,
    out: str,
    tiles: tuple[tuple[int, int], tuple[int, int]],
    promote: int,
) -> Planned:
    scales = _SCALES.get((along, tiles))
    if scales is None:
        raise CannotTake("hopper_grouped", "tiles", f"{tiles} along {along}", "others")
    (m, n), terms, by_rows = out_shape[-2:], a_shape[1], along == "rows"
    want_hopper(index, terms)
    multiprocessors = launch.sm_count(index)
    at = tiling(along, m, n, terms, groups, promote, multiprocessors)
    together = blocks_together(promote, along, at)  # what is counted from here on are clusters
    tall, wide = ceil_div(m, at.rows), ceil_div(n, at.columns * together)
    clusters = min((tall + groups if by_rows else groups * tall) * wide, multiprocessors // together)
    lines = [NONE[1], NONE[1]]
    for i, (tile, rows, box) in enumerate(
        zip(tiles, (a_shape[-2], b_shape[-2]), (at.rows, at.columns), strict=True)
    ):
        if tile == _LINE:
            lines[i] = tensor_map("float32", (rows, ceil_div(terms, DEPTH)), (rows,), (box, 1))
    # a group's matrix of b is a further dimension
    stack, apart, one = ((groups,), (b_shape[-2] * terms,), (1,)) if by_rows else ((), (), ())
    maps = (
        rows_map(a_shape[0], terms, terms, 64 if by_rows else at.rows // together),
        tensor_map("uint8", (terms, b_shape[-2], *stack), (terms, *apart), (DEPTH, at.columns, *one), True),
        *lines,
        result_map(out_shape, out_stride, out, scales, along, at),
        NONE[1],
    )
    kernel = compiled(index, (left, right, out), scales, promote, at, along)
    step, b_step, b_group = int(tiles[0] == (1, 0)), 0, 0
    if by_rows:
        b_group = b_shape[1] if step else 1
    if tiles[1] == _SQUARE:
        b_step = ceil_div(terms, 4 * DEPTH) * 4
        b_group = ceil_div(b_shape[1], 128) * b_step
    numbers = m, n, out_stride, ceil_div(terms, DEPTH), step, b_step or step, tall, wide
    own = band_of(clusters, at.rows, at.columns * together), groups, slots, b_group, terms
    return Planned(kernel, clusters * together, maps, (*numbers, *own))


@memoized("Hopper products of groups in high precision by call")
def _plan_high(
    index: int,
    layout: GroupedLayout,
    out_shape: Shape,
    a_shape: Shape,
    b_shape: Shape,
    groups: int,
    slots: int,
    name: str,
) -> Planned:
    """``name``: the source's, of the type of all operands."""
    along: GroupedAlong = "terms" if layout == "tn" else "rows"
    (m, n), by_rows, multiprocessors = out_shape[-2:], along == "rows", launch.sm_count(index)
    terms = a_shape[1] if by_rows else a_shape[0]
    at = tiling(along, m, n, terms, groups, 0, multiprocessors)
    tall, wide = ceil_div(m, at.rows), ceil_div(n, at.columns)
    blocks = min((tall + groups if by_rows else groups * tall) * wide, multiprocessors)
    kind, square = KINDS[name], (_TERMS, _TERMS)  # of a: 64 rows of a group, or 64 columns of terms
    # of b; with "nn" and "tn" terms run down its rows
    box = (_TERMS, at.columns) if layout == "nt" else square
    stack, apart, one = ((groups,), (b_shape[-2] * b_shape[-1],), (1,)) if by_rows else ((), (), ())
    maps = (
        tensor_map(kind, (a_shape[1], a_shape[0]), (a_shape[1],), square, True),
        tensor_map(kind, (b_shape[-1], b_shape[-2], *stack), (b_shape[-1], *apart), (*box, *one), True),
        NONE[1],
        NONE[1],
        result_map(out_shape, n, name, "whole", along, at),
        NONE[1],
    )
    kernel = compiled(index, (name, name, name), "whole", 0, at, along, layout=layout)
    numbers = m, n, n, ceil_div(terms, _TERMS), 0, 0, tall, wide
    return Planned(kernel, blocks, maps, (*numbers, band_of(blocks, *at), groups, slots, 0, terms))


def _launch(
    plan: Planned,
    a: ArrayView,
    b: ArrayView,
    scale_invs: tuple[ArrayView | None, ArrayView | None],
    out: ArrayView,
    sizes: ArrayView,
    bias: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """Launch the kernel. Where groups are rows, blocks count in the workspace which tiles they took:
    BackendError without one."""
    by_rows = len(out.shape) == 2
    if by_rows:
        if workspace is None or workspace.nbytes < COUNTER:
            got = None if workspace is None else f"{workspace.nbytes} bytes"
            raise BackendError("hopper_grouped", "workspace", got, f"{COUNTER} bytes")
        arrays.fill_zero(ArrayView(workspace.ptr, (COUNTER,), uint8, out.device), stream)
    counter = workspace if by_rows else None
    job = packed(plan, a, b, scale_invs, out, bias, sizes=sizes, counter=counter)
    launch.launch(plan.kernel, plan.blocks, THREADS, (job,), stream, SHARED)


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
    """See ``backends.protocol``. Other devices than those of compute capability 9.0, float32, and rows or
    addresses that are not multiples of 16 bytes are left to ``grouped.cu``."""
    name, index = launch.type_name(out.dtype), out.device.index
    wide = a.shape[-1] | b.shape[-1] | out.shape[-1]
    ours = launch.capability(index) == CAPABILITY and name != "f32" and a.size and b.size and sizes.size
    if not ours or wide % 8 or (a.ptr | b.ptr | out.ptr) % 16:
        grouped.grouped_gemm(a, b, out, sizes, layout, slots, bias, None, stream)
        return
    plan = _plan_high(index, layout, out.shape, a.shape, b.shape, sizes.size, slots, name)
    _launch(plan, a, b, (None, None), out, sizes, bias, workspace, stream)


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
    """See ``backends.protocol``. CannotTake on devices that are not of compute capability 9.0, for scales
    other than of tensors, rows and those that Hopper's recipes have, for rows' scales of b that do not lie at
    multiples of 8 bytes for every group, and for what is empty."""
    if not (a.size and b.size and out.size and sizes.size):
        raise CannotTake("hopper_grouped", "a, b, out", "an empty one", "elements")
    left, right = format_name(a_format), format_name(b_format)
    if left is None or right is None or left == right == "e5m2":
        raise CannotTake("hopper_grouped", "formats", f"{a_format}, {b_format}", "E4M3, E5M2, not E5M2 twice")
    tiles = a_tile, b_tile
    promote = 0 if fast_accumulate and 128 not in (a_tile[1], b_tile[1]) else PROMOTE
    plan = _plan(
        out.device.index,
        along,
        out.shape,
        launch.row_stride(out),
        a.shape,
        b.shape,
        sizes.size,
        slots,
        left,
        right,
        launch.type_name(out.dtype),
        tiles,
        promote,
    )
    apart = 4 * b.shape[-2] if along == "rows" else 0  # bytes, of groups' scales of rows
    scale_invs = a_scale_inv, b_scale_inv
    lined = [scale.ptr for scale, tile in zip(scale_invs, tiles, strict=True) if tile == _LINE]
    if any(pointer % 16 for pointer in (a.ptr, b.ptr, *lined)):
        raise CannotTake("hopper_grouped", "a, b, scales", "addresses", "multiples of 16")
    if b_tile == (1, 0) and (b_scale_inv.ptr | apart) % 8:  # those of two columns are read at once
        raise CannotTake("hopper_grouped", "b_scale_inv", "addresses of groups", "multiples of 8")
    _launch(plan, a, b, scale_invs, out, sizes, bias, workspace, stream)


def sums(call: Any) -> Accumulation | None:
    """How a call's terms are added; None for one that another kernel takes."""
    tiles = call.a_tile, call.b_tile
    mine = (call.along, tiles) in _SCALES and call.a.size and call.b.size and call.out.size
    fast = call.fast_accumulate and 128 not in (tiles[0][1], tiles[1][1])
    how = on_chip(launch.capability(call.out.device.index), fast)
    return how if mine and call.a.shape[1] % 16 == 0 else None


grouped_fp8_gemm._sums = sums  # type: ignore[attr-defined]
