"""The CPU engine: NumPy, OpenBLAS and a few Numba kernels. It runs everywhere and is the truth that other
engines are measured by.

``IMPLEMENTATIONS`` has every kernel of the contract by name; ``register`` puts them into a registry.
Importing this package loads Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8kit.backends.protocol import KERNELS
from fp8kit.backends.reference import (
    activation,
    attention,
    block,
    cross_entropy,
    drop_path,
    dropout,
    elementwise,
    embedding,
    gemm,
    kv_cache,
    norm,
    optim,
    quantize,
    rope,
    scales,
    sequences,
)
from fp8kit.backends.registry import Kind, OpImpl, OpRegistry

_ROOMS = (
    scales,
    quantize,
    gemm,
    block,
    norm,
    activation,
    dropout,
    drop_path,
    attention,
    sequences,
    kv_cache,
    rope,
    embedding,
    cross_entropy,
    optim,
    elementwise,
)

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    name: next(
        vars(room)[name]
        for room in _ROOMS
        if getattr(vars(room).get(name), "__module__", None) == room.__name__
    )
    for name in KERNELS
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
