"""How many of fp8kit's own frames lie between a layer's ``forward`` and a kernel's call."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch

from tests.support.frames import RECIPES, frames_to_the_kernel


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe, monkeypatch):
    layer = ft.Linear(32, 48, device="cpu")
    x = torch.ones(16, 32, requires_grad=True)
    kernel, own = RECIPES[recipe]
    frames = frames_to_the_kernel(monkeypatch, kernel)
    with ft.autocast(enabled=own is not None, recipe=own):
        layer(x)
    assert frames[0].endswith(".forward")
    assert len(frames) <= 10, frames
