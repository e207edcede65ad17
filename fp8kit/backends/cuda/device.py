"""CUDA devices for ``fp8kit.arrays``: memory, streams and copies through CuPy, so that its pool and its
current stream are the ones used.

Importing this module imports nothing of CUDA; each call that needs CuPy says so when it is missing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import launch, recorded
from fp8kit.backends.cuda.steps import Step
from fp8kit.devices import lacking
from fp8kit.errors import BackendError, install

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


@functools.cache
def cupy() -> Any:
    """Returns the module ``cupy``; BackendError where it is missing."""
    try:
        import cupy as module
    except ImportError as error:
        raise BackendError(f"cuda: CuPy cannot be imported ({error}); {install('cuda13')}") from error
    return module


@functools.cache
def _calls() -> tuple[Any, Any, Any]:
    """Returns what every operation calls, looked up once: getDevice (None where there is only one device),
    alloc, get_current_stream. BackendError where there is no device at all."""
    provider.check(Device("cuda"))
    get_device = None if provider.count() == 1 else launch.runtime().getDevice
    return get_device, cupy().cuda.alloc, cupy().cuda.get_current_stream


class _Thread(threading.local):
    capturing = False


_thread = _Thread()


def _want_no_capture(what: str) -> None:
    """BackendError where a graph is captured on this thread: it can hold nothing that the host waits for."""
    if _thread.capturing:
        wanted = (
            "work on the device alone: no item(), numpy(), check_finite, host arrays or callables of a "
            "recipe while it is captured"
        )
        raise BackendError("graph", "function", what, wanted)


@contextlib.contextmanager
def _waiting(device: Device) -> Iterator[None]:
    """Context manager: the device is current, and an error that earlier work left on it is a BackendError."""
    with launch.current_device(device.index):
        try:
            yield
        except launch.runtime().CUDARuntimeError as error:
            raise BackendError(f"synchronize: {device}: {error}") from error


def _order(before: int, stream: int, device: Device) -> None:
    """Make ``stream`` of ``device`` wait for ``before``, a stream of the device that is current."""
    calls = launch.runtime()
    event = calls.eventCreateWithFlags(2)  # cudaEventDisableTiming
    try:
        calls.eventRecord(event, before)
        with launch.current_device(device.index):
            calls.streamWaitEvent(stream, event, 0)
    finally:
        calls.eventDestroy(event)


class Pool:
    """Memory that a graph works in. CuPy's own pool would hand it out again, so the graph has one of its own;
    it lives as long as the graph, and as any array in it that is still referred to, such as a gradient of the
    step."""

    def __init__(self) -> None:
        self._pool = cupy().cuda.MemoryPool(_piece)

    def malloc(self, size: int) -> Any:
        """As CuPy's pools: memory that knows this pool. A tuple goes from its end, so the memory is back
        before the pool may go."""
        memory, cuda = self._pool.malloc(size), cupy().cuda
        return cuda.MemoryPointer(
            cuda.UnownedMemory(memory.ptr, size, (self, memory), launch.runtime().getDevice()), 0
        )


class _Piece:
    """Memory that a pool has asked the device for."""

    __slots__ = ("__weakref__",)


def _piece(size: int) -> Any:
    """Returns a pool's allocator, on the current device: memory that is freed when the last reference goes,
    also during a capture."""
    calls, cuda, owner = launch.runtime(), cupy().cuda, _Piece()
    device, pointer = calls.getDevice(), calls.malloc(size)
    weakref.finalize(owner, _free, device, pointer).atexit = False
    return cuda.MemoryPointer(cuda.UnownedMemory(pointer, size, owner, device), 0)


def _free(device: int, pointer: int) -> None:
    with recorded.unsafe_calls(), launch.current_device(device):
        launch.runtime().free(pointer)


class CapturedGraph:
    """A captured CUDA graph, and whatever its work lies in."""

    __slots__ = ("__weakref__", "_device", "_held")

    def __init__(self, device: Device, graph: Any, memory: tuple[object, ...]) -> None:
        self._device, self._held = device, [*memory, graph]
        weakref.finalize(self, recorded.let_go, self._held).atexit = False

    def launch(self) -> None:
        """Do the captured work once, on the device's current stream. BackendError when CUDA refuses."""
        with launch.current_device(self._device.index):
            try:
                self._held[-1].launch(_calls()[2](self._device.index))
            except RuntimeError as error:
                raise BackendError(f"graph: {error}") from error


class CudaProvider:
    """The ``DeviceProvider`` of kind "cuda"."""

    def __init__(self) -> None:
        self._usable: set[int] = set()  # devices that have been checked

    @staticmethod
    @functools.cache
    def _count() -> int:
        try:
            return int(launch.runtime().getDeviceCount())
        except Exception:  # CuPy raises its own kinds for: no driver, a driver too old, no device
            return 0

    def check(self, device: Device) -> None:
        """BackendError where the device is not usable here."""
        if device.index >= self.count():
            last = f"a device up to cuda:{self.count() - 1}"
            wanted = last if self.count() else f"another device: {lacking('cuda')}"
            raise BackendError("device", "device", str(device), wanted)

    def count(self) -> int:
        """See ``DeviceProvider``; asked once a process."""
        return self._count()

    def arch(self, device: Device) -> int:
        """Compute capability times ten: 90 for Hopper."""
        major, minor = launch.capability(device.index)
        return 10 * major + minor

    def alloc(self, nbytes: int, device: Device) -> tuple[int, object]:
        """See ``DeviceProvider``; from CuPy's current allocator (512-byte aligned)."""
        get_device, alloc, _ = _calls()
        recorded.mark_unrecordable()  # it is another memory at another time
        if device.index not in self._usable:
            self.check(device)
            self._usable.add(device.index)
        if get_device is None or get_device() == device.index:
            memory = alloc(nbytes or 1)
        else:
            with launch.current_device(device.index):
                memory = alloc(nbytes or 1)
        return memory.ptr, memory

    def current_stream(self, device: Device) -> int:
        """See ``DeviceProvider``; CuPy's current stream of this thread and device."""
        return int(_calls()[2](device.index).ptr)

    def synchronize(self, device: Device) -> None:
        """See ``DeviceProvider``. BackendError for a device that is not here, for an error that earlier work
        left, and while a graph is captured."""
        self.check(device)
        _want_no_capture("a wait for the device")
        with _waiting(device):
            launch.runtime().streamSynchronize(self.current_stream(device))

    def let_others_come(self, device: Device, stream: int) -> None:
        """Before work that loads kernels and makes plans, on one of several devices: wait until the device
        has done what it was given, while other threads run; not where ``stream`` is captured. It may have
        been given a collective, which waits for another device, whose thread needs the interpreter; and
        loading waits for the device as well, within cuDNN's frontend without letting go of the interpreter.
        BackendError for an error that earlier work left."""
        if self.count() == 1 or launch.capturing(stream):
            return
        with _waiting(device):
            launch.runtime().deviceSynchronize()  # lets other threads run

    def order_after(self, stream: int, device: Device) -> None:
        """See ``DeviceProvider``. DLPack's numbers 1 and 2 are CUDA's own handles of the legacy and the
        per-thread default stream."""
        with launch.current_device(device.index):
            current = self.current_stream(device)
            if current != stream and (current, stream) != (0, 1):
                _order(current, stream, device)

    def put(
        self, device: Device, stream: int, name: str, work: Callable[..., None], addresses: tuple[int, ...]
    ) -> None:
        """``work(*addresses, stream)``, here and whenever a recorded call that it is part of is made again,
        which no graph takes the place of: what a library, or a thread of its own, does beside kernels."""
        here = launch.here
        outer, here.recording = here.recording, None
        try:
            work(*addresses, stream)
        finally:
            here.recording = outer
        if outer is not None:
            step = Step(name, partial(work, *addresses, stream), None, work, addresses)
            outer.add(device.index, stream, step)

    def fill_zero(self, view: ArrayView, stream: int) -> None:
        """See ``DeviceProvider``."""
        nbytes = view.nbytes
        if not nbytes:
            return
        calls, index = launch.runtime(), view.device.index
        if calls.getDevice() == index:
            recorded.clear(index, stream, view.ptr, nbytes)
        else:
            with launch.current_device(index):
                recorded.clear(index, stream, view.ptr, nbytes)

    def copy(self, dst: ArrayView, src: ArrayView, stream: int) -> None:
        """See ``DeviceProvider``. Between host and device it waits: pageable memory may change or vanish
        right after the call."""
        calls, nbytes = launch.runtime(), src.nbytes
        if not nbytes:
            return
        recorded.mark_unrecordable()
        here = src.device if src.device.kind == "cuda" else dst.device
        with launch.current_device(here.index):
            if src.device.kind == dst.device.kind == "cuda":
                if src.device == dst.device:
                    calls.memcpyAsync(dst.ptr, src.ptr, nbytes, _ON_DEVICE, stream)
                else:
                    calls.memcpyPeerAsync(
                        dst.ptr, dst.device.index, src.ptr, src.device.index, nbytes, stream
                    )
                    _order(stream, self.current_stream(dst.device), dst.device)
                return
            _want_no_capture("a copy between host and device")
            calls.memcpyAsync(
                dst.ptr, src.ptr, nbytes, _TO_HOST if dst.device.kind == "cpu" else _TO_DEVICE, stream
            )
            calls.streamSynchronize(stream)

    def fetch(self, view: ArrayView, stream: int) -> Callable[[], np.ndarray[Any, Any]]:
        """See ``DeviceProvider``; into page-locked memory of CuPy's pool. BackendError while a graph is
        captured, and, where it waits, for an error that earlier work left."""
        recorded.mark_unrecordable()  # who reads it does so once
        _want_no_capture("a copy between host and device")
        calls, nbytes, device = launch.runtime(), view.nbytes, view.device
        with launch.current_device(device.index):
            pinned = cupy().cuda.alloc_pinned_memory(max(nbytes, 1))
            done = cupy().cuda.Event(disable_timing=True)
            calls.memcpyAsync(pinned.ptr, view.ptr, nbytes, _TO_HOST, stream)
            calls.eventRecord(done.ptr, stream)

        def wait() -> np.ndarray[Any, Any]:
            with _waiting(view.device):  # which holds the view until then
                done.synchronize()
            return np.frombuffer(pinned, np.uint8, nbytes).copy()

        return wait

    def capture(self, device: Device, function: Callable[[], Any]) -> tuple[Any, CapturedGraph]:
        """Call ``function`` with the work that it puts on the device's current stream recorded instead of
        done: what it returns, and the recording. What it allocates on the device belongs to the recording.
        BackendError where it does what a graph cannot hold."""
        library = cupy()
        with recorded.unsafe_calls(), launch.current_device(device.index):
            # what ran before has left room that the graph's own pool cannot take
            library.get_default_memory_pool().free_all_blocks()
            pool, stream = Pool(), library.cuda.Stream(non_blocking=True)
            with library.cuda.using_allocator(pool.malloc), stream:
                stream.begin_capture()  # relaxed: the pool may have to ask for memory
                _thread.capturing = True
                try:
                    result = function()
                except BaseException as error:
                    _thread.capturing = False
                    with contextlib.suppress(RuntimeError):  # the capture may be broken already
                        stream.end_capture()
                    if isinstance(error, RuntimeError) and type(error).__module__.startswith("cupy"):
                        raise BackendError(
                            f"graph: the function does what cannot be captured: {error}"
                        ) from error
                    raise
                _thread.capturing = False
                try:
                    graph = stream.end_capture()
                except RuntimeError as error:
                    raise BackendError(
                        f"graph: the function does what cannot be captured: {error}"
                    ) from error
            return result, CapturedGraph(device, graph, (pool, stream))

    def native(self, view: ArrayView) -> Any:
        """See ``DeviceProvider``: a ``cupy.ndarray`` that keeps the view's owner alive. FP8 dtypes come as
        uint8."""
        library = cupy()
        itemsize = view.dtype.itemsize
        kind = view.dtype.numpy if view.dtype.format is None else "uint8"
        last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
        span = itemsize * (1 + last) if view.size else 0
        memory = library.cuda.UnownedMemory(view.ptr, span, view, view.device.index)
        strides = tuple(s * itemsize for s in view.strides)
        return library.ndarray(view.shape, kind, library.cuda.MemoryPointer(memory, 0), strides)


provider = CudaProvider()
