"""The casts of one row, called by the parallel kernels: widen, scale, encode; decode, scale, narrow. Every
loop here becomes vector code: it starts at 0, walks contiguous memory and has no branches.

High-precision rows travel as integers whose type says what their bits are: uint32 float32, uint16 bfloat16,
int16 float16. So Numba compiles one loop for each dtype, and 16-bit values are widened in registers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from fp8kit import codec, formats
from fp8kit.arrays import ArrayView
from fp8kit.backends.reference.threads import njit
from fp8kit.formats import DType, Format

Array = np.ndarray[Any, Any]

# the bits of a float32 without its sign, and those of Inf
MAGNITUDE, INF = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_ONE, _13, _16 = np.uint32(1), np.uint32(13), np.uint32(16)

_HALF_MAGNITUDE = np.uint32(0x7FFF)
_HALF_NORMAL, _HALF_INF = np.uint32(0x0400), np.uint32(0x7C00)
_HALF_REBIAS = np.uint32((127 - 15) << 23)
_HALF_UNIT = np.float32(2.0**-24)  # float16's smallest subnormal
_HALF_MAGIC = np.float32(0.5)  # its last place is that unit
_HALF_MAGIC_BITS = _HALF_MAGIC.view(np.uint32)
_HALF_SMALLEST = np.float32(2.0**-14).view(np.uint32)  # the smallest normal value
_HALF_BEYOND = np.float32(2.0**16).view(np.uint32)  # what gives the code of Inf
_HALF_NAN = np.uint32(0x7E00)
# half a unit of the last kept place, less one
_HALF_ROUND, _BFLOAT_ROUND = np.uint32(0x0FFF), np.uint32(0x7FFF)
_BFLOAT_QUIET = np.uint32(0x0040)

_BITS = {formats.float32: formats.uint32, formats.bfloat16: formats.uint16, formats.float16: formats.int16}


def bits(x: ArrayView) -> Array:
    """Returns the values of ``x`` as the integers that the kernels take, C-contiguous; float64 is rounded to
    float32 first.

    Integers also keep Numba from seeing a read-only float array: it would compile each kernel again for that.
    """
    if x.dtype in _BITS:
        return np.ascontiguousarray(x.view(_BITS[x.dtype]).numpy())
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x.numpy(), np.float32).view(np.uint32)


def bits_dtype(dtype: DType) -> DType:
    """Returns the integer dtype that stands for a high-precision one in the kernels."""
    return _BITS[dtype]


def _of_float32(value: Any) -> Any:
    return value


def _of_bfloat16(value: Any) -> Any:
    return np.uint32(np.uint32(value) << _16)


def _of_float16(value: Any) -> Any:
    half = np.uint32(np.uint16(value))
    magnitude = np.uint32(half & _HALF_MAGNITUDE)
    wide = np.uint32(np.uint32(magnitude << _13) + _HALF_REBIAS)
    wide = np.uint32(wide + _HALF_REBIAS) if magnitude >= _HALF_INF else wide
    tiny = np.float32(np.float32(np.int32(magnitude)) * _HALF_UNIT).view(np.uint32)
    wide = tiny if magnitude < _HALF_NORMAL else wide
    return np.uint32(wide | np.uint32(np.uint32(half & ~_HALF_MAGNITUDE) << _16))


_WIDEN = {types.uint32: _of_float32, types.uint16: _of_bfloat16, types.int16: _of_float16}


def float32_bits(value: Any) -> Any:
    """One element of ``bits`` as the bits of a float32, exactly. Only Numba code can call it."""
    raise NotImplementedError


@overload(float32_bits)  # type: ignore[untyped-decorator]
def _float32_bits(value: Any) -> Any:
    return _WIDEN[value]


def _to_float32(wide: Any, like: Any) -> Any:
    return wide


def _to_bfloat16(wide: Any, like: Any) -> Any:
    high = np.uint32(wide >> _16)
    rounded = np.uint32(np.uint32(np.uint32(wide + _BFLOAT_ROUND) + np.uint32(high & _ONE)) >> _16)
    return np.uint16(np.uint32(high | _BFLOAT_QUIET) if np.uint32(wide & MAGNITUDE) > INF else rounded)


def _to_float16(wide: Any, like: Any) -> Any:
    magnitude = np.uint32(wide & MAGNITUDE)
    cut = np.uint32(min(magnitude, _HALF_BEYOND))
    odd = np.uint32(np.uint32(cut >> _13) & _ONE)
    large = np.uint32(np.uint32(np.uint32(np.uint32(cut - _HALF_REBIAS) + _HALF_ROUND) + odd) >> _13)
    small = np.uint32(
        np.float32(np.uint32(cut).view(np.float32) + _HALF_MAGIC).view(np.uint32) - _HALF_MAGIC_BITS
    )
    code = large if cut >= _HALF_SMALLEST else small
    code = _HALF_NAN if magnitude > INF else code
    return np.int16(np.uint16(np.uint32(code | np.uint32(np.uint32(wide & ~MAGNITUDE) >> _16))))


_NARROW = {types.uint32: _to_float32, types.uint16: _to_bfloat16, types.int16: _to_float16}


def narrowed(wide: Any, like: Any) -> Any:
    """Returns the bits of a float32 rounded, to nearest even, to the dtype that the elements of ``like``
    stand for. Only Numba code can call it."""
    raise NotImplementedError


@overload(narrowed)  # type: ignore[untyped-decorator]
def _narrowed(wide: Any, like: Any) -> Any:
    return _NARROW[like.dtype]


class Rounding(NamedTuple):
    """What ``encode_row`` knows of a format, all about the bits of a float32 magnitude."""

    shift: np.uint32  # mantissa bits that a float32 has more
    half: np.uint32  # half a unit of the last kept place, less one
    rebias: np.uint32  # distance between the two exponent fields, in code units
    normal: np.uint32  # the smallest normal value
    # its last place is the format's smallest subnormal: adding it rounds there, to nearest even
    magic: np.float32
    # magnitudes are cut here first: the largest finite value, or the one that gives the code after it
    limit: np.uint32
    sign: np.uint32  # how far the sign bit moves right
    nan: np.uint32  # the code of NaN
    unsigned: np.uint32  # a code that never has a sign: the NaN that overflow gives in formats without Inf


@cache
def rounding(fmt: Format, saturate: bool) -> Rounding | None:
    """Returns the constants of a format with a sign bit and a mantissa; None for the others, which the codec
    casts."""
    if (
        not fmt.signed
        or fmt.twos_complement
        or not fmt.zero
        or fmt.mantissa_bits == 0
        or fmt.bias > 64
        or (not saturate and fmt.nan_code is None)
    ):
        return None
    beyond = codec.grid(fmt)[-1]
    shift = 23 - fmt.mantissa_bits
    magic = np.float32(fmt.smallest_subnormal * 2.0**23)
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return Rounding(
        np.uint32(shift),
        np.uint32((1 << (shift - 1)) - 1),
        np.uint32((127 - fmt.bias) << fmt.mantissa_bits),
        np.float32(fmt.smallest_normal).view(np.uint32),
        magic,
        np.float32(fmt.max if saturate else beyond).view(np.uint32),
        np.uint32(32 - fmt.bits),
        np.uint32(nan),
        np.uint32(nan if fmt.special == "fn" else 1 << 8),
    )


@njit
def encode_row(x: Any, factor: Any, how: Any, q: Any) -> Any:
    """q = codes of x * factor; returns the bits of max|x|, NaN ignored. x: bits (n,); factor: float32; how:
    Rounding; q: uint8 (n,)."""
    shift, half, rebias, normal, magic, limit, sign_shift, nan, unsigned = how
    magic_bits = np.float32(magic).view(np.uint32)
    most = np.uint32(0)
    for j in range(x.size):
        wide = float32_bits(x[j])
        before = np.uint32(wide & MAGNITUDE)
        most = max(most, before if before <= INF else np.uint32(0))
        scaled = np.float32(np.uint32(wide).view(np.float32) * factor).view(np.uint32)
        magnitude = np.uint32(scaled & MAGNITUDE)
        cut = np.uint32(min(magnitude, limit))
        odd = np.uint32(np.uint32(cut >> shift) & _ONE)
        large = np.uint32(np.uint32(np.uint32(np.uint32(cut + half) + odd) >> shift) - rebias)
        small = np.uint32(np.float32(np.uint32(cut).view(np.float32) + magic).view(np.uint32) - magic_bits)
        code = large if cut >= normal else small
        sign = np.uint32(np.uint32(scaled & ~MAGNITUDE) >> sign_shift)
        code = nan if magnitude > INF or code == unsigned else np.uint32(code | sign)
        q[j] = np.uint8(code)
    return most


@njit
def amax_row(x: Any, most: Any) -> Any:
    """Returns the largest bits of |x| that are at most ``most``: those of Inf leave NaN out. x: bits (n,).
    Non-negative floats are ordered as their bits are: an integer maximum."""
    found = np.uint32(0)
    for j in range(x.size):
        a = np.uint32(float32_bits(x[j]) & MAGNITUDE)
        found = max(found, a if a <= most else np.uint32(0))
    return found


@njit
def decode_row(q: Any, table: Any, factor: Any, x: Any) -> None:
    """x = table[q] * factor, rounded once. q: uint8 (n,); table: float32 (256,); factor: float32; x: bits
    (n,)."""
    for j in range(x.size):
        x[j] = narrowed(np.float32(table[q[j]] * factor).view(np.uint32), x)


@njit
def add_row(x: Any, total: Any) -> None:
    """total += x. x: bits (n,); total: float64 (n,)."""
    for j in range(x.size):
        total[j] += np.float64(np.uint32(float32_bits(x[j])).view(np.float32))
