"""Quantised arrays on a GPU have the bits that they have on a CPU; their products are within the contract's
tolerance."""

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import packing
from fp8kit.backends.cuda import launch
from fp8kit.formats import E2M1, E3M2, E4M3, E5M2, MXINT8
from fp8kit.quantization import MX_RULES, TILES
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack

pytestmark = pytest.mark.gpu

HOW = {
    **{
        f"{scaling} along {along}": {"scaling": scaling, "along": along}
        for scaling in TILES
        for along in (-1, 0)
    },
    **{f"mx by {rule}": {"scaling": "mx_1x32", "scale_rule": rule} for rule in MX_RULES},
    **{
        f"{n} {signs}": {"scaling": "nvfp4_1x16", "hadamard": n, "signs": signs}
        for n in (16, 128)
        for signs in ("plus", "te", "random")
    },
    "rotated tensor": {"hadamard": 32, "signs": "random"},
    "rotated rows": {"scaling": "row", "hadamard": 64, "signs": "te", "along": 0},
    "stochastic": {"rounding": "stochastic", "stochastic_bits": 8},
    "stochastic blocks": {"scaling": "nvfp4_1x16", "rounding": "stochastic", "stochastic_bits": 8},
}


def _x(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-3, 3, shape))).astype(np.float32)


def _host(array):
    return fk.tensor(array).numpy()


def _both(x, fmt, how):
    import cupy

    if "random" in how.values() or "stochastic" in how.values():
        how = {**how, "rng": (3, 4)}
    return fk.quantize(x, fmt, **how), fk.quantize(cupy.asarray(x), fmt, **how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("fmt", [None, E4M3, E2M1, E3M2, MXINT8], ids=str)
def test_bits(how, fmt):
    x = _x(70, 5, 144)
    here, there = _both(x, fmt, HOW[how])
    for name in ("data", "scale_inv", "scale_codes", "tensor_scale_inv"):
        want, got = getattr(here, name), getattr(there, name)
        if name == "scale_codes" and HOW[how].get("scaling", "").startswith(("mx", "nvfp4")):
            assert_same_bits("swizzled", _host(there.swizzled_scales()), here.swizzled_scales())
        assert (want is None) == (got is None)
        if want is not None:
            assert_same_bits(name, _host(got), np.asarray(want))
    for dtype in ("float32", "bfloat16"):
        want, got = (_host(q.dequantize(dtype)) for q in (here, there))
        assert_same_bits(dtype, np.asarray(got), np.asarray(want))
    if fmt is E2M1:
        packed = there.packed()
        assert_same_bits("packed", _host(packed), here.packed())
        assert_same_bits("unpacked", _host(packing.unpack(packed)), here.data)
    assert repr(there).replace("cuda:0", "cpu") == repr(here)
    scales = {"scale_codes": there.scale_codes, "tensor_scale_inv": there.tensor_scale_inv}
    if scales["scale_codes"] is not None:
        again = fk.QuantizedArray(there.data, None, there.format, there.scaling, along=there.along, **scales)
        assert_same_bits("scales of codes", _host(again.scale_inv), np.asarray(here.scale_inv))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E2M1, MXINT8), (E5M2, E5M2)], ids=str)
def test_products(how, pair):
    """Of what is quantised in another orientation too: the left operand's blocks may lie along its rows."""
    m, k, n = 48, 160, 80
    along = HOW[how].get("along", -1)
    x, y = _x(m, k), _x(n, k, seed=1)
    x, y = (x, y) if along else (x.T.copy(), y.T.copy())
    (here, there), (other, away) = (_both(v, fmt, HOW[how]) for v, fmt in zip((x, y), pair, strict=True))
    a, b, c, d = (here, other.T, there, away.T) if along else (here.T, other, there.T, away)
    said = c.explain(d)
    assert said.replace("cuda:0", "cpu") == a.explain(b)
    want, got = a.matmul(b, "float32"), _host(c.matmul(d, "float32"))
    size = np.abs(a.dequantize(rotated=True)) @ np.abs(b.dequantize(rotated=True))
    # both are within a float32 sum's error of the exact product
    slack = 2 * sum_slack(size, k)
    native = "(kernel fp8_gemm)" in said or "(kernel block_gemm)" in said
    if native and launch.capability(0) == (9, 0):
        # Hopper's tensor cores cut more off, and what they cut off is known to the bit
        want = fk.matmul(a, b, accumulate="hopper_split")
    elif native:
        # others cut each of an instruction's 32 products and the accumulator off at 2^-13 of the largest
        slack = slack + -(-k // 32) * 33 * 2.0**-13 * size
    assert_close("a @ b", got, np.asarray(want, np.float64), "float32", slack)
