"""What the calls of one step have shown: arrays on their devices, and how they come to the host.

The counts and sums of all calls on one stream lie in one arena of device memory, the same in every step, so
that a call that comes again has the same addresses and can be replayed. At the end of the step one copy per
arena is put on that stream, into page-locked memory; the host waits for it only when it reads the numbers.
The next step writes the arena after the copy, on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.formats import uint8
from fp8kit.inspection import Entry, Place
from fp8kit.numerics.dumps import on_host
from fp8kit.spec import Meta

Array = np.ndarray[Any, Any]
_ARENA = 1 << 16  # bytes: of some hundred tensors without histograms
_ALIGNMENT = 256  # bytes, of a call's arrays: replayed calls are told apart by it


class Arena:
    """Memory for the arrays of calls on one stream, at least ``nbytes`` bytes of a frontend's ``memory``."""

    def __init__(self, memory: Any, stream: int, nbytes: int) -> None:
        self.view: ArrayView = memory.view(Meta((max(nbytes, _ARENA),), uint8))
        self._stream, self._used = stream, 0
        self.waiting = 0  # calls that have places in it, and have not shown these yet

    def place(self, nbytes: int) -> ArrayView | None:
        """So many bytes of it, uint8, contents undefined; None where they are not left."""
        start = self._used
        if start + nbytes > self.view.size:
            return None
        self._used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.waiting += 1
        return ArrayView(self.view.ptr + start, (nbytes,), uint8, self.view.device, self)

    def fetch(self) -> Copy:
        """Begin to copy it to the host, behind what is on its stream now, and begin to fill it anew."""
        used, self._used = min(self._used, self.view.size), 0
        return Copy(self.view.slice(0, 0, used), self._stream)

    @property
    def is_used(self) -> bool:
        """Whether a step has arrays in it."""
        return self._used > 0

    def part(self, array: ArrayView) -> Array:
        """One of its arrays on the host, now; waits."""
        return Copy(array, self._stream).part(array)


class Copy:
    """Bytes of a device on their way to the host."""

    def __init__(self, view: ArrayView, stream: int) -> None:
        self._start, self._device = view.ptr, view.device
        fetched = arrays.provider(view.device).fetch(view, stream)
        self._fetched: Callable[[], Array] | None = fetched
        if view.device.kind == "cpu":  # the memory itself, which will have other contents
            self._fetched, self._array = None, fetched().copy()

    @property
    def on_host(self) -> bool:
        """Whether it need not be waited for."""
        return self._device.kind == "cpu"

    def part(self, array: ArrayView) -> Array:
        """One of the arrays in it; waits until it is there."""
        if self._fetched is not None:
            self._array, self._fetched = self._fetched(), None
        start = array.ptr - self._start
        return self._array[start : start + array.size]


class Arenas:
    """The arenas of all streams, kept from step to step."""

    def __init__(self) -> None:
        self._arenas: dict[Any, list[Arena]] = {}

    def place(self, memory: Any, nbytes: int) -> ArrayView:
        """Memory for a call that is about to run: on the device and the stream of ``memory``."""
        stream = memory.stream()
        arenas = self._arenas.setdefault((memory.device, stream), [])
        for arena in arenas:
            found = arena.place(nbytes)
            if found is not None:
                return found
        arenas.append(Arena(memory, stream, nbytes))
        found = arenas[-1].place(nbytes)
        assert found is not None
        return found

    def fetch(self) -> dict[Arena, Copy]:
        """Begin to copy all that a step has used. An arena that it has not used is let go, and so is one that
        a call still fills."""
        copies: dict[Arena, Copy] = {}
        for key, own in list(self._arenas.items()):
            copies |= {arena: arena.fetch() for arena in own if arena.is_used}
            kept = [arena for arena in own if arena in copies and not arena.waiting]
            if kept:
                self._arenas[key] = kept
            else:
                del self._arenas[key]
        return copies


class Shown:
    """The arrays of one step, ``taken``: each with what it holds, and the place of its layer in a stack."""

    def __init__(self) -> None:
        self.taken: list[tuple[Entry, Place | None, Any]] = []
        self._copies: dict[Arena, Copy] = {}

    def take(self, entries: Mapping[str, Entry], shown: Sequence[Any], place: Place | None = None) -> None:
        """Keep the arrays that a call has filled, until the step's end."""
        self.taken += [(own, place, array) for own, array in zip(entries.values(), shown, strict=True)]
        for arena in {owner for array in shown if isinstance(owner := _owner(array), Arena)}:
            arena.waiting -= 1

    def fetch(self, arenas: Arenas) -> bool:
        """Begin to copy the arrays to the host. Returns whether all copies have arrived; True also where some
        arrays lie outside of the arenas: only ``host`` copies those."""
        self._copies = arenas.fetch()
        others = any(not isinstance(_owner(array), Arena) for *_, array in self.taken)
        return others or all(copy.on_host for copy in self._copies.values())

    def host(self, array: Any) -> Array:
        """One of the arrays on the host; waits until it is there."""
        owner = _owner(array)
        if not isinstance(owner, Arena):
            return on_host(array)
        copy = self._copies.get(owner)
        return owner.part(array) if copy is None else copy.part(array)


def _owner(array: Any) -> Any:
    return array.owner if isinstance(array, ArrayView) else None
