"""When an operation uses each of its temporaries: two that are never in use at the same time share memory.

The times are found by a dry run: the operation's own code runs with kernels that do nothing, on views without
memory. A buffer lives from the first read of its name until no object holds it any more (``buffers``). This
order depends on the spec and on which arrays exist, not on their sizes, so one dry run serves every batch
length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import views
from fp8kit.buffers import FREED, Buffers
from fp8kit.devices import NOWHERE
from fp8kit.execution.memory import Span
from fp8kit.inspection import is_watched
from fp8kit.lru import LRU, SHAPES
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, WorkingSet

_APART = 1 << 32  # bytes between arrays that are not there: none begins where another ends


class Lives(NamedTuple):
    """``spans``: the times at which each temporary is in use, in order; none if its name is never read.
    ``filled``: when each output or gradient is first asked for. ``read``: the time after the last kernel that
    reads an input or a cotangent; none if no kernel reads it. ``done``: the same for each array that forward
    saved. ``end``: after the last kernel."""

    spans: Mapping[str, tuple[Span, ...]]
    filled: Mapping[str, float]
    read: Mapping[str, float]
    done: Mapping[str, float]
    end: float


_known: LRU[Any, tuple[Any, Lives]] = LRU(SHAPES, name="lifetimes")  # the spec is held: its identity counts


class _Log:
    """Events in their order: (name, whether it begins)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []
        self.filled: dict[str, float] = {}
        self.read: dict[str, float] = {}
        self.done: dict[str, float] = {}
        # by address, in units of _APART: where to note the reader, and the name
        self._given: dict[int, tuple[dict[str, float], str]] = {}
        self._addresses = itertools.count(_APART, _APART)

    def view(self, meta: Meta, owner: object = None) -> ArrayView:
        return ArrayView(next(self._addresses), meta.shape, meta.dtype, NOWHERE, owner)

    def views(self, metas: Mapping[str, Meta | None]) -> dict[str, ArrayView]:
        return {name: self.view(meta) for name, meta in metas.items() if meta is not None}

    def given(self, metas: Mapping[str, Meta | None], note: dict[str, float]) -> dict[str, ArrayView]:
        """Views whose last reader is noted in ``note``."""
        found = self.views(metas)
        self._given |= {view.ptr // _APART: (note, name) for name, view in found.items()}
        return found

    def kernel(self, *arguments: Any, **named: Any) -> None:
        """A kernel that does nothing with its arrays."""
        for view in views((*arguments, *named.values())):
            if (given := self._given.get(view.ptr // _APART)) is not None:
                note, name = given
                note[name] = len(self.events)

    def allocate(self, named: tuple[str, Meta]) -> ArrayView:
        """A temporary, whose life ends with the last object that holds it."""
        name, meta = named
        return self.view(meta, _Life(self, name))


class _Life:
    """An object that a temporary's views hold: when the last view goes, the temporary's life ends."""

    __slots__ = ("log", "name")

    def __init__(self, log: _Log, name: str) -> None:
        self.log, self.name = log, name
        log.events.append((name, True))

    def __del__(self) -> None:
        self.log.events.append((self.name, False))


class _Temporaries(Buffers):
    """Buffers that all exist from the start, as in a call of a small operation; each life begins at the first
    read."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return name in self.metas or super().__contains__(name)


FREED.add(_Temporaries)


class _Filled(dict[str, ArrayView]):
    """Outputs, or gradients, that note when they are first asked for."""

    def __init__(self, log: _Log, metas: Mapping[str, Meta | None]) -> None:
        super().__init__(log.views(metas))
        self.log = log

    def __getitem__(self, name: str) -> ArrayView:
        # before whatever ends next, which the same kernel may read
        self.log.filled.setdefault(name, len(self.log.events) - 0.5)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if self.keys() & {name} else default


class _Idle:
    """Kernels that compute nothing and only note what they read."""

    def __init__(self, log: _Log) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return self._log.kernel


def known(operation: Operation, plan: Plan) -> bool:
    """Whether an operation's lifetimes can be found. They can if fp8kit defines the operation, it frees
    buffers as it runs (``Operation.streams``), it does not communicate between ranks, and the inspector does
    not watch it."""
    ours = type(operation).__module__.startswith("fp8kit.ops.")
    watched = any(map(is_watched, [*plan.signature.outputs, *plan.signature.grads]))
    return operation.streams and ours and not watched and not operation.communicates(plan.spec)


def lives(
    operation: Operation, plan: Plan, metas: Metas, needs: Needs, backward: bool
) -> Callable[[], Lives] | None:
    """The lifetimes that a ``Layout`` of a pass's temporaries needs; None if they are not known. An operation
    that is made of others supplies its own (``lives``)."""
    own = getattr(operation, "lives", None)
    if own is not None:
        return partial(own, plan, backward)
    return partial(of, operation, plan, metas, needs, backward) if known(operation, plan) else None


def of(operation: Operation, plan: Plan, metas: Metas, needs: Needs, backward: bool) -> Lives:
    """The lifetimes of a pass of an operation that is ``known``."""
    kinds = tuple((name, meta.dtype.name) for name, meta in metas.items() if meta is not None)
    empty = any(0 in meta.shape for meta in metas.values() if meta is not None)
    scratch = plan.backward_scratch if backward else plan.scratch
    key = operation.name, id(plan.spec), needs, backward, kinds, empty, *scratch
    found = _known.get(key)
    if found is None:
        found = _known.put(key, (plan.spec, _run(operation, plan, metas, backward)))
    return found[1]


def _run(operation: Operation, plan: Plan, metas: Metas, backward: bool) -> Lives:
    log, s = _Log(), plan.signature
    idle = _Idle(log)
    scratch = plan.backward_scratch if backward else plan.scratch
    named: Any = {name: (name, meta) for name, meta in scratch.items()}
    own: Any = _Temporaries({}, named, log.allocate)
    if backward:
        there = {**metas, **s.outputs}
        kept = log.views({name: there.get(name) for name in s.kept} | s.backward_inputs)
        results = {name: meta for name, meta in s.outputs.items() if not meta.zero}
        results |= {name: there[source] for name, source in s.passes.items()}  # type: ignore[misc]
        ws = WorkingSet(idle, kept, _Filled(log, s.grads), log.given(s.saved, log.done), own, 0)
        operation.backward(plan, ws, log.given(results, log.read))
    else:
        ws = WorkingSet(idle, log.given(metas, log.read), _Filled(log, s.outputs), log.views(s.saved), own, 0)
        operation.forward(plan, ws)
    events = log.events[:]
    found: dict[str, list[Span]] = {}
    for time, (name, begins) in enumerate(events):
        if begins:
            found.setdefault(name, []).append((time, math.inf))
        else:
            found[name][-1] = found[name][-1][0], time
    times = {name: tuple(spans) for name, spans in found.items()}
    return Lives(times, log.filled, log.read, log.done, len(events))


def later(spans: Mapping[str, tuple[Span, ...]], by: float, end: float) -> dict[str, tuple[Span, ...]]:
    """The spans, moved ``by`` steps later; a span without an end lasts until ``end``."""
    return {
        name: tuple([(start + by, min(stop + by, end)) for start, stop in times])
        for name, times in spans.items()
    }
