"""The three frontends as they ship give the same bits: a layer over several steps, with every recipe, and
operations, one of them registered by a user."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit.autograd import apply, tensor
from fp8kit.ops.dropout_add import AddSpec, add
from tests.support.gate import GateSpec, gate
from tests.support.layers import MODES
from tests.support.named import same_steps

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


def test_the_steps_exercise_delayed_scaling(native):
    """Scales move at every step, in both directions, so that a stale or a lost state shows."""
    for name in ("x_scale", "w_scale", "g_scale"):
        assert native[0][name] != 1.0
    assert len({float(step["x_scale"]) for step in native}) == len(native)
    assert native[-1]["g_history"][1:].min() > 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_torch(native, compiled):
    same_steps(torch_steps(compiled), native)


def test_jax_inside_jit(native):
    same_steps(jax_steps(), native)


@pytest.mark.parametrize("mode", MODES)
def test_every_recipe(mode):
    recipe = MODES[mode]
    want = list(native_steps(recipe))
    same_steps(torch_steps(False, recipe), want)
    same_steps(jax_steps(recipe), want)


def test_a_users_operation_is_what_its_formula_says():
    x, slope, _ = (value.astype(np.float64) for value in GATE)
    exact = x / (1 + np.exp(-slope * x))
    # a product, an exponential, a sum, a quotient and a product; the exponent's error is |a x| times larger
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

    *inputs, g = (torch.from_numpy(value.copy()) for value in arrays)
    inputs = [x.requires_grad_() for x in inputs]
    y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(*inputs)
    y.backward(g)
    return {"y": y.detach().numpy()} | {name: x.grad.numpy() for name, x in zip(names, inputs, strict=True)}


def jax_call(operation, spec, names, arrays):
    @jax.jit
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
        same_steps([torch_call(*OPERATIONS[what], compiled)], [want])
    same_steps([jax_call(*OPERATIONS[what])], [want])
