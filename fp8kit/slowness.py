"""What makes this process several times slower than it need be, each said once, with what to do about it.

Nothing fails where this is used: a way round was taken. ``fp8kit doctor`` lists what applies to a machine.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

log = logging.getLogger("fp8kit")
_LIMIT = 1024


class Slow(NamedTuple):
    """``cause``: what is not as it should be, and why. ``effect``: what is done instead. ``cure``: what to
    do."""

    cause: str
    effect: str
    cure: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.effect}; {self.cure}"


_SAID: dict[Slow, None] = {}
_LOCK = threading.RLock()  # a signal's handler may compute


def say(cause: str, effect: str, cure: str) -> None:
    """Warn, on the logger "fp8kit", the first time in this process that this comes."""
    one = Slow(cause, effect, cure)
    with _LOCK:
        if one in _SAID or len(_SAID) >= _LIMIT:
            return
        _SAID[one] = None
    log.warning("%s", one)


def said() -> tuple[Slow, ...]:
    """Returns what this process was warned of so far."""
    with _LOCK:
        return tuple(_SAID)


def forget() -> None:
    """Warn of everything again, as a new process does."""
    with _LOCK:
        _SAID.clear()
