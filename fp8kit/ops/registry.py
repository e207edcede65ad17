"""Every operation there is, and the dataclasses that specs are made of: what a spec's text can name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

from fp8kit import ops, quantization, recipe
from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.spec import Operation

OPERATIONS: dict[str, Operation] = {}
SPECS: dict[str, type] = {}
_LISTENERS: list[Callable[[Operation], object]] = []


def register_operation(operation: Operation, *specs: type) -> Operation:
    """Make an operation of your own usable in every frontend, with the frozen dataclasses that its spec is
    made of. Returns the operation. ArgumentError for a name that another operation has, and for a spec that
    is no dataclass."""
    if not isinstance(operation, Operation) or not isinstance(getattr(operation, "name", None), str):
        raise ArgumentError("register_operation", "operation", shown(operation), "an Operation with a name")
    if type(OPERATIONS.get(operation.name, operation)) is not type(operation):
        raise ArgumentError(
            "register_operation", "name", repr(operation.name), "one that no other operation has"
        )
    for kind in specs:
        made = kind.__dict__.get("__dataclass_params__") if isinstance(kind, type) else None
        if made is None or not made.frozen:
            raise ArgumentError("register_operation", "specs", shown(kind), "frozen dataclasses")
        known = SPECS.get(kind.__name__, kind)
        if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ArgumentError("register_operation", "specs", kind.__name__, "names that no other spec has")
        SPECS[kind.__name__] = kind
    OPERATIONS[operation.name] = operation
    for listener in _LISTENERS:
        listener(operation)
    return operation


def each_operation(listener: Callable[[Operation], object]) -> None:
    """Call ``listener`` with every operation: those there are, and those that are registered later."""
    _LISTENERS.append(listener)
    for operation in list(OPERATIONS.values()):
        listener(operation)


def _dataclasses_of(module: ModuleType) -> list[type]:
    own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    return [v for v in own if isinstance(v, type) and dataclasses.is_dataclass(v) and v.__name__[0] != "_"]


def _register_all() -> None:
    for info in pkgutil.iter_modules(ops.__path__):
        if info.name != "registry":
            module = importlib.import_module(f"fp8kit.ops.{info.name}")
            SPECS.update({kind.__name__: kind for kind in _dataclasses_of(module)})
            for value in vars(module).values():
                if isinstance(value, Operation):
                    register_operation(value)
    for module in (recipe, quantization):
        SPECS.update({kind.__name__: kind for kind in _dataclasses_of(module)})


_register_all()
