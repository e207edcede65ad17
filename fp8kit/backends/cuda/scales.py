"""The contract's amaxes, and its scaling factors: current scaling's rule, and delayed scaling's update of
many states in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import ceil_div, kernel
from fp8kit.backends.cuda.structures import Packer, Structure
from fp8kit.backends.protocol.statistics import tile_within

_THREADS = 256
_CHUNK = 8192  # elements of a tile that one warp of amax_tiles takes
_STATES = (8, 96)  # states that one launch takes as a parameter by value: the variants of scales.cu
_STATE = Packer("3Piifi")  # one of them (scales.cu)


def tiling(x: ArrayView, tile: Tile) -> tuple[int, int, int]:
    """Rows and columns of a tile, no larger than ``x`` (at least 1), and the number of tiles."""
    rows, columns = x.shape
    height, width = tile_within(tile, rows, columns)
    return height, width, max(ceil_div(rows, height) * ceil_div(columns, width), 1)


def amax(x: ArrayView, amax: ArrayView, tile: Tile, stream: int) -> None:
    """See ``backends.protocol``."""
    if not x.size:
        return
    height, width, tiles = tiling(x, tile)
    if tiles == 1:
        function, jobs, jobs_per_block = "amax_tensor", x.size, _THREADS * 32 // x.dtype.itemsize
        sizes: tuple[int, ...] = (x.size,)
    else:
        chunk = max(1, _CHUNK // width)
        function, jobs, jobs_per_block = "amax_tiles", tiles * ceil_div(height, chunk), _THREADS // 32
        sizes = (*x.shape, height, width, chunk)
    grid = launch.blocks(jobs, jobs_per_block, x.device.index)
    launch.launch(kernel("amax.cu", function, x), grid, _THREADS, (x.ptr, amax.ptr, *sizes), stream)


def scale_from_amax(
    amax: ArrayView,
    scale: ArrayView,
    scale_inv: ArrayView,
    fp8_max: float,
    power_2: bool,
    epsilon: float,
    value_for_inf: float,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    n, index = amax.size, amax.device.index
    kernel = launch.kernel("scales.cu", "scale_from_amax", index, STATES="8")
    args = (amax.ptr, scale.ptr, scale_inv.ptr, n, fp8_max, epsilon, value_for_inf, power_2)
    launch.launch(kernel, launch.blocks(n, 256, index), 256, args, stream)


def update_delayed_(
    scales: Sequence[ArrayView],
    scale_invs: Sequence[ArrayView],
    histories: Sequence[ArrayView],
    fp8_maxes: Sequence[float],
    margin: int,
    most_recent: bool,
    power_2: bool,
    growth: float | None,
    by_window: bool,
    stream: int,
) -> None:
    """See ``backends.protocol``. One launch for every 96 states."""
    if not scales:
        return
    factor, index = 2.0**-margin, scales[0].device.index
    rule = most_recent, power_2, -1.0 if growth is None else float(growth), by_window
    for first in range(0, len(scales), _STATES[-1]):
        part = slice(first, first + _STATES[-1])
        longest, table = 0, Structure()
        # written anew at every call, 0.4 us a state: to know states again would keep their memory alive
        for scale, scale_inv, history, fp8_max in zip(
            scales[part], scale_invs[part], histories[part], fp8_maxes[part], strict=True
        ):
            length, slots = history.shape
            table += _STATE.pack(scale.ptr, scale_inv.ptr, history.ptr, slots, length, fp8_max * factor, 0)
            longest = max(longest, slots)
        count = len(table) // _STATE.size
        states = next(n for n in _STATES if count <= n)
        kernel = launch.kernel("scales.cu", "update_delayed", index, STATES=str(states))
        launch.launch(
            kernel, (count, longest), 128, (*rule, table + bytes(states * _STATE.size - len(table))), stream
        )
