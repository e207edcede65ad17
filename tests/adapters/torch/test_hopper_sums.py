"""A training on a CPU with the sums of Hopper's tensor cores, native and in PyTorch: the same bits, step by
step, and others than with the CPU's own sums."""

from __future__ import annotations

from typing import Any

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import nn, recipe
from fp8kit.testing import assert_same_bits

WIDTH, HIDDEN, ROWS, STEPS, RATE = 64, 256, 32, 12, np.float32(1e-3)
SUMS = recipe.MMParams(accumulation="hopper_fast")
HOPPER = recipe.Float8CurrentScaling(fp8_gemm_fprop=SUMS, fp8_gemm_dgrad=SUMS, fp8_gemm_wgrad=SUMS)
# wider sums, of the same instructions
WIDE = recipe.MMParams(accumulation=fk.Accumulation(30, 32))
EXACT = recipe.Float8CurrentScaling(fp8_gemm_fprop=WIDE, fp8_gemm_dgrad=WIDE, fp8_gemm_wgrad=WIDE)


def problem() -> tuple[Any, Any, list[Any]]:
    """Inputs, what is wanted of them, and the weights of two layers: positive in part, so that what sums cut
    off has one sign."""
    random = np.random.default_rng(0)
    x = np.abs(random.standard_normal((ROWS, WIDTH))).astype(np.float32)
    wanted = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    shapes = ((HIDDEN, WIDTH), (WIDTH, HIDDEN))
    return x, wanted, [(np.abs(random.standard_normal(s)) / s[1]).astype(np.float32) for s in shapes]


def native(how: Any) -> tuple[list[float], list[Any]]:
    """(losses, weights at the end)."""
    x, wanted, weights = problem()
    layers = [nn.Linear(w.shape[1], w.shape[0], bias=False, device="cpu") for w in weights]
    for layer, w in zip(layers, weights, strict=True):
        layer.load_state_dict({"weight": w})
    losses = []
    for _ in range(STEPS):
        y = fk.tensor(x)
        with fk.autocast(recipe=how):
            for layer in layers:
                y = layer(y)
        off = y.numpy() - wanted
        losses.append(float(np.mean(off.astype(np.float64) ** 2)))
        y.backward(off)
        for layer in layers:
            layer.load_state_dict({"weight": layer.weight.numpy() - RATE * layer.weight.grad.numpy()})
            layer.zero_grad()
    return losses, [layer.weight.numpy().copy() for layer in layers]


def in_torch(how: Any) -> tuple[list[float], list[Any]]:
    """The same of fp8kit_torch's layers."""
    x, wanted, weights = problem()
    layers = [ft.Linear(w.shape[1], w.shape[0], bias=False, device="cpu") for w in weights]
    with torch.no_grad():
        for layer, w in zip(layers, weights, strict=True):
            layer.weight.copy_(torch.from_numpy(w))
    losses = []
    for _ in range(STEPS):
        y = torch.from_numpy(x)
        with ft.autocast(recipe=how):
            for layer in layers:
                y = layer(y)
        off = y.detach().numpy() - wanted
        losses.append(float(np.mean(off.astype(np.float64) ** 2)))
        y.backward(torch.from_numpy(off))
        for layer in layers:
            with torch.no_grad():
                layer.weight.sub_(layer.weight.grad * float(RATE))
            layer.zero_grad()
    return losses, [layer.weight.detach().numpy() for layer in layers]


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return {
        "native": native(HOPPER),
        "torch": in_torch(HOPPER),
        "wide": native(EXACT),
        "own": native(recipe.Float8CurrentScaling()),
    }


def test_native_and_torch_train_with_the_same_bits(runs: dict[str, Any]) -> None:
    losses, weights = runs["native"]
    assert runs["torch"][0] == losses
    for mine, theirs in zip(weights, runs["torch"][1], strict=True):
        assert_same_bits("weight", theirs, mine)
    assert losses[-1] < 0.8 * losses[0]


def test_hoppers_sums_show(runs: dict[str, Any]) -> None:
    """Sums of positive numbers come out smaller than by wider sums, which are near the CPU's own."""
    hopper, wide, own = (runs[name][0] for name in ("native", "wide", "own"))
    assert hopper != wide
    off = np.abs(np.subtract(hopper, own)).max()
    assert 0 < off < 0.05 * own[0]
    assert np.abs(np.subtract(wide, own)).max() < off / 10


def test_the_first_products_are_the_models(runs: dict[str, Any]) -> None:
    x, wanted, weights = problem()
    y = x
    for w in weights:
        y = fk.matmul(fk.quantize(y), fk.quantize(w).T, accumulate="hopper_fast")
    assert runs["native"][0][0] == float(np.mean((y - wanted).astype(np.float64) ** 2))
