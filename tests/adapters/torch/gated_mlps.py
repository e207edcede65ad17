"""Plain models with a gated MLP, for the tests of converted ones, and their training."""

from __future__ import annotations

import torch
from fp8kit_torch import autocast, converted_mlp
from torch import nn
from torch.nn import functional

from fp8kit.recipe import DelayedScaling

D, WIDE, ROWS = 32, 48, 20
RECIPE = DelayedScaling(amax_history_len=4)


class MLP(nn.Module):
    """As transformers write it."""

    def __init__(self, act=None, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, WIDE, bias=bias), nn.Linear(D, WIDE, bias=bias)
        self.down_proj = nn.Linear(WIDE, D, bias=bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Tanh(nn.GELU):
    def __init__(self):
        super().__init__("tanh")


class Plain(MLP):
    """Its activation is a function."""

    function = staticmethod(functional.silu)

    def forward(self, x):
        return self.down_proj(self.function(self.gate_proj(x)) * self.up_proj(x))


class Lora(nn.Module):
    """What PEFT puts in a layer's place."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a, self.b = nn.Linear(D, 4, bias=False), nn.Linear(4, WIDE, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Net(nn.Module):
    def __init__(self, mlp=MLP, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mlp, self.last = nn.Linear(D, D), mlp(**options), nn.Linear(D, D)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.last(self.mlp(self.first(x)))


def fused_calls(monkeypatch):
    """Of the operation in eager code, from now on: what each wants gradients of."""
    found, before = [], converted_mlp.run
    monkeypatch.setattr(converted_mlp, "run", lambda op, *rest: found.append(op.needs) or before(op, *rest))
    return found


def batch(seed=1, dtype=torch.bfloat16, device="cpu", rows=ROWS // 2):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, D, generator=draw).to(device, dtype)


def train(net, steps=3, recipe=RECIPE, call=None):
    """Outputs and gradients of the last step."""
    device = next(net.parameters()).device
    for seed in range(steps):
        net.zero_grad()
        with autocast(recipe=recipe):
            y = (net if call is None else call)(batch(seed, device=device))
        y.backward(batch(100 + seed, device=device))
    return y.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def states(net):
    return {
        name: layer.get_extra_state() for name, layer in net.named_modules() if hasattr(layer, "fp8_meta")
    }
