"""Inf and NaN: the first layer and tensor that went bad is named, and no scale is ruined for good."""

from __future__ import annotations

import re

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autocast import autocast, current
from fp8kit.autograd import apply, no_grad, tensor
from fp8kit.errors import NonFiniteError, RecipeError
from fp8kit.ops.activation import ActivationSpec, activation
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from tests.support.combinations import combinations
from tests.support.layers import draw
from tests.support.products import bits

H = 32
RECIPES = {"delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}


class Net(nn.Module):
    """Two layers and a head that is never in FP8."""

    def __init__(self, device, recomputed=False):
        options = {"hidden_dropout": 0.1, "attention_dropout": 0.0, "device": device}
        self.layers = nn.ModuleList(nn.TransformerLayer(H, 2 * H, 2, **options) for _ in range(2))
        self.head = nn.Linear(H, 3, device=device)
        self.recomputed = recomputed

    def forward(self, x):
        for layer in self.layers:
            x = fk.checkpoint(layer, x) if self.recomputed else layer(x)
        with autocast(enabled=False):
            return self.head(x)


def ruin(parameter, value, at=5):
    host = parameter.numpy().copy()
    host.reshape(-1)[at] = value
    with no_grad():
        parameter.copy_(host)


def step(net, device, x=None, g=None, recipe=None):
    x = tensor(draw(0, (8, 2, H), "float32") if x is None else x, requires_grad=True, device=device)
    with autocast(enabled=recipe is not None, recipe=recipe, check_finite=True):
        y = net(x)
    y.backward(draw(1, (8, 2, 3), "float32") if g is None else g)
    return y


def bad(shape, value, seed=0):
    array = draw(seed, shape, "float32")
    array.reshape(-1)[7] = value
    return array


# what is done to the net, arguments of the step, and what is said
CASES = {
    "weight": (
        lambda net: ruin(net.layers[1].layernorm_mlp.fc1_weight, np.nan),
        {},
        (
            "layers.1.layernorm_mlp (norm_mlp): weight layers.1.layernorm_mlp.fc1_weight: "
            "got 1 NaN and 0 Inf of 2048, expected finite"
        ),
    ),
    "weight of the head": (
        lambda net: ruin(net.head.weight, np.inf),
        {},
        "head (linear): weight head.weight: got 0 NaN and 1 Inf of 96",
    ),
    "norm's weight": (
        lambda net: ruin(net.layers[0].self_attention.layernorm_qkv.layer_norm_weight, -np.inf),
        {},
        "(norm_linear): weight layers.0.self_attention.layernorm_qkv.layer_norm_weight",
    ),
    "input": (
        lambda net: None,
        {"x": bad((8, 2, H), np.inf)},
        "layers.0.self_attention.layernorm_qkv (norm_linear): input x: got 0 NaN",
    ),
    "activation": (lambda net: ruin(net.head.weight, 3e38, slice(None)), {}, "head (linear): output y: got"),
    "gradient from outside": (
        lambda net: None,
        {"g": bad((8, 2, 3), np.nan)},
        "head (linear): gradient of output y: got 1 NaN",
    ),
    "gradient": (
        lambda net: ruin(net.head.weight, 1e20, slice(None)),
        {"g": np.full((8, 2, 3), 1e20, np.float32)},
        "head (linear): gradient of input x: got 0 NaN",
    ),
    "gradient of a weight": (
        lambda net: None,
        {"g": np.full((8, 2, 3), 3e38, np.float32)},
        "head (linear): gradient of",
    ),
}


@combinations(
    {
        "case": list(CASES),
        "recipe": {"high": None, "delayed": "delayed", "current": "current"},
        "recomputed": {"kept": False, "recomputed": True},
    }
)
def test_the_first_bad_tensor_is_named(device, case, recipe, recomputed):
    make, arguments, said = CASES[case]
    net = Net(device, recomputed)
    recipe = RECIPES.get(recipe)
    step(net, device, recipe=recipe)
    make(net)
    forward = bits({n: v for n, v in net.state_dict().items() if "scaling_fwd" in n})
    backward = bits({n: v for n, v in net.state_dict().items() if "scaling_bwd" in n})
    grads = [p.grad.numpy().copy() for p in net.parameters()]
    with pytest.raises(NonFiniteError, match=re.escape(said)):
        step(net, device, recipe=recipe, **arguments)
    assert current() is None
    if "gradient" not in case:  # the autocast ended by the error: what it recorded is dropped
        assert bits({n: v for n, v in net.state_dict().items() if "scaling_fwd" in n}) == forward
    assert bits({n: v for n, v in net.state_dict().items() if "scaling_bwd" in n}) == backward
    for p, g in zip(net.parameters(), grads, strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), g)


def test_inside_a_layer_and_in_a_recomputed_backward(device):
    def infinite(g):
        return tensor(g.numpy() * np.inf, device=device).view

    for recomputed in (False, True):
        net = Net(device, recomputed)
        net.head.forward = lambda x, forward=net.head.forward: (x.register_hook(infinite), forward(x))[1]
        with (
            np.errstate(invalid="ignore"),
            pytest.raises(NonFiniteError, match=r"layers\.1 \(dropout_add\): gradient of output y"),
        ):
            step(net, device)
        net = Net(device, recomputed)
        ruin(net.layers[1].layernorm_mlp.fc2_weight, 3e38, slice(None))
        with pytest.raises(NonFiniteError, match=r"layers\.1\.layernorm_mlp \(norm_mlp\): output y"):
            step(net, device)


def test_healthy_steps_have_the_same_bits_and_the_flag_is_inherited(device):
    seen = []
    for check in (False, True):
        nn.manual_seed(5)
        net = Net(device)
        x = tensor(draw(0, (8, 2, H), "float32"), requires_grad=True, device=device)
        with autocast(recipe=RECIPES["delayed"], check_finite=check), autocast(recipe=RECIPES["delayed"]):
            assert current().check_finite is check
            y = net(x)
        with autocast(check_finite=True), autocast(check_finite=False):
            assert not current().check_finite
        y.backward(draw(1, (8, 2, 3), "float32"))
        seen.append((y.numpy().tobytes(), x.grad.numpy().tobytes(), bits(net.state_dict())))
    assert seen[0] == seen[1]
    with pytest.raises(RecipeError, match="check_finite"):
        autocast(check_finite=1)


# --- scales -------------------------------------------------------------------------------------------------


def train_step(layer, recipe, x, g, device):
    x = tensor(x, requires_grad=True, device=device)
    with autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    layer.zero_grad()
    return y.numpy().copy(), x.grad.numpy().copy()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, "all NaN"])
@pytest.mark.parametrize(("algo", "history"), [("max", 3), ("most_recent", 3), ("max", 1)])
def test_delayed_scales_recover(device, value, algo, history):
    """Gradients and inputs with Inf keep the scale until it has left the history ("max": ``history``
    updates), with NaN at once."""
    recipe = DelayedScaling(amax_history_len=history, amax_compute_algo=algo)
    layer = nn.Linear(H, H, bias=False, device=device)
    good = [draw(i, (16, H), "float32") * np.float32(i + 1) for i in range(8)]
    for i in range(2):
        train_step(layer, recipe, good[i], good[i], device)
    before = {
        name: np.array(layer.fp8_meta[name].views["scale"].numpy()[0])
        for name in ("scaling_fwd", "scaling_bwd")
    }
    poison = np.full((16, H), np.nan, np.float32) if value == "all NaN" else bad((16, H), value, 77)
    train_step(layer, recipe, poison, poison, device)
    # updates that keep the scale, the bad step's included
    keeps = 0 if np.isnan(poison).any() else history if algo == "max" else 1
    amaxes = [np.abs(x).max() for x in good[:2]]
    if np.isnan(poison).any() and value != "all NaN":
        amaxes.append(np.nanmax(np.abs(poison)))
    for i in range(2, 8):
        state = {name: layer.fp8_meta[name].views["scale"].numpy()[0] for name in before}
        if keeps > 0:
            assert state == before
        elif i > 2 or value != "all NaN":
            window = amaxes[-history:] if algo == "max" else amaxes[-1:]
            for name, limit in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
                assert state[name] == np.float32(limit) / np.max(window).astype(np.float32)
        else:
            assert state == before  # a tensor whose amax is 0 was not used
        keeps -= 1
        train_step(layer, recipe, good[i], good[i], device)
        amaxes.append(np.abs(good[i]).max())
    for name in before:
        views = layer.fp8_meta[name].views
        assert np.isfinite(views["scale"].numpy()).all()
        assert np.isfinite(views["amax_history"].numpy()).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_bad_step_leaves_nothing_in_later_results(device, recipe, value):
    """Current scaling forgets at once. Delayed scaling gives, once the history has passed, what it gives
    without the bad step."""
    results = []
    for poisoned in (False, True):
        nn.manual_seed(2)
        layer = nn.LayerNormMLP(H, 2 * H, device=device)
        if poisoned:
            array = bad((16, H), value, 3)
            train_step(layer, RECIPES[recipe], array, array, device)
        for i in range(1 if recipe == "current" else 4):
            out = train_step(
                layer, RECIPES[recipe], draw(i, (16, H), "float32"), draw(9 + i, (16, H), "float32"), device
            )
        assert all(np.isfinite(array).all() for array in out)
        results.append([array.tobytes() for array in out])
    assert results[0] == results[1]


def test_views_that_are_not_contiguous_are_looked_at(device):
    host = np.asfortranarray(draw(0, (16, H), "float32"))
    host[3, 4] = np.nan
    x = (
        fk.tensor(arrays.as_view(host))
        if device == "cpu"
        else tensor(np.ascontiguousarray(host), device=device)
    )
    with (
        autocast(enabled=False, check_finite=True),
        pytest.raises(NonFiniteError, match=r"Linear \(linear\): input x|\(linear\): input x"),
    ):
        nn.Linear(H, H, device=device)(x)


@pytest.mark.parametrize("value", [1.0, np.inf])
def test_a_checkpointed_function_in_backward_is_the_roots(device, value):
    """Outside of any module there is the root's name."""

    def gelu(v):
        return apply(activation, ActivationSpec("gelu", H), {"x": v})["y"]

    class Rest(nn.Module):
        def forward(self, x):
            return fk.checkpoint(gelu, x)

    x, g = draw(0, (4, H), "float32"), draw(1, (4, H), "float32")
    g[2, 3] = value
    one, two = (tensor(x, requires_grad=True, device=device) for _ in range(2))
    with autocast(enabled=False, check_finite=True):
        y = Rest()(one)
    if not np.isfinite(value):
        with pytest.raises(NonFiniteError, match=r"^Rest \("):
            y.backward(g)
        return
    y.backward(g)
    gelu(two).backward(g)
    assert one.grad.numpy().tobytes() == two.grad.numpy().tobytes()
