"""Bounded caches that forget what was not asked for longest, and how each does (``cache_info``)."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])

SHAPES = 16384  # entries of a cache by shape: a training on text meets thousands of lengths


class Info(NamedTuple):
    """How a cache does: entries, their limit, and how often a key was found or not."""

    size: int
    limit: int
    hits: int
    misses: int


class LRU(Generic[K, V]):
    """At most ``limit`` values by key. Threads may ask at once.

    ``retire(key, value)`` is told of each value that is forgotten, after which nothing here refers to it.
    ``name``: what ``cache_info`` calls it; without one it is not listed.
    """

    def __init__(self, limit: int, retire: Callable[[K, V], Any] | None = None, name: str = "") -> None:
        self.limit = limit
        self.misses = 0
        self._hits = 0
        self._retire = retire
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()
        if name:
            listed(name, lambda: self.info)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def info(self) -> Info:
        """Size, limit, hits and misses."""
        return Info(len(self._values), self.limit, self._hits, self.misses)

    def get(self, key: K) -> V | None:
        """Returns the value of a key, None where there is none."""
        try:
            found = self._values[key]
            self._values.move_to_end(key)
        except KeyError:  # there is none, or another thread has retired it meanwhile
            self.misses += 1
            return None
        self._hits += 1
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
        """Returns the value of a key, made by ``make(key)`` where there is none, by one thread. Errors of
        ``make`` are the caller's, and nothing is kept."""
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


_LISTED: dict[str, Callable[[], Info]] = {}


def listed(name: str, info: Callable[[], Info]) -> None:
    """Have ``cache_info`` list a cache under this name."""
    _LISTED[name] = info


def memoized(name: str, limit: int = SHAPES) -> Callable[[F], F]:
    """``functools.lru_cache(limit)``, listed by ``cache_info``."""

    def wrap(function: F) -> F:
        kept = functools.lru_cache(limit)(function)

        def info() -> Info:
            hits, misses, _, size = kept.cache_info()
            return Info(size, limit, hits, misses)

        listed(name, info)
        return kept  # type: ignore[return-value]

    return wrap


def cache_info() -> dict[str, dict[str, int]]:
    """Returns how this process's caches by shape do: name -> ``{"size", "limit", "hits", "misses"}``.

    Listed are the caches of what has been imported. A cache whose size stands at its limit, and whose misses
    grow in every step, is too small for the program.
    """
    return {name: info()._asdict() for name, info in sorted(_LISTED.items())}
