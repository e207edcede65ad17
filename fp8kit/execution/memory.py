"""Where the buffers of a call lie: ``Layout``, the thread's ``Scratch``, and what a frontend supplies,
``Memory``."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.buffers import Buffers, Lasting, nbytes_of, streamed
from fp8kit.formats import DType
from fp8kit.spec import Meta

ALIGNMENT = 256  # bytes, of every buffer in a block
SHARED = 64 << 10  # bytes of a buffer from which on it shares them with others that are used at other times
Span = tuple[float, float]  # from a moment on, up to another
ALWAYS: Span = (0, math.inf)


def is_large(meta: Meta) -> bool:
    """Whether a buffer may share memory with others."""
    return nbytes_of(meta) >= SHARED


class Region(NamedTuple):
    """``nbytes`` of a call's memory outside of its arena in which temporaries may lie. ``taken``: when parts
    of it are in use by their owner, as (offset, bytes, span)."""

    nbytes: int
    taken: Sequence[tuple[int, int, Span]]


class Layout:
    """Offsets of buffers that live and die together in one block of ``nbytes`` bytes.

    With ``streaming`` the large ones are ``streamed`` instead: each is an allocation of its own
    (``fp8kit.buffers``). ``spans()``: the times at which each buffer is in use (``execution.lifetimes``).
    Large buffers that are never in use at the same time then share bytes. A buffer that is used, freed and
    used again may lie at another place the second time (``buffers.Lasting``). ``regions()``: further memory
    in which large buffers may lie while it is free.
    """

    __slots__ = ("_later", "nbytes", "parts", "streamed")

    def __init__(
        self,
        metas: Mapping[str, Meta],
        streaming: bool = False,
        spans: Callable[[], Mapping[str, tuple[Span, ...]]] | None = None,
        regions: Callable[[], Sequence[Region]] | None = None,
    ) -> None:
        self.streamed: dict[str, Meta] = streamed(metas) if streaming else {}
        here = {name: meta for name, meta in metas.items() if name not in self.streamed}
        sizes = {name: -(-nbytes_of(meta) // ALIGNMENT) * ALIGNMENT for name, meta in here.items()}
        # without spans sizes are not compared: where they are symbols, torch.compile would guard on that
        large = [name for name in sizes if is_large(here[name])] if spans is not None else []
        shares = len(large) > (regions is None) and not self.streamed
        times = spans() if spans is not None and shares else {}
        shared = {name: times.get(name) or (ALWAYS,) for name in large} if times else {}
        places: dict[
            str, list[tuple[int, int]]
        ] = {}  # (0 for the block, else 1 + number of the region; offset)
        self.nbytes = 0
        for name, size in sizes.items():
            if name not in shared:
                places[name] = [(0, self.nbytes)]
                self.nbytes += size
        if shared:
            lives = [(sizes[name], span, name) for name, own in shared.items() for span in own]
            beside = regions() if regions is not None else ()
            found, top = placed([(size, span) for size, span, _ in lives], beside)
            for (_, _, name), (where, offset) in zip(lives, found, strict=True):
                places.setdefault(name, []).append((where, offset if where else self.nbytes + offset))
            self.nbytes += top
        self.parts: list[tuple[str, int, int, Shape, DType]] = []
        self._later: list[tuple[str, int, int, Shape, DType]] = []
        for name, meta in here.items():
            first, *others = places[name]
            self.parts.append((name, *first, meta.shape, meta.dtype))
            self._later += [(name, *place, meta.shape, meta.dtype) for place in others]

    def at(
        self, address: int, device: Device, owner: object = None, regions: Sequence[int] = ()
    ) -> dict[str, ArrayView]:
        """The buffers of a block at ``address`` by name, without the streamed ones. ``regions``: the
        addresses of the layout's regions."""
        bases = address, *regions
        found = {
            name: ArrayView(bases[where] + offset, shape, dtype, device, owner)
            for name, where, offset, shape, dtype in self.parts
        }
        if not self._later:
            return found
        later: dict[str, list[ArrayView]] = {}
        for name, where, offset, shape, dtype in self._later:
            later.setdefault(name, []).append(ArrayView(bases[where] + offset, shape, dtype, device, owner))
        return Lasting(found, later)

    def views(self, address: int, memory: Memory) -> Any:
        """The buffers by name: those of a block at ``address``, and streamed ones, allocated when they are
        read."""
        found = self.at(address, memory.device)
        return Buffers(found, self.streamed, memory.view) if self.streamed else found


Place = tuple[int, int]  # 0 for the block itself, else 1 + number of a region; bytes from its start


def placed(lives: Sequence[tuple[int, Span]], regions: Sequence[Region] = ()) -> tuple[list[Place], int]:
    """Where buffers of (bytes, time) lie, and the end of the last one in the block. No two that live at the
    same time overlap. Each buffer lies in a region if it fits into one, else in the block, as low as
    possible. The order of placing is tried in three ways (most bytes times time first, largest first,
    earliest first), each from the first region and from the last one; the result that takes the least of the
    block is returned."""
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
    numbered = [(i, region) for i, region in enumerate(regions, 1)]
    tried = (numbered, numbered[::-1]) if numbered else (numbered,)
    return min(
        (_placed(lives, order, beside) for order in orders for beside in tried), key=lambda found: found[1]
    )


def _placed(
    lives: Sequence[tuple[int, Span]], order: Sequence[int], regions: Sequence[tuple[int, Region]]
) -> tuple[list[Place], int]:
    places, top = [(0, 0)] * len(lives), 0
    # begin, end, time, sorted: in the block, and in each region
    done = {i: sorted((at, at + size, span) for at, size, span in region.taken) for i, region in regions}
    done[0] = []
    for i in order:
        size, span = lives[i]
        for where, region in (*regions, (0, None)):
            at = _lowest(size, span, done[where])
            if region is None or at + size <= region.nbytes:
                break
        places[i] = where, at
        bisect.insort(done[where], (at, at + size, span))
        if where == 0:
            top = max(top, at + size)
    return places, top


def _lowest(size: int, span: Span, done: Sequence[tuple[int, int, Span]]) -> int:
    """The lowest offset, a multiple of ``ALIGNMENT``, at which no buffer in ``done``, sorted, uses so many
    bytes in that time."""
    start, stop = span
    at = 0
    for begin, end, (first, last) in done:
        if first < stop and start < last:
            if at + size <= begin:
                break
            if at < end:
                at = -(-end // ALIGNMENT) * ALIGNMENT
    return at


class Arena:
    """A piece of memory for temporaries. ``kept``: it stays the thread's, so the next call has it at the same
    address."""

    LIMIT = 4096  # layouts; beyond so many (sequences of ever new lengths) all are forgotten
    __slots__ = ("_views", "address", "device", "kept", "nbytes", "owner")

    def __init__(self, nbytes: int, address: int, owner: object, device: Device, kept: bool) -> None:
        self.nbytes, self.address, self.owner, self.device, self.kept = nbytes, address, owner, device, kept
        self._views: dict[Layout, dict[str, ArrayView]] = {}

    def views(self, layout: Layout, memory: Memory, regions: Sequence[int] = ()) -> Any:
        """The buffers of a layout in this arena, and in ``regions`` at those addresses; contents undefined;
        not to be changed."""
        if regions:
            return layout.at(self.address, self.device, None, regions)
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


class _Own(threading.local):
    """The arenas that a thread takes: its own, or at first those of all threads."""

    def __init__(self, shared: dict[tuple[Device, int], Arena]) -> None:
        self.arenas = shared


class Scratch:
    """Memory for the temporaries of one operation at a time, one arena for each stream of a device.

    Work on a stream is done in order, so the next operation on that stream can use the same memory, whichever
    thread calls it (a backward pass runs on a thread of its own). A caller of ``arena`` owns the arena until
    it calls ``release``, when all its work is on the stream; another caller gets another arena in the
    meantime. Three kinds of arena are not kept: larger ones than ``KEPT``, those of all but the last
    ``STREAMS`` streams, and those on the CPU, where allocating costs little. ``allocate(nbytes, device)``
    returns (address, owner).
    """

    KEPT = 48 << 20  # bytes: what a product's workspace and small operands need
    STREAMS = 16  # a program that makes a stream for each piece of work keeps the last ones

    def __init__(self, allocate: Callable[[int, Device], tuple[int, object]]) -> None:
        self.allocate = allocate
        self._own = _Own({})

    @property
    def arenas(self) -> dict[tuple[Device, int], Arena]:
        """The arenas that no call uses now."""
        return self._own.arenas

    def arena(self, nbytes: int, device: Device, stream: int) -> Arena:
        """At least ``nbytes`` bytes, contents undefined, for work on ``stream``."""
        found: Arena | None = self._own.arenas.pop((device, stream), None)
        if found is None or found.nbytes < nbytes:
            found = None  # so that its memory may be the next one's
            kept = nbytes <= self.KEPT and device.kind != "cpu"
            found = Arena(nbytes, *self.allocate(nbytes, device), device, kept)
        return found

    def release(self, arena: Arena, stream: int) -> None:
        """Give an arena back."""
        if not arena.kept:
            return
        arenas = self._own.arenas
        if len(arenas) >= self.STREAMS:
            with suppress(KeyError, RuntimeError, StopIteration):  # another thread was quicker
                del arenas[next(iter(arenas))]
        arenas[arena.device, stream] = arena

    @contextmanager
    def separate(self) -> Iterator[dict[tuple[Device, int], Arena]]:
        """A block in which this thread starts without arenas. The arenas that it makes are in the dictionary;
        a captured graph must keep them."""
        before, self._own.arenas = self._own.arenas, {}
        try:
            yield self._own.arenas
        finally:
            self._own.arenas = before


class Memory(Protocol):
    """What a frontend supplies for one device: its allocator, in terms of its own arrays, and its stream."""

    device: Device

    def maker(self, meta: Meta) -> Callable[[], Any]:
        """A function that allocates an array of ``meta``: zeros where ``meta.zero``, otherwise undefined."""

    def view(self, meta: Meta) -> ArrayView:
        """A fresh array of ``meta``, contents undefined, as a view whose owner is the array."""

    def address(self, array: Any) -> int:
        """The address of an array."""

    def stream(self) -> int:
        """The handle of the current stream."""

    def arena(self, nbytes: int, stream: int) -> Arena:
        """Memory for one call's temporaries."""

    def release(self, arena: Arena, stream: int) -> None:
        """Give a ``kept`` arena back, when all the call's work is on the stream."""
