"""Casts: encoding with the amax and 1 / scale on the side, decoding, and the layers' cast to both orientations."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Cast
from fp8kit.backends.reference import scales
from fp8kit.backends.reference.philox import words
from fp8kit.backends.reference.scales import accumulate, tiles, widened
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import Format

Array = np.ndarray[Any, Any]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)
_ONE = np.uint32(1)


class _Bits(NamedTuple):
    """What ``_encode`` knows of a format, all about the bits of a float32 magnitude."""

    shift: np.uint32  # mantissa bits that a float32 has more
    half: np.uint32  # half a unit of the last kept place, less one
    rebias: np.uint32  # distance between the two exponent fields, in code units
    normal: np.uint32  # the smallest normal value
    magic: np.float32  # its last place is the format's smallest subnormal: adding it rounds there, to nearest even
    limit: np.uint32  # magnitudes are cut here first: the largest finite value, or the one that gives the code after it
    sign: np.uint32  # how far the sign bit moves right
    nan: np.uint32  # the code of NaN
    unsigned: np.uint32  # a code that never has a sign: the NaN that overflow gives in formats without Inf


@cache
def _bits(fmt: Format, saturate: bool) -> _Bits | None:
    """The constants of a signed format with a mantissa; None for the others, which the codec casts."""
    if not fmt.signed or not fmt.zero or fmt.mantissa_bits == 0 or fmt.bias > 64 or (not saturate and fmt.nan_code is None):
        return None
    exponent, mantissa = divmod(fmt.max_code + 1, 1 << fmt.mantissa_bits)
    beyond = 2.0 ** (exponent - fmt.bias) * (1 + mantissa * fmt.epsilon)
    shift = 23 - fmt.mantissa_bits
    magic = np.float32(fmt.smallest_subnormal * 2.0**23)
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return _Bits(
        np.uint32(shift), np.uint32((1 << (shift - 1)) - 1), np.uint32((127 - fmt.bias) << fmt.mantissa_bits),
        np.float32(fmt.smallest_normal).view(np.uint32), magic, np.float32(fmt.max if saturate else beyond).view(np.uint32),
        np.uint32(32 - fmt.bits), np.uint32(nan), np.uint32(nan if fmt.special == "fn" else 1 << 8),
    )


@njit(parallel=True)
def _encode(x: Any, scale: Any, tile_rows: Any, tile_columns: Any, bits: Any, q: Any, row_amax: Any) -> None:
    """q = codes of x * scale; row_amax[i, t] = bits of the amax of row i within tile column t. x: float32 (M, N); scale: float32 [tiles]
    row-major; q: uint8, at least (M, N); row_amax: uint32 (M, tile columns). One pass, branch-free so that it becomes vector code."""
    shift, half, rebias, normal, magic, limit, sign_shift, nan, unsigned = bits
    magic_bits = np.float32(magic).view(np.uint32)
    across = row_amax.shape[1]
    for i in prange(x.shape[0]):
        for t in range(across):
            factor = scale[(i // tile_rows) * across + t]
            most = np.uint32(0)
            for j in range(t * tile_columns, min((t + 1) * tile_columns, x.shape[1])):
                value = x[i, j]
                before = np.uint32(np.float32(value).view(np.uint32) & _MAGNITUDE)
                most = max(most, before if before <= _INF else np.uint32(0))
                scaled = np.float32(value * factor).view(np.uint32)
                magnitude = np.uint32(scaled & _MAGNITUDE)
                cut = np.uint32(min(magnitude, limit))
                odd = np.uint32(np.uint32(cut >> shift) & _ONE)
                large = np.uint32(np.uint32(np.uint32(np.uint32(cut + half) + odd) >> shift) - rebias)
                small = np.uint32(np.float32(np.uint32(cut).view(np.float32) + magic).view(np.uint32) - magic_bits)
                code = large if cut >= normal else small
                sign = np.uint32(np.uint32(scaled & ~_MAGNITUDE) >> sign_shift)
                code = nan if magnitude > _INF or code == unsigned else np.uint32(code | sign)
                q[i, j] = np.uint8(code)
            row_amax[i, t] = most


@njit(parallel=True)
def _decode(q: Any, table: Any, scale_inv: Any, tile_rows: Any, tile_columns: Any, x: Any) -> None:
    """x = table[q] * scale_inv. q: uint8 (M, N); table: float32 (256,); scale_inv: float32 [tiles] row-major; x: float32 (M, N)."""
    across = (q.shape[1] + tile_columns - 1) // tile_columns
    for i in prange(q.shape[0]):
        for t in range(across):
            factor = scale_inv[(i // tile_rows) * across + t]
            for j in range(t * tile_columns, min((t + 1) * tile_columns, q.shape[1])):
                x[i, j] = table[q[i, j]] * factor


@njit(parallel=True)
def _transpose(q: Any, rows: Any, columns: Any, q_t: Any) -> None:
    """q_t[:columns, :rows] = q[:rows, :columns] transposed, in blocks that stay in the first cache. uint8; rows may be strided."""
    for block in prange((columns + 63) // 64):
        for top in range(0, rows, 64):
            for j in range(block * 64, min(block * 64 + 64, columns)):
                for i in range(top, min(top + 64, rows)):
                    q_t[j, i] = q[i, j]


def encode_tiles(x: Array, q: Array, scale: Array, tile: tuple[int, int], fmt: Format, saturate: bool) -> Array:
    """Fill q by the fast path; returns the rows' amaxes as ``accumulate`` takes them."""
    bits = _bits(fmt, saturate)
    assert bits is not None
    row_amax = np.empty((x.shape[0], tiles(x.shape, tile)[1]), np.uint32)
    _encode(x, scale, max(tile[0], 1), max(tile[1], 1), bits, q, row_amax)
    return row_amax


def _spread(per_tile: Array, shape: tuple[int, int], tile: tuple[int, int], rows: slice) -> Array:
    """One value a tile as one value an element of the rows."""
    grid = per_tile.reshape(tiles(shape, tile))
    down, across = np.arange(shape[0])[rows] // max(tile[0], 1), np.arange(shape[1]) // max(tile[1], 1)
    return grid[down[:, None], across]


def _cast_by_codec(x: Array, q: Array, scale: Array, tile: tuple[int, int], fmt: Format, saturate: bool, rng: ArrayView | None) -> None:
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
            random = np.empty(scaled.size, np.uint32)
            seed, offset = rng.numpy()
            words(seed, offset, top * n, random)
            q[rows] = codec.encode(scaled, fmt, "stochastic", saturate, random.reshape(scaled.shape))


def _reciprocal(scale: ArrayView, scale_inv: ArrayView) -> None:
    with np.errstate(divide="ignore", over="ignore"):
        np.divide(np.float32(1), scale.numpy().reshape(-1), out=scale_inv.numpy().reshape(-1))


def quantize(x: ArrayView, q: ArrayView, scale: ArrayView, scale_inv: ArrayView, amax: ArrayView | None, format: Format,
             tile: tuple[int, int], saturate: bool, rng: ArrayView | None, stream: int) -> None:
    """See ``Kernels.quantize``."""
    values, factors = widened(x), scale.numpy().reshape(-1)
    if rng is None and _bits(format, saturate) is not None:
        rows = encode_tiles(values, q.numpy(), factors, tile, format, saturate)
        if amax is not None:
            accumulate(rows, max(tile[0], 1), amax)
    else:
        _cast_by_codec(values, q.numpy(), factors, tile, format, saturate, rng)
        if amax is not None:
            scales.amax(x, amax, tile, stream)
    _reciprocal(scale, scale_inv)


@cache
def _table32(fmt: Format) -> Array:
    return codec.table(fmt).astype(np.float32)


def dequantize(q: ArrayView, x: ArrayView, scale_inv: ArrayView, format: Format, tile: tuple[int, int], stream: int) -> None:
    """See ``Kernels.dequantize``."""
    out = x.numpy()
    wide = out if x.dtype.name == "float32" else np.empty(x.shape, np.float32)
    _decode(q.numpy(), _table32(format), scale_inv.numpy().reshape(-1), max(tile[0], 1), max(tile[1], 1), wide)
    if wide is not out:
        with np.errstate(over="ignore"):
            out[...] = wide.astype(out.dtype)


def quantize_transpose(x: ArrayView, cast: Cast, dbias: ArrayView | None, workspace: ArrayView | None, stream: int) -> None:
    """See ``Kernels.quantize_transpose``."""
    m, n = x.shape
    values = widened(x)
    padded = np.empty((m, n), np.uint8) if cast.q is None else cast.q.numpy()
    rows = encode_tiles(values, padded, cast.scale.numpy(), (m, n), cast.format, True)
    padded[m:] = 0
    padded[:m, n:] = 0
    if cast.q_t is not None:
        q_t = cast.q_t.numpy()
        _transpose(padded, m, n, q_t)
        q_t[n:] = 0
        q_t[:n, m:] = 0
    _reciprocal(cast.scale, cast.scale_inv)
    if cast.amax is not None:
        accumulate(rows, max(m, 1), cast.amax)
    if dbias is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            dbias.numpy()[...] = values.sum(axis=0, dtype=np.float64).astype(dbias.dtype.numpy)


def quantize_transpose_workspace(rows: int, columns: int) -> int:
    """See ``Kernels.quantize_transpose_workspace``: this engine needs none."""
    return 0
