"""What watches NCCL's calls, with an object in NCCL's place: when it ends a group, and how often."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from fp8kit.arrays import Device
from fp8kit.backends.cuda import nccl
from fp8kit.collectives import described


class Library:
    """NCCL without GPUs: notes what is done to communicators."""

    NCCLError = RuntimeError

    def __init__(self):
        self.done, self.error = [], 0

    def comm_get_async_error(self, comm):
        assert not self.done, "a communicator that is gone"
        return self.error

    def get_last_error(self, comm):
        return "broken"

    def comm_abort(self, comm):
        self.done.append("abort")

    def comm_destroy(self, comm):
        self.done.append("destroy")


class Texts:
    """A store; ``ended``: that of a process that is gone."""

    def __init__(self):
        self.texts, self.ended = {}, False

    def set(self, name, text):
        time.sleep(0.02)  # so that two who fail meet
        self.has(name)
        self.texts[name] = text

    def has(self, name):
        if self.ended:
            raise ConnectionError("ended")
        return name in self.texts


@pytest.fixture
def group(monkeypatch):
    library = Library()
    bindings = ModuleType("nccl.bindings")
    bindings.nccl = library
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.bindings", bindings)
    for name, seconds in {"_POLL": 0.01, "_GRACE": 0.05, "_LEFT": 60.0}.items():
        monkeypatch.setattr(nccl, name, seconds)
    made = nccl.NcclCollectives(1, 1, 2, Device("cuda", 0), Texts(), "0", 60.0)
    yield made, library
    made.close()


def until(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_who_fails_at_the_same_time_aborts_once(group, capfd):
    made, library = group
    threads = [threading.Thread(target=made._fail, args=(f"reason {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    assert library.done == ["abort"]
    assert capfd.readouterr().err.count("rank 1 of 2") == 1


def test_an_error_of_the_library_ends_the_group(group):
    made, library = group
    library.error = 3
    until(lambda: made._failed is not None)
    assert "broken" in made._failed
    assert library.done == ["abort"]


def test_a_closed_group_is_asked_nothing(group):
    made, library = group
    made.close()
    made._fail("late")
    assert made._error() is None
    assert library.done == ["destroy"]


def test_rank_0_may_end_first(group):
    """It has done its last call; others may still save what they have. A call that waits for it fails."""
    made, library = group
    made._store.ended = True
    time.sleep(0.1)  # ten looks, and twice the grace
    assert made._failed is None
    assert not library.done
    x = SimpleNamespace(dtype=SimpleNamespace(name="float32"), shape=(4,))
    made._watched = described("all_reduce sum", x, ""), SimpleNamespace(done=False), time.monotonic()
    until(lambda: made._failed is not None)
    assert "all_reduce sum of float32 (4,)" in made._failed
    assert "rank 0 has ended" in made._failed
