"""Several GPUs in a process: which calls wait for their GPU, what becomes of such a wait when a call on
another GPU fails, and when garbage is collected.

The GPUs' threads share the interpreter, so none may keep it while its GPU waits for another one's thread.
cuDNN's frontend keeps it when it makes a handle, when it first runs a plan, and when a GPU's queue of
launches is full: by a thread that is a queue, some thousand launches, ahead of another one that has yet to
come to a collective. Our own launches, and the calls of CuPy and nvmath, let go of it. So a program's first
call on a GPU, and each call of an operation that cuDNN may run (``Operation.holds_interpreter``), first
waits, without the interpreter, until its GPU has done what it was given. With one GPU a process none waits,
nor where each program of it is one GPU's.

A call that fails on one GPU never comes to the collective at which another one waits, and nothing ends that
wait: neither CUDA nor XLA, which tells of the failure only when every GPU's thread is back. So a process ends
that waits so, within the program or at its own end, and says which call failed and how.

Garbage may hold a compiled program. To unload it waits for every GPU that has it, also for one that stands at
a collective and waits for the very thread that collects. So a collection that begins within a call finds
nothing, and the main thread makes up for it (``postpone``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import jax

from fp8kit import arrays
from fp8kit.arrays import Device

log = logging.getLogger("fp8kit")

LIMIT = 30.0  # seconds that a GPU may still work after a call on another one has failed
_LOOK = 0.2  # seconds between two looks
# collections that find nothing, each of the some 700 to 2,000 new objects after which one begins, until all
# objects are collected
_MOST_HIDDEN = 20
_HANDLERS = "fp8kit_jax.calls"  # the module whose functions XLA calls

# GPUs that this process lowers programs for, or runs some on
_used: set[int] = set()
# thread -> of which GPU it is, since when it waits for that, or launches, which may wait for it as well
_busy: dict[int, tuple[Device, float]] = {}
_lock = threading.Lock()
_watch: threading.Thread | None = None
_frozen = False  # whether ``postpone`` has hidden all objects
_hidden = 0  # collections that it has kept from finding anything
_until = 0.0  # what began to wait before then may wait for a call that has failed
_cause = ""


def note_devices(platform: str) -> None:
    """A program of several devices is lowered for "cpu" or "cuda": know how many GPUs of this process may run
    it."""
    if platform == "cuda":
        with contextlib.suppress(RuntimeError):  # exported where there is none
            _use(device.local_hardware_id for device in jax.local_devices(backend="gpu"))


def several(device: Device) -> bool:
    """Whether several GPUs run programs of this process, ``device`` among them. What was compiled elsewhere
    is known by its calls."""
    if device.index not in _used:
        _use((device.index,))
    return len(_used) > 1


def _use(gpus: Iterable[int]) -> None:
    _used.update(gpus)
    if len(_used) > 1 and postpone not in gc.callbacks:
        gc.callbacks.append(postpone)


def postpone(phase: str, info: Any) -> None:
    """A callback of the garbage collector. Within a call on a thread of XLA's own it hides all objects from
    the collector, so that nothing is freed. They are old then, and only a collection of all objects looks at
    them: now and then the main thread makes one, when it runs Python again. By then XLA is done with the
    calls of its programs, and a wait for a GPU ends. What a program itself has frozen is thawed by that."""
    global _hidden, _frozen
    if phase == "stop":
        if _frozen:
            gc.unfreeze()
        _frozen = False
        return
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    if frame.f_globals.get("__name__") not in (__name__, _HANDLERS):
        return
    _frozen = True
    gc.freeze()
    _hidden += 1
    if _hidden % _MOST_HIDDEN == 0:
        ctypes.pythonapi.Py_AddPendingCall(_LATER, None)


def _collect(_: Any) -> int:
    gc.collect()
    return 0


_LATER = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_collect)


def wait(device: Device, stream: int) -> None:
    """Until ``device`` has done what it was given, where there are several (``let_others_come``)."""
    launching(device)
    try:
        arrays.provider(device).let_others_come(device, stream)  # type: ignore[attr-defined]
    finally:
        launched()


def launching(device: Device) -> None:
    """Note that, until ``launched``, this thread may have to wait for ``device``."""
    _busy[threading.get_ident()] = device, time.monotonic()


def launched() -> None:
    """See ``launching``."""
    _busy.pop(threading.get_ident(), None)


def failed(device: Device, error: BaseException) -> None:
    """A call on ``device`` fails: the process ends if another GPU then waits for longer than ``LIMIT``."""
    global _watch, _until, _cause
    with _lock:
        _until, _cause = time.monotonic() + LIMIT, f"{device}: {type(error).__name__}: {error}"
        if _watch is None:
            _watch = threading.Thread(target=_look_after, name="fp8kit: a call failed", daemon=True)
            _watch.start()


def limit_the_end() -> None:
    """Before a process waits, at its end, for all GPUs: where a call has failed that wait has a limit."""
    if _cause:
        log.warning("fp8kit.run: the GPUs have %d s to finish, or the process ends, since %s", LIMIT, _cause)
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)


def all_done() -> None:
    """After that wait: what else a process does at its end may take longer."""
    if _cause:
        faulthandler.cancel_dump_traceback_later()


def _look_after() -> None:
    """Look at the waits until those are over that may be for a call that has failed."""
    global _watch
    while True:
        now, waits = time.monotonic(), list(_busy.values())
        for device, began in waits:
            if now - max(began, _until - LIMIT) > LIMIT and began < _until:
                _end(f"{device} has waited for {now - began:.0f} s, and will for ever, since {_cause}")
        with _lock:
            if now > _until and all(began >= _until for _, began in waits):
                _watch = None
                return
        time.sleep(_LOOK)


def _end(why: str) -> None:
    """As XLA ends a process whose GPUs wait for each other: with SIGABRT, at which faulthandler, where it is
    enabled, prints where every thread stands."""
    log.critical("fp8kit.run: %s: the process ends", why)
    sys.stdout.flush()
    sys.stderr.flush()
    os.abort()
