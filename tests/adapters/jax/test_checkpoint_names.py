"""``quantization_checkpoint_name``: what a product keeps for backward has it for ``jax.checkpoint``."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from fp8kit_jax import flax as modules
from fp8kit_jax.primitive import call_p

from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing import assert_same_bits
from tests.adapters.jax.filled import filled
from tests.support.combinations import combinations

X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 32)), jnp.float32)
LAYERS = {
    "DenseGeneral": lambda **own: modules.DenseGeneral(48, **own),
    "LayerNormDenseGeneral": lambda **own: modules.LayerNormDenseGeneral(48, **own),
    "LayerNormMLP": lambda **own: modules.LayerNormMLP(64, **own),
}


def faces(jaxpr):
    """Those of the programs that a jaxpr calls. XLA for the CPU joins equal calls, with or without names."""
    for equation in jaxpr.eqns:
        if equation.primitive is call_p:
            yield equation.params["program"].face
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            yield from faces(inner) if hasattr(inner, "eqns") else ()


def gradients(layer, variables, policy):
    """A step of a recomputed layer: its gradients. How often its program calls fp8kit forward."""

    def function(variables, x):
        y = layer.apply(variables, x)
        return y[0] if isinstance(y, tuple) else y

    def loss(variables, x):
        return jax.checkpoint(function, policy=policy)(variables, x).sum()

    step = jax.value_and_grad(loss)
    found = list(faces(jax.make_jaxpr(step)(variables, X).jaxpr))
    assert found.count("backward") == 1
    return jax.jit(step), found.count("forward")


@combinations(
    {
        "name": LAYERS.keys(),
        "recipe": {"current": Float8CurrentScaling(), "delayed": DelayedScaling(amax_history_len=4)},
    },
    usual=["DenseGeneral-delayed", "LayerNormMLP-current"],
)
def test_what_is_kept_is_not_computed_again(name, recipe):
    keep = jax.checkpoint_policies.save_only_these_names("codes")
    with fj.autocast(True, recipe):
        layer = LAYERS[name](quantization_checkpoint_name="codes")
        variables = linen.unbox(filled(layer.init, jax.random.key(0), X))
        want, again = gradients(layer, variables, None)
        got, kept = gradients(layer, variables, keep)
        other = LAYERS[name](quantization_checkpoint_name="others")
        assert gradients(other, variables, keep)[1] == again
        assert (again, kept) == (2, 1)
        got, want = got(variables, X), want(variables, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(name, np.asarray(a), np.asarray(b))
