"""What an eager step costs the host beside kernels: in calls of functions, which a busy machine does not
change."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import tensor
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import Kernels

RECIPES = {"high": None, "delayed": fk.recipe.DelayedScaling(), "current": fk.recipe.Float8CurrentScaling()}
# (module, recipe) -> calls of Python and C functions that forward, backward and the updates of the state may
# take
MOST = {
    ("Linear", "high"): 384,
    ("Linear", "delayed"): 530,
    ("Linear", "current"): 546,
    ("LayerNormMLP", "delayed"): 832,
}


@pytest.mark.parametrize(("kind", "recipe"), MOST)
def test_calls_of_a_step(kind, recipe, monkeypatch):
    layer = nn.Linear(64, 64, device="cpu") if kind == "Linear" else nn.LayerNormMLP(64, 64, device="cpu")
    x, g = (
        tensor(np.ones((32, 64), np.float32), requires_grad=True),
        tensor(np.ones((32, 64), np.float32)).view,
    )

    def step():
        with fk.autocast(enabled=recipe != "high", recipe=RECIPES[recipe]):
            y = layer(x)
        y.backward(g)
        x.grad = None
        layer.zero_grad()

    for _ in range(3):
        step()
    kernels, calls, launched = dispatch.kernels(arrays.CPU), [], []
    for name in dir(Kernels):
        if not name.startswith("_") and not name.endswith("workspace"):
            monkeypatch.setattr(
                kernels, name, lambda *arguments, name=name: launched.append(name), raising=False
            )
    gc.collect()  # what earlier tests left would be finalised within the step, and counted
    before = sys.getprofile()
    sys.setprofile(
        lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None
    )
    try:
        step()
    finally:
        sys.setprofile(before)
    assert launched.count("gemm" if recipe == "high" else "fp8_gemm") == 3 * len(layer.gemms)
    assert len(calls) <= MOST[kind, recipe]
