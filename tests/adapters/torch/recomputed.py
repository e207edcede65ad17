"""A small net in whose blocks activations are recomputed, and training steps of it, as arrays to be compared
bit for bit."""

from __future__ import annotations

import contextlib

import torch
from fp8kit_torch import LayerNormMLP, Linear, autocast

from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing.compare import assert_same_bits

K = 32
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "plain": None,
    "block": Float8BlockScaling(),
}


class Net(torch.nn.Module):
    """Two times the same block, once in micro-batches. ``where``: the autocast is "around" the forward pass;
    "inside" the block, which opens two; or "mixed", around the forward pass, and one of another recipe around
    what the block runs first. ``how``: called with (block, x, first), runs the block; None is plainly."""

    def __init__(self, place, recipe, where, how):
        super().__init__()
        self.a, self.b = Linear(K, 48, device=place), Linear(48, K, device=place)
        self.mlp = LayerNormMLP(K, 64, device=place)
        self.recipe, self.where, self.how = recipe, where, how or (lambda block, x, first: block(x, first))

    def scope(self, part):
        if self.where == "inside" or (part and self.where == "mixed"):
            return autocast(
                enabled=self.recipe is not None,
                recipe=RECIPES["current"] if self.where == "mixed" else self.recipe,
            )
        return contextlib.nullcontext()

    def block(self, x, first=None):
        with self.scope(True):
            y = torch.nn.functional.dropout(self.a(x, first), 0.3)
        with self.scope(False):
            y = self.b(y, first)
            return x + self.mlp(y, first)

    def forward(self, x, first=None):
        once = self.how(self.block, x, first)
        # in micro-batches sums would have another order
        return once if first is not None else self.how(self.block, once.tanh(), first)


def steps(place, recipe, where, how, micro=False, passes=1, count=3):
    """What ``count`` steps give: outputs, gradients, FP8 state. ``micro``: two micro-batches a step, with
    cached weights; ``passes``: how often backward goes through each graph."""
    torch.manual_seed(0)
    net = Net(place, RECIPES[recipe], where, how)
    out = []
    for _ in range(count):
        net.zero_grad()
        for first in (True, False) if micro else (None,):
            x = torch.randn(16, K, device=place, requires_grad=True)
            with autocast(enabled=where in ("around", "mixed") and recipe != "plain", recipe=RECIPES[recipe]):
                y = net(x, first)
            loss = y.square().sum()
            for done in range(passes):
                loss.backward(retain_graph=done + 1 < passes)
            out += [y, x.grad.clone()]
        out += [p.grad.clone() for p in net.parameters()]
        out += [
            part.clone()
            for m in net.modules()
            for s in getattr(m, "fp8_meta", {}).values()
            for part in s.parts
        ]
    return [t.detach().clone().cpu().numpy() for t in out]


def same_all(got, wanted):
    """Whether all of two ``steps`` are the same, bit for bit."""
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(f"result {i}", a, b)
