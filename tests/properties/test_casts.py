"""Casts of every format, tile, rule, rounding, rotation and orientation: what ``fk.quantize`` makes of them
is what ``fp8kit.blocks`` and the codec say, holds what every cast must, and is the same on both engines."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import blocks, codec, packing
from fp8kit.errors import Fp8kitError
from fp8kit.quantization import MX_RULES, TILES
from fp8kit.testing import assert_same_bits
from tests.support.casts import KINDS, NAMED, any_format, expected, hows
from tests.support.draws import FLOATS, HIGH, examples, host, seeds, shapes, values

SIGNED = [fmt for fmt in NAMED if fmt.signed and fmt.zero]
SIZES = st.sampled_from([1, 2, 3, 16, 17, 33, 130])
F32 = np.dtype(np.float32)


def parts(q):
    """What a quantised array consists of, on the host."""
    names = ("data", "scale_inv", "scale_codes", "tensor_scale_inv")
    codes_of_scales = q.scaling.startswith("nvfp4") or q.scale_rule in MX_RULES
    kept = {name: getattr(q, name) for name in names if name != "scale_codes" or codes_of_scales}
    return {name: None if value is None else np.asarray(host(value)) for name, value in kept.items()}


def one_nan(a):
    """The array with one bit pattern for NaN: its payload is the engine's own."""
    return a if a.dtype.kind in "ui" else np.where(np.isnan(a), a.dtype.type(np.nan), a)


def matrix(shape, dtype, seed, wild=False):
    return values(shape, np.dtype(dtype), seed, wild)


def calm(m, n, seed):
    """Finite float32 values within some binades of 1, zeros among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((m, n)) * np.exp2(random.integers(-3, 4, (m, n)))
    return (x * (random.random((m, n)) > 0.1)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(st.data(), shapes(1, 3), st.sampled_from(FLOATS), seeds, st.booleans())
def test_a_cast_is_what_its_rules_say(kind, data, shape, dtype, seed, wild):
    how = data.draw(hows(kind))
    x = matrix(shape, dtype, seed, wild)
    rows = x.reshape(-1, x.shape[-1]) if x.size else np.zeros((int(np.prod(shape[:-1])), shape[-1]), dtype)
    q = how.cast(x)
    assert (q.shape, q.along, q.scaling, q.format) == (x.shape, how.along, how.scaling, how.format)
    if not x.size:
        return
    want = expected(rows, how)
    got = parts(q)
    assert_same_bits("codes", got["data"].reshape(rows.shape), want.codes)
    np.testing.assert_array_equal(got["scale_inv"].reshape(-1), want.scale_inv.reshape(-1))
    if want.scale_codes is not None:
        assert_same_bits("scale_codes", got["scale_codes"], want.scale_codes)
    np.testing.assert_array_equal(got["tensor_scale_inv"], want.tensor_scale_inv)
    decoded = host(q.dequantize(rotated=True)).reshape(rows.shape)
    np.testing.assert_array_equal(decoded, want.values)
    known = codec.decode(want.codes, how.format)
    assert (np.abs(known[np.isfinite(known)]) <= how.format.max).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(st.data(), shapes(1, 3), st.sampled_from(HIGH), seeds, st.booleans())
def test_both_engines_give_the_same_bits(kind, data, shape, dtype, seed, wild):
    how = data.draw(hows(kind))
    if how.format.max > np.finfo(np.float32).max:
        return  # decoded values are float32's
    x = matrix(shape, dtype, seed, wild)
    here, there = how.cast(x), how.cast(fk.tensor(x, device="cuda"))
    for name, want in parts(here).items():
        got = parts(there)[name]
        assert (got is None) == (want is None)
        if want is not None:
            assert_same_bits(f"{how}: {name}", one_nan(got), one_nan(want))
    for rotated in (True, False):
        pair = (one_nan(host(q.dequantize(rotated=rotated))) for q in (there, here))
        assert_same_bits(f"{how}: values", *pair)


@examples(100)
@given(SIZES, SIZES, hows(hadamard=0), seeds)
def test_an_array_is_its_parts(m, n, how, seed):
    """Constructed again, copied, transposed, packed, and with its scales laid out as cuBLAS reads them."""
    q = how.cast(calm(m, n, seed))
    whole = host(q.dequantize())
    more = {"scale_rule": q.scale_rule, "along": how.along}
    if q.scaling.startswith("nvfp4") or q.scale_rule in MX_RULES:
        more |= {"scale_codes": q.scale_codes, "tensor_scale_inv": q.tensor_scale_inv}
        alone = fk.QuantizedArray(q.data, None, q.format, q.scaling, **more)
        assert_same_bits("scales of their codes", alone.scale_inv, q.scale_inv)
        rows, columns = q.shape if how.along else q.shape[::-1]
        high, wide = TILES[q.scaling]
        codes = (q.scale_codes if how.along else q.scale_codes.T).repeat(high, 0)[:rows]
        back = packing.unswizzle(q.swizzled_scales(), rows, -(-columns // wide))
        assert_same_bits("unswizzled", np.ascontiguousarray(back), np.ascontiguousarray(codes))
    for other in (
        fk.QuantizedArray(q.data, q.scale_inv, q.format, q.scaling, **more),
        copy.deepcopy(q),
        q.T.T,
    ):
        assert_same_bits("values", host(other.dequantize()), whole)
    np.testing.assert_array_equal(host(q.T.dequantize()), whole.T)
    assert q.T.along == 1 - q.along
    if how.format.bits <= 4 and n % 2 == 0:
        again = fk.QuantizedArray.from_packed(q.packed(), q.scale_inv, q.format, q.scaling, **more)
        assert_same_bits("packed", again.data, q.data)
    assert f"shape={q.shape}, {q.format}, scaling={q.scaling!r}" in repr(q)


@examples(100)
@given(SIZES, SIZES, hows(bits=0), seeds)
def test_both_orientations_of_a_matrix(m, n, how, seed):
    """A cast along the first dimension is the transposed of that of the transposed matrix."""
    x = calm(m, n, seed)
    q = how.but(along=1).cast(x)
    p = how.but(along=0).cast(np.ascontiguousarray(x.T))
    for name, want in parts(q).items():
        got = parts(p)[name]
        got = got.T if want is not None and want.ndim == 2 else got
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(host(p.T.dequantize(rotated=True)), host(q.dequantize(rotated=True)))


@examples(100)
@given(SIZES, SIZES, st.sampled_from(SIGNED), hows(bits=0), seeds)
def test_a_sign_is_kept(m, n, fmt, how, seed):
    """The cast of -x is that of x with other signs."""
    x, how = calm(m, n, seed), how.but(format=fmt)
    q, p = how.cast(x), how.cast(-x)
    np.testing.assert_array_equal(p.scale_inv, q.scale_inv)
    np.testing.assert_array_equal(host(p.dequantize(rotated=True)), -host(q.dequantize(rotated=True)))
    if not fmt.twos_complement:
        np.testing.assert_array_equal(p.data, q.data ^ np.uint8(fmt.sign_code))


@examples(100)
@given(SIZES, SIZES, st.sampled_from(SIGNED), hows(bits=0, hadamard=0), seeds)
def test_what_was_cast_is_cast_to_itself(m, n, fmt, how, seed):
    """Of one level of scales; NVFP4's second level and the scales of its blocks round."""
    how = how.but(format=fmt)
    if how.kind == "nvfp4":
        return
    q = how.cast(calm(m, n, seed))
    once = host(q.dequantize())
    again = how.cast(once)
    if how.rule == "exact" or (how.rule is None and how.kind in ("tensor", "row")):
        # a scale that is no power of two rounds, by a bit or two
        assert (np.abs(again.scale_inv - q.scale_inv) <= 4 * 2.0**-24 * q.scale_inv).all()
        np.testing.assert_array_equal(again.data, q.data)
    else:
        np.testing.assert_array_equal(host(again.dequantize()), once)


@examples(100)
@given(SIZES, SIZES, st.sampled_from(SIGNED), hows(hadamard=0), seeds, st.integers(-4, 4))
def test_powers_of_two_go_into_the_scale(m, n, fmt, how, seed, power):
    """2^k x has the codes of x, and 2^k times its scales."""
    x, how = calm(m, n, seed), how.but(format=fmt)
    q, p = how.cast(x), how.cast(x * np.float32(2.0**power))
    np.testing.assert_array_equal(p.data, q.data)
    np.testing.assert_array_equal(host(p.dequantize()), host(q.dequantize()) * np.float32(2.0**power))


@examples(200)
@given(any_format(), st.sampled_from(MX_RULES), st.lists(st.integers(0, 0x7F800000), min_size=2, max_size=50))
def test_scales_grow_with_the_amax(fmt, rule, bits):
    if fmt is None:
        return
    amax = np.sort(np.array(bits, np.uint32)).view(np.float32)
    with np.errstate(all="ignore"):
        found = blocks.scale_bytes(amax, fmt, rule).astype(int)
        assert (np.diff(found) >= 0).all()
        if rule in ("ceil", "rceil", "te"):  # nothing saturates but what 2^127 cannot hold
            inside = np.isfinite(amax) & (found < 254)
            scale = 2.0 ** (found[inside] - 127.0)
            # v of rceil is a float32 product, a bit below the quotient at most
            assert (amax[inside] <= np.float64(fmt.max) * scale * (1 + 2.0**-23)).all()
            least = inside[inside] & (found[inside] > 0) & (rule != "ceil")
            assert (amax[inside] > np.float64(fmt.max) * scale / 2 * (1 - 2.0**-23))[least].all()


@examples(60)
@given(SIZES, SIZES, hows(), seeds)
def test_arguments_that_do_not_fit_are_refused(m, n, how, seed):
    x = calm(m, n, seed)
    options = how.options
    wrong = [
        {"scale_rule": "te" if how.kind in ("tensor", "row", "block", "nvfp4") else "exact"},
        {"along": 2},
        {"hadamard": 8},
        {"scaling": f"{how.scaling}_"},
        {"rng": None} if "rng" in options else {"rng": (1, 2)},
    ]
    for change in wrong:
        with pytest.raises(Fp8kitError):
            fk.quantize(x, **(options | change))
