"""Which implementation is preferred, and which are forbidden. Policies are values; blocks put one in force.

A policy is read when an operation's plan is made and travels with it from forward to backward, so that a
backward pass that runs on another thread makes the same choice.

A block holds for its thread, or, within asyncio, for its task: the policy in force is a ``ContextVar``.
``torch.compile`` cannot call one, but it reads, and guards, what a property gives whose getter is a builtin:
``traced_policy``.
"""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fp8kit import settings
from fp8kit.arguments import flag
from fp8kit.arrays import Device
from fp8kit.backends.protocol import KERNELS, SERVES
from fp8kit.backends.registry import IN_TREE, LOCK, Kind, OpImpl, are_names, match_token, want_kernel
from fp8kit.errors import BackendError, on_behalf_of

PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE = VALID_PREFER_VALUES = (
    Kind.DEFAULT.value,
    Kind.VENDOR.value,
    Kind.REFERENCE.value,
)


@dataclass(frozen=True)
class SelectionPolicy:
    """How implementations are chosen.

    * ``prefer``: kind tried first: "default", "vendor" or "reference"; the others follow by priority.
    * ``strict``: only the first choice; when it cannot take a call, that is the caller's error.
    * ``allow_vendors``, ``deny_vendors``: by vendor name, upper or lower case; deny wins. None allows all.
    * ``per_op``: ``((kernel, (token, ...)), ...)`` or a mapping; a token is a kind, ``vendor:NAME`` or
      ``impl:ID``. They replace the order: what no token means is left out.
    * ``backend``: an engine. One of fp8kit's own ("reference", "cuda") alone may be used then; a plugin's
      goes first in what it implements, the others of its devices fill in. None for all.
    * ``deterministic``: only algorithms that give the same bits every time.
    * ``overrides``: ``((kernel, OpImpl), ...)``: implementations that take the place of every other one of
      their kernel, on the devices that they name. Of several for one kernel and device the last counts.

    BackendError for a kernel that the contract does not have, an unknown token or kind. ``text`` says
    the policy as a string, for compiled programs; see ``policy_from_text``.
    """

    prefer: str = PREFER_VENDOR
    strict: bool = False
    allow_vendors: frozenset[str] | None = None
    deny_vendors: frozenset[str] = frozenset()
    per_op: tuple[tuple[str, tuple[str, ...]], ...] = ()
    backend: str | None = None
    deterministic: bool = False
    overrides: tuple[tuple[str, OpImpl], ...] = ()
    text: str = field(init=False, compare=False, repr=False)
    # the process's kernels under it
    chosen: dict[Device, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefer", _kind("prefer", self.prefer))
        for name in ("strict", "deterministic"):
            value = flag("SelectionPolicy", name, getattr(self, name), BackendError)
            object.__setattr__(self, name, value)
        for name in ("allow_vendors", "deny_vendors"):
            object.__setattr__(self, name, _vendors(name, getattr(self, name)))
        object.__setattr__(
            self,
            "per_op",
            tuple((name, _tokens(name, tokens)) for name, tokens in _pairs("per_op", self.per_op)),
        )
        object.__setattr__(self, "overrides", _pairs("overrides", self.overrides))
        if self.backend is not None and not isinstance(self.backend, str):
            raise BackendError("SelectionPolicy", "backend", repr(self.backend), "an engine's name, or None")
        for name, impl in self.overrides:
            if not isinstance(impl, OpImpl) or impl.op_name != name:
                raise BackendError(
                    "SelectionPolicy", "overrides", f"{name!r}: {impl!r}", "an OpImpl of that kernel"
                )
        object.__setattr__(self, "text", _text(self))

    def __reduce__(self) -> Any:
        return policy_from_text, (self.text,)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None = None, /, **more: Any) -> SelectionPolicy:
        """Returns a policy from plain values (a configuration file): the fields by name, ``per_op_order``
        another name of ``per_op``. BackendError for a name that is no field."""
        given = {**(values or {}), **more}
        if "per_op_order" in given:
            given["per_op"] = given.pop("per_op_order")
        known = [item.name for item in fields(cls) if item.init]
        wrong = sorted(set(given) - set(known))
        if wrong:
            raise BackendError(
                "SelectionPolicy", "from_dict", ", ".join(wrong), f"some of {', '.join(known)}"
            )
        return cls(**given)

    def fingerprint(self) -> str:
        """Returns the policy as a string: equal for equal policies (of one process, where there are
        overrides)."""
        return _intern(self).text

    def refuses(self, impl: OpImpl) -> str | None:
        """Why this policy forbids an implementation, or None."""
        if self.backend in IN_TREE and impl.engine != self.backend:
            return f"use_backend({self.backend!r}) is in force"
        vendor = None if impl.vendor is None else impl.vendor.casefold()
        if vendor is not None and vendor in self.deny_vendors:
            return f"vendor {impl.vendor!r} is denied"
        if vendor is not None and self.allow_vendors is not None and vendor not in self.allow_vendors:
            return f"vendor {impl.vendor!r} is not among the allowed"
        if self.deterministic and not impl.deterministic:
            return "fk.deterministic is in force, and it may give other bits in another run"
        return None

    def order(self, op_name: str, impls: list[OpImpl]) -> list[OpImpl]:
        """Returns the implementations in the order to try them; those that ``per_op`` does not name are left
        out. ``impls`` come by priority."""
        tokens = dict(self.per_op).get(op_name)
        if tokens is None:
            return sorted(impls, key=lambda i: (i.engine != self.backend, i.kind.value != self.prefer))
        return list(dict.fromkeys(impl for token in tokens for impl in impls if match_token(impl, token)))


def _kind(name: str, value: Any) -> str:
    known = settings.KIND_ALIASES.get(value, value) if isinstance(value, str) else value
    known = known.value if isinstance(known, Kind) else known
    if known not in VALID_PREFER_VALUES:
        raise BackendError("SelectionPolicy", name, repr(value), f"one of {', '.join(VALID_PREFER_VALUES)}")
    return str(known)


def _vendors(name: str, value: Any) -> frozenset[str] | None:
    if value is None and name == "allow_vendors":
        return None
    if not are_names(value):
        raise BackendError("SelectionPolicy", name, repr(value), "a set of vendors' names")
    return frozenset(vendor.casefold() for vendor in value)


def _pairs(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise BackendError("SelectionPolicy", name, repr(value), "a mapping by kernel, or pairs")
    return tuple((kernel, said) for kernel, said in pairs)


def _tokens(op_name: str, tokens: Any) -> tuple[str, ...]:
    if not isinstance(tokens, list | tuple) or not tokens or not are_names(tokens):
        raise BackendError(
            "SelectionPolicy", "per_op", f"{op_name}={tokens!r}", "a tuple of one token or more"
        )
    return tuple(_token(op_name, token) for token in tokens)


def _token(op_name: str, token: str) -> str:
    if op_name in SERVES:
        wanted = f"{' or '.join(SERVES[op_name])}: a workspace goes with its kernel"
        raise BackendError("SelectionPolicy", "per_op", repr(op_name), wanted)
    want_kernel("SelectionPolicy", "per_op", op_name)
    kind, _, name = token.partition(":")
    known = settings.KIND_ALIASES.get(token, token)
    if known in VALID_PREFER_VALUES or (kind in ("vendor", "impl") and name):
        return known
    raise BackendError(
        "SelectionPolicy", "per_op", repr(token), f"{', '.join(VALID_PREFER_VALUES)}, vendor:NAME or impl:ID"
    )


# --- policies as texts --------------------------------------------------------------------------------------

# those with overrides: functions have no text
_BY_TEXT: weakref.WeakValueDictionary[str, SelectionPolicy] = weakref.WeakValueDictionary()
_KEPT: dict[str, SelectionPolicy] = {}  # of these, what compiled programs name
_KEPT_LIMIT = 1024


def _text(policy: SelectionPolicy) -> str:
    said: dict[str, Any] = {}
    for item in fields(SelectionPolicy):
        value = getattr(policy, item.name, None)
        if item.init and item.name != "overrides" and value != item.default:
            said[item.name] = sorted(value) if isinstance(value, frozenset) else value
    if policy.overrides:
        said["overrides"] = uuid.uuid4().hex
    text = json.dumps(said, separators=(",", ":"))
    if policy.overrides:
        _BY_TEXT[text] = policy
    return text


def policy_from_text(text: str) -> SelectionPolicy:
    """Returns the policy whose ``text`` this is. One with overrides is known to the process that made it only
    (or one forked from it), and kept from now on, the last 1024 of them: BackendError for another."""
    said = json.loads(text)
    if "overrides" not in said:
        return _intern(SelectionPolicy.from_dict(said))
    with LOCK:
        policy = _KEPT.get(text) or _BY_TEXT.get(text)
        if policy is None:
            wanted = "overrides of this process that are still kept: compile anew"
            raise BackendError("policy", "overrides", said["overrides"], wanted)
        _KEPT[text] = policy
        if len(_KEPT) > _KEPT_LIMIT:
            del _KEPT[next(iter(_KEPT))]
        return policy


# --- the policy in force ------------------------------------------------------------------------------------


# of the innermost block
_CURRENT: ContextVar[SelectionPolicy | None] = ContextVar("fp8kit_policy", default=None)


class _Task:
    """Its ``policy`` is the value of ``_CURRENT``, which torch.compile can read so; inside no block it is the
    object itself, which ``_CURRENT.get`` takes for the default."""

    policy: Any = property(_CURRENT.get)


_task = _Task()
_INTERNED: dict[SelectionPolicy, SelectionPolicy] = {}
# of the policies that were used last: one that has left is a new object at its next use, whose kernels are
# chosen anew
_INTERNED_LIMIT = 256
_GLOBAL: SelectionPolicy | None = None
# thread -> what a Switch will make the process's, unless it is entered as a block
_PENDING: dict[int, SelectionPolicy] = {}


def _intern(policy: SelectionPolicy) -> SelectionPolicy:
    """Returns the one object of all equal policies, so that caches can be keyed by identity. BackendError if
    it is not a policy."""
    if not isinstance(policy, SelectionPolicy):
        raise BackendError("policy", "policy", repr(policy), "a SelectionPolicy")
    with LOCK:
        known = _INTERNED.pop(policy, policy)
        _INTERNED[known] = known  # the last used stands last
        if len(_INTERNED) > _INTERNED_LIMIT:
            del _INTERNED[next(iter(_INTERNED))]
        return known


def policy_from_env() -> SelectionPolicy:
    """Returns the policy that the FP8KIT_* variables describe. Fp8kitError for an invalid value."""
    with on_behalf_of("environment", per_op=settings.assigned().get("PER_OP", ("FP8KIT_PER_OP",))[0]):
        return SelectionPolicy(
            settings.prefer(),
            settings.strict(),
            settings.allow_vendors(),
            settings.deny_vendors(),
            settings.per_op(KERNELS),
            deterministic=settings.deterministic(),
        )


def get_policy() -> SelectionPolicy:
    """Returns the policy in force: the innermost block's of this thread or task, else the process's."""
    policy = _CURRENT.get()
    if policy is not None:
        return policy
    if _PENDING:
        _make_global(threading.get_ident())
    return _GLOBAL or process_policy()


def process_policy() -> SelectionPolicy:
    """Returns the process's policy: the environment's, where none was set."""
    if _GLOBAL is None:
        reset_global_policy()
    assert _GLOBAL is not None
    return _GLOBAL


def traced_policy() -> SelectionPolicy | None:
    """Returns the policy in force for code under ``torch.compile``; None where it is the process's and has
    not been read yet."""
    policy = _task.policy
    return policy if isinstance(policy, SelectionPolicy) else _GLOBAL


def set_global_policy(policy: SelectionPolicy) -> None:
    """Make ``policy`` the process's."""
    global _GLOBAL
    _GLOBAL = _intern(policy)


def reset_global_policy() -> None:
    """Forget what was set: the environment is read again."""
    set_global_policy(policy_from_env())


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Put ``policy`` in force for a block, on this thread or in this asyncio task."""
    before, inside = _CURRENT.get(), _intern(policy)
    _CURRENT.set(inside)
    try:
        yield inside
    finally:
        _CURRENT.set(before)


def _changed(**changes: Any) -> AbstractContextManager[SelectionPolicy]:
    return policy_context(replace(get_policy(), **changes))


def with_strict_mode() -> AbstractContextManager[SelectionPolicy]:
    """For a block, the policy in force but strict: only first choices."""
    return _changed(strict=True)


def with_preference(prefer: str) -> AbstractContextManager[SelectionPolicy]:
    """For a block, the policy in force but with another preferred kind: "default", "vendor" or
    "reference"."""
    return _changed(prefer=prefer)


def with_allowed_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """For a block, the policy in force but with these vendors alone allowed."""
    return _changed(allow_vendors=frozenset(vendors))


def with_denied_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """For a block, the policy in force with these vendors denied as well."""
    return _changed(deny_vendors=get_policy().deny_vendors | set(vendors))


def _make_global(thread: int, only: SelectionPolicy | None = None) -> None:
    """What a Switch of this thread asked for was not for a block: it is the process's now."""
    policy = _PENDING.get(thread)
    if policy is not None and (only is None or policy is only):
        _PENDING.pop(thread, None)
        set_global_policy(policy)


class Switch:
    """A change of the policy that holds from now on, or, used with ``with``, until the block ends.

    Within a block it holds until that block ends. Elsewhere it is the process's: as soon as the object is
    gone or its thread asks for the policy, not before, so that other threads never see what ``with`` puts in
    force for one.
    """

    def __init__(self, **changes: Any) -> None:
        self._before = get_policy()
        self._policy = _intern(replace(self._before, **changes))
        self._thread = threading.get_ident()
        self._blocks: list[SelectionPolicy | None] = []
        self._outside = _CURRENT.get()
        if self._outside is not None:
            _CURRENT.set(self._policy)
        else:
            _PENDING[self._thread] = self._policy

    def __del__(self) -> None:
        _make_global(self._thread, self._policy)

    def __enter__(self) -> None:
        if _PENDING.get(self._thread) is self._policy:
            del _PENDING[self._thread]
        elif self._outside is None and _GLOBAL is self._policy:
            set_global_policy(self._before)  # asked for in between, but for a block after all
        self._blocks.append(self._outside)
        _CURRENT.set(self._policy)

    def __exit__(self, *exc: object) -> None:
        _CURRENT.set(self._blocks.pop())
