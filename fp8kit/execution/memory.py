"""Where the buffers of a call lie: ``Layout``, the thread's ``Scratch``, and what a frontend supplies,
``Memory``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.buffers import Buffers, nbytes_of, streamed
from fp8kit.formats import DType
from fp8kit.spec import Meta

ALIGNMENT = 256  # bytes, of every buffer in a block


class Layout:
    """Offsets of buffers that live and die together in one block of ``nbytes`` bytes.

    With ``streaming`` the large ones are ``streamed`` instead: each is an allocation of its own
    (``fp8kit.buffers``).
    """

    __slots__ = ("nbytes", "parts", "streamed")

    def __init__(self, metas: Mapping[str, Meta], streaming: bool = False) -> None:
        self.nbytes = 0
        self.parts: list[tuple[str, int, Shape, DType]] = []
        self.streamed: dict[str, Meta] = streamed(metas) if streaming else {}
        for name, meta in metas.items():
            if name not in self.streamed:
                self.parts.append((name, self.nbytes, meta.shape, meta.dtype))
                self.nbytes += (nbytes_of(meta) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT

    def at(self, address: int, device: Device, owner: object = None) -> dict[str, ArrayView]:
        """The buffers of a block at ``address`` by name, without the streamed ones."""
        return {
            name: ArrayView(address + offset, shape, dtype, device, owner)
            for name, offset, shape, dtype in self.parts
        }

    def views(self, address: int, memory: Memory) -> Any:
        """The buffers by name: those of a block at ``address``, and streamed ones, allocated when they are
        read."""
        found = self.at(address, memory.device)
        return Buffers(found, self.streamed, memory.view) if self.streamed else found


class Arena:
    """A piece of memory for temporaries. ``kept``: it stays the thread's, so the next call has it at the same
    address."""

    LIMIT = 4096  # layouts; beyond so many (sequences of ever new lengths) all are forgotten
    __slots__ = ("_views", "address", "device", "kept", "nbytes", "owner")

    def __init__(self, nbytes: int, address: int, owner: object, device: Device, kept: bool) -> None:
        self.nbytes, self.address, self.owner, self.device, self.kept = nbytes, address, owner, device, kept
        self._views: dict[Layout, dict[str, ArrayView]] = {}

    def views(self, layout: Layout, memory: Memory) -> Any:
        """The buffers of a layout in this arena, contents undefined; not to be changed."""
        found = self._views.get(layout) if self.kept else None
        if found is None:
            found = layout.at(self.address, self.device)
            if self.kept:
                if len(self._views) >= self.LIMIT:
                    self._views.clear()
                self._views[layout] = found
        return Buffers(found, layout.streamed, memory.view) if layout.streamed else found


class Scratch(threading.local):
    """A thread's memory for the temporaries of one operation, one arena for each stream.

    Work on a stream is done in order, so the thread's next operation on that stream can use the same memory.
    Not kept are arenas larger than ``KEPT``, those of all but the last ``STREAMS`` streams, and those on the
    CPU, where allocating costs little. ``allocate(nbytes, device)`` returns (address, owner).
    """

    KEPT = 48 << 20  # bytes: what a product's workspace and small operands need
    STREAMS = 16  # a program that makes a stream for each piece of work keeps the last ones

    def __init__(self, allocate: Callable[[int, Device], tuple[int, object]]) -> None:
        self.allocate = allocate
        self.arenas: dict[tuple[Device, int], Arena] = {}

    def arena(self, nbytes: int, device: Device, stream: int) -> Arena:
        """At least ``nbytes`` bytes, contents undefined, for work on ``stream``. They are the caller's until
        it has put all its work on the stream; an operation must not call another one before that."""
        found = self.arenas.get((device, stream))
        if found is None or found.nbytes < nbytes:
            kept = nbytes <= self.KEPT and device.kind != "cpu"
            found = Arena(nbytes, *self.allocate(nbytes, device), device, kept)
            if kept:
                self.arenas.pop((device, stream), None)
                if len(self.arenas) >= self.STREAMS:
                    del self.arenas[next(iter(self.arenas))]
                self.arenas[device, stream] = found
        return found

    @contextmanager
    def separate(self) -> Iterator[dict[tuple[Device, int], Arena]]:
        """Within, this thread begins without arenas. Those that it made are in the dictionary, for who wants
        to keep them, as a captured graph must."""
        before, self.arenas = self.arenas, {}
        try:
            yield self.arenas
        finally:
            self.arenas = before


class Memory(Protocol):
    """What a frontend supplies for one device: its allocator, in terms of its own arrays, and its stream."""

    device: Device

    def maker(self, meta: Meta) -> Callable[[], Any]:
        """A function that allocates an array of ``meta``: zeros where ``meta.zero``, otherwise undefined."""

    def view(self, meta: Meta) -> ArrayView:
        """A fresh array of ``meta``, contents undefined, as a view whose owner is the array."""

    def block(self, nbytes: int) -> Any:
        """A fresh array of so many bytes, contents undefined."""

    def address(self, array: Any) -> int:
        """Where an array lies."""

    def stream(self) -> int:
        """Handle of the stream that work goes to now."""

    def arena(self, nbytes: int, stream: int) -> Arena:
        """Memory for one call's temporaries."""
