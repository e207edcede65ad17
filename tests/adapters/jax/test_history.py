"""JAX's update of a slot has the bits of the kernel, by every rule."""

from __future__ import annotations

import jax
import numpy as np
from fp8kit_jax.state import Slot, updated

import fp8kit as fk
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.recipe import UNFILLED
from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations

SPECIAL = np.array([0, np.inf, np.nan, 1e-30, 1e30, 3e38], np.float32)


@combinations(
    {
        "length": [1, 2, 7],
        "power_2": [False, True],
        "rule": {
            "largest": (None, False),
            "by window": (None, True),
            "growth 0": (0.0, False),
            "growth": (0.37, False),
            "growth beyond float32": (3e38, False),
        },
    }
)
def test_the_bits_of_the_kernel(length: int, power_2: bool, rule: tuple[float | None, bool]) -> None:
    growth, by_window = rule
    random, many = np.random.default_rng(length), 60
    history = np.abs(random.standard_normal((length, many))).astype(np.float32)
    history[:, ::3] = random.choice(SPECIAL, history[:, ::3].shape)
    history[1:, 1::3] = 0
    if by_window:
        history[1:2, 2::6] = UNFILLED
    scale = np.full(many, 3, np.float32)
    parts = [fk.tensor(v.copy(), device="cpu").view for v in (scale, 1 / scale, history)]
    fields = 1, False, power_2, growth, by_window
    dispatch.kernels(CPU).update_delayed_(*[[part] for part in parts], [448.0], *fields, 0)
    step = jax.jit(jax.vmap(lambda s, h, a: updated(Slot(s, h), a, 448.0, *fields)))
    found = step(scale[:, None], history.T, history[0][:, None])
    want, rows = parts[0].numpy(), parts[2].numpy()
    assert_same_bits("scale", np.asarray(found.scale)[:, 0], want)
    rolled = np.asarray(found.amax_history).T.copy()
    # the slot's row 0 is free, the kernel's, of a tensor that was not used, is 0
    assert_same_bits("history", rolled, rows)
