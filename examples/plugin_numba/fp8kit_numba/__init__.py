"""An engine for fp8kit in plain Numba: ``register(registry)`` is what the entry point of pyproject.toml leads
to.

``CALLS`` counts how often each kernel ran: an example may show that it is used.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from fp8kit.plugins import Kind, OpImpl, OpRegistry

ENGINE = "numba"
CALLS: Counter[str] = Counter()


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        CALLS[name] += 1
        return function(*args, **named)

    return call


def register(registry: OpRegistry) -> None:
    """Register every kernel of this engine. What takes long, compiling, waits for the first call."""
    from fp8kit_numba import kernels

    for name in ("add", "amax", "norm_fwd", "sum_rows"):
        function = _counted(name, getattr(kernels, name))
        registry.register_impl(
            OpImpl(
                name,
                f"{ENGINE}.{name}",
                Kind.DEFAULT,
                function,
                supported_dtypes=frozenset({"float32"}),
                devices=frozenset({"cpu"}),
            )
        )
    registry.register_impl(
        OpImpl(
            "column_sum_workspace",
            f"{ENGINE}.column_sum_workspace",
            Kind.DEFAULT,
            kernels.column_sum_workspace,
        )
    )
