"""XLA's custom calls: ``fp8kit.run``, which runs every operation, and ``register`` for a user's own. Python
on XLA's own buffers, through jax-tvm-ffi.

The call's first argument, a constant of the compiled program, is a text that says what to run
(``program.py``), the same in every process, so that compiled programs can be cached on disk and exported. Its
attributes ``low`` and ``high`` are the text's digest, by which a process that has lowered the call finds the
text without reading the constant. (jax-tvm-ffi 0.1.3 writes beyond the end of attributes that are texts, and
keeps 16 bytes for each element of those that are arrays, in every call, as long as the thread lives.) Further
arguments and results come as memory that XLA
owns, work goes to XLA's stream, and nothing is allocated, waited for or asked of JAX here, but that some
calls on one of several GPUs wait for it (``several_gpus``). An exception surfaces from the jitted function
with its text.

XLA's CPU threads flush subnormal numbers to zero. fp8kit's engines keep them, so the handler restores IEEE
arithmetic while it runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import ctypes.util
import functools
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.backend
import jax_tvm_ffi
import numpy as np
import tvm_ffi

from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.execution.plans import plans
from fp8kit.formats import DTYPES, uint8
from fp8kit.lru import LRU, SHAPES
from fp8kit.spec import Meta
from fp8kit_jax import program, several_gpus

# RECORDED is the same call, which XLA may record into a CUDA graph
TARGET, RECORDED, LAST = "fp8kit.run", "fp8kit.run_recorded", "fp8kit.last"
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}  # XLA's name -> kind of device
_ENVIRONMENT_BYTES = 64  # fenv_t has at most 32 bytes on the platforms that JAX serves
_ATTRIBUTES = ["low", "high"]
_TEXTS: LRU[tuple[int, int], str] = LRU(SHAPES)  # digest -> what was lowered in this process
used = threading.Event()  # set when a call is made that the end of the process waits for


def default_device() -> Device:
    """Returns the device on which a program runs that names none."""
    where = jax.config.jax_default_device  # type: ignore[attr-defined]
    device = where if isinstance(where, jax.Device) else jax.local_devices(backend=where)[0]
    kind = PLATFORMS.get(device.platform, device.platform)
    return CPU if kind == CPU.kind else Device(kind, device.local_hardware_id)


def register(
    name: str, handler: Callable[..., None], attributes: Sequence[str] = (), platform: str = "cpu"
) -> None:
    """Make ``handler`` the custom call ``name`` of XLA on a platform, "cpu" or "gpu", once a process.

    ``handler(*views, *attributes)``: every argument and result of the call as an ArrayView, whose memory is
    XLA's again when the call ends, then the named attributes: numbers, since of arrays jax-tvm-ffi 0.1.3
    keeps a copy in every call.
    """
    arithmetic = _arithmetic(platform)

    def receive(*values: Any) -> None:
        count = len(values) - len(attributes)
        views = [_view(value, platform) for value in values[:count]] + list(values[count:])
        values = ()  # as in _receiver
        with arithmetic():
            handler(*views)

    _register(name, receive, attributes, platform)


def call(name: str, results: Any, *arrays: Any, **attributes: Any) -> Any:
    """A registered call inside a traced function. ``results``: a (nested) list of ``shape_struct``s, in which
    shape it returns them."""
    used.set()
    return jax.ffi.ffi_call(name, results)(*arrays, **attributes)


def shape_struct(meta: Meta) -> jax.ShapeDtypeStruct:
    """Returns a meta as JAX's shape and dtype."""
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
    """Returns the arithmetic of a platform's handlers, for the duration of a call."""
    return _ieee if platform == "cpu" else contextlib.nullcontext


# --- the call that runs programs ----------------------------------------------------------------------------


def target(deterministic: bool) -> str:
    """Name of the call of a program. Under ``fk.deterministic`` XLA may record it: a replay gives every bit
    that a call gives, which ``tests/adapters/jax/graphs.py`` finds out on a GPU. Elsewhere it may not: while
    it records no product can be timed, so that large ones would go on with the first algorithm (5 % of a
    layer of hidden 4096)."""
    return RECORDED if deterministic else TARGET


def constant(text: str) -> np.ndarray[Any, Any]:
    """Returns the first argument of the custom call for a program's text: its bytes."""
    return np.frombuffer(text.encode(), np.uint8)


def attributes(text: str) -> dict[str, Any]:
    """Returns the attributes of the custom call for a program's text."""
    used.set()
    low, high = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.int64)
    _TEXTS.put((int(low), int(high)), text)
    return {"low": low, "high": high}


def _text(low: int, high: int, pointer: int, size: int, device: Device) -> str:
    """Returns the text of a digest; of a program that another process lowered, as its constant has it."""
    known = _TEXTS.get((low, high))
    if known is not None:
        return known
    return ArrayView(pointer, (size,), uint8, device, None).numpy().tobytes().decode(errors="replace")


def _receiver(kind: str) -> Callable[..., None]:
    """Returns the handler of programs on a kind of device."""
    arithmetic = _arithmetic(kind)

    def receive(*values: Any) -> None:
        *tensors, low, high = values
        used.set()
        with arithmetic():
            if kind == "cpu":
                device, stream, several = CPU, 0, False
            else:
                place = tensors[0].device
                device, stream = Device(kind, place.index), tvm_ffi.get_raw_stream(place)
                several = several_gpus.several(device)
            text, *pointers = [tensor.data_ptr() for tensor in tensors]
            size = tensors[0].shape[0] if len(tensors[0].shape) == 1 else 0  # 0: it is no text
            # XLA takes them back: an exception that an engine keeps, Numba in cycles, keeps this frame too.
            # No frame above may hold them
            values, tensors, place = (), [], None
            key = ("jax", device, low, high)
            op: Any = plans.get(key)
            fresh = op is None or not op.current
            try:
                if kind == "cuda" and (fresh or (several and op.holds_interpreter)):
                    several_gpus.wait(device, stream)
                if fresh:
                    op = plans.put(key, program.prepare(_text(low, high, text, size, device), device))
                if several and not fresh:  # a first call compiles, which may take long
                    several_gpus.launching(device)
                op.run(pointers, stream)
            except BaseException as error:
                if several:
                    several_gpus.failed(device, error)
                raise
            finally:
                if several:
                    several_gpus.launched()

    return receive


# XLA takes a name once a process. This module may be imported again, after a notebook deleted fp8kit's: then
# what is registered calls the new module's function. Kept where that deletion does not reach; a partial,
# since a function's frame would hold XLA's memory
_OWN: dict[tuple[str, str], functools.partial[None]] = jax_tvm_ffi.__dict__.setdefault("_fp8kit_own", {})


def _register_own(
    name: str, function: Callable[..., None], attributes: Sequence[str], platform: str, graphs: bool = False
) -> None:
    if (name, platform) in _OWN:
        _OWN[name, platform].__setstate__((function, (), {}, {}))
        return
    registered = _OWN[name, platform] = functools.partial(function)
    _register(name, registered, attributes, platform, graphs)


for _platform, _kind in PLATFORMS.items():
    _register_own(TARGET, _receiver(_kind), _ATTRIBUTES, _platform)
    _register_own(RECORDED, _receiver(_kind), _ATTRIBUTES, _platform, graphs=_platform == "gpu")
    _register_own(LAST, lambda *tensors: None, [], _platform)


# --- the end of the process ---------------------------------------------------------------------------------


@jax.jit
def _last(x: Any) -> Any:
    """Returns a call that does nothing."""
    return call(LAST, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _finish(process: int) -> None:
    """Wait until XLA has run what was launched: the interpreter must not end under a handler.

    XLA's clients are given up, as JAX does at its own end, and a client that goes finishes all that it was
    given, by any thread. A program that keeps arrays or devices to its end keeps the client. What is waited
    for then is every result that is still held and, since XLA runs what one thread has launched on a device
    in the order of its launches, all that this thread has launched; but not what another thread has launched
    and whose results are not held.
    """
    if not used.is_set() or os.getpid() != process:  # a forked child has none of JAX's threads
        return
    several_gpus.limit_the_end()
    with contextlib.suppress(RuntimeError):  # of a device that has failed for the user already
        for client in jax.extend.backend.backends().values():
            _wait_for_results(client)
        several_gpus.all_done()
    client = None
    jax.extend.backend.clear_backends()
    gc.collect()


def _wait_for_results(client: Any) -> None:
    """Wait for results that are still held on a client, and for a last call on each of its devices, which may
    be none of a mesh that the program has set. That call's results are integers: they hold anything, and
    jax_debug_nans looks at floats."""
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        last = [_last(jax.device_put(np.zeros(1, np.int32), device)) for device in client.local_devices()]
    for array in (*last, *client.live_arrays()):
        # deleted meanwhile, or the result of a failed call, which the user has heard of
        with contextlib.suppress(RuntimeError, ValueError):
            array.block_until_ready()


atexit.register(_finish, os.getpid())
