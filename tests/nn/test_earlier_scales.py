"""Scales that follow from earlier steps, of some operands beside other casts of the rest: their rules from
the data alone, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, codec, recipe, recipes
from fp8kit.errors import RecipeError
from fp8kit.formats import E4M3, E4M3_240, E5M2
from fp8kit.quantization import AmaxHistory, Quantization, Quantizer
from fp8kit.testing import assert_close, assert_same_bits, sum_slack

M, K, N = 32, 96, 48
MX, NOW = Quantizer(E4M3, "mx_1x32", scale_rule="te"), Quantizer(E4M3)
EARLIER, EARLIER_G = replace(NOW, scale_source="delayed"), Quantizer(E5M2, scale_source="delayed")
WINDOW = AmaxHistory(E4M3.max, E5M2.max, 4)


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_predicted_scale_over_steps(device: str) -> None:
    """The weight's amax counts for three steps, and grows by the rate in each; no weight that moves by less
    is clipped. y is the product of the values that the scale makes."""
    rate, interval = np.float32(0.05), 3
    how = recipe.DataRecipe(
        Quantization.of(MX, EARLIER, MX, "split"),
        history=replace(WINDOW, length=interval, growth=float(rate)),
    )
    layer, weight = fk.nn.Linear(K, N, bias=False, device=device), draw(0, N, K)
    expected, measured, since = np.float32(1), None, 0
    for step in range(8):
        arrays.copy(layer.weight.view, arrays.as_view(weight))
        x = draw(step + 1, M, K)
        with fk.autocast(recipe=how):
            y = layer(fk.tensor(x, requires_grad=True, device=device))
            scale = np.array(layer.fp8_meta["scaling_fwd"].views["scale"].numpy())[1]
        assert_same_bits("scale", scale, expected)
        if step:
            assert np.abs(weight).max() * scale <= E4M3.max * (1 + 2.0**-22)
        values = codec.decode(codec.encode(weight * scale, E4M3), E4M3) / np.float64(scale)
        other = fk.quantize(x, E4M3, scaling="mx_1x32", scale_rule="te").dequantize().astype(np.float64)
        slack = 2 * sum_slack(np.abs(other) @ np.abs(values).T, K)  # the inverse of the scale is rounded
        assert_close("y", y.numpy(), other @ values.T, "float32", slack)
        y.backward(draw(50, M, N))
        if measured is None or since == interval - 1:
            measured, since = np.abs(weight).max(), 0
        else:
            since += 1
        bound = measured + rate if not since else np.float32(measured + np.float32(rate * (since + 1)))
        expected = np.float32(E4M3.max) / bound
        weight = weight + rate * np.sign(draw(100 + step, N, K)) * np.float32(0.999)


def test_a_window_in_powers_of_two(device: str) -> None:
    """FP8-LM's rule: 2^floor(log2(max / amax)) of the window's largest amax."""
    how = recipe.DataRecipe(
        Quantization.of(EARLIER, NOW, EARLIER_G), history=replace(WINDOW, length=2, power_2=True)
    )
    layer, amaxes = fk.nn.Linear(K, N, bias=False, device=device), []
    for step, size in enumerate((1.0, 5.0, 0.3, 0.1)):
        x = draw(step, M, K) * np.float32(size)
        with fk.autocast(recipe=how):
            y = layer(fk.tensor(x, requires_grad=True, device=device))
        y.backward(draw(9, M, N))
        amaxes.append(np.abs(x).max())
        want = 2.0 ** np.floor(np.log2(448 / max(amaxes[-2:])))
        scales = np.array(layer.fp8_meta["scaling_fwd"].views["scale"].numpy())
        assert scales.tolist() == [want, 1.0, 1.0]  # those of w and y have no history


def test_a_scale_changes_once_in_a_window(device: str) -> None:
    """Fishman's rule: by the largest amax of the full window, in powers of two; in the first window after
    every step. Forward and backward alike."""
    how = recipe.DataRecipe(
        Quantization.of(EARLIER, EARLIER, EARLIER_G),
        history=replace(WINDOW, length=3, power_2=True, by_window=True),
    )
    layer = fk.nn.Linear(K, N, bias=False, device=device)
    amaxes: dict[str, list[Any]] = {"fwd": [], "bwd": []}
    for step, size in enumerate((1.0, 9.0, 2.0, 0.1, 0.2, 0.1, 40.0)):
        x, g = draw(step, M, K) * np.float32(size), draw(step + 9, M, N) * np.float32(size)
        with fk.autocast(recipe=how):
            y = layer(fk.tensor(x, requires_grad=True, device=device))
        y.backward(g)
        # the steps whose amaxes the scale is of: all of the first window, then every full one
        first, last = (0, min(step + 1, 3)) if step < 5 else (3, 6)
        for name, values, most in (("fwd", x, E4M3.max), ("bwd", g, E5M2.max)):
            amaxes[name].append(np.abs(values).max())
            scale = np.array(layer.fp8_meta[f"scaling_{name}"].views["scale"].numpy())[0]
            assert scale == 2.0 ** np.floor(np.log2(most / max(amaxes[name][first:last])))


def test_roles_of_a_custom_recipe_have_state(device: str) -> None:
    """A function's answers are those of the data that say the same."""

    def quantizer(role: Any) -> Quantizer:
        return EARLIER if role.operand == "weight" else MX

    data = recipe.DataRecipe(Quantization.of(MX, EARLIER, MX, "split"), history=WINDOW)
    found = []
    for how in (data, recipe.CustomRecipe(quantizer, history=WINDOW)):
        layer = fk.nn.Linear(K, N, bias=False, device=device)
        layer.load_state_dict({"weight": draw(0, N, K)})
        for step in range(3):
            with fk.autocast(recipe=how):
                y = layer(fk.tensor(draw(step, M, K), requires_grad=True, device=device))
            y.backward(draw(9, M, N))
        found.append(y.numpy())
    assert_same_bits("y", *found)


def _refused(match: str, data: Quantization, history: Any) -> None:
    with pytest.raises(RecipeError, match=match):
        recipe.DataRecipe(data, history=history)


def test_rules_that_do_not_fit_are_refused_by_name() -> None:
    mixed = Quantization.of(MX, EARLIER, MX)
    _refused("DataRecipe: history: got None, expected an AmaxHistory, for operands", mixed, None)
    _refused("history: got .*expected None: no operand", Quantization.of(MX, MX, MX), WINDOW)
    _refused("expected an AmaxHistory or None", mixed, 16)
    narrow = mixed.map(lambda own: replace(own, format=E4M3_240), "w")
    _refused("history.max_forward: got 448.0, expected at most 240", narrow, WINDOW)
    both = Quantization.of(EARLIER, EARLIER, MX)
    _refused(
        "history.growth: got 0.1 beside x, .*expected None, or x without state",
        both,
        replace(WINDOW, growth=0.1),
    )
    for fields in ({"length": 0}, {"growth": -1.0}, {"max_forward": 0.0}, {"amax_algo": "mean"}):
        with pytest.raises(RecipeError, match=f"AmaxHistory: {next(iter(fields))}: got"):
            replace(WINDOW, **fields)
    with pytest.raises(RecipeError, match=r"growth: got 0\.1, expected None beside callables"):
        replace(WINDOW, growth=0.1, amax_algo=lambda rows: rows[0])
    for more in ({"growth": 0.1}, {"scale_algo": lambda *arguments: arguments[0]}):
        with pytest.raises(RecipeError, match="by_window: got True, expected False beside"):
            replace(WINDOW, by_window=True, **more)
    for ranks in (0, 2048):
        with pytest.raises(RecipeError, match="fishman: ranks: got"):
            recipes.fishman(ranks)
    assert recipes.fishman(8).history.length == 128
    with pytest.raises(RecipeError, match="AmaxHistory: growth"):
        recipes.moss(-1.0)
