"""Several GPUs in a process, by stand-ins for them: which calls wait for theirs, and that no wait outlasts a
call that fails."""

from __future__ import annotations

import _thread
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import calls, several_gpus
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8kit.arrays import Device
from fp8kit.lru import LRU
from fp8kit.ops.registry import OPERATIONS
from tests.adapters.jax import ahead
from tests.support.source import ROOT


class Gpus:
    """Stands for the GPUs: what becomes of calls, in ``events``. A text with "attention" in it may be
    cuDNN's; ``waits(index)`` and ``runs(text, index)`` are done in place of a wait and of a run."""

    def __init__(self, monkeypatch):
        self.events = []
        self.waits = self.runs = lambda *about: None
        provider = SimpleNamespace(let_others_come=self._wait)
        monkeypatch.setattr(several_gpus.arrays, "provider", lambda device: provider)
        monkeypatch.setattr(calls.tvm_ffi, "get_raw_stream", lambda place: 70 + place.index)
        monkeypatch.setattr(calls, "plans", LRU(16))
        monkeypatch.setattr(calls.program, "prepare", self._prepare)
        monkeypatch.setattr(several_gpus, "_used", set())
        self._receive = calls._receiver("cuda")

    def _wait(self, device, stream):
        self.events.append(("wait", device.index, stream))
        self.waits(device.index)

    def _prepare(self, text, device):
        self.events.append((text.strip(), device.index))

        def run(pointers, stream):
            self.events.append((pointers, stream))
            self.runs(text, device.index)

        return SimpleNamespace(run=run, current=True, holds_interpreter="attention" in text)

    def call(self, text, index):
        tensor = SimpleNamespace(device=SimpleNamespace(index=index), data_ptr=lambda: 4096)
        told = SimpleNamespace(device=tensor.device, data_ptr=lambda: 8192, shape=(len(text),))
        self._receive(told, tensor, *calls.attributes(text).values())


@pytest.fixture
def gpus(monkeypatch):
    return Gpus(monkeypatch)


def test_a_first_call_on_a_gpu_waits_for_it(gpus):
    """Before it prepares anything, once a program and GPU (``let_others_come`` itself waits only where there
    are several)."""
    for text, index in (("one", 0), ("one", 0), ("one", 1), ("two", 0)):
        gpus.call(text, index)
    first = [("wait", 0, 70), ("one", 0), ([4096], 70)]
    assert gpus.events == [
        *first,
        first[-1],
        ("wait", 1, 71),
        ("one", 1),
        ([4096], 71),
        ("wait", 0, 70),
        ("two", 0),
        ([4096], 70),
    ]
    gpus.events.clear()
    for _ in range(2):  # by then two GPUs have run something
        gpus.call("attention", 0)
    wait, run = ("wait", 0, 70), ([4096], 70)
    assert gpus.events == [wait, ("attention", 0), run, wait, run]
    several_gpus._used.clear()
    gpus.call("attention", 0)  # the only one
    assert gpus.events[5:] == [run]


def test_the_gpus_that_a_program_may_run_on_are_known_when_it_is_lowered(monkeypatch):
    """Those of this process alone, by their own numbers, not all of the machine."""
    monkeypatch.setattr(several_gpus, "_used", set())
    found = [SimpleNamespace(local_hardware_id=3)]
    monkeypatch.setattr(several_gpus.jax, "local_devices", lambda backend: found)
    several_gpus.note_devices("cpu")
    assert not several_gpus._used
    several_gpus.note_devices("cuda")
    assert not several_gpus._used - {3}
    assert several_gpus._used
    assert not several_gpus.several(Device("cuda", 3))
    found.append(SimpleNamespace(local_hardware_id=1))
    several_gpus.note_devices("cuda")
    assert several_gpus.several(Device("cuda", 3))


def test_programs_of_one_device_wait_for_no_other(monkeypatch):
    """Also where the process has several."""
    noted = []
    monkeypatch.setattr(several_gpus, "note_devices", noted.append)
    x, kernel = jnp.ones((16, 24), jnp.float32), jnp.ones((24, 40), jnp.float32)
    jax.jit(fj.dense).lower(x, kernel).compile()
    assert not noted
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))
    whole = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec()))
    jax.jit(fj.dense).lower(rows, whole).compile()  # what is split is lowered then
    assert set(noted) == {"cpu"}


def test_what_cudnn_may_run_says_so():
    assert {name for name, op in OPERATIONS.items() if op.holds_interpreter} == {
        "attention",
        "ring_attention",
    }


# --- a call that fails --------------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch):
    """Why the process was to end: each is appended, and the wait is over."""
    monkeypatch.setattr(several_gpus, "LIMIT", 0.5)
    monkeypatch.setattr(several_gpus, "_LOOK", 0.02)
    monkeypatch.setattr(several_gpus, "_cause", "")
    found, over = [], threading.Event()

    def end(why):
        found.append(why)
        over.set()

    monkeypatch.setattr(several_gpus, "_end", end)
    found_and_over = SimpleNamespace(found=found, over=over)
    yield found_and_over
    over.set()
    watch = several_gpus._watch
    if watch is not None:
        watch.join(10)
    assert several_gpus._watch is None


def _one_fails(gpus, over, first="attention", after=lambda: None):
    """GPU 0's thread waits for a collective that GPU 1 does not come to, since its call fails: before an
    attention, or while it launches."""

    def runs(text, index):
        if (text, index) == ("norm", 1):
            raise KeyError("mine")
        if text == "linear":  # the queue is full
            over.wait(20)

    for text in ("attention", "linear", "norm"):  # no first calls
        for index in (0, 1):
            gpus.call(text, index)
    gpus.waits, gpus.runs = lambda index: over.wait(20), runs
    waiting = threading.Thread(target=gpus.call, args=(first, 0))
    waiting.start()
    while not several_gpus._busy:
        time.sleep(0.01)
    with pytest.raises(KeyError, match="mine"):
        gpus.call("norm", 1)
    after()
    begun = time.monotonic()
    waiting.join(20)
    assert not several_gpus._busy
    return time.monotonic() - begun


@pytest.mark.parametrize("first", ["attention", "linear"])
def test_a_wait_for_a_gpu_whose_call_has_failed_ends_the_process(first, gpus, ends):
    assert _one_fails(gpus, ends.over, first) < 10
    assert "cuda:0 has waited" in ends.found[0]
    assert "since cuda:1: KeyError: 'mine'" in ends.found[0]


def test_a_wait_that_ends_by_itself_ends_nothing(gpus, ends):
    """As where both calls fail, or no collective comes after; nor do waits that begin when all that is
    over."""
    _one_fails(gpus, ends.over, after=ends.over.set)
    several_gpus._watch.join(10)
    gpus.waits = lambda index: time.sleep(1)
    gpus.call("attention", 0)
    assert not ends.found


def test_a_failure_of_the_only_gpu_is_its_own(gpus, ends):
    def runs(text, index):
        raise KeyError("mine")

    gpus.runs = runs
    with pytest.raises(KeyError, match="mine"):
        gpus.call("norm", 0)
    assert several_gpus._watch is None
    assert not several_gpus._cause


PROGRAMS = {
    # within a program; the interpreter waits as in a library, and never comes back
    "waits": (
        """
        provider = SimpleNamespace(let_others_come=lambda device, stream: time.sleep(600))
        several_gpus.arrays.provider = lambda device: provider
        thread = threading.Thread(target=several_gpus.wait, args=(Device("cuda", 0), 0))
        thread.start()
        several_gpus.failed(Device("cuda", 1), KeyError("mine"))
        thread.join()
        """,
        (-signal.SIGABRT,),
        "cuda:0 has waited",
    ),
    # at the end, for the results of a GPU that stands still
    "ends": (
        """
        calls.used.set()
        calls._wait_for_results = lambda client: time.sleep(600)
        several_gpus.failed(Device("cuda", 1), KeyError("mine"))
        """,
        # faulthandler reads the frames of threads that go on, and may be ended by that
        (1, -signal.SIGSEGV),
        "the GPUs have 1 s to finish, or the process ends",
    ),
}


@pytest.mark.programs
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_ends(program):
    text, status, said = PROGRAMS[program]
    begin = """
        import logging, threading, time
        from types import SimpleNamespace
        import jax
        from fp8kit.arrays import Device
        from fp8kit_jax import calls, several_gpus
        logging.basicConfig()
        several_gpus.LIMIT = 1.0
        jax.devices()
        """
    words = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(begin) + textwrap.dedent(text)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode in status, done.stderr
    assert said in done.stderr
    assert "since cuda:1: KeyError: 'mine'" in done.stderr
    assert "most recent call first" in done.stderr  # where each thread stands


@pytest.mark.programs
def test_the_end_of_a_process_with_a_mesh_of_several_devices():
    """A mesh that the program has set for good: what waits on each device asks for none of it."""
    program = """
        import jax, jax.numpy as jnp
        import fp8kit_jax as fj
        from fp8kit.recipe import Float8CurrentScaling
        jax.set_mesh(jax.make_mesh((jax.device_count(),), ("rows",)))
        sets = fj.create_set(Float8CurrentScaling(), 1)
        print(jax.jit(lambda x: fj.dense(x, x.T, quantizer_set=sets))(jnp.ones((16, 16))).sum())
        """
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    words = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert "Exception" not in done.stderr, done.stderr
    assert float(done.stdout) == pytest.approx(4096, rel=2.0**-20)  # of three factors, each rounded


def test_only_the_wait_for_the_gpus_has_a_limit(monkeypatch):
    """What a process does at its end after that wait may take as long as it takes."""
    done = []
    monkeypatch.setattr(several_gpus, "_cause", "cuda:1: KeyError: 'mine'")
    said = {name: lambda *args, name=name, **more: done.append(name) for name in dir(faulthandler)}
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, said[name])
    several_gpus.limit_the_end()
    several_gpus.all_done()
    assert done == ["dump_traceback_later", "cancel_dump_traceback_later"]


def test_a_device_that_is_far_ahead():
    """The program that two GPUs run for this (``test_two_gpus.py``), on the CPU."""
    ahead.check(jax.devices("cpu")[:2], rows=16, layers=8, seconds=0.2)


def test_collections_within_calls_are_made_up_for(monkeypatch):
    """By one of all objects in the main thread, now and then: what they have hidden is old, and no
    collection of young objects finds it."""

    ended, found = [], []
    names = {"__name__": several_gpus._HANDLERS, "postpone": several_gpus.postpone, "ended": ended}
    # a thread of XLA's has a call's frame below all others
    text = 'def call():\n    postpone("start", {})\n    postpone("stop", {})\n    ended.append(None)\n'
    exec(text, names)

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            found.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(several_gpus, "_hidden", 0)
    gc.callbacks.append(note)
    try:
        for count in range(several_gpus._MOST_HIDDEN):
            _thread.start_new_thread(names["call"], ())
            while len(ended) <= count:
                time.sleep(1e-3)
        end = time.monotonic() + 10
        while not found and time.monotonic() < end:
            time.sleep(1e-3)
    finally:
        gc.callbacks.remove(note)
    assert found[0]
    assert several_gpus._hidden == several_gpus._MOST_HIDDEN
    assert not gc.get_freeze_count()


def test_no_garbage_is_collected_within_a_call():
    """On the CPU, whose programs wait for none, so that it can be seen."""
    devices, found = jax.devices("cpu")[:2], []
    held = ahead.garbage(devices)

    def within():
        gc.collect()
        found.append(held() is not None)

    gc.callbacks.append(several_gpus.postpone)
    try:
        ahead.check(devices, rows=16, layers=2, seconds=0, within=within)
    finally:
        gc.callbacks.remove(several_gpus.postpone)
    assert set(found) == {True}  # either device's thread may be the late one, or both
    gc.collect()
    assert held() is None
    assert not gc.get_freeze_count()
