"""The product with another chip's arithmetic, in integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import accumulation as models
from fp8kit import codec
from fp8kit.accumulation import FLOAT32_BITS, LOWEST, SCALE_BITS, Accumulation
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.reference._numpy import Array, f32, quiet, store
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import Format

# an exact sum: so many int64, 32 bits of it in each, with room for the carries of 2^15 products
_LIMBS, _LIMB = 4, 32
_CARRY_AFTER = 1 << 15
_MASK = np.int64((1 << _LIMB) - 1)


@quiet
def model_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    a_tile: Tile,
    b_tile: Tile,
    accumulation: Accumulation,
    bias: ArrayView | None,
    addend: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.model_gemm``."""
    (m, n), k = out.shape, a.shape[1]
    widths = [tile[1] for tile in (a_tile, b_tile) if tile[1]]
    blocked, block = bool(widths), widths[0] if widths else max(k, 1)
    starts = range(0, k, block)
    scales_a = _scales(a_scale_inv, a_tile, m, k, len(starts))
    scales_b = _scales(b_scale_inv, b_tile, n, k, len(starts))
    codes_a, codes_b = a.numpy()[:m], b.numpy()[:n]
    left, right = _operand(codes_a, a_format), _operand(codes_b, b_format)
    exact = accumulation.exact
    total: Array = np.zeros((m, n), np.float64 if exact and blocked else np.float32)
    product_bits = a_format.mantissa_bits + b_format.mantissa_bits
    if accumulation.group and k:
        own = (*_fields_of_scales(scales_a), *_fields_of_scales(scales_b))
        how = accumulation.fraction_bits, product_bits, models.lowest_bit(a_format, b_format), block
        steps = accumulation.group, accumulation.chunk, accumulation.promote or k
        given: list[Any] = [*left, *right, *own, *how, *steps, total]
        _scaled(*given)
        nan = np.logical_or.outer(np.isnan(scales_a).any(axis=1), np.isnan(scales_b).any(axis=1))
        total[nan] = np.nan
    for i, start in enumerate(() if accumulation.group else starts):
        part = slice(start, start + block)
        sa, ea, sb, eb = (np.ascontiguousarray(field[:, part]) for field in (*left, *right))
        sums: Array = np.zeros((m, n), total.dtype if blocked else np.float32)
        if exact:
            _exact(sa, ea, sb, eb, models.lowest_bit(a_format, b_format), product_bits, blocked, sums)
        else:
            bits, promote = accumulation.fraction_bits, accumulation.promote or block
            _model(sa, ea, sb, eb, bits, product_bits, accumulation.chunk, promote, sums)
        left_scale, right_scale = scales_a[:, i, None], scales_b[None, :, i]
        if not blocked:
            by_rows = a_tile[0] or b_tile[0]
            total = sums * right_scale * left_scale if by_rows else sums * (left_scale * right_scale)
        elif exact:
            total += sums * (left_scale * right_scale).astype(np.float64)
        elif a_tile[0] == b_tile[0] == 1:
            total = _fma(sums * left_scale, right_scale, total)
        else:
            total = _fma(sums, left_scale * right_scale, total)
    values = codec.decode(codes_a, a_format), codec.decode(codes_b, b_format)
    special_a, special_b = (~np.isfinite(value).all(axis=1) for value in values)
    special = np.logical_or.outer(special_a, special_b)
    if special.any():
        total[special] += _sums_of_specials(*values, special)
    found = total.astype(np.float32)
    for added in (bias, addend):
        if added is not None:
            found += f32(added)
    store(out, found)


def _scales(scale_inv: ArrayView, tile: Tile, rows: int, k: int, count: int) -> Array:
    """One scale for each row and block: float32 (rows, count)."""
    high, wide = tile[0] or max(rows, 1), tile[1] or max(k, 1)
    grid = scale_inv.numpy()[:, : max(1, -(-k // wide))]
    return np.broadcast_to(grid[np.arange(rows) // high], (rows, max(count, 1)))


def _operand(codes: Array, fmt: Format) -> tuple[Array, Array]:
    """Significands and exponents, int32 (rows, K)."""
    significand, exponent = models.fields(fmt)
    return significand[codes], exponent[codes]


def _fma(a: Array, b: Array, c: Array) -> Any:
    """a * b + c in float32, rounded once. In float64 the product is exact and the sum is rounded to odd, so
    that the second rounding is the only one that counts (Boldo and Melquiond 2008)."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    found = product + addend
    # TwoSum's error says whether, and to which side, the sum was rounded
    virtual = found - product
    error = (product - (found - virtual)) + (addend - virtual)
    enlarged = np.signbit(error) != np.signbit(found)
    bits = found.view(np.int64)
    bits = np.where((error != 0) & np.isfinite(found), (bits - enlarged) | 1, bits)
    return bits.view(np.float64).astype(np.float32)


def _sums_of_specials(left: Array, right: Array, special: Array) -> Array:
    """Sums of rows that hold NaN or Inf: NaN or Inf, by float64's rules. Finite parts cannot overflow."""
    rows, columns = np.nonzero(special)
    found = np.empty(rows.size)
    for start in range(0, rows.size, 1024):
        part = slice(start, start + 1024)
        found[part] = np.sum(left[rows[part]] * right[columns[part]], axis=1)
    return found


def _fields_of_scales(scales: Array) -> tuple[Array, Array]:
    """Scales as significand * 2^(exponent - SCALE_BITS): int32 like them. NaN and Inf are 0."""
    finite = np.where(np.isfinite(scales), scales, np.float32(0))
    fraction, exponent = np.frexp(finite)
    significand = np.floor(np.ldexp(fraction, models.SCALE_BITS + 1)).astype(np.int32)
    return significand, (exponent - 1).astype(np.int32)


@njit
def _parts(c: Any) -> Any:
    """(fraction, exponent) of |c|, a float32: fraction * 2^(exponent - FLOAT32_BITS)."""
    fraction, exponent = np.int64(0), np.int64(LOWEST)
    if c != 0.0:
        pattern = np.int64(np.float32(abs(c)).view(np.uint32))
        exponent = max(pattern >> FLOAT32_BITS, np.int64(1)) - 127
        fraction = (pattern & 0x7FFFFF) | (np.int64(pattern >= 0x800000) << FLOAT32_BITS)
    return fraction, exponent


@njit
def _shifted(fraction: Any, shift: Any, negative: Any) -> Any:
    """fraction / 2^shift without what lies below 1, with a sign."""
    total = fraction >> min(shift, 63) if shift >= 0 else fraction << -shift
    return -total if negative else total


@njit
def _step(c: Any, sa: Any, ea: Any, sb: Any, eb: Any, bits: Any, f: Any) -> Any:
    """Returns the accumulator after one instruction. ``f``: fraction bits of a product's significand."""
    fraction, exponent = _parts(c)
    most = exponent
    for k in range(sa.size):
        most = max(most, np.int64(ea[k]) + np.int64(eb[k]))
    # the accumulator in units of 2^(most - bits)
    total = _shifted(fraction, most - exponent + FLOAT32_BITS - bits, c < 0)
    up, down = max(bits - f, 0), max(f - bits, 0)
    for k in range(sa.size):
        p = np.int64(sa[k]) * np.int64(sb[k])
        shift = min(most - (np.int64(ea[k]) + np.int64(eb[k])) + down, 63)
        magnitude = (abs(p) << up) >> shift
        total += -magnitude if p < 0 else magnitude
    return _cut(total, most, bits)


@njit
def _cut(total: Any, most: Any, bits: Any) -> Any:
    """total * 2^(most - bits), without what lies below the accumulator's last bit."""
    magnitude = abs(total)
    length, rest = 0, magnitude
    while rest:
        rest >>= 1
        length += 1
    drop = max(length - 1 - min(bits, FLOAT32_BITS), 0)
    magnitude = (magnitude >> drop) << drop
    value = np.ldexp(np.float64(magnitude), most - bits)
    return np.float32(-value if total < 0 else value)


@njit
def _scaled_step(
    c: Any, sa: Any, ea: Any, sb: Any, eb: Any, p: Any, ep: Any, q: Any, eq: Any, first: Any, how: Any
) -> Any:
    """Returns the accumulator after one instruction whose terms are scaled groups. p, ep, q, eq: the scales
    of the blocks of both rows; ``first``: the index of its first product."""
    bits, f, lowest, block, group = how
    fraction, exponent = _parts(c)
    count = -(-sa.size // group)
    terms, exponents = np.zeros(count, np.int64), np.zeros(count, np.int64)
    most = exponent
    for t in range(count):
        at = (first + t * group) // block
        own = np.int64(ep[at]) + np.int64(eq[at])
        if group == 1:
            terms[t] = np.int64(sa[t]) * np.int64(sb[t])
            own += np.int64(ea[t]) + np.int64(eb[t])
        else:  # in units of the lowest bit that a product may have
            for k in range(t * group, min((t + 1) * group, sa.size)):
                product = np.int64(sa[k]) * np.int64(sb[k])
                if product != 0:
                    terms[t] += product << (np.int64(ea[k]) + np.int64(eb[k]) - f - lowest)
        terms[t] *= np.int64(p[at]) * np.int64(q[at])
        exponents[t] = own
        if terms[t] != 0:
            most = max(most, own)
    total = _shifted(fraction, most - exponent + FLOAT32_BITS - bits, c < 0)
    unit = -f if group == 1 else lowest  # the exponent of a term's last bit, the scales' aside
    for t in range(count):
        up = unit - 2 * SCALE_BITS + bits - (most - exponents[t])
        magnitude = abs(terms[t])
        magnitude = magnitude << up if up >= 0 else magnitude >> min(-up, 63)
        total += -magnitude if terms[t] < 0 else magnitude
    return _cut(total, most, bits)


@njit(parallel=True)
def _scaled(
    sa: Array,
    ea: Array,
    sb: Array,
    eb: Array,
    p: Array,
    ep: Array,
    q: Array,
    eq: Array,
    bits: Any,
    f: int,
    lowest: int,
    block: int,
    group: int,
    chunk: int,
    promote: int,
    sums: Array,
) -> None:
    """sums = the sums of all scaled groups of rows of a and b. p, ep: int32 (M, blocks), the scales of a's
    rows; q, eq: those of b's."""
    how, terms = (bits, f, lowest, block, group), sa.shape[1]
    for i in prange(sa.shape[0]):
        for j in range(sb.shape[0]):
            total = np.float32(0)
            for top in range(0, terms, promote):
                c = np.float32(0)
                end = min(top + promote, terms)
                for k in range(top, end, chunk):
                    last = min(k + chunk, end)
                    left, right = (sa[i, k:last], ea[i, k:last]), (sb[j, k:last], eb[j, k:last])
                    c = _scaled_step(
                        c, left[0], left[1], right[0], right[1], p[i], ep[i], q[j], eq[j], k, how
                    )
                total = np.float32(total + c)
            sums[i, j] = total


@njit(parallel=True)
def _model(
    sa: Array, ea: Array, sb: Array, eb: Array, bits: Any, f: int, chunk: int, promote: int, sums: Array
) -> None:
    """sums = the sums of all products of rows of a and b. sa, ea: int32 (M, K); sb, eb: int32 (N, K)."""
    terms = sa.shape[1]
    for i in prange(sa.shape[0]):
        for j in range(sb.shape[0]):
            total = np.float32(0)
            for top in range(0, terms, promote):
                c = np.float32(0)
                end = min(top + promote, terms)
                for k in range(top, end, chunk):
                    last = min(k + chunk, end)
                    c = _step(c, sa[i, k:last], ea[i, k:last], sb[j, k:last], eb[j, k:last], bits, f)
                total = np.float32(total + c)
            sums[i, j] = total


@njit(parallel=True)
def _exact(sa: Array, ea: Array, sb: Array, eb: Array, low: int, f: int, wide: bool, sums: Array) -> None:
    """sums = exact sums, rounded once to float32, or, if ``wide``, to float64. ``low``: exponent of the
    lowest bit of a product."""
    terms = sa.shape[1]
    for i in prange(sa.shape[0]):
        limbs = np.empty(_LIMBS, np.int64)
        for j in range(sb.shape[0]):
            limbs[:] = 0
            for k in range(terms):
                p = np.int64(sa[i, k]) * np.int64(sb[j, k])
                if p != 0:
                    place = np.int64(ea[i, k]) + np.int64(eb[j, k]) - f - low
                    limbs[place // _LIMB] += p << (place % _LIMB)
                if k % _CARRY_AFTER == _CARRY_AFTER - 1:
                    _carry(limbs)
            sums[i, j] = _rounded(limbs, low, wide)


@njit
def _carry(limbs: Any) -> None:
    """Every limb but the last in [0, 2^32)."""
    for t in range(limbs.size - 1):
        limbs[t + 1] += limbs[t] >> _LIMB
        limbs[t] &= _MASK


@njit
def _rounded(limbs: Any, low: Any, wide: Any) -> Any:
    """Returns the number that the limbs hold, times 2^low, to nearest even."""
    _carry(limbs)
    negative = limbs[limbs.size - 1] < 0
    if negative:
        for t in range(limbs.size):
            limbs[t] = -limbs[t]
        _carry(limbs)
    exponent = low + _LIMB * (_LIMBS - 2)
    for _ in range(_LIMBS - 1):  # the leading limb to the last place
        if limbs[_LIMBS - 1] == 0:
            for t in range(_LIMBS - 1, 0, -1):
                limbs[t] = limbs[t - 1]
            limbs[0] = 0
            exponent -= _LIMB
    if limbs[_LIMBS - 1] == 0:
        return 0.0
    # its highest 64 bits, the last of them 1 where anything lies below
    value = (np.uint64(limbs[_LIMBS - 1]) << np.uint64(_LIMB)) | np.uint64(limbs[_LIMBS - 2])
    gap = 0
    while (value >> np.uint64(63 - gap)) == 0:
        gap += 1
    below = limbs[_LIMBS - 3] << gap
    value = (value << np.uint64(gap)) | np.uint64(below >> _LIMB)
    if below & _MASK or limbs[0]:
        value |= np.uint64(1)
    exponent -= gap
    found = np.float64(value) if wide else np.float64(np.float32(value))
    found = np.ldexp(found, exponent)
    return -found if negative else found
