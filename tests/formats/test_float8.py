"""Float8Tensor: values against the codec, memory by address, products against float64, and what is
refused."""

import copy
import pickle
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fp8kit import arrays, codec, formats
from fp8kit.arrays import as_view
from fp8kit.backends import dispatch
from fp8kit.backends.dispatch import CannotTake
from fp8kit.errors import FormatError, ShapeError
from fp8kit.float8 import Float8Tensor, quantize
from fp8kit.formats import E2M1, E4M3, E5M2, Format
from fp8kit.quantized_array import QuantizedArray
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack

TILES = {
    "tensor": (0, 0),
    "row": (1, 0),
    "block_1x128": (1, 128),
    "block_128x128": (128, 128),
    "mx_1x32": (1, 32),
}


def _x(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _spread(per_tile, shape, scaling):
    tile = tuple(t or n for t, n in zip(TILES[scaling], shape, strict=True))
    down, across = np.indices(shape)
    grid = (-(-shape[0] // tile[0]), -(-shape[1] // tile[1]))
    return np.asarray(per_tile).reshape(grid)[down // tile[0], across // tile[1]]


@pytest.mark.parametrize("scaling", TILES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_current_scaling(scaling, fmt, dtype):
    x = _x(130, 260, dtype=dtype)
    q = quantize(x, fmt, scaling=scaling)
    assert isinstance(q.data, np.ndarray)
    assert (q.data.dtype, q.shape, q.scale_inv.dtype) == (np.uint8, x.shape, np.float32)
    tile = tuple(t or n for t, n in zip(TILES[scaling], x.shape, strict=True))
    x32 = x.astype(np.float32)
    amax = np.maximum.reduceat(
        np.maximum.reduceat(np.abs(x32), range(0, 130, tile[0]), axis=0), range(0, 260, tile[1]), axis=1
    )
    scale = np.float32(fmt.max) / amax
    if scaling not in ("tensor", "row"):
        scale = np.exp2(np.floor(np.log2(scale))).astype(np.float32)
    np.testing.assert_array_equal(q.scale_inv.reshape(amax.shape), np.float32(1) / scale)
    np.testing.assert_array_equal(q.data, codec.encode(x32 * _spread(scale, x.shape, scaling), fmt))
    want = codec.decode(q.data, fmt).astype(np.float32) * _spread(q.scale_inv, x.shape, scaling)
    np.testing.assert_array_equal(q.dequantize(), want)
    # one rounding: half a step of the format relative, half a subnormal absolute, and float32's own three
    # roundings
    step = np.maximum(
        fmt.epsilon / 2 * np.abs(x32), fmt.smallest_subnormal / 2 * _spread(q.scale_inv, x.shape, scaling)
    )
    assert (np.abs(q.dequantize() - x32) <= step + 2.0**-22 * np.abs(x32)).all()


@pytest.mark.parametrize(
    "scale", [2.5, np.float32(2.5), np.array([2.5], np.float32), np.array(2.5, np.float32)], ids=repr
)
def test_given_scale(scale):
    x = _x(5, 7)
    q = quantize(x, E4M3, scale=scale)
    np.testing.assert_array_equal(q.data, codec.encode(x * np.float32(2.5), E4M3))
    np.testing.assert_array_equal(q.scale_inv, [np.float32(1) / np.float32(2.5)])


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3)])
def test_given_row_scales(shape):
    x, scale = _x(2, 3, 8), _x(6, seed=1).astype(np.float32) ** 2 + np.float32(0.1)
    q = quantize(x, E5M2, scale=scale.reshape(shape), scaling="row")
    np.testing.assert_array_equal(q.data, codec.encode(x * scale.reshape(2, 3, 1), E5M2))


def test_stochastic_repeats_and_differs():
    x = _x(40, 50)
    first, again, other = (
        quantize(x, scale=1.0, rounding="stochastic", rng=rng).data
        for rng in ((1, 2), np.array([1, 2]), (1, 3))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    down, up = np.sort(np.stack([np.abs(codec.decode(d, E4M3)) for d in (first, other)]), axis=0)
    assert (down <= up).all()
    assert (
        np.abs(codec.decode(first, E4M3) - x) <= np.maximum(E4M3.epsilon * np.abs(x), E4M3.smallest_subnormal)
    ).all()


def test_formats_by_name_and_by_dtype():
    """Of an array, and of codes from elsewhere; a dtype that has no codes is refused."""
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    want = quantize(x, E5M2)
    for given in ("E5M2", ml_dtypes.float8_e5m2, np.dtype(ml_dtypes.float8_e5m2), formats.float8_e5m2):
        assert_same_bits("codes", quantize(x, given).data, want.data)
        assert QuantizedArray(want.data, want.scale_inv, given).format is E5M2
    assert quantize(x, ml_dtypes.float4_e2m1fn, scaling="nvfp4_1x16").format is E2M1
    for given, said in (("E5M3", r"; did you mean E5M2\?"), (np.float32, ""), (np.zeros(2), "")):
        with pytest.raises(FormatError, match=f"format: got .*, or the name of one{said}$"):
            quantize(x, given)


def test_saturate_and_user_format():
    x = np.array([[1e9, -np.inf, np.nan, 1.0]], np.float32)
    assert quantize(x, E5M2, scale=1.0, saturate=False).data.tolist() == [[0x7C, 0xFC, 0x7F, 0x3C]]
    assert quantize(x, E5M2, scale=1.0).data.tolist() == [[0x7B, 0xFB, 0x7F, 0x3C]]
    mine = Format("E3M2", 3, 2, special="none")
    np.testing.assert_array_equal(
        quantize(_x(3, 9), mine, scale=2.0).data, codec.encode(_x(3, 9) * np.float32(2), mine)
    )


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_stays_in_its_library(make):
    x = make(_x(4, 16))
    q = quantize(x)
    for part in (q.data, q.scale_inv, q.dequantize(), q[1:3].data, q.reshape(8, 8).data, q @ q.T):
        assert type(part) is type(x)
    np.testing.assert_array_equal(np.asarray(q.data), quantize(np.asarray(x)).data)
    np.testing.assert_array_equal(np.asarray(q.dequantize()), quantize(np.asarray(x)).dequantize())


class Mine(torch.Tensor):
    """A program's own class."""


class MyArray(np.ndarray):
    """Another one."""


@pytest.mark.parametrize(
    ("make", "library"),
    [
        (lambda x: torch.from_numpy(x).as_subclass(Mine), torch.Tensor),
        (lambda x: x.view(MyArray), np.ndarray),
    ],
    ids=["torch", "numpy"],
)
def test_arrays_of_a_class_of_ones_own_are_their_librarys(make, library):
    x = _x(32, 64)
    for scaling in ("tensor", "mx_1x32"):
        found, wanted = (quantize(each, scaling=scaling) for each in (make(x), x))
        for array in (found.data, found.dequantize()):
            assert isinstance(array, library)
        np.testing.assert_array_equal(np.asarray(found.data), wanted.data)


def test_zero_copy():
    q = quantize(_x(6, 16))
    assert as_view(q).ptr == q.data.ctypes.data
    assert q.T.data.ctypes.data == q.data.ctypes.data
    assert q[2:].data.ctypes.data == q.data.ctypes.data + 32
    assert q.reshape(-1).data.ctypes.data == q.data.ctypes.data
    exported = torch.from_dlpack(q)
    assert (exported.dtype, exported.data_ptr()) == (torch.float8_e4m3fn, q.data.ctypes.data)
    native = torch.zeros(2, 16).to(torch.float8_e5m2)
    taken = Float8Tensor(native, torch.ones(1), E5M2)
    assert (taken.data.data_ptr(), taken.data.dtype) == (native.data_ptr(), torch.uint8)
    assert torch.from_dlpack(quantize(_x(2, 4), E2M1)).dtype == torch.uint8


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("shape", [(16, 32, 48), (5, 33, 7), (1, 1, 1)])
def test_product(scaling, pair, shape):
    m, k, n = shape
    a, b = quantize(_x(m, k), pair[0], scaling=scaling), quantize(_x(n, k, seed=1), pair[1], scaling=scaling)
    wide_a, wide_b = (
        codec.decode(t.data, t.format) * np.asarray(t.scale_inv, np.float64).reshape(-1, 1) for t in (a, b)
    )
    exact, size = wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T
    product = a @ b.T
    assert product.dtype == np.float32
    assert_close("a @ b.T", product, exact, "float32", sum_slack(size, k))
    assert_close("bfloat16", a.matmul(b.T, formats.bfloat16), exact, "bfloat16", sum_slack(size, k))


BLOCKS = ("block_1x128", "block_128x128", "mx_1x32")


@pytest.mark.parametrize("flips", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("pair", [(s, t) for s in BLOCKS for t in (*BLOCKS, "tensor")], ids="@".join)
def test_product_of_blocks(pair, flips, monkeypatch):
    """Every pair in every orientation; where blocks run along K the block-scaled product is what computes
    it."""
    m, k, n = 150, 300, 70
    made, wide = [], []
    for seed, (scaling, flip, shape) in enumerate(zip(pair, flips, ((m, k), (k, n)), strict=True)):
        shape = shape[::-1] if flip else shape
        x = _x(*shape, seed=seed) * np.exp2(
            np.random.default_rng(seed).integers(-6, 6, (shape[0], 1))
        ).astype(np.float32)
        q = quantize(x, scaling=scaling)
        values = codec.decode(q.data, E4M3) * _spread(q.scale_inv, shape, scaling)
        made.append(q.T if flip else q)
        wide.append(values.T if flip else values)
    taken = []
    kernels = dispatch.kernels(arrays.CPU)
    spy = SimpleNamespace(
        **vars(kernels) | {"block_gemm": lambda *a: (taken.append(1), kernels.block_gemm(*a))}
    )
    monkeypatch.setattr(dispatch, "kernels", lambda device: spy)
    exact, size = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
    assert_close("a @ b", made[0] @ made[1], exact, "float32", sum_slack(size, k))
    assert_close("bfloat16", made[0].matmul(made[1], formats.bfloat16), exact, "bfloat16", sum_slack(size, k))
    square = "block_128x128"
    fits = all(
        s == square or (s == "block_1x128" and flip is wanted)
        for s, flip, wanted in zip(pair, flips, (False, True), strict=True)
    )
    assert bool(taken) == (fits and pair != (square, square))


def test_product_of_blocks_on_a_device_without_it(monkeypatch):
    a, b = (
        quantize(_x(2, 5, 200), scaling="block_1x128"),
        quantize(_x(30, 200, seed=1), scaling="block_128x128"),
    )
    blocks = a @ b.T

    def refuse(*_):
        raise CannotTake("no block scaling here")

    spy = SimpleNamespace(**vars(dispatch.kernels(arrays.CPU)) | {"block_gemm": refuse})
    monkeypatch.setattr(dispatch, "kernels", lambda device: spy)
    assert blocks.shape == (2, 5, 30)
    np.testing.assert_array_equal(a @ b.T, blocks)


def test_product_orientations_and_batches():
    a, b = quantize(_x(2, 3, 20)), quantize(_x(20, 9, seed=1))
    exact = a.dequantize().astype(np.float64) @ b.dequantize().astype(np.float64)
    size = np.abs(a.dequantize()) @ np.abs(b.dequantize())
    assert_close("batch @ b", a @ b, exact, "float32", sum_slack(size, 20))
    assert_close(
        "b.T @ ...",
        b.T @ a.reshape(6, 20).T,
        exact.reshape(6, 9).T,
        "float32",
        sum_slack(size.reshape(6, 9).T, 20),
    )
    np.testing.assert_array_equal(b.T.dequantize(), b.dequantize().T)
    assert (b.T.shape, b.T.T.shape) == ((9, 20), (20, 9))
    assert (quantize(_x(0, 8)) @ quantize(_x(3, 8)).T).shape == (0, 3)
    np.testing.assert_array_equal(quantize(_x(2, 0)) @ quantize(_x(3, 0)).T, np.zeros((2, 3)))


@pytest.mark.parametrize("scaling", ["block_1x16", "mx_1x32", "nvfp4_1x16", "nvfp4_row_1x16"])
def test_slices_of_rows_keep_their_blocks(scaling):
    q = quantize(_x(4, 3, 40), scaling=scaling, hadamard=16)
    whole = q.dequantize()
    for index in (slice(1, 3), slice(3, None), slice(2, 2), slice(4, 4), 0, -1):
        part = q[index]
        np.testing.assert_array_equal(part.dequantize(), whole[index])
        if part.size:
            weight = quantize(_x(5, 40), scaling=scaling, hadamard=16)
            np.testing.assert_array_equal(part @ weight.T, (q @ weight.T)[index])
    if "nvfp4" in scaling:
        rows = quantize(np.ascontiguousarray(_x(4, 3, 40)[1:3]), scaling=scaling, hadamard=16)
        assert rows.scale_codes.shape == q[1:3].scale_codes.shape
    with pytest.raises(ShapeError, match="along dim 0, scaling"):
        quantize(_x(8, 40), scaling=scaling, along=0)[1:3]
    with pytest.raises(ShapeError, match="index: got slice"):
        quantize(_x(40), scaling=scaling)[1:3]


def test_slices_keep_their_scales():
    q = quantize(_x(4, 3, 8), scaling="row")
    whole = q.dequantize()
    np.testing.assert_array_equal(q[1:3].dequantize(), whole[1:3])
    np.testing.assert_array_equal(q[-1].dequantize(), whole[-1])
    np.testing.assert_array_equal(q.reshape(12, 8).dequantize(), whole.reshape(12, 8))
    np.testing.assert_array_equal(quantize(_x(5))[1:4].dequantize(), quantize(_x(5)).dequantize()[1:4])
    assert len(q) == 4
    assert [part.shape for part in q] == [(3, 8)] * 4
    with pytest.raises(IndexError):
        q[4]


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (FormatError, "int32", lambda: quantize(np.zeros((2, 2), np.int32))),
        (FormatError, "a QuantizedArray of E4M3", lambda: quantize(quantize(_x(2, 2)))),
        (ShapeError, "scale", lambda: quantize(_x(4, 4), scale=np.ones(3, np.float32))),
        (ShapeError, "scale", lambda: quantize(_x(4, 4), scale=np.ones(4, np.float32))),
        (FormatError, "float64", lambda: quantize(_x(4, 4), scale=np.ones(1))),
        (ShapeError, "scale", lambda: quantize(_x(4, 4), scale=np.ones(1, np.float32), scaling="row")),
        (FormatError, "column", lambda: quantize(_x(4, 4), scaling="column")),
        (FormatError, "rounding", lambda: quantize(_x(4, 4), rounding="up")),
        (FormatError, "rng", lambda: quantize(_x(4, 4), rounding="stochastic")),
        (FormatError, "rng", lambda: quantize(_x(4, 4), rng=(1, 2))),
        (FormatError, "no Inf and no NaN", lambda: quantize(_x(4, 4), E2M1, saturate=False)),
        (FormatError, "E4M4", lambda: quantize(_x(4, 4), "E4M4")),
        (ShapeError, "matmul", lambda: quantize(_x(4, 4)) @ quantize(_x(4, 5)).T),
        (FormatError, "int8", lambda: quantize(_x(4, 4)).dequantize("int8")),
        (ShapeError, "2 dimensions", lambda: quantize(_x(4)).T),
        (ShapeError, "last dimension", lambda: quantize(_x(4, 4), scaling="row").reshape(2, 8)),
        (ShapeError, "index", lambda: quantize(_x(4, 4), scaling="block_128x128")[1:]),
        (ShapeError, "scale_inv", lambda: Float8Tensor(np.zeros((2, 2), np.uint8), np.ones(2, np.float32))),
        (FormatError, "scale_inv", lambda: Float8Tensor(np.zeros((2, 2), np.uint8), np.ones(1))),
        (
            ShapeError,
            "strides",
            lambda: Float8Tensor(np.zeros((2, 2), np.uint8), np.ones(4, np.float32)[::2], scaling="row"),
        ),
        (
            FormatError,
            "float8_e5m2",
            lambda: Float8Tensor(torch.zeros(2, 2).to(torch.float8_e5m2), torch.ones(1), E4M3),
        ),
        (FormatError, "matmul: other: .*quantize the other one first", lambda: quantize(_x(4, 4)) @ _x(4, 4)),
        (FormatError, "matmul: self: .*quantize the other one first", lambda: _x(4, 4) @ quantize(_x(4, 4))),
        (TypeError, "unsupported operand", lambda: quantize(_x(4, 4)) @ 3),
        (
            FormatError,
            r"__array__: self: .*dequantize\(\) for its values",
            lambda: np.asarray(quantize(_x(4, 4))),
        ),
        (
            FormatError,
            "data for its codes",
            lambda: np.testing.assert_array_equal(quantize(_x(4, 4)), _x(4, 4)),
        ),
        (FormatError, "quantize: x: got None", lambda: quantize(None)),
        (FormatError, "quantize: x: got str 'abc'", lambda: quantize("abc")),
        (
            FormatError,
            "quantize: x: got complex64, expected one of float32, bfloat16, float16, float64",
            lambda: quantize(_x(2, 2).astype(np.complex64)),
        ),
        (
            FormatError,
            r"quantize: rng: got -1, .* rng=\(1, 0\)",
            lambda: quantize(_x(2, 2), rounding="stochastic", rng=-1),
        ),
        (
            FormatError,
            r"quantize: rng: got -1, expected an int in \[0",
            lambda: quantize(_x(2, 2), rounding="stochastic", rng=(-1, 0)),
        ),
        (
            FormatError,
            "no negative",
            lambda: quantize(_x(2, 2), rounding="stochastic", rng=np.array([0, -3])),
        ),
        *(
            (FormatError, "quantize: scale: got", lambda scale=scale: quantize(_x(2, 2), scale=scale))
            for scale in (
                1e-45,
                2.9e-39,
                True,
                np.True_,
                [True],
                "1",
                ["1"],
                np.array([0], np.float32),
                np.array([-1], np.float32),
                np.array([np.nan], np.float32),
                [np.inf],
                1e39,
            )
        ),
        (FormatError, "QuantizedArray: data: got None", lambda: Float8Tensor(None, np.ones(1, np.float32))),
        (
            FormatError,
            "QuantizedArray: scale_inv: got None",
            lambda: Float8Tensor(np.zeros((2, 2), np.uint8), None),
        ),
        (
            FormatError,
            "QuantizedArray: scaling: got 'x'",
            lambda: Float8Tensor(np.zeros((2, 2), np.uint8), np.ones(1, "f4"), E4M3, "x"),
        ),
        (FormatError, "dequantize: dtype: got 'x'", lambda: quantize(_x(2, 2)).dequantize("x")),
        (FormatError, "matmul: dtype: got 'x'", lambda: quantize(_x(2, 2)).matmul(quantize(_x(2, 2)).T, "x")),
    ],
)
def test_refusals(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_inputs_of_any_layout_and_kind_give_the_same_codes():
    x = _x(5, 7)
    fixed = x.copy()
    fixed.flags.writeable = False
    for view in (x[::-1, ::-1], x.T, x[1:4, ::3], fixed):
        np.testing.assert_array_equal(quantize(view).data, quantize(view.copy()).data)
    wide = quantize(np.array([1e300, 1.0]))  # float64 is rounded to float32 first: Inf, so the scale is 1
    np.testing.assert_array_equal(wide.dequantize(), [448, 1])
    with pytest.raises(FormatError, match=">f4"):
        quantize(x.astype(">f4"))


def test_copies_own_their_memory_and_pickling_is_refused():
    q = quantize(_x(3, 4), scaling="row").T
    other = copy.deepcopy(q)
    before = other.dequantize().copy()
    q.data[...] = 0
    np.testing.assert_array_equal(other.dequantize(), before)
    assert other.shape == (4, 3)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(q)


def test_views_copy_deeply_convert_and_refuse_pickle() -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = as_view(host.T)
    own = copy.deepcopy(view)
    host[...] = -1
    assert own.contiguous
    np.testing.assert_array_equal(np.asarray(own), np.arange(12, dtype=np.float32).reshape(3, 4).T)
    np.testing.assert_array_equal(np.asarray(view), host.T)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(view)


def test_rows_without_columns_cost_nothing():
    """No loop goes over them: it would take hours, and a number for each row terabytes."""
    made = quantize(np.zeros((2**40, 0), np.float32))
    assert made.shape == (2**40, 0)
    assert float(np.asarray(made.scale_inv).item()) == 1
