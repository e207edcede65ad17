"""What a watched call has filled, on its way to the inspector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8kit import inspection
from fp8kit.arrays import ArrayView
from fp8kit.execution.memory import Layout, Memory
from fp8kit.formats import DType, float32
from fp8kit.inspection import Entry
from fp8kit.ops.product_watched import WatchedProduct
from fp8kit.ops.products import product_of
from fp8kit.spec import Meta, Operation


def entries(operation: Operation, spec: Any, names: Collection[str]) -> dict[str, Entry]:
    """What the arrays with these names hold, which a call fills for the inspector; in their order."""
    found: dict[str, Entry] = {}
    if not names:
        return found
    dtype: DType = float32  # entries do not depend on it, nor on the rows
    for product in operation.products(spec):
        own = product_of(replace(product, parallel=None), 1, dtype)
        if isinstance(own, WatchedProduct):
            found |= own.entries
    return {name: found[name] for name in names}


class Places:
    """The arrays that one direction of a call fills for the inspector: ``metas`` by name. Counts and sums lie
    where it wants them, one after the other, dumped tensors by themselves."""

    def __init__(self, operation: Operation, spec: Any, metas: Mapping[str, Meta]) -> None:
        self.entries, self._metas = entries(operation, spec, metas), dict(metas)
        self._sums = Layout({name: metas[name] for name, own in self.entries.items() if own.kind == "sums"})

    def __bool__(self) -> bool:
        return bool(self.entries)

    def make(self, memory: Memory) -> tuple[list[Any], list[int]]:
        """The arrays of a call, and their addresses. Without an inspector, as in a backward pass after its
        block, they are memory that nobody reads."""
        inspector = inspection.hooks.inspector
        made: dict[str, Any] = {}
        if inspector is not None and self._sums.nbytes:
            whole: ArrayView = inspector.place(memory, self._sums.nbytes)
            made |= self._sums.at(whole.ptr, memory.device, whole.owner)
        addresses = {name: view.ptr for name, view in made.items()}
        for name, meta in self._metas.items():
            if name not in made:
                made[name] = memory.maker(meta)()
                addresses[name] = memory.address(made[name])
        return [made[name] for name in self._metas], [addresses[name] for name in self._metas]

    def take(self, arrays: Sequence[Any]) -> None:
        """Hand the inspector what ``make`` made."""
        inspector = inspection.hooks.inspector
        if inspector is not None:
            inspector.take(self.entries, arrays)
