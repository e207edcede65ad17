"""``fk.autocast(check_finite=True)`` around PyTorch's layers: the first bad tensor is named, as natively."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import finite

import fp8kit as fk
from fp8kit.errors import NonFiniteError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from tests.support.combinations import combinations

H = 32
RECIPES = {"high": None, "delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}


class Net(torch.nn.Module):
    """Two layers, a norm of their own, and a head that is never in FP8."""

    def __init__(self, device, recomputed=False):
        super().__init__()
        options = {"hidden_dropout": 0.1, "attention_dropout": 0.0, "device": device}
        self.layers = torch.nn.ModuleList(ft.TransformerLayer(H, 2 * H, 2, **options) for _ in range(2))
        self.norm = ft.RMSNorm(H, device=device)
        self.head = ft.Linear(H, 3, device=device)
        self.recomputed = recomputed

    def forward(self, x):
        for layer in self.layers:
            x = ft.checkpoint(layer, x) if self.recomputed else layer(x)
        with fk.autocast(enabled=False):
            return self.head(self.norm(x))


def bad(shape, value, device):
    made = torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).reshape(shape)
    made.view(-1)[7] = value
    return made


def ruin(parameter, value, at=5):
    with torch.no_grad():
        parameter.view(-1)[at] = value


# what is done to the net; bad input or gradient; what is said
CASES = {
    "weight": (
        lambda net: ruin(net.layers[1].layernorm_mlp.fc1_weight, float("nan")),
        {},
        (
            r"layers.1.layernorm_mlp \(norm_mlp\): weight layers.1.layernorm_mlp.fc1_weight: "
            r"got 1 NaN and 0 Inf of 2048, expected finite"
        ),
    ),
    "norm": (
        lambda net: ruin(net.norm.weight, float("inf")),
        {},
        r"norm \(norm\): weight norm.weight: got 0 NaN",
    ),
    "input": (
        lambda net: None,
        {"x": float("-inf")},
        r"layers.0.self_attention.layernorm_qkv \(norm_linear\): input x: got 0 NaN and 1 Inf of 512",
    ),
    "output": (lambda net: ruin(net.head.weight, 3e38, slice(None)), {}, r"head \(linear\): output y: got"),
    "gradient from outside": (
        lambda net: None,
        {"g": float("nan")},
        r"head \(linear\): gradient of output y: got 1 NaN and 0 Inf of 48",
    ),
    "gradient of an input": (
        lambda net: ruin(net.head.weight, 1e20, slice(None)),
        {"g": 1e20},
        r"head \(linear\): gradient of input x: got 0 NaN",
    ),
}


def step(net, device, recipe, x=0.5, g=0.5):
    x, g = bad((8, 2, H), x, device).requires_grad_(), bad((8, 2, 3), g, device)
    with fk.autocast(enabled=recipe is not None, recipe=recipe, check_finite=True):
        y = net(x)
    y.backward(g)


@combinations(
    {"case": CASES.keys(), "recipe": RECIPES.keys(), "recomputed": {"kept": False, "recomputed": True}}
)
def test_the_first_bad_tensor_is_named(device, case, recipe, recomputed):
    make, values, said = CASES[case]
    net, recipe = Net(str(device), recomputed), RECIPES[recipe]
    step(net, str(device), recipe)
    make(net)
    states = {name: value for name, value in net.state_dict().items() if name.endswith("_extra_state")}
    with pytest.raises(NonFiniteError, match=said):
        step(net, str(device), recipe, **values)
    if "gradient" not in case:  # what a forward pass recorded is dropped
        for name, value in net.state_dict().items():
            assert name not in states or torch.equal(value, states[name]), name


@pytest.mark.parametrize("recipe", ["high", "current"])
def test_a_healthy_step_has_the_same_bits(device, recipe):
    net, found = Net(str(device)), []
    recipe = RECIPES[recipe]
    for checked in (True, False):
        torch.manual_seed(0)
        net.zero_grad()
        x = bad((8, 2, H), 0.5, str(device)).requires_grad_()
        with fk.autocast(enabled=recipe is not None, recipe=recipe, check_finite=checked):
            y = net(x)
        y.sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in net.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_compiled_layers_refuse():
    layer, x = ft.Linear(H, H, device="cpu"), torch.ones(4, H)
    with fk.autocast(check_finite=True), pytest.raises(Exception, match=r"check_finite of fp8kit\.autocast"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    ("recipe", "dtype", "bias", "said"),
    [
        (DelayedScaling(), torch.float16, False, 1),
        (Float8BlockScaling(), torch.float16, False, 1),
        (Float8BlockScaling(), torch.float16, True, 0),
        (Float8BlockScaling(), torch.bfloat16, False, 0),
        (MXFP8BlockScaling(), torch.float16, False, 0),
    ],
)
def test_overflow_that_a_cast_hides_from_a_grad_scaler_is_told_once(recipe, dtype, bias, said, caplog):
    """Where nothing is said, Inf reaches a parameter's gradient, or the dtype needs no GradScaler."""
    finite._say_hidden.cache_clear()

    def told():
        return sum("GradScaler" in message for message in caplog.messages)

    for size in (32, 48):  # plans of their own
        layer = ft.Linear(size, size, bias=bias, params_dtype=dtype, device="cpu")
        x = torch.ones(32, size, dtype=dtype, device="cpu")
        with torch.no_grad(), ft.autocast(recipe=recipe):
            layer(x)
        assert told() == (said if size == 48 else 0)
        with ft.autocast(recipe=recipe):
            y = layer(x)
        y.backward(bad(y.shape, float("inf"), "cpu").to(dtype))
        seen = any(not own.grad.isfinite().all() for own in layer.parameters())
        assert seen or said or dtype is torch.bfloat16
    assert told() == said
