"""The cache of bound operations, one for all frontends, and ``validate``, which checks a call without running
it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from fp8kit import slowness
from fp8kit.execution.bound import BoundOp
from fp8kit.execution.refusals import signature_of
from fp8kit.lru import LRU, SHAPES
from fp8kit.spec import Meta, Operation

P = TypeVar("P", bound=BoundOp)
plans: LRU[Any, BoundOp] = LRU(SHAPES, name="plans")
# equal specs -> how many plans were made for them; MANY: more than a model has equal layers
_equal: LRU[Any, int] = LRU(SHAPES, name="equal specs")
MANY = 1024
# -> the spec, held so that its identity stays its own
_validated: LRU[Any, Any] = LRU(SHAPES, name="validated calls")


def key_of(
    operation: Operation, spec: Any, needs: tuple[str, ...], kernels: Any, kinds: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The key of a plan. ``spec`` and ``kernels`` are compared by identity, which is faster than hashing
    their values; layers keep their specs, and the plan holds both. ``kinds``: the frontend's name, and name,
    shape, dtype and device of each input, in any hashable form. (A program of JAX's goes by the hash of its
    text, which says the same: ``fp8kit_jax.calls``.)"""
    return operation.name, id(spec), id(kernels), needs, kinds


def keep(key: Any, plan: P) -> P:
    """The new ``plan``, kept under its key. Warns where plan after plan is made for equal specs, which a
    caller makes anew at each call."""
    equal = tuple(plan.spec if part == id(plan.spec) else part for part in key)
    with suppress(TypeError):  # a spec of somebody's own that cannot be hashed
        if _equal.put(equal, (_equal.get(equal) or 0) + 1) == MANY:
            slowness.say(
                f"{plan.operation.name} has made {MANY} plans for equal specs",
                "a plan takes the host many times as long as a call",
                "make the spec once and pass the same object to each call",
            )
    plans.put(key, plan)
    return plan


def validate(operation: Operation, spec: Any, metas: Mapping[str, Meta], needs: tuple[str, ...] = ()) -> None:
    """Raise the error that ``infer`` raises for these inputs, and run nothing. A layer of several operations
    validates the later ones before it runs the first. Valid calls are remembered."""
    key = (operation.name, id(spec), needs, tuple(metas.items()))
    if _validated.get(key) is None:
        signature_of(operation, spec, metas, frozenset(needs))
        _validated.put(key, (spec,))
