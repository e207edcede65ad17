"""Layers whose emulated products are summed as a chip's tensor cores do: by codes, with the bits that
``fk.matmul`` gives of the same operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn, recipe
from fp8kit.autograd import apply, tensor
from fp8kit.errors import UnsupportedError
from fp8kit.formats import E2M1, E2M3, E4M3, E5M2
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_modelled import ModelledProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_close, assert_same_bits
from fp8kit.testing.contract.gemm import fp8_slack
from tests.support.combinations import combinations
from tests.support.operands import cut, named

M, K, N = 40, 144, 56  # the last blocks are smaller
DRAWN = np.random.default_rng(0)
X, W, G = (DRAWN.standard_normal(shape).astype(np.float32) for shape in ((M, K), (N, K), (M, N)))
X[3] *= 100
BIAS = DRAWN.standard_normal(N).astype(np.float32)
MX, NV, ROW = (
    Quantizer(E4M3, "mx_1x32", scale_rule="te"),
    Quantizer(E2M1, "nvfp4_1x16"),
    Quantizer(E4M3, "row"),
)
LINE = Quantizer(E4M3, "block_1x128", scale_rule="power_2")
WIDE = replace(ROW, format=E5M2)
# operands x, w and g, and what sums them
CASES: dict[str, tuple[Quantizer, Quantizer, Quantizer, Any]] = {
    "mxfp8": (MX, MX, replace(MX, format=E5M2), "blackwell_mx"),
    "mxfp8, squares": (MX, replace(MX, granularity="mx_32x32"), MX, "blackwell_mx"),
    "mxfp8, sums of Hopper": (MX, MX, MX, "hopper_split"),
    "mxfp6": (replace(MX, format=E2M3), replace(MX, format=E2M3), MX, "blackwell_mx"),
    "nvfp4": (NV, replace(NV, granularity="nvfp4_16x16"), NV, "blackwell_fp4"),
    "nvfp4, rows": (replace(NV, granularity="nvfp4_row_1x16"), NV, NV, "exact"),
    "mxfp4": (*(replace(MX, format=E2M1, scale_rule="floor"),) * 3, "blackwell_fp4"),
    "rotated": (*(replace(MX, format=E2M1, hadamard=32, signs="te"),) * 3, "blackwell_fp4"),
    "blocks of two dimensions": (*(replace(LINE, granularity="block_128x128"),) * 3, "hopper_fast"),
    "a tensor, lines, blocks": (Quantizer(E5M2), MX, ROW, fk.Accumulation(9, 16, 32)),
    "E5M2 by E5M2": (WIDE, WIDE, WIDE, "ada_fast"),
    "a fixed scale": (Quantizer(E2M1, scale_source="static", static_scale=2.0), ROW, NV, "hopper_mma"),
}


def quantized(x: Any, own: Quantizer, along: int) -> Any:
    """What ``fk.quantize`` makes by the same rule."""
    if own.static:
        return fk.quantize(x, own.format, scale=own.static_scale)
    levers = {"hadamard": own.hadamard, "signs": own.signs} if own.hadamard else {}
    rule = None if own.scale_rule == "exact" else own.scale_rule
    if own.granularity in ("tensor", "row"):
        x = x if along else np.ascontiguousarray(x.T)
        made = fk.quantize(x, own.format, scaling=own.granularity)
        return made if along else made.T
    return fk.quantize(x, own.format, scaling=own.granularity, scale_rule=rule, along=along, **levers)


def run(how: Quantization, layout: str = "oi", segments: tuple[int, ...] = (N,), device: str = "cpu") -> Any:
    """y, dx and dW, (N, K), of the operation ``linear``."""
    inputs: dict[str, Any] = {"x": tensor(X, True, device=device)}
    for name, value in (("weight", W), ("bias", BIAS)):
        inputs |= named(name, [tensor(v, True, device=device) for v in cut(value, segments, layout)])
    y = apply(linear, LinearSpec(ProductSpec(K, segments, layout, fp8=how)), inputs)["y"]
    y.backward(tensor(G, device=device))
    parts = [inputs[f"weight{i}"].grad.numpy() for i in range(len(segments))]
    return y.numpy(), inputs["x"].grad.numpy(), np.concatenate([p.T if layout == "io" else p for p in parts])


@combinations({"case": list(CASES), "layout": ["oi", "io"], "segments": [(N,), (17, 39)]})
def test_layers_sum_as_matmul_does(case: str, layout: str, segments: tuple[int, ...], device: str) -> None:
    """Every GEMM has the bits of ``fk.matmul`` of its operands; the bias is added in float32."""
    x, w, g, sums = CASES[case]
    how = Quantization.of(x, w, g, sums, sums, sums)
    assert product_class(how) is ModelledProduct
    y, dx, dw = run(how, layout, segments, device)
    forward = fk.matmul(quantized(X, x, 1), quantized(W, w, 1).T, accumulate=sums)
    assert_same_bits("y", y, forward + BIAS)
    back = fk.matmul(quantized(G, g, 1), quantized(W, w, 0), accumulate=sums)
    assert_same_bits("dx", dx, back)
    left, right = quantized(G, g, 0).T, quantized(X, x, 0)
    if layout == "io":  # the gradient's rows are the input's, so scales are multiplied in the other order
        assert_same_bits("dw", dw.T, fk.matmul(right.T, left.T, accumulate=sums))
    else:
        assert_same_bits("dw", dw, fk.matmul(left, right, accumulate=sums))


@combinations(
    {"name": [n for n, own in NAMED.items() if own.recipe.history is None], "dtype": ["float32", "float16"]}
)
def test_exact_sums_of_every_recipe(name: str, dtype: str, device: str) -> None:
    """With exact sums, y, dx and dW are those with the device's own but for float32's sums, with weights that
    are kept, and where a GEMM reads what another one multiplied."""
    plain = NAMED[name].recipe.quantization
    found = []
    for how in (plain, plain.summed("exact")):
        layer = nn.Linear(K, N, params_dtype=dtype, device=device)
        layer.load_state_dict({"weight": W.astype(dtype), "bias": BIAS.astype(dtype)})
        x = fk.tensor(X.astype(dtype), requires_grad=True, device=device)
        with fk.autocast(recipe=recipe.DataRecipe(how)), fk.draw_from(draws(device)):
            y = layer(x, is_first_microbatch=True if how is plain else None)
        y.backward(fk.tensor(G.astype(dtype), device=device))
        found.append([value.numpy() for value in (y, x.grad, layer.weight.grad)])
    # Hopper's keep 13 bits, on it and in a recipe that asks for them
    hopper = device == "cuda" or any(not isinstance(gemm.how, bool) for gemm in plain.gemms.values())
    sums = arrays.device("cuda" if hopper else "cpu")
    sizes = np.abs(X) @ np.abs(W).T + np.abs(BIAS), np.abs(G) @ np.abs(W), np.abs(G).T @ np.abs(X)
    # a cast at most doubles a value
    for what, got, want, size, terms in zip("ywd", found[1], found[0], sizes, (K, N, M), strict=True):
        slack = fp8_slack(8 * size.astype(np.float64), terms, True, sums)
        slack = slack + np.abs(want) * np.finfo(dtype).eps
        assert_close(what, got, want.astype(np.float64), dtype, slack)


def draws(device: str) -> Any:
    return lambda where: fk.tensor(np.array([3, 5]), device=where)


def test_a_gemm_of_its_own_sums() -> None:
    """One GEMM with a chip's sums leaves the others as they were."""
    plain = Quantization.of(MX, MX, MX, "split")
    mixed = replace(plain, dgrad=replace(plain.dgrad, accumulation=fk.Accumulation(5, 32)))
    (y, dx, dw), (y1, dx1, dw1) = run(plain), run(mixed)
    assert_same_bits("y", y1, y)
    assert_same_bits("dw", dw1, dw)
    assert (dx1 != dx).any()


REFUSED = {
    "fprop.plain": Quantization(Gemm(MX, MX, "exact", plain="a"), Gemm(MX, MX), Gemm(MX, MX)),
    "fprop.a.format: got E4M3, 4 exponent bits": Quantization.of(MX, MX, MX, "blackwell_fp4"),
    "fprop.a.granularity: got tensor": Quantization.of(Quantizer(E4M3), MX, MX, "blackwell_mx"),
    "fprop.a.granularity: got mx_1x32, expected blocks as long": Quantization.of(MX, LINE, MX, "hopper_fast"),
    "fprop.b.format: got E6M1, 6 exponent bits": Quantization.of(
        ROW, Quantizer(fk.Format("E6M1", 6, 1), "row"), ROW, "hopper_fast"
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_no_chip_sums_so_is_refused_by_name(said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^recipe: {said}"):
        product_class(REFUSED[said])
