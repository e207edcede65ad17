"""Casts: encoding with the amax and 1 / scale on the side, decoding, and the layers' cast to both
orientations."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView, Tile, as_view
from fp8kit.backends.protocol import Cast, Rule
from fp8kit.backends.reference import scales
from fp8kit.backends.reference.cast_rows import add_row, bits, bits_dtype, decode_row, encode_row, rounding
from fp8kit.backends.reference.philox import row_words
from fp8kit.backends.reference.scales import accumulate, tiles
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import Format, float32

Array = np.ndarray[Any, Any]

# Rows and columns of a block of the cast to both orientations: its codes, twice, lie in the first cache.
_ROWS, _COLUMNS = 64, 256
_NO_CODES, _NO_SUMS = np.empty(0, np.uint8), np.empty((0, 0))
# Rounds of a transposition of 8 x 8 bytes: how far apart the rows are that exchange blocks, bits of a block,
# and the mask of the low blocks.
_SWAPS = (
    (4, np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
    (2, np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (1, np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
)


@njit(parallel=True)
def encode(x: Any, scale: Any, tile_rows: Any, tile_columns: Any, how: Any, q: Any, row_amax: Any) -> None:
    """q = codes of x * scale; row_amax[i, t] = bits of the amax of row i within tile column t. x: bits (M,
    N); scale: float32 [tiles] row-major; q: uint8 (M, N); row_amax: uint32 (M, tile columns)."""
    across = row_amax.shape[1]
    for i in prange(x.shape[0]):
        for t in range(across):
            start, stop = t * tile_columns, min((t + 1) * tile_columns, x.shape[1])
            row_amax[i, t] = encode_row(
                x[i, start:stop], scale[(i // tile_rows) * across + t], how, q[i, start:stop]
            )


@njit(parallel=True)
def decode(q: Any, table: Any, scale_inv: Any, tile_rows: Any, tile_columns: Any, x: Any) -> None:
    """x = table[q] * scale_inv. q: uint8 (M, N); table: float32 (256,); scale_inv: float32 [tiles] row-major;
    x: bits (M, N)."""
    across = (q.shape[1] + tile_columns - 1) // tile_columns
    for i in prange(q.shape[0]):
        for t in range(across):
            start, stop = t * tile_columns, min((t + 1) * tile_columns, q.shape[1])
            decode_row(q[i, start:stop], table, scale_inv[(i // tile_rows) * across + t], x[i, start:stop])


@njit
def _transpose8(codes: Any, transposed: Any) -> None:
    """transposed = codes transposed, 8 x 8 bytes at a time, eight of a row in a word; ``codes`` is changed.

    codes: uint64 (rows, columns / 8); transposed: uint64 (columns, rows / 8). Three rounds swap the
    off-diagonal 4 x 4, 2 x 2 and 1 x 1 blocks (Warren, Hacker's Delight, 2012, 7-3). Little-endian words.
    """
    for i in range(codes.shape[0] // 8):
        rows = codes[8 * i : 8 * i + 8]
        for distance, shift, low in _SWAPS:
            for upper in range(8):
                if not upper & distance:
                    _swap(rows[upper], rows[upper + distance], shift, low)
        for k in range(8):
            for j in range(codes.shape[1]):
                transposed[8 * j + k, i] = rows[k, j]


@njit
def _swap(upper: Any, lower: Any, shift: Any, low: Any) -> None:
    """Exchange the upper row's high blocks with the lower row's low ones; ``low`` masks the low blocks,
    ``shift`` bits wide each."""
    for j in range(upper.size):
        moved = ((upper[j] >> shift) ^ lower[j]) & low
        upper[j] ^= moved << shift
        lower[j] ^= moved


@njit
def _cast_block(x: Any, factor: Any, how: Any, top: Any, left: Any, q: Any, q_t: Any, sums: Any) -> Any:
    """The part of ``_cast_both`` that starts at row ``top`` and column ``left``; returns the bits of its
    amax."""
    height, width = min(_ROWS, x.shape[0] - top), min(_COLUMNS, x.shape[1] - left)
    codes = np.zeros((_ROWS, _COLUMNS), np.uint8)
    most = np.uint32(0)
    for i in range(height):
        row = x[top + i, left : left + width]
        most = max(most, encode_row(row, factor, how, codes[i]))
        if sums.size:
            add_row(row, sums[top // _ROWS, left:])
    memory, pitch, rows, columns = q
    columns = min(_COLUMNS, columns - left)
    for i in range(min(_ROWS, rows - top)):
        _copy(codes[i], memory[(top + i) * pitch + left :], columns)
    memory, pitch, rows, columns = q_t
    if memory.size:
        transposed = np.empty((_COLUMNS, _ROWS // 8), np.uint64)
        _transpose8(codes.view(np.uint64), transposed)
        lines = transposed.view(np.uint8)
        columns = min(_ROWS, columns - top)
        for j in range(min(_COLUMNS, rows - left)):
            _copy(lines[j], memory[(left + j) * pitch + top :], columns)
    return most


@njit
def _copy(source: Any, target: Any, count: Any) -> None:
    for j in range(count):
        target[j] = source[j]


@njit(parallel=True)
def _cast_both(x: Any, scale: Any, how: Any, across: Any, q: Any, q_t: Any, most: Any, sums: Any) -> None:
    """Codes of x * scale in both orientations, zero codes around, block by block: each is encoded, transposed
    and written while it is in cache. x: bits (M, N); scale: float32 [1]; ``across`` blocks a row; q, q_t:
    ``_Memory``; most: uint32 [blocks], bits of their amaxes; sums: float64 (rows of blocks, N) of zeros that
    take their column sums, or empty."""
    for block in prange(most.size):
        most[block] = _cast_block(
            x, scale[0], how, (block // across) * _ROWS, (block % across) * _COLUMNS, q, q_t, sums
        )


def _spread(per_tile: Array, shape: tuple[int, int], tile: Tile, rows: slice) -> Array:
    """One value a tile as one value an element of the rows."""
    grid = per_tile.reshape(tiles(shape, tile))
    down, across = np.arange(shape[0])[rows] // max(tile[0], 1), np.arange(shape[1]) // max(tile[1], 1)
    return grid[down[:, None], across]


def _cast_by_codec(
    x: Array,
    q: Array,
    scale: Array,
    tile: Tile,
    fmt: Format,
    saturate: bool,
    stochastic_bits: int,
    draw: int,
    rng: ArrayView | None,
) -> None:
    """The general cast, some rows at a time."""
    m, n = x.shape
    step = max(1, (1 << 18) // max(n, 1))
    for top in range(0, m, step):
        rows = slice(top, min(top + step, m))
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = x[rows] * _spread(scale, (m, n), tile, rows)
        if rng is None:
            q[rows] = codec.encode(scaled, fmt, "nearest", saturate)
        else:
            drawn = row_words(rng, (draw << 48) + n * np.arange(rows.start, rows.stop), n)
            q[rows] = codec.encode(scaled, fmt, "stochastic", saturate, drawn, stochastic_bits)


def _reciprocal(scale: ArrayView, scale_inv: ArrayView) -> None:
    with np.errstate(divide="ignore", over="ignore"):
        np.divide(np.float32(1), scale.numpy().reshape(-1), out=scale_inv.numpy().reshape(-1))


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
    """See ``Kernels.quantize``."""
    factors, how = scale.numpy().reshape(-1), rounding(format, saturate)
    if not x.size:  # rows without columns, of which there may be billions
        pass
    elif rng is None and how is not None:
        values = bits(x)
        row_amax = np.empty((len(values), tiles(values.shape, tile)[1]), np.uint32)
        encode(values, factors, max(tile[0], 1), max(tile[1], 1), how, q.numpy(), row_amax)
        if amax is not None:
            accumulate(row_amax, max(tile[0], 1), amax)
    else:
        with np.errstate(over="ignore"):
            wide = x.numpy().astype(np.float32)
        _cast_by_codec(wide, q.numpy(), factors, tile, format, saturate, stochastic_bits, draw, rng)
        if amax is not None:
            scales.amax(x, amax, tile, stream)
    _reciprocal(scale, scale_inv)


@cache
def table32(fmt: Format) -> Array:
    """Returns the float32 value of every code, Inf where float32 ends before the format."""
    with np.errstate(over="ignore"):
        return codec.table(fmt).astype(np.float32)


def dequantize(
    q: ArrayView, x: ArrayView, scale_inv: ArrayView, format: Format, tile: Tile, stream: int
) -> None:
    """See ``Kernels.dequantize``."""
    values = x.view(bits_dtype(x.dtype)).numpy()
    decode(
        q.numpy(), table32(format), scale_inv.numpy().reshape(-1), max(tile[0], 1), max(tile[1], 1), values
    )


class _Memory(NamedTuple):
    """A uint8 matrix whose rows may lie apart, as ``_cast_both`` takes it: always of one Numba type. Empty
    memory and no rows: none."""

    memory: Array  # from the first element to the last
    pitch: int  # bytes from one row to the next
    rows: int
    columns: int


def _memory(view: ArrayView | None) -> _Memory:
    if view is None or not view.size:
        return _Memory(_NO_CODES, 0, 0, 0)
    rows, columns = view.shape
    pitch = view.strides[0]
    return _Memory(view.with_strides(((rows - 1) * pitch + columns,), (1,)).numpy(), pitch, rows, columns)


def quantize_transpose(
    x: ArrayView, cast: Cast, dbias: ArrayView | None, workspace: ArrayView | None, stream: int
) -> None:
    """See ``Kernels.quantize_transpose``."""
    how, scale_inv = rounding(cast.format, True), cast.by_tensor("quantize_transpose")
    assert how is not None, cast.format
    q, q_t = _memory(cast.q), _memory(cast.q_t)
    down = -(-max(x.shape[0], q.rows, q_t.columns) // _ROWS)
    across = -(-max(x.shape[1], q.columns, q_t.rows) // _COLUMNS)
    most = np.zeros((down * across, 1), np.uint32)
    sums = _NO_SUMS if dbias is None else np.zeros((down, x.shape[1]))
    rule, scale = cast.rule, as_view(np.empty(1, np.float32)) if cast.scale is None else cast.scale
    if rule is not None:
        assert cast.amax is not None
        scales.scale_from_amax(
            cast.amax, scale, scale_inv, cast.format.max, rule.power_2, rule.epsilon, float32.max, stream
        )
    _cast_both(bits(x), scale.numpy(), how, across, q, q_t, most.reshape(-1), sums)
    if rule is None:
        _reciprocal(scale, scale_inv)
        if cast.amax is not None:
            accumulate(most, max(len(most), 1), cast.amax)
    if dbias is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            dbias.numpy()[...] = np.add.reduce(sums, axis=0).astype(dbias.dtype.numpy)


def member(stack: ArrayView | None, e: int) -> ArrayView | None:
    """Array ``e`` of several, (E, ...)."""
    return None if stack is None else stack.at(e)


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
    """See ``Kernels.quantize_stack``."""
    rule = Rule(power_2, epsilon)
    for e in range(x.shape[0]):
        part, codes, codes_t = (member(view, e) for view in (x, q, q_t))
        assert part is not None
        cast = Cast(format, codes, codes_t, None, scale_inv.slice(0, e, 1), amax.slice(0, e, 1), rule)
        quantize_transpose(part, cast, None, None, stream)
