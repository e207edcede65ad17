"""Buffers of one call by name. Large ones are allocated when they are first read and freed as soon as the
operation has finished with them.

An operation's backward reads much that forward saved, and writes much that it reads once. Where that is much
memory, each large buffer is *streamed*: it is allocated when the operation first asks for it (``Buffers``),
and goes back to its allocator once the operation has called ``free``. What still reads it is on the stream
already, and the next user of the memory writes to it after that. The buffers of small calls lie in one
block, since there a call of the allocator costs more than the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8kit.arrays import ArrayView

STREAMED_TOTAL = 256 << 20  # bytes: only where buffers that belong together take more are they streamed
STREAMED_EACH = 16 << 20  # bytes: and of those only the ones that take at least as much


def nbytes_of(meta: Any) -> int:
    """Bytes of an array of ``meta.shape`` and ``meta.dtype``; a symbol where sizes are open."""
    return math.prod(meta.shape) * meta.dtype.itemsize  # type: ignore[no-any-return]


def streamed(metas: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``metas``, by name, that are streamed. Buffers that come zeroed (``zero``) never are."""
    if sum(map(nbytes_of, metas.values())) <= STREAMED_TOTAL:
        return {}
    return {name: meta for name, meta in metas.items() if nbytes_of(meta) >= STREAMED_EACH and not meta.zero}


class Buffers(dict[str, ArrayView | None]):
    """Buffers by name: ``present`` ones, and streamed ones of ``metas``, each made by ``allocate(meta)`` when
    it is first read, contents undefined. A buffer that was freed is None."""

    __slots__ = ("allocate", "metas")

    def __init__(
        self, present: Mapping[str, ArrayView], metas: Mapping[str, Any], allocate: Callable[[Any], ArrayView]
    ) -> None:
        super().__init__(present)
        self.metas, self.allocate = metas, allocate

    def __missing__(self, name: str) -> ArrayView:
        view = self[name] = self.allocate(self.metas[name])
        return view

    def allocate_all(self) -> None:
        """Allocate the buffers that have not been read yet."""
        for name in self.metas:
            self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the buffer of that name, ``default`` where there is none."""
        return self[name] if name in self or name in self.metas else default


FREED: set[type] = {Buffers}  # the kinds of mappings whose buffers go when they are given up


class Lasting(dict[str, ArrayView]):
    """Buffers at fixed places in a block. ``later``: name -> where it lies after ``free_contents``, once and
    once more."""

    __slots__ = ("later",)

    def __init__(self, found: Mapping[str, ArrayView], later: Mapping[str, list[ArrayView]]) -> None:
        super().__init__(found)
        self.later = later

    def again(self, names: Mapping[str, str] | None = None) -> Lasting:
        """Returns the same for another call. ``names``: only these, own name -> name here."""
        if names is None:
            return Lasting(self, {name: [*views] for name, views in self.later.items()})
        later = {own: [*self.later[name]] for own, name in names.items() if name in self.later}
        return Lasting({own: self[name] for own, name in names.items()}, later)


def free(views: Mapping[str, ArrayView | None], *names: str) -> None:
    """Give up those buffers: the operation has put all that reads or writes them on the stream. Names that
    are not there are skipped. No variable may hold them, or their memory stays."""
    if type(views) in FREED:
        for name in names:
            if name in views:
                views[name] = None  # type: ignore[index]


def free_contents(views: Mapping[str, ArrayView | None], *names: str) -> None:
    """As ``free``, but a buffer that is read again is allocated anew, or lies elsewhere, contents
    undefined."""
    if isinstance(views, Buffers):
        for name in names:
            if name in views.metas:
                views.pop(name, None)
    elif type(views) is Lasting:
        for name in names:
            if rest := views.later.get(name):
                views[name] = rest.pop(0)


def beside(views: Mapping[str, ArrayView], **more: ArrayView) -> Mapping[str, ArrayView]:
    """``views`` with further buffers, which ``free`` gives up as it does the others; the mapping itself where
    that is one call's own."""
    if type(views) in FREED:
        views.update(more)  # type: ignore[attr-defined]
        return views
    found = {**views, **more}
    return Lasting(found, views.later) if type(views) is Lasting else found


def take(views: Mapping[str, ArrayView], names: Iterable[str]) -> Mapping[str, ArrayView]:
    """Move those buffers out of ``views`` into a mapping of their own, so that ``free`` on that drops the
    last reference."""
    found = {name: views[name] for name in names}
    if not isinstance(views, Buffers):
        return found
    free(views, *found)
    return Buffers(found, {}, views.allocate)  # type: ignore[return-value]
