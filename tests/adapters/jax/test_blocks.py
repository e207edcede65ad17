"""``quantize``, ``dequantize`` and ``gemm`` of JAX with blocks of any kind: what ``fk.quantize`` makes, eager
and jitted."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8kit as fk
from fp8kit import codec, formats
from fp8kit.errors import FormatError
from fp8kit.formats import E2M1, E2M3, E4M3
from fp8kit.quantization import TILES
from fp8kit.testing import assert_close, assert_same_bits, sum_slack
from tests.support.combinations import combinations

X, Y = (
    np.random.default_rng(i).standard_normal(n).astype(np.float32)
    for i, n in enumerate([(40, 144), (24, 144)])
)
BLOCKS = [name for name in TILES if name not in ("tensor", "row")]


def of(q):
    """A ScaledTensor's arrays on the host, codes as uint8."""
    parts = {"data": np.asarray(q.data).view(np.uint8), "scale_inv": np.asarray(q.scale_inv)}
    more = {"scale_codes": q.scale_codes, "tensor_scale_inv": q.tensor_scale_inv}
    return parts | {name: np.asarray(value) for name, value in more.items() if value is not None}


def same(q, want):
    for name, value in of(q).items():
        assert_same_bits(name, value, np.asarray(getattr(want, name)).reshape(value.shape))


@combinations({"scaling": BLOCKS, "along": [-1, 0]})
def test_every_tile_is_the_native_ones(scaling, along):
    want = fk.quantize(X, scaling=scaling, along=along)
    for call in (fj.quantize, jax.jit(fj.quantize, static_argnames=("scaling", "along"))):
        q = call(jnp.asarray(X), scaling=scaling, along=along)
        same(q, want)
        assert q.format == want.format
        assert_same_bits("values", np.asarray(fj.dequantize(q)), want.dequantize())
    assert (q.tensor_scale_inv is None) == (not scaling.startswith("nvfp4"))


@pytest.mark.parametrize(
    ("scaling", "rule"),
    [
        ("mx_1x32", "floor"),
        ("mx_32x32", "even"),
        ("nvfp4_1x16", "4over6_mae"),
        ("nvfp4_row_1x16", "4over6_mse_256"),
    ],
)
def test_rules_and_narrow_formats(scaling, rule):
    for fmt in (E2M1, formats.E3M2) if scaling.startswith("mx") else (E2M1,):
        q = fj.quantize(jnp.asarray(X), fmt, scaling=scaling, scale_rule=rule)
        same(q, fk.quantize(X, fmt, scaling=scaling, scale_rule=rule))
        assert q.data.dtype == jnp.uint8
    by_tensor = fj.quantize(jnp.asarray(X), E2M3)
    same(by_tensor, fk.quantize(X, E2M3))


def test_random_bits_are_the_native_ones():
    key = jax.random.key(3)
    pair = fj.dropout_seed(key)
    q = fj.quantize(jnp.asarray(X), scaling="nvfp4_1x16", rounding="stochastic", key=key, stochastic_bits=8)
    want = fk.quantize(
        X, scaling="nvfp4_1x16", rounding="stochastic", rng=np.asarray(pair), stochastic_bits=8
    )
    same(q, want)


PAIRS = [
    ("nvfp4_1x16", "nvfp4_16x16"),
    ("nvfp4_row_1x16", "nvfp4_row_1x16"),
    ("mx_1x32", "mx_32x32"),
    ("block_1x64", "block_32x32"),
    ("block_128x128", "block_128x128"),
    ("row", "tensor"),
]


@combinations(
    {"pair": {"-".join(pair): pair for pair in PAIRS}},
    usual=["nvfp4_1x16-nvfp4_16x16", "mx_1x32-mx_32x32", "block_1x64-block_32x32", "row-tensor"],
)
def test_products_of_other_blocks_are_those_of_the_values(pair):
    """As natively, bit for bit."""
    left, right = pair
    a, b = fj.quantize(jnp.asarray(X), scaling=left), fj.quantize(jnp.asarray(Y), scaling=right)
    found = fj.gemm(a, b)
    assert_same_bits("jitted", np.asarray(jax.jit(fj.gemm)(a, b)), np.asarray(found))
    native = fk.quantize(X, scaling=left) @ fk.quantize(Y, scaling=right).T
    values = [np.asarray(fj.dequantize(q)).astype(np.float64) for q in (a, b)]
    slack = 2 * sum_slack(np.abs(values[0]) @ np.abs(values[1]).T, X.shape[1])
    assert_close("values", np.asarray(found), values[0] @ values[1].T, "float32", slack)
    assert_close("native", np.asarray(found), native.astype(np.float64), "float32", slack)


@pytest.mark.parametrize("scaling", ["mx_1x32", "nvfp4_1x16", "nvfp4_row_1x16", "block_1x32"])
def test_of_nothing(scaling):
    for shape in ((0, 32), (3, 0)):
        for along in (-1, 0):
            rule = "te" if scaling.startswith("mx") else None
            how = {"scaling": scaling, "along": along, "scale_rule": rule}
            q = fj.quantize(jnp.zeros(shape), **how)
            assert q.data.shape == fj.dequantize(q).shape == shape
            assert (q.scale_codes is None) == scaling.startswith("block")
    sides = (fj.quantize(jnp.zeros((rows, 32)), scaling=scaling) for rows in (0, 5))
    assert fj.gemm(*sides).shape == (0, 5)


def test_what_does_not_fit():
    x = jnp.asarray(X)
    for arguments, said in (
        ({"scaling": "row", "along": 0}, "along"),
        ({"scaling": "nvfp4_1x16", "scale": jnp.ones(1)}, "scale"),
        ({"scaling": "nvfp4_1x16", "saturate": False}, "saturate"),
        ({"scaling": "nvfp4_1x16", "scale_rule": "power_2"}, "scale_rule"),
        ({"scaling": "nvfp4_1x16", "format": E4M3, "scale_rule": "4over6_mae"}, "scale_rule"),
    ):
        with pytest.raises(FormatError, match=f"quantize: {said}"):
            fj.quantize(x, **arguments)
    q = fj.quantize(x, scaling="nvfp4_1x16")
    with pytest.raises(FormatError, match="fast_accumulate"):
        fj.gemm(q, q, fast_accumulate=True)
    assert codec.decode(np.asarray(q.data), E2M1).max() == 6


ROTATED = [
    ("tensor", None, "plus"),
    ("row", None, "te"),
    ("block_1x128", None, "random"),
    ("mx_1x32", "rceil", "random"),
    ("mx_1x32", "power_2", "te"),
    ("nvfp4_1x16", None, "random"),
    ("nvfp4_row_1x16", None, "te"),
]


# a rotation precedes any cast
@combinations(
    {"kind": {"-".join(map(str, kind)): kind for kind in ROTATED}, "along": [-1, 0]},
    usual=[
        "tensor-None-plus--1",
        "block_1x128-None-random--1",
        "mx_1x32-rceil-random-0",
        "nvfp4_row_1x16-None-te--1",
    ],
)
def test_rotations_are_those_of_the_native_cast(kind, along):
    """Codes, scales and what is rotated back, bit for bit, within ``jit`` too; and stochastically by the same
    key."""
    scaling, rule, signs = kind
    if along == 0 and scaling in ("tensor", "row"):
        along = -1
    x = np.random.default_rng(0).standard_normal((70, 140)).astype(np.float32)
    x[:, 3] *= 50
    key = jax.random.key(5)
    seed = fj.dropout_seed(key)
    for rounding in ("nearest", "stochastic"):
        drawn = signs == "random" or rounding == "stochastic"
        how = {"scaling": scaling, "scale_rule": rule, "rounding": rounding, "along": along}
        how |= {"hadamard": 32, "signs": signs}
        native = fk.quantize(x, fk.E4M3, **how, rng=seed if drawn else None)
        own = key if drawn else None
        for call in (fj.quantize, jax.jit(fj.quantize, static_argnames=(*how, "format"))):
            got = call(jnp.asarray(x), fk.E4M3, **how, key=own)
            assert_same_bits("codes", np.asarray(got.data).view(np.uint8), native.data)
            assert_same_bits("scale_inv", np.asarray(got.scale_inv).reshape(-1), native.scale_inv.reshape(-1))
        assert_same_bits("values", np.asarray(got.dequantize()), native.dequantize())


def test_products_of_rotated_arrays():
    """Rotated alike they are the products of the rotated values, else of those that are rotated back."""
    x, y = (np.random.default_rng(i).standard_normal((40, 128)).astype(np.float32) for i in range(2))
    exact, key = x.astype(np.float64) @ y.T.astype(np.float64), jax.random.key(1)
    for signs, keys in (("te", (None, None)), ("random", (key, key)), ("random", (key, jax.random.key(2)))):
        a, b = (
            fj.quantize(jnp.asarray(z), hadamard=64, signs=signs, key=k)
            for z, k in zip((x, y), keys, strict=True)
        )
        for other in (b, fj.quantize(jnp.asarray(y))):
            got = np.asarray(fj.gemm(a, other))
            assert np.linalg.norm(got - exact) < 0.06 * np.linalg.norm(exact)
    with pytest.raises(FormatError, match="key"):
        fj.quantize(jnp.asarray(x), hadamard=16, signs="random")
    with pytest.raises(FormatError, match="hadamard"):
        fj.quantize(jnp.asarray(x), hadamard=24)
    with pytest.raises(FormatError, match="signs"):
        fj.quantize(jnp.asarray(x), signs="te")
