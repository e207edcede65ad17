"""Every named format and every rounding against gfloat, which computes significands where the codec looks
values up."""

import gfloat
import numpy as np
import pytest
from gfloat import RoundMode
from gfloat import formats as theirs

from fp8kit import codec
from fp8kit.formats import E2M1, E2M3, E3M2, E4M3, E4M3_240, E5M2, E8M0, MXINT8, Format

_IEEE_E4M3 = gfloat.FormatInfo(
    "e4m3",
    k=8,
    precision=4,
    bias=7,
    has_nz=True,
    domain=gfloat.Domain.Extended,
    num_high_nans=7,
    has_subnormals=True,
    is_signed=True,
    is_twos_complement=False,
)
TWINS: list[tuple[Format, gfloat.FormatInfo]] = [
    (E4M3, theirs.format_info_ocp_e4m3),
    (E5M2, theirs.format_info_ocp_e5m2),
    (E4M3_240, _IEEE_E4M3),
    (E3M2, theirs.format_info_ocp_e3m2),
    (E2M3, theirs.format_info_ocp_e2m3),
    (E2M1, theirs.format_info_ocp_e2m1),
    (E8M0, theirs.format_info_ocp_e8m0),
    (MXINT8, theirs.format_info_ocp_int8),
]
by_twin = pytest.mark.parametrize(("fmt", "twin"), TWINS, ids=[str(fmt) for fmt, _ in TWINS])


def _values(fmt: Format) -> np.ndarray:
    """Every value, midpoint and neighbour in float32, and random ones, as float64, in which gfloat's sums are
    exact then; no larger than the largest: gfloat's int8 has one more value below."""
    grid = codec.grid(fmt)[:-1]
    at = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    random = (np.random.default_rng(1).standard_normal(20000) * fmt.max / 2).astype(np.float32)
    beside = [np.nextafter(at, np.float32(end)) for end in (0, fmt.max)]
    x = np.concatenate([at, *beside, random, random * np.float32(2.0**-9)]).astype(np.float64)
    if not fmt.signed:
        return np.clip(np.abs(x), fmt.smallest_normal, fmt.max)
    return np.clip(np.concatenate([x, -x]), -fmt.max, fmt.max)


def _same(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got, want)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


@by_twin
def test_every_code(fmt, twin):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    _same(codec.decode(codes, fmt), gfloat.decode_ndarray(twin, codes))
    assert (fmt.max, fmt.smallest_subnormal) == (twin.max, twin.smallest)


@by_twin
def test_nearest(fmt, twin):
    x = _values(fmt)
    _same(codec.decode(codec.encode(x, fmt), fmt), gfloat.round_ndarray(twin, x, RoundMode.TiesToEven))


@by_twin
@pytest.mark.parametrize("saturate", [True, False])
def test_overflow(fmt, twin, saturate):
    if fmt.nan_code is None and not saturate:
        return  # both refuse
    x = np.concatenate([_values(fmt) * 3, [np.inf, -np.inf]])
    x = x[x > -fmt.max] if fmt.twos_complement else x if fmt.signed else x[x > 0]
    got = codec.decode(codec.encode(x, fmt, saturate=saturate), fmt)
    want = gfloat.round_ndarray(twin, x, RoundMode.TiesToEven, sat=saturate)
    np.testing.assert_array_equal(got, want)


@by_twin
@pytest.mark.parametrize("bits", [1, 3, 8, 13])
def test_stochastic_by_few_bits(fmt, twin, bits):
    """Their number is added to the fraction and carries; ours is compared with it: the complement."""
    x = _values(fmt)
    words = np.random.default_rng(2).integers(0, 2**32, x.shape, np.uint32)
    top = (words >> np.uint32(32 - bits)).astype(np.int64)
    got = codec.decode(codec.encode(x, fmt, "stochastic", True, words, bits), fmt)
    carried = (1 << bits) - 1 - top
    want = gfloat.round_ndarray(
        twin, x, RoundMode.StochasticFastest, sat=True, srbits=carried, srnumbits=bits
    )
    _same(got, want)
