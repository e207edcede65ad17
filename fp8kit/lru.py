"""``LRU``: a bounded cache that forgets what was not asked for longest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Info(NamedTuple):
    """How a cache does: entries, their limit, and how often a key was found or not."""

    size: int
    limit: int
    hits: int
    misses: int


class LRU(Generic[K, V]):
    """At most ``limit`` values by key. Threads may ask at once.

    ``retire(key, value)`` is told of each value that is forgotten, after which nothing here refers to it.
    """

    def __init__(self, limit: int, retire: Callable[[K, V], Any] | None = None) -> None:
        self.limit = limit
        self.misses = 0
        self._hits = 0
        self._retire = retire
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def info(self) -> Info:
        """Size, limit, hits and misses."""
        return Info(len(self._values), self.limit, self._hits, self.misses)

    def get(self, key: K) -> V | None:
        """The value of a key, None where there is none."""
        found = self._values.get(key)
        if found is None:
            self.misses += 1
            return None
        self._hits += 1
        if key in self._values:  # another thread may have retired it meanwhile
            self._values.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> V:
        """Keep a value; the oldest go where there are too many. Returns the value."""
        with self._lock:
            self._values[key] = value
            old = [self._values.popitem(last=False) for _ in range(len(self._values) - self.limit)]
        if self._retire is not None:
            for former, retired in old:
                self._retire(former, retired)
        return value

    def make(self, key: K, make: Callable[[K], V]) -> V:
        """The value of a key, made by ``make(key)`` where there is none, by one thread. Errors of ``make``
        are the caller's, and nothing is kept."""
        found = self.get(key)
        if found is None:
            with self._making:
                found = self._values.get(key)  # another thread may have made it meanwhile
                if found is None:
                    found = self.put(key, make(key))
        return found

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()
