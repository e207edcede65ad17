"""Small engines for tests: implementations that wrap the CPU engine's and say that they were called."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fp8kit.backends.protocol import KERNELS
from fp8kit.backends.reference import IMPLEMENTATIONS
from fp8kit.plugins import CannotTake, Kind, OpImpl, signature


class Engine:
    """An engine that computes as the CPU engine does. ``calls`` counts; ``wants`` bytes of workspace, which
    it checks and overwrites."""

    def __init__(
        self,
        name: str,
        kernels: Iterable[str] = KERNELS,
        kind: Kind = Kind.DEFAULT,
        wants: int = 0,
        **more: Any,
    ) -> None:
        self.name, self.kind, self.more, self.wants = name, kind, more, wants
        self.calls: Counter[str] = Counter()
        self.impls = [
            self.impl(name, self._measuring(name) if name.endswith("_workspace") else self._calling(name))
            for name in kernels
        ]

    def impl(self, kernel: str, fn: Callable[..., Any]) -> OpImpl:
        """Returns an implementation of this engine."""
        vendor = self.name if self.kind is Kind.VENDOR else None
        return OpImpl(kernel, f"{self.name}.{kernel}", self.kind, fn, **{"vendor": vendor, **self.more})

    def _calling(self, kernel: str) -> Callable[..., Any]:
        function, names = IMPLEMENTATIONS[kernel], list(signature(kernel).parameters)
        at = names.index("workspace") if "workspace" in names else None

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            self.calls[kernel] += 1
            if self.wants and at is not None:
                given = args[at]
                if given is not None or kernel != "quantize_transpose":  # which needs one for its dbias alone
                    assert given is not None, f"{kernel}: no workspace"
                    assert given.size >= self.wants, (
                        f"{kernel}: {given.size} bytes of workspace, {self.wants} were asked for"
                    )
                    given.numpy()[:] = 0xA5
            return function(*args, **named)

        return call

    def _measuring(self, kernel: str) -> Callable[..., int]:
        @functools.wraps(IMPLEMENTATIONS[kernel])
        def measure(*args: Any, **named: Any) -> int:
            self.calls[kernel] += 1
            return self.wants

        return measure


def refusing(kernel: str, reason: str, name: str = "shy", **more: Any) -> OpImpl:
    """Returns an implementation that can take no call."""

    @functools.wraps(IMPLEMENTATIONS[kernel])
    def call(*args: Any, **named: Any) -> Any:
        raise CannotTake(reason)

    return OpImpl(kernel, f"{name}.{kernel}", Kind.DEFAULT, call, **more)
