"""What a watched call has filled, on its way to the inspector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8kit import inspection
from fp8kit.buffers import nbytes_of
from fp8kit.execution.memory import Memory
from fp8kit.formats import DType, float32
from fp8kit.inspection import Entry
from fp8kit.ops.product_watched import WatchedProduct
from fp8kit.ops.products import product_of
from fp8kit.spec import Meta, Operation


def entries(operation: Operation, spec: Any, names: Iterable[str]) -> dict[str, Entry]:
    """What the arrays with these names hold; {} without names."""
    wanted = set(names)
    if not wanted:
        return {}
    found: dict[str, Entry] = {}
    dtype: DType = float32  # entries do not depend on it, nor on the rows
    for product in operation.products(spec):
        own = product_of(product, 1, dtype)
        if isinstance(own, WatchedProduct):
            found |= own.entries
    return {name: found[name] for name in found if name in wanted}


def places(
    known: Mapping[str, Entry], metas: Mapping[str, Meta], memory: Memory
) -> tuple[list[Any], list[int]]:
    """Arrays that a call fills for the inspector, and their addresses: counts and sums lie where it wants
    them, tensors by themselves."""
    inspector = inspection.inspector
    made: list[Any] = []
    at: list[int] = []
    for name, meta in metas.items():
        if inspector is None or known[name].kind != "sums":
            made.append(memory.maker(meta)())
            at.append(memory.address(made[-1]))
        else:
            made.append(inspector.place(memory, nbytes_of(meta)))
            at.append(made[-1].ptr)
    return made, at


def take(known: Mapping[str, Entry], names: Iterable[str], arrays: Sequence[Any]) -> None:
    """Hand the inspector the arrays with these names."""
    inspector = inspection.inspector
    if inspector is not None:
        inspector.take({name: known[name] for name in names}, arrays)
