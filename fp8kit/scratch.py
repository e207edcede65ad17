"""Memory for temporaries: what an operation writes and reads within one call, kept by the thread for the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import Device


class Room:
    """A piece of memory: its address and owner, and what has been laid out in it, by whoever did (``carved``)."""

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
    """Memory for the temporaries of one operation, from ``alloc(nbytes, device)``, which gives an address and an owner.

    A thread keeps one room for each stream: work on a stream is done in order, so that the thread's next operation there can have the same
    memory, and what was laid out in it. Much is not kept: only what a product's workspace and small operands need; on the CPU, where memory
    is had for little, nothing.
    """

    KEPT = 48 << 20  # bytes

    def __init__(self, alloc: Callable[[int, Device], tuple[int, object]]) -> None:
        self.alloc = alloc
        self.rooms: dict[tuple[Device, int], Room] = {}

    def room(self, nbytes: int, where: Device, stream: int) -> Room:
        """At least ``nbytes`` bytes, contents undefined, for work on ``stream``: the caller's alone until all its work is on the stream, so
        no operation calls another one meanwhile (what backward computes again runs before it asks)."""
        found = self.rooms.get((where, stream))
        if found is None or found.nbytes < nbytes:
            found = Room(nbytes, *self.alloc(nbytes, where))
            if nbytes <= self.KEPT and where.kind != "cpu":
                self.rooms[where, stream] = found
        return found

    @contextmanager
    def apart(self) -> Iterator[dict[tuple[Device, int], Room]]:
        """Within, this thread begins with no rooms; those that it made are in the dictionary, to be kept or not."""
        before, self.rooms = self.rooms, {}
        try:
            yield self.rooms
        finally:
            self.rooms = before


scratch = Scratch(lambda nbytes, where: arrays.provider(where).alloc(nbytes, where))
