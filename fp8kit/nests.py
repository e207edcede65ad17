"""Values nested in tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """``value`` with ``leaf`` applied, in order, to what lies in its tuples, lists and mappings."""
    if isinstance(value, Mapping):
        return {key: mapped(part, leaf) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [mapped(part, leaf) for part in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return leaf(value)
