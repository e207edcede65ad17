"""The steps of recorded calls: launches, products, and whatever else reaches the device; how they are done
again."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fp8kit.backends.cuda import launch
from fp8kit.errors import BackendError


class Launch(partial[int]):
    """A launch, with what it reads: ``size`` bytes in ``memory``, from ``start`` on; at the end of these the
    ``structure``, where there is one."""

    kernel: launch.Kernel
    memory: Any
    start: int
    size: int
    structure: bytes = b""


class Step(NamedTuple):
    """What is done again: by ``replay()``, or on a stream to capture by ``captured(stream)``, where there is
    such a function. Both give the driver's status, or None. On other arrays a launch is done from its memory
    with other pointers in it, everything else by ``work(*addresses, stream)``."""

    name: str
    replay: Callable[[], Any]
    captured: Callable[[int], Any] | None
    work: Callable[..., Any] | None = None
    addresses: tuple[int, ...] = ()


def copied_launch(kernel: launch.Kernel, source: int, size: int, stream: int | None = None) -> Launch:
    """Returns a launch of what is packed in ``size`` bytes at ``source``, on its own stream or another
    one."""
    memory = (ctypes.c_char * (size + launch.ALIGNMENT))()
    shift = -ctypes.addressof(memory) % launch.ALIGNMENT
    start = ctypes.addressof(memory) + shift
    ctypes.memmove(start, source, size)
    if stream is not None:
        struct.pack_into("=Q", memory, shift + launch.STREAM_AT, stream)
    first, count = start + launch.CONFIG + 8 * kernel.table, len(kernel.parameters)
    addresses = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
    made = Launch(launch.entry_point()[0], ctypes.c_void_p(start), kernel.handle, addresses, None)
    made.kernel, made.memory, made.start, made.size = kernel, memory, start, size
    return made


class Replay:
    """What puts work on one stream of one device, whenever it is called, from any thread."""

    __slots__ = ("device", "names", "stream")

    def __init__(self) -> None:
        self.device = self.stream = -1
        self.names: list[str] = []

    def _do(self, *arguments: Any) -> None:
        """Put the work on its stream; its device is current."""
        raise NotImplementedError

    def __call__(self, *arguments: Any) -> Any:
        """Do it, with its device current. BackendError where the driver or a library refuses."""
        here = launch.here
        if here.recording is not None:  # a call within a call: what it does is not told
            here.recording.complete = False
        if not self.names:
            return
        if here.memory is None:  # this thread has launched nothing yet, and has no context
            here.memory = launch.LaunchMemory()
        current = launch.entry_point()[1]
        if current is not None and current() != self.device:
            with launch.current_device(self.device):
                Replay.__call__(self, *arguments)  # not a subclass's, which holds its lock
            return
        try:
            self._do(*arguments)
        except BackendError:
            raise
        except RuntimeError as error:
            raise self.refused(error) from error

    def refused(self, error: RuntimeError) -> BackendError:
        """What a library's own error becomes."""
        return BackendError(f"{', '.join(self.names)}: {error}")

    def check(self, number: int, status: Any) -> None:
        """BackendError if step ``number`` returned an error of the driver."""
        if status:
            raise BackendError(f"{self.names[number]}: {launch.error_text(status)}")
