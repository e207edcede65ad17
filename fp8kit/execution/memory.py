"""Where the buffers of a call lie: ``Layout``, the thread's ``Scratch``, and what a frontend supplies,
``Memory``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.buffers import Buffers, Lasting, nbytes_of, streamed
from fp8kit.formats import DType
from fp8kit.spec import Meta

ALIGNMENT = 256  # bytes, of every buffer in a block
SHARED = 64 << 10  # bytes of a buffer from which on it shares them with others that are used at other times
Span = tuple[float, float]  # from a moment on, up to another
ALWAYS: Span = (0, math.inf)


class Layout:
    """Offsets of buffers that live and die together in one block of ``nbytes`` bytes.

    With ``streaming`` the large ones are ``streamed`` instead: each is an allocation of its own
    (``fp8kit.buffers``). ``spans()``: of each the times that it is in use (``execution.lifetimes``); large
    buffers that are never in use at once share bytes then. One that is in use, given up, and in use again
    may lie somewhere else the second time (``buffers.Lasting``).
    """

    __slots__ = ("_later", "nbytes", "parts", "streamed")

    def __init__(
        self,
        metas: Mapping[str, Meta],
        streaming: bool = False,
        spans: Callable[[], Mapping[str, tuple[Span, ...]]] | None = None,
    ) -> None:
        self.streamed: dict[str, Meta] = streamed(metas) if streaming else {}
        here = {name: meta for name, meta in metas.items() if name not in self.streamed}
        sizes = {name: -(-nbytes_of(meta) // ALIGNMENT) * ALIGNMENT for name, meta in here.items()}
        large = [name for name, size in sizes.items() if size >= SHARED]
        times = spans() if spans is not None and len(large) > 1 and not self.streamed else {}
        shared = {name: times.get(name) or (ALWAYS,) for name in large} if times else {}
        offsets: dict[str, list[int]] = {}
        self.nbytes = 0
        for name, size in sizes.items():
            if name not in shared:
                offsets[name] = [self.nbytes]
                self.nbytes += size
        if shared:
            lives = [(sizes[name], span, name) for name, own in shared.items() for span in own]
            places, top = placed([(size, span) for size, span, _ in lives])
            for (_, _, name), place in zip(lives, places, strict=True):
                offsets.setdefault(name, []).append(self.nbytes + place)
            self.nbytes += top
        self.parts: list[tuple[str, int, Shape, DType]] = []
        self._later: list[tuple[str, int, Shape, DType]] = []
        for name, meta in here.items():
            first, *others = offsets[name]
            self.parts.append((name, first, meta.shape, meta.dtype))
            self._later += [(name, offset, meta.shape, meta.dtype) for offset in others]

    def at(self, address: int, device: Device, owner: object = None) -> dict[str, ArrayView]:
        """The buffers of a block at ``address`` by name, without the streamed ones."""
        found = {
            name: ArrayView(address + offset, shape, dtype, device, owner)
            for name, offset, shape, dtype in self.parts
        }
        if not self._later:
            return found
        later: dict[str, list[ArrayView]] = {}
        for name, offset, shape, dtype in self._later:
            later.setdefault(name, []).append(ArrayView(address + offset, shape, dtype, device, owner))
        return Lasting(found, later)

    def views(self, address: int, memory: Memory) -> Any:
        """The buffers by name: those of a block at ``address``, and streamed ones, allocated when they are
        read."""
        found = self.at(address, memory.device)
        return Buffers(found, self.streamed, memory.view) if self.streamed else found


def placed(lives: Sequence[tuple[int, Span]]) -> tuple[list[int], int]:
    """Where buffers of (bytes, time) lie, so that no two that live at once overlap, and the end of all. Each
    lies as low as it can; placed first are those that take most bytes for most of the time, those that are
    largest, or those that begin first, whichever takes least."""
    ends = [stop for _, (_, stop) in lives if stop < math.inf]
    last = 1 + max(ends, default=0.0)

    def held(i: int) -> float:
        size, (start, stop) = lives[i]
        return size * (min(stop, last) - start)

    numbers = range(len(lives))
    orders = (
        sorted(numbers, key=lambda i: (-held(i), lives[i][1])),
        sorted(numbers, key=lambda i: (-lives[i][0], lives[i][1])),
        sorted(numbers, key=lambda i: (lives[i][1], -lives[i][0])),
    )
    return min((_placed(lives, order) for order in orders), key=lambda found: found[1])


def _placed(lives: Sequence[tuple[int, Span]], order: Sequence[int]) -> tuple[list[int], int]:
    offsets, top = [0] * len(lives), 0
    done: list[tuple[int, int, Span]] = []  # begin, end, time
    for i in order:
        size, (start, stop) = lives[i]
        at = 0
        for begin, end, _ in sorted(one for one in done if one[2][0] < stop and start < one[2][1]):
            if at + size <= begin:
                break
            at = max(at, end)
        offsets[i] = at
        done.append((at, at + size, (start, stop)))
        top = max(top, at + size)
    return offsets, top


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
        if type(found) is Lasting:
            return found.again()
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
