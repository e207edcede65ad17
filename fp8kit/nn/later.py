"""Arguments of Transformer Engine's classes that have one supported value so far: accepted with that value,
else refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.layers.unsupported import CONSTRUCTOR as _TABLES

# gradients are not accumulated by the operations here
_FUSED = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
CONSTRUCTOR = {
    name: table | ({"fuse_wgrad_accumulation": False} if name in _FUSED else {})
    for name, table in _TABLES.items()
}


def later(operation: str, table: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that are not in ``table`` (TypeError), or whose value is not the supported one
    (Fp8kitError, "yet")."""
    for name in given:
        if name not in table:
            raise TypeError(f"{operation}: unexpected argument {name!r}")
    not_yet(operation, {name: (value, table[name]) for name, value in given.items()})


def not_yet(operation: str, only: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse arguments, name -> (value, what is supported), that have another value. Fp8kitError."""
    for name, (value, supported) in only.items():
        plain = isinstance(value, bool | int | float | str | np.generic)
        if value is not supported and not (plain and value == supported):
            raise ArgumentError(
                operation, name, shown(value), f"{supported!r}: nothing else is supported yet"
            )
