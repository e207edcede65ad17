"""FP8 arrays against the codec and NumPy's float64, for any format, scaling, rounding, scale, shape and
memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import codec, formats, quantization
from fp8kit.backends.reference.philox import words
from fp8kit.errors import FormatError, Fp8kitError, ShapeError
from fp8kit.testing import assert_close, assert_same_bits, sum_slack
from tests.support.casts import any_format
from tests.support.draws import FLOATS, OTHERS, attempt, examples, host, seeds, shapes, thing, things, values

# those that take scales of any value; tests/formats/test_quantized_array.py has the others
TILES = {name: tile for name, tile in quantization.TILES.items() if not name.startswith("nvfp4")}
SCALINGS = [*TILES, "column"]
NAMED = [*formats.FORMATS.values()]


def rows_of(x):
    return (
        x.reshape(-1, x.shape[-1])
        if x.ndim and x.shape[-1]
        else x.reshape(int(np.prod(x.shape[:-1], dtype=int)), 0)
        if x.ndim
        else x.reshape(1, 1)
    )


def drawn(seed, offset, shape):
    """Philox's words of the elements of a matrix."""
    out = np.empty(-(-int(np.prod(shape)) // 4) * 4, np.uint32)
    words(seed, offset, 0, out)
    return out[: int(np.prod(shape))].reshape(shape)


def spread(per_tile, shape, scaling):
    """One value a tile at each element of a matrix."""
    tile = tuple(t or max(n, 1) for t, n in zip(TILES[scaling], shape, strict=True))
    down, across = np.indices(shape)
    grid = tuple(max(1, -(-n // t)) for n, t in zip(shape, tile, strict=True))
    return np.asarray(per_tile).reshape(grid)[down // tile[0], across // tile[1]]


@examples(300)
@given(any_format())
def test_formats_are_what_their_fields_say(fmt):
    if fmt is None:
        return
    codes = np.arange(256, dtype=np.uint8)
    table = codec.decode(codes, fmt)
    assert (
        np.nanmax(np.where(np.isinf(table), np.nan, table))
        == fmt.max
        == codec.decode(np.uint8(fmt.max_code), fmt)
    )
    positive = table[(table > 0) & np.isfinite(table)]
    assert positive.min() == fmt.smallest_subnormal or fmt.mantissa_bits == 0
    made = [c for c in range(1 << fmt.bits) if not (fmt.twos_complement and c == fmt.sign_code)]
    known = [c for c in made if not np.isnan(table[c])]
    again = codec.encode(table[known], fmt, saturate=fmt.nan_code is None)
    np.testing.assert_array_equal(codec.decode(again, fmt), table[known])


@examples(250)
@given(
    things([*FLOATS, *OTHERS], wild=True),
    st.sampled_from(NAMED) | any_format(),
    st.sampled_from(SCALINGS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1.0, 0.37, 300.0, "grid", "wrong"]),
    seeds,
)
def test_quantize_is_the_codec(x, fmt, scaling, stochastic, saturate, scale, seed):
    if fmt is None:
        return
    matrix = rows_of(x.values)
    tile = tuple(t or max(n, 1) for t, n in zip(TILES.get(scaling, (0, 0)), matrix.shape, strict=True))
    grid = (
        (1,)
        if scaling == "tensor"
        else tuple(max(1, -(-n // t)) for n, t in zip(matrix.shape, tile, strict=True))
    )
    if scale == "grid":
        scale = np.random.default_rng(seed).uniform(0.1, 9, grid).astype(np.float32)
    elif scale == "wrong":
        scale = np.ones((5, 1, 3), np.float32)
    rng = {"rounding": "stochastic", "rng": (seed, 7)} if stochastic else {}
    q = attempt(lambda: fk.quantize(x.thing, fmt, scale=scale, scaling=scaling, saturate=saturate, **rng), x)
    floating = x.values.dtype in FLOATS
    wrong = x.refused or not floating or scaling == "column" or (not saturate and fmt.nan_code is None)
    if isinstance(q, Fp8kitError):
        assert wrong or scale is not None
        assert isinstance(q, FormatError | ShapeError)
        if not wrong:  # a scale that does not fit
            assert np.size(scale) != np.prod(grid)
        return
    assert not wrong
    with np.errstate(all="ignore"):
        narrow = matrix.astype(np.float32)
        if scale is None:
            finite = np.where(np.isnan(narrow), 0, np.abs(narrow))
            amax = np.zeros(grid if scaling != "tensor" else (1, 1), np.float32)
            for i in np.ndindex(amax.shape):
                part = finite[tuple(slice(a * t, (a + 1) * t) for a, t in zip(i, tile, strict=True))]
                amax[i] = part.max(initial=0)
            limit = (
                min(formats.dtype(x.values.dtype).max, 3.4028234663852886e38)
                if scaling.startswith("block")
                else 3.4028234663852886e38
            )
            usable = np.isfinite(amax) & (amax > 0)
            scales = np.where(usable, np.float32(fmt.max) / np.where(usable, amax, 1), np.float32(1)).astype(
                np.float32
            )
            scales = np.where(np.isinf(scales), np.float32(limit), scales)
            if scaling not in ("tensor", "row"):
                scales = (scales.view(np.uint32) & 0xFF800000).view(np.float32)
        else:
            scales = np.broadcast_to(
                np.asarray(scale, np.float32).reshape(grid if np.size(scale) != 1 else (1,)), grid
            )
        scaled = narrow * spread(scales, matrix.shape, scaling).astype(np.float32)
        if x.values.dtype == np.float64 and scale is not None:
            scaled = matrix.astype(np.float32) * spread(scales, matrix.shape, scaling)
        random = drawn(seed, 7, matrix.shape) if stochastic else None
        want = codec.encode(scaled, fmt, "stochastic" if stochastic else "nearest", saturate, random)
        assert_same_bits("codes", rows_of(host(q.data)), want)
        inverse = np.float32(1) / scales.astype(np.float32)
        np.testing.assert_array_equal(host(q.scale_inv).reshape(-1), inverse.reshape(-1))
        for dtype in ("float32", "bfloat16", "float16"):
            wide = (
                codec.decode(want, fmt).astype(np.float32) * spread(inverse, matrix.shape, scaling)
            ).astype(formats.dtype(dtype).numpy)
            np.testing.assert_array_equal(
                rows_of(host(q.dequantize(dtype))).astype(float), wide.astype(float)
            )
    assert (q.shape, q.ndim, q.size) == (x.values.shape, x.values.ndim, x.values.size)
    assert (str(q.device), q.scaling, q.format) == ("cpu", scaling, fmt)
    again = fk.Float8Tensor(q.data, q.scale_inv, fmt, scaling)
    assert_same_bits("constructed", host(again.dequantize()), host(q.dequantize()))


@examples(120)
@given(shapes(1, 3), st.sampled_from(list(TILES)), seeds, st.data())
def test_parts_and_shapes(shape, scaling, seed, data):
    q = fk.quantize(values(shape, np.dtype(np.float32), seed), scaling=scaling)
    whole = host(q.dequantize())
    index = data.draw(st.integers(-shape[0], max(shape[0] - 1, 0)) | st.slices(max(shape[0], 1)))
    try:
        part = attempt(lambda: q[index])
    except IndexError:
        assert shape[0] == 0
        part = ShapeError()
    if isinstance(part, Fp8kitError):
        stepped = isinstance(index, slice) and index.step not in (None, 1)
        assert stepped or scaling not in ("tensor", "row") or not shape[0]
    else:
        assert_same_bits(
            "part", host(part.dequantize()), np.ascontiguousarray(whole[index]).reshape(whole[index].shape)
        )
    target = data.draw(shapes(1, 3) | st.just((-1,)) | st.just((-1, shape[-1])))
    reshaped = attempt(lambda: q.reshape(*target))
    if not isinstance(reshaped, Fp8kitError):
        assert_same_bits("reshape", host(reshaped.dequantize()), whole.reshape(reshaped.shape))
    flipped = attempt(lambda: q.T)
    assert isinstance(flipped, Fp8kitError) == (len(shape) != 2)
    if len(shape) == 2:
        np.testing.assert_array_equal(host(flipped.dequantize()), whole.T)
        np.testing.assert_array_equal(host(flipped.data), host(q.data).T)
    if len(shape):
        assert len(q) == shape[0]


@examples(200)
@given(
    st.tuples(*[st.sampled_from([0, 1, 2, 15, 16, 33, 128, 130])] * 3),
    st.sampled_from(list(TILES)),
    st.sampled_from(list(TILES)),
    st.tuples(*[st.sampled_from([fk.E4M3, fk.E5M2, fk.E2M1, fk.MXINT8])] * 2),
    st.sampled_from([None, "float32", "bfloat16", "float16", "int8"]),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_products(mnk, left, right, fmts, dtype, transposed, ragged, seed):
    m, n, k = mnk
    a = fk.quantize(
        values((k, m) if transposed else (m, k), np.dtype(np.float32), seed), fmts[0], scaling=left
    )
    b = fk.quantize(values((n, k + ragged), np.dtype(np.float32), seed + 1), fmts[1], scaling=right)
    a, b = a.T if transposed else a, b.T
    out = attempt(lambda: a.matmul(b, dtype))
    if isinstance(out, Fp8kitError):
        assert ragged or dtype == "int8"
        return
    wide = [host(t.dequantize()).astype(float) for t in (a, b)]
    slack = sum_slack(np.abs(wide[0]) @ np.abs(wide[1]), k + 8)
    with np.errstate(over="ignore"):
        want = wide[0] @ wide[1]
        # what float16 does not hold
        want = np.where(np.abs(want) > formats.dtype(dtype or "float32").max, np.copysign(np.inf, want), want)
        assert_close("product", host(out), want, dtype or "float32", slack)


@examples(60)
@given(
    things(OTHERS, 0, 3),
    things([np.dtype(np.float32), np.dtype(np.float64)], 0, 2),
    st.sampled_from(NAMED),
    st.sampled_from(SCALINGS),
)
def test_codes_from_anywhere(data, scale_inv, fmt, scaling):
    made = attempt(lambda: fk.Float8Tensor(data.thing, scale_inv.thing, fmt, scaling), data, scale_inv)
    if isinstance(made, Fp8kitError):
        return
    kind = formats.dtype(data.values.dtype)
    assert kind is formats.uint8 or kind.format == fmt
    assert scale_inv.values.dtype == np.float32
    matrix = rows_of(data.values.view(np.uint8))
    with np.errstate(all="ignore"):
        want = codec.decode(matrix, fmt).astype(np.float32) * spread(
            scale_inv.values.reshape(-1), matrix.shape, scaling
        )
        np.testing.assert_array_equal(rows_of(host(made.dequantize())), want)


@examples(60)
@given(things(FLOATS, 0, 3, wild=True, layouts=("plain",)), st.sampled_from(NAMED))
def test_the_codec_refuses_what_it_cannot_read(x, fmt):
    codes = codec.encode(x.values, fmt)
    assert codes.shape == x.values.shape
    assert isinstance(
        attempt(lambda: codec.encode(thing(x.values, "plain").thing.astype(complex), fmt)), Fp8kitError
    )
    assert isinstance(
        attempt(lambda: codec.encode(x.values, fmt, "stochastic", words=np.zeros(3, np.int8))), Fp8kitError
    )
