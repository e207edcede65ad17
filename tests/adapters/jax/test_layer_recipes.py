"""Recipes by layer in JAX: Flax's modules by their paths, functions by their names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from fp8kit_jax import autocast, dense
from fp8kit_jax.flax import DenseGeneral

from fp8kit import recipe
from fp8kit.quantization import Quantizer
from fp8kit.recipes import named

X = jnp.asarray(np.random.default_rng(0).standard_normal((32, 64)), jnp.float32)


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        return DenseGeneral(16, name="head")(DenseGeneral(48, name="body")(x))


def test_flax_modules_by_their_paths() -> None:
    model = Model()
    params = model.init(jax.random.key(0), X)
    how = recipe.PerLayer(named("mxfp8"), (("head", None),))

    def run(rule):
        with autocast(enabled=rule is not None, recipe=rule):
            return jax.jit(model.apply)(params, X)

    kernels = [params["params"][name]["kernel"] for name in ("body", "head")]
    with autocast(enabled=True, recipe=named("mxfp8")):
        first = dense(X, kernels[0])
    expected = dense(first, kernels[1])
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
    value, grad = jax.value_and_grad(loss)(X, how)
    plain, whole = (jax.value_and_grad(loss)(X, rule) for rule in (None, named("mxfp8")))
    assert asked == {("dense", "")}
    assert value == plain[0]
    np.testing.assert_array_equal(grad, whole[1])
