<<<<<<< HEAD
"""The three frontends as they ship give the same bits: a layer with delayed scaling over several steps,
operations of fp8kit, and one that a user registered once."""
=======
"""The three frontends as they ship give the same bits: a layer over several steps, with every recipe, and
operations, one of them registered by a user."""
>>>>>>> adding

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.autograd import apply, tensor
<<<<<<< HEAD
from fp8kit.ops.grouped_linear import GroupedLinearSpec, grouped_linear
from fp8kit.ops.permute import PermuteSpec, UnpermuteSpec, permute, unpermute
from fp8kit.ops.product import ProductSpec
=======
from fp8kit.ops.dropout_add import AddSpec, add
>>>>>>> adding
from fp8kit.testing import assert_same_bits
from tests.support.gate import GateSpec, gate
from tests.support.layers import MODES

RECIPE = fk.recipe.DelayedScaling(amax_history_len=3)
ROWS, K, N = 20, 24, 40
SLOTS = {"x": ("fwd", 0), "w": ("fwd", 1), "g": ("bwd", 0)}


def normal(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


WEIGHTS = {"weight": normal(1, N, K), "bias": normal(2, N)}
BATCHES = [(normal(3 + i, ROWS, K, scale=2.0**i), normal(13 + i, ROWS, N, scale=0.01)) for i in range(4)]
GATE = normal(5, 6, 4, 16), normal(6, 16), normal(7, 6, 4, 16)
OPERATIONS = {
    # operation, spec, names of the inputs; the inputs and the gradient of y
    "user's": (gate, GateSpec(16), ("x", "slope"), GATE),
    "add": (add, AddSpec(), ("a", "b"), GATE),
}

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


def state_of(layer):
    """Scale and history of input, weight and output gradient, as a module holds them; {} where it has no
    state."""
    found = {}
    if not layer.fp8_meta:
        return found
    for name, (side, slot) in SLOTS.items():
        state = layer.fp8_meta[f"scaling_{side}"]
        found[f"{name}_scale"] = np.asarray(state.scale)[slot].copy()
        found[f"{name}_history"] = np.asarray(state.amax_history)[:, slot].copy()
    return found


def native_steps(recipe=RECIPE):
    layer = fk.nn.Linear(K, N, device="cpu")
    layer.load_state_dict(WEIGHTS)
    for x, g in BATCHES:
        given = tensor(x, requires_grad=True, device="cpu")
        layer.zero_grad()
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(given)
        y.backward(g)
        grads = {"dx": given.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
        yield {"y": y.numpy()} | {name: grad.numpy() for name, grad in grads.items()} | state_of(layer)


def torch_steps(compiled, recipe=RECIPE):
    layer = ft.Linear(K, N, device="cpu")
    with torch.no_grad():
        for name, value in WEIGHTS.items():
            getattr(layer, name).copy_(torch.from_numpy(value))
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for x, g in BATCHES:
        given = torch.from_numpy(x.copy()).requires_grad_()
        layer.zero_grad()
        with ft.autocast(enabled=recipe is not None, recipe=recipe):
            y = call(given)
        y.backward(torch.from_numpy(g.copy()))
        made = {"y": y, "dx": given.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
        yield {name: t.detach().numpy().copy() for name, t in made.items()} | state_of(layer)


def jax_steps(recipe=RECIPE):
    def layer(x, weight, bias, own):
        return fj.dense(x, weight, bias, ((1,), (1,)), own)

    @jax.jit
    def step(own, x, g):
        y, pull = jax.vjp(layer, x, *WEIGHTS.values(), own)
        return y, *pull(g)

    own = None if recipe is None else fj.create_set(recipe)
    for x, g in BATCHES:
        y, dx, dweight, dbias, own = step(own, x, g)
        made = {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
        stateful = recipe is not None and recipe.history is not None
        for name, slot in (("x", own.x), ("w", own.kernel), ("g", own.grad)) if stateful else ():
            made |= {f"{name}_scale": slot.scale, f"{name}_history": slot.amax_history}
        yield {name: np.asarray(array).squeeze() for name, array in made.items()}


@pytest.fixture(scope="module")
def native():
    return list(native_steps())


def same(got, want):
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.keys() == b.keys()
        for name in b:
            assert_same_bits(f"step {step}: {name}", a[name], b[name])


def test_the_steps_exercise_delayed_scaling(native):
    """Scales move at every step, in both directions, so that a stale or a lost state shows."""
    for name in ("x_scale", "w_scale", "g_scale"):
        assert native[0][name] != 1.0
    assert len({float(step["x_scale"]) for step in native}) == len(native)
    assert native[-1]["g_history"][1:].min() > 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_torch(native, compiled):
    same(torch_steps(compiled), native)


def test_jax_inside_jit(native):
    same(jax_steps(), native)


<<<<<<< HEAD
def native_call(name):
    operation, spec, inputs, fixed, g = CALLS[name]
    leaves = {key: tensor(value, requires_grad=True, device="cpu") for key, value in inputs.items()}
    others = {key: tensor(value, device="cpu") for key, value in fixed.items()}
    y = apply(operation, spec, leaves | others)["y"]
    y.backward(g)
    return {"y": y.numpy()} | {f"d{key}": leaf.grad.numpy() for key, leaf in leaves.items()}
=======
@pytest.mark.parametrize("mode", MODES)
def test_every_recipe(mode):
    recipe = MODES[mode]
    want = list(native_steps(recipe))
    same(torch_steps(False, recipe), want)
    same(jax_steps(recipe), want)
>>>>>>> adding


def test_a_users_operation_is_what_its_formula_says():
    x, slope, _ = (value.astype(np.float64) for value in GATE)
    exact = x / (1 + np.exp(-slope * x))
    # a product, an exponential, a sum, a quotient and a product; the exponent's error is |a x| times larger
<<<<<<< HEAD
    fk.testing.assert_close(
        "y", native_call("gate")["y"], exact, "float32", 2.0**-24 * (8 + np.abs(slope * x)) * np.abs(exact)
    )


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
    same([made], [native_call(name)])


@pytest.mark.parametrize("name", CALLS)
def test_operations_in_jax(name):
    operation, spec, inputs, fixed, g = CALLS[name]
=======
    tolerance = 2.0**-24 * (8 + np.abs(slope * x)) * np.abs(exact)
    fk.testing.assert_close("y", native_call(*OPERATIONS["user's"])["y"], exact, "float32", tolerance)


def native_call(operation, spec, names, arrays):
    *inputs, g = arrays
    inputs = [tensor(value, requires_grad=True, device="cpu") for value in inputs]
    y = apply(operation, spec, dict(zip(names, inputs, strict=True)))["y"]
    y.backward(g)
    return {"y": y.numpy()} | {name: x.grad.numpy() for name, x in zip(names, inputs, strict=True)}


def torch_call(operation, spec, names, arrays, compiled):
    def call(*inputs):
        return ft.apply(operation, spec, dict(zip(names, inputs, strict=True)))["y"]
>>>>>>> adding

    *inputs, g = (torch.from_numpy(value.copy()) for value in arrays)
    inputs = [x.requires_grad_() for x in inputs]
    y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(*inputs)
    y.backward(g)
    return {"y": y.detach().numpy()} | {name: x.grad.numpy() for name, x in zip(names, inputs, strict=True)}


def jax_call(operation, spec, names, arrays):
    @jax.jit
<<<<<<< HEAD
    def step(leaves, others, g):
        y, pull = jax.vjp(lambda own: fj.apply(operation, spec, own | others)["y"], leaves)
        return {"y": y} | {f"d{key}": grad for key, grad in pull(g)[0].items()}

    made = step(dict(inputs), dict(fixed), g)
    same([{key: np.asarray(value) for key, value in made.items()}], [native_call(name)])
=======
    def step(*arrays):
        *inputs, g = arrays
        y, pull = jax.vjp(
            lambda *inputs: fj.apply(operation, spec, dict(zip(names, inputs, strict=True)))["y"], *inputs
        )
        return y, *pull(g)

    return dict(zip(("y", *names), map(np.asarray, step(*arrays)), strict=True))


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation(what):
    """Values and gradients in torch, eager and compiled, and inside ``jax.jit``."""
    want = native_call(*OPERATIONS[what])
    for compiled in (False, True):
        same([torch_call(*OPERATIONS[what], compiled)], [want])
    same([jax_call(*OPERATIONS[what])], [want])
>>>>>>> adding
