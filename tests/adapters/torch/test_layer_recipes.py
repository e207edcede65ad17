"""Recipes by layer in torch, eagerly and within torch.compile."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

from fp8kit import recipe
from fp8kit.recipes import named

X = torch.from_numpy(np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32))


def step(model, how):
    x = X.clone().requires_grad_()
    model.zero_grad()
    with ft.autocast(enabled=how is not None, recipe=how):
        y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def make():
    torch.manual_seed(0)
    return ft.name_layers(
        torch.nn.Sequential(ft.Linear(64, 48, device="cpu"), ft.Linear(48, 16, device="cpu"))
    )


def equal(a, b):
    return all(torch.equal(*pair) for pair in zip(a, b, strict=True))


RULES = {
    "high": (("1", None),),
    "delayed": (("1", recipe.DelayedScaling(amax_history_len=4)),),
    "data": (("0", named("rowwise")), ("*", None)),
}


@pytest.mark.parametrize("rules", RULES)
def test_compiled_it_is_the_same(rules):
    how, model = recipe.PerLayer(recipe.MXFP8BlockScaling(), RULES[rules]), make()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert equal(step(compiled, how), step(model, how))
    assert not equal(step(model, how), step(model, None))


def test_each_layer_has_the_bits_of_its_own_recipe():
    how, model = recipe.PerLayer(recipe.MXFP8BlockScaling(), RULES["high"]), make()
    with ft.autocast(recipe=recipe.MXFP8BlockScaling()):
        first = model[0](X)
    assert torch.equal(step(model, how)[0], model[1](first))


def test_a_function_is_not_compiled():
    how = recipe.CustomRecipe(lambda role: None if role.name == "1" else named("mxfp8").quantization.x)
    model = make()
    with ft.autocast(recipe=recipe.MXFP8BlockScaling()):
        first = model[0](X)
    assert torch.equal(step(model, how)[0], model[1](first))
    with pytest.raises(Exception, match="a recipe with callables"):
        step(torch.compile(model, fullgraph=True, backend="aot_eager"), how)


def test_first_microbatch_of_a_layer_in_high_precision():
    how, model = recipe.PerLayer(recipe.MXFP8BlockScaling(), (("0", None),)), make()
    for each in (model[0], torch.compile(copy.deepcopy(model[0]), fullgraph=True, backend="aot_eager")):
        with ft.autocast(recipe=how):
            found = [each(X, is_first_microbatch=first) for first in (True, False)]
        assert equal(found, [model[0](X)] * 2)


def test_groups_draw_bits_of_their_own():
    group = ft.GroupedLinear(2, 64, 48, bias=False, device="cpu")
    with torch.no_grad():
        group.weight1.copy_(group.weight0)
    x, g = torch.randn(16, 64).repeat(2, 1).requires_grad_(), torch.randn(16, 48).repeat(2, 1)
    with ft.autocast(recipe=named("nvfp4")):
        y = group(x, [16, 16])
    y.backward(g)
    assert torch.equal(y[:16], y[16:])  # forward draws nothing
    assert not torch.equal(x.grad[:16], x.grad[16:])


def test_a_layer_with_a_function_is_saved():
    layer = ft.Linear(64, 48, device="cpu")
    with ft.autocast(recipe=recipe.CustomRecipe(lambda role: named("mxfp8").quantization.x)):
        layer(X)
    assert copy.deepcopy(layer)._own is None


def test_what_needs_one_recipe_for_all_layers():
    how = recipe.PerLayer(recipe.DelayedScaling(), (("0", None),))
    with (
        pytest.raises(NotImplementedError, match="the same for all layers"),
        ft.quantized_model_init(recipe=how),
    ):
        ft.Linear(64, 48, device="cpu")
