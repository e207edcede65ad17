"""What a captured graph takes from the host and holds from then on: numbers that are part of a launch, and
where arrays lie.

Code that reads such a thing calls ``hold``, which does nothing unless a graph is being captured. Each replay
reads it again (``Held.check``) and raises an error if it has changed, since the graph would go on with the
old value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError

Read = Callable[[], list[Any]]
Look = Callable[[], tuple[list[str], Read, object]]  # names, what reads the values, what must stay alive


class Held(NamedTuple):
    """Things of one object: what an error calls them, how they are read, what they were, and what keeps their
    memory theirs."""

    names: list[str]
    read: Read
    values: list[Any]
    kept: object

    def check(self) -> None:
        """ArgumentError that names the first thing that is no longer what it was."""
        now = self.read()
        if now == self.values:
            return
        several = zip(self.names, now, self.values, strict=False)
        name, got, wanted = next(
            (one for one in several if one[1] != one[2]), ("arrays", len(now), len(self.values))
        )
        said = (
            f"{shown(wanted)}, as at the capture: the graph would go on with that; "
            "make a new graph after a change"
        )
        raise ArgumentError("graph", name, shown(got), said)


class _Thread(threading.local):
    held: dict[int, tuple[object, Look]] | None = None  # by the owner's identity


_thread = _Thread()


def hold(owner: object, look: Look) -> None:
    """While a graph is captured on this thread: it holds things of ``owner``. ``look()`` gives their names,
    what reads them, and what must stay alive meanwhile; it is called once, at the capture's end. Raises
    nothing."""
    if _thread.held is not None and id(owner) not in _thread.held:
        _thread.held[id(owner)] = owner, look


def capturing() -> bool:
    """Whether this thread is capturing a graph: its calls are recorded, not carried out."""
    return _thread.held is not None


@contextmanager
def capture() -> Iterator[list[Held]]:
    """Within, what this thread's calls hold is noted; it is in the list when the block has ended."""
    found: list[Held] = []
    held: dict[int, tuple[object, Look]] = {}
    _thread.held = held
    try:
        yield found
    finally:
        _thread.held = None
    for _, look in held.values():
        names, read, kept = look()
        found.append(Held(names, read, read(), kept))
