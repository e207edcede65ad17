"""Recipes by layer in torch, eagerly and within torch.compile."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

from fp8kit import formats, recipe
from fp8kit.quantization import AmaxHistory, Quantizer
from fp8kit.recipes import named
from tests.support.combinations import combinations

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


@combinations({"rules": list(RULES)}, usual=["delayed"])
def test_compiled_it_is_the_same(rules):
    how, model = recipe.PerLayer(recipe.MXFP8BlockScaling(), RULES[rules]), make()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert equal(step(compiled, how), step(model, how))
    assert not equal(step(model, how), step(model, None))


def test_rules_that_fit_compiled_layers_and_no_others_are_told_apart(caplog):
    model, rules = make(), (("0", None), ("1", None))
    compiled = torch.compile(model[0], fullgraph=True, backend="eager")
    for more in ((), (("9", None),)):
        how = recipe.PerLayer(recipe.MXFP8BlockScaling(), (*rules, *more))
        for _ in range(2):
            with ft.autocast(recipe=how):
                model[1](compiled(X))
        told = [said for said in caplog.messages if "PerLayer" in said]
        assert [said.split("that ran (")[1] for said in told] == [
            "per_layer(mxfp8(E4M3), 3 rules)): '9'; the layers are called '0', '1'" for _ in more
        ]


def test_each_layer_has_the_bits_of_its_own_recipe():
    how, model = recipe.PerLayer(recipe.MXFP8BlockScaling(), RULES["high"]), make()
    with ft.autocast(recipe=recipe.MXFP8BlockScaling()):
        first = model[0](X)
    assert torch.equal(step(model, how)[0], model[1](first))


def _mixed(role):
    """The layer "1" in high precision, gradients and wgrad's input in E5M2."""
    if role.name == "1":
        return None
    coarse = role.operand == "grad_output" or (role.gemm, role.operand) == ("wgrad", "input")
    return Quantizer(formats.E5M2 if coarse else formats.E4M3, "mx_1x32", scale_rule="te")


def _delayed(role):
    fmt = formats.E5M2 if role.operand == "grad_output" else formats.E4M3
    return Quantizer(fmt, scale_source="delayed")


def _random(role):
    return Quantizer(formats.E4M3, "mx_1x32", scale_rule="te", stochastic_bits=8 * (role.gemm != "fprop"))


WINDOW = AmaxHistory(448.0, 57344.0, 4)
CUSTOM = {
    "roles": (_mixed,),
    "sums": (_mixed, lambda gemm: "fast" if gemm == "fprop" else "split"),
    "delayed": (_delayed, None, WINDOW),
    "random bits": (_random,),
}


@combinations({"name": list(CUSTOM)}, usual=["random bits"])
def test_a_function_is_compiled_too(name):
    """With the bits of the eager model; another function is another program."""
    how, model = recipe.CustomRecipe(*CUSTOM[name]), make()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    for number in range(3):
        found = []
        for each in (compiled, model):
            torch.manual_seed(number)
            found.append(step(each, how))
        assert equal(*found)
    other = recipe.CustomRecipe(lambda role: Quantizer(formats.E3M2, "mx_1x32", scale_rule="floor"))
    assert equal(step(compiled, other), step(model, other))
    assert not equal(step(model, how), step(model, other))
    again = recipe.CustomRecipe(*CUSTOM[name])
    assert (again, again.key) == (how, how.key)
    assert other.key != how.key


@pytest.mark.combinations
def test_a_function_for_one_layer_is_compiled_too():
    how = recipe.PerLayer(recipe.MXFP8BlockScaling(), (("0", recipe.CustomRecipe(_delayed, None, WINDOW)),))
    model = make()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert equal(step(compiled, how), step(model, how))


def test_a_function_says_what_one_layer_computes():
    how = recipe.CustomRecipe(_mixed)
    model = make()
    with ft.autocast(recipe=recipe.MXFP8BlockScaling()):
        first = model[0](X)
    assert torch.equal(step(model, how)[0], model[1](first))


def test_a_compiled_functions_own_autocast_around_what_breaks_the_graph():
    """What is compiled behind the break knows the recipe as what is before it does, for other shapes, too."""
    how, model = recipe.PerLayer(recipe.MXFP8BlockScaling(), RULES["data"]), make()

    def broken(x):
        with ft.autocast(recipe=how):
            y = model[0](x)
            torch._dynamo.graph_break()
            return model[1](y)

    compiled = torch.compile(broken, backend="eager")
    for rows in (32, 16, 24):
        with torch.no_grad(), ft.autocast(recipe=how):
            wanted = model(X[:rows])
        with torch.no_grad():
            assert torch.equal(compiled(X[:rows]), wanted)


@combinations({"compiled": {"eager": False, "compiled": True}}, usual=["eager"])
def test_first_microbatch_of_a_layer_in_high_precision(compiled):
    how, layer = recipe.PerLayer(recipe.MXFP8BlockScaling(), (("0", None),)), make()[0]
    call = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="eager") if compiled else layer
    with ft.autocast(recipe=how):
        found = [call(X, is_first_microbatch=first) for first in (True, False)]
    assert equal(found, [layer(X)] * 2)


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
