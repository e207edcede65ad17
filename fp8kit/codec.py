"""The oracle: bit-exact encoding and decoding of every ``Format``, in plain NumPy.

Encoding looks a value up between its two neighbours in the table of the format's finite values, so it says
what rounding means and does nothing clever; the engines' fast casts are tested against it. Rounding follows
IEEE 754-2019, 4.3 (roundTiesToEven, with the exponent range unlimited before overflow is decided); the
formats' own sources stand in ``fp8kit.formats``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np

from fp8kit.arguments import integer
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import Format

Rounding = Literal["nearest", "stochastic"]
Array = np.ndarray[Any, Any]


@cache
def table(fmt: Format) -> Array:
    """Returns the value of every byte as a code of ``fmt``: float64 (256,), read-only. Bits above the
    format's are ignored."""
    codes = np.arange(256) & ((1 << fmt.bits) - 1)
    magnitude = codes & ~fmt.sign_code
    if fmt.twos_complement:
        magnitude = np.where(codes & fmt.sign_code, (1 << fmt.bits) - codes, codes)
    values = _magnitude(fmt, magnitude)
    if fmt.inf_code is not None:
        values[magnitude == fmt.inf_code] = np.inf
        values[magnitude > fmt.inf_code] = np.nan
    elif fmt.nan_code is not None:
        values[magnitude == fmt.nan_code] = np.nan
    values = np.where(codes & fmt.sign_code, -values, values)
    values.flags.writeable = False
    return values


@cache
def grid(fmt: Format) -> Array:
    """Returns the finite values >= 0 in order of their codes, and one more: where the next would be if the
    exponent range went on."""
    return _magnitude(fmt, np.arange(fmt.max_code + 2))


def _magnitude(fmt: Format, codes: Array) -> Array:
    exponent, mantissa = np.divmod(codes, 1 << fmt.mantissa_bits)
    subnormal = (exponent == 0) & fmt.zero
    fraction = mantissa / (1 << fmt.mantissa_bits) + np.where(subnormal, 0.0, 1.0)
    return np.ldexp(fraction, np.where(subnormal, 1, exponent) - fmt.bias)  # type: ignore[no-any-return]


@cache
def code_ends(fmt: Format) -> tuple[float, float]:
    """Returns the least float32 magnitudes whose code, nearest even and saturating, is not 0, and is the
    largest. Of signed formats with a zero that are no two's complement."""
    points, found = grid(fmt), []
    for code in (1, fmt.max_code):
        middle = np.float32((points[code - 1] + points[code]) / 2)  # exact: a code has at most 7 bits
        tie_goes_up = code % 2 == 0
        found.append(float(middle if tie_goes_up else np.nextafter(middle, np.float32(np.inf))))
    return found[0], found[1]


def decode(codes: Any, fmt: Format) -> Array:
    """Returns the values of ``codes``, uint8 of any shape, as float64 of the same shape. Exact."""
    return table(fmt)[np.asarray(codes, np.uint8)]


def encode(
    values: Any,
    fmt: Format,
    rounding: Rounding = "nearest",
    saturate: bool = True,
    words: Any = None,
    bits: int = 32,
) -> Array:
    """Returns the codes of ``values``, float64 or narrower of any shape, as uint8 of the same shape.

    * "nearest": to the nearer neighbour, ties to the even code (also in formats without a mantissa, where
      IEEE 754 has no even neighbour). "stochastic": away from zero where ``words`` (uint32, of the same
      shape) is less than ``fraction * 2**32``, fraction being the value's place between its two neighbours;
      computed exactly. With fewer ``bits``, n, the word's top n bits are the random number, and it goes up
      where they are less than ``floor(fraction * 2**n)``: n random bits added below the last kept place,
      the rest cut off, as instructions with n random bits have it. So the mean lies up to 2**-n of a step
      below the value.
    * What overflows after rounding, and Inf: with ``saturate`` the largest finite value, else Inf, or NaN
      where the format has no Inf.
    * NaN: ``fmt.nan_code``, always positive; the largest value where the format has no NaN. The sign of -0.0
      is kept where the format has a sign bit; two's complement has one zero, and its most negative code
      is never made.
    * Unsigned formats: a value below zero gives NaN, or the smallest value where the format has no NaN; -0.0
      is 0.0.
    * Formats without a zero (E8M0): zero, and all that is below the smallest value, become the smallest
      value.

    Raises FormatError for an unknown rounding, for values that are not real floating point, for
    ``saturate=False`` with a format that has neither Inf nor NaN, and for ``bits`` that are not 1 to 32;
    ShapeError where ``words`` do not fit.
    """
    v = np.asarray(values)
    if v.dtype.kind not in "fV" or v.dtype.itemsize > 8:
        raise FormatError("encode", "values", v.dtype, "float64 or a narrower floating dtype")
    if rounding not in ("nearest", "stochastic"):
        raise FormatError("encode", "rounding", repr(rounding), '"nearest" or "stochastic"')
    if not saturate and fmt.nan_code is None:
        raise FormatError("encode", "saturate", f"False for {fmt}, which has no Inf and no NaN", "True")
    bits = integer("encode", "bits", bits, 1, 32, FormatError)
    v = v.astype(np.float64)
    drawn = None if rounding == "nearest" else _check_words(words, v.shape)
    codes = _round_up_or_down(np.abs(v), fmt, drawn, bits)
    if saturate:
        codes = np.minimum(codes, fmt.max_code)
    # Beyond max_code lies exactly one code, Inf in "ieee" and NaN in "fn" formats.
    nan = np.isnan(v)
    if fmt.special == "fn":
        nan |= codes > fmt.max_code
    negative = np.signbit(v)
    if fmt.twos_complement:
        codes = np.where(negative, -codes & ((1 << fmt.bits) - 1), codes)
    elif fmt.signed:
        codes = np.where(negative, codes | fmt.sign_code, codes)
    elif fmt.nan_code is not None:
        nan |= v < 0
    else:
        codes = np.where(negative, 0, codes)
    return np.where(nan, fmt.max_code if fmt.nan_code is None else fmt.nan_code, codes).astype(np.uint8)


def _round_up_or_down(a: Array, fmt: Format, words: Array | None, bits: int) -> Array:
    """Codes 0 ... max_code + 1 of magnitudes; the last one stands for everything that overflows."""
    points = grid(fmt)
    a = np.where(np.isnan(a), 0.0, np.clip(a, points[0], points[-1]))
    low = np.clip(np.searchsorted(points, a, side="right") - 1, 0, len(points) - 2)
    below, gap = points[low], points[low + 1] - points[low]
    # a - below is exact (Sterbenz, or below is 0) and gap is a power of two, so the fraction is exact too
    fraction = (a - below) / gap
    if words is None:
        up = (fraction > 0.5) | ((fraction == 0.5) & (low % 2 == 1))
    elif bits == 32:
        up = words < fraction * 2.0**32
    else:
        up = (words >> np.uint32(32 - bits)) < np.floor(fraction * 2.0**bits)
    return low + up  # type: ignore[no-any-return]


def _check_words(words: Any, shape: tuple[int, ...]) -> Array:
    if words is None or np.shape(words) != shape or np.asarray(words).dtype != np.uint32:
        got = "None" if words is None else f"{np.asarray(words).dtype} {np.shape(words)}"
        raise ShapeError("encode", "words", got, f"uint32 {shape}")
    return np.asarray(words)
