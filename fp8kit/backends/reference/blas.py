"""Matrix products on several threads, and OpenBLAS kept to one.

OpenBLAS hands each of its threads a fixed part of a product, and its threads spin while they wait for each
other and for the next product. Beside other work on the same cores, Numba's threads or another program's,
that takes time from threads that have work. Here a product is cut into parts, each taken by the next free
thread; threads without work sleep, and no thread waits for one that has not begun. On two cores that others
kept busy (load average 11 to 14) the median product of 2048 x 128 by 128 x 384 went from 36 ms to 3 ms, and a
training step of the demo from 3.4 s to 1.3 s, with a third of the processor time. A product that is too small
or too narrow to be cut is done by the caller alone: 64 x 128 by 128 x 384 on two cores beside two busy
processes in 0.07 ms instead of 16, on idle ones in 0.07 instead of 0.04.

The parts depend on the sizes and on OpenBLAS's number of threads alone, so that the same number of threads
gives the same bits.

OpenBLAS's number of threads is the process's: while a product runs here, NumPy's products on other threads
take one core each, and a program that sets that number meanwhile (threadpoolctl) finds 1, is overruled when
the product ends, and may put back the 1 that it found.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from fp8kit.backends.reference._numpy import Float32

_PART = 1 << 23  # multiplications that are worth waking a thread for: about 0.2 ms
# multiplications by a vector, or not, up to which OpenBLAS works in the calling thread anyway
_VECTOR, _MATRIX = 1 << 13, 1 << 18
# a thread: one that is interrupted in its part keeps the others waiting for less (medians beside other work
# fell to a half)
_PARTS = 2
_ALIGN = 16  # rows or columns that a part is a multiple of: whole tiles of OpenBLAS's kernels
_EXTENSIONS = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")  # NumPy 2, NumPy 1


Part = tuple[Float32, Float32, Float32]  # two operands and what they give


class _OpenBlas(NamedTuple):
    """NumPy's OpenBLAS: its number of threads, asked and set."""

    threads: Callable[[], int]
    set_threads: Callable[[int], None]


@functools.cache
def _openblas() -> _OpenBlas | None:
    """Returns the OpenBLAS that NumPy multiplies with, whose names its builds decorate; None where it has
    another library. Names are looked for in NumPy's own extension and what that is linked to: SciPy or torch
    may have loaded an OpenBLAS of theirs."""
    extension = next((sys.modules[name] for name in _EXTENSIONS if name in sys.modules), None)
    try:
        library = ctypes.CDLL(extension.__file__)  # type: ignore[union-attr]
    except (AttributeError, OSError):
        return None
    for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "_64"), ("", "")):
        names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set")]
        if all(hasattr(library, name) for name in names):
            return _OpenBlas(*(getattr(library, name) for name in names))
    return None


class _OneThread:
    """Context manager: OpenBLAS works in the calling thread alone while anyone is inside. The number of
    threads is the whole process's.

    An interrupt may come between any two lines: ``_held`` says, from before the number is changed until after
    it is put back, that a 1 may be ours; the next product then uses the number from before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may multiply, or fork
        self._inside, self._held = 0, False
        self._former = 1

    def threads(self, library: _OpenBlas) -> int:
        """Returns OpenBLAS's number of threads outside of products."""
        with self._lock:
            now = self._former if self._inside else library.threads()
            return self._former if self._held and now == 1 else now

    def __enter__(self) -> None:
        library = _openblas()
        assert library is not None
        with self._lock:
            if not self._inside:
                self._former = self.threads(library)
                self._held = True
                library.set_threads(1)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        library = _openblas()
        assert library is not None
        with self._lock:
            self._inside -= 1
            if not self._inside:
                library.set_threads(self._former)
                self._held = False

    def hold(self) -> None:
        """Before a fork: wait until no thread is entering or leaving."""
        self._lock.acquire()

    def release(self) -> None:
        """The fork is done."""
        self._lock.release()

    def forked(self) -> _OneThread:
        """Returns a forked child's own counter: none of the parent's threads is inside a product there."""
        library = _openblas() if self._held or self._inside else None
        if library is not None:
            library.set_threads(self._former)
        self.release()  # who forked within a product leaves this one
        return _OneThread()


_one_thread = _OneThread()
_pools: dict[int, ThreadPoolExecutor] = {}  # by number of threads; a forked child has none of the parent's
_making = threading.RLock()


def _after_fork() -> None:
    global _one_thread, _making
    _one_thread, _making = _one_thread.forked(), threading.RLock()
    _pools.clear()


os.register_at_fork(
    before=lambda: _one_thread.hold(),
    after_in_parent=lambda: _one_thread.release(),
    after_in_child=_after_fork,
)


def _pool(threads: int) -> ThreadPoolExecutor:
    with _making:
        if threads not in _pools:
            _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="fp8kit-product")
        return _pools[threads]


def matmul(left: Float32, right: Float32, out: Float32 | None = None) -> Float32:
    """left (M, K) right (K, N), in ``out`` or a new array; silent about what is not finite."""
    (m, k), n = left.shape, right.shape[1]
    library = _openblas()
    least = _VECTOR if min(m, n) == 1 else _MATRIX
    threads = 1 if library is None or m * n * k < least else _one_thread.threads(library)
    if threads < 2:
        return np.matmul(left, right, out=out)
    count = min(_PARTS * threads, m * n * k // _PART, -(-max(m, n) // _ALIGN))
    if count < 2:
        with _one_thread:
            return np.matmul(left, right, out=out)
    result = np.empty((m, n), np.float32) if out is None else out
    if m >= n:
        parts = deque((left[at], right, result[at]) for at in _cuts(m, count))
    else:
        parts = deque((left, right[:, at], result[:, at]) for at in _cuts(n, count))
    with _one_thread:
        helpers = _helpers(threads - 1, min(threads, count) - 1, parts)
        try:
            _work(parts)
        finally:
            parts.clear()  # after an error no thread goes on writing
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()
    return result


def _helpers(threads: int, count: int, parts: deque[Part]) -> list[Future[None]]:
    """Up to ``count`` others who take parts; none when the interpreter is ending and starts no threads."""
    try:
        return [_pool(threads).submit(_work, parts) for _ in range(count)]
    except RuntimeError:
        return []


def _cuts(size: int, count: int) -> Iterator[slice]:
    """``count`` slices or fewer that cover ``size``."""
    step = -(-size // (count * _ALIGN)) * _ALIGN
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _work(parts: deque[Part]) -> None:
    """Take parts until none is left."""
    with np.errstate(all="ignore"), contextlib.suppress(IndexError):
        while True:
            left, right, out = parts.popleft()
            np.matmul(left, right, out=out)
