"""What watches NCCL's calls, with objects in the place of NCCL, the GPU and the store: when it ends a group,
how often, and what it says; and what a process does first and last."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import launch, nccl
from fp8kit.errors import BackendError
from fp8kit.formats import float32
from fp8kit.settings import Place

GPU = Device("cuda", 1)  # of every rank, and not the first one
NOT_READY, FAILED, UNSUPPORTED = 600, 700, 900


class Library:
    """NCCL without GPUs, of two ranks, whose communicator is the rank's number, and its stream too: notes
    what is done to communicators. A call is done when both ranks have made it."""

    NCCLError = type("NCCLError", (Exception,), {})

    def __init__(self):
        self.done, self.gone, self.error, self.made = [], set(), 0, [0, 0]
        self.stuck = threading.Event()  # what an abort or an end waits for
        self.stuck.set()

    def comm_get_async_error(self, comm):
        assert comm not in self.gone
        return self.error

    def get_last_error(self, comm):
        return "broken"

    def comm_abort(self, comm):
        self.done.append("abort")
        self.gone.add(comm)
        self.stuck.wait()

    def comm_destroy(self, comm):
        self.done.append("destroy")
        self.gone.add(comm)
        self.stuck.wait()

    def all_reduce(self, source, target, count, kind, op, comm, stream):
        self.made[comm] += 1

    def all_gather(self, source, target, count, kind, comm, stream):
        self.made[comm] += 1

    def comm_split(self, comm, color, key, config):
        self.stuck.wait()
        raise self.NCCLError("split")


class Runtime:
    """CUDA's runtime: which device is current, and events of the library's calls."""

    def __init__(self, library):
        self.library, self.device, self.status, self.waited = library, 0, 0, []
        self.captured, self.relaxed = False, set()  # whether a thread captures; threads that may ask then

    def getDevice(self):
        return self.device

    def setDevice(self, index):
        self.device = index

    def deviceSynchronize(self):
        pass

    def streamIsCapturing(self, stream):
        return False

    def eventRecord(self, event, stream):
        event.behind = self.library.made[stream % 2]

    @contextmanager
    def unsafe_calls(self):
        self.relaxed.add(threading.current_thread().name)
        yield

    def eventQuery(self, event):
        if self.captured and threading.current_thread().name not in self.relaxed:
            return UNSUPPORTED
        return self.status or (0 if min(self.library.made) >= event.behind else NOT_READY)

    def streamWaitEvent(self, stream, event):
        self.waited.append((self.device, stream, event.behind))


class Texts:
    """A store; ``ended``: that of a process that is gone, or ``busy``."""

    def __init__(self):
        self.texts, self.ended, self.busy = {}, False, False

    def set(self, name, text):
        time.sleep(0.02)  # so that two who fail meet
        self.peek(name)
        self.texts[name] = text

    def peek(self, name):
        if self.ended:
            raise ConnectionError("ended")
        if self.busy:
            raise TimeoutError
        return self.texts.get(name)

    def get(self, name, timeout):
        return self.texts[name]


def event():
    made = SimpleNamespace()
    made.ptr = made
    return made


@pytest.fixture
def library(monkeypatch):
    library = Library()
    bindings = ModuleType("nccl.bindings")
    bindings.nccl = library
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.bindings", bindings)
    runtime = library.runtime = Runtime(library)
    monkeypatch.setattr(launch, "runtime", lambda: runtime)
    monkeypatch.setattr(nccl, "unsafe_calls", runtime.unsafe_calls)
    monkeypatch.setattr(launch, "error_text", lambda status: f"error {status}")
    monkeypatch.setattr(nccl, "_event", event)
    monkeypatch.setattr(nccl, "_stream", lambda: SimpleNamespace(ptr=11))
    monkeypatch.setattr(nccl, "_OPEN", [])
    monkeypatch.setattr(nccl, "_exception", lambda: None)
    # of many groups nobody is told that they failed: no process of tests is to end by that a minute later
    for name, seconds in {"_POLL": 0.01, "_GRACE": 0.2, "_LEFT": 1e6, "_SLOW": 0.05}.items():
        monkeypatch.setattr(nccl, name, seconds)
    yield library
    library.made, library.runtime.status = [1000, 1000], 0
    library.stuck.set()
    for group in nccl._OPEN:
        group.close()


def made(store, rank=1, timeout=60.0):
    return nccl.NcclCollectives(rank, rank, 2, GPU, store, "0", timeout)


@pytest.fixture
def group(library):
    return made(Texts()), library


def x(*shape):
    return ArrayView(0, shape, float32, GPU, None)


def call(ranks, *shape):
    with ranks._call("all_reduce sum", x(*shape), "fc2"):
        ranks._all_reduce(x(*shape), "sum", ranks.rank)


def until(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_who_fails_at_the_same_time_aborts_once(group, capfd):
    ranks, library = group
    threads = [threading.Thread(target=ranks._fail, args=(f"reason {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks.close()
    assert library.done == ["abort"]
    assert capfd.readouterr().err.count("rank 1 of 2") == 1


def test_an_error_of_the_library_ends_the_group(group):
    ranks, library = group
    library.error = 3
    until(lambda: library.done == ["abort"])
    assert "broken" in ranks.failed


def test_an_error_of_the_gpu_ends_the_group(group):
    ranks, library = group
    call(ranks, 4)
    library.runtime.status = FAILED
    until(lambda: ranks.failed is not None)
    assert "cuda:1: error 700" in ranks.failed


def test_a_closed_group_is_asked_nothing(group):
    ranks, library = group
    ranks.close()
    ranks._fail("late")
    assert ranks._error() is None
    assert library.done == ["destroy"]


def test_rank_0_may_end_first(group):
    """It has done its last call; others may still save what they have. A call that waits for it fails."""
    ranks, library = group
    ranks._store.ended = True
    time.sleep(0.4)  # many looks, and twice the grace
    assert ranks.failed is None
    assert not library.done
    call(ranks, 4)
    until(lambda: ranks.failed is not None)
    assert "all_reduce sum of float32 (4,)" in ranks.failed
    assert "rank 0 has ended" in ranks.failed


def test_rank_0_may_be_busy(group):
    """A step that waits for it is no failure until its own time is over."""
    ranks, library = group
    ranks._store.busy = True
    call(ranks, 4)
    time.sleep(0.4)
    assert ranks.failed is None
    ranks._store.busy = False
    assert not library.done


def test_every_call_is_watched(library):
    """Also the last one before the host waits for the GPU, put there while an earlier one ran."""
    ranks = made(Texts(), timeout=0.3)
    for _ in range(3):
        call(ranks, 4)
    library.made[0] = 2  # the other rank makes no third one
    until(lambda: ranks.failed is not None)
    assert "rank 1: in call 3, all_reduce sum of float32 (4,) in fc2" in ranks.failed
    assert "not done after 0.3 s" in ranks.failed
    with pytest.raises(BackendError, match="in call 3"):
        call(ranks, 4)


def test_time_runs_from_when_the_call_before_is_done(library):
    ranks = made(Texts(), timeout=0.4)
    for i in range(1, 4):
        call(ranks, 4)
        call(ranks, 4)
        time.sleep(0.25)
        library.made[0] = 2 * i - 1
    assert ranks.failed is None


def test_ranks_that_call_other_things_say_what(library):
    """NCCL compares nothing: here both wait for ever."""
    store = Texts()
    ranks = [made(store, rank, 600.0) for rank in range(2)]
    for own in ranks:
        call(own, 4)
    until(lambda: ranks[0]._oldest() is None)
    library.made = [-10, -10]
    for own in ranks:
        call(own, *((8,) if own.rank else (4,)))
        library.made[own.rank] = -10
    for own in ranks:
        own._pending[0].event.behind = 0
        call(own, 4)
    until(lambda: all(own.failed for own in ranks))
    for own in ranks:
        assert "rank 0: in call 2, all_reduce sum of float32 (4,) in fc2; rank 1: in call 2, " in own.failed
        assert "all_reduce sum of float32 (8,) in fc2 (" in own.failed
    assert "call 2 is another one than rank 0's" in ranks[1].failed


def test_a_rank_that_hangs_between_calls_says_which_was_the_last(library):
    store = Texts()
    ranks = [made(store, rank, 0.3) for rank in range(2)]
    for own in (*ranks, ranks[0]):
        call(own, 4)
    until(lambda: all(own.failed for own in ranks))
    said = (
        "rank 0: in call 2, all_reduce sum of float32 (4,) in fc2; rank 1: nothing since call 1, all_reduce"
    )
    assert all(said in own.failed for own in ranks)


def test_ranks_that_wait_for_each_other_in_a_split(library):
    library.stuck.clear()
    ranks = made(Texts(), timeout=0.2)
    said = []

    def split():
        try:
            ranks.split(0)
        except BackendError as error:
            said.append(str(error))

    thread = threading.Thread(target=split)
    thread.start()
    until(lambda: ranks.failed is not None)
    assert "rank 1: in call 1, split" in ranks.failed
    library.stuck.set()
    thread.join()
    assert "in call 1, split" in said[0]
    assert not ranks._pending


def test_a_split_behind_a_call_that_was_aborted_asks_nothing_of_nccl(library):
    """The abort ends the wait for the GPU, and there is no communicator to be split any more."""
    ranks = made(Texts(), timeout=0.2)
    call(ranks, 4)
    library.made[0] = 0  # the other rank does not come
    library.runtime.deviceSynchronize = lambda: until(lambda: "abort" in library.done)
    library.comm_split = lambda comm, *rest: library.done.append(("split", comm))
    with pytest.raises(BackendError, match=r"not done after 0\.2 s"):
        ranks.split(0)
    assert library.done == ["abort"]


def test_an_abort_that_hangs_holds_nobody_up(group, monkeypatch):
    """As where another process was killed. A process that the error does not reach is ended."""
    ranks, library = group
    library.stuck.clear()
    ended = []
    monkeypatch.setattr(nccl, "_LEFT", 0.5)
    monkeypatch.setattr(nccl.os, "_exit", ended.append)
    ranks._fail("reason")
    begin = time.monotonic()
    ranks.close()
    assert time.monotonic() - begin < 2
    assert not ended
    nccl._close_all()
    assert ended == [1]
    until(lambda: ended == [1, 1])


def test_who_was_told_goes_on(group, monkeypatch):
    ranks, _ = group
    ended = []
    monkeypatch.setattr(nccl, "_LEFT", 0.1)
    monkeypatch.setattr(nccl.os, "_exit", ended.append)
    ranks._fail("reason")
    with pytest.raises(BackendError, match="reason"):
        call(ranks, 4)
    time.sleep(0.3)
    nccl._close_all()
    assert not ended


def test_what_a_rank_was_doing_is_what_is_not_done(group, monkeypatch):
    """Not what nobody has looked at since."""
    ranks, library = group
    monkeypatch.setattr(nccl, "_POLL", 60.0)
    time.sleep(0.05)
    for _ in range(3):
        call(ranks, 4)
    library.made[0] = 2
    ranks._fail("reason")
    assert "rank 1: in call 3" in ranks.failed


def test_the_end_waits_for_what_is_under_way(group):
    ranks, library = group
    call(ranks, 4)
    thread = threading.Thread(target=ranks.close)
    thread.start()
    time.sleep(0.1)
    assert not library.done
    library.made[0] = 1
    thread.join()
    assert library.done == ["destroy"]


def test_the_end_waits_for_others_as_long_as_they_live(group):
    """NCCL's own end waits for that of the others."""
    ranks, library = group
    library.stuck.clear()
    threads = [threading.Thread(target=ranks.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # more than the grace
    assert all(thread.is_alive() for thread in threads)
    ranks._store.ended = True
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert library.done == ["destroy"]


def test_others_learn_of_an_exception_that_ends_a_rank(library, monkeypatch):
    store = Texts()
    ranks = [made(store, rank, 600.0) for rank in range(2)]
    call(ranks[0], 4)
    monkeypatch.setattr(nccl, "_exception", lambda: KeyError)
    ranks[1].close()
    until(lambda: ranks[0].failed is not None)
    assert ranks[1].failed == "it ends by KeyError"
    assert "rank 0: in call 1, all_reduce sum of float32 (4,) in fc2; rank 1: nothing yet" in ranks[0].failed


def test_a_group_of_sends_ends_after_an_error(group):
    """NCCL would keep this thread's later calls until it does."""
    ranks, library = group
    depth = []
    library.group_start = lambda: depth.append(1)
    library.group_end = depth.pop

    def send(*arguments):
        raise library.NCCLError("no")

    library.send = send
    with pytest.raises(BackendError, match="no"), ranks._call("shift", x(4), ""):
        ranks._shift(x(4), x(4), 1)
    assert not depth


def test_streams_are_those_of_the_groups_device(group):
    """Stream 0 is another one on each device; the process works on another device than the first."""
    ranks, library = group
    runtime = library.runtime
    with ranks._call("all_gather", x(2), ""):
        wait = ranks._start("all_gather", x(2), x(4), 0)
    wait(0)
    # the other stream waits for what was there before, and the stream for the call
    assert runtime.waited == [(1, 11, 0), (1, 0, 1)]


def test_what_a_process_does_first(library, monkeypatch):
    store, steps = Texts(), []
    monkeypatch.setattr(nccl, "Store", lambda place, timeout: store)
    monkeypatch.setattr(nccl.atexit, "register", steps.append)
    library.get_unique_id = lambda: np.arange(3, dtype=np.uint8)
    library.comm_init_rank_scalable = lambda *given: steps.append((library.runtime.device, *given)) or 0
    place = Place(0, 2, 0)
    with pytest.raises(BackendError, match=r"ranks: got no rank 1 after 0.1 s, expected all 2"):
        nccl.connect(place, GPU, 0.1)
    assert "nccl/id" not in store.texts
    store.set("here/1", "")
    ranks = nccl.connect(place, GPU, 0.1)
    # the id comes where all are there, and the communicator is made with the device current, which it stays
    assert steps == [(1, 2, 0, 1, bytearray([0, 1, 2]), 0), nccl._close_all]
    assert (ranks.device, library.runtime.device, nccl._OPEN) == (GPU, 1, [ranks])

    def refuse(*given):
        raise library.NCCLError("invalid usage")

    library.comm_init_rank_scalable = refuse
    with pytest.raises(BackendError, match="nccl: got invalid usage, expected a communicator of NCCL"):
        nccl.connect(place, GPU, 0.1)


def test_a_graph_that_is_captured_meanwhile_ends_no_group(group):
    ranks, library = group
    library.runtime.captured = True
    ranks.all_reduce(x(2), "sum", 1)
    time.sleep(0.6)  # a few looks at the call, and what a failure takes to be told
    assert ranks.failed is None
