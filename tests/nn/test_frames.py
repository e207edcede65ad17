"""How many of fp8kit's own frames lie between a layer's ``forward`` and a kernel's call."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from tests.support.frames import RECIPES, frames_to_the_kernel


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe, monkeypatch):
    layer = fk.nn.Linear(32, 48, device="cpu")
    x = fk.tensor(np.ones((16, 32), np.float32), requires_grad=True, device="cpu")
    kernel, own = RECIPES[recipe]
    frames = frames_to_the_kernel(monkeypatch, kernel)
    with fk.autocast(enabled=own is not None, recipe=own):
        layer(x)
    assert frames[0].endswith(".forward")
    assert len(frames) <= 8, frames
