"""Layers without outliers in torch: Smooth-SwiGLU, xIELU, norms after the branches. The native layer's bits,
eager and compiled; xIELU's gradients against torch's autograd of the formula in float64."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.combinations import combinations

from .twins import (
    RECIPES,
    WIDTH,
    batches,
    native_step,
    numpy_of,
    same,
    same_state,
    same_steps,
    torch_step,
    twins,
)

FOG = {
    "norm_position": "after",
    "norm_gain": 0.5,
    "normalization": "RMSNorm",
    "qk_norm_type": "RMSNorm",
    "qk_norm_learned": False,
    "softmax_scale": 0.125,
    "activation": "xielu",
    "bias": False,
}
MLPS = {
    "channel": {"activation": "swiglu", "smooth_swiglu": "channel"},
    "token": {"activation": "geglu", "smooth_swiglu": "token"},
    "xielu": {"activation": "xielu"},
    "no-norm": {"activation": "swiglu", "smooth_swiglu": "token", "input_layernorm": False},
    "again": {"activation": "swiglu", "smooth_swiglu": "channel", "checkpoint": True},
    "again-xielu": {"activation": "xielu", "input_layernorm": False, "checkpoint": True},
}
LAYERS = {
    "fog": FOG,
    "smooth": {"activation": "swiglu", "smooth_swiglu": "channel", "normalization": "RMSNorm"},
}


def call_of(module, mode):
    return module if mode == "eager" else torch.compile(module, fullgraph=True, backend="aot_eager")


@combinations(
    {"options": MLPS, "recipe": RECIPES.keys(), "mode": ["eager", "compiled"]},
    usual=[
        "channel-recent-eager",
        "token-delayed-eager",
        "xielu-current-eager",
        "no-norm-block-eager",
        "again-current-eager",
        "again-xielu-high-eager",
    ],
)
def test_an_mlp(device, options, recipe, mode):
    ours, native = twins("LayerNormMLP", device, **options)
    same_steps(ours, native, call_of(ours, mode), RECIPES[recipe], device, around=RECIPES[recipe])


@combinations(
    {"options": LAYERS, "recipe": RECIPES.keys(), "mode": ["eager", "compiled"]},
    usual=["fog-delayed-eager", "smooth-current-eager", "fog-recent-eager", "smooth-block-eager"],
)
def test_a_layer(device, options, recipe, mode):
    ours, native = twins("TransformerLayer", device, **options)
    frozen = [name for name, p in ours.named_parameters() if not p.requires_grad]
    assert frozen == (
        ["self_attention.q_norm.weight", "self_attention.k_norm.weight"] if "norm_gain" in options else []
    )
    call = call_of(ours, mode)
    for x in batches(device):
        y, dx, grads, g = torch_step(ours, call, RECIPES[recipe], x)
        want_y, want_dx, want = native_step(native, RECIPES[recipe], x, g)
        same(y, want_y.view, "y")
        same(dx, want_dx, "dx")
        for name, grad in grads.items():
            assert (grad is None) == (want[name] is None) == (name in frozen)
            if grad is not None:
                same(grad, want[name], name)
        same_state(ours, native)


def test_a_decoder(device):
    ours, native = twins("TransformerLayer", device, norm_position="after", layer_type="decoder")
    for x in batches(device, steps=1):
        memory = torch.randn(7, 3, WIDTH, device=device)
        y, dx, grads, g = torch_step(ours, ours, RECIPES["delayed"], x, encoder_output=memory)
        foreign = fk.tensor(numpy_of(memory), device=device)
        want_y, want_dx, want = native_step(native, RECIPES["delayed"], x, g, encoder_output=foreign)
        same(y, want_y.view, "y")
        same(dx, want_dx, "dx")
        for name, grad in grads.items():
            same(grad, want[name], name)


def formula(x, alpha_p, alpha_n, beta=0.5, eps=-1e-6):
    """Of the paper, with torch's own functions."""
    p, n = torch.nn.functional.softplus(alpha_p), beta + torch.nn.functional.softplus(alpha_n)
    below = n * torch.expm1(x) - n * x  # eps matters where x is above it alone
    return torch.where(x > 0, p * x * x, below) + beta * x


def test_xielus_gradients_are_those_of_the_formula(device):
    """Of an MLP of identities around the activation: fc1 and fc2 are unit matrices, no norm."""
    torch.manual_seed(0)
    layer = ft.LayerNormMLP(
        WIDTH, WIDTH, activation="xielu", bias=False, input_layernorm=False, device=device
    )
    with torch.no_grad():
        layer.fc1_weight.copy_(torch.eye(WIDTH))
        layer.fc2_weight.copy_(torch.eye(WIDTH))
        layer.alpha_p.fill_(0.3)
        layer.alpha_n.fill_(-0.7)
    x = torch.randn(64, WIDTH, device=device) * 2
    y, dx, grads, g = torch_step(layer, layer, None, x)
    wide = [t.detach().double().cpu().requires_grad_() for t in (x, layer.alpha_p, layer.alpha_n)]
    want = formula(*wide)
    want.backward(g.double().cpu())
    # eight float32 operations of numbers of the values' size, and of sums of as many terms as x has elements
    unit, terms = 2.0**-24, x.numel()
    assert_close(
        "y", numpy_of(y), want.detach().numpy(), "float32", 8 * unit * (1 + wide[0].detach().numpy() ** 2)
    )
    size = g.abs().double().cpu().numpy() * (2 + 2 * wide[0].detach().abs().numpy())
    assert_close("dx", numpy_of(dx), wide[0].grad.numpy(), "float32", 8 * unit * size)
    for name, leaf in (("alpha_p", wide[1]), ("alpha_n", wide[2])):
        slack = unit * (64 + terms**0.5) * float((g.double().cpu() * wide[0].detach() ** 2).abs().sum())
        assert_close(name, numpy_of(grads[name]), leaf.grad.numpy(), "float32", slack)


@pytest.mark.parametrize("recipe", ["high", "delayed"])
def test_a_state_dict_continues_the_training(device, recipe):
    layer = ft.TransformerLayer(WIDTH, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device, **FOG)
    batch = list(batches(device, steps=4))
    for x in batch[:2]:
        torch_step(layer, layer, RECIPES[recipe], x)
    names = set(layer.state_dict())
    assert {
        "layernorm_mlp.alpha_p",
        "layernorm_mlp.alpha_n",
        "self_attention_norm.weight",
        "mlp_norm.weight",
    } <= names
    assert not any("layer_norm_weight" in name for name in names)
    other = ft.TransformerLayer(WIDTH, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device, **FOG)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    for x in batch[2:]:
        y, dx, grads, g = torch_step(layer, layer, RECIPES[recipe], x)
        again = torch_step(other, other, RECIPES[recipe], x, g)
        assert torch.equal(y, again[0])
        assert torch.equal(dx, again[1])
        assert all(torch.equal(grads[n], again[2][n]) for n in grads if grads[n] is not None)


@pytest.mark.parametrize("fused", [False, True])
def test_microbatches_and_accumulated_gradients(device, fused):
    """By channel the second weight is cast anew in every microbatch; with ``main_grad`` the scaled gradients
    add up to those without."""
    torch.manual_seed(1)
    options = {"activation": "swiglu", "smooth_swiglu": "channel", "device": device}
    layer = ft.LayerNormMLP(WIDTH, 40, fuse_wgrad_accumulation=fused, **options)
    plain = ft.LayerNormMLP(WIDTH, 40, **options)
    plain.load_state_dict(layer.state_dict())
    sums = {}
    for name in ("fc1_weight", "fc2_weight") if fused else ():
        weight = getattr(layer, name)
        weight.main_grad = torch.zeros_like(weight)
    for i, x in enumerate(batches(device, steps=3)):
        g = torch.randn_like(x)
        with ft.autocast(recipe=RECIPES["current"]):
            y, want = layer(x, is_first_microbatch=i == 0), plain(x)
        assert torch.equal(y, want)
        plain.zero_grad()
        y.backward(g)
        want.backward(g)
        for name in ("fc1_weight", "fc2_weight"):
            sums[name] = sums.get(name, 0) + getattr(plain, name).grad
    for name, total in sums.items():
        weight = getattr(layer, name)
        found = weight.main_grad if fused else weight.grad
        assert_close(name, numpy_of(found), numpy_of(total), "float32", 1e-6 * float(total.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channel_scales_fold(device, dtype):
    """As natively; the same bits with them in the weights."""
    ours, native = twins("LayerNormMLP", device, dtype, activation="swiglu", smooth_swiglu="channel")
    x = next(batches(device, dtype))
    scales = ours.channel_scales(x)
    assert_same_bits("s", scales, native.channel_scales(fk.tensor(numpy_of(x), device=device)))
    want = ours(x)
    ours.fold_channel_scales(scales)
    assert torch.equal(ours(x), want)
    assert not np.array_equal(numpy_of(ours.fc2_weight), native.fc2_weight.numpy())
    with pytest.raises(ArgumentError, match="positive numbers"):
        ours.fold_channel_scales(-scales)


def test_what_is_refused(device):
    with ft.quantized_model_init(recipe=RECIPES["current"]):
        held = ft.LayerNormMLP(WIDTH, 40, activation="swiglu", smooth_swiglu="channel", device=device)
    with (
        ft.autocast(recipe=RECIPES["current"]),
        pytest.raises((ArgumentError, UnsupportedError), match="fc2_weight"),
    ):
        held(torch.randn(32, WIDTH, device=device))
