"""What Transformer Engine's programs do with modules beside calling them."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch

WIDTH = 32


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_a_drop_path_rate_of_one_leaves_the_residual_stream(device, form):
    """Every sample's branches are dropped: y = x, and no parameter has a gradient but 0."""
    options = {"hidden_dropout": 0.0, "drop_path_rate": 1.0, "attn_input_format": form}
    layer = ft.TransformerLayer(WIDTH, 64, 4, device=device, **options)
    x = torch.randn(3, 2, WIDTH, device=device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())
    assert not torch.equal(layer.eval()(x), x)
