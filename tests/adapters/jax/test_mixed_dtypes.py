"""Parameters of another dtype than x's: rounded to x's first, their gradients in their own dtype."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8kit.errors import Fp8kitError
from fp8kit.recipe import Float8CurrentScaling
from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations


def draw(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


W = draw(1, 32, 48), draw(2, 48)
NORM = draw(3, 32), draw(4, 32)
MLP = draw(5, 32, 2, 16), draw(6, 16, 32)
SIZES = jnp.array([5, 11], jnp.int32)
CASES = {
    "dense": (lambda x, w, b: fj.dense(x, w, b), W),
    "layernorm_dense": (lambda x, w, b, g, s: fj.layernorm_dense(x, w, g, s, b), (*W, *NORM)),
    "layernorm": (fj.layernorm, NORM),
    "layernorm_mlp": (
        lambda x, g, k1, k2: fj.layernorm_mlp(
            x, g, None, (k1, k2), norm_type="rmsnorm", activation_type=("silu", "linear")
        ),
        (NORM[0], *MLP),
    ),
    "grouped_dense": (
        lambda x, w, b: fj.grouped_dense(x, w, SIZES, bias=b),
        (draw(7, 2, 32, 8), draw(8, 2, 8)),
    ),
    "xielu": (
        lambda x, p, n: fj.activation(x.reshape(16, 1, 32), ("xielu",), alphas=(p, n)),
        (draw(9, 1), draw(10, 1)),
    ),
}


@combinations({"name": CASES.keys(), "enabled": {"high": False, "FP8": True}})
def test_parameters_of_float32_beside_bfloat16(name, enabled):
    function, parameters = CASES[name]
    x = draw(0, 16, 32).astype(jnp.bfloat16)

    @jax.jit
    def step(parameters):
        with fj.autocast(enabled, Float8CurrentScaling()):
            y, back = jax.vjp(lambda *own: function(x, *own), *parameters)
            return y, back(y)

    y, grads = step(parameters)
    want, rounded = step([a.astype(jnp.bfloat16) for a in parameters])
    assert y.dtype == jnp.bfloat16
    assert_same_bits("y", np.asarray(y), np.asarray(want))
    for grad, other in zip(grads, rounded, strict=True):
        assert grad.dtype == jnp.float32
        assert_same_bits("gradient", np.asarray(grad), np.asarray(other.astype(jnp.float32)))


def test_what_stays_refused():
    x = draw(0, 16, 32)
    assert fj.dense(x, W[0].astype(jnp.float16)).dtype == jnp.float32
    with pytest.raises(Fp8kitError, match=r"dense: residual: got bfloat16, expected float32"):
        fj.dense(x, W[0], residual=jnp.zeros((16, 48), jnp.bfloat16))
    with pytest.raises(Fp8kitError, match=r"dense: kernel: got int32, expected float32"):
        fj.dense(x, W[0].astype(jnp.int32))
