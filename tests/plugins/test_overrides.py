"""A policy's overrides: what they take the place of, where, and that caches keyed by policies stay small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import CPU, Device
from fp8kit.backends import dispatch, manager, policy
from fp8kit.backends.policy import SelectionPolicy, get_policy, policy_context
from fp8kit.backends.registry import Kind, OpImpl


def _impl(value: float, devices: frozenset[str] = frozenset({"cpu"})) -> OpImpl:
    def add(a: Any, b: Any, out: Any, stream: int) -> None:
        out.numpy()[...] = value

    return OpImpl("add", f"override.{value}", Kind.DEFAULT, add, devices=devices)


def _sum(value: float = 1.0) -> float:
    ones = fk.tensor(np.full((2, 3), value, np.float32), device=CPU)
    return float((ones + ones).numpy()[0, 0])


def test_the_last_override_counts_where_it_serves_the_device() -> None:
    first, second, elsewhere = _impl(7.0), _impl(8.0), _impl(9.0, frozenset({"cuda"}))
    with policy_context(
        replace(get_policy(), overrides=(("add", first), ("add", second), ("add", elsewhere)))
    ):
        usable, refused = dispatch.candidates("add", CPU)
        assert usable == [second]
        assert {impl.impl_id: why for impl, why in refused if impl.engine != "cuda"} == {
            "override.9.0": "runs on cuda, not on cpu",
            "override.7.0": "a later fk.override is in force",
            "reference.add": "fk.override is in force",
        }
        assert _sum() == 8.0
        with policy_context(replace(get_policy(), overrides=())):
            assert _sum() == 2.0
    assert _sum() == 2.0


def test_an_override_goes_before_strict_vendors_and_order() -> None:
    wanted = SelectionPolicy(
        "reference",
        True,
        frozenset({"nobody"}),
        per_op=(("add", ("reference",)),),
        backend="reference",
        overrides=(("add", _impl(7.0)),),
    )
    assert [impl.impl_id for impl in dispatch.candidates("add", CPU, wanted)[0]] == ["override.7.0"]
    assert [impl.impl_id for impl in dispatch.candidates("copy", CPU, wanted)[0]] == ["reference.copy"]
    assert "override.7.0" not in [
        impl.impl_id for impl in dispatch.candidates("add", Device("cuda"), wanted)[0]
    ]


@pytest.mark.parametrize("count", [600])
def test_many_overrides_leave_small_caches(count: int) -> None:
    for value in range(count):
        with policy_context(replace(get_policy(), overrides=(("add", _impl(float(value))),))):
            dispatch.kernels(CPU)
    assert len(policy._INTERNED) <= policy._INTERNED_LIMIT
    assert len(dispatch.get_default_manager().table) <= manager._TABLE_LIMIT
