"""Calls of a plan that are known already: what an operation put on a stream, by the addresses that it was
given.

Operations are pure: what they put on a stream follows from the plan, the stream and the addresses of their
arrays. In a training that goes on, allocators give the same addresses again step by step, so that a door
which finds them here puts the same work on the stream at once. Nothing keeps the arrays' memory alive:
whoever calls has arrays there now.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Key = tuple[Any, ...]


class Replays:
    """What a plan's forward, or its backward, did, by stream and addresses.

    ``recorder``: the engine's context manager that gives what was done within as something to call, ``whole``
    where that was all. An object of ``dispatch.kernels`` has one for kernels that are called by themselves,
    ``again``; none where calls cannot be recorded: on the CPU, and where a plugin's or an override's kernels
    are among them.
    """

    LIMIT = 1024  # beyond so many all is forgotten
    # of all plans of the process, some kB each; beyond so many nothing more is recorded until plans go
    MOST = 16384
    # unknown calls in a row; where addresses never come again, only one of so many is recorded from there on
    PATIENCE = 64
    kept = 0  # by the process
    __slots__ = ("found", "recorder", "unknown")

    def __init__(self, recorder: Callable[[], AbstractContextManager[Any]]) -> None:
        self.recorder = recorder
        self.found: dict[Key, Callable[[], None]] = {}
        self.unknown = 0

    def run(self, key: Key, function: Callable[..., Any], *arguments: Any) -> None:
        """``function(*arguments)``, or what it did when it was called with arguments that this key stands
        for."""
        found = self.found.get(key)
        if found is not None:
            self.unknown = 0
            found()
            return
        self.unknown += 1
        if Replays.kept >= self.MOST or (self.unknown > self.PATIENCE and self.unknown % self.PATIENCE):
            function(*arguments)
            return
        with self.recorder() as made:
            function(*arguments)
        if made.whole:
            if len(self.found) >= self.LIMIT:
                self.forget()
            self.found[key] = made
            Replays.kept += 1

    def forget(self) -> None:
        """Know no call any more."""
        Replays.kept -= len(self.found)
        self.found.clear()

    def __del__(self) -> None:
        type(self).kept -= len(self.found)


def replays(kernels: Any) -> Replays | None:
    """For a plan of these kernels; None where their calls cannot be recorded."""
    again = getattr(kernels, "again", None)
    return None if again is None else Replays(again.recorder)
