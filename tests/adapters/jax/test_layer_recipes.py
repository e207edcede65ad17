"""Recipes by layer in JAX: Flax's modules by their paths, functions by their names."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from fp8kit_jax import (
    autocast,
    create_set,
    dense,
    dropout_seed,
    grouped_dense,
    layernorm_dense,
    layernorm_mlp,
)
from fp8kit_jax import nnx as of_nnx
from fp8kit_jax.flax import DenseGeneral

import fp8kit as fk
from fp8kit import recipe
from fp8kit.errors import ArgumentError, RecipeError
from fp8kit.formats import E4M3
from fp8kit.quantization import AmaxHistory, Quantizer
from fp8kit.recipes import named
from tests.adapters.jax.filled import filled

X = jnp.asarray(np.random.default_rng(0).standard_normal((32, 64)), jnp.float32)


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        return DenseGeneral(16, name="head")(DenseGeneral(48, name="body")(x))


def test_flax_modules_by_their_paths() -> None:
    model = Model()
    params = linen.unbox(filled(model.init, jax.random.key(0), X))
    how = recipe.PerLayer(named("mxfp8"), (("head", None),))

    def run(rule):
        with autocast(enabled=rule is not None, recipe=rule):
            return jax.jit(model.apply)(params, X)

    body, head = (
        (own["kernel"], own["bias"]) for own in (params["params"][name] for name in ("body", "head"))
    )
    with autocast(enabled=True, recipe=named("mxfp8")):
        first = dense(X, *body)
    expected = dense(first, *head)
    np.testing.assert_array_equal(run(how), expected)
    assert not np.array_equal(run(None), expected)
    assert not np.array_equal(run(named("mxfp8")), expected)


def test_functions_by_their_names() -> None:
    asked = set()

    def factory(role: recipe.QuantizerRole) -> Quantizer | None:
        asked.add((role.module, role.name))
        return None if role.gemm == "fprop" else named("mxfp8").quantization.x

    kernel = jnp.asarray(np.random.default_rng(1).standard_normal((64, 48)), jnp.float32)

    def loss(x, rule):
        with autocast(enabled=rule is not None, recipe=rule):
            return dense(x, kernel).sum()

    how = recipe.CustomRecipe(factory)
    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, grad = jax.jit(lambda x: jax.value_and_grad(loss)(x, how))(X)
    plain, whole = (step(X, rule) for rule in (None, named("mxfp8")))
    assert asked == {("dense", "")}
    assert value == plain[0]
    np.testing.assert_array_equal(grad, whole[1])


def test_the_name_of_grouped_products() -> None:
    kernel = jnp.asarray(np.random.default_rng(1).standard_normal((2, 64, 48)), jnp.float32)
    sizes, asked = jnp.array([20, 12], jnp.int32), set()

    def factory(role: recipe.QuantizerRole) -> Quantizer | None:
        asked.add((role.module, role.name))
        return None if role.name == "experts" else Quantizer(E4M3)

    def run(rule, name):
        with autocast(enabled=rule is not None, recipe=rule):
            return grouped_dense(X, kernel, sizes, name=name)

    exact, low = run(None, None), run(named("current"), None)
    custom, rules = recipe.CustomRecipe(factory), recipe.PerLayer(named("current"), (("experts", None),))
    for how in (custom, rules):
        np.testing.assert_array_equal(run(how, "experts"), exact)
    np.testing.assert_array_equal(run(rules, "other"), low)
    assert not np.array_equal(low, exact)
    assert asked == {("grouped_dense", "experts")}
    with pytest.raises(ArgumentError, match="grouped_dense: name: got 3"):
        run(None, 3)


def test_names_that_functions_are_called_with() -> None:
    asked = set()

    def factory(role: recipe.QuantizerRole) -> Quantizer | None:
        asked.add((role.module, role.name))
        return None if role.name == "last" else named("mxfp8").quantization.x

    k1, k2 = (jnp.asarray(a) for a in np.random.default_rng(1).standard_normal((2, 64, 64), np.float32))
    gamma = jnp.ones(64)
    custom = recipe.CustomRecipe(factory)
    for how in (custom, recipe.PerLayer(named("mxfp8"), (("last", None),))):
        for own in (None, create_set(how)):  # of the autocast, and of the set that is handed over
            with autocast(enabled=own is None, recipe=how):
                first = dense(X, k1, quantizer_set=own, name="first")
                last = dense(X, k1, quantizer_set=own, name="last")
                mlp = layernorm_mlp(
                    X,
                    gamma,
                    None,
                    (k1[:, None], k2),
                    norm_type="rmsnorm",
                    quantizer_sets=(own, own),
                    name="last",
                )
                normed = layernorm_dense(X, k1, gamma, None, None, "rmsnorm", quantizer_set=own, name="last")
            np.testing.assert_array_equal(last, dense(X, k1))
            plain = layernorm_mlp(X, gamma, None, (k1[:, None], k2), norm_type="rmsnorm")
            np.testing.assert_array_equal(mlp, plain)
            np.testing.assert_array_equal(normed, layernorm_dense(X, k1, gamma, None, None, "rmsnorm"))
            np.testing.assert_array_equal(first, dense(X, k1, quantizer_set=create_set(named("mxfp8"))))
    assert asked == {
        ("dense", "first"),
        *((op, "last") for op in ("dense", "layernorm_dense", "layernorm_mlp")),
    }
    with autocast(enabled=True, recipe=custom), pytest.raises(ArgumentError, match="name: got"):
        dense(X, k1, name=["first"])
    late = recipe.CustomRecipe(lambda role: None, history=AmaxHistory(448.0, 448.0))
    with pytest.raises(RecipeError, match="'last' without state"):
        dense(X, k1, quantizer_set=create_set(late), name="last")


def test_nnx_modules_by_the_names_that_they_were_given() -> None:
    """Layers have the recipe, and the state, of their names; jitted as eager."""
    delayed = recipe.DelayedScaling(amax_history_len=4)
    how = recipe.PerLayer(named("mxfp8"), (("first", delayed), ("blocks.1", None)))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.first = of_nnx.DenseGeneral(64, 48, rngs=rngs)
            self.blocks = nnx.List([of_nnx.DenseGeneral(48, 48, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    with autocast(enabled=True, recipe=how):
        model = Stack(nnx.Rngs(0))
        with pytest.raises(RecipeError, match="name_layers"):
            model(X)
        assert of_nnx.name_layers(model) is model
        found = model(X)
        np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(model, X), found)
        metas = jax.tree.leaves(nnx.state(model, of_nnx.Fp8Meta))
        of_nnx.name_layers(model)  # keeps what there is
    assert len(metas) == len(jax.tree.leaves(nnx.state(model, of_nnx.Fp8Meta))) == 6
    kernels = [each.kernel[...] for each in (model.first, *model.blocks)]
    y = X
    for kernel, rule in zip(kernels, (delayed, named("mxfp8"), None), strict=True):
        with autocast(enabled=rule is not None, recipe=rule):
            y = dense(y, kernel, quantizer_set=create_set(rule) if rule is delayed else None)
    np.testing.assert_array_equal(found, y)
    with pytest.raises(ArgumentError, match="a list"):
        of_nnx.name_layers([])


def test_a_native_run_repeats_the_draws_of_a_key() -> None:
    """The n-th layer that draws has the key folded with n."""
    how, key = recipe.NVFP4BlockScaling(), jax.random.key(3)
    x, *kernels = (np.random.default_rng(i).standard_normal((64, 64)).astype(np.float32) for i in range(3))

    def loss(kernels):
        with autocast(True, how, rng=key):
            return (dense(dense(x, kernels[0]), kernels[1]) ** 2).sum() / 2

    layers = [fk.nn.Linear(64, 64, bias=False, device="cpu") for _ in kernels]
    for layer, kernel in zip(layers, kernels, strict=True):
        layer.weight.numpy()[...] = kernel.T
    numbers = itertools.count(1)
    with fk.draw_from(
        lambda device: fk.tensor(dropout_seed(jax.random.fold_in(key, next(numbers))), device=device)
    ):
        with fk.autocast(recipe=how):
            y = layers[1](layers[0](fk.tensor(x)))
        y.backward(y.numpy())
    for layer, found in zip(layers, jax.jit(jax.grad(loss))(kernels), strict=True):
        np.testing.assert_array_equal(np.asarray(found).T, layer.weight.grad.numpy())
    assert next(numbers) == 3
