"""Every operation there is, and the dataclasses that specs are made of: what a spec's text can name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType

from fp8kit import attention_quantization, inspection, layer_recipes, ops, quantization, recipe, recipe_fields
from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.spec import Operation

OPERATIONS: dict[str, Operation] = {}
SPECS: dict[str, type] = {}
_SPECS_OF: dict[str, tuple[type, ...]] = {}  # by the operation's name: what it was registered with
_LISTENERS: list[Callable[[Operation], object]] = []


def register_operation(operation: Operation, *specs: type) -> Operation:
    """Make an operation of your own usable in every frontend. ``specs``: the class of its spec, a frozen
    dataclass, and those of the dataclasses that are the spec's fields; a call with a spec of none of them is
    refused. Returns the operation. ArgumentError for a name that another operation has, for an operation
    that lacks a method or declares something that cannot be, and for a spec that is no frozen dataclass."""
    if not isinstance(operation, Operation) or not isinstance(getattr(operation, "name", None), str):
        raise ArgumentError("register_operation", "operation", shown(operation), "an Operation with a name")
    _want_declared(operation)
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
    SPECS.update({kind.__name__: kind for kind in specs})
    _SPECS_OF[operation.name] = specs
    OPERATIONS[operation.name] = operation
    for listener in _LISTENERS:
        listener(operation)
    return operation


def _want_declared(operation: Operation) -> None:
    """ArgumentError for an operation without a method that every call needs, and for a declaration of another
    type than ``Operation`` says."""
    kind = type(operation)
    for method in ("infer", "forward"):
        if getattr(kind, method) is getattr(Operation, method):
            wanted = f"a class that has infer and forward, as {Operation.__module__}.Operation says them"
            raise ArgumentError(
                "register_operation", "operation", f"{kind.__name__} without {method}", wanted
            )
    if not operation.name.isidentifier():
        raise ArgumentError("register_operation", "name", repr(operation.name), "letters, digits and _")
    for field in ("results", "mutates", "parameters"):
        names = getattr(operation, field)
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ArgumentError("register_operation", field, shown(names), "a tuple of names")
    if not isinstance(operation.arguments, Mapping):
        raise ArgumentError("register_operation", "arguments", shown(operation.arguments), "a dict of names")


def spec_classes(operation: Operation) -> tuple[type, ...]:
    """Returns the classes that the operation was registered with; () where none were given, or it was not."""
    known = OPERATIONS.get(operation.name)
    return _SPECS_OF[operation.name] if type(known) is type(operation) else ()


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
    recipes = (recipe, recipe_fields, layer_recipes)
    for module in (*recipes, quantization, attention_quantization, inspection):
        SPECS.update({kind.__name__: kind for kind in _dataclasses_of(module)})


_register_all()
