"""``fp8_output`` and ``fp8_grad``: tensors in FP8 from one layer to the next, and to anything else by their
values."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.formats import E4M3, E5M2
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

from .twins import RECIPES, WIDTH, same

SCALED = ["delayed", "current", "block"]
ROWS, OUT = 20, 56


def pair(device, kind="Linear"):
    """A layer and a plain ``Linear`` after it."""
    torch.manual_seed(0)
    return getattr(ft, kind)(WIDTH, OUT, device=device), ft.Linear(OUT, 32, device=device)


def cast(values, fmt, recipe, scale=None):
    """What ``fk.quantize`` makes of the values: (codes, values)."""
    block = recipe == "block"
    host = values.detach().cpu().numpy()
    q = fk.quantize(host, fmt, scaling="block_1x128" if block else "tensor", scale=scale)
    return q.data, q.dequantize()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("recipe", SCALED)
def test_outputs_and_gradients_are_those_of_quantize(device, kind, recipe):
    layer, _ = pair(device, kind)
    plain = copy.deepcopy(layer)
    for step in range(3):
        x, g = (
            torch.randn(4, ROWS // 4, WIDTH, device=device) * 2**step,
            torch.randn(4, ROWS // 4, OUT, device=device),
        )
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        scales = {n: s.scale.cpu().clone() for n, s in layer.fp8_meta.items()}
        scales = scales or {"scaling_fwd": torch.ones(3), "scaling_bwd": torch.ones(2)}
        with ft.autocast(recipe=RECIPES[recipe]):
            y, want = layer(one, fp8_output=True, fp8_grad=True), plain(two)
        assert isinstance(y, ft.QuantizedTensor)
        assert y.shape == want.shape
        y.backward(g)
        want.backward(g)
        delayed = recipe == "delayed"
        fmt = E4M3 if recipe == "block" else E5M2
        given = {n: np.array([s[-1]]) if delayed else None for n, s in scales.items()}
        same(y.dequantize(), torch.from_numpy(cast(want, E4M3, recipe, given["scaling_fwd"])[1]), "y")
        assert isinstance(one.grad, ft.QuantizedTensor)
        same(
            one.grad.dequantize(),
            torch.from_numpy(cast(two.grad, fmt, recipe, given["scaling_bwd"])[1]),
            "dx",
        )
        for name, p in plain.named_parameters():
            same(layer.get_parameter(name).grad, p.grad, name)
        if delayed:
            for name, value in (("scaling_fwd", want), ("scaling_bwd", two.grad)):
                same(layer.fp8_meta[name].amax_history[-1, -1], value.detach().abs().max(), name)
                same(
                    layer.fp8_meta[name].amax_history[:, : 2 if name == "scaling_fwd" else 1],
                    plain.fp8_meta[name].amax_history[:, : 2 if name == "scaling_fwd" else 1],
                    name,
                )


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_the_next_linear_takes_the_codes(device, recipe):
    """No cast of its input runs, and the product is the one of these codes: the same bits as from casting the
    values once more by powers of two, whose codes are the same."""
    powers = {"current": Float8CurrentScaling(use_power_2_scales=True), "block": RECIPES["block"]}[recipe]
    layer, after = pair(device)
    other = copy.deepcopy(after)
    x, g = torch.randn(ROWS, WIDTH, device=device), torch.randn(ROWS, 32, device=device)
    with ft.autocast(recipe=powers):
        y = layer(x, fp8_output=True)
        values = y.dequantize().detach().requires_grad_()
        z = after(y)
        want = other(values)
    plan = z.grad_fn.call[0].plan
    assert plan.spec.product.input_cached
    assert "x_q" not in plan.scratch
    same(z, want, "z")
    y.retain_grad()
    z.backward(g)
    want.backward(g)
    same(y.grad, values.grad, "dy")
    for name, p in other.named_parameters():
        same(after.get_parameter(name).grad, p.grad, name)
    assert layer.weight.grad.any()


def test_delayed_scaling_keeps_the_producers_scale(device):
    layer, after = pair(device)
    for step in range(3):
        x = torch.randn(ROWS, WIDTH, device=device) * 2**step
        with ft.autocast(recipe=RECIPES["delayed"]):
            y = layer(x, fp8_output=True)
            z = after(y)
        w = after.weight.detach().double().cpu()
        exact = y.dequantize().detach().double().cpu() @ w.t()
        # the weight's cast alone rounds: by 2^-4 of a value at most once its scale is set
        if step:
            assert (z.detach().double().cpu() - exact).norm() < 2.0**-4 * exact.norm()
        z.sum().backward()
        assert after.fp8_meta["scaling_fwd"].scale[0] == 1  # of an input that it never casts
        assert not after.fp8_meta["scaling_fwd"].amax_history[:, 0].any()
        assert after.fp8_meta["scaling_fwd"].amax_history[-1, 1] > 0


@pytest.mark.parametrize(
    "after", ["gelu", "norm_mlp", "attention", "other recipe", "high precision", "autocast"]
)
def test_anything_else_sees_the_values(device, after):
    layer, linear = pair(device)
    steps = {
        "gelu": torch.nn.functional.gelu,
        "norm_mlp": ft.LayerNormMLP(OUT, 64, device=device),
        "attention": lambda y: ft.DotProductAttention(2, OUT // 2)(
            *(y.reshape(ROWS // 2, 2, 2, OUT // 2),) * 3
        ),
        "other recipe": linear,
        "high precision": linear,
        "autocast": linear,
    }
    x = torch.randn(ROWS, WIDTH, device=device)
    with ft.autocast(recipe=RECIPES["current"]):
        y = layer(x, fp8_output=True)
    values = y.dequantize().detach().requires_grad_()
    recipe = {"other recipe": RECIPES["block"], "high precision": None}.get(after, RECIPES["current"])
    found = []
    for given in (y, values):
        with (
            torch.autocast(device, torch.bfloat16, enabled=after == "autocast"),
            ft.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            found.append(steps[after](given))
    same(*found, "output")
    y.retain_grad()
    found[0].sum().backward()
    found[1].sum().backward()
    same(y.grad, values.grad, "dy")
    assert layer.bias.grad.any()


@pytest.mark.parametrize("recipe", SCALED)
def test_a_gradient_in_fp8_reaches_the_layer_before(device, recipe):
    layer, after = pair(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    with ft.autocast(recipe=RECIPES[recipe]):
        y = layer(x)
        z = after(y, fp8_grad=True)
    y.retain_grad()
    z.sum().backward()
    dy = y.grad
    assert isinstance(dy, ft.QuantizedTensor)
    assert type(layer.bias.grad) is torch.Tensor
    values = dy.dequantize()  # summed up in whatever order
    assert_tensor_close("db", layer.bias.grad, values.sum(0), sum_slack(values.abs().sum(0), ROWS))


@pytest.mark.parametrize("recipe", SCALED)
def test_recomputed_it_is_the_same(device, recipe):
    found = []
    for again in (False, True):
        layer, after = pair(device)

        def block(x, layer=layer, after=after):
            return after(layer(x, fp8_output=True, fp8_grad=True))

        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
            with ft.autocast(recipe=RECIPES[recipe]):
                y = ft.checkpoint(block, x, use_reentrant=False) if again else block(x)
            y.sum().backward()
        found.append(
            [
                y,
                x.grad.dequantize(),
                layer.weight.grad,
                *(part for m in (layer, after) for part in (m.get_extra_state(),)),
            ]
        )
    for got, want in zip(*found, strict=True):
        same(got, want, "result")


def test_where_fp8_is_off_it_asks_for_nothing(device):
    layer, _ = pair(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    y = layer(x, fp8_output=True, fp8_grad=True)
    assert type(y) is torch.Tensor
    same(y, layer(x), "y")
    with torch.no_grad(), ft.autocast(recipe=DelayedScaling()):
        y = layer(x, fp8_output=True)
    assert isinstance(y, ft.QuantizedTensor)
    assert not layer.fp8_meta["scaling_fwd"].amax_history.any()


@pytest.mark.parametrize("option", ["fp8_output", "fp8_grad"])
def test_compiled_it_says_so(device, option):
    layer, after = pair(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    with (
        pytest.raises(Exception, match=rf"{option} is not supported within torch\.compile"),
        ft.autocast(recipe=RECIPES["current"]),
    ):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, **{option: True})
    with ft.autocast(recipe=RECIPES["current"]):
        y = layer(x, fp8_output=True).detach()
        with pytest.raises(Exception, match=r"an input in FP8 is not supported within torch\.compile"):
            torch.compile(after, fullgraph=True, backend="aot_eager")(y)


def test_a_norm_sees_the_values(device):
    """An operation that takes no codes takes what they stand for; gradients go through."""
    linear, norm = ft.Linear(WIDTH, 32, device=device), ft.LayerNorm(32, device=device)
    with ft.autocast(recipe=RECIPES["current"]):
        y = linear(torch.randn(16, WIDTH, device=device), fp8_output=True)
        z = norm(y)
    same(z, norm(y.detach().dequantize()), "norm")
    z.square().sum().backward()
    assert linear.weight.grad.abs().sum() > 0
