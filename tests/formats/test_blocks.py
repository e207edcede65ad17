"""Scales of blocks and rotations: against torchao's bytes, published tables, independent transcriptions."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import float4_e2m1fn, float8_e4m3fn

from fp8kit import blocks, codec
from fp8kit.errors import ArgumentError, RecipeError, ShapeError
from fp8kit.formats import E2M1, E4M3, E5M2, MXINT8, Format, float32
from fp8kit.quantization import FOUR_OVER_SIX, MX_RULES, Quantizer
from fp8kit.testing import assert_close
from tests.support.nvfp4 import transcribed
from tests.support.torchao_bytes import AMAXES, FORMATS, PATH, RULES

MAX = np.finfo(np.float32).max

# amax -> bytes by floor, rceil, ceil and even
TABLE = {
    (E4M3, 0): (0, 0, 0, 0),
    (E4M3, 1): (119, 119, 119, 119),
    (E4M3, 3.75): (120, 121, 121, 120),
    (E4M3, 150): (126, 126, 127, 126),
    (E4M3, 448): (127, 127, 128, 127),
    (E4M3, 449): (127, 128, 128, 127),
    (E4M3, 480): (127, 128, 128, 127),
    (E4M3, 511): (127, 128, 128, 128),
    (E4M3, 512): (128, 128, 128, 128),
    (E4M3, 3.4e38): (246, 247, 247, 247),
    (E5M2, 448): (120, 120, 121, 120),
    (E5M2, 480): (120, 121, 121, 121),
    (E2M1, 1): (125, 125, 125, 125),
    (E2M1, 3.5): (126, 127, 127, 127),
    (E2M1, 6): (127, 127, 128, 127),
    (E2M1, 6.5): (127, 128, 128, 127),
    (E2M1, 7): (127, 128, 128, 128),
}


@pytest.mark.parametrize(("case", "expected"), TABLE.items(), ids=lambda case: str(case))
def test_scale_bytes_of_the_table(case: tuple[Format, float], expected: tuple[int, ...]) -> None:
    fmt, amax = case
    found = tuple(int(blocks.scale_bytes(amax, fmt, rule)) for rule in ("floor", "rceil", "ceil", "even"))
    assert found == expected
    assert int(blocks.scale_bytes(amax, fmt, "te")) == expected[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scale_bytes_are_torchaos_for_every_bfloat16_amax(fmt: Format, rule: str) -> None:
    amax = (np.arange(AMAXES, dtype=np.uint32) << 16).view(np.float32)
    theirs = np.load(PATH)[f"{fmt}_{rule}"].copy()
    # torchao 0.18.0 takes Inf for the exponent 128; later versions give NaN, as we do
    inf = np.isinf(amax)
    assert theirs[inf].item() == (254 if rule == "rceil" else 255 - blocks.largest_exponent(fmt))
    theirs[inf] = 255
    np.testing.assert_array_equal(blocks.scale_bytes(amax, fmt, rule), theirs)
    if rule == "rceil":
        theirs[inf] = 254
        np.testing.assert_array_equal(blocks.scale_bytes(amax, fmt, "te"), theirs)


@pytest.mark.parametrize("fmt", [*FORMATS, Format("E4M0", 4, 0, special="none")], ids=str)
def test_rceil_is_the_least_power_of_two_that_saturates_nothing(fmt: Format) -> None:
    """Of all amaxes format.max * 2^k, k a power of two that float32 holds, and their neighbours."""
    exact = np.float32(fmt.max) * np.exp2(np.arange(-110, 128 - blocks.largest_exponent(fmt) - 1))
    exact = exact.astype(np.float32)
    found = blocks.scale_bytes(exact, fmt, "rceil").astype(int)
    np.testing.assert_array_equal(2.0 ** (found - 127), exact.astype(np.float64) / fmt.max)
    above = blocks.scale_bytes(np.nextafter(exact, np.float32(np.inf)), fmt, "rceil")
    np.testing.assert_array_equal(above.astype(int), found + 1)
    # one float32 below may be rounded up to it in v, no further
    below = blocks.scale_bytes(np.nextafter(exact, np.float32(0)), fmt, "rceil")
    np.testing.assert_array_equal(below.astype(int), found)


def test_even_is_floor_of_the_rounded_amax() -> None:
    cases = ((MXINT8, 2 - 2.0**-7, 1), (MXINT8, MXINT8.max, 0), (E4M3, 496, 1), (E4M3, 495, 0))
    for fmt, amax, up in cases:
        floor = int(blocks.scale_bytes(amax, fmt, "floor"))
        assert int(blocks.scale_bytes(amax, fmt, "even")) == floor + up, (fmt, amax)


@pytest.mark.parametrize("rule", MX_RULES)
def test_special_amaxes(rule: str) -> None:
    amax = np.float32([[0, np.nan], [np.inf, 1e-45]])
    inf = 254 if rule == "te" else 255
    assert blocks.scale_bytes(amax, E4M3, rule).tolist() == [[0, 255], [inf, 0]]
    # what a scale of 254 cannot hold saturates, for every rule but through NaN
    tiny = Format("E3M2 of small values", 3, 2, bias=12, special="none")
    assert tiny.max < 0.1
    assert blocks.scale_bytes(MAX, tiny, rule) == 254


def test_small_amaxes_of_rceil() -> None:
    """v is subnormal: 2^-127 is the least scale, and enough up to itself."""
    v = np.float32(2.0**-127) * np.float32([0.5, 1, 1 + 2.0**-22, 1.5, 2])
    assert blocks.scale_bytes(v * np.float32(448), E4M3, "rceil").tolist() == [0, 0, 1, 1, 1]


def test_scales_of_all_bytes() -> None:
    scale, inverse = blocks.scales_of_bytes(np.arange(256, dtype=np.uint8))
    assert scale.dtype == inverse.dtype == np.float32
    np.testing.assert_array_equal(scale[:255], 2.0 ** (127.0 - np.arange(255)))
    np.testing.assert_array_equal(inverse[:255], 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan([scale[255], inverse[255]]).all()


@pytest.mark.parametrize("exponent", [0, -30, 60, -149, 127])
def test_nvfp4_against_a_transcription(exponent: int) -> None:
    rng = np.random.default_rng(exponent + 200)
    x = rng.standard_normal(1 << 18).astype(np.float32) * np.exp2(rng.integers(-12, 1, 1 << 18))
    x = np.concatenate([x / np.abs(x).max() * (2 - 2.0**-23), np.zeros(16)])
    x = (x * 2.0**exponent).astype(np.float32).reshape(-1, 16)
    amax = np.abs(x).max(1)
    codes, scale, inverse, tensor_inverse = blocks.nvfp4_scales(amax, np.float32(amax.max()))
    want_codes, want_q, want_inverse, want_d = transcribed(x.T, amax, np.float32(amax.max()))
    np.testing.assert_array_equal(codes, want_codes)
    np.testing.assert_array_equal(inverse, want_inverse)
    assert tensor_inverse == want_d
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(codec.encode(x.T * scale, E2M1), want_q)
    assert codes[-1] == 0
    if exponent == 0:
        assert codes.max() == codec.encode(448.0, E4M3)  # the tensor's largest value has the largest scale


def tried(x: np.ndarray, amax: np.float32, bound: int, squares: bool) -> tuple[np.ndarray, np.ndarray]:
    """Four over six of rows of 16, from what Transformer Engine's kernel does, by ml_dtypes: codes of the
    scales and of the values."""
    f = np.float32
    s = min(f(bound * 6) / amax, f(MAX))
    d = f(1) / s
    outcomes = []
    for target in (6, 4):
        base = np.abs(x).max(1) / f(6) * s
        c = np.minimum(base if target == 6 else base * f(1.5), f(448)).astype(float8_e4m3fn)
        enc = np.minimum(f(1) / (c.astype(f) * d), f(MAX))
        q = np.clip(x * enc[:, None], f(-6), f(6)).astype(float4_e2m1fn)
        error = np.zeros(len(x), f)
        for i in range(16):
            away = q[:, i].astype(f) * c.astype(f) * amax / f(6 * bound) - x[:, i]
            error = error + (away * away if squares else abs(away))
        outcomes.append((error, c.view(np.uint8), q.view(np.uint8)))
    (six, c6, q6), (four, c4, q4) = outcomes
    return np.where(four < six, c4, c6), np.where((four < six)[:, None], q4, q6)


@pytest.mark.parametrize("exponent", [0, -30, 40])
@pytest.mark.parametrize("rule", FOUR_OVER_SIX)
def test_four_over_six_against_a_transcription(rule: str, exponent: int) -> None:
    rng = np.random.default_rng(exponent + 300)
    x = rng.standard_normal(1 << 18).astype(np.float32) * np.exp2(rng.integers(-12, 1, 1 << 18))
    x = (np.concatenate([x, np.zeros(16)]) * 2.0**exponent).astype(np.float32).reshape(-1, 16)
    amax, bound = np.abs(x).max(), 256 if "256" in rule else 448
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        want, want_q = tried(x, amax, bound, "mse" in rule)
    codes, scale, inverse, fours = blocks.four_over_six(x[:, None], amax, rule)
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(codec.encode(x * scale[:, None], E2M1), want_q)
    assert 0.2 < fours.mean() < 0.8
    # the larger of two scales may exceed 256; 448 nothing exceeds
    assert bound <= codec.decode(codes.max(), E4M3) <= min(1.5 * bound, 448)
    # the better one of both by what was asked for, in float64; what float32 rounds of the sums aside
    apart = codec.decode(want_q, E2M1) * inverse[:, None].astype(np.float64) - x
    plain = blocks.nvfp4_scales(np.abs(x).max(1), amax)
    with np.errstate(over="ignore"):
        six = codec.decode(codec.encode(x * plain[1][:, None], E2M1), E2M1) * plain[2][:, None] - x
    power = 2 if "mse" in rule else 1
    if bound == 448:
        assert ((abs(apart) ** power).sum(1) <= (abs(six) ** power).sum(1) * (1 + 2**-18)).all()


def test_four_over_six_of_squares_and_rows() -> None:
    """A square has one choice, by the sum of its rows' errors; rows may have amaxes of their own."""
    x = np.random.default_rng(7).standard_normal((20, 16, 16)).astype(np.float32)
    amax = np.abs(x).max()
    codes = blocks.four_over_six(x, amax, "4over6_mse")[0]
    exact = []
    for block in x.astype(np.float64):
        sums = []
        for factor in (1, 1.5):
            base = np.float32(np.abs(block).max()) / np.float32(6) * (np.float32(2688) / amax)
            code = codec.encode(np.float32(base * np.float32(factor)), E4M3)
            step = float(codec.decode(code, E4M3)) * float(amax) / 2688
            q = codec.decode(codec.encode((block / step).astype(np.float32), E2M1), E2M1)
            sums.append((np.sum((q * step - block) ** 2), int(code)))
        exact.append(min(sums)[1])
    np.testing.assert_array_equal(codes, exact)
    lines, own = x[:, :1], np.abs(x[:, 0]).max(1)
    together = blocks.four_over_six(lines, own, "4over6_mae_256")
    for i, (line, most) in enumerate(zip(lines, own, strict=True)):
        alone = blocks.four_over_six(line[None], most, "4over6_mae_256")
        assert [part[i] for part in together] == [part[0] for part in alone]
    with pytest.raises(ArgumentError, match="four_over_six: rule"):
        blocks.four_over_six(x, amax, "exact")


def test_special_amaxes_of_nvfp4() -> None:
    amax = np.float32([0, 1, np.inf, np.nan, 1e-30])
    codes, scale, inverse, tensor_inverse = blocks.nvfp4_scales(amax, np.float32(1))
    assert codes.tolist() == [0, 0x7E, 0x7E, 0x7F, 0]
    assert scale[0] == scale[4] == MAX
    assert inverse[0] == inverse[4] == 0
    assert np.isnan([scale[3], inverse[3]]).all()
    assert tensor_inverse == np.float32(1) / np.float32(2688)
    for wrong in (0.0, np.inf, np.nan):
        assert blocks.nvfp4_tensor_scale(np.float32(wrong)) == (1, 1)
    scale, inverse = blocks.nvfp4_tensor_scale(np.float32([1e-45, MAX]))
    assert scale[0] == MAX
    assert np.isfinite(inverse).all()
    assert (inverse > 0).all()


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_hadamard_matrices_are_orthogonal(n: int) -> None:
    rotated = blocks.hadamard(np.eye(n, dtype=np.float32), n)
    h = rotated / np.float32(1 / np.sqrt(n))
    assert set(np.unique(h)) == {-1, 1}
    np.testing.assert_array_equal(h @ h.T, n * np.eye(n))
    sylvester = np.ones((1, 1))
    while len(sylvester) < n:
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    np.testing.assert_array_equal(h, sylvester)


def test_rotations_of_both_operands_cancel() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 8, 70)).astype(np.float32)
    signs = rng.choice(np.float32([-1, 1]), 70)
    for kind in ("plus", "te", signs):
        rotated = [blocks.hadamard(part, 32, kind) for part in (a, b)]
        np.testing.assert_array_equal(rotated[0][:, 64:], a[:, 64:])  # behind the last whole group
        # each float32 addition and multiplication of the 70 products may be off by 2^-24 of what it gives
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        got = rotated[0].astype(np.float64) @ rotated[1].astype(np.float64).T
        slack = (
            2 * (5 + 2) * 2.0**-24 * np.linalg.norm(wide_a, axis=1)[:, None] * np.linalg.norm(wide_b, axis=1)
        )
        assert_close("a b^T", got.astype(np.float32), wide_a @ wide_b.T, float32, slack)
    # a fixed order of float32 additions: the same bits as one value at a time
    x = a[0, :16] * blocks.TE_SIGNS
    for distance in (1, 2, 4, 8):
        x = np.float32(
            [x[i] + x[i + distance] if not i & distance else x[i - distance] - x[i] for i in range(16)]
        )
    np.testing.assert_array_equal(blocks.hadamard(a[0, :16], 16, "te"), x * np.float32(0.25))


def test_signs() -> None:
    plus = "+++-+------+-+--"
    assert blocks.TE_SIGNS.tolist() == [1 if sign == "+" else -1 for sign in plus]
    assert blocks.signs_of("te", 40).tolist() == [*blocks.TE_SIGNS, *blocks.TE_SIGNS, *blocks.TE_SIGNS[:8]]


def test_tiles_lie_along_the_contraction() -> None:
    line, square = Quantizer(E4M3, "mx_1x32", scale_rule="te"), Quantizer(E2M1, "nvfp4_16x16")
    assert [blocks.tile_of(line, along) for along in (1, 0)] == [(1, 32), (32, 1)]
    assert [blocks.tile_of(square, along) for along in (1, 0)] == [(16, 16), (16, 16)]


def test_kinds_of_blocks_and_their_rules() -> None:
    assert blocks.kind_of(Quantizer(E4M3, "mx_32x32", scale_rule="even")) == "mx"
    assert blocks.kind_of(Quantizer(E2M1, "nvfp4_1x16")) == "nvfp4"
    assert blocks.kind_of(Quantizer(E4M3, "block_1x64", scale_rule="power_2")) == "block"
    for granularity, rule in (("mx_1x32", "exact"), ("nvfp4_1x16", "te"), ("block_1x128", "floor")):
        with pytest.raises(RecipeError, match=rf"Quantizer: scale_rule: got '{rule}' with {granularity}"):
            blocks.kind_of(Quantizer(E4M3, granularity, scale_rule=rule))
    with pytest.raises(RecipeError, match="Quantizer: granularity: got row, expected mx_"):
        blocks.kind_of(Quantizer(E4M3, "row"))


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"scale_bytes: rule: got .exact., expected one of floor"):
        blocks.scale_bytes(1.0, E4M3, "exact")
    with pytest.raises(ArgumentError, match=r"hadamard: n: got 12, expected a power of two"):
        blocks.hadamard(np.zeros(12), 12)
    with pytest.raises(ArgumentError, match=r"hadamard: signs: got 'random'"):
        blocks.hadamard(np.zeros(16), 16, "random")
    with pytest.raises(ShapeError, match=r"hadamard: signs: got shape \(16,\), expected \(32,\)"):
        blocks.hadamard(np.zeros(32), 16, np.ones(16))
