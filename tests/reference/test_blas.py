"""Matrix products that are cut into parts: values, the number of OpenBLAS's threads, callers that come at
once, forked children."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fp8kit.backends.reference import blas
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack


class Library:
    """Stands for OpenBLAS with so many threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[int] = []

    def threads(self) -> int:
        return self.count

    def set_threads(self, count: int) -> None:
        self.count = count
        self.seen.append(count)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library(3)
    monkeypatch.setattr(blas, "_openblas", lambda: fake)
    monkeypatch.setattr(blas, "_PART", 1 << 10)
    return fake


def operands(m: int, k: int, n: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(m + k + n)
    left = random.standard_normal((k, m) if transposed else (m, k)).astype(np.float32)
    right = random.standard_normal((n, k) if transposed else (k, n)).astype(np.float32)
    return (left.T, right.T) if transposed else (left, right)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(100, 40, 30), (30, 40, 100), (17, 33, 65), (33, 500, 3), (1, 64, 1000), (16, 200, 16), (0, 5, 7)],
)
def test_values(library: Library, m: int, k: int, n: int, transposed: bool) -> None:
    left, right = operands(m, k, n, transposed)
    want, size = (
        left.astype(np.float64) @ right.astype(np.float64),
        np.abs(left.astype(np.float64)) @ np.abs(right),
    )
    made = blas.matmul(left, right)
    assert_close("product", made, want, "float32", sum_slack(size, k))
    out = np.full((m, n), np.nan, np.float32)
    assert blas.matmul(left, right, out) is out
    assert_same_bits("into a given array", out, made)
    assert library.count == 3


@pytest.mark.parametrize(("size", "count"), [(100, 3), (16, 2), (17, 2), (1000, 7), (5, 4), (96, 3)])
def test_parts_cover_everything_once(size: int, count: int) -> None:
    cuts = list(blas._cuts(size, count))
    assert len(cuts) <= count
    assert [i for cut in cuts for i in range(size)[cut]] == list(range(size))


def test_small_products_and_one_thread_are_left_alone(library: Library) -> None:
    blas.matmul(*operands(8, 8, 8, False))
    library.count = 1
    blas.matmul(*operands(100, 40, 30, False))
    assert library.seen == []


def test_a_product_that_is_not_cut_is_done_by_the_caller_alone(library: Library) -> None:
    """OpenBLAS's threads would spin for each other in it."""
    blas.matmul(*operands(16, 2000, 16, False))
    assert library.seen == [1, 3]


def test_what_openblas_does_in_one_thread_anyway_is_left_alone(library: Library) -> None:
    blas.matmul(*operands(60, 70, 50, False))
    assert library.seen == []
    blas.matmul(*operands(1, 200, 50, False))  # by a vector its threads come sooner
    assert library.seen == [1, 3]


@pytest.mark.parametrize("late", [False, True], ids=["before it is changed", "after"])
@pytest.mark.parametrize("putting_back", [False, True])
def test_an_interrupt_does_not_leave_openblas_with_one_thread(
    library: Library, monkeypatch: pytest.MonkeyPatch, late: bool, putting_back: bool
) -> None:
    real, left = library.set_threads, 1

    def interrupted(count: int) -> None:
        nonlocal left
        now = left and (count != 1) == putting_back
        if late or not now:
            real(count)
        if now:
            left -= 1
            raise KeyboardInterrupt

    monkeypatch.setattr(library, "set_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        blas.matmul(*operands(200, 60, 50, False))
    assert blas._one_thread.threads(library) == 3  # type: ignore[arg-type]
    blas.matmul(*operands(200, 60, 50, False))
    assert library.count == 3


def test_a_handler_of_a_signal_may_multiply(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: here where the number of threads is changed."""
    real, signals = library.set_threads, [1, 3]

    def handled(count: int) -> None:
        if count in signals:
            signals.remove(count)
            blas.matmul(*operands(200, 60, 50, False))
        real(count)

    monkeypatch.setattr(library, "set_threads", handled)
    blas.matmul(*operands(200, 60, 50, False))
    assert (signals, library.count) == ([], 3)


def test_openblas_works_in_one_thread_meanwhile_and_has_its_threads_back(library: Library) -> None:
    with blas._one_thread:
        assert library.count == 1
        with blas._one_thread:
            assert blas._one_thread.threads(library) == 3  # type: ignore[arg-type]
        assert library.count == 1
    assert library.seen == [1, 3]


def test_callers_at_once(library: Library) -> None:
    left, right = operands(200, 60, 50, False)
    want = blas.matmul(left, right)
    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(lambda _: blas.matmul(left, right), range(60)):
            assert_same_bits("product", found, want)
    assert library.count == 3


def test_what_is_not_finite_is_silent_in_every_thread(library: Library) -> None:
    left, right = operands(200, 60, 50, False)
    left[::7, 3], right[3] = np.inf, 0
    with np.errstate(all="ignore"):
        assert_same_bits("product", np.isnan(blas.matmul(left, right)), np.isnan(left @ right))


def test_an_error_of_a_helper_reaches_the_caller(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.current_thread()
    begun = threading.Event()
    real = blas._work

    def work(parts: object) -> None:
        if threading.current_thread() is main:
            assert begun.wait(30)
            real(parts)  # type: ignore[arg-type]
        else:
            begun.set()
            raise MemoryError("no room")

    monkeypatch.setattr(blas, "_work", work)
    with pytest.raises(MemoryError, match="no room"):
        blas.matmul(*operands(200, 60, 50, False))
    assert library.count == 3


CHILD = """
import os
import numpy as np
from fp8kit.backends.reference import blas
from fp8kit.testing import assert_close
blas._PART = 1 << 10
library = blas._openblas()
assert library is not None, "NumPy's OpenBLAS is not found"
library.set_threads(2)
random = np.random.default_rng(1)
left = random.standard_normal((200, 60)).astype(np.float32)
right = random.standard_normal((60, 50)).astype(np.float32)
want = blas.matmul(left, right)
assert_close("product", want, left @ right, "float64", 1e-5 + 1e-4 * np.abs(left @ right))
with blas._one_thread:
    child = os.fork()
    if child == 0:
        fine = library.threads() == 2 and (blas.matmul(left, right) == want).all() and library.threads() == 2
        os._exit(0 if fine else 3)
    assert os.waitpid(child, 0)[1] == 0
assert library.threads() == 2
"""


LATE = """
import atexit
import numpy as np
from fp8kit.backends.reference import blas
blas._PART = 1 << 10
blas._openblas().set_threads(2)
left, right = np.ones((200, 60), np.float32), np.ones((60, 50), np.float32)
atexit.register(lambda: print((blas.matmul(left, right) == 60).all(), blas._openblas().threads()))
"""


@pytest.mark.combinations
def test_products_when_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True 2\n", "")


def test_after_an_error_nobody_works_on(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's error comes when all helpers have ended, and OpenBLAS has its threads back."""
    main, real = threading.current_thread(), blas._work
    begun, working = threading.Event(), []

    def work(parts: object) -> None:
        if threading.current_thread() is main:
            assert begun.wait(30)
            raise KeyboardInterrupt
        working.append(True)
        begun.set()
        time.sleep(0.05)
        real(parts)  # type: ignore[arg-type]
        working.pop()

    monkeypatch.setattr(blas, "_work", work)
    out = np.full((200, 50), 7, np.float32)
    left, right = operands(200, 60, 50, False)
    with pytest.raises(KeyboardInterrupt):
        blas.matmul(left, right, out)
    assert (working, library.count) == ([], 3)
    assert_same_bits("untouched", out, np.full((200, 50), 7, np.float32))


@pytest.mark.combinations
def test_numpys_own_library_and_forked_children() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
