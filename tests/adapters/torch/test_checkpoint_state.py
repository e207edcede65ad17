"""FP8 state that waits for layers to be converted, and delayed scaling with some GEMMs in high precision."""

from __future__ import annotations

import itertools

import pytest
import torch
from fp8kit_torch import Linear, autocast, convert, keep_extra_state
from fp8kit_torch.te_compat.old_recipe import DelayedScaling
from torch import nn

from fp8kit import recipe as recipes
from fp8kit.errors import ArgumentError, Fp8kitError, RecipeError
from fp8kit.testing.compare import assert_same_bits

RECIPE = recipes.DelayedScaling(amax_history_len=4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))


def trained():
    model = convert(net())
    with autocast(recipe=RECIPE):
        model(torch.randn(8, 32)).sum().backward()
    return model


def scales(layer):
    return layer.fp8_meta["scaling_fwd"].scale.numpy()


def test_state_waits_for_the_conversion():
    before = trained()
    state = before.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected"):
        net().load_state_dict(state)
    model = keep_extra_state(net())
    model.load_state_dict(state)
    assert model.state_dict().keys() == state.keys()
    convert(model)
    assert_same_bits("scale", scales(model[0]), scales(before[0]))
    # a client puts its own layers in their place; the next autocast hands over
    model = keep_extra_state(net())
    model.load_state_dict(state)
    model[2] = Linear(48, 32, device="cpu")
    with autocast(recipe=RECIPE):
        pass
    assert_same_bits("scale", scales(model[2]), scales(before[2]))
    # what is converted already takes its state itself
    model = keep_extra_state(convert(net()))
    model.load_state_dict(state)
    assert_same_bits("scale", scales(model[0]), scales(before[0]))


def test_state_within_a_larger_model_and_left_out():
    state = {f"inner.{key}": value for key, value in trained().state_dict().items()}
    whole = nn.ModuleDict({"inner": keep_extra_state(net())})
    whole.load_state_dict(state)
    assert whole.state_dict().keys() == state.keys()
    model = keep_extra_state(trained(), save=False)
    assert model.state_dict().keys() == net().state_dict().keys()
    net().load_state_dict(model.state_dict())
    for wrong in ((3,), (net(), "no")):
        with pytest.raises(ArgumentError, match="keep_extra_state"):
            keep_extra_state(*wrong)


@pytest.mark.parametrize("own", list(itertools.product([False, True], repeat=3))[1:-1])
def test_gemms_in_high_precision(own):
    made = DelayedScaling(amax_history_len=4, interval=1, override_linear_precision=own)
    assert isinstance(made, DelayedScaling)
    assert made.override_linear_precision == own
    layer, x = Linear(32, 48, device="cpu"), torch.randn(16, 32, requires_grad=True)
    g = torch.randn(16, 48)

    def run(enabled):
        layer.zero_grad()
        x.grad = None
        with autocast(enabled=enabled, recipe=made):
            y = layer(x)
        y.backward(g)
        return y.detach(), x.grad, layer.weight.grad

    run(True)
    for plain, mine, wanted in zip(own, run(True), run(False), strict=True):
        assert torch.equal(mine, wanted) is plain


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"interval": 2}, "interval"),
        ({"override_linear_precision": (True, False)}, "override_linear_precision"),
        ({"override_linear_precision": 1}, "override_linear_precision"),
    ],
)
def test_old_arguments_that_are_refused(wrong, named):
    with pytest.raises(RecipeError, match=named):
        DelayedScaling(**wrong)
    every = DelayedScaling(override_linear_precision=[True, True, True])
    with pytest.raises(Fp8kitError, match="all three GEMMs"), autocast(recipe=every):
        Linear(16, 16, device="cpu")(torch.ones(2, 16))
