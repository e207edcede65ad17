"""The CPU engine: NumPy, OpenBLAS and a few Numba kernels. It runs everywhere and is the truth that other
engines are measured by.

``IMPLEMENTATIONS`` has every kernel of the contract by name, from the module of its family, and for
workspaces a function that says that none is needed; ``register`` puts them into a registry. Importing this
package loads Numba.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.backends.registry import Kind, OpImpl, OpRegistry


def _implementation(name: str) -> Callable[..., Any]:
    if SPECS[name].launches:
        module = importlib.import_module(f"{__name__}.{SPECS[name].family}")
        return getattr(module, name)  # type: ignore[no-any-return]

    def no_workspace(*sizes: Any, **named: Any) -> int:
        return 0

    no_workspace.__signature__ = SPECS[name].signature  # type: ignore[attr-defined]
    return no_workspace


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {name: _implementation(name) for name in KERNELS}


def register(registry: OpRegistry) -> None:
    """Register every kernel of this engine, for CPU arrays."""
    registry.register_many(
        OpImpl(
            op_name=name,
            impl_id=f"reference.{name}",
            kind=Kind.REFERENCE,
            fn=function,
            devices=frozenset({"cpu"}),
        )
        for name, function in IMPLEMENTATIONS.items()
    )
