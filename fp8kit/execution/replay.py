"""Recorded calls: what an operation put on a stream, done again without the operation's Python.

Operations are pure: what they launch on a stream follows from the plan, the stream and the addresses of
their arrays. So the launches of one call, with its addresses replaced, are those of the same call on other
arrays. Where allocators give the same addresses step after step, nothing needs to be replaced, and the
launches become a CUDA graph. Nothing here keeps the arrays' memory alive: the caller holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

Key = tuple[Any, ...]
ALIGNMENT = 256  # bytes: what kernels and products are chosen by is the same for addresses that agree in it
_LOW_BITS = (ALIGNMENT - 1).__and__


class Replays:
    """The recorded calls of one function, by key (stream, then addresses; 0 or None where there is no array).

    A call with known addresses is done again as it was. A call with others is a recorded one, moved: of each
    ``form`` (stream, alignments) the first call is recorded for that. Addresses are recorded as they are when
    they come a second time; where the call can be moved, only once addresses keep coming again: those of a
    batch of another length do so by chance. The more of a function's calls are recorded as they are, the
    longer new addresses must have stayed away: where an allocator goes on giving others, calls are moved.

    ``recorder``: makes the engine's context manager. It yields a recording, to be called later: it launches
    again what was launched within. ``complete``: whether it holds all that was launched.
    ``moving(addresses, sizes)``: a function of other addresses that does the same there, and returns whether
    it has; None where that cannot be. ``sizes``: bytes of the arrays at the key's addresses; without them no
    call is moved. ``joined``: places of the arrays that are read as one where they lie side by side.
    ``found``: what was recorded as it was, by key: whoever calls often looks there before it calls ``run``.
    """

    LIMIT = 1024  # calls; beyond so many all are forgotten
    # calls in a row with addresses that have come before: what moves is recorded as it is then; twice as many
    # for each FEW that are recorded so already, up to 2^DOUBLED times: a function is that of all equal layers
    STEADY, FEW, DOUBLED = 4, 8, 8
    # recorded calls of all functions in the process, some kB each; beyond so many nothing more is recorded
    PROCESS_LIMIT = 16384
    total = 0  # recorded calls in the process
    __slots__ = ("_joined", "_moving", "_recorder", "_seen", "_sizes", "_steady", "found")

    def __init__(
        self,
        recorder: Callable[[], AbstractContextManager[Any]],
        sizes: Sequence[int] = (),
        joined: Sequence[int] = (),
    ) -> None:
        self._recorder, self._sizes, self._joined = recorder, sizes, joined
        self.found: dict[Key, Callable[[], None]] = {}
        self._moving: dict[Key, Callable[[Sequence[Any]], bool] | None] = {}
        self._seen: set[int] = set()  # hashes of keys that have come once
        self._steady = 0  # calls since the last whose key was new

    def run(self, key: Key, function: Callable[..., Any], *arguments: Any) -> None:
        """``function(*arguments)``, or what it did when it was called before."""
        found = self.found.get(key)
        if found is not None:
            found()
            return
        addresses, mark = key[1:], hash(key)
        again = mark in self._seen
        self._steady = self._steady + 1 if again else 0
        if not again:
            self._bound(self._seen)
            self._seen.add(mark)
        form = self._form(key[0], addresses) if self._sizes else None
        if form is None or form in self._moving:
            moving = None if form is None else self._moving[form]
            steady = self._steady >= self.STEADY << min(len(self.found) // self.FEW, self.DOUBLED)
            waits = not steady or Replays.total >= self.PROCESS_LIMIT
            if moving is not None and waits and moving(addresses):
                return
            if not again:
                function(*arguments)
                return
        if Replays.total >= self.PROCESS_LIMIT:
            function(*arguments)
            return
        with self._recorder() as recording:
            function(*arguments)
        if not recording.complete:
            return
        if form is not None and form not in self._moving:
            self._bound(self._moving)
            self._moving[form] = recording.moving(addresses, self._sizes)
            Replays.total += 1
        if again:
            self._bound(self.found)
            self.found[key] = recording
            Replays.total += 1

    def _form(self, stream: int, addresses: Key) -> Key:
        """What a call must have in common with a recorded one to be it, moved: the stream, the alignment of
        every array, which are absent or the same, and which parts of a weight begin where another one ends:
        operations take such parts as one. Of other arrays that says nothing: allocators lay them side by side
        or not as it comes."""
        sizes, places = self._sizes, dict(zip(addresses, range(len(addresses)), strict=True))
        joined = [places.get(addresses[i] + sizes[i]) for i in self._joined if addresses[i]]
        # of None the bits are NotImplemented
        return stream, len(places), *map(bool, addresses), *map(_LOW_BITS, addresses), *joined

    def _bound(self, kept: Any) -> None:
        """Make room for one more."""
        if len(kept) >= self.LIMIT:
            if kept is not self._seen:
                Replays.total -= len(kept)
            kept.clear()

    def forget(self) -> None:
        """Forget every call."""
        type(self).total -= len(self.found) + len(self._moving)  # the module may be gone by now
        self.found.clear()
        self._moving.clear()
        self._seen.clear()

    def __del__(self) -> None:
        self.forget()  # also when the interpreter ends, and the module's names are gone


def replays(kernels: Any, sizes: Sequence[int] = (), joined: Sequence[int] = ()) -> Replays | None:
    """For a function that works by these kernels (``dispatch.kernels``), on arrays of ``sizes`` bytes, those
    of ``joined`` perhaps as one; None where their calls cannot be recorded: on the CPU, with a plugin's or an
    override's kernels, and with FP8KIT_REPLAYS=0."""
    recorder = getattr(kernels, "recorder", None)
    return None if recorder is None else Replays(recorder, sizes, joined)


def direct(kernels: Any) -> Replays | None:
    """The recorded calls of single kernels, those that no operation makes; None as ``replays``."""
    if kernels.replays is None and kernels.recorder is not None:
        kernels.replays = Replays(kernels.recorder)
    found: Replays | None = kernels.replays
    return found
