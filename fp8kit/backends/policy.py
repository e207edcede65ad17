"""Which implementation is preferred, and which are forbidden. Policies are values; the one in force is per thread.

A policy is read when an operation's plan is made and travels with it from forward to backward, so that a backward pass that runs
on another thread makes the same choice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fp8kit import settings
from fp8kit.backends.registry import OpImpl


@dataclass(frozen=True)
class SelectionPolicy:
    """How implementations are chosen.

    * ``prefer``: kind tried first: "default", "vendor" or "reference"; the others follow by priority.
    * ``strict``: only the first choice; when it cannot take a call, that is the caller's error.
    * ``allow_vendors``, ``deny_vendors``: by vendor name; deny wins. None allows all.
    * ``per_op``: ``((kernel, (token, ...)), ...)``; a token is a kind, ``vendor:NAME`` or ``impl:ID``, and replaces the order.
    * ``backend``: engine that alone may be used ("reference", "cuda"), None for all.
    * ``deterministic``: only algorithms that give the same bits every time.
    * ``overrides``: ``((kernel, OpImpl), ...)``: implementations that take the place of every other one of their kernel, on the devices
      that they name. Of several for one kernel and device the last counts.
    """

    prefer: str = "vendor"
    strict: bool = False
    allow_vendors: frozenset[str] | None = None
    deny_vendors: frozenset[str] = frozenset()
    per_op: tuple[tuple[str, tuple[str, ...]], ...] = ()
    backend: str | None = None
    deterministic: bool = False
    overrides: tuple[tuple[str, OpImpl], ...] = ()

    def refuses(self, impl: OpImpl) -> str | None:
        """Why this policy forbids an implementation, or None."""
        if self.backend is not None and impl.engine != self.backend:
            return f"use_backend({self.backend!r}) is in force"
        if impl.vendor is not None and impl.vendor in self.deny_vendors:
            return f"vendor {impl.vendor!r} is denied"
        if impl.vendor is not None and self.allow_vendors is not None and impl.vendor not in self.allow_vendors:
            return f"vendor {impl.vendor!r} is not among the allowed"
        return None

    def order(self, op_name: str, impls: list[OpImpl]) -> list[OpImpl]:
        """The implementations in the order to try them; those that ``per_op`` does not name are left out."""
        tokens = dict(self.per_op).get(op_name)
        if tokens is None:
            return sorted(impls, key=lambda i: i.kind.value != self.prefer)
        return [impl for token in tokens for impl in impls if _matches(token, impl)]


def _matches(token: str, impl: OpImpl) -> bool:
    kind, _, name = token.partition(":")
    if kind == "impl":
        return impl.impl_id == name
    if kind == "vendor" and name:
        return impl.vendor == name
    return impl.kind.value == token


class _State(threading.local):
    stack: tuple[SelectionPolicy, ...] = ()


_STATE = _State()
_LOCK = threading.Lock()
_INTERNED: dict[SelectionPolicy, SelectionPolicy] = {}
_INTERNED_LIMIT = 256  # a policy that was forgotten is another object when it comes again, and is resolved again
_GLOBAL: SelectionPolicy | None = None


def _intern(policy: SelectionPolicy) -> SelectionPolicy:
    """Equal policies are one object, so that caches can be keyed by identity."""
    with _LOCK:
        known = _INTERNED.pop(policy, policy)
        _INTERNED[known] = known  # the last used stands last
        if len(_INTERNED) > _INTERNED_LIMIT:
            del _INTERNED[next(iter(_INTERNED))]
        return known


def policy_from_env() -> SelectionPolicy:
    """The policy that the FP8KIT_* variables describe."""
    return SelectionPolicy(
        settings.prefer(),
        settings.strict(),
        settings.allow_vendors(),
        settings.deny_vendors(),
        settings.per_op(),
        deterministic=settings.deterministic(),
    )


def get_policy() -> SelectionPolicy:
    """The policy in force on this thread: the innermost block's, else the process's."""
    global _GLOBAL
    stack = _STATE.stack
    if stack:
        return stack[-1]
    if _GLOBAL is None:
        _GLOBAL = _intern(policy_from_env())
    return _GLOBAL


def set_global_policy(policy: SelectionPolicy) -> None:
    """Make ``policy`` the process's."""
    global _GLOBAL
    _GLOBAL = _intern(policy)


def reset_global_policy() -> None:
    """Forget what was set: the environment is read again."""
    global _GLOBAL
    _GLOBAL = None


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Put ``policy`` in force on this thread for a block."""
    before = _STATE.stack
    _STATE.stack = (*before, _intern(policy))
    try:
        yield _STATE.stack[-1]
    finally:
        _STATE.stack = before


class Switch:
    """A change of the policy that holds from now on, for the process, or, used with ``with``, for this thread until the block ends."""

    def __init__(self, **changes: Any) -> None:
        global _GLOBAL
        self._outside = _STATE.stack
        self._before = get_policy()
        self._policy = _intern(replace(self._before, **changes))
        if self._outside:
            _STATE.stack = (*self._outside[:-1], self._policy)
        else:
            _GLOBAL = self._policy

    def __enter__(self) -> None:
        global _GLOBAL
        if not self._outside and _GLOBAL is self._policy:
            _GLOBAL = self._before  # a block concerns its own thread: two threads' blocks may end in any order
        _STATE.stack = (*self._outside, self._policy)

    def __exit__(self, *exc: object) -> None:
        _STATE.stack = self._outside
