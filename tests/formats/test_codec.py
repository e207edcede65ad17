"""The codec against ml_dtypes, against a search over all codes, and against probability."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import codec
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import E2M1, E2M3, E3M2, E4M3, E4M3_240, E5M2, E8M0, MXINT8, Format

TWINS = [
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
    (E4M3_240, ml_dtypes.float8_e4m3),
    (Format("E3M4", 3, 4), ml_dtypes.float8_e3m4),
    (E8M0, ml_dtypes.float8_e8m0fnu),
    (E2M1, ml_dtypes.float4_e2m1fn),
    (E2M3, ml_dtypes.float6_e2m3fn),
    (E3M2, ml_dtypes.float6_e3m2fn),
]
by_twin = pytest.mark.parametrize(("fmt", "twin"), TWINS, ids=str)


def _formats() -> st.SearchStrategy[Format]:
    def build(signed, exponent, mantissa, special, zero):
        if special == "ieee" and (exponent < 2 or mantissa < 1):
            special = "fn"
        exponent = min(exponent, 8 - signed - mantissa)
        return Format("random", max(exponent, 2), mantissa, special=special, signed=signed, zero=zero)

    return st.builds(
        build,
        st.booleans(),
        st.integers(2, 5),
        st.integers(0, 4),
        st.sampled_from(["ieee", "fn", "none"]),
        st.booleans(),
    )


@by_twin
def test_decode_every_code(fmt, twin):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    np.testing.assert_array_equal(codec.decode(codes, fmt), codes.view(twin).astype(np.float64))
    np.testing.assert_array_equal(
        np.signbit(codec.decode(codes[:-1], fmt)), np.signbit(codes[:-1].view(twin).astype(np.float64))
    )


@by_twin
def test_every_finite_code_round_trips(fmt, twin):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    values = codec.decode(codes, fmt)
    kept = np.isfinite(values) | (np.isinf(values))
    np.testing.assert_array_equal(codec.encode(values[kept], fmt, saturate=fmt.nan_code is None), codes[kept])


@by_twin
def test_nearest_as_ml_dtypes(fmt, twin):
    """Every value, midpoint and neighbour of either, and random values; without NaN, whose code differs, and
    E8M0's ties."""
    grid = np.unique(codec.decode(np.arange(1 << fmt.bits), fmt))
    grid = grid[np.isfinite(grid)]
    at = (np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]) if fmt.zero else grid).astype(np.float32)
    rng = np.random.default_rng(0)
    wild = (rng.standard_normal(5000) * np.exp2(rng.integers(-20, 20, 5000))).astype(np.float32)
    x = np.concatenate(
        [at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(-np.inf)), wild]
    )
    x = np.abs(x) if not fmt.signed else x
    x = x if fmt.zero else x[x >= 2.0**-126]  # ml_dtypes rounds float32 subnormals up there
    want = x.astype(twin).view(np.uint8)
    got = codec.encode(x, fmt, saturate=fmt.nan_code is None)
    overflow_to_nan = (fmt.special == "fn") & (got == (fmt.nan_code or 0))
    np.testing.assert_array_equal(got[~overflow_to_nan], want[~overflow_to_nan])
    assert np.isnan(want[overflow_to_nan].view(twin).astype(np.float64)).all()


@settings(max_examples=150, deadline=None)
@given(
    _formats(),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.floats(-20, 20),
)
def test_nearest_by_search(fmt, values, octaves):
    """No code lies nearer; among two that are equally near the even one is taken."""
    x = np.array(values) * 2.0 ** int(octaves)
    x = (
        np.abs(np.concatenate([x, np.sinh(x / max(1e-30, np.abs(x).max())) * fmt.max]))
        if not fmt.signed
        else x
    )
    table = codec.table(fmt)[: 1 << fmt.bits]
    codes = np.flatnonzero(np.isfinite(table))
    inside = np.clip(x, -fmt.max, fmt.max)
    distance = np.abs(table[codes][None] - inside[:, None])
    for value, got, row in zip(inside, codec.encode(x, fmt), distance, strict=True):
        best = codes[row == row.min()]
        best = best[np.signbit(table[best]) == np.signbit(value)] if fmt.signed else best
        assert got in (best if len(best) == 1 else best[best % 2 == 0]), (fmt, value)


@pytest.mark.parametrize(
    ("fmt", "value", "saturate", "code"),
    [
        (E4M3, math.nan, True, 0x7F),
        (E4M3, -math.nan, True, 0x7F),
        (E4M3, math.inf, True, 0x7E),
        (E4M3, -math.inf, True, 0xFE),
        (E4M3, 1e30, True, 0x7E),
        (E4M3, 464.0, False, 0x7E),
        (E4M3, 464.1, False, 0x7F),
        (E4M3, -math.inf, False, 0x7F),
        (E5M2, math.inf, False, 0x7C),
        (E5M2, -1e30, False, 0xFC),
        (E5M2, 61440.0, False, 0x7C),
        (E5M2, 61439.0, False, 0x7B),
        (E5M2, math.nan, False, 0x7F),
        (E4M3, -0.0, True, 0x80),
        (E4M3, -1e-30, True, 0x80),
        (E2M1, math.nan, True, 7),
        (E2M1, -math.inf, True, 15),
        (E8M0, 0.0, True, 0),
        (E8M0, -1.0, True, 255),
        (E8M0, 1e-45, True, 0),
        (E8M0, math.inf, True, 254),
        (E8M0, math.inf, False, 255),
        (E8M0, 1.0, True, 127),
        (E4M3_240, 247.9, True, 0x77),
        (E4M3_240, 248.0, False, 0x78),
        (E4M3_240, math.nan, True, 0x7F),
        (E3M2, math.nan, True, 31),
        (E2M3, -math.nan, True, 31),
        (MXINT8, math.nan, True, 127),
        (MXINT8, -math.nan, True, 127),
        (MXINT8, -math.inf, True, 0x81),
        (MXINT8, -2.0, True, 0x81),
        (MXINT8, 1.5, True, 96),
        (MXINT8, -1.5, True, 256 - 96),
        (MXINT8, -0.0, True, 0),
        (MXINT8, -(2.0**-7), True, 0),
        (MXINT8, -1.5 * 2.0**-6, True, 0xFE),
        (Format("U4M4", 4, 4, special="none", signed=False), -3.0, True, 0),
        (Format("U4M4", 4, 4, signed=False), -3.0, True, 255),
    ],
    ids=str,
)
def test_special_values(fmt, value, saturate, code):
    assert codec.encode(np.array(value), fmt, saturate=saturate) == code


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E8M0], ids=str)
def test_stochastic_threshold_is_exact(fmt):
    """At fraction f the words floor(f * 2**32) - 1 and floor(f * 2**32) lie on the two sides."""
    grid = codec.decode(np.arange(fmt.max_code + 1), fmt)
    for low in range(0, fmt.max_code, 7):
        for fraction in (0.25, 0.5, 2.0**-20, 1 - 2.0**-20, 2.0**-32):
            value = grid[low] + fraction * (grid[low + 1] - grid[low])
            threshold = int(fraction * 2**32)
            words = np.array([0, threshold - 1, threshold, 2**32 - 1], np.uint32)
            got = codec.encode(np.full(4, value), fmt, "stochastic", True, words)
            np.testing.assert_array_equal(got, low + (words < threshold))
    exact = codec.encode(grid, fmt, "stochastic", True, np.zeros(len(grid), np.uint32))
    np.testing.assert_array_equal(exact, np.arange(len(grid)))


@pytest.mark.parametrize("bits", [1, 4, 8, 31])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E2M3, MXINT8], ids=str)
def test_stochastic_threshold_of_fewer_bits(fmt, bits):
    """Of the 2**n numbers that the top n bits can be, those below floor(f * 2**n) round up; the bits below
    them count for nothing."""
    grid = codec.decode(np.arange(fmt.max_code + 1), fmt)
    for low in (0, 1, fmt.max_code // 2, fmt.max_code - 1):
        for fraction in (2.0**-20, 0.25, 0.3, 0.5, 0.7, 1 - 2.0**-20):
            value = grid[low] + fraction * (grid[low + 1] - grid[low])
            exact = (value - grid[low]) / (grid[low + 1] - grid[low])
            threshold = math.floor(exact * 2**bits)
            top = np.array([0, max(threshold - 1, 0), min(threshold, 2**bits - 1), 2**bits - 1], np.uint64)
            for rest in (0, 2 ** (32 - bits) - 1):
                words = (top * 2 ** (32 - bits) + rest).astype(np.uint32)
                for sign in (1, -1):
                    got = codec.encode(np.full(4, sign * value), fmt, "stochastic", True, words, bits)
                    want = grid[low + (top < threshold)]
                    np.testing.assert_array_equal(codec.decode(got, fmt), sign * want)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_stochastic_on_a_grid_of_e2m1(bits):
    """The mean of n roundings: within 4 standard errors of at most half a step, and 2**-bits of a step that
    the cut bits cost."""
    n, x = 20000, np.linspace(-6, 6, 97)
    words = np.random.default_rng(3).integers(0, 2**32, (97, n), np.uint32)
    got = codec.decode(codec.encode(np.repeat(x[:, None], n, 1), E2M1, "stochastic", True, words, bits), E2M1)
    step = np.where(np.abs(x) < 2, 0.5, np.where(np.abs(x) < 4, 1, 2))
    assert (np.abs(got.mean(1) - x) <= 4 * step / (2 * math.sqrt(n)) + step * 2.0**-bits).all()


def test_stochastic_is_unbiased():
    """The mean of n roundings lies within 6 standard errors, gap * sqrt(f (1 - f) / n), of the value (odds
    below 1e-8 each)."""
    n = 20000
    rng = np.random.default_rng(11)
    for value in (1.01, -3.3, 0.0007, 300.0, 447.9):
        words = rng.integers(0, 2**32, n, np.uint32)
        got = codec.decode(codec.encode(np.full(n, value), E4M3, "stochastic", True, words), E4M3)
        low, high = got.min(), got.max()
        f = (value - low) / (high - low)
        assert abs(got.mean() - value) <= 6 * (high - low) * math.sqrt(f * (1 - f) / n)


def test_refusals():
    one = np.ones(1)
    with pytest.raises(FormatError, match="no Inf and no NaN"):
        codec.encode(one, E2M1, saturate=False)
    with pytest.raises(FormatError, match="rounding"):
        codec.encode(one, E4M3, "up")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="int64"):
        codec.encode(np.ones(1, np.int64), E4M3)
    with pytest.raises(ShapeError, match="words"):
        codec.encode(one, E4M3, "stochastic")
    for bits in (0, 33):
        with pytest.raises(FormatError, match="encode: bits"):
            codec.encode(one, E4M3, "stochastic", words=np.zeros(1, np.uint32), bits=bits)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"expected an int in \[0, 8\]", {"exponent_bits": -1, "mantissa_bits": 3}),
        ("at most 8 bits", {"exponent_bits": 0, "mantissa_bits": 8}),
        ("at least 1 with zero=False", {"exponent_bits": 0, "mantissa_bits": 3, "zero": False}),
        ('at least 2 with special="ieee"', {"exponent_bits": 0, "mantissa_bits": 3, "special": "ieee"}),
        ("no value above 0", {"exponent_bits": 0, "mantissa_bits": 0}),
        ("no exponent bit", {"exponent_bits": 4, "mantissa_bits": 3, "twos_complement": True}),
        ("a sign", {"exponent_bits": 0, "mantissa_bits": 7, "twos_complement": True, "signed": False}),
        ("twos_complement", {"exponent_bits": 0, "mantissa_bits": 7, "twos_complement": 2}),
    ],
)
def test_formats_that_are_none(match, options):
    with pytest.raises(FormatError, match=match):
        Format("wrong", **{"special": "none", **options})


@pytest.mark.parametrize("bias", [70, 127, 128, 130, 140, 160, 1023])
def test_a_format_of_other_values_than_float32s_is_refused(bias: int) -> None:
    """Their scales, or products, would be 0 or Inf."""
    with pytest.raises(FormatError, match="float32's values"):
        Format("small", 2, 1, bias=bias)
    with pytest.raises(FormatError, match="float32's values"):
        Format("large", 8, 0, bias=0, special="none", signed=False)
    assert np.isfinite(
        fk.quantize(np.full(4, 2.0**64, "f4"), Format("small", 2, 1, bias=64)).dequantize()
    ).all()


def test_a_name_of_bits_is_that_of_its_bits() -> None:
    for name in ("E5M2", "E5M2_mine"):
        with pytest.raises(FormatError, match=r"Format: name: got 'E5M2\w*', expected E3M4"):
            Format(name, 3, 4)
    with pytest.raises(FormatError, match="Format: name: got 3"):
        Format(3, 3, 4)
    assert str(Format("E3M4_mine", 3, 4)) == "E3M4_mine"


def test_a_fixed_point_format():
    assert (MXINT8.bits, MXINT8.max, MXINT8.smallest_subnormal, MXINT8.epsilon) == (
        8,
        127 / 64,
        2.0**-6,
        2.0**-6,
    )
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(codec.decode(codes, MXINT8), codes.view(np.int8) / 64)
    multiples = codec.encode(codes[codes != 128].view(np.int8) / 64, MXINT8)
    np.testing.assert_array_equal(multiples, codes[codes != 128])
