"""``divide`` against NumPy's float32 division, which IEEE 754 fixes bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax.division import divide
from fp8kit_jax.state import Slot, updated

from fp8kit.scaling import default_scale
from fp8kit.testing import assert_same_bits

FLT_MAX = np.finfo(np.float32).max
PLATFORMS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def numbers():
    draw = np.random.default_rng(0)
    # every positive finite number, subnormal ones included
    bits = draw.integers(1, 0x7F800000, 200_000, dtype=np.uint32)
    edges = np.array(
        [1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF], np.uint32
    )
    return np.concatenate([edges, bits]).view(np.float32)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("numerator", [448.0, 57344.0, 448 / 2**7, 1.0, 3.0000002384185791])
def test_every_quotient_is_rounded_to_nearest(platform, numerator):
    x = numbers()
    with np.errstate(over="ignore", under="ignore"):
        want = np.minimum(np.float32(numerator) / x, FLT_MAX)
    want[want < np.finfo(np.float32).tiny] = 0
    with jax.default_device(jax.devices(platform)[0]):
        assert_same_bits("quotient", np.asarray(jax.jit(divide, static_argnums=0)(numerator, x)), want)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("margin", [-20, 0, 9, 20])
def test_every_amax_gives_the_scale_of_the_other_frontends(platform, margin):
    amax = numbers()[:20_000]
    amax = amax[amax >= np.finfo(np.float32).tiny]  # XLA's CPU code takes others for 0
    with jax.default_device(jax.devices(platform)[0]):
        slot = Slot(jnp.full(1, 3, jnp.float32), jnp.zeros(2, jnp.float32))
        got = jax.jit(jax.vmap(lambda a: updated(slot, a, 448.0, margin, True).scale))(amax[:, None])
    assert_same_bits(
        "scale", np.asarray(got)[:, 0], default_scale(amax, np.full_like(amax, 3), 448.0, margin)
    )
