"""The table of kernel implementations: who implements which kernel of the contract, for which devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fp8kit.backends.protocol import KERNELS
from fp8kit.errors import BackendError, expected


class Kind(str, Enum):
    """What an implementation is: somebody's own default, a chip vendor's, or the portable truth."""

    DEFAULT = "default"
    VENDOR = "vendor"
    REFERENCE = "reference"


PRIORITY = {Kind.DEFAULT: 150, Kind.VENDOR: 100, Kind.REFERENCE: 50}


class CannotTake(BackendError):
    """An implementation's way to say: correct call, but not one that I can run. The next candidate is asked."""


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one kernel.

    ``op_name`` is a name of the contract; ``impl_id`` is "engine.kernel", unique per kernel; ``fn`` has the contract's signature;
    ``vendor`` is required for Kind.VENDOR; ``priority`` breaks ties (default by kind: 150, 100, 50); ``supported_dtypes`` are names of
    the first array's dtype that it takes (None: all); ``min_arch`` is the least compute capability times ten (89, 90); ``devices``
    are the device kinds it runs on.
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

    def __post_init__(self) -> None:
        if self.op_name not in KERNELS:
            raise BackendError(expected("OpImpl", "op_name", repr(self.op_name), "a kernel of fp8kit.backends.protocol.KERNELS"))
        if self.kind is Kind.VENDOR and not self.vendor:
            raise BackendError(expected("OpImpl", "vendor", self.vendor, f"a name: {self.impl_id} is of kind VENDOR"))
        if self.priority is None:
            object.__setattr__(self, "priority", PRIORITY[self.kind])

    @property
    def engine(self) -> str:
        """The part of ``impl_id`` before the dot: the name that ``fk.use_backend`` takes."""
        return self.impl_id.partition(".")[0]


class OpRegistry:
    """Implementations by kernel. Thread-safe; ``version`` grows with every change, so that resolved choices can be cached."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._impls: dict[str, dict[str, OpImpl]] = {}
        self.version = 0

    def register_impl(self, impl: OpImpl) -> None:
        """Add one implementation; BackendError when its ``impl_id`` is taken for that kernel."""
        with self._lock:
            known = self._impls.setdefault(impl.op_name, {})
            if impl.impl_id in known:
                raise BackendError(expected("register_impl", "impl_id", repr(impl.impl_id), f"one not yet registered for {impl.op_name}"))
            known[impl.impl_id] = impl
            self.version += 1

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Add several implementations."""
        for impl in impls:
            self.register_impl(impl)

    def get_implementations(self, op_name: str) -> list[OpImpl]:
        """Every implementation of a kernel, highest priority first."""
        with self._lock:
            return sorted(self._impls.get(op_name, {}).values(), key=lambda i: (-(i.priority or 0), i.impl_id))

    def list_operators(self) -> list[str]:
        """Kernels that have an implementation."""
        with self._lock:
            return sorted(self._impls)
