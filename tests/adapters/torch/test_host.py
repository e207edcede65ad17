"""What an eager FP8 step costs the host beside kernels and torch: in calls of functions, which a busy machine
does not change."""

from __future__ import annotations

import gc
import sys

import fp8kit_torch as ft
import pytest
import torch

from fp8kit import arrays
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import Kernels

from .twins import RECIPES

# (module, recipe) -> calls of Python and C functions that forward, backward and the updates of the state may
# take. A call takes about a quarter of a microsecond. On a GPU an operation's own calls, about half of these,
# are passed over where its addresses are known.
MOST = {("Linear", "delayed"): 368, ("Linear", "current"): 318, ("LayerNormMLP", "delayed"): 540}


@pytest.mark.parametrize(("kind", "recipe"), MOST)
def test_calls_of_a_step(kind, recipe, monkeypatch):
    layer = ft.Linear(64, 64, device="cpu") if kind == "Linear" else ft.LayerNormMLP(64, 64, device="cpu")
    x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)

    def step():
        with ft.autocast(recipe=RECIPES[recipe]):
            y = layer(x)
        y.backward(g)

    for _ in range(3):
        step()
    kernels, calls, launched = dispatch.kernels(arrays.CPU), [], []
    for name in dir(Kernels):
        if not name.startswith("_") and not name.endswith("workspace"):
            monkeypatch.setattr(
                kernels, name, lambda *arguments, name=name: launched.append(name), raising=False
            )
    gc.collect()
    gc.disable()  # what other tests left behind is not this step's
    before = sys.getprofile()
    sys.setprofile(
        lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None
    )
    try:
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    assert launched.count("fp8_gemm") == 3 * len(layer.gemms)
    assert len(calls) <= MOST[kind, recipe]
