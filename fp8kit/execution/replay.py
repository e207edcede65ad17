"""Recorded calls: what an operation put on a stream, done again by the addresses that it was given.

Operations are pure: what they launch on a stream follows from the plan, the stream and the addresses of
their arrays. In a training loop allocators give the same addresses step after step, so the same launches come
again; they are done from the recording, without the operation's Python. Nothing here keeps the arrays' memory
alive: the caller holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Key = tuple[Any, ...]


class Replays:
    """The recorded calls of one function, by key (stream and addresses).

    ``recorder``: makes the engine's context manager. It yields a recording, to be called later: it launches
    again what was launched within. ``complete``: whether it holds all that was launched.
    """

    LIMIT = 1024  # calls; beyond so many all are forgotten
    # recorded calls of all functions in the process, some kB each; beyond so many nothing more is recorded
    PROCESS_LIMIT = 16384
    # while so many recorded calls of all functions have not come again, one of so many unknown calls is
    # recorded: addresses that never come again, as in a training with another length in every batch
    PATIENCE = 256
    total = 0  # recorded calls in the process
    waiting = 0  # those that have not come again
    unknown = 0  # calls that were not recorded
    __slots__ = ("_found", "_recorder", "_waiting")

    def __init__(self, recorder: Callable[[], AbstractContextManager[Any]]) -> None:
        self._recorder = recorder
        self._found: dict[Key, Callable[[], None]] = {}
        self._waiting: set[Key] = set()

    def run(self, key: Key, function: Callable[..., Any], *arguments: Any) -> None:
        """``function(*arguments)``, or what it did when it was called for this key before."""
        found = self._found.get(key)
        if found is not None:
            if self._waiting and key in self._waiting:
                self._waiting.remove(key)
                Replays.waiting -= 1
            found()
            return
        if Replays.waiting >= self.PATIENCE:
            Replays.unknown += 1
        if Replays.total >= self.PROCESS_LIMIT or (
            Replays.waiting >= self.PATIENCE and Replays.unknown % self.PATIENCE
        ):
            function(*arguments)
            return
        with self._recorder() as recording:
            function(*arguments)
        if recording.complete:
            if len(self._found) >= self.LIMIT:
                self.forget()
            self._found[key] = recording
            self._waiting.add(key)
            Replays.total += 1
            Replays.waiting += 1

    def forget(self) -> None:
        """Forget every call."""
        Replays.total -= len(self._found)
        Replays.waiting -= len(self._waiting)
        self._found.clear()
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._found)

    def __del__(self) -> None:
        self.forget()


def replays(kernels: Any) -> Replays | None:
    """For a function that works by these kernels (``dispatch.kernels``); None where their calls cannot be
    recorded: on the CPU, with a plugin's or an override's kernels, and with FP8KIT_REPLAYS=0."""
    recorder = getattr(kernels, "recorder", None)
    return None if recorder is None else Replays(recorder)


def direct(kernels: Any) -> Replays | None:
    """The recorded calls of single kernels, those that no operation makes; None as ``replays``."""
    if getattr(kernels, "recorder", None) is None:
        return None
    if kernels.replays is None:
        kernels.replays = Replays(kernels.recorder)
    return kernels.replays  # type: ignore[no-any-return]
