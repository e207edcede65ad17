"""Layers on no rows at all, under every recipe."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.autocast import autocast
from fp8kit.autograd import apply, tensor
from fp8kit.ops.dropout_add import DropoutAddSpec, dropout_add
from tests.support.layers import MODES, draw, make, step
from tests.support.products import f64, host

MODULES = {
    "Linear": (nn.Linear, {"in_features": 40, "out_features": 56}, 40, 56),
    "Linear split": (
        nn.Linear,
        {"in_features": 40, "out_features": 56, "parameters_split": {"q": 24, "k": 32}},
        40,
        56,
    ),
    "LayerNormLinear": (
        nn.LayerNormLinear,
        {"in_features": 40, "out_features": 56, "normalization": "RMSNorm"},
        40,
        56,
    ),
    "LayerNormMLP": (nn.LayerNormMLP, {"hidden_size": 40, "ffn_hidden_size": 48}, 40, 40),
    "LayerNormMLP gated": (
        nn.LayerNormMLP,
        {"hidden_size": 40, "ffn_hidden_size": 48, "activation": "glu", "checkpoint": True},
        40,
        40,
    ),
}


def states(module):
    """(direction, slot) -> (scale, column of the history) of every quantised tensor."""
    found = {}
    for direction, state in module.fp8_meta.items():
        scale, history = host(state.scale), host(state.amax_history)
        for slot in range(len(scale)):
            found[direction, slot] = scale[slot].copy(), history[:, slot].copy()
    return found


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("high", "bfloat16"),
        ("delayed", "float32"),
        ("current", "float16"),
        ("block", "bfloat16"),
        ("block_f32", "float32"),
    ],
)
def test_no_rows(device, mode, dtype, name):
    kind, options, k, n = MODULES[name]
    module = make(kind, device, dtype, **options)
    rows = (3, 5)
    step(module, mode, draw(1, (*rows, k), dtype), draw(2, (*rows, n), dtype))
    before = states(module)
    for leading in ((0, 5), (3, 0)):
        y, dx, grads = step(module, mode, draw(1, (*leading, k), dtype), draw(2, (*leading, n), dtype))
        assert y.shape == (0, n)
        assert dx.shape == (0, k)
        for parameter, grad in grads.items():
            np.testing.assert_array_equal(grad, 0, err_msg=parameter)
    for (direction, slot), (scale, history) in states(module).items():
        assert np.isfinite(scale)
        if direction == "scaling_bwd" or slot % 3 != 1:  # nothing was seen but the weights
            assert scale == before[direction, slot][0]
            np.testing.assert_array_equal(history, before[direction, slot][1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_rows_of_the_small_ones(device, dtype):
    for kind in (nn.LayerNorm, nn.RMSNorm):
        module = make(kind, device, dtype, normalized_shape=40)
        y, dx, grads = step(module, "high", draw(1, (0, 40), dtype), draw(2, (0, 40), dtype))
        assert y.shape == dx.shape == (0, 40)
        assert all(not grad.any() for grad in grads.values())
    table = make(nn.Embedding, device, dtype, num_embeddings=7, embedding_dim=12)
    y = table(tensor(np.empty((2, 0), np.int64), device=device))
    y.backward(draw(1, (2, 0, 12), dtype))
    assert y.shape == (2, 0, 12)
    assert not f64(table.weight.grad).any()
    x = tensor(draw(1, (0, 12), dtype), requires_grad=True, device=device)
    y = nn.Dropout(0.5)(x)
    y.backward(draw(2, (0, 12), dtype))
    assert y.shape == x.grad.shape == (0, 12)
    for reduction, shape in (("mean", (1,)), ("none", (0,))):
        loss = nn.cross_entropy(x, tensor(np.empty(0, np.int64), device=device), reduction)
        assert loss.shape == shape
        np.testing.assert_array_equal(f64(loss), 0)
        loss.backward(np.ones(shape, np.float32))
        assert x.grad.shape == (0, 12)


def test_no_rows_between_operations(device):
    """Bias and residual of nothing, a sum of nothing, and a calibration that sees nothing."""
    bias, residual = (
        tensor(draw(i, shape, "float32"), requires_grad=True, device=device)
        for i, shape in ((1, (12,)), (2, (0, 12)))
    )
    x = tensor(draw(3, (0, 12), "float32"), requires_grad=True, device=device)
    rng = nn.random.next_rng(x.device)
    y = apply(dropout_add, DropoutAddSpec(12, 0.5), {"x": x, "bias": bias, "residual": residual, "rng": rng})[
        "y"
    ]
    (y + bias).backward(draw(4, (0, 12), "float32"))
    assert x.grad.shape == residual.grad.shape == (0, 12)
    np.testing.assert_array_equal(f64(bias.grad), np.zeros(12))
    module = make(nn.LayerNormMLP, device, "float32", hidden_size=12, ffn_hidden_size=20)
    with autocast(enabled=False, calibrating=True, recipe=MODES["delayed"]):
        module(x)
    assert [float(scale) == 1 for scale, _ in states(module).values()][:6] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
