"""Specs as texts: torch's ops take no Python objects, so what is static about a call travels as one string
that says everything.

The text does not depend on the process that wrote it: a compiled graph that is loaded elsewhere finds what it
needs in its own strings.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from functools import lru_cache
from typing import Any

from fp8kit import formats, ops, quantization
from fp8kit.spec import Operation

_MODULES = [importlib.import_module(f"fp8kit.ops.{info.name}") for info in pkgutil.iter_modules(ops.__path__)]
_VALUES = [value for module in _MODULES for value in vars(module).values()]
# every operation of fp8kit, and every dataclass that a spec is made of
OPERATIONS: dict[str, Operation] = {value.name: value for value in _VALUES if isinstance(value, Operation)}
SPECS: dict[str, Any] = {
    value.__name__: value
    for value in (*_VALUES, *vars(quantization).values())
    if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ != "fp8kit.spec"
}
_NAMED = {formats.Format: ("format", formats.FORMATS), formats.DType: ("dtype", formats.DTYPES)}
_TABLES: dict[str, Any] = dict(_NAMED.values())


@lru_cache(maxsize=4096)
def encode(value: Any) -> str:
    """The text of a spec, a value of ``fp8kit.quantization``, or a tuple of these and of plain values.
    TypeError for anything else."""
    return json.dumps(_packed(value), separators=(",", ":"))


@lru_cache(maxsize=4096)
def decode(text: str) -> Any:
    """What ``encode`` wrote; the same object for the same text."""
    return _unpacked(json.loads(text))


def _packed(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_packed(part) for part in value]
    if type(value) in _NAMED:
        return {_NAMED[type(value)][0]: value.name}
    if type(value) in SPECS.values():
        return {
            type(value).__name__: {
                field.name: _packed(getattr(value, field.name)) for field in dataclasses.fields(value)
            }
        }
    raise TypeError(f"fp8kit_torch: {type(value).__name__} {value!r} cannot go into a compiled graph")


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(part) for part in value)
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name in _TABLES:
        return _TABLES[name][inner]
    return SPECS[name](**{field: _unpacked(part) for field, part in inner.items()})
