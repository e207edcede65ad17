"""Operations of mixtures of experts give the same bits through the three frontends."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import formats
from fp8kit.autograd import apply, tensor
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.ops.grouped_linear import GroupedLinearSpec, grouped_linear
from fp8kit.ops.permute import PermuteSpec, UnpermuteSpec, permute, unpermute
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.scaled_activation import ScaledActivationSpec, scaled_activation
from fp8kit.testing.compare import assert_close, assert_same_bits
from tests.support.combinations import combinations
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
    "scaled_activation": (
        scaled_activation,
        ScaledActivationSpec("swiglu", 16),
        {"x": normal(22, 6, 16), "probs": normal(23, 6)},
        {},
        normal(24, 6, 8),
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


@combinations(
    {"compiled": {"eager": False, "fullgraph": True}, "name": CALLS.keys()},
    usual=[f"eager-{name}" for name in CALLS],  # test_moe and test_grouped_linear compile them
)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_swiglu(dtype):
    """Values and gradients against float64, natively, in JAX and under Transformer Engine's name."""
    x, p, g = normal(1, 3, 5, 16), normal(2, 3, 5), normal(3, 3, 5, 8)
    x, g = (v.astype(formats.dtype(dtype).numpy) for v in (x, g))
    leaves = [torch.from_numpy(np.asarray(v, np.float64)).requires_grad_() for v in (x, p)]
    gate, up = leaves[0].chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up * leaves[1][..., None]
    want.backward(torch.from_numpy(np.asarray(g, np.float64)))
    want = [want.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)]
    own = [tensor(v, requires_grad=True, device="cpu") for v in (x, p)]
    y = fk.nn.moe.scaled_swiglu(*own)
    y.backward(g)
    made = {"native": [y.numpy(), *(leaf.grad.numpy() for leaf in own)]}
    y, pull = jax.vjp(jax.jit(fj.scaled_swiglu), x, p)
    made["jax"] = [np.asarray(v) for v in (y, *pull(jax.numpy.asarray(g)))]
    given = [
        torch.from_numpy(v.astype(np.float32)).to(getattr(torch, name))
        for v, name in ((x, dtype), (p, "float32"))
    ]
    for leaf in given:
        leaf.requires_grad_()
    y = ft.ops.ScaledSwiGLU()(*given)
    y.backward(torch.from_numpy(g.astype(np.float32)).to(y.dtype))
    made["torch"] = [v.detach().float().numpy() for v in (y, *(leaf.grad for leaf in given))]
    # activation, product and each gradient are rounded once each; factors are below 8, sums have 8 terms
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-22
    for name, values in made.items():
        for what, got, exact in zip(("y", "dx", "dprobs"), values, want, strict=True):
            size = 4 * 8 * unit * (np.abs(exact) + np.abs(exact).max())
            assert_close(f"{name}: {what}", np.asarray(got, np.float64), exact, "float32", size)
            assert_same_bits(
                what,
                np.asarray(got, np.float32),
                np.asarray(made["native"][("y", "dx", "dprobs").index(what)], np.float32),
            )


def test_refusals_of_scaled_swiglu():
    x = normal(1, 3, 8)
    for call in (fk.nn.moe.scaled_swiglu, fj.scaled_swiglu):
        with pytest.raises(ShapeError, match=r"scaled_swiglu: probs: got shape \(3, 1\), expected \(3,\)"):
            call(x, x[:, :1])
        with pytest.raises(ShapeError, match=r"scaled_swiglu: inp: .*2 F"):
            call(x[:, :7], x[:, 0])
    with pytest.raises(ArgumentError, match="activation: got xielu"):
        ScaledActivationSpec("xielu", 8)
    with pytest.raises(ShapeError, match="even number"):
        ScaledActivationSpec("swiglu", 7)
