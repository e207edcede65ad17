"""``checkpoint``: the same outputs, gradients and FP8 state as without it."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch

from .twins import RECIPES, WIDTH, batches, same, torch_step, twins


@pytest.mark.parametrize("first", [None, True], ids=["plain", "cached"])
@pytest.mark.parametrize("recipe", ["high", "delayed", "current", "block"])
def test_checkpoint(device, recipe, first):
    plain, _ = twins("TransformerLayer", device, hidden_dropout=0.2)
    other, _ = twins("TransformerLayer", device, hidden_dropout=0.2)
    other.load_state_dict(plain.state_dict())

    def again(x):
        return ft.checkpoint(other, x, is_first_microbatch=first)

    for seed, x in enumerate(batches(device)):
        torch.manual_seed(seed)
        y, dx, grads, g = torch_step(plain, plain, RECIPES[recipe], x, torch.ones_like(x), is_first_microbatch=first)
        torch.manual_seed(seed)
        y2, dx2, grads2, _ = torch_step(other, again, RECIPES[recipe], x, g)
        same(y2, y, "y")
        same(dx2, dx, "dx")
        for name, grad in grads.items():
            same(grads2[name], grad, name)
        for path, module in plain.named_modules():
            if hasattr(module, "fp8_meta"):
                same(other.get_submodule(path).get_extra_state(), module.get_extra_state(), path)


def test_autocast_within_the_function(device):
    plain, _ = twins("LayerNormMLP", device)
    other, _ = twins("LayerNormMLP", device)
    other.load_state_dict(plain.state_dict())

    def function(x):
        with ft.autocast(recipe=RECIPES["delayed"]):
            return other(x)

    for x in batches(device):
        y, dx, _, g = torch_step(plain, plain, RECIPES["delayed"], x)
        y2, dx2, _, _ = torch_step(other, lambda x: ft.checkpoint(function, x), None, x, g)
        same(y2, y, "y")
        same(dx2, dx, "dx")
        same(other.get_extra_state(), plain.get_extra_state(), "state")


def test_checkpoint_keeps_less(device):
    ours = ft.LayerNormMLP(WIDTH, 64, device=device)
    x = torch.randn(64, WIDTH, device=device, requires_grad=True)

    def saved(function):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel() * t.element_size()) or t, lambda t: t):
            function(x)
        return sum(sizes)

    assert saved(lambda x: ft.checkpoint(ours, x)) <= x.numel() * 4 < saved(ours)


def test_checkpoint_refuses_what_it_does_not_do():
    with pytest.raises(NotImplementedError, match="distribute_saved_activations"):
        ft.checkpoint(torch.nn.Identity(), torch.ones(2), distribute_saved_activations=True)
