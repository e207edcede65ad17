"""``fk.matmul`` and ``a @ b``: any formats, scalings, orientations, rotations, shapes and sums. Modelled sums
have the bits of Python's fractions, and those of a GPU; the device's own stay within their bound."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import codec
from fp8kit.accumulation import ACCUMULATIONS
from fp8kit.errors import ArgumentError, FormatError, Fp8kitError
from fp8kit.formats import E4M3
from fp8kit.quantization import TILES
from fp8kit.testing import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract.model_gemm import model_gemm_oracle
from tests.support.casts import NAMED, any_format, hows
from tests.support.draws import attempt, examples, host, seeds, values

FORMATS = [fk.E4M3, fk.E5M2, fk.E2M1, fk.Format("E3M4", 3, 4)]
SCALINGS = ["tensor", "row", "block_1x128", "block_128x128", "mx_1x32"]
SIZES = st.sampled_from([0, 1, 3, 16, 33, 70])
sums = st.builds(
    lambda bits, chunk, steps: attempt(lambda: fk.Accumulation(bits, chunk, steps and steps * chunk)),
    st.integers(0, 41),
    st.integers(1, 70),
    st.integers(0, 4),
) | st.sampled_from(list(ACCUMULATIONS.values()))


def narrow(fmt):
    """A format whose products are exact in float64 and whose values float32 holds with all scales."""
    fits = fmt is not None and fmt.exponent_bits <= 5 and 1e-9 < fmt.max < 1e9
    return fmt if fits else fk.E2M3


NARROW = st.sampled_from(NAMED).map(narrow) | any_format().map(narrow)


def calm(shape, seed):
    """Finite float32 values within some binades of 1, zeros among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp2(random.integers(-3, 4, shape))
    return (x * (random.random(shape) > 0.1)).astype(np.float32)


def factor(shape, how, flipped, seed):
    """A quantised matrix of this shape; ``flipped``: the transposed of one that lies the other way."""
    x = calm(shape, seed)
    return how.cast(np.ascontiguousarray(x.T)).T if flipped else how.cast(x)


def exactly(q):
    """The values of a quantised matrix without a rotation's way back, float64, and what multiplies them."""
    wide = codec.decode(np.asarray(q.data), q.format)
    tile = TILES[q.scaling] if q.along else TILES[q.scaling][::-1]
    scales = q.scale_inv
    if q.tensor_scale_inv is not None:
        scales = codec.decode(q.scale_codes, E4M3)
    down, across = np.indices(q.shape)
    tile = tuple(t or max(n, 1) for t, n in zip(tile, q.shape, strict=True))
    grid = tuple(max(1, -(-n // t)) for n, t in zip(q.shape, tile, strict=True))
    scales = np.asarray(scales, np.float64)
    scales = scales.T if q._flipped and scales.ndim == 2 else scales
    own = 1.0
    if q.tensor_scale_inv is not None:
        own = np.asarray(q.tensor_scale_inv, np.float64)
        if own.size > 1:  # of rows along the blocks
            wide, own = wide * own.reshape((-1, 1) if q.along else (1, -1)), np.ones(1)
        own = float(own[0])
    return wide * scales.reshape(grid)[down // tile[0], across // tile[1]], own


@st.composite
def pairs(draw, **fixed):
    """(how of the left factor, of the right one, whether each is the transposed of what was cast). Rotated
    alike, along the contraction, or not at all."""
    left, right = draw(hows(**fixed)), draw(hows(**fixed))
    flips = draw(st.booleans()), draw(st.booleans())
    left = left.but(format=draw(NARROW))
    right = right.but(format=draw(NARROW))
    if left.hadamard or right.hadamard:
        same = {"hadamard": left.hadamard or 16, "signs": left.signs, "seed": left.seed}
        left = left.but(**same, along=1 - flips[0])
        right = right.but(**same, along=int(flips[1]))
    return left, right, flips


@examples(150)
@given(st.tuples(*[st.sampled_from([1, 3, 17, 48, 130])] * 3), pairs(), seeds)
def test_products_are_those_of_the_values(mnk, pair, seed):
    """a @ b, in any orientation; products of rotated factors are those of the rotated values."""
    (m, n, k), (left, right, flips) = mnk, pair
    a, b = factor((m, k), left, flips[0], seed), factor((k, n), right, flips[1], seed + 1)
    (wide_a, own_a), (wide_b, own_b) = exactly(a), exactly(b)
    with np.errstate(all="ignore"):
        got = host(a @ b)
        size = np.abs(wide_a) @ np.abs(wide_b) * (own_a * own_b)
        exact = wide_a @ wide_b * (own_a * own_b)
    if (size > 1e30).any():
        return
    # two operands whose scales round, and two scales of tensors
    assert_close("a @ b", got, exact, "float32", sum_slack(size, k + 8) + 2.0**-120)
    assert "because" in a.explain(b)


@examples(100)
@given(
    st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 15, 33, 70])),
    pairs(hadamard=0),
    sums,
    st.integers(0, 3),
    seeds,
)
def test_modelled_sums_have_the_bits_of_fractions(mnk, pair, how, fit, seed):
    if isinstance(how, Fp8kitError):
        return
    (m, n, k), (left, right, flips) = mnk, pair
    if fit:  # blocks of one length, along the contraction
        left = left.but(along=1 - flips[0])
        length = TILES[left.scaling][1]
        own = [name for name, tile in TILES.items() if tile[1] in (length, 0) or not length]
        scaling = own[seed % len(own)]
        right = right.but(scaling=scaling, rule=None, along=int(flips[1]))
    a, b = factor((m, k), left, flips[0], seed), factor((k, n), right, flips[1], seed + 1).T
    got = attempt(lambda: fk.matmul(a, b.T, accumulate=how))
    tiles = [TILES[q.scaling] for q in (a, b)]
    across = any(not q.along and tile[0] != tile[1] for q, tile in zip((a, b), tiles, strict=True))
    refused = across or len({tile[1] for tile in tiles if tile[1]}) > 1
    refused |= no_groups(how, [a, b])
    assert isinstance(got, FormatError) == refused, got
    if refused:
        return
    given_ = {"out": np.zeros((m, n), np.float32), "accumulation": how, "bias": None, "addend": None}
    for name, q, tile, rows in zip("ab", (a, b), tiles, (m, n), strict=True):
        two_level = q.tensor_scale_inv is not None
        scales = codec.decode(q.scale_codes, E4M3).astype(np.float32) if two_level else q.scale_inv
        scales = scales.T if q._flipped and scales.ndim == 2 else scales
        grid = [max(1, -(-size // (t or size))) for size, t in zip((rows, k), tile, strict=True)]
        given_ |= {name: np.ascontiguousarray(q.data), f"{name}_format": q.format, f"{name}_tile": tile}
        given_[f"{name}_scale_inv"] = np.asarray(scales).reshape(grid)
    with np.errstate(all="ignore"):
        want = model_gemm_oracle(SimpleNamespace(**given_))["out"]
        for q, line in ((a, (-1, 1)), (b, (1, -1))):  # one, or of each line along the blocks
            want = want if q.tensor_scale_inv is None else want * q.tensor_scale_inv.reshape(line)
    assert_same_bits(f"{how}", got, want)


def no_groups(how, factors):
    """Whether scales have another format than those of blocks, or sums of groups have too many bits."""
    scaled = all(q.scaling.startswith(("mx", "nvfp4")) for q in factors)
    most = max(q.format.exponent_bits for q in factors)
    return bool(how.group) and (not scaled or (how.group > 1 and most > 3))


def operands(m, n, k, pair, scalings, seed):
    x, y = values((m, k), np.dtype(np.float32), seed), values((n, k), np.dtype(np.float32), seed + 1)
    return [(z, fmt, scaling) for z, fmt, scaling in zip((x, y), pair, scalings, strict=True)]


@examples(150)
@given(
    SIZES,
    SIZES,
    st.sampled_from([0, 1, 31, 32, 129, 300]),
    st.tuples(*[st.sampled_from(FORMATS)] * 2),
    st.tuples(*[st.sampled_from(SCALINGS)] * 2),
    sums,
    seeds,
)
def test_sums_stay_within_their_arithmetic(m, n, k, pair, scalings, how, seed):
    if isinstance(how, Fp8kitError):
        assert isinstance(how, ArgumentError)
        return
    a, b = (fk.quantize(*each[:2], scaling=each[2]) for each in operands(m, n, k, pair, scalings, seed))
    got = attempt(lambda: fk.matmul(a, b.T, accumulate=how))
    lengths = {32 if s == "mx_1x32" else 128 for s in scalings if "_" in s}
    assert isinstance(got, Fp8kitError) == (len(lengths) > 1 or no_groups(how, [a, b])), got
    if isinstance(got, Fp8kitError):
        return
    with np.errstate(all="ignore"):
        wide = [host(q.dequantize()).astype(np.float64) for q in (a, b)]
        exact, magnitude = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    known = np.isfinite(exact)
    assert np.array_equal(np.isfinite(host(got)), known)
    # an instruction cuts off less than 2^-F of its largest term, at most the sum of magnitudes, for each term
    # and for the accumulator, and 2^-min(F, 23) of the sum; the scales and float32's sums round
    loss = 0.0
    if not how.exact:
        # the largest exponent is that of the scales, and products of E3M4 may be 2^-12
        bits = how.fraction_bits - 12 * (how.group > 1)
        loss = (-(-k // how.chunk) + k // 32 + 1) * (
            (how.chunk + 1) * 2.0**-bits + 2.0 ** -min(how.fraction_bits, 23)
        )
    slack = (loss + (k + 8) * 2.0**-23) * magnitude + 2.0**-140
    assert (np.abs(host(got) - exact)[known] <= slack[known]).all()


@pytest.mark.gpu
@examples(60)
@given(
    SIZES,
    SIZES,
    st.sampled_from([1, 31, 32, 129, 300]),
    st.tuples(*[st.sampled_from(FORMATS)] * 2),
    st.sampled_from(SCALINGS),
    sums,
    seeds,
)
def test_the_same_bits_on_a_gpu(m, n, k, pair, scaling, how, seed):
    if isinstance(how, Fp8kitError):
        return
    found = []
    for device in ("cpu", "cuda"):
        a, b = (
            fk.quantize(fk.tensor(x, device=device), fmt, scaling=s)
            for x, fmt, s in operands(m, n, k, pair, (scaling, scaling), seed)
        )
        made = attempt(lambda a=a, b=b: fk.matmul(a, b.T, accumulate=how))
        assert isinstance(made, FormatError) == no_groups(how, [a, b]), made
        found.append(made)
    if not isinstance(found[0], FormatError):
        assert_same_bits(str(how), *map(host, reversed(found)))
