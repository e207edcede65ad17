"""Operations of mixtures of experts give the same bits through the three frontends."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.autograd import apply, tensor
from fp8kit.ops.grouped_linear import GroupedLinearSpec, grouped_linear
from fp8kit.ops.permute import PermuteSpec, UnpermuteSpec, permute, unpermute
from fp8kit.ops.product import ProductSpec
from tests.support.gate import GateSpec, gate
from tests.support.named import same_steps


def normal(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


SPEC = GateSpec(16)

GATE = normal(5, 6, 4, 16), normal(6, 16), normal(7, 6, 4, 16)

CURRENT = fk.recipe.Float8CurrentScaling().quantization

PLACES = {"row_map": np.array([[3, 1], [0, 0], [-1, -1], [3, 0], [1, 1], [0, 1]], np.int32)}

# name -> (operation, spec, inputs with a gradient, other inputs, the gradient of y)
CALLS = {
    "gate": (gate, SPEC, dict(zip(("x", "slope"), GATE[:2], strict=True)), {}, GATE[2]),
    "grouped_linear": (
        grouped_linear,
        GroupedLinearSpec(ProductSpec(16, (8,), fp8=CURRENT), (4, 0, 16)),
        {"x": normal(14, 20, 16)}
        | {f"{i}_weight0": normal(15 + i, 8, 16) for i in range(3)}
        | {f"{i}_bias0": normal(18 + i, 8) for i in range(3)},
        {},
        normal(21, 20, 8),
    ),
    "permute": (permute, PermuteSpec(), {"x": normal(8, 4, 16)}, PLACES, normal(9, 6, 16)),
    "permute with probabilities": (
        permute,
        PermuteSpec(True),
        {"x": normal(8, 4, 16), "probs": normal(10, 4, 2)},
        PLACES,
        normal(9, 6, 16),
    ),
    "unpermute": (
        unpermute,
        UnpermuteSpec(),
        {"x": normal(11, 6, 16), "probs": normal(12, 4, 2)},
        PLACES,
        normal(13, 4, 16),
    ),
}


def native_call(name):
    operation, spec, inputs, fixed, g = CALLS[name]
    leaves = {key: tensor(value, requires_grad=True, device="cpu") for key, value in inputs.items()}
    others = {key: tensor(value, device="cpu") for key, value in fixed.items()}
    y = apply(operation, spec, leaves | others)["y"]
    y.backward(g)
    return {"y": y.numpy()} | {f"d{key}": leaf.grad.numpy() for key, leaf in leaves.items()}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_operations_in_torch(name, compiled):
    operation, spec, inputs, fixed, g = CALLS[name]
    others = {key: torch.from_numpy(value) for key, value in fixed.items()}

    def call(leaves):
        return ft.apply(operation, spec, leaves | others)["y"]

    leaves = {key: torch.from_numpy(value.copy()).requires_grad_() for key, value in inputs.items()}
    y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(leaves)
    y.backward(torch.from_numpy(g.copy()))
    made = {"y": y.detach().numpy()} | {f"d{key}": leaf.grad.numpy() for key, leaf in leaves.items()}
    same_steps([made], [native_call(name)])


@pytest.mark.parametrize("name", CALLS)
def test_operations_in_jax(name):
    operation, spec, inputs, fixed, g = CALLS[name]

    @jax.jit
    def step(leaves, others, g):
        y, pull = jax.vjp(lambda own: fj.apply(operation, spec, own | others)["y"], leaves)
        return {"y": y} | {f"d{key}": grad for key, grad in pull(g)[0].items()}

    made = step(dict(inputs), dict(fixed), g)
    same_steps([{key: np.asarray(value) for key, value in made.items()}], [native_call(name)])
