"""A recorded call on arrays that lie elsewhere each time, as in a training whose batches have ever other
lengths.

The arguments of all launches of a call lie in one block of host memory. Each pointer in it is the address of
one of the call's arrays plus a fixed number of bytes, so that one indexed assignment writes all pointers of a
call on other arrays.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.steps import Launch, Replay, Step
from fp8kit.backends.cuda.structures import Structure

_WORD = 8  # bytes of an argument


class _Fixed(Exception):
    """The call cannot be moved: something in it is not, beyond doubt, in one of its arrays."""


class _Arrays:
    """Finds the array that an address lies in."""

    def __init__(self, addresses: Sequence[int | None], sizes: Sequence[int]) -> None:
        found = sorted(
            (address, i) for i, address in enumerate(addresses) if address is not None and sizes[i]
        )
        self.starts = [address for address, _ in found]
        self.places = [i for _, i in found]
        self.ends = [address + sizes[i] for address, i in found]
        if any(end > start for end, start in zip(self.ends, self.starts[1:], strict=False)):
            raise _Fixed  # two names of one array

    def find(self, address: int) -> tuple[int, int] | None:
        """Number of the array, and bytes from its start. The end of an array is its own where no other one
        begins: buffers of no bytes lie there."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0 or address > self.ends[at]:
            return None
        return self.places[at], address - self.starts[at]


class Moving(Replay):
    """The steps of a recording, done on arrays at other addresses; by one thread at a time."""

    def __init__(
        self, made: Replay, steps: list[Step], addresses: Sequence[int | None], sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self.device, self.stream, self.names = made.device, made.stream, made.names
        arrays, launches = _Arrays(addresses, sizes), [step.replay for step in steps]
        words = sum(-(-one.size // 16) * 2 for one in launches if isinstance(one, Launch))
        memory = np.zeros(words + 2, np.uint64)
        self._words = memory[memory.ctypes.data % 16 // _WORD :]  # structures lie at multiples of 16 bytes
        self._kernels = [one.kernel for one in launches if isinstance(one, Launch)]  # held
        self._lock = threading.Lock()
        positions: list[int] = []  # of pointers, in words
        places: list[
            tuple[int, int]
        ] = []  # array and shift of each of these pointers, then of those of works
        others: list[tuple[int, int]] = []
        self._steps: list[tuple[Callable[[], int] | None, Callable[..., Any] | None, int, int]] = []
        at = 0
        for step in steps:
            if isinstance(step.replay, Launch):
                pointers = _pointers(step.replay, arrays)
                positions += [at + word for word, _ in pointers]
                places += [place for _, place in pointers]
                self._steps.append((self._launch(step.replay, at), None, 0, 0))
                at += -(-step.replay.size // 16) * 2
            elif step.work is None:
                raise _Fixed
            else:
                begin = len(others)
                others += [_want(arrays.find(a)) if a else (len(sizes), 0) for a in step.addresses]
                self._steps.append((None, step.work, begin, len(others)))
        self._positions = np.array(positions, np.int64)
        self._places = np.array([place for place, _ in places + others], np.int64)
        self._shifts = np.array([shift for _, shift in places + others], np.uint64)

    def _launch(self, launched: Launch, at: int) -> partial[int]:
        """Copy the launch to word ``at`` of this call's memory, and return a function that makes it there."""
        start, kernel = self._words.ctypes.data + _WORD * at, launched.kernel
        ctypes.memmove(start, launched.start, launched.size)
        first, count = start + launch.CONFIG + _WORD * kernel.table, len(kernel.parameters)
        table = (ctypes.c_uint64 * count)(*range(first, first + _WORD * count, _WORD))
        return partial(launched.func, ctypes.c_void_p(start), kernel.handle, table, None)

    def __call__(self, addresses: Sequence[int | None]) -> bool:
        """Make the call on the arrays at ``addresses``, which are in the recorded call's order. Returns
        True; or False, having done nothing, while another thread makes this call."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            super().__call__(addresses)
        finally:
            self._lock.release()
        return True

    def place(self, addresses: Sequence[int | None]) -> list[int]:
        """Write the launches' pointers for arrays at ``addresses``. Returns the addresses that ``Step.work``
        is called with, one step's after the other."""
        values = np.array([*[a or 0 for a in addresses], 0], np.uint64)[self._places] + self._shifts
        count = len(self._positions)
        self._words[self._positions] = values[:count]
        return values[count:].tolist()  # type: ignore[no-any-return]

    def _do(self, addresses: Sequence[int | None]) -> None:
        others = self.place(addresses)
        for i, (replay, work, begin, end) in enumerate(self._steps):
            if replay is not None:
                status = replay()
            else:
                status = work(*others[begin:end], self.stream)  # type: ignore[misc]
            if status:
                self.check(i, status)


def moving(
    made: Replay, steps: list[Step], addresses: Sequence[int | None], sizes: Sequence[int]
) -> Callable[[Sequence[int | None]], bool] | None:
    """Returns the steps of ``made``, a recording, on other arrays; None where that is not certain to be the
    same call."""
    try:
        return Moving(made, steps, addresses, sizes) if steps else None
    except _Fixed:
        return None


def _pointers(launched: Launch, arrays: _Arrays) -> list[tuple[int, tuple[int, int]]]:
    """Returns the pointers among a launch's arguments: (word from the launch's start, (array, shift)). In a
    structure whose pointers are not known nothing may look like one."""
    kernel, structure = launched.kernel, launched.structure
    words = (ctypes.c_uint64 * (launched.size // _WORD)).from_address(launched.start)
    first = launch.CONFIG // _WORD + kernel.table
    at = [first + i for i, is_pointer in enumerate(kernel.pointers) if is_pointer]
    if structure:
        first += len(kernel.parameters) - 1
        if isinstance(structure, Structure):
            if any(place % _WORD for place in structure.pointers):
                raise _Fixed
            at += [first + place // _WORD for place in structure.pointers]
        elif any(arrays.find(word) for word in words[first:]):
            raise _Fixed
    return [(word, _want(arrays.find(words[word]))) for word in at if words[word]]


def _want(place: tuple[int, int] | None) -> tuple[int, int]:
    if place is None:
        raise _Fixed
    return place
