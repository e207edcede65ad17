"""The one XLA custom call of the door, ``fp8kit.run``: Python on XLA's own buffers, through jax-tvm-ffi.

The call's attributes hold a text that says what to run (``program.py``), the same in every process, so that
compiled programs can be cached on disk and exported: ``text``, its bytes as int64 words (text attributes are
written beyond their end by jax-tvm-ffi 0.1.3), and ``low`` and ``high``, its digest, by which a process that
has seen the text finds it again without looking at the words. Arguments and results come as memory that XLA
owns, work goes to XLA's stream, and nothing is allocated, waited for or asked of JAX here, but that a
program's first call on one of several GPUs waits for it. An exception surfaces from the jitted function with
its text.

With several GPUs their threads share the interpreter, so none may keep it while its GPU waits for another
one's thread. cuDNN's frontend keeps it when it makes a handle, when it first runs a plan, and when a GPU's
queue of launches is full. The wait is for the first two. Nothing prevents the third: a thread that is a
queue, some thousand launches, ahead of another one that has yet to come to a collective.

XLA's CPU threads flush subnormal numbers to zero. fp8kit's engines keep them, so the handler restores IEEE
arithmetic while it runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import ctypes.util
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax_tvm_ffi
import numpy as np
import tvm_ffi

from fp8kit import arrays
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.formats import DTYPES
from fp8kit.spec import Meta

# RECORDED is the same call, which XLA may record into a CUDA graph
TARGET, RECORDED, LAST = "fp8kit.run", "fp8kit.run_recorded", "fp8kit.last"
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}  # XLA's name -> kind of device
_ENVIRONMENT_BYTES = 64  # fenv_t has at most 32 bytes on the platforms that JAX serves


def register(
    name: str, handler: Callable[..., None], attributes: Sequence[str] = (), platform: str = "cpu"
) -> None:
    """Make ``handler`` the custom call ``name`` of XLA on a platform, "cpu" or "gpu", once a process.

    ``handler(*views, *attributes)``: every argument and result of the call as an ArrayView, whose memory is
    XLA's again when the call ends, then the named attributes.
    """
    arithmetic = _arithmetic(platform)

    def receive(*values: Any) -> None:
        count = len(values) - len(attributes)
        given = [_view(value, platform) for value in values[:count]] + list(values[count:])
        values = ()  # as in _receiver
        with arithmetic():
            handler(*given)

    _register(name, receive, attributes, platform)


def call(name: str, results: Any, *arrays: Any, **attributes: Any) -> Any:
    """A registered call inside a traced function. ``results``: a (nested) list of ``shape_struct``s, in which
    shape it returns them."""
    return jax.ffi.ffi_call(name, results)(*arrays, **attributes)


def shape_struct(meta: Meta) -> jax.ShapeDtypeStruct:
    """A meta as JAX's shape and dtype."""
    return jax.ShapeDtypeStruct(meta.shape, meta.dtype.numpy)


def _view(tensor: Any, platform: str) -> ArrayView:
    device = CPU if platform == "cpu" else Device(PLATFORMS[platform], tensor.device.index)
    return ArrayView(tensor.data_ptr(), tuple(tensor.shape), DTYPES[str(tensor.dtype)], device, None)


def _register(
    name: str, function: Callable[..., None], attributes: Sequence[str], platform: str, graphs: bool = False
) -> None:
    spec = ["args", "rets", *(f"attrs.{attribute}" for attribute in attributes)]
    options: dict[str, Any] = {"platform": platform, "pass_owned_tensor": True, "allow_cuda_graph": graphs}
    jax_tvm_ffi.register_ffi_target(name, tvm_ffi.convert(function), arg_spec=spec, **options)


# --- IEEE arithmetic on XLA's threads -----------------------------------------------------------------------


@functools.cache
def _libm() -> ctypes.CDLL:
    return ctypes.CDLL(ctypes.util.find_library("m"))


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """The default floating-point environment of the C library (``fesetenv(FE_DFL_ENV)``), put back
    afterwards."""
    library, before = _libm(), ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library.fegetenv(before)
    library.fesetenv(ctypes.c_void_p(-1))
    try:
        yield
    finally:
        library.fesetenv(before)


def _arithmetic(platform: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The arithmetic of a platform's handlers, for the duration of a call."""
    return _ieee if platform == "cpu" else contextlib.nullcontext


# --- text as attributes -------------------------------------------------------------------------------------


def attributes(text: str) -> dict[str, Any]:
    """The attributes of the custom call for a program's text."""
    _flight.used = True
    data = text.encode()
    low, high = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.int64)
    return {"low": low, "high": high, "text": np.frombuffer(data + b" " * (-len(data) % 8), np.int64)}


def _text(words: Any) -> str:
    return np.array([int(word) for word in words], np.int64).tobytes().decode()


# --- programs -----------------------------------------------------------------------------------------------


class _Flight:
    """Calls that are running now, and the end of the process: the interpreter must not end under a handler.

    XLA does not say what it has yet to run (a result that was dropped is nowhere), but it runs what one
    thread has launched on one device in the order of its launches. So the thread that ends the process
    launches one more call on each device and waits for it: then nothing of its own is left. What other
    threads launched (they have ended by then, but for daemons) is waited for by looking.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._last = 0, 0.0
        self._process = os.getpid()
        self.used = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A call, from its first to its last line."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                self._last = time.monotonic()

    def drain(self) -> None:
        """Wait for a last call on each device and for the results that are still held, then until no call
        runs and none can follow: every other thread sleeps, or, since a thread of another library may never
        sleep, ``_SILENCE`` seconds have passed since the last call."""
        if not self.used or os.getpid() != self._process:  # a forked child has none of JAX's threads
            return
        for platform in PLATFORMS:
            with contextlib.suppress(RuntimeError):  # no such device here
                for device in jax.local_devices(backend=platform):
                    jax.block_until_ready(_last(jax.device_put(np.zeros(1, np.float32), device)))
        with contextlib.suppress(RuntimeError):  # what fails here has failed for the user already
            for array in jax.live_arrays():
                # deleted meanwhile, or the result of a failed call
                with contextlib.suppress(RuntimeError, ValueError):
                    array.block_until_ready()
        start, quiet = time.monotonic(), 0
        while self._count or (quiet < _QUIET and time.monotonic() - max(start, self._last) < _SILENCE):
            quiet = 0 if self._count or _busy() else quiet + 1
            time.sleep(_PAUSE)


_SILENCE, _PAUSE, _QUIET = 2.0, 0.002, 5  # seconds, seconds, looks in a row


@jax.jit
def _last(x: Any) -> Any:
    """A call that does nothing."""
    return call(LAST, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _busy() -> bool:
    """Whether another thread of this process runs or could run (Linux: state R of ``/proc/self/task``)."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if task.name != own and (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


_flight = _Flight()
_ready: set[str] = set()
_lock = threading.Lock()


Step = Callable[[Sequence[int], int], None]


def target(deterministic: bool) -> str:
    """Name of the call of a program. Under ``fk.deterministic`` XLA may record it: a replay gives every bit
    that a call gives, which ``tests/adapters/jax/graphs.py`` finds out on a GPU. Elsewhere it may not: while
    it records no product can be timed, so that large ones would go on with the first algorithm (5 % of a
    layer of hidden 4096)."""
    return RECORDED if deterministic else TARGET


def serve(prepare: Callable[[str, Device], Step]) -> None:
    """Register both calls on every platform, once a process. ``prepare(text, device)`` gives ``step(pointers,
    stream)``."""
    with _lock:
        for platform, kind in PLATFORMS.items():
            if platform not in _ready:
                for name in (TARGET, RECORDED):
                    _register(
                        name,
                        _receiver(prepare, kind),
                        ["low", "high", "text"],
                        platform,
                        name == RECORDED and platform == "gpu",
                    )
                _register(LAST, lambda *tensors: None, [], platform)
                _ready.add(platform)
                if len(_ready) == 1:
                    atexit.register(_flight.drain)


def _receiver(prepare: Callable[[str, Device], Step], kind: str) -> Callable[..., None]:
    steps: dict[tuple[int, int, Device], Step] = {}
    arithmetic = _arithmetic(kind)

    def receive(*values: Any) -> None:
        *tensors, low, high, words = values
        _flight.used = True
        with _flight.one(), arithmetic():
            if kind == "cpu":
                device, stream = CPU, 0
            else:
                place = tensors[0].device
                device, stream = Device(kind, place.index), tvm_ffi.get_raw_stream(place)
            pointers = [tensor.data_ptr() for tensor in tensors]
            # XLA takes them back: an exception that an engine keeps, Numba in cycles, keeps this frame too.
            # No frame above may hold them
            values, tensors, place = (), [], None
            key = (low, high, device)
            step = steps.get(key)
            if step is None:
                if kind == "cuda":
                    arrays.provider(device).let_others_come(device, stream)  # type: ignore[attr-defined]
                step = steps[key] = prepare(_text(words), device)
            step(pointers, stream)

    return receive
