"""Statistics of tensors: sums in float64, a few parts side by side that are put together in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec, formats
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol import Rule
from fp8kit.backends.protocol.statistics import (
    CAST_COUNTS,
    CODE_COUNTS,
    EXPONENTS,
    OVERFLOW_SLACK,
    TENSOR_COUNTS,
    tile_within,
)
from fp8kit.backends.reference._numpy import blocks, f32, quiet
from fp8kit.backends.reference.scales import scales_of, tiles
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import Format

_PARTS = 64  # of a tensor, side by side, at most
_PART = 1 << 14  # elements of a part, at least
_RUN = 4096  # elements whose mean is taken first
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_23, _31, _255 = np.uint32(23), np.uint32(31), np.uint32(255)
_NAN, _INF, _MINUS_INF = EXPONENTS, EXPONENTS + 1, EXPONENTS + 2
_ELEMENTS, _VALUES, _CODES, _SATURATED, _OVERFLOWED = range(EXPONENTS, CAST_COUNTS)


def _parts(size: int) -> int:
    return max(1, min(_PARTS, size // _PART))


def _wide(x: ArrayView) -> Any:
    """Returns the values as float32, their bits, C-contiguous: the kernels below are compiled for one
    dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(f32(x)).view(np.uint32)


@njit
def _count(wide: Any, counts: Any) -> bool:
    """Count one number, the bits of a float32, by its exponent. Whether it is finite."""
    magnitude = np.uint32(wide & _MAGNITUDE)
    exponent = np.uint32(magnitude >> _23)
    counts[256 if magnitude == 0 else exponent] += 1
    return bool(exponent != _255)


@njit(parallel=True)
def _tensor(x: Any, counts: Any, moments: Any) -> None:
    """counts (parts, 260) and moments (parts, 9), whose last is the number of finite values, of parts of x,
    bits of float32 (n,)."""
    parts = len(counts)
    step = -(-len(x) // parts)
    for part in prange(parts):
        count, mean, apart = np.float64(0), np.float64(0), np.float64(0)
        low, high, least, total, squares, fourths = np.inf, -np.inf, np.inf, 0.0, 0.0, 0.0
        end = min((part + 1) * step, len(x))
        for start in range(part * step, end, _RUN):
            stop = min(start + _RUN, end)
            many, sum_ = 0.0, 0.0
            for i in range(start, stop):
                wide = x[i]
                if _count(wide, counts[part]):
                    value = np.float64(np.uint32(wide).view(np.float32))
                    many += 1.0
                    sum_ += value
                    magnitude = abs(value)
                    square = value * value
                    low, high = min(low, value), max(high, value)
                    if magnitude > 0:
                        least = min(least, magnitude)
                    total += magnitude
                    squares += square
                    fourths += square * square
                elif np.uint32(wide & _MAGNITUDE) > np.uint32(0x7F800000):
                    counts[part, _NAN] += 1
                else:
                    counts[part, _MINUS_INF if wide >> _31 else _INF] += 1
            if many:
                own, around = sum_ / many, 0.0
                for i in range(start, stop):
                    wide = x[i]
                    if np.uint32((wide >> _23) & _255) != _255:
                        off = np.float64(np.uint32(wide).view(np.float32)) - own
                        around += off * off
                off = own - mean
                apart += around + off * off * count * many / (count + many)
                count += many
                mean += off * many / count
        moments[part] = (low, high, least, total, squares, fourths, mean, apart, count)


def tensor_statistics(
    x: ArrayView, counts: ArrayView, moments: ArrayView, workspace: ArrayView | None, stream: int
) -> None:
    """See ``Kernels.tensor_statistics``."""
    own, made = _moments(x)
    counts.numpy()[:] += own
    moments.numpy()[:] = made


def _moments(x: ArrayView) -> tuple[Any, tuple[float, ...]]:
    """Counts and moments of x. Parts' means and deviations are put together by Chan's rule."""
    parts = _parts(x.size)
    own, found = np.zeros((parts, TENSOR_COUNTS), np.int64), np.zeros((parts, 9))
    _tensor(_wide(x).reshape(-1), own, found)
    count = mean = apart = 0.0
    for *_, its_mean, its_apart, many in found:
        if many:
            off = its_mean - mean
            apart += its_apart + off * off * count * many / (count + many)
            count += many
            mean += off * many / count
    low, high, least = found[:, 0].min(), found[:, 1].max(), found[:, 2].min()
    return own.sum(0), (low, high, least, *found[:, 3:6].sum(0), mean, apart)


@njit(parallel=True)
def _tiles(x: Any, height: Any, width: Any, found: Any) -> None:
    """found (rows of tiles, 2): the largest ratios of each row of tiles of x, bits (M, N)."""
    for i in prange(len(found)):
        for left in range(0, x.shape[1], width):
            most, least, squares, count = 0.0, np.inf, 0.0, 0.0
            for row in range(i * height, min((i + 1) * height, x.shape[0])):
                for column in range(left, min(left + width, x.shape[1])):
                    magnitude = np.uint32(x[row, column] & _MAGNITUDE)
                    if np.uint32(magnitude >> _23) != _255:
                        value = np.float64(np.uint32(magnitude).view(np.float32))
                        count += 1.0
                        most = max(most, value)
                        if value > 0:
                            least = min(least, value)
                        squares += value * value
            if most > 0:
                found[i, 0] = max(found[i, 0], most * most * count / squares)
                found[i, 1] = max(found[i, 1], most / least)


def tile_statistics(x: ArrayView, ratios: ArrayView, tile: Tile, stream: int) -> None:
    """See ``Kernels.tile_statistics``."""
    if x.size:
        rows, columns = x.shape
        height, width = tile_within(tile, rows, columns)
        found = np.zeros((-(-rows // height), 2))
        _tiles(_wide(x), height, width, found)
        total = ratios.numpy()
        np.maximum(total, found.max(0), out=total)


@njit(parallel=True)
def _cast(
    x: Any, q: Any, scales: Any, height: Any, width: Any, table: Any, top: Any, counts: Any, sums: Any
) -> None:
    """counts (parts, 262) and sums (parts, 2) of parts of the rows of x, bits (M, N), and q (M, N)."""
    parts = len(counts)
    step = -(-len(x) // parts)
    for part in prange(parts):
        errors, squares = 0.0, 0.0
        values, nonzero = np.int64(0), np.int64(0)
        saturated, overflowed = np.int64(0), np.int64(0)
        for row in range(part * step, min((part + 1) * step, len(x))):
            for tile in range(scales.shape[1]):
                inverse = scales[row // height, tile]
                used = inverse != 0
                limit = np.float64(top) * np.float64(inverse)
                for column in range(tile * width, min((tile + 1) * width, x.shape[1])):
                    value = np.float64(np.uint32(x[row, column]).view(np.float32))
                    code = table[q[row, column]]
                    made = np.float64(np.float32(code * inverse))
                    errors += (value - made) * (value - made)
                    squares += value * value
                    values += value != 0
                    magnitude = abs(value)
                    nonzero += used and code != 0
                    saturated += used and abs(code) == top
                    beyond = magnitude * (1 - OVERFLOW_SLACK) > limit and magnitude < np.inf
                    overflowed += used and beyond
        counts[part, _VALUES] = values
        counts[part, _CODES] = nonzero
        counts[part, _SATURATED] = saturated
        counts[part, _OVERFLOWED] = overflowed
        sums[part] = (errors, squares)


@quiet
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
    """See ``Kernels.cast_statistics``."""
    scales = np.array(scale_inv.numpy()).reshape(-1)
    total, made = counts.numpy(), sums.numpy()
    exponents = scales.view(np.uint32) >> _23 & _255
    total[:EXPONENTS] += np.bincount(np.where(scales == 0, 256, exponents), minlength=EXPONENTS)
    known = scales[~np.isnan(scales)]
    made[:] = 0, 0, known.min(initial=np.inf), known.max(initial=-np.inf)
    if not x.size:
        return
    rows, columns = x.shape
    height, width = tile_within(tile, rows, columns)
    grid = scales.reshape(*tiles((rows, columns), (height, width)))
    parts = _parts(x.size)
    own, found = np.zeros((parts, CAST_COUNTS), np.int64), np.zeros((parts, 2))
    table = codec.table(format).astype(np.float32)
    codes = np.array(q.numpy())
    _cast(_wide(x), codes, grid, height, width, table, np.float32(format.max), own, found)
    total += own.sum(0)
    total[_ELEMENTS] += x.size
    made[:2] = found.sum(0)


@quiet
def pair_statistics(
    x: ArrayView, twin: ArrayView, sums: ArrayView, workspace: ArrayView | None, stream: int
) -> None:
    """See ``Kernels.pair_statistics``."""
    found, (rows, columns) = np.zeros(4), x.shape
    a, b = f32(x), f32(twin)
    for part in blocks(rows, columns):
        p, q = a[part].astype(np.float64), b[part].astype(np.float64)
        found += ((p * q).sum(), (p * p).sum(), (q * q).sum(), ((p - q) * (p - q)).sum())
    sums.numpy()[:] = found


@njit(parallel=True)
def _codes(x: Any, scale: Any, least: Any, largest: Any, limit: Any, counts: Any) -> None:
    """counts (parts, 4) of parts of x, bits (n,), whose cast by ``scale`` has a code that is not 0 from
    ``least`` on, and the largest one from ``largest`` on."""
    parts = len(counts)
    step = -(-len(x) // parts)
    for part in prange(parts):
        values, codes, saturated, overflowed = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for i in range(part * step, min((part + 1) * step, len(x))):
            magnitude = np.uint32(x[i] & _MAGNITUDE).view(np.float32)
            scaled = np.float32(magnitude * scale)
            values += magnitude != 0
            codes += not scaled < least  # NaN has a code
            saturated += scaled >= largest
            overflowed += np.float64(magnitude) * (1 - OVERFLOW_SLACK) > limit and magnitude < np.inf
        counts[part] = (values, codes, saturated, overflowed)


@quiet
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
    """See ``Kernels.brief_statistics``."""
    if counts is not None and moments is not None:
        own, made = _moments(x)
        counts.numpy()[:] = x.size, *own[EXPONENTS:]
        moments.numpy()[:] = made if deep else (*made[:2], np.inf, *made[3:5], 0, *made[6:])
    if codes is None or scale_inv is None or format is None:
        return
    if rule is not None and amax is not None:
        by = scales_of(amax.numpy(), format.max, rule.power_2, rule.epsilon, formats.float32.max)[0]
    else:
        assert scale is not None
        by = scale.numpy()[0]
    inverse = np.float32(1) / by
    found = np.zeros((_parts(x.size), CODE_COUNTS - 1), np.int64)
    least, largest = map(np.float32, codec.code_ends(format))
    limit = np.float64(format.max) * np.float64(inverse) or np.inf
    _codes(_wide(x).reshape(-1), by, least, largest, limit, found)
    total = found.sum(0)
    if not inverse:
        total[1:] = 0
    codes.numpy()[:] = x.size, *total
    scale_inv.numpy()[:] = (inverse, inverse) if x.size else (np.inf, -np.inf)
