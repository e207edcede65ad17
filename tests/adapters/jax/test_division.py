"""``divide`` against NumPy's float32 division, which IEEE 754 fixes bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fp8kit_jax.division import divide

from fp8kit.testing import assert_same_bits

FLT_MAX = np.finfo(np.float32).max
PLATFORMS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def numbers():
    draw = np.random.default_rng(0)
    bits = draw.integers(1, 0x7F800000, 200_000, dtype=np.uint32)  # every positive finite number, subnormal ones included
    edges = np.array([1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF], np.uint32)
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
