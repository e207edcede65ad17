"""FP8 products whose weight has scales of rows in fprop and one of the tensor in dgrad: native, by codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import codec, recipe
from fp8kit.formats import E4M3, E5M2
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_row import RowProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipes import named
from fp8kit.testing import assert_close, sum_slack
from tests.support.layers import draw

ROW = Quantizer(E4M3, "row", scale_rule="power_2", epsilon=1e-12)
TENSOR = replace(ROW, granularity="tensor")
HIGH = named("rowwise_with_gw_hp")
# every second reader by the tensor
ALL = recipe.DataRecipe(Quantization(Gemm(ROW, ROW), Gemm(ROW, TENSOR), Gemm(TENSOR, TENSOR)), "all")
SUMS = recipe.DataRecipe(ALL.quantization.summed("hopper_split"), "all, Hopper's sums")


def values(x: Any, own: Quantizer) -> Any:
    """What the codes of x, (rows, contraction), stand for, float64: by the codec."""
    wide = x.astype(np.float32)
    amax = np.abs(wide).max(1, keepdims=True) if own.granularity == "row" else np.abs(wide).max()
    scale = np.exp2(np.floor(np.log2(np.float32(own.format.max) / np.maximum(amax, np.float32(own.epsilon)))))
    return codec.decode(codec.encode(wide * scale.astype(np.float32), own.format), own.format) / scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(32, 48, 64), (21, 72, 40), (1, 16, 8)], ids=str)
@pytest.mark.parametrize("how", [HIGH, ALL, SUMS], ids=lambda how: how.name)
def test_a_linear_is_the_products_of_its_operands(how: Any, sizes: Any, dtype: str, device: Any) -> None:
    m, k, n = sizes
    assert product_class(how.quantization) is RowProduct
    layer = fk.nn.Linear(k, n, bias=False, params_dtype=dtype, device=device)
    w = draw(0, (n, k), dtype)
    w[0] *= w.dtype.type(16)  # rows of other sizes than the tensor
    layer.load_state_dict({"weight": w})
    x, g = draw(1, (m, k), dtype), draw(2, (m, n), dtype)
    for first in (True, False):  # cast, and kept
        own = fk.tensor(x, requires_grad=True, device=device)
        layer.zero_grad()
        with fk.autocast(recipe=how):
            y = layer(own, is_first_microbatch=first)
        y.backward(fk.tensor(g, device=device))
        found = {"y": y.numpy(), "dx": own.grad.numpy(), "dw": layer.weight.grad.numpy()}
        gemms = how.quantization.gemms
        operands = {
            "y": (gemms["fprop"], x, w),
            "dx": (gemms["dgrad"], g, w.T),
            "dw": (gemms["wgrad"], g.T, x.T),
        }
        for name, (gemm, a, b) in operands.items():
            lost = 0.0
            if gemm.compute == "quantized":
                a, b = values(a, gemm.a), values(b, gemm.b)
                # Hopper keeps 13 bits below the largest of 33 terms, here in at most 3 instructions
                lost = 3 * 33 * 2.0**-13 if how is SUMS or device != "cpu" else 0.0
            a, b = a.astype(np.float64), b.astype(np.float64)
            size = np.abs(a) @ np.abs(b).T
            slack = sum_slack(size, a.shape[1]) + lost * size
            assert_close(f"{name}, first={first}", found[name], a @ b.T, dtype, slack)


@pytest.mark.parametrize(
    "data",
    [
        Quantization(Gemm(ROW, TENSOR), Gemm(ROW, ROW), Gemm(ROW, ROW)),  # fprop's by the tensor
        Quantization(Gemm(ROW, ROW), Gemm(ROW, replace(TENSOR, format=E5M2)), Gemm(ROW, ROW)),
        Quantization(Gemm(ROW, ROW), Gemm(ROW, replace(TENSOR, scale_rule="exact")), Gemm(ROW, ROW)),
    ],
)
def test_what_differs_in_more_is_emulated(data: Quantization) -> None:
    assert product_class(data) is EmulatedProduct
