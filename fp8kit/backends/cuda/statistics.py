"""Statistics: a pass over the tensor that leaves counts and the blocks' sums, and one block that adds these.

Sums are float64: on GPUs whose float64 is 1/64 of float32 (compute capability 8.9 and 12) a pass is bound by
it, not by memory. ``brief_statistics`` adds eight numbers in float32 first.
"""

from __future__ import annotations

import functools
import struct

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import BLOCKS, TYPE_CODES, address, ceil_div, kernel
from fp8kit.backends.protocol import Rule
from fp8kit.backends.protocol.statistics import tile_within
from fp8kit.errors import BackendError
from fp8kit.formats import Format

_THREADS = 256
_PIECE = 8192  # elements of a block, at least
_KINDS = 14  # sums that a block leaves, at most
_DEEP, _MOMENTS, _CODES = 1, 2, 4  # what statistics_brief.cu is asked for


def _grid(size: int) -> int:
    return max(1, min(BLOCKS, ceil_div(size, _PIECE)))


def _flat(*views: ArrayView) -> tuple[int, ...]:
    """(rows, columns, row strides...): one row where all lie without gaps."""
    rows, columns = views[0].shape
    if all(view.contiguous for view in views):
        return (1, rows * columns, *(rows * columns,) * len(views))
    return (rows, columns, *map(launch.row_stride, views))


def _space(name: str, workspace: ArrayView | None) -> int:
    if workspace is None:
        raise BackendError(name, "workspace", None, f"{statistics_workspace(1, 1)} bytes")
    return workspace.ptr


def statistics_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``: the sums of the blocks, the value that deviations are taken from, and
    an inverse of a scale."""
    return 8 * (_KINDS * BLOCKS + 2)


def tensor_statistics(
    x: ArrayView, counts: ArrayView, moments: ArrayView, workspace: ArrayView | None, stream: int
) -> None:
    """See ``backends.protocol``. BackendError for a missing workspace."""
    space, grid = _space("tensor_statistics", workspace), _grid(x.size)
    arguments = (x.ptr, counts.ptr, space, *_flat(x))
    launch.launch(kernel("statistics.cu", "tensor_parts", x), grid, _THREADS, arguments, stream)
    total = space, moments.ptr, grid
    launch.launch(kernel("statistics.cu", "tensor_total", x), 1, _THREADS, total, stream)


def tile_statistics(x: ArrayView, ratios: ArrayView, tile: Tile, stream: int) -> None:
    """See ``backends.protocol``."""
    if not x.size:
        return
    rows, columns = x.shape
    height, width = tile_within(tile, rows, columns)
    jobs, each = ceil_div(rows, height) * ceil_div(columns, width), _THREADS if width == 1 else _THREADS // 32
    grid = min(BLOCKS, ceil_div(jobs, each))
    arguments = (x.ptr, ratios.ptr, rows, columns, launch.row_stride(x), height, width)
    launch.launch(kernel("statistics.cu", "tile_ratios", x), grid, _THREADS, arguments, stream)


@functools.cache
def _decoded(fmt: Format) -> bytes:
    """Returns the sources' ``Decoded`` of a format."""
    with np.errstate(over="ignore"):
        return codec.table(fmt).astype(np.float32).tobytes() + struct.pack("=f", fmt.max)


def cast_statistics(
    x: ArrayView,
    q: ArrayView,
    scale_inv: ArrayView,
    counts: ArrayView,
    sums: ArrayView,
    format: Format,
    tile: Tile,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for a missing workspace."""
    space, grid = _space("cast_statistics", workspace), _grid(max(x.size, scale_inv.size))
    rows, columns = x.shape
    height, width = tile_within(tile, rows, columns)
    sizes: tuple[int, ...] = (rows, columns, launch.row_stride(x), launch.row_stride(q))
    if height >= rows and width >= columns:
        sizes = _flat(x, q)
        height, width = max(sizes[0], 1), max(sizes[1], 1)
    pointers = x.ptr, q.ptr, scale_inv.ptr, counts.ptr, space
    arguments = (*pointers, *sizes, height, width, scale_inv.size, _decoded(format))
    launch.launch(kernel("statistics.cu", "cast_parts", x), grid, _THREADS, arguments, stream)
    total = space, sums.ptr, grid, 2
    launch.launch(kernel("statistics.cu", "sums_total", x), 1, _THREADS, total, stream)


def pair_statistics(
    x: ArrayView, twin: ArrayView, sums: ArrayView, workspace: ArrayView | None, stream: int
) -> None:
    """See ``backends.protocol``. BackendError for a missing workspace."""
    space, grid = _space("pair_statistics", workspace), _grid(x.size)
    arguments = (x.ptr, twin.ptr, space, *_flat(x, twin), TYPE_CODES[twin.dtype.name])
    launch.launch(kernel("statistics.cu", "pair_parts", x), grid, _THREADS, arguments, stream)
    total = space, sums.ptr, grid, 4
    launch.launch(kernel("statistics.cu", "sums_total", x), 1, _THREADS, total, stream)


def brief_statistics(
    x: ArrayView,
    counts: ArrayView | None,
    moments: ArrayView | None,
    codes: ArrayView | None,
    scale_inv: ArrayView | None,
    scale: ArrayView | None,
    amax: ArrayView | None,
    rule: Rule | None,
    format: Format | None,
    deep: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for a missing workspace."""
    space, grid = _space("brief_statistics", workspace), _grid(x.size)
    flags = _DEEP * deep + _MOMENTS * (counts is not None) + _CODES * (codes is not None)
    epsilon, power_2 = (0.0, 0) if rule is None else (rule.epsilon, int(rule.power_2))
    ends = (0.0, 0.0, 0.0) if format is None else (format.max, *codec.code_ends(format))
    source = address(scale), address(amax if rule is not None else None)
    arguments = (x.ptr, space, *source, *_flat(x), flags, power_2, epsilon, *ends)
    launch.launch(kernel("statistics_brief.cu", "brief_parts", x), grid, _THREADS, arguments, stream)
    made = address(counts), address(moments), address(codes), address(scale_inv)
    total = kernel("statistics_brief.cu", "brief_total", x)
    launch.launch(total, 1, 32 * _KINDS, (space, *made, grid, x.size, flags), stream)
