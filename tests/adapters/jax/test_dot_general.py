"""Flax's own Dense with the product of this package: the numbers of DenseGeneral, its state among them."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from fp8kit_jax import flax as modules

from fp8kit.errors import ArgumentError, RecipeError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations

NAME = fj.FP8_COLLECTION_NAME
X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 32)), jnp.float32)


@combinations(
    {
        "inside": {"recipe": True, "autocast": False},
        "recipe": {
            "delayed": DelayedScaling(amax_history_len=4),
            "current": Float8CurrentScaling(),
            "none": None,
        },
    }
)
def test_dense_computes_as_dense_general(recipe, inside):
    cls = modules.make_dot_general_cls(recipe if inside else None)
    plain, mine = nn.Dense(48, False, dot_general_cls=cls), modules.DenseGeneral(48, use_bias=False)

    def step(model, own):
        enabled = recipe is not None and not (own and inside)
        with fj.autocast(enabled=enabled, recipe=recipe):
            variables = model.init(jax.random.key(0), X)
            variables["params"] = {"kernel": jnp.full((32, 48), 0.1)}

            def loss(tree):
                return (model.apply(tree, X) ** 2).sum()

            state, gradient = dict(variables), jax.jit(jax.grad(loss))
            for _ in range(2):  # the second step has the first one's scales
                grads = gradient(state)
                if NAME in state:
                    state[NAME] = grads[NAME]
            return jax.jit(loss)(state), grads["params"], jax.tree.leaves(state.get(NAME, {}))

    found, wanted = step(plain, True), step(mine, False)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_same_bits("leaf", np.asarray(a), np.asarray(b))
    assert bool(found[2]) is isinstance(recipe, DelayedScaling)


def test_mixed_dtypes_and_what_is_refused():
    made = modules.make_dot_general_cls(Float8CurrentScaling())()
    summed = (((1,), (0,)), ((), ()))
    kernel = jnp.ones((32, 16), jnp.bfloat16)
    y, _ = made.init_with_output(jax.random.key(0), X, kernel, summed, preferred_element_type=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert made.init_with_output(jax.random.key(0), X, kernel, summed)[0].dtype == jnp.float32
    with pytest.raises(ArgumentError, match="batch"):
        made.init_with_output(jax.random.key(0), X[None], kernel[None], (((2,), (1,)), ((0,), (0,))))
    with pytest.raises(RecipeError, match="recipe"):
        modules.make_dot_general_cls("delayed")


def test_both_spellings_of_a_softmax_type():
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).standard_normal((2, 8, 2, 16)), jnp.float32) for i in range(3)
    )
    made = [
        fj.dot_product_attention(q, k, v, softmax_type=name)
        for name in ("off_by_one", "off-by-one", "vanilla")
    ]
    assert_same_bits("spellings", np.asarray(made[0]), np.asarray(made[1]))
    assert (np.asarray(made[0]) != np.asarray(made[2])).any()
    found = []
    for name in ("off_by_one", "off-by-one"):
        module = modules.DotProductAttention(16, 2, softmax_type=name)
        found.append(np.asarray(module.apply({}, q, k, v)))
    assert_same_bits("modules", *found)
