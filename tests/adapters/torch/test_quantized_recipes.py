"""Weights kept in FP8 under delayed scaling, and by small blocks (MXFP8, NVFP4)."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import fp8kit_torch as ft
import pytest
import torch

from fp8kit.errors import ShapeError, UnsupportedError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

from .twins import RECIPES, WIDTH, batches, held_pair, same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 2.0**-6], ids=["usual", "small"])
def test_delayed_scaling_of_held_weights_is_near_the_exact_product_from_the_first_step(device, dtype, spread):
    """A weight's scale is its own, so that it is as near where delayed scaling has seen nothing yet: x and w
    are each rounded by at most 2^-4 of a value, most by less than half of that."""
    held, plain = held_pair("Linear", device, "delayed", dtype)
    with torch.no_grad():
        for layer in (held, plain):
            layer.weight.mul_(spread)
    held.weight.quantize_(plain.weight.detach())
    ours = ft.optimizers.FusedAdam(held.parameters(), lr=1e-3 * spread, master_weights=True)
    other = ft.optimizers.FusedAdam(plain.parameters(), lr=1e-3 * spread)
    ours.initialize_state(held.weight)
    ours.set_scaled_state(held.weight, "master_param", plain.weight.detach().float())
    for x in batches(device, str(dtype).removeprefix("torch."), steps=5):
        exact = torch.nn.functional.linear(x.detach().double(), plain.weight.double(), plain.bias.double())
        g = torch.randn_like(exact).to(dtype)
        results = []
        for layer in (held, plain):
            layer.zero_grad()
            x.grad = None
            with ft.autocast(recipe=RECIPES["delayed"]):
                y = layer(x)
            y.backward(g)
            results.append((y.detach().double(), layer.weight.grad.double()))
        (y, dw), (_, dw2) = results
        assert (y - exact).norm() < 2.0**-4 * exact.norm()
        same(dw, dw2, "dw")  # no weight is in it
        ours.step()
        other.step()
        master = ours.get_unscaled_state(held.weight, "master_param")
        # a float32 master beside a parameter of this dtype: a rounding a step
        limit = 5 * torch.finfo(dtype).eps * plain.weight.abs().max() + 1e-3 * spread * 2.0**-10
        assert (master - plain.weight).abs().max() <= limit


def test_training_on_weights_held_under_delayed_scaling_goes_as_on_cast_ones(device):
    torch.manual_seed(0)
    x, target = torch.randn(64, WIDTH, device=device), torch.randn(64, 40, device=device)
    held, plain = held_pair("Linear", device, "delayed")
    losses = []
    for layer in (held, plain):
        opt = ft.optimizers.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
        if layer is held:
            opt.initialize_state(held.weight)
            values = held.weight.get_high_precision_init_val().to(device)
            opt.set_scaled_state(held.weight, "master_param", values)
        own = []
        for _ in range(20):
            with ft.autocast(recipe=RECIPES["delayed"]):
                y = layer(x)
            loss = (y - target).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            own.append(loss.item())
        losses.append(torch.tensor(own))
    assert losses[1][-1] < 0.9 * losses[1][0]
    slack = 2.0**-7 * losses[1]  # the mean over y of the errors of FP8, 2^-4 of a value
    assert_tensor_close("losses", *losses, slack)


BLOCKS = {
    "MXFP8Tensor": ft.MXFP8BlockScaling(),
    "NVFP4Tensor": ft.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


# a recipe that is data is asked for what its weights' casts are, not for its class
@pytest.mark.parametrize(
    ("name", "recipe"),
    [*BLOCKS.items(), ("MXFP8Tensor", ft.recipe.DataRecipe(BLOCKS["MXFP8Tensor"].quantization))],
    ids=[*BLOCKS, "data"],
)
def test_weights_held_by_small_blocks(device, name, recipe):
    """fprop multiplies the codes of casting at each step; wgrad has no weight in it."""
    with ft.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        held = ft.Linear(64, 32, device=device)
    assert type(held.weight).__name__ == name
    assert isinstance(held.weight, torch.nn.Parameter)
    plain = ft.Linear(64, 32, device=device)
    with torch.no_grad():
        plain.weight.copy_(held.weight.get_high_precision_init_val())
        plain.bias.copy_(held.bias)
    x, g = torch.randn(32, 64, device=device), torch.randn(32, 32, device=device)
    results = []
    for layer in (held, plain):
        own = x.clone().requires_grad_()
        with ft.autocast(recipe=recipe):
            y = layer(own)
        y.backward(g)
        results.append((y, layer.weight.grad, own.grad))
    (y, dw, dx), (y2, dw2, dx2) = results
    # a scale of NVFP4's tensor may be another by a rounding, in sums of 64 and of 32 terms
    assert_tensor_close("y", y, y2, sum_slack(x.abs() @ plain.weight.abs().t(), 64))
    assert_tensor_close("dw", dw, dw2, sum_slack(g.abs().t() @ x.abs(), 32))
    # whose operand is cast along the other axis, of values that were cast before: a step of the format
    assert (dx - dx2).norm() < (2.0**-4 if name == "MXFP8Tensor" else 0.25) * dx2.norm()


@pytest.mark.parametrize("change", [{"factor": 0.5}, {"hadamard": 32}, {"stochastic_bits": 8}], ids=str)
def test_casts_that_no_quantizer_makes_are_refused(change):
    how = BLOCKS["MXFP8Tensor"].quantization
    fprop = replace(how.fprop, a=replace(how.x, **change), b=replace(how.w, **change))
    recipe = ft.recipe.DataRecipe(replace(how, fprop=fprop))
    said = "quantized_model_init: recipe: got E4M3 by mx_1x32"
    with pytest.raises(UnsupportedError, match=said), ft.quantized_model_init(recipe=recipe):
        pass


@pytest.mark.parametrize("name", BLOCKS)
def test_training_of_weights_held_by_small_blocks(device, name):
    torch.manual_seed(0)
    with ft.quantized_model_init(recipe=BLOCKS[name]):
        held = ft.Linear(64, 32, device=device)
    masters = [p.detach().clone().float() for p in held.parameters()]
    for master in masters:
        master.requires_grad_()
    opt = ft.optimizers.FusedAdam(held.parameters(), lr=1e-2, master_weights=True)
    twin = torch.optim.Adam(masters, lr=1e-2)
    x, target = torch.randn(64, 64, device=device), torch.randn(64, 32, device=device)
    losses = []
    for _ in range(5):
        with ft.autocast(recipe=BLOCKS[name]):
            loss = (held(x) - target).square().mean()
        opt.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for master, p in zip(masters, held.parameters(), strict=True):
            master.grad = p.grad.clone()
        opt.step()
        twin.step()
        kept = opt.get_unscaled_state(held.weight, "master_param")
        slack = 5 * 32 * 2.0**-24 * (4 * 1e-2 + 1)  # 5 steps of 32 roundings, of weights below 1 and 4 lr
        assert_tensor_close("master", kept, masters[0], slack)
        same(held.weight.dequantize(), held.weight._get_quantizer()(kept).dequantize(), "the master's cast")
    assert losses[-1] < losses[0]
    assert type(held.weight).__name__ == name


def test_weights_by_small_blocks_in_a_model_and_in_files(device):
    with ft.quantized_model_init(recipe=ft.MXFP8BlockScaling()):
        layer, other = (ft.LayerNormMLP(64, 128, device=device) for _ in range(2))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    x = torch.randn(32, 64, device=device)
    with ft.autocast(recipe=ft.MXFP8BlockScaling()):
        same(other(x), layer(x), "y")
    same(layer(x), copy.deepcopy(layer)(x), "in high precision")
    assert layer.to(torch.bfloat16).fc1_weight.dtype is torch.bfloat16
    assert type(layer.fc1_weight).__name__ == "MXFP8Tensor"
    with (
        pytest.raises(ShapeError, match="multiples of 32"),
        ft.quantized_model_init(recipe=ft.MXFP8BlockScaling()),
    ):
        ft.Linear(48, 32, device=device)
