"""Quantised arrays of every format, scaling and rule: what quantize makes of them, their scales' codes,
packing, products, and how they print."""

import copy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import arrays, blocks, codec, packing
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, MXINT8
from fp8kit.quantization import FOUR_OVER_SIX, MX_RULES, TILES
from fp8kit.testing.compare import assert_close, sum_slack
from tests.support.combinations import combinations

VECTORS = Path(__file__).parent / "data" / "torchao_layouts.npz"
BY_BLOCKS = [name for name in TILES if name not in ("tensor", "row")]


def _x(*shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-3, 3, shape))).astype(dtype)


DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.float64]


def _tile(scaling, shape, along):
    rows, columns = TILES[scaling] if along else TILES[scaling][::-1]
    return rows or shape[0], columns or shape[1]


def _spread(per_tile, shape, tile):
    down, across = np.indices(shape)
    grid = (-(-shape[0] // tile[0]), -(-shape[1] // tile[1]))
    return np.asarray(per_tile).reshape(grid)[down // tile[0], across // tile[1]]


def _amax(x, tile):
    inner = np.maximum.reduceat(np.abs(x), range(0, x.shape[0], tile[0]), axis=0)
    return np.maximum.reduceat(inner, range(0, x.shape[1], tile[1]), axis=1)


@combinations({"fmt": [E4M3, E5M2, E3M2, E2M3, E2M1, MXINT8], "rule": MX_RULES, "along": [-1, 0]})
def test_mx_by_every_rule(fmt, rule, along):
    x = _x(70, 100)
    for scaling in ("mx_1x32", "mx_32x32", "mx_1x16"):
        q = fk.quantize(x, fmt, scaling=scaling, scale_rule=rule, along=along)
        tile = _tile(scaling, x.shape, along)
        codes = blocks.scale_bytes(_amax(x, tile), fmt, rule)
        scale, inverse = blocks.scales_of_bytes(codes)
        np.testing.assert_array_equal(q.scale_codes, codes)
        np.testing.assert_array_equal(q.scale_inv, inverse)
        np.testing.assert_array_equal(q.data, codec.encode(x * _spread(scale, x.shape, tile), fmt))
        want = codec.decode(q.data, fmt) * _spread(inverse, x.shape, tile)
        np.testing.assert_array_equal(q.dequantize(), want.astype(np.float32))
        assert (q.along, q.T.along, q.scale_rule) == (abs(along), 1 - abs(along), rule)


@combinations({"scaling": ["nvfp4_1x16", "nvfp4_16x16", "nvfp4_row_1x16"], "along": [-1, 0], "dtype": DTYPES})
def test_nvfp4(scaling, along, dtype):
    x = _x(40, 52, dtype=dtype)
    q = fk.quantize(x, scaling=scaling, along=along)
    wide, tile = x.astype(np.float32), _tile(scaling, x.shape, along)
    most = np.abs(wide).max()
    if "row" in scaling:
        most = np.abs(wide).max(1 if along else 0, keepdims=True)
    codes, scale, inverse, tensor = blocks.nvfp4_scales(_amax(wide, tile), most)
    assert q.format is E2M1
    np.testing.assert_array_equal(q.scale_codes, codes)
    np.testing.assert_array_equal(q.tensor_scale_inv, np.reshape(tensor, -1))
    np.testing.assert_array_equal(q.scale_inv, inverse)
    np.testing.assert_array_equal(q.data, codec.encode(wide * _spread(scale, x.shape, tile), E2M1))
    # the largest value of each block is kept to within E2M1's and E4M3's half steps
    error = np.abs(q.dequantize() - wide)
    assert (error <= _spread(_amax(wide, tile), x.shape, tile) * (1 / 6 + 2.0**-4)).all()


@pytest.mark.parametrize("scaling", ["nvfp4_1x16", "nvfp4_16x16", "nvfp4_row_1x16"])
@pytest.mark.parametrize("rule", FOUR_OVER_SIX)
def test_four_over_six(scaling, rule):
    """By ``blocks.four_over_six``; both orientations of squares are the same."""
    x = _x(37, 52)
    q = fk.quantize(x, scaling=scaling, scale_rule=rule)
    (high, _), (down, across) = TILES[scaling], q.scale_codes.shape
    padded = np.zeros((down * high, across * 16), np.float32)
    padded[:37, :52] = x
    parts = padded.reshape(down, high, across, 16).swapaxes(1, 2).reshape(-1, high, 16)
    most = np.repeat(np.abs(x).max(1), across) if "row" in scaling else np.abs(x).max()
    codes, scale, inverse, fours = blocks.four_over_six(parts, most, rule)
    np.testing.assert_array_equal(q.scale_codes.reshape(-1), codes)
    np.testing.assert_array_equal(q.scale_inv.reshape(-1), inverse)
    tile = _tile(scaling, x.shape, 1)
    np.testing.assert_array_equal(
        q.data, codec.encode(x * _spread(scale.reshape(down, across), x.shape, tile), E2M1)
    )
    assert "16x16" in scaling or 0 < fours.mean() < 1
    transposed = fk.quantize(np.ascontiguousarray(x), scaling=scaling, scale_rule=rule, along=0)
    if "16x16" in scaling:
        np.testing.assert_array_equal(transposed.data, q.data)
    else:
        lying = fk.quantize(np.ascontiguousarray(x.T), scaling=scaling, scale_rule=rule)
        np.testing.assert_array_equal(transposed.data, lying.data.T)
    for more in ({"hadamard": 16}, {"rounding": "stochastic", "rng": (1, 2)}, {"format": E4M3}):
        with pytest.raises(FormatError, match="expected E2M1, to nearest, without a rotation"):
            fk.quantize(x, scaling=scaling, scale_rule=rule, **more)


def test_rows_keep_what_a_scale_of_the_tensor_loses():
    x = _x(8, 64) * np.float32(10.0) ** -np.arange(8, dtype=np.float32)[:, None]
    errors = {}
    for scaling in ("nvfp4_1x16", "nvfp4_row_1x16"):
        found = fk.quantize(x, scaling=scaling).dequantize()
        errors[scaling] = np.linalg.norm(found - x, axis=1) / np.linalg.norm(x, axis=1)
    assert errors["nvfp4_1x16"].max() > 0.5
    assert errors["nvfp4_row_1x16"].max() < 0.15


@pytest.mark.parametrize("scaling", BY_BLOCKS)
def test_the_constructor_takes_what_quantize_makes(scaling):
    q = fk.quantize(_x(3, 5, 40), scaling=scaling)
    more = {"scale_codes": q.scale_codes, "tensor_scale_inv": q.tensor_scale_inv}
    again = fk.QuantizedArray(q.data, q.scale_inv, q.format, scaling, **more, scale_rule=q.scale_rule)
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())
    if q.scale_codes is not None:
        alone = fk.QuantizedArray(q.data, None, q.format, scaling, **more)
        np.testing.assert_array_equal(alone.scale_inv, q.scale_inv)
    other = copy.deepcopy(q)
    before = other.dequantize().copy()
    q.data[...], q.scale_inv[...] = 1, 0
    np.testing.assert_array_equal(other.dequantize(), before)


@combinations({"scaling": [name for name in TILES if name != "tensor"], "dtype": DTYPES})
def test_along_the_first_dimension_is_the_transposed_matrix(scaling, dtype):
    """To the bit, also where an amax is 0, NaN, Inf or so small that its scale overflows."""
    x = _x(140, 160, dtype=dtype)
    x[:, 0], x[3, 4], x[5, 6], x[:, 7] = 0, np.nan, np.inf, 2.0**-133
    for rule in (None, "te") if scaling.startswith("mx") else (None,):
        for more in ({}, {"rounding": "stochastic", "rng": (1, 2)}):
            transposed = fk.quantize(np.ascontiguousarray(x.T), scaling=scaling, scale_rule=rule, **more)
            q = fk.quantize(x, scaling=scaling, along=0, scale_rule=rule, **more)
            np.testing.assert_array_equal(q.scale_inv, transposed.scale_inv.T)
            if not more:  # a word belongs to a place in the matrix as it lies
                np.testing.assert_array_equal(q.data, transposed.data.T)
            down, up = (codec.decode(t.data, q.format) for t in (transposed.T, q))
            assert (np.sign(down) * np.sign(up) >= 0)[np.isfinite(down)].all()


def test_codes_of_scales_are_worked_out_and_refused_where_they_are_none():
    q = fk.quantize(_x(4, 64), scaling="mx_1x32")
    np.testing.assert_array_equal(blocks.scales_of_bytes(q.scale_codes)[1], q.scale_inv)
    extreme = np.float32([[2.0**-127, 2.0**127], [1, np.nan]])
    mine = fk.QuantizedArray(np.zeros((2, 64), np.uint8), extreme, E4M3, "mx_1x32")
    np.testing.assert_array_equal(mine.scale_codes, [[0, 254], [127, 255]])
    with pytest.raises(FormatError, match="powers of two"):
        _ = fk.quantize(_x(4, 64), scaling="mx_1x32", scale=np.full((4, 2), 3, np.float32)).scale_codes
    assert fk.quantize(_x(4, 64), scaling="block_1x32").scale_codes is None


@combinations(
    {
        "scaling": ["tensor", "row", "block_1x32", "mx_1x32", "nvfp4_1x16"],
        "along": [-1, 0],
        "n": [16, 32, 64, 128],
        "signs": ["plus", "te", "random"],
    }
)
def test_rotation(scaling, along, n, signs):
    """What is cast are the rotated values; dequantised they are rotated back; products of operands that
    are rotated alike approximate the product."""
    x, y = _x(50, 300), _x(60, 300, seed=1)
    x, y = (x, y) if along else (x.T.copy(), y.T.copy())
    how = {"scaling": scaling, "along": along, "hadamard": n, "signs": signs}
    how |= {"rng": (5, 6)} if signs == "random" else {}
    how |= {"scale_rule": "rceil"} if scaling == "mx_1x32" else {}
    how |= {"format": E4M3}
    q, p = fk.quantize(x, **how), fk.quantize(y, **how)
    lying = x if along else x.T
    kernels, out = fk.backends.dispatch.kernels(arrays.CPU), np.empty_like(x)
    rng = arrays.as_view(np.array([5, 6])) if signs == "random" else None
    kernels.rotate(arrays.as_view(x), arrays.as_view(out), None, n, signs, abs(along), rng, 0)
    plain = {k: v for k, v in how.items() if k not in ("hadamard", "signs", "rng")}
    want = fk.quantize(out, **plain)
    np.testing.assert_array_equal(q.data, want.data)
    np.testing.assert_array_equal(q.scale_inv, want.scale_inv)
    np.testing.assert_array_equal(q.dequantize(rotated=True), want.dequantize())
    if signs != "random":
        np.testing.assert_array_equal(out if along else out.T, blocks.hadamard(lying, n, signs))

    # a rotation keeps norms: the error is the cast's own, and float32's
    norm = np.linalg.norm
    cast = norm(want.dequantize() - out)
    assert abs(norm(q.dequantize() - x) - cast) <= 1e-5 * norm(x)
    for dtype, step in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        narrow = np.asarray(q.dequantize(dtype)).astype(np.float32)
        assert norm(narrow - q.dequantize()) <= 1.01 * step * norm(x)
    product, exact = (q @ p.T if along else q.T @ p), (x @ y.T if along else x.T @ y)
    assert norm(product - exact) <= 2 * (cast / norm(x)) * norm(exact) * np.sqrt(2) + 1e-5 * norm(exact)


def test_rotations_that_do_not_cancel_are_refused():
    x = _x(32, 32)
    one = fk.quantize(x, hadamard=32)
    drawn = [fk.quantize(x, hadamard=32, signs="random", rng=(1, n)) for n in (2, 2, 3)]
    for other, match in (
        (fk.quantize(x), "not rotated"),
        (fk.quantize(x, hadamard=16), "hadamard=16"),
        (fk.quantize(x, hadamard=32, signs="te"), "signs='te'"),
        (fk.quantize(x, hadamard=32, along=0), "not along the contraction"),
        (drawn[0], "random"),
    ):
        for call in (one.matmul, one.explain):
            with pytest.raises(FormatError, match=f"matmul: .*{match}.*cancels"):
                call(other.T)
    with pytest.raises(FormatError, match="another rng"):
        drawn[0] @ drawn[2].T
    np.testing.assert_array_equal(drawn[0] @ drawn[1].T, drawn[0] @ drawn[0].T)


FORMATS = (E4M3, E5M2, E2M1, MXINT8)


@pytest.mark.parametrize("along", [(1, 1), (1, 0), (0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in FORMATS for b in FORMATS], ids=str)
@pytest.mark.parametrize(
    "scalings",
    [
        ("tensor", "row"),
        ("row", "row"),
        ("block_1x128", "block_128x128"),
        ("nvfp4_1x16", "nvfp4_16x16"),
        ("mx_1x32", "nvfp4_1x16"),
        ("nvfp4_row_1x16", "nvfp4_row_1x16"),
        ("block_1x64", "tensor"),
    ],
    ids="@".join,
)
def test_products_of_everything(scalings, pair, along):
    """a @ b.T in any orientation is the product of what is dequantised, by the kernel that explain names."""
    m, k, n = 20, 160, 36
    wide, made = [], []
    for seed, (shape, scaling, fmt, lies) in enumerate(
        zip(((m, k), (n, k)), scalings, pair, along, strict=True)
    ):
        x = _x(*shape, seed=seed)
        q = fk.quantize(x, fmt, scaling=scaling) if lies else fk.quantize(x.T, fmt, scaling=scaling).T
        factor = 1.0 if q.tensor_scale_inv is None else q.tensor_scale_inv.astype(np.float64)[:, None]
        scales = q.scale_inv if q.tensor_scale_inv is None else codec.decode(q.scale_codes, E4M3)
        stored = np.asarray(q.data if lies else q.data.T)
        values = codec.decode(stored, fmt) * _spread(scales, stored.shape, _tile(scaling, stored.shape, 1))
        made.append(q)
        wide.append(values * factor if lies else (values * factor).T)
    a, b = made
    got = a @ b.T
    exact, size = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    assert_close("a @ b.T", got, exact, "float32", sum_slack(size, k))
    assert_close("float16", a.matmul(b.T, "float16"), exact, "float16", sum_slack(size, k))
    said = a.explain(b.T)
    fp8 = set(pair) <= {E4M3, E5M2} and pair != (E5M2, E5M2)
    lies = all(way or name == "block_128x128" for way, name in zip(along, scalings, strict=True))
    native = fp8 and lies and scalings in (("row", "row"), ("block_1x128", "block_128x128"))
    assert ("kernel gemm" in said) == (not native)
    assert "because" in said


def test_blocks_along_the_first_dimension_reach_the_block_scaled_product(monkeypatch):
    x, y = _x(20, 300), _x(300, 30, seed=1)
    kernels, taken = fk.backends.dispatch.kernels(arrays.CPU), []

    class Spy:
        def __getattr__(self, name):
            taken.append(name)
            return getattr(kernels, name)

    a = fk.quantize(x, scaling="block_1x128")
    b = fk.quantize(y, scaling="block_1x128", along=0)
    transposed = fk.quantize(y.T, scaling="block_1x128")
    want = a @ transposed.T
    monkeypatch.setattr(fk.backends.dispatch, "kernels", lambda device: Spy())
    np.testing.assert_array_equal(a @ b, want)
    np.testing.assert_array_equal(b.T @ a.T, (transposed @ a.T))
    assert "block_gemm" in taken
    assert "gemm" not in taken
    rows = fk.quantize(x, scaling="row"), fk.quantize(y, scaling="row", along=0)
    np.testing.assert_array_equal(rows[0] @ rows[1], rows[0] @ fk.quantize(y.T, scaling="row").T)


def test_explain():
    a = fk.quantize(_x(4, 128))
    assert a.explain() == a.explain(a.T)
    assert a.explain() == (
        "E4M3 by tensor @ E4M3 by tensor on cpu: native, the FP8 product (kernel fp8_gemm), on the codes, "
        "because each operand has one scale, which is taken out of the sum."
    )
    nvfp4 = fk.quantize(_x(4, 128), scaling="nvfp4_1x16", hadamard=16)
    assert "emulated, the product of the decoded operands" in nvfp4.explain()
    assert "FP8 products take E4M3 and E5M2" in nvfp4.explain()
    assert "which cancels. NVFP4's scales of tensors" in nvfp4.explain()
    mx = fk.quantize(_x(128, 128), scaling="mx_1x32")
    assert mx.explain(mx) == f"{mx.explain(mx.T)} The blocks of the right operand lie across the contraction."
    assert "lie across" not in fk.quantize(_x(128, 128), scaling="block_128x128").explain(mx.T)
    said = a.explain(a.T, accumulate="hopper_fast")
    assert said == a.explain(accumulate="hopper_fast")
    assert said == (
        "E4M3 by tensor @ E4M3 by tensor on cpu: emulated sums, 'hopper_fast' (kernel model_gemm), on the "
        "codes, with the same bits on every device."
    )
    assert a.explain(a.T, accumulate="fp32") == a.explain()
    with pytest.raises(ArgumentError, match="did you mean hopper_fast"):
        a.explain(a.T, accumulate="hopper_fst")
    with pytest.raises(FormatError, match=r"mx_\* or nvfp4_\*"):
        a.explain(accumulate="blackwell_mx")
    for more in ({}, {"accumulate": "exact"}):
        with pytest.raises(ShapeError, match=r"\(4, 128\) @ \(4, 128\)"):
            a.explain(a, **more)
    with pytest.raises(FormatError, match="explain: other"):
        a.explain(_x(2, 2))


def test_packing():
    x = _x(6, 5, 32)
    q = fk.quantize(x, scaling="nvfp4_1x16")
    packed = q.packed()
    assert (packed.shape, packed.dtype) == ((6, 5, 16), np.uint8)
    np.testing.assert_array_equal(packed & 15, q.data[..., ::2])
    np.testing.assert_array_equal(packed >> 4, q.data[..., 1::2])
    more = {"scale_codes": q.scale_codes, "tensor_scale_inv": q.tensor_scale_inv}
    again = fk.QuantizedArray.from_packed(packed, None, E2M1, "nvfp4_1x16", **more)
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())
    transposed = fk.quantize(_x(8, 6), E2M1)
    np.testing.assert_array_equal(packing.unpack(transposed.T.packed()), transposed.data.T)
    there = fk.quantize(torch.from_numpy(x), E2M1).packed()
    assert isinstance(there, torch.Tensor)
    np.testing.assert_array_equal(np.asarray(there), fk.quantize(x, E2M1).packed())
    for call, error, match in (
        (lambda: fk.quantize(x).packed(), FormatError, "at most 4 bits"),
        (lambda: fk.quantize(_x(4, 3), E2M1).packed(), ShapeError, "even"),
        (lambda: fk.QuantizedArray.from_packed(packed.astype(np.int8)), FormatError, "uint8"),
        (lambda: fk.QuantizedArray.from_packed(packed, np.ones(1, "f4"), E4M3), FormatError, "4 bits"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_layouts_are_torchaos():
    """What torchao 0.18.0 packed and swizzled: tests/support/torchao_layouts.py made it."""
    theirs = np.load(VECTORS)
    np.testing.assert_array_equal(packing.pack(theirs["codes"]), theirs["packed"])
    np.testing.assert_array_equal(packing.unpack(theirs["packed"]), theirs["codes"])
    for name in ("1x1", "3x5", "128x4", "130x9", "256x8", "300x17"):
        scales = theirs[f"scales_{name}"]
        np.testing.assert_array_equal(packing.swizzle(scales), theirs[f"blocked_{name}"])
        np.testing.assert_array_equal(packing.unswizzle(theirs[f"blocked_{name}"], *scales.shape), scales)


@pytest.mark.parametrize("along", [-1, 0])
@pytest.mark.parametrize("scaling", ["mx_1x32", "mx_32x32", "nvfp4_1x16", "nvfp4_16x16"])
def test_swizzled_scales(scaling, along):
    """Byte by byte where cuBLAS's documentation puts the scale of row r and block c."""
    x = _x(150, 200)
    q = fk.quantize(x, E2M1, scaling=scaling, along=along)
    high, wide = TILES[scaling]
    rows, columns = x.shape if along else x.shape[::-1]
    codes = q.scale_codes if along else q.scale_codes.T
    across = -(-columns // wide)
    flat = q.swizzled_scales()
    wanted = np.zeros(-(-rows // 128) * 128 * (-(-across // 4) * 4), np.uint8)
    for r in range(rows):
        for c in range(across):
            tile = (r // 128) * -(-across // 4) + c // 4
            wanted[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = codes[r // high, c]
    np.testing.assert_array_equal(flat, wanted)
    np.testing.assert_array_equal(q.T.swizzled_scales(), wanted)
    np.testing.assert_array_equal(packing.unswizzle(flat, rows, across), np.repeat(codes, high, 0)[:rows])
    with pytest.raises(FormatError, match="swizzled_scales"):
        fk.quantize(x).swizzled_scales()


@pytest.mark.parametrize("bits", [1, 4, 8, 31, 32])
@pytest.mark.parametrize("scaling", ["tensor", "block_1x32", "nvfp4_1x16"])
def test_stochastic_bits(scaling, bits):
    x = _x(30, 64)
    q = fk.quantize(x, E2M1, scaling=scaling, rounding="stochastic", rng=(3, 4), stochastic_bits=bits)
    nearest = fk.quantize(x, E2M1, scaling=scaling)
    np.testing.assert_array_equal(q.scale_inv, nearest.scale_inv)
    kernels, drawn = fk.backends.dispatch.kernels(arrays.CPU), np.empty(x.shape, np.uint8)
    rng, one = arrays.as_view(np.array([3, 4])), arrays.as_view(np.ones(1, np.float32))
    tile = _tile(scaling, x.shape, 1)
    scale = np.float32(1) / q.scale_inv if scaling != "tensor" else np.float32(6) / np.abs(x).max()
    if scaling == "nvfp4_1x16":
        scale = blocks.nvfp4_scales(_amax(x, tile), np.abs(x).max())[1]
    scaled = arrays.as_view((x * _spread(scale, x.shape, tile)).astype(np.float32))
    spare = arrays.as_view(np.empty(1, np.float32))
    kernels.quantize(scaled, arrays.as_view(drawn), one, spare, None, E2M1, x.shape, True, bits, 0, rng, 0)
    np.testing.assert_array_equal(q.data, drawn)


def test_what_is_empty():
    for scaling in TILES:
        for shape in ((0, 8), (3, 0), (2, 0, 4)):
            for how in ({}, {"hadamard": 16}, {"along": 0}):
                q = fk.quantize(np.zeros(shape, np.float32), scaling=scaling, **how)
                assert q.dequantize().shape == shape
                assert np.isfinite(np.asarray(q.scale_inv)).all()
                assert repr(q)
    scale = fk.quantize(np.zeros((0, 8), np.float32), scaling="mx_1x32", scale_rule="te").scale_codes
    np.testing.assert_array_equal(scale, [[0]])


def test_zeros_nan_and_inf_in_blocks():
    x = np.ones((5, 32), np.float32)
    x[1, 3], x[2, 3], x[3] = np.nan, np.inf, 0
    te = fk.quantize(x, scaling="mx_1x32", scale_rule="te")
    assert te.scale_codes[:, 0].tolist() == [119, 255, 254, 0, 119]
    assert np.isnan(te.dequantize()[1]).all()
    today = fk.quantize(x, scaling="mx_1x32")
    assert today.scale_codes[:, 0].tolist() == [119, 119, 127, 127, 119]
    nvfp4 = fk.quantize(x, scaling="nvfp4_1x16")
    assert np.isnan(nvfp4.dequantize()[1, :16]).all()
    np.testing.assert_array_equal(nvfp4.dequantize()[3], 0)


@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (2, 3, 40), (30, 40), (3, 50, 41)])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block_1x16", "mx_32x32", "nvfp4_1x16"])
@pytest.mark.parametrize("along", [-1, 0])
def test_repr_prints_the_values(shape, scaling, along):
    x = _x(*shape)
    for q in (
        fk.quantize(x, scaling=scaling, along=along),
        fk.quantize(x, E5M2, scaling=scaling, along=along),
    ):
        for seen in (q, q.T) if len(shape) == 2 else (q,):
            text = repr(seen)
            values = np.array2string(
                np.asarray(seen.dequantize()), separator=", ", precision=4, prefix="QuantizedArray("
            )
            assert text.startswith(f"QuantizedArray({values},\n"), text
            assert f"shape={seen.shape}, {seen.format}, scaling='{scaling}'" in text
            assert ("along=0" in text) == (not seen.along)
            assert "cpu" in text
    with np.printoptions(threshold=5, edgeitems=1):
        assert ("..." in repr(q).partition("shape=")[0]) == (x.size > 5 and max(shape) > 2)


def test_repr_of_large_arrays_fetches_little(monkeypatch):
    q = fk.quantize(_x(2000, 3000), scaling="block_1x128")
    monkeypatch.setattr(fk.QuantizedArray, "_wide", None)
    text = repr(q)
    assert text.count("...") == 2 * (6 + 1)  # in six rows and between them, of the values and of the scales
    assert len(text) < 2000
    rotated = fk.quantize(_x(4, 32), hadamard=32, signs="te")
    assert "rotated: hadamard=32, signs='te'" in repr(rotated)


def test_the_former_name():
    assert fk.Float8Tensor is fk.QuantizedArray
    assert isinstance(fk.quantize(_x(2, 2)), fk.Float8Tensor)


@pytest.mark.parametrize(("rule", "spiky", "of_channel"), [("floor", 1.85, 0.94), ("te", 0.77, 0.21)])
def test_a_rotation_lifts_spikes_more_than_a_channel(rule, spiky, of_channel):
    """Gains in dB of the ratio of signal to noise, of MXFP4 with a rotation of 32: means of four draws, which
    move by 0.3 dB each."""
    gains = {"spikes": [], "channel": []}
    for seed in range(4):
        random = np.random.default_rng(seed)
        data = {name: random.standard_normal((512, 1024)).astype(np.float32) for name in gains}
        data["spikes"][random.random((512, 1024)) < 1e-3] *= 100
        data["channel"][:, 7] *= 200
        for name, x in data.items():
            how = {"scaling": "mx_1x32", "scale_rule": rule}
            values = [fk.quantize(x, E2M1, **how, hadamard=n).dequantize() for n in (0, 32)]
            plain, rotated = (np.square(each.astype(np.float64) - x).sum() for each in values)
            gains[name].append(10 * np.log10(plain / rotated))
    assert abs(np.mean(gains["spikes"]) - spiky) < 0.4
    assert abs(np.mean(gains["channel"]) - of_channel) < 0.4
    assert np.mean(gains["spikes"]) > 1.5 * np.mean(gains["channel"])


def test_power_2_of_mx_is_te_but_for_zero_and_inf():
    """For every amax of bfloat16 that is finite."""
    x = np.zeros((0x7F80, 32), np.float32)
    x[:, 0] = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
    own, te = (fk.quantize(x, scaling="mx_1x32", scale_rule=rule).scale_inv for rule in (None, "te"))
    assert np.flatnonzero(own != te).tolist() == [0]


def test_a_format_without_sign_makes_negative_values_nan() -> None:
    got = fk.quantize(np.array([[-1, 0, 1, 2]], np.float32), fk.E8M0, scale=1.0).dequantize()
    np.testing.assert_array_equal(got, np.array([[np.nan, 2.0**-127, 1, 2]], np.float32))
