"""The proof that the contract serves three doors: the same operation, delayed scaling included, gives the
same bits through each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit.testing import assert_same_bits

from .doors import Problem, native_steps

Steps = list[dict[str, np.ndarray[Any, Any]]]


@pytest.fixture(scope="module")
def native() -> Steps:
    return native_steps(Problem())


def same(got: Steps, want: Steps) -> None:
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.keys() == b.keys()
        for name in b:
            assert_same_bits(f"step {step}: {name}", a[name], b[name])


def test_the_problem_exercises_delayed_scaling(native: Steps) -> None:
    """Scales move every step, in both directions, so that a stale or a lost state would show in the
    results."""
    for name in ("x_scale", "w_scale", "g_scale"):
        assert native[0][name][0] != 1.0
    assert len({float(s["x_scale"][0]) for s in native}) == len(native)
    assert native[-1]["g_history"][1:].min() > 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch(native: Steps, compiled: bool) -> None:
    from . import torch_door

    same(torch_door.steps(Problem(), compiled), native)


def test_jax_inside_jit(native: Steps) -> None:
    from . import jax_door

    same(jax_door.steps(Problem()), native)
