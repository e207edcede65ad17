"""The contract's casts: quantize, dequantize, quantize_transpose and quantize_stack.

E4M3 and E5M2, rounded to nearest and saturating, take the hardware's conversion, 16 codes a thread; every
other format and mode the exact integer path. Both give the oracle's bits.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.cuda import launch, scales
from fp8kit.backends.cuda._rows import address, ceil_div, kernel, scaling, sum_partials
from fp8kit.backends.protocol import Cast
from fp8kit.formats import E4M3, E5M2, Format, float64

_FORMAT_NAMES = {"E4M3": "e4m3", "E5M2": "e5m2"}
_THREADS = 256
_VECTOR = 16
_DECODED = 8 * 4  # codes that a thread of dequantize_fp8 takes at a time
_TILE_ROWS, _TILE_COLUMNS = 128, 64  # of quantize_transpose's blocks


def format_name(fmt: Format) -> str | None:
    """Returns the sources' name of a format with a hardware conversion, None for any other."""
    return _FORMAT_NAMES.get(fmt.name) if fmt in (E4M3, E5M2) else None


@functools.cache
def narrow(fmt: Format, saturate: bool, stochastic_bits: int = 0) -> bytes:
    """fp8.cuh's structure ``Narrow`` for a format, an overflow rule and a rounding."""
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    beyond = 1 << 8
    if saturate or fmt.nan_code is None:
        over, signed = fmt.max_code, True
    elif fmt.inf_code is not None:
        over, signed = fmt.inf_code, True
    else:
        over, signed = fmt.nan_code, False
    if fmt.inf_code is not None:
        inf_from, nan_from = fmt.inf_code, fmt.inf_code + 1
    else:
        inf_from = nan_from = beyond if fmt.nan_code is None else fmt.nan_code
    lowest = (1 if fmt.zero else 0) - fmt.bias
    magnitude = (1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1
    negative = 0 if fmt.nan_code is None else fmt.nan_code
    return struct.pack(
        "=14i",
        fmt.mantissa_bits,
        lowest,
        fmt.zero,
        fmt.sign_code,
        magnitude,
        fmt.max_code,
        over,
        signed,
        nan,
        negative,
        inf_from,
        nan_from,
        fmt.twos_complement,
        stochastic_bits,
    )


def _fast(fmt: Format, x: ArrayView, width: int, tiles: int) -> str | None:
    """Returns the format's name where the vector kernels take the call: 16 neighbours share a scale."""
    whole = tiles == 1 or (x.shape[1] % _VECTOR == 0 and width % _VECTOR == 0)
    return format_name(fmt) if whole and x.dtype is not float64 else None


def quantize(
    x: ArrayView,
    q: ArrayView,
    scale: ArrayView,
    scale_inv: ArrayView,
    amax: ArrayView | None,
    format: Format,
    tile: Tile,
    saturate: bool,
    stochastic_bits: int,
    draw: int,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    rows, columns = x.shape
    height, width, tiles = scales.tiling(x, tile)
    fast = _fast(format, x, width, tiles) if saturate and rng is None else None
    in_pass = amax if fast is not None and tiles == 1 else None
    if fast is not None:
        function, codes = kernel("quantize.cu", "quantize_fp8", x, FORMAT=fast), _VECTOR
        rest: tuple[int | bytes, ...] = (address(in_pass), x.size, max(columns, 1), height, width, tiles)
    else:
        function, codes = kernel("quantize_any.cu", "quantize_any", x), 4
        drawn = address(rng) if stochastic_bits else 0
        how = narrow(format, saturate, stochastic_bits)
        rest = (drawn, draw, rows, columns, height, width, tiles, how)
    grid = launch.blocks(max(x.size, tiles, 1), _THREADS * codes, x.device.index)
    arguments = (x.ptr, q.ptr, scale.ptr, scale_inv.ptr, *rest)
    launch.launch(function, grid, _THREADS, arguments, stream)
    if amax is not None and in_pass is None:
        scales.amax(x, amax, tile, stream)


def dequantize(
    q: ArrayView, x: ArrayView, scale_inv: ArrayView, format: Format, tile: Tile, stream: int
) -> None:
    """See ``backends.protocol``."""
    rows, columns = x.shape
    height, width, tiles = scales.tiling(x, tile)
    fast = _fast(format, x, width, tiles)
    if not x.size:
        return
    if fast is not None:
        function, codes = kernel("quantize.cu", "dequantize_fp8", x, FORMAT=fast), _DECODED
        rest: tuple[int | bytes, ...] = (x.size, columns, height, width, tiles)
    else:
        function, codes = kernel("quantize_any.cu", "dequantize_any", x), 1
        rest = (rows, columns, height, width, tiles, narrow(format, True))
    grid = launch.blocks(x.size, _THREADS * codes, x.device.index)
    launch.launch(function, grid, _THREADS, (q.ptr, x.ptr, scale_inv.ptr, *rest), stream)


def quantize_transpose(
    x: ArrayView, cast: Cast, dbias: ArrayView | None, workspace: ArrayView | None, stream: int
) -> None:
    """See ``backends.protocol``."""
    rows, columns = x.shape
    q, q_t = cast.q, cast.q_t
    padded_rows, padded_columns = q.shape if q is not None else q_t.shape[::-1]  # type: ignore[union-attr]
    function = kernel("quantize.cu", "quantize_transpose", x, FORMAT=_FORMAT_NAMES[cast.format.name])
    grid = ceil_div(padded_rows, _TILE_ROWS) * ceil_div(padded_columns, _TILE_COLUMNS)
    partials = 0 if dbias is None else address(workspace)
    found, *known = scaling(cast)
    args = (
        x.ptr,
        address(q),
        address(q_t),
        address(cast.scale),
        cast.by_tensor("quantize_transpose").ptr,
        found,
        partials,
        rows,
        columns,
        padded_rows,
        padded_columns,
        0 if q is None else launch.row_stride(q),
        0 if q_t is None else launch.row_stride(q_t),
        *known,
    )
    launch.launch(function, max(grid, 1), _THREADS, args, stream)
    if dbias is not None:
        sum_partials(partials, ceil_div(rows, _TILE_ROWS), dbias, None, stream)


def quantize_stack(
    x: ArrayView,
    q: ArrayView | None,
    q_t: ArrayView | None,
    amax: ArrayView,
    scale_inv: ArrayView,
    format: Format,
    power_2: bool,
    epsilon: float,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    count, rows, columns = x.shape
    written: Any = q_t.transpose(0, 2, 1) if q is None and q_t is not None else q
    padded_rows, padded_columns = written.shape[1:]
    function = kernel("quantize.cu", "quantize_stack", x, FORMAT=_FORMAT_NAMES[format.name])
    tiles = max(ceil_div(padded_rows, _TILE_ROWS), 1) * max(ceil_div(padded_columns, _TILE_COLUMNS), 1)
    sizes = rows, columns, padded_rows, padded_columns
    places = (x.ptr, address(q), address(q_t), amax.ptr, scale_inv.ptr)
    launch.launch(function, count * tiles, _THREADS, (*places, *sizes, epsilon, int(power_2)), stream)


def quantize_transpose_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``: a float32 sum for each column of each of the blocks' row tiles."""
    return 4 * ceil_div(rows, _TILE_ROWS) * columns
