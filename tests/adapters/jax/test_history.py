"""JAX's update of a slot has the bits of the kernel, by every rule."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fp8kit_jax.state import Slot, updated

import fp8kit as fk
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.recipe import UNFILLED
from fp8kit.testing import assert_same_bits

SPECIAL = np.array([0, np.inf, np.nan, 1e-30, 1e30, 3e38], np.float32)


@pytest.mark.parametrize(
    ("growth", "by_window"), [(None, False), (None, True), (0.0, False), (0.37, False), (3e38, False)]
)
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_bits_of_the_kernel(length: int, power_2: bool, growth: float | None, by_window: bool) -> None:
    random, many = np.random.default_rng(length), 60
    history = np.abs(random.standard_normal((length, many))).astype(np.float32)
    history[:, ::3] = random.choice(SPECIAL, history[:, ::3].shape)
    history[1:, 1::3] = 0
    if by_window:
        history[1:2, 2::6] = UNFILLED
    scale = np.full(many, 3, np.float32)
    parts = [fk.tensor(v.copy(), device="cpu").view for v in (scale, 1 / scale, history)]
    rule = 1, False, power_2, growth, by_window
    dispatch.kernels(CPU).update_delayed_(*[[part] for part in parts], [448.0], *rule, 0)
    step = jax.jit(jax.vmap(lambda s, h, a: updated(Slot(s, h), a, 448.0, *rule)))
    found = step(scale[:, None], history.T, history[0][:, None])
    want, rows = parts[0].numpy(), parts[2].numpy()
    assert_same_bits("scale", np.asarray(found.scale)[:, 0], want)
    rolled = np.asarray(found.amax_history).T.copy()
    # the slot's row 0 is free, the kernel's, of a tensor that was not used, is 0
    assert_same_bits("history", rolled, rows)
