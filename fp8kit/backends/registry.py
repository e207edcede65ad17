"""The table of kernel implementations: who implements which kernel of the contract, for which devices."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from fp8kit.backends.protocol import KERNELS, signature
from fp8kit.errors import BackendError, meant
from fp8kit.formats import DTYPES
from fp8kit.settings import KIND_ALIASES

# one lock for all tables of implementations and policies: changes are rare and short
LOCK = threading.RLock()
# fork waits until no table is half changed. It holds the lock, and parent and child each release it
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class Kind(str, Enum):
    """What an implementation is: a default of its author's, a chip vendor's, or the portable reference."""

    DEFAULT = "default"
    VENDOR = "vendor"
    REFERENCE = "reference"


PRIORITY = {Kind.DEFAULT: 150, Kind.VENDOR: 100, Kind.REFERENCE: 50}
# fp8kit's own engines: the device kind of each
IN_TREE: Mapping[str, str] = MappingProxyType({"reference": "cpu", "cuda": "cuda"})


class CannotTake(BackendError):
    """An implementation's way to say: correct call, but not one that I can run. Raised before anything is
    written; the next is asked."""


def are_names(value: Any) -> bool:
    """Whether this is a collection of strings."""
    several = isinstance(value, Collection) and not isinstance(value, str)
    return several and all(isinstance(name, str) for name in value)


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one kernel.

    * ``op_name``: a name of the contract, ``fp8kit.backends.protocol.KERNELS``. ``fn``: has the contract's
      signature.
    * ``impl_id``: "engine.kernel", unique per kernel; ``engine``, what stands before the dot, is the name
      that ``fk.use_backend`` takes.
    * ``kind``, and ``vendor``, a name that Kind.VENDOR requires and policies allow or deny.
    * ``priority``: higher goes first among those of a kind (default by kind: 150, 100, 50).
    * ``supported_dtypes``: names of the dtypes of the kernel's first array that it takes; a call with another
      goes on to the next implementation. None: all.
    * ``min_arch``, ``max_arch``: least and greatest compute capability times ten (89, 90), on devices that
      have one. None: any.
    * ``devices``: device kinds that it runs on.
    * ``deterministic``: it gives the same bits for the same arguments every time; otherwise
      ``fk.deterministic`` leaves it out.

    BackendError for an unknown kernel or dtype, a VENDOR without a name, a ``fn`` that cannot be called.
    """

    op_name: str
    impl_id: str
    kind: Kind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int | None = None
    supported_dtypes: frozenset[str] | None = None
    min_arch: int | None = None
    devices: frozenset[str] = frozenset({"cpu"})
    deterministic: bool = True
    max_arch: int | None = None

    def __post_init__(self) -> None:
        def want(argument: str, fits: bool, wanted: str) -> None:
            if not fits:
                raise BackendError(
                    "OpImpl", argument, repr(getattr(self, argument)), f"{wanted} ({self.impl_id})"
                )

        engine, dot, own = str(self.impl_id).partition(".")
        fits = isinstance(self.impl_id, str) and bool(engine and dot and own)
        want("impl_id", fits, "a name with a dot: engine.kernel")
        want_kernel("OpImpl", "op_name", self.op_name)
        # a Kind, its value, or TransformerEngine-FL's own enumeration
        kind = str.__str__(self.kind) if isinstance(self.kind, str) else ""
        want("kind", KIND_ALIASES.get(kind, kind) in list(Kind), "a Kind")
        object.__setattr__(self, "kind", Kind(KIND_ALIASES.get(kind, kind)))
        want("fn", callable(self.fn), "a function")
        want("vendor", bool(self.vendor) or self.kind is not Kind.VENDOR, "a name, as it is of kind VENDOR")
        want("vendor", self.vendor is None or isinstance(self.vendor, str), "a name, or None")
        if self.priority is None:
            object.__setattr__(self, "priority", PRIORITY[self.kind])
        want("priority", type(self.priority) is int, "an int")
        for argument in ("min_arch", "max_arch"):
            value = getattr(self, argument)
            whole = value is None or type(value) is int
            want(argument, whole, "an int, the compute capability times ten, or None")
        if self.min_arch is not None and self.max_arch is not None:
            want("max_arch", self.max_arch >= self.min_arch, f"at least min_arch, {self.min_arch}")
        want("deterministic", isinstance(self.deterministic, bool), "True or False")
        for argument in ("supported_dtypes", "devices"):
            value = getattr(self, argument)
            if value is not None or argument == "devices":
                want(argument, are_names(value) and len(value) > 0, "a set of names, one at least")
                object.__setattr__(self, argument, frozenset(value))
        want(
            "supported_dtypes",
            not self.supported_dtypes or self.supported_dtypes <= set(DTYPES),
            f"some of {', '.join(DTYPES)}",
        )

    @property
    def engine(self) -> str:
        """The part of ``impl_id`` before the dot: the name that ``fk.use_backend`` takes."""
        return self.impl_id.partition(".")[0]

    def is_available(self) -> bool:
        """What ``fn._is_available()`` says where ``fn`` has such an attribute, else True."""
        ask = getattr(self.fn, "_is_available", None)
        return True if ask is None else bool(ask())


def want_kernel(operation: str, argument: str, name: Any) -> None:
    """BackendError where ``name`` is no kernel of the contract."""
    if not isinstance(name, str) or name not in KERNELS:
        wanted = f"a kernel of the contract, see `fp8kit plugins list`{meant(name, KERNELS)}"
        raise BackendError(operation, argument, repr(name), wanted)


def match_token(impl: OpImpl, token: str) -> bool:
    """Whether a token of ``SelectionPolicy.per_op`` means this implementation: a kind, ``vendor:NAME`` or
    ``impl:ID``."""
    kind, _, name = token.partition(":")
    if kind == "impl":
        return impl.impl_id == name
    if kind == "vendor" and name:
        return (impl.vendor or "").casefold() == name.casefold()
    return impl.kind.value == KIND_ALIASES.get(token, token)


def check_signature(op_name: str, impl_id: str, fn: Callable[..., Any]) -> None:
    """BackendError that names both signatures where ``fn`` cannot be called as the contract calls
    ``op_name``: the contract's parameters by their names and in their order, or ``*args`` from some point on;
    more only with defaults."""
    wanted = list(signature(op_name).parameters)
    try:
        own = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        wanted_function = f"a function whose signature can be read ({error})"
        raise BackendError("register_impl", "fn", f"{fn!r} of {impl_id}", wanted_function) from None
    given = own.parameters.values()
    names = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    fits = names[: len(wanted)] == wanted[: len(names)]
    try:
        own.bind(*wanted)
    except TypeError:
        fits = False
    if not fits:
        raise BackendError(
            "register_impl", "fn", f"{impl_id}{own}", f"the contract's {op_name}({', '.join(wanted)})"
        )


@dataclass(frozen=True)
class OpRegistrySnapshot:
    """A registry's contents at one moment: kernel -> its implementations, as ``get_implementations`` orders
    them."""

    impls_by_op: Mapping[str, tuple[OpImpl, ...]]


class OpRegistry:
    """Implementations by kernel. Thread-safe; ``version`` grows with every change, and who keeps choices is
    told."""

    def __init__(self) -> None:
        self._impls: dict[str, dict[str, OpImpl]] = {}
        self._forget: list[Callable[[], None]] = []
        self.version = 0
        self.restored = 0  # how often something was taken out: the same id may mean another function since

    def on_change(self, forget: Callable[[], None]) -> None:
        """Call ``forget()`` after each change from now on, before any other thread can see another one."""
        self._forget.append(forget)

    def _changed(self) -> None:
        self.version += 1
        for forget in self._forget:
            forget()

    def register_impl(self, impl: OpImpl) -> None:
        """Add one implementation. BackendError when its ``impl_id`` is taken for that kernel or its function
        has another signature than the contract's; nothing is added then."""
        if not isinstance(impl, OpImpl):
            raise BackendError("register_impl", "impl", repr(impl), "an OpImpl")
        check_signature(impl.op_name, impl.impl_id, impl.fn)
        with LOCK:
            known = self._impls.setdefault(impl.op_name, {})
            if impl.impl_id in known:
                raise BackendError(
                    "register_impl",
                    "impl_id",
                    repr(impl.impl_id),
                    f"one not yet registered for {impl.op_name}",
                )
            known[impl.impl_id] = impl
            self._changed()

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Add several implementations, all or none. BackendError as ``register_impl``."""
        with LOCK:
            before = self.snapshot()
            try:
                for impl in impls:
                    self.register_impl(impl)
            except BaseException:
                self.restore(before)
                raise

    def get_implementations(self, op_name: str) -> list[OpImpl]:
        """Every implementation of a kernel, highest priority first."""
        with LOCK:
            return sorted(
                self._impls.get(op_name, {}).values(), key=lambda i: (-(i.priority or 0), i.impl_id)
            )

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        """Returns the implementation of a kernel by its id, None where there is none."""
        with LOCK:
            return self._impls.get(op_name, {}).get(impl_id)

    def list_operators(self) -> list[str]:
        """Kernels that have an implementation."""
        with LOCK:
            return sorted(name for name, impls in self._impls.items() if impls)

    def engines(self) -> dict[str, frozenset[str]]:
        """Engines that have an implementation: name -> device kinds that they serve."""
        found: dict[str, frozenset[str]] = {}
        for impl in self.every():
            found[impl.engine] = found.get(impl.engine, frozenset()) | impl.devices
        return found

    def every(self) -> list[OpImpl]:
        """Every implementation of every kernel."""
        with LOCK:
            return [impl for name in self.list_operators() for impl in self.get_implementations(name)]

    def snapshot(self) -> OpRegistrySnapshot:
        """Returns what is registered now, as a value."""
        with LOCK:
            return OpRegistrySnapshot(
                MappingProxyType(
                    {name: tuple(self.get_implementations(name)) for name in self.list_operators()}
                )
            )

    def restore(self, snapshot: OpRegistrySnapshot) -> None:
        """Make the table what it was when ``snapshot`` was taken."""
        with LOCK:
            self._impls = {
                name: {impl.impl_id: impl for impl in impls} for name, impls in snapshot.impls_by_op.items()
            }
            self.restored += 1
            self._changed()

    def clear(self) -> None:
        """Forget every implementation, those of fp8kit's own engines too."""
        self.restore(OpRegistrySnapshot({}))
