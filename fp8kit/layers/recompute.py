"""What a recomputed pass finds of the first one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8kit.errors import AutogradError
from fp8kit.scoped import changed


class Kept(NamedTuple):
    """What one call of an FP8 layer found in the first pass: the layer, copies of its forward scales (None
    where it has none), and cached weights, if it took any; arrays of a frontend."""

    owner: object
    scales: Any
    weights: Any


@dataclass
class Pass:
    """A pass over a checkpointed function: the ``first``, which fills ``calls``, or a later one, which reads
    them in the same order.

    A first pass may run within an outer checkpoint: ``above`` is that one's first pass, which remembers the
    calls too, or its recompute pass, which this one reads from.
    """

    first: bool
    calls: list[Kept]
    above: Pass | None = None
    position: int = 0

    def next(self, owner: object) -> Kept:
        """Returns the next call, which must be of ``owner``; AutogradError otherwise."""
        kept = self.calls[self.position] if self.position < len(self.calls) else None
        if kept is None or kept.owner is not owner:
            got = f"{type(owner).__name__} as FP8 layer {self.position}"
            raise AutogradError(
                "checkpoint", "function", got, "the same layers in the same order as in the first pass"
            )
        self.position += 1
        return kept


class Passes(threading.local):
    """The pass that a frontend runs, thread by thread: ``running``, None outside of any."""

    def __init__(self) -> None:
        self.running: Any = None

    def within(self, running: Pass) -> AbstractContextManager[None]:
        """Around a pass."""
        return changed(self, running=running)

    def first(self) -> bool:
        """Whether this is a checkpoint's first pass: perhaps unrecorded, but a training step all the same."""
        running = self.running
        return running is not None and running.first

    def recomputing(self) -> bool:
        """Whether this is a recompute pass, or within one: a first pass has computed the same before."""
        running = self.running
        while running is not None and running.first:
            running = running.above
        return running is not None

    def recall(self, owner: object) -> Kept | None:
        """Returns what this call of ``owner`` found in the first pass that is being recomputed; None where
        none is."""
        running = self.running
        if running is None:
            return None
        if not running.first:
            return running.next(owner)  # type: ignore[no-any-return]
        if running.above is None or running.above.first:
            return None
        running.calls.append(running.above.next(owner))
        return running.calls[-1]  # type: ignore[no-any-return]

    def keep(self, kept: Kept) -> None:
        """Keep, in a first pass, what a call found, for its recompute passes."""
        running = self.running
        while running is not None:
            running.calls.append(kept)
            running = running.above
