"""The NNX modules learn in FP8, their state handed on, and compute what the functions compute."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from fp8kit_jax import nnx as modules

from fp8kit import recipe
from fp8kit.testing import assert_same_bits

RECIPES = {"delayed": recipe.DelayedScaling(amax_history_len=4), "current": recipe.Float8CurrentScaling()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_transformer_layer_learns(name):
    x, want = (jax.random.normal(jax.random.key(i), (2, 8, 32)) for i in range(2))
    with fj.autocast(enabled=True, recipe=RECIPES[name]):
        model = modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0), use_bias=True)
        optimizer = nnx.Optimizer(model, optax.adam(2e-2), wrt=nnx.Param)

        def loss_fn(model, x):
            return jnp.mean((model(x) - want) ** 2)

        @nnx.jit
        def step(model, optimizer, x):
            wrt = nnx.DiffState(0, nnx.Any(nnx.Param, modules.Fp8Meta))
            loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, x)
            modules.update_fp8(model, grads)
            optimizer.update(model, nnx.filter_state(grads, nnx.Param))
            return loss

        losses = [float(step(model, optimizer, x)) for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    metas = jax.tree.leaves(nnx.state(model, modules.Fp8Meta))
    assert len(metas) == (4 * 6 if name == "delayed" else 0)
    if name == "delayed":
        amax = np.asarray(model.qkv.quantizers.grad_amax_history[...])
        assert (amax[1:] > 0).all()


def test_modules_are_the_functions():
    x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    with fj.autocast(enabled=True, recipe=RECIPES["delayed"]):
        sets = fj.create_set()
        module = modules.LayerNormDenseGeneral(32, (2, 24), rngs=nnx.Rngs(0), layernorm_type="rmsnorm")
        want = fj.layernorm_dense(x, module.kernel[...], module.norm.scale[...], None, None, "rmsnorm", quantizer_set=sets)
        assert_same_bits("y", np.asarray(module(x)), np.asarray(want))
    norm = modules.LayerNorm(32)
    assert_same_bits("norm", np.asarray(norm(x)), np.asarray(fj.layernorm(x, norm.scale[...], norm.ln_bias[...])))
