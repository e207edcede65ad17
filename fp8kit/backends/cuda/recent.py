"""The most recently used of values that are dear to make."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most ``size`` values, each made by ``make`` when its key is first asked for. Threads may ask at
    once; a value is made once.

    The one that was not asked for longest goes first: ``retire(key, value)`` is told, after which nothing
    here refers to it. An error of ``make`` is the caller's, and nothing is kept.
    """

    def __init__(self, size: int, make: Callable[[K], V], retire: Callable[[K, V], None]) -> None:
        self.size = size
        self._make = make
        self._retire = retire
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __call__(self, key: K) -> V:
        """The value of a key."""
        found = self._find(key)
        if found is None:
            with self._making:
                found = self._find(key)  # another thread may have made it meanwhile
                if found is None:
                    found = self._make(key)
                    self._keep(key, found)
        return found

    def _find(self, key: K) -> V | None:
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
            return found

    def _keep(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            old = [self._values.popitem(last=False) for _ in range(len(self._values) - self.size)]
        for former, retired in old:
            self._retire(former, retired)
