"""The CPU engine: NumPy, OpenBLAS and a few Numba kernels. It runs everywhere and is the truth that other
engines are measured by.

``IMPLEMENTATIONS`` has every kernel of the contract by name, from the module of its family; ``register`` puts
them into a registry.
Importing this package loads Numba.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.backends.registry import Kind, OpImpl, OpRegistry

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    name: getattr(importlib.import_module(f"{__name__}.{SPECS[name].family}"), name) for name in KERNELS
}


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
