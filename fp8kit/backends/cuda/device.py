"""CUDA devices for ``fp8kit.arrays``: memory, streams and copies through CuPy, so that its pool and its current stream are the ones used.

Importing this module imports nothing of CUDA; each call that needs CuPy says so when it is missing.
"""

from __future__ import annotations

import functools
from typing import Any

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import launch
from fp8kit.errors import BackendError, expected

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


@functools.cache
def cupy() -> Any:
    """The module ``cupy``; BackendError where it is missing."""
    try:
        import cupy as module
    except ImportError as error:
        raise BackendError(f"cuda: CuPy cannot be imported ({error}); install it with: pip install 'fp8kit[cuda13]'") from error
    return module


@functools.cache
def _calls() -> tuple[Any, Any, Any]:
    """What every operation calls, looked up once: getDevice, alloc, get_current_stream. BackendError where there is no device at all."""
    provider.check(Device("cuda"))
    return launch.runtime().getDevice, cupy().cuda.alloc, cupy().cuda.get_current_stream


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
            usable = f"a CUDA device that is here: {self.count()} are (a driver, CuPy or a GPU may be missing; see `fp8kit info`)"
            raise BackendError(expected("device", "device", str(device), usable))

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
        if device.index not in self._usable:
            self.check(device)
            self._usable.add(device.index)
        if get_device() == device.index:
            memory = alloc(nbytes or 1)
        else:
            with launch.current_device(device.index):
                memory = alloc(nbytes or 1)
        return memory.ptr, memory

    def current_stream(self, device: Device) -> int:
        """See ``DeviceProvider``; CuPy's current stream of this thread and device."""
        return int(_calls()[2](device.index).ptr)

    def synchronize(self, device: Device) -> None:
        """See ``DeviceProvider``. BackendError for a device that is not here, and for an error that earlier work left."""
        self.check(device)
        with launch.current_device(device.index):
            try:
                launch.runtime().streamSynchronize(self.current_stream(device))
            except launch.runtime().CUDARuntimeError as error:
                raise BackendError(f"synchronize: {device}: {error}") from error

    def order_after(self, stream: int, device: Device) -> None:
        """See ``DeviceProvider``. DLPack's numbers 1 and 2 are CUDA's own handles of the legacy and the per-thread default stream."""
        calls = launch.runtime()
        with launch.current_device(device.index):
            current = self.current_stream(device)
            if current == stream or (current == 0 and stream == 1):
                return
            event = calls.eventCreateWithFlags(2)  # cudaEventDisableTiming
            try:
                calls.eventRecord(event, current)
                calls.streamWaitEvent(stream, event, 0)
            finally:
                calls.eventDestroy(event)

    def fill_zero(self, view: ArrayView, stream: int) -> None:
        """See ``DeviceProvider``."""
        if view.nbytes:
            with launch.current_device(view.device.index):
                launch.runtime().memsetAsync(view.ptr, 0, view.nbytes, stream)

    def copy(self, dst: ArrayView, src: ArrayView, stream: int) -> None:
        """See ``DeviceProvider``. Between host and device it waits: pageable memory may change or vanish right after the call."""
        calls, nbytes = launch.runtime(), src.nbytes
        if not nbytes:
            return
        here = src.device if src.device.kind == "cuda" else dst.device
        with launch.current_device(here.index):
            if src.device.kind == dst.device.kind == "cuda":
                if src.device == dst.device:
                    calls.memcpyAsync(dst.ptr, src.ptr, nbytes, _ON_DEVICE, stream)
                else:
                    calls.memcpyPeerAsync(dst.ptr, dst.device.index, src.ptr, src.device.index, nbytes, stream)
                    self._follow(dst.device, src.device, stream)
                return
            calls.memcpyAsync(dst.ptr, src.ptr, nbytes, _TO_HOST if dst.device.kind == "cpu" else _TO_DEVICE, stream)
            calls.streamSynchronize(stream)

    def _follow(self, device: Device, source: Device, stream: int) -> None:
        """Make the current stream of ``device`` wait for ``stream`` of ``source``."""
        calls = launch.runtime()
        event = calls.eventCreateWithFlags(2)
        try:
            calls.eventRecord(event, stream)
            with launch.current_device(device.index):
                calls.streamWaitEvent(self.current_stream(device), event, 0)
        finally:
            calls.eventDestroy(event)

    def native(self, view: ArrayView) -> Any:
        """See ``DeviceProvider``: a ``cupy.ndarray`` that keeps the view's owner alive. FP8 dtypes come as uint8."""
        library = cupy()
        itemsize = view.dtype.itemsize
        kind = view.dtype.numpy if view.dtype.format is None else "uint8"
        span = itemsize * (1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))) if view.size else 0
        memory = library.cuda.UnownedMemory(view.ptr, span, view, view.device.index)
        strides = tuple(s * itemsize for s in view.strides)
        return library.ndarray(view.shape, kind, library.cuda.MemoryPointer(memory, 0), strides)


provider = CudaProvider()
