"""``activation``, ``quantize``, ``dequantize`` and ``fp8_gemm`` as operations by themselves, on both
engines."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import tensor
from fp8kit.autograd import apply
from fp8kit.errors import AutogradError, FormatError, ShapeError
from fp8kit.ops.activation import ActivationSpec, activation
from fp8kit.ops.casts import DequantizeSpec, QuantizeSpec, dequantize, quantize
from fp8kit.ops.fp8_gemm import Fp8GemmSpec, fp8_gemm
from fp8kit.testing import assert_close, assert_same_bits


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_activation_and_its_gradient(device):
    x = tensor(draw(0, 6, 32), requires_grad=True, device=device)
    y = apply(activation, ActivationSpec("swiglu", 32), {"x": x})["y"]
    y.backward(tensor(np.ones((6, 16), np.float32), device=device))
    u, v = np.split(draw(0, 6, 32).astype(np.float64), 2, 1)
    s = 1 / (1 + np.exp(-u))
    assert_close("y", y.numpy(), u * s * v, "float64", 2.0**-18)
    assert_close("dx", x.grad.numpy(), np.hstack([v * s * (1 + u * (1 - s)), u * s]), "float64", 2.0**-18)


@pytest.mark.parametrize(("scaling", "tile"), [("tensor", (12, 48)), ("row", (1, 48)), ("mx_1x32", (1, 32))])
def test_casts_are_those_of_arrays(device, scaling, tile):
    x = draw(1, 3, 4, 48)
    spec = QuantizeSpec(fk.E4M3, tile, power_2=scaling.startswith("mx"))
    out = apply(quantize, spec, {"x": tensor(x, device=device)})
    want = fk.quantize(x, fk.E4M3, scaling=scaling)
    assert_same_bits("codes", out["q"].numpy(), want.data)
    assert_same_bits("scale_inv", out["scale_inv"].numpy(), want.scale_inv.reshape(-1))
    back = apply(dequantize, DequantizeSpec(fk.E4M3, tile, "float32"), dict(out))["x"]
    assert_same_bits("values", back.numpy(), want.dequantize())


def test_the_product_of_codes(device):
    a, b = (fk.quantize(draw(seed, 32, 64), fk.E4M3) for seed in (2, 3))
    codes = {
        "a": a.data,
        "b": b.data,
        "a_scale_inv": a.scale_inv.reshape(1),
        "b_scale_inv": b.scale_inv.reshape(1),
    }
    spec = Fp8GemmSpec(32, 32, "float32", fk.E4M3, fk.E4M3)
    out = apply(fp8_gemm, spec, {name: tensor(value, device=device) for name, value in codes.items()})[
        "out"
    ].numpy()
    want = a.dequantize().astype(np.float64) @ b.dequantize().astype(np.float64).T
    # the tensor cores sum in 14 bits
    assert_close("product", out, want, "float64", 2.0**-12 * np.abs(want).max())


def test_refusals():
    x, codes = (
        tensor(draw(0, 6, 32), requires_grad=True, device="cpu"),
        tensor(np.zeros((16, 32), np.uint8), device="cpu"),
    )
    one = tensor(np.ones(1, np.float32), device="cpu")
    with pytest.raises(FormatError, match=r"activation: activation: got 'gellu'"):
        ActivationSpec("gellu", 32)
    with pytest.raises(ShapeError, match=r"activation: features: got 31"):
        ActivationSpec("swiglu", 31)
    with pytest.raises(AutogradError, match=r"quantize: no gradient rule for its input 'x'"):
        apply(quantize, QuantizeSpec(fk.E4M3, (6, 32)), {"x": x})
    with pytest.raises(ShapeError, match=r"dequantize: scale_inv"):
        apply(dequantize, DequantizeSpec(fk.E4M3, (1, 32), "float32"), {"q": codes, "scale_inv": one})
    inputs = {"a": codes, "b": codes, "a_scale_inv": one, "b_scale_inv": one}
    with pytest.raises(ShapeError, match=r"fp8_gemm: b: got shape \(16, 32\), expected shape \(32, 32\)"):
        apply(fp8_gemm, Fp8GemmSpec(16, 20, "float32", fk.E4M3, fk.E4M3), inputs)
