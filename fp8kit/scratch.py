"""Memory of one call: temporaries that the thread keeps for the next call, and large buffers that come late
and go early.

An operation's backward reads much that forward saved, and writes much that it reads once. Where that is much
memory, each large buffer is made when the operation first asks for it (``Buffers``), and goes back to its
allocator as soon as the operation is ``done`` with it: what still reads it is on the stream already, and
whoever gets the memory next writes to it behind that. Small calls have their buffers in one piece of memory,
since there a call to the allocator counts for more than the bytes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device

# bytes: what belongs together and is more lies apart, so that each buffer comes and goes by itself
MUCH = 256 << 20
LARGE = 16 << 20  # bytes of a buffer that is worth it


def nbytes_of(meta: Any) -> int:
    """Bytes of an array of ``meta.shape`` and ``meta.dtype``."""
    return int(math.prod(meta.shape) * meta.dtype.itemsize)


def large(metas: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``metas``, shapes and dtypes by name, that come and go by themselves: the large ones of many
    bytes, but for those that the door fills (``zero``)."""
    if sum(map(nbytes_of, metas.values())) <= MUCH:
        return {}
    return {name: meta for name, meta in metas.items() if nbytes_of(meta) >= LARGE and not meta.zero}


class Buffers(dict[str, ArrayView | None]):
    """Buffers by name: those that are ``there``, and those of ``metas``, by name, each made by ``make(meta)``
    when it is first asked for, contents undefined. A buffer that the operation is ``done`` with is None."""

    __slots__ = ("make", "metas")

    def __init__(
        self, there: Mapping[str, ArrayView], metas: Mapping[str, Any], make: Callable[[Any], ArrayView]
    ) -> None:
        super().__init__(there)
        self.metas, self.make = metas, make

    def __missing__(self, name: str) -> ArrayView:
        view = self[name] = self.make(self.metas[name])
        return view

    def whole(self) -> None:
        """Make what nobody has asked for."""
        for name in self.metas:
            self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The buffer of that name, ``default`` where there is none."""
        return self[name] if name in self or name in self.metas else default


def done(views: Mapping[str, ArrayView | None], *names: str) -> None:
    """The operation needs those buffers no longer, once all that it has put on the stream has run. Names that
    are not there are passed over. No variable of the operation may hold them, or they stay."""
    if type(views) is Buffers:
        for name in names:
            if name in views:
                views[name] = None


def idle(views: Mapping[str, ArrayView | None], *names: str) -> None:
    """As ``done``, but the operation may ask for the buffers again: it gets others, contents undefined."""
    if type(views) is Buffers:
        for name in names:
            if name in views.metas:
                views.pop(name, None)


def taken(views: Mapping[str, ArrayView | None], names: Iterable[str]) -> Mapping[str, ArrayView | None]:
    """Those buffers, out of ``views``: who is ``done`` with them then holds the last."""
    found = {name: views[name] for name in names}
    if type(views) is not Buffers:
        return found
    done(views, *found)
    return Buffers(found, {}, views.make)  # type: ignore[arg-type]


class Room:
    """A piece of memory: its address and owner, and what has been laid out in it, by whoever did
    (``carved``)."""

    LAYOUTS = 4096  # beyond this many, as of sequences of ever new lengths, what was laid out is forgotten
    __slots__ = ("carved", "nbytes", "owner", "ptr")

    def __init__(self, nbytes: int, ptr: int, owner: object) -> None:
        self.nbytes = nbytes
        self.ptr = ptr
        self.owner = owner
        self.carved: dict[Any, Any] = {}

    def keep(self, layout: object, made: Any) -> None:
        """Know ``made``, what ``layout`` looks like in this room, from now on."""
        if len(self.carved) >= self.LAYOUTS:
            self.carved.clear()
        self.carved[layout] = made


class Scratch(threading.local):
    """Memory for the temporaries of one operation, from ``alloc(nbytes, device)``, which gives an address and
    an owner.

    A thread keeps one room for each stream: work on a stream is done in order, so that the thread's next
    operation there can have the same memory, and what was laid out in it. Much is not kept: only what a
    product's workspace and small operands need, for the streams that the thread came to last; on the CPU,
    where memory is had for little, nothing.
    """

    KEPT = 48 << 20  # bytes
    # beyond this many, as of a program that makes a stream for each piece of work, the oldest room is given
    # up
    STREAMS = 16

    def __init__(self, alloc: Callable[[int, Device], tuple[int, object]]) -> None:
        self.alloc = alloc
        self.rooms: dict[tuple[Device, int], Room] = {}

    def room(self, nbytes: int, where: Device, stream: int) -> Room:
        """At least ``nbytes`` bytes, contents undefined, for work on ``stream``: the caller's alone until all
        its work is on the stream, so no operation calls another one meanwhile (what backward computes again
        runs before it asks)."""
        found = self.rooms.get((where, stream))
        if found is None or found.nbytes < nbytes:
            found = Room(nbytes, *self.alloc(nbytes, where))
            if nbytes <= self.KEPT and where.kind != "cpu":
                self.rooms.pop((where, stream), None)
                if len(self.rooms) >= self.STREAMS:
                    del self.rooms[next(iter(self.rooms))]
                self.rooms[where, stream] = found
        return found

    @contextmanager
    def apart(self) -> Iterator[dict[tuple[Device, int], Room]]:
        """Within, this thread begins with no rooms; those that it made are in the dictionary, to be kept or
        not."""
        before, self.rooms = self.rooms, {}
        try:
            yield self.rooms
        finally:
            self.rooms = before


scratch = Scratch(lambda nbytes, where: arrays.provider(where).alloc(nbytes, where))
