"""Casts by blocks of any rule, and rotations: a matrix whose contraction is its first dimension is worked on
transposed, so that blocks and rotations lie along rows."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp8kit import blocks as rules
from fp8kit import codec
from fp8kit.arrays import ArrayView, as_view
from fp8kit.backends.reference import scales
from fp8kit.backends.reference._numpy import Float32, f32, quiet, store
from fp8kit.backends.reference.cast_rows import INF, MAGNITUDE, rounding
from fp8kit.backends.reference.philox import philox4, row_words
from fp8kit.backends.reference.quantize import decode, encode, table32
from fp8kit.backends.reference.scales import row_amax, scales_of, tiles
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import E4M3, Format, float32
from fp8kit.quantization import EDEN, FOUR_OVER_SIX, GAUSS, Quantizer

Array = np.ndarray[Any, Any]

_EXPONENT, _MANTISSA, _IMPLICIT = np.uint32(0x7F800000), np.uint32(0x007FFFFF), np.uint32(0x00800000)
_SIGN = np.uint32(0x80000000)
_2_32 = 2.0**32
_SIGNS_GROUP = np.uint64(rules.SIGNS_AT // 4)  # the group of four words that random signs begin with


# --- rotations ----------------------------------------------------------------------------------------------


@njit
def _butterflies(x: Any, start: Any) -> None:
    """The first three rounds of a rotation, of the eight values from ``start`` on."""
    a, b, c, d = x[start], x[start + 1], x[start + 2], x[start + 3]
    e, f, g, h = x[start + 4], x[start + 5], x[start + 6], x[start + 7]
    a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
    a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
    x[start], x[start + 1], x[start + 2], x[start + 3] = a + e, b + f, c + g, d + h
    x[start + 4], x[start + 5], x[start + 6], x[start + 7] = a - e, b - f, c - g, d - h


@njit(parallel=True)
def _rotate(x: Any, n: Any, flips: Any, factor: Any) -> None:
    """x rotated in place, along its rows. x: float32 (R, C); n: a power of two from 8 on; flips: uint32 (C,),
    the sign bit where a sign is minus; factor: float32 1 / sqrt(n)."""
    whole = x.shape[1] // n * n
    for i in prange(x.shape[0]):
        row = x[i, :whole]
        bits = row.view(np.uint32)
        for j in range(whole):
            bits[j] ^= flips[j]
        for start in range(0, whole, 8):
            _butterflies(row, start)
        distance = 8
        while distance < n:
            for start in range(0, whole, 2 * distance):
                low, high = row[start : start + distance], row[start + distance : start + 2 * distance]
                for j in range(distance):
                    a, b = low[j], high[j]
                    low[j] = a + b
                    high[j] = a - b
            distance *= 2
        for j in range(whole):
            row[j] *= factor


@njit
def _random_flips(rng_seed: Any, rng_offset: Any, flips: Any) -> None:
    """flips[k] = the sign bit where the contract's random sign of index k is minus."""
    seed, offset = np.uint64(rng_seed), np.uint64(rng_offset)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for start in range(0, flips.size, 128):
        group = _SIGNS_GROUP + np.uint64(start // 128)
        four = philox4(
            np.uint32(group & low),
            np.uint32(group >> half),
            np.uint32(offset & low),
            np.uint32(offset >> half),
            np.uint32(seed & low),
            np.uint32(seed >> half),
        )
        for k in range(start, min(start + 128, flips.size)):
            bit = np.uint32(four[(k // 32) % 4] >> np.uint32(k % 32))
            flips[k] = np.uint32(bit << np.uint32(31)) & _SIGN


def _rotated(x: Float32, n: int, signs: str, rng: ArrayView | None) -> Float32:
    """Returns a copy of x, float32 (R, C), rotated along its rows."""
    values = x.copy()
    _rotate(values, n, _flips(x.shape[1], signs, rng), np.float32(1 / np.sqrt(n)))
    return values


def _flips(count: int, signs: str, rng: ArrayView | None) -> Array:
    """uint32 (count,): the sign bit where the sign of an index is minus."""
    flips = np.zeros(count, np.uint32)
    if signs == "random":
        assert rng is not None
        seed, offset = rng.numpy()
        _random_flips(seed, offset, flips)
    else:
        flips[rules.signs_of(signs, count) < 0] = _SIGN
    return flips


def _lying(x: Array, along: int) -> Array:
    """Returns a matrix with its contraction along its rows, C-contiguous."""
    return np.ascontiguousarray(x if along else x.T)


@quiet
def rotate(
    x: ArrayView,
    out: ArrayView | None,
    amax: ArrayView | None,
    n: int,
    signs: str,
    along: int,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.rotate``."""
    if not x.size:
        return
    values = _rotated(_lying(f32(x), along), n, signs, rng)
    if amax is not None:
        scales.amax(as_view(values), amax, values.shape, stream)
    if out is not None:
        store(out, values if along else values.T)


@quiet
def rotate_back(
    x: ArrayView,
    out: ArrayView,
    inside: ArrayView | None,
    n: int,
    signs: str,
    along: int,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.rotate_back``."""
    if not x.size:
        return
    values = f32(x)
    if inside is not None:
        values = np.where(inside.numpy() != 0, values, np.float32(0))
    values = _lying(values, along)
    if n:
        flips, values = _flips(values.shape[1], signs, rng), values.copy()
        _rotate(values, n, np.zeros_like(flips), np.float32(1 / np.sqrt(n)))
        whole = values.shape[1] // n * n
        bits = values.view(np.uint32)
        bits[:, :whole] ^= flips[:whole]
    store(out, values if along else values.T)


# --- scales -------------------------------------------------------------------------------------------------


class _Scales(NamedTuple):
    """Scales of the tiles, arrays (down, across): the factor before the cast, its reciprocal, the code or
    None, and what codes are multiplied by to give values."""

    scale: Array
    inverse: Array
    codes: Array | None
    value: Array


def _four_over_six(x: Float32, quantizer: Quantizer, amax: Array, along: int) -> _Scales:
    """Returns the scales of x's tiles by ``blocks.four_over_six``, some lines of tiles at a time. ``amax``:
    (1, 1), or (R, 1) of each row."""
    (rows, columns), found = quantizer.tile, []
    across = -(-x.shape[1] // columns)
    step = max(1, (1 << 18) // (rows * across * columns)) * rows
    for top in range(0, len(x), step):
        part = x[top : top + step]
        down = -(-len(part) // rows)
        padded = np.zeros((down * rows, across * columns), np.float32)
        padded[: len(part), : x.shape[1]] = part
        blocks = padded.reshape(down, rows, across, columns).swapaxes(1, 2).reshape(-1, rows, columns)
        if rows > 1 and not along:  # a square's rows are the matrix's own
            blocks = blocks.swapaxes(1, 2)
        own = np.repeat(amax[top : top + step], across) if quantizer.row_scaled else amax
        three = rules.four_over_six(blocks, own, quantizer.scale_rule, quantizer.epsilon)[:3]
        found.append([each.reshape(down, across) for each in three])
    codes, scale, inverse = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return _Scales(scale, inverse, codes, table32(E4M3)[codes])


def _blocks_of(x: Float32, columns: int) -> Array:
    """Returns the blocks of x's rows, (R * across, columns), with zeros where they end behind it."""
    across = -(-x.shape[1] // columns)
    padded = np.zeros((len(x), across * columns), np.float32)
    padded[:, : x.shape[1]] = x
    return padded.reshape(-1, columns)


def _eden(x: Float32, quantizer: Quantizer, amax: Array, along: int, draw: int, rng: ArrayView) -> _Scales:
    """Returns the scales of x's tiles by ``blocks.eden``, each by the word of its first element."""
    first = _random(x, along, draw, rng)[:, ::16]
    group = max(quantizer.hadamard, 16)
    codes, scale, value = rules.eden(x, amax, first, group, quantizer.epsilon, quantizer.factor)
    inverse = rules.nvfp4_tensor_scale(amax.reshape(()), quantizer.format, rules.tensor_bound(quantizer))[1]
    return _Scales(scale, value * inverse * rules.factor_inverse(quantizer), codes, value)


def _scales(
    x: Float32,
    quantizer: Quantizer,
    tensor_amax: ArrayView | None,
    inf: float,
    along: int,
    draw: int,
    rng: ArrayView | None,
) -> _Scales:
    """Returns the scales of x's tiles, ``quantizer.factor`` among them. ``inf``: ``value_for_inf``."""
    if quantizer.scale_rule == EDEN:
        assert tensor_amax is not None and rng is not None
        return _eden(x, quantizer, tensor_amax.numpy(), along, draw, rng)
    found = _plain_scales(x, quantizer, tensor_amax, inf, along)
    if quantizer.factor == 1:
        return found
    inverse = found.inverse * rules.factor_inverse(quantizer)
    # values of MX and NVFP4 stay exact: the tensor's scale has the factor
    value = inverse if found.codes is None else found.value
    scale = np.minimum(found.scale * np.float32(quantizer.factor), rules.FLOAT32_MAX)
    return _Scales(scale, inverse, found.codes, value)


def _plain_scales(
    x: Float32, quantizer: Quantizer, tensor_amax: ArrayView | None, inf: float, along: int
) -> _Scales:
    """Returns the same without a factor."""
    if quantizer.scale_rule in FOUR_OVER_SIX:
        assert tensor_amax is not None
        return _four_over_six(x, quantizer, tensor_amax.numpy().reshape(-1, 1), along)
    kind, (rows, columns), fmt = rules.kind_of(quantizer), quantizer.tile, quantizer.format
    lines = np.empty((len(x), tiles(x.shape, quantizer.tile)[1]), np.uint32)
    row_amax(x.view(np.uint32), columns, INF if kind == "block" else MAGNITUDE, lines)
    found = lines if rows == 1 else np.maximum.reduceat(lines, np.arange(0, len(x), rows), axis=0)
    amax = np.maximum(found.view(np.float32), np.float32(quantizer.epsilon))
    if kind == "block" and tensor_amax is not None:
        amax, inf = np.maximum(amax, tensor_amax.numpy()), float32.max
    if kind == "mx":
        if quantizer.scale_rule == GAUSS:
            codes = rules.gauss_bytes(_blocks_of(x, columns)).reshape(amax.shape)
        else:
            codes = rules.scale_bytes(amax, fmt, quantizer.scale_rule)
        scale, inverse = rules.scales_of_bytes(codes)
        return _Scales(scale, inverse, codes, inverse)
    if kind == "moss":
        assert tensor_amax is not None
        own, own_inverse = rules.nvfp4_tensor_scale(tensor_amax.numpy().reshape(()), fmt, 1.0)
        codes = rules.scale_bytes(amax * own, fmt, quantizer.scale_rule)
        scale, inverse = rules.scales_of_bytes(codes)
        return _Scales(np.minimum(scale * own, rules.FLOAT32_MAX), inverse * own_inverse, codes, inverse)
    if kind == "nvfp4":
        assert tensor_amax is not None
        codes, scale, inverse, _ = rules.nvfp4_scales(amax, tensor_amax.numpy().reshape(-1, 1), fmt)
        return _Scales(scale, inverse, codes, table32(E4M3)[codes])
    scale = scales_of(amax, fmt.max, quantizer.power_2, quantizer.epsilon, inf)
    inverse = np.float32(1) / scale
    return _Scales(scale, inverse, None, inverse)


# --- codes --------------------------------------------------------------------------------------------------


class _Steps(NamedTuple):
    """What ``_stochastic_row`` and ``_fixed_row`` know of a format with a zero and a mantissa."""

    shift: np.uint32  # mantissa bits that a float32 has more
    lowest: np.uint32  # the exponent field, in place, of the smallest normal value
    most: np.float32  # the largest value
    nan: np.uint32  # the code of NaN
    sign: np.uint32  # the sign bit, 0 where negative codes are two's complement
    mask: np.uint32  # of a code's bits


@cache
def _steps(fmt: Format) -> _Steps | None:
    """Returns the constants of a format; None for those that the codec casts."""
    if not fmt.signed or not fmt.zero or fmt.mantissa_bits == 0 or fmt.bias > 64:
        return None
    return _Steps(
        np.uint32(23 - fmt.mantissa_bits),
        np.uint32((1 - fmt.bias + 127) << 23),
        np.float32(fmt.max),
        np.uint32(fmt.max_code if fmt.nan_code is None else fmt.nan_code),
        np.uint32(0 if fmt.twos_complement else fmt.sign_code),
        np.uint32((1 << fmt.bits) - 1),
    )


@njit
def _stochastic_row(x: Any, factor: Any, how: Any, random: Any, bits: Any, q: Any) -> None:
    """q = codes of x * factor, rounded by the first ``bits`` bits of the words. x: float32 (n,); random:
    uint32 (n,); bits: 0 is to nearest even; how: ``_Steps``; q: uint8 (n,).

    A value's place between multiples of the spacing in its binade is exact in float64.
    """
    shift, lowest, most, nan, sign, mask = how
    unused, scale = np.uint32(32 - bits), 2.0 ** np.float64(bits)
    for j in range(x.size):
        scaled = np.float32(x[j] * factor)
        wide = np.float32(scaled).view(np.uint32)
        magnitude = np.uint32(wide & MAGNITUDE)
        a = min(np.uint32(magnitude).view(np.float32), most)
        binade = max(np.uint32(np.float32(a).view(np.uint32) & _EXPONENT), lowest)
        spacing = np.uint32(binade - np.uint32((np.uint32(23) - shift) << np.uint32(23))).view(np.float32)
        steps = np.float64(a) / np.float64(spacing)
        below = np.floor(steps)
        fraction = steps - below
        code = np.uint32(np.uint32(np.uint32(binade - lowest) >> shift) + np.uint32(below))
        if bits == 0:
            up = fraction > 0.5 or (fraction == 0.5 and code & np.uint32(1))
        elif bits == 32:
            up = np.float64(random[j]) < fraction * _2_32
        else:
            up = np.float64(random[j] >> unused) < np.floor(fraction * scale)
        code = np.uint32(code + np.uint32(up))
        if wide & _SIGN:
            code = np.uint32(code | sign) if sign else np.uint32(np.uint32(0) - code) & mask
        q[j] = np.uint8(nan if magnitude > INF else code)


@njit(parallel=True)
def _encode_steps(
    x: Any, scale: Any, rows: Any, columns: Any, how: Any, random: Any, bits: Any, q: Any
) -> None:
    """q = codes of x * scale, by ``_stochastic_row``. x: float32 (R, C); scale: float32 (down, across), of
    tiles of (rows, columns); random: uint32 (R, C), or (1, C) where ``bits`` is 0; q: uint8 (R, C)."""
    for i in prange(x.shape[0]):
        line = random[min(np.int64(i), random.shape[0] - 1)]
        for t in range(scale.shape[1]):
            start, stop = t * columns, min((t + 1) * columns, x.shape[1])
            _stochastic_row(
                x[i, start:stop], scale[i // rows, t], how, line[start:stop], bits, q[i, start:stop]
            )


def _random(x: Float32, along: int, draw: int, rng: ArrayView) -> Array:
    """Returns the words of x's elements, uint32 (R, C), which are counted along the rows of the matrix."""
    rows, columns = x.shape if along else x.shape[::-1]
    return _lying(row_words(rng, (draw << 48) + columns * np.arange(rows), columns), along)


def _codes(
    x: Float32, scale: Array, quantizer: Quantizer, along: int, draw: int, rng: ArrayView | None, q: Array
) -> None:
    """q = codes of x * scale. x: float32 (R, C) with its contraction along its rows; scale: float32 (down,
    across); q: uint8 (R, C)."""
    (rows, columns), fmt, bits = quantizer.tile, quantizer.format, quantizer.stochastic_bits
    random = np.empty((1, x.shape[1]), np.uint32)
    if quantizer.ties == "down":  # up where the place between two codes is more than a half
        bits = 32
        random = np.full(x.shape, 1 << 31, np.uint32)
    elif bits:
        assert rng is not None
        random = _random(x, along, draw, rng)
    fast, steps = None if bits else rounding(fmt, True), _steps(fmt)
    if fast is not None:
        amax = np.empty((len(x), scale.shape[1]), np.uint32)  # not looked at
        encode(x.view(np.uint32), scale.reshape(-1), rows, columns, fast, q, amax)
    elif steps is not None:
        _encode_steps(x, scale, rows, columns, steps, random, bits, q)
    else:
        each = np.repeat(np.repeat(scale, rows, 0)[: len(x)], columns, 1)[:, : x.shape[1]]
        if bits:
            q[...] = codec.encode(x * each, fmt, "stochastic", True, random, bits)
        else:
            q[...] = codec.encode(x * each, fmt)


@njit(parallel=True)
def _inside(x: Any, scale: Any, rows: Any, columns: Any, most: Any, out: Any) -> None:
    """out = |x * scale| <= most. x: float32 (R, C); scale: float32 (down, across); out: uint8 (R, C)."""
    for i in prange(x.shape[0]):
        for t in range(scale.shape[1]):
            by = scale[i // rows, t]
            for j in range(t * columns, min((t + 1) * columns, x.shape[1])):
                out[i, j] = np.uint8(abs(np.float32(x[i, j] * by)) <= most)


@quiet
def cast_blocks(
    x: ArrayView,
    q: ArrayView | None,
    scale_inv: ArrayView | None,
    scale_codes: ArrayView | None,
    values: ArrayView | None,
    tensor_amax: ArrayView | None,
    tensor_scale_inv: ArrayView | None,
    quantizer: Quantizer,
    along: int,
    draw: int,
    rng: ArrayView | None,
    inside: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.cast_blocks``."""
    if tensor_scale_inv is not None:
        own = np.float32(1)
        if tensor_amax is not None:
            how = quantizer.format, rules.tensor_bound(quantizer)
            own = rules.nvfp4_tensor_scale(tensor_amax.numpy(), *how)[1]
        tensor_scale_inv.numpy()[...] = own * rules.factor_inverse(quantizer)
    if not x.size:
        return
    source = _lying(f32(x), along)
    if quantizer.hadamard:
        source = _rotated(source, quantizer.hadamard, quantizer.signs, rng)
    found = _scales(source, quantizer, tensor_amax, x.dtype.max, along, draw, rng)
    for view, array in ((scale_inv, found.inverse), (scale_codes, found.codes)):
        if view is not None and array is not None:
            view.numpy().reshape(-1)[:] = (array if along else array.T).reshape(-1)
    if inside is not None:
        kept = np.empty(source.shape, np.uint8)
        _inside(source, found.scale, *quantizer.tile, np.float32(quantizer.format.max), kept)
        inside.numpy()[...] = kept if along else kept.T
    if q is None and values is None:
        return
    codes = q.numpy() if q is not None and along else np.empty(source.shape, np.uint8)
    _codes(source, found.scale, quantizer, along, draw, rng, codes)
    if q is not None and not along:
        q.numpy()[...] = codes.T
    if values is not None:
        decoded = np.empty_like(source)
        table, by = table32(quantizer.format), found.value.reshape(-1)
        decode(codes, table, by, *quantizer.tile, decoded.view(np.uint32))
        store(values, decoded if along else decoded.T)
