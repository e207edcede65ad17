"""Levers of operands with scales of tensors and of rows: what a layer multiplies, from the data alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import blocks, codec, formats, nn, recipe, recipe_info
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.errors import RecipeError
from fp8kit.formats import E4M3, E5M2
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_close, sum_slack
from tests.support.combinations import combinations

M, K, N = 48, 160, 64
RANDOM = np.random.default_rng(0)
X, W, G = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((M, K), (N, K), (M, N)))
PLAIN, ROWS = Quantizer(E4M3), Quantizer(E4M3, "row")


def step(how: recipe.Recipe) -> dict[str, Any]:
    layer = nn.Linear(K, N, bias=False, device="cpu")
    layer.load_state_dict({"weight": W})
    x = fk.tensor(X, requires_grad=True, device="cpu")
    with fk.autocast(recipe=how):
        y = layer(x)
    y.backward(G)
    return {"y": y.numpy(), "dx": x.grad.numpy(), "dw": layer.weight.grad.numpy()}


def fixed(x: Any, scale: float, fmt: formats.Format) -> Any:
    return codec.decode(codec.encode(x * np.float32(scale), fmt), fmt).astype(np.float64) / scale


def rows(x: Any) -> Any:
    """A scale for each row, in float64 from the codes on."""
    scale = np.float32(E4M3.max) / np.abs(x).max(1, keepdims=True)
    return codec.decode(codec.encode(x * scale, E4M3), E4M3).astype(np.float64) / scale


def same(what: str, got: Any, left: Any, right: Any) -> None:
    """got = left right, but for float32's sums, and the rounding of inverses of scales."""
    assert_close(
        what, got, left @ right, "float32", 2 * sum_slack(np.abs(left) @ np.abs(right), left.shape[1])
    )


def test_static_scales() -> None:
    x, w, g = 8.0, 37.5, 3e4
    own = [
        Quantizer(fmt, scale_source="static", static_scale=scale)
        for fmt, scale in ((E4M3, x), (E4M3, w), (E5M2, g))
    ]
    found = step(recipe.DataRecipe(Quantization.of(*own, "split")))
    cast = fixed(X, x, E4M3), fixed(W, w, E4M3), fixed(G, g, E5M2)
    same("y", found["y"], cast[0], cast[1].T)
    same("dx", found["dx"], cast[2], cast[1])
    same("dw", found["dw"], cast[2].T, cast[0])
    assert np.abs(G * np.float32(g)).max() > E5M2.max  # some were clipped


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_rotated_rows_and_tensors(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands of wgrad, along its contraction, the first dimension. With one scale nothing rotated is
    stored: the rotation is taken for the amax, and again in the cast."""
    kernels, stored = dispatch.kernels(CPU), []
    rotate = kernels.rotate
    monkeypatch.setattr(kernels, "rotate", lambda x, out, *how: stored.append(out) or rotate(x, out, *how))
    rotated = Quantizer(E4M3, granularity, hadamard=16, signs="te")
    found = step(recipe.DataRecipe(Quantization(Gemm(ROWS, ROWS), Gemm(ROWS, ROWS), Gemm(rotated, rotated))))

    def cast(a: Any) -> Any:
        values = blocks.hadamard(np.ascontiguousarray(a.T), 16, "te")
        return rows(values if granularity == "row" else values.reshape(1, -1)).reshape(values.shape)

    same("dw", found["dw"], cast(G), cast(X).T)
    same("y", found["y"], rows(X), rows(W).T)
    assert [out is None for out in stored] == [granularity == "tensor"] * 2


@combinations({"granularity": ["tensor", "row"], "bits": [32, 4]}, usual=[])
def test_stochastic_gradients_are_unbiased(granularity: str, bits: int) -> None:
    """The mean over many steps is the product of the unrounded gradient, within 5 standard errors, and of a
    step 2^-bits."""
    plain = Quantizer(E4M3, granularity)
    g = Quantizer(E5M2, granularity, stochastic_bits=bits)
    how, count = recipe.DataRecipe(Quantization.of(plain, plain, g)), 150
    fk.manual_seed(3)
    draws = np.stack([step(how)["dx"] for _ in range(count)]).astype(np.float64)
    cast = rows(W.T).T if granularity == "row" else fixed(W, float(np.float32(448) / np.abs(W).max()), E4M3)
    exact = G.astype(np.float64) @ cast
    error = np.abs(draws.mean(0) - exact)
    deviation = draws.std(0, ddof=1) / count**0.5
    # a step of E5M2 is at most a quarter of a value
    bias = 2.0**-bits / 4 * (np.abs(G).astype(np.float64) @ np.abs(cast))
    assert (error <= 5 * deviation + bias + 1e-5).all()
    assert deviation.min() > 0


@pytest.mark.combinations
def test_operands_of_one_layer_draw_bits_of_their_own() -> None:
    """x and g of the same values, on a square layer: their roundings are independent, so that the mean of dW
    is the exact one also where the same number of elements lies before both."""
    size, count = 16, 1000  # so many that equal bits would show
    values = np.full((size, size), 1.0625, np.float32)  # halfway between codes
    own = Quantizer(E4M3, scale_source="static", stochastic_bits=32)
    how = recipe.DataRecipe(Quantization(Gemm(own, own), Gemm(own, own), Gemm(own, own)))
    layer = nn.Linear(size, size, bias=False, device="cpu")
    fk.manual_seed(5)
    total = np.zeros((size, size))
    for _ in range(count):
        layer.zero_grad()
        with fk.autocast(recipe=how):
            y = layer(fk.tensor(values, device="cpu"))
        y.backward(values)
        total += layer.weight.grad.numpy().astype(np.float64)
    deviation = 1.0625 * 0.0625 * (2 * size) ** 0.5  # of one sum; equal bits would add size * 0.0625**2
    assert np.abs(total / count - size * 1.0625**2).max() <= 5 * deviation / count**0.5 < size * 0.0625**2


def test_static_scales_that_are_none() -> None:
    for scale in (0.0, -1.0, np.inf, np.nan, 1e-45, 1e39, "1", True):
        with pytest.raises(RecipeError, match="Quantizer: static_scale"):
            Quantizer(E4M3, scale_source="static", static_scale=scale)
    with pytest.raises(RecipeError, match="expected 1, or scale_source 'static'"):
        Quantizer(E4M3, static_scale=2.0)


@pytest.mark.parametrize("least", [-1e-12, np.nan, np.inf, 1e39, "0", True])
def test_a_least_amax_that_is_none(least: Any) -> None:
    with pytest.raises(RecipeError, match="Quantizer: epsilon"):
        Quantizer(E4M3, epsilon=least)


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "deepseek_v3"])
def test_native_recipes_may_be_emulated(name: str) -> None:
    """The same codes, by values: the native results but for float32's sums, two of them, and the roundings of
    values by scales that are no powers of two; on devices that have no such product, too."""
    native = NAMED[name].recipe
    own = native.quantization.emulated()
    values = recipe.DataRecipe(own, "values", history=native.history)
    assert recipe_info.support_of(native, None).status == "native"
    for capability in (None, (8, 9), (9, 0), (10, 0)):
        assert recipe_info.support_of(values, capability).status == "emulated"
    assert own.summed("fast").fprop.emulated
    found, want = step(values), step(native)
    terms = {"y": np.abs(X) @ np.abs(W.T), "dx": np.abs(G) @ np.abs(W), "dw": np.abs(G.T) @ np.abs(X)}
    for result, magnitude in terms.items():
        slack = 4 * sum_slack(magnitude, max(K, N, len(X)))
        assert_close(result, found[result], want[result], "float32", slack)
    with pytest.raises(RecipeError, match="Gemm: emulated: got 'yes', expected"):
        Gemm(ROWS, ROWS, emulated="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil", "te", "gauss", "eden"])
def test_rules_of_small_blocks_are_of_small_blocks_alone(granularity: str, rule: str) -> None:
    with pytest.raises(RecipeError, match=f"'{rule}' with {granularity}, expected one of exact, power_2"):
        Quantizer(E4M3, granularity, scale_rule=rule)
