"""GroupedLinear on the native tape, and GroupedMLP in two frontends and by JAX's functions: the same bits as
layer by layer, under every kind of recipe."""

from __future__ import annotations

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import assert_close, sum_slack

E, H, F, SIZES = 3, 32, 24, [16, 0, 11]
M = sum(SIZES)
RNG = np.random.default_rng(2)
X, G = (RNG.standard_normal((M, H)).astype(np.float32) for _ in range(2))
P = RNG.random(M).astype(np.float32)
RECIPES = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}


def layers(**more):
    """The same GroupedMLP twice."""
    own, other = fk.nn.GroupedMLP(E, H, F, device="cpu", **more), ft.GroupedMLP(E, H, F, device="cpu", **more)
    values = {}
    for name, p in other.named_parameters():
        values[name] = RNG.standard_normal(p.shape).astype(np.float32) * 0.2
        with torch.no_grad():
            p.copy_(torch.from_numpy(values[name]))
    own.load_state_dict(values)
    return own, other


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("micro", [False, True], ids=["each", "microbatches"])
def test_frontends_agree(recipe, micro):
    own, other = layers()
    for step in range(3):
        first = step % 2 == 0 if micro else None
        x, p = (fk.tensor(v * 2.0**step, requires_grad=True, device="cpu") for v in (X, P))
        tx, tp = (torch.from_numpy(v * 2.0**step).requires_grad_() for v in (X, P))
        own.zero_grad()
        other.zero_grad()
        with fk.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            y = own(x, SIZES, p, first)
        with ft.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            ty = other(tx, SIZES, tp, first)
        y.backward(G)
        ty.backward(torch.from_numpy(G))
        assert_same_bits("y", y.numpy(), ty.detach().numpy())
        assert_same_bits("dx", x.grad.numpy(), tx.grad.numpy())
        assert_same_bits("dprobs", p.grad.numpy(), tp.grad.numpy())
        for name, parameter in other.named_parameters():
            part, _, leaf = name.partition(".")
            assert_same_bits(name, getattr(getattr(own, part), leaf).grad.numpy(), parameter.grad.numpy())


def test_values_and_gradients_in_float64():
    """Against torch's own operations, the probability of a row within the hidden activations."""
    _, layer = layers()
    x, p = (torch.from_numpy(v.copy()).requires_grad_() for v in (X, P))
    y = layer(x, SIZES, p)
    y.backward(torch.from_numpy(G))
    x64, p64 = (torch.from_numpy(v).double().requires_grad_() for v in (X, P))
    w = {name: q.detach().double().requires_grad_() for name, q in layer.named_parameters()}
    outs, start = [], 0
    for i, size in enumerate(SIZES):
        rows = slice(start, start + size)
        gate, up = (x64[rows] @ w[f"fc1.weight{i}"].T + w[f"fc1.bias{i}"]).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up * p64[rows, None]
        outs.append(hidden @ w[f"fc2.weight{i}"].T + w[f"fc2.bias{i}"])
        start += size
    want = torch.cat(outs)
    want.backward(torch.from_numpy(G).double())
    # three sums in a row, each over at most max(H, 2 F) terms of these sizes
    slack = 64 * sum_slack(float(want.detach().abs().max()), 2 * F + H)
    assert_close("y", y.detach().numpy(), want.detach().numpy(), "float32", slack)
    for name, got, true in (("dx", x, x64), ("dp", p, p64)):
        bound = 64 * sum_slack(float(true.grad.abs().max()), 2 * F + H)
        assert_close(name, got.grad.numpy(), true.grad.numpy(), "float32", bound)
    for name, q in layer.named_parameters():
        bound = 64 * sum_slack(float(w[name].grad.abs().max() + 1), 2 * F + H)
        assert_close(name, q.grad.numpy(), w[name].grad.numpy(), "float32", bound)


def test_compiled_and_checkpointed():
    _, layer = layers(activation="gelu", bias=False)
    assert {n for n, _ in layer.named_parameters()} == {f"fc{j}.weight{i}" for j in (1, 2) for i in range(E)}
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, p = torch.from_numpy(X), torch.from_numpy(P)
    with ft.autocast(recipe=RECIPES["current"]):
        assert_same_bits("y", call(x, SIZES, p).detach().numpy(), layer(x, SIZES, p).detach().numpy())
    own = fk.nn.GroupedLinear(2, 8, 4, return_bias=True)
    with fk.no_grad(), fk.autocast(enabled=False, calibrating=True):
        y, biases = own(np.ones((3, 8), np.float32), [3, 0])
    assert y.shape == (3, 4)
    assert [b is getattr(own, f"bias{i}") for i, b in enumerate(biases)] == [True, True]
    again = fk.nn.GroupedLinear(2, 8, 4, return_bias=True)
    again.load_state_dict(own.state_dict())
    for name, array in own.state_dict().items():
        assert_same_bits(name, np.asarray(again.state_dict()[name]), np.asarray(array))


def test_refusals():
    layer = fk.nn.GroupedMLP(2, 8, 4, device="cpu")
    x = np.ones((3, 8), np.float32)
    for sizes in ([3], [2, 2], [4, -1]):
        with pytest.raises((ShapeError, ArgumentError), match="GroupedLinear: m_splits"):
            layer(x, sizes)
    with pytest.raises(ArgumentError, match="m_splits"):
        layer(x, 3)
    with pytest.raises(ShapeError, match="inp"):
        layer(np.ones((3, 9), np.float32), [1, 2])
    with pytest.raises(ShapeError, match="probs"):
        layer(x, [1, 2], np.ones(4, np.float32))
    with pytest.raises(ShapeError, match="activation"):
        fk.nn.GroupedMLP(2, 8, 4, activation="xielu")
    with pytest.raises(ArgumentError, match="num_gemms"):
        ft.GroupedMLP(0, 8, 4)
