"""What a call put on a stream, kept so that the same call, with the same addresses, can be made again without
the Python that led to it.

Kernels are launched from memory that holds their packed arguments, products through descriptors of their own;
whatever else reaches the device goes through ``put`` or calls ``mark_unrecordable``. A call that comes again
and again becomes a CUDA graph: then one call of the driver does it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fp8kit.backends.cuda import launch
from fp8kit.errors import BackendError

log = logging.getLogger("fp8kit")

# times that a call comes again before it becomes a graph, which takes as long as some dozens of launches;
# tried as often again
OFTEN = 8
MOST_GRAPHS = 4096  # of a process: each takes some memory of the device
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_graphing = launch.Locks()
_graphed: weakref.WeakSet[Recording] = weakref.WeakSet()


class _Launch(partial[int]):
    """A launch, with what it reads."""

    kernel: launch.Kernel
    memory: Any


def _again(kernel: launch.Kernel, source: int, size: int, stream: int | None = None) -> _Launch:
    """A launch of what is packed in ``size`` bytes at ``source``, on its own stream or another one."""
    memory = (ctypes.c_char * (size + launch.ALIGNMENT))()
    shift = -ctypes.addressof(memory) % launch.ALIGNMENT
    start = ctypes.addressof(memory) + shift
    ctypes.memmove(start, source, size)
    if stream is not None:
        struct.pack_into("=Q", memory, shift + launch.STREAM_AT, stream)
    first, count = start + launch.CONFIG + 8 * kernel.table, len(kernel.parameters)
    addresses = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
    made = _Launch(launch.entry_point()[0], ctypes.c_void_p(start), kernel.handle, addresses, None)
    made.kernel, made.memory = kernel, memory
    return made


class Recording:
    """Steps on one stream of one device, in order. ``complete``: whether they are all that the call did.

    A step is done by ``()``; on a stream to capture by a function of that, where there is one. Both give the
    driver's status, or None.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_graph",
        "_kept",
        "_moved",
        "_names",
        "_slow",
        "complete",
        "device",
        "steps",
        "stream",
    )

    def __init__(self) -> None:
        self.device = self.stream = -1
        self.steps: list[Callable[[], Any]] = []
        self.complete = True
        self._moved: list[Callable[[int], Any] | None] = []
        self._names: list[str] = []
        self._kept: list[object] = []  # the kernels of the graph
        self._calls = 0
        self._graph: Callable[[], Any] | None = None
        self._slow = False

    def add(
        self,
        device: int,
        stream: int,
        name: str,
        step: Callable[[], Any],
        moved: Callable[[int], Any] | None = None,
        slow: bool = False,
    ) -> None:
        """Another step; steps of two devices or streams do not make a recording. ``slow``: slower than the
        launch of a graph is."""
        if (self.device, self.stream) not in ((-1, -1), (device, stream)):
            self.complete = False
        self.device, self.stream = device, stream
        self.steps.append(step)
        self._moved.append(moved)
        self._names.append(name)
        self._slow |= slow

    def launched(self, kernel: launch.Kernel, memory: launch.LaunchMemory, size: int, stream: int) -> None:
        """A kernel was launched from the first ``size`` bytes of a thread's memory."""
        step = _again(kernel, ctypes.addressof(memory.buffer), size)

        def moved(other: int) -> int:
            return _again(kernel, step.args[0].value, size, other)()

        self.add(kernel.device, stream, f"launch of {kernel.name}", step, moved)

    def __call__(self) -> None:
        """Do it again. BackendError where the driver or a library refuses."""
        here = launch.here
        if here.recording is not None:  # a call within a call: what it does is not told
            here.recording.complete = False
        if not self._names:
            return
        if here.memory is None:  # this thread has launched nothing yet, and has no context
            here.memory = launch.LaunchMemory()
        current = launch.entry_point()[1]
        if current is not None and current() != self.device:
            with launch.current_device(self.device):
                self()
            return
        try:
            # in this order: who makes the graph sets it first and then empties the steps
            steps, graph = self.steps, self._graph
            if graph is not None:
                graph()
                return
            for i, step in enumerate(steps):
                status = step()
                if status:
                    raise BackendError(f"{self._names[i]}: {launch.error_text(status)}")
        except BackendError:
            raise
        except RuntimeError as error:
            raise BackendError(f"{', '.join(self._names)}: {error}") from error
        self._calls += 1
        if not self._calls % OFTEN and self._worth() and not launch.capturing(self.stream):
            self._capture()

    def _worth(self) -> bool:
        """Whether a graph is quicker, and can be made."""
        return (len(self.steps) > 1 or self._slow) and None not in self._moved

    def _capture(self) -> None:
        """Make the steps a graph. Where a library cannot be captured they stay what they are: the call itself
        is done."""
        with _graphing[self.device], unsafe_calls():
            if self._graph is not None or len(_graphed) >= MOST_GRAPHS:
                return
            try:
                aside = _aside(self.device)
                aside.begin_capture()
                try:
                    statuses = [moved(aside.ptr) for moved in self._moved if moved is not None]
                finally:
                    graph = aside.end_capture()
            except (RuntimeError, ValueError, BackendError) as error:
                log.debug("%s: no graph: %s", ", ".join(self._names), error)
                self._moved.append(None)  # nor will there be one
                return
            held = [graph]
            del graph
            if any(statuses):
                held.clear()
                return
            self._graph = partial(launch.runtime().graphLaunch, held[0].graphExec, self.stream)
            weakref.finalize(self, let_go, held).atexit = False
            _graphed.add(self)
            self._kept = [step.kernel for step in self.steps if isinstance(step, _Launch)]
            self.steps, self._moved = [], []  # nobody comes back to them


def let_go(held: list[Any]) -> None:
    """Destroy what nothing but the list refers to: a graph last in it first, then what it works in."""
    with unsafe_calls():
        while held:
            held.pop()


@functools.cache
def _aside(device: int) -> Any:
    """The stream of a device, which is current, that graphs are captured from; it runs nothing."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def unsafe_calls() -> Iterator[None]:
    """Within, this thread may make and destroy graphs and free memory while it or another one captures a
    stream. The collector of garbage does such things whenever it likes."""
    mode = ctypes.c_int(_RELAXED)
    launch.driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        launch.driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextmanager
def recording() -> Iterator[Recording]:
    """Context manager: what this thread puts on streams within. An error within leaves a recording that is
    not whole."""
    here = launch.here
    before, made = here.recording, Recording()
    if before is not None:
        before.complete = False
    here.recording = made
    try:
        yield made
    except BaseException:
        made.complete = False
        raise
    finally:
        here.recording = before


def put(
    device: int,
    stream: int,
    name: str,
    work: Callable[[int], Any],
    captured: Callable[[int], Any] | None = None,
    slow: bool = False,
) -> None:
    """Do what neither launches a kernel nor is a product of cuBLASLt, here and whenever the call is made
    again. ``work``: does it on the stream that it is given; ``captured``: the same on a stream that is
    captured, where that is another function; ``slow``: see ``Recording.add``."""
    work(stream)
    if launch.here.recording is not None:
        launch.here.recording.add(device, stream, name, partial(work, stream), captured or work, slow)


def mark_unrecordable() -> None:
    """What is done now is done once: the call that it belongs to is not recorded."""
    if launch.here.recording is not None:
        launch.here.recording.complete = False
