"""FP8 state of Flax modules in a ``TrainState`` of all collections: the optimiser leaves it alone, and its
values are the native ones after every step. Trees of the former collection."""

from __future__ import annotations

import dataclasses

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState
from fp8kit_jax import flax as modules

import fp8kit as fk
from fp8kit.testing import assert_same_bits
from tests.adapters.jax.filled import filled
from tests.adapters.jax.native import RECIPES, draw, slots, step

NAME = fj.FP8_COLLECTION_NAME
ONE = {f"{own}_{field}" for own in ("x", "kernel", "grad") for field in ("scale", "amax_history")}


def test_the_collection_is_flax_s_own():
    assert NAME == fj.NVTE_FP8_COLLECTION_NAME == OVERWRITE_WITH_GRADIENT
    with fj.autocast(enabled=True, recipe=RECIPES["delayed"]):
        variables = modules.DenseGeneral(16).init(jax.random.key(0), jnp.ones((2, 32)))
    assert set(variables) == {"params", NAME}
    assert set(variables[NAME]) == ONE


@pytest.mark.parametrize("recipe", ["delayed", "recent"])
def test_adam_takes_the_parameters_and_the_state_is_the_native_one(recipe):
    """Four steps with growing inputs; the native layer gets each step's weight."""
    layer, native = modules.DenseGeneral(48), fk.nn.Linear(32, 48, bias=False, device="cpu")
    with fj.autocast(enabled=True, recipe=RECIPES[recipe]):
        variables = layer.init(jax.random.key(0), jnp.ones((2, 32)))
    training = TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.adam(1e-2))
    assert set(training.opt_state[0].mu) == set(variables["params"])

    @jax.jit
    def train(training, x, g):
        def loss(tree):
            return (training.apply_fn(tree, x) * g).sum()

        with fj.autocast(enabled=True, recipe=RECIPES[recipe]):
            return training.apply_gradients(grads=jax.grad(loss)(training.params))

    for i in range(4):
        x, g = draw(i, (16, 32), scale=2.0**i), draw(9 + i, (16, 48), scale=2.0**-i)
        kernel = np.asarray(training.params["params"]["kernel"])
        native.load_state_dict({"weight": np.ascontiguousarray(kernel.T)}, strict=False)
        step(native, RECIPES[recipe], x, g, "cpu")
        training = train(training, x, g)
        state = training.params[NAME]
        for slot, (scale, history) in slots(native, 0).items():
            assert_same_bits(f"{i} {slot} scale", np.asarray(state[f"{slot}_scale"]), scale)
            assert_same_bits(f"{i} {slot} history", np.asarray(state[f"{slot}_amax_history"]), history)
        assert (np.asarray(training.params["params"]["kernel"]) != kernel).any()
    assert all(float(state[f"{slot}_scale"][0]) != 1.0 for slot in ("x", "kernel", "grad"))


@pytest.mark.combinations
def test_a_transformer_layer_in_a_train_state_learns():
    layer = modules.TransformerLayer(32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x, want = (jax.random.normal(jax.random.key(i), (2, 8, 32)) for i in range(2))
    with fj.autocast(enabled=True, recipe=RECIPES["delayed"]):
        variables = layer.init(jax.random.key(2), x, deterministic=True)
        training = TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.adam(2e-2))

        @jax.jit
        def train(training):
            def loss(tree):
                return ((training.apply_fn(tree, x, deterministic=True) - want) ** 2).mean()

            value, gradients = jax.value_and_grad(loss)(training.params)
            return training.apply_gradients(grads=gradients), value

        losses = []
        for _ in range(12):
            training, value = train(training)
            losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    histories = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(training.params[NAME])
        if "amax_history" in jax.tree_util.keystr(path)
    ]
    assert len(histories) == 12
    assert all((np.asarray(history)[1:] > 0).all() for history in histories)


@dataclasses.dataclass
class Layer:
    """As an ``equinox.Module`` is: a tree of arrays, of what JAX sees none, and of its own set."""

    kernel: jax.Array
    state: fj.QuantizerSet
    name: str = dataclasses.field(metadata={"static": True})

    def __call__(self, x):
        return fj.dense(x, self.kernel, quantizer_set=self.state, name=self.name)


jax.tree_util.register_dataclass(Layer)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_model_that_holds_its_states(recipe):
    """Parameters by the optimiser, states by their next values: as where the two are arguments apart. A
    recipe without states splits alike."""
    x, kernels = draw(0, (16, 32)), [draw(i, (32, 32)) / 6 for i in (1, 2)]
    sets = fj.create_set(RECIPES[recipe], 2)
    model = [Layer(kernel, own, f"l{i}") for i, (kernel, own) in enumerate(zip(kernels, sets, strict=True))]
    tx = optax.adamw(1e-2)

    def loss(kernels, sets):
        y = x
        for kernel, own in zip(kernels, sets, strict=True):
            y = fj.dense(y, kernel, quantizer_set=own)
        return (y**2).mean()

    @jax.jit
    def apart(kernels, sets, moments):
        gradients, sets = jax.grad(loss, (0, 1))(kernels, sets)
        changes, moments = tx.update(gradients, moments, kernels)
        return optax.apply_updates(kernels, changes), sets, moments

    @jax.jit
    def together(model, moments):
        gradients = jax.grad(lambda model: (model[1](model[0](x)) ** 2).mean())(model)
        (params, _), (gradients, states) = fj.split_states(model), fj.split_states(gradients)
        changes, moments = tx.update(gradients, moments, params)
        return fj.join_states(optax.apply_updates(params, changes), states), moments

    params, states = fj.split_states(model)
    assert len(jax.tree.leaves(params)) == 2
    assert len(jax.tree.leaves(states)) == len(jax.tree.leaves(sets))
    moments, own = tx.init(params), tx.init(kernels)
    for _ in range(3):
        model, moments = together(model, moments)
        kernels, sets, own = apart(kernels, sets, own)
    found = [layer.kernel for layer in model], tuple(layer.state for layer in model)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((kernels, sets)), strict=True):
        assert_same_bits("leaf", np.asarray(a), np.asarray(b))
    assert [layer.state.recipe for layer in model] == [RECIPES[recipe]] * 2


def test_trees_of_the_former_collection_go_on():
    """Their values, gradients and next states are those of the present name; a mutable present collection
    beside them changes nothing."""
    layer, x = modules.LayerNormMLP(48, intermediate_dropout_rate=0.0), draw(0, (2, 8, 32), scale=4.0)
    with fj.autocast(enabled=True, recipe=RECIPES["delayed"]):
        variables = linen.unbox(filled(layer.init, jax.random.key(0), x))

        def loss(tree):
            y, made = layer.apply(tree, x, mutable=[NAME])
            return (y[0] ** 2).sum(), (y[0], made)

        gradient = jax.jit(jax.grad(loss, has_aux=True))
        for _ in range(2):
            gradients, (y, made) = gradient(variables)
            former = {"params": variables["params"], "fp8_metas": variables[NAME]}
            own, (same, none) = gradient(former)
            assert set(own) == {"params", "fp8_metas"}
            assert set(made) == {NAME}
            assert not none
            assert_same_bits("y", np.asarray(same), np.asarray(y))
            present = {"params": own["params"], NAME: own["fp8_metas"]}
            for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
                other = dict(jax.tree_util.tree_leaves_with_path(present))[path]
                assert_same_bits(jax.tree_util.keystr(path), np.asarray(other), np.asarray(leaf))
            variables = fj.update_collections({NAME: gradients[NAME]}, variables)
        both = {**variables, "fp8_metas": jax.tree.map(jnp.ones_like, variables[NAME])}  # the present counts
        run = jax.jit(loss)
        assert_same_bits("both", np.asarray(run(both)[1][0]), np.asarray(run(variables)[1][0]))
