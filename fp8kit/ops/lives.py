"""Where temporaries lie in one piece of memory, so that those whose lives do not meet share it: for a door that must say beforehand how
much memory an operation's call takes, and cannot give back a part of it.

An operation that is ``early`` asks for a buffer where it first needs it and says when it is ``done`` with it (``fp8kit.scratch``). One run
with kernels that do nothing shows when each buffer lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fp8kit.arrays import CPU, ArrayView
from fp8kit.scratch import Buffers, nbytes_of
from fp8kit.spec import Meta, Plan, Views

ALIGNMENT = 256  # bytes, of every buffer
Span = tuple[int, int]  # the first and the last moment of a life; moments are counted as buffers come and go


class _Nothing:
    """Every kernel of the contract, doing nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*arguments: Any) -> None:
    """What each of them is."""


class Watched(Buffers):
    """Buffers without memory that write down when they come and go."""

    __slots__ = ("born", "now", "spans")

    def __init__(self, metas: Mapping[str, Meta]) -> None:
        super().__init__({}, metas, lambda meta: ArrayView(ALIGNMENT, meta.shape, meta.dtype, CPU))
        self.spans: dict[str, list[Span]] = {name: [] for name in metas}
        self.born: dict[str, int] = {}
        self.now = 0

    def __missing__(self, name: str) -> ArrayView:
        self.now += 1
        self.born[name] = self.now
        return super().__missing__(name)

    def gone(self, name: str) -> None:
        """The buffer's life ends."""
        if name in self.born:
            self.now += 1
            self.spans[name].append((self.born.pop(name), self.now))


def spans(plan: Plan, metas: Mapping[str, Meta], run: Callable[[Plan, Views], None]) -> dict[str, list[Span]]:
    """When each of the temporaries ``metas`` lives while ``run(plan, temporaries)`` calls a face of an operation on views of any address."""
    watched = Watched(metas)
    run(replace(plan, kernels=_Nothing()), watched)
    for name in list(watched.born):
        watched.gone(name)
    return watched.spans


def laid_out(metas: Mapping[str, Meta], lives: Mapping[str, list[Span]]) -> tuple[int, dict[str, int]]:
    """(bytes in all, name -> offset): the largest buffer first, each at the lowest offset at which it meets no other one that lives then."""
    sizes = {name: max(-(-nbytes_of(meta) // ALIGNMENT), 1) * ALIGNMENT for name, meta in metas.items()}
    offsets: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        at = 0
        for start, end in sorted((offsets[n], offsets[n] + sizes[n]) for n in offsets if _meet(lives[n], lives[name])):
            if at + sizes[name] <= start:
                break
            at = max(at, end)
        offsets[name] = at
    return max((offsets[name] + sizes[name] for name in offsets), default=0), offsets


def _meet(one: list[Span], other: list[Span]) -> bool:
    """Whether two buffers live at the same time."""
    return any(a <= d and c <= b for a, b in one for c, d in other)
