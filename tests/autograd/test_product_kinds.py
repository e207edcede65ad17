"""Emulated products against their decoded operands; what no product carries out is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import codec, formats
from fp8kit.autograd import apply, tensor
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_quantized import QuantizedProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.testing import assert_close, sum_slack
from tests.support.operands import BLOCKS, CURRENT, DELAYED, GIVEN, LINE, SQUARE, by_blocks, normal


def quantizer(**fields: Any) -> Quantizer:
    return Quantizer(formats.E4M3, **fields)


X, WIDE = quantizer(), Quantizer(formats.E5M2)


LINES = Quantizer(formats.E4M3, "mx_1x32", scale_rule="te")
ROTATED = Quantizer(formats.E4M3, "mx_1x32", scale_rule="te", hadamard=32)
REFUSED = {
    "dgrad.a.granularity: got mx_1x32, expected tensor, with a static": Quantization.of(
        X, X, Quantizer(formats.E4M3, "mx_1x32", scale_source="static", scale_rule="te")
    ),
    "fprop.compute: got 'high_precision', and wgrad recast": Quantization(
        Gemm(LINES, LINES, compute="high_precision"), Gemm(LINES, LINES), Gemm(LINES, LINES, recast=True)
    ),
    "fprop.compute: got 'high_precision', and wgrad dequantized": Quantization(
        Gemm(X, X, compute="high_precision"), Gemm(X, X), Gemm(X, X, "split", "dequantized")
    ),
    "compute: got high precision for all three": Quantization(*[Gemm(X, X, compute="high_precision")] * 3),
}


# scales of earlier steps beside others, which no tensor core has, and what they cast in them
DELAYED_TOO = {
    "blocks": Quantization.of(DELAYED.x, BLOCKS.w, DELAYED.g),
    "current": Quantization.of(DELAYED.x, X, X),
    "a format of four bits": Quantization.of(
        DELAYED.x, Quantizer(formats.E2M1, scale_source="delayed"), DELAYED.g
    ),
    "mx": Quantization.of(DELAYED.x, DELAYED.w, LINES),
    "stochastic": DELAYED.map(lambda own: replace(own, stochastic_bits=8), "g"),
}


@pytest.mark.parametrize("name", DELAYED_TOO)
def test_scales_of_earlier_steps_are_emulated(name: str) -> None:
    """y is the product of the values that the given scale makes of x, and those of the weight's cast; the
    amax of x is recorded."""
    how = DELAYED_TOO[name]
    assert product_class(how) is EmulatedProduct
    x, w, scale = normal(32, 128), normal(64, 128), np.float32(8.0)
    inputs = {"x": tensor(x), "weight0": tensor(w), "x_scale": tensor(np.full(1, scale))}
    if how.fprop.b.needs_state:
        inputs["w_scale"] = tensor(np.full(1, np.float32(2.0)))
    if name == "stochastic":
        inputs["rng"] = tensor(np.zeros(2, np.int64))
    spec = LinearSpec(ProductSpec(128, (64,), bias="none", fp8=how))
    found = apply(linear, spec, inputs)
    assert found["x_amax"].numpy() == np.abs(x).max()
    values = codec.decode(codec.encode(x * scale, formats.E4M3), formats.E4M3) / np.float64(scale)
    own = how.fprop.b
    if own.needs_state:
        weight = codec.decode(codec.encode(w * np.float32(2.0), own.format), own.format) / 2.0
    else:
        scaling = "block_128x128" if own.granularity == "block_128x128" else "tensor"
        weight = fk.quantize(w, own.format, scaling=scaling).dequantize()
    want = values @ np.asarray(weight, np.float64).T
    assert_close(
        "y", found["y"].numpy(), want, formats.float32, sum_slack(np.abs(values) @ np.abs(weight).T, 128)
    )


@pytest.mark.parametrize("said", REFUSED)
def test_what_no_product_carries_out_is_refused_by_name(said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^recipe: {said}"):
        product_class(REFUSED[said])
    spec = LinearSpec(ProductSpec(16, (16,), bias="none", fp8=REFUSED[said]))
    with pytest.raises(UnsupportedError, match=said):
        apply(linear, spec, {"x": tensor(normal(16, 16)), "weight0": tensor(normal(16, 16))})


@pytest.mark.parametrize("name", ["granularity", "scale_source", "scale_rule"])
def test_words_that_a_quantizer_does_not_know(name: str) -> None:
    with pytest.raises(RecipeError, match=f"Quantizer: {name}: got 'blocks', expected one of"):
        Quantizer(formats.E4M3, **{name: "blocks"})


def test_rotations_that_do_not_cancel() -> None:
    for other in (LINES, Quantizer(formats.E4M3, "mx_1x32", scale_rule="te", hadamard=32, signs="random")):
        with pytest.raises(RecipeError, match=r"Gemm: hadamard, signs: got .* so that they cancel"):
            Gemm(ROTATED, other)
        Gemm(ROTATED, other, compute="high_precision")


def test_a_gemm_of_three_operands_is_named() -> None:
    said = (
        r"Gemm fprop \(a the input and b the weight\): hadamard, signs: got 32, .* for a and 0, 'plus' for b"
    )
    with pytest.raises(RecipeError, match=said):
        Quantization.of(ROTATED, LINES, LINES)


def test_names_of_formats_and_of_fields() -> None:
    for given in ("E5M2", "float8_e5m2", formats.float8_e5m2, formats.float8_e5m2.numpy):
        assert Quantizer(given) == Quantizer(formats.E5M2)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"got 'E5M3', expected .* or the name of one; did you mean E5M2"):
        Quantizer("E5M3")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"got 'scaling', .* did you mean granularity"):
        Quantizer(formats.E4M3, scaling="row")  # type: ignore[call-arg]


def test_text_says_what_of_the_gemms_differs() -> None:
    x, w, g = (Quantizer(fmt) for fmt in (formats.E4M3, formats.E4M3, formats.E5M2))
    plain = f"x: {x}; w: {w}; g: {g}"
    assert str(Quantization.of(x, w, g)) == plain
    other = Quantization(Gemm(x, w), Gemm(g, g, recast=True), Gemm(g, x, plain="a"))
    assert str(other) == f"{plain}; w of dgrad: {g}, of the values of fprop; g of wgrad: as it is"
    high = Quantization(Gemm(x, w), Gemm(g, w), Gemm(x, x, compute="high_precision"))
    assert str(high) == f"{plain}; wgrad: high_precision"


def test_each_granularity_has_one_class_of_products() -> None:
    kinds = {product_class(fp8) for fp8 in (DELAYED, CURRENT, GIVEN, BLOCKS)}
    assert len(kinds) == 2
    assert all(issubclass(kind, QuantizedProduct) for kind in kinds)


EMULATED = {
    "kinds of scales": Quantization.of(BLOCKS.x, BLOCKS.w, X, "split"),
    "squares times squares": by_blocks(SQUARE, SQUARE, LINE),
    "blocks, fast": Quantization.of(BLOCKS.x, BLOCKS.w, BLOCKS.g),
    "E5M2 times E5M2": Quantization.of(WIDE, X, WIDE),
    "E2M1": Quantization.of(X, Quantizer(formats.E2M1), X),
    "NVFP4": Quantization.of(Quantizer(formats.E2M1, "nvfp4_1x16"), X, X),
    "two casts of x": Quantization(Gemm(X, X), Gemm(X, X), Gemm(X, WIDE)),
}


@pytest.mark.parametrize("case", EMULATED)
def test_what_tensor_cores_do_not_multiply_is_emulated(case: str) -> None:
    """Every GEMM is the product of its operands' values, cast by their quantizers."""
    fp8 = EMULATED[case]
    assert product_class(fp8) is EmulatedProduct
    m, k, n = 48, 64, 80
    x, w, g = normal(m, k), normal(n, k), normal(m, n)
    inputs = {"x": tensor(x, True), "weight0": tensor(w, True)}
    spec = LinearSpec(ProductSpec(k, (n,), bias="none", fp8=fp8))
    y = apply(linear, spec, inputs)["y"]
    y.backward(g)

    def cast(value: np.ndarray[Any, Any], own: Quantizer, along: int) -> np.ndarray[Any, Any]:
        rule = {"scale_rule": None} if own.scale_rule == "exact" else {}
        q = fk.quantize(
            value if along else np.ascontiguousarray(value.T), own.format, scaling=own.granularity, **rule
        )
        found = q.dequantize().astype(np.float64)
        return found if along else found.T

    f, d, v = fp8.fprop, fp8.dgrad, fp8.wgrad
    for name, got, left, right in (
        ("y", y.numpy(), cast(x, f.a, 1), cast(w, f.b, 1).T),
        ("dx", inputs["x"].grad.numpy(), cast(g, d.a, 1), cast(w, d.b, 0)),
        ("dw", inputs["weight0"].grad.numpy(), cast(g, v.a, 0).T, cast(x, v.b, 0)),
    ):
        # the values themselves are rounded to float32 once
        slack = sum_slack(np.abs(left) @ np.abs(right), left.shape[1]) * 2
        assert_close(name, got, left @ right, formats.float32, slack)
