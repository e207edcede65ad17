"""What a call put on a stream, kept so that the same call, with the same addresses, can be made again without the Python that led to it.

Kernels are launched from memory that holds their packed arguments, products through descriptors of their own; whatever else reaches the
device goes through ``put`` or says ``spoil``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fp8kit.backends.cuda import launch
from fp8kit.errors import BackendError


class Recording:
    """Steps of one device, in order. ``whole``: whether they are all that the call did."""

    __slots__ = ("device", "kept", "names", "steps", "whole")

    def __init__(self) -> None:
        self.device = -1
        self.steps: list[Callable[[], Any]] = []  # each returns the driver's status, or None
        self.names: list[str] = []
        self.kept: list[object] = []  # what the steps point into
        self.whole = True

    def add(self, device: int, name: str, step: Callable[[], Any]) -> None:
        """Another step; steps of two devices do not make a recording."""
        if self.device not in (-1, device):
            self.whole = False
        self.device = device
        self.names.append(name)
        self.steps.append(step)

    def launched(self, kernel: launch.Kernel, room: launch.Room, size: int) -> None:
        """A kernel was launched from the first ``size`` bytes of a thread's memory."""
        memory = (ctypes.c_char * (size + launch.ALIGNMENT))()
        start = ctypes.addressof(memory)
        start += -start % launch.ALIGNMENT
        ctypes.memmove(start, room.memory, size)
        first = start + launch.CONFIG + 8 * kernel.table
        count = len(kernel.parameters)
        addresses = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
        function, _ = launch.launcher()
        self.kept += (memory, kernel)
        self.add(kernel.device, f"launch of {kernel.name}", partial(function, ctypes.c_void_p(start), kernel.handle, addresses, None))

    def __call__(self) -> None:
        """Do it again. BackendError where the driver or a library refuses."""
        current = launch.launcher()[1]
        if current is not None and current() != self.device:
            with launch.current_device(self.device):
                self._run()
        else:
            self._run()

    def _run(self) -> None:
        for step in self.steps:
            status = step()
            if status:
                raise BackendError(f"{self.names[self.steps.index(step)]}: {launch.error_text(status)}")


@contextmanager
def recording() -> Iterator[Recording]:
    """Context manager: what this thread puts on streams within. An error within leaves a recording that is not whole."""
    here = launch.here
    before, made = here.recording, Recording()
    if before is not None:
        before.whole = False
    here.recording = made
    try:
        yield made
    except BaseException:
        made.whole = False
        raise
    finally:
        here.recording = before


def put(device: int, name: str, step: Callable[[], Any]) -> None:
    """Do what neither launches a kernel nor is a product of cuBLASLt, here and whenever the call is made again."""
    step()
    if launch.here.recording is not None:
        launch.here.recording.add(device, name, step)


def spoil() -> None:
    """What is done now is done once: the call that it belongs to is not recorded."""
    if launch.here.recording is not None:
        launch.here.recording.whole = False
