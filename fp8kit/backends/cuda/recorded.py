"""What a call put on a stream, kept so that the same call, with the same addresses, can be made again without
the Python that led to it; ``moving`` makes it with other addresses.

Kernels are launched from memory that holds their packed arguments, products through descriptors of their own;
whatever else reaches the device goes through ``put`` or calls ``mark_unrecordable``. A call that comes again
and again becomes a CUDA graph: then one call of the driver does it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.moving import moving
from fp8kit.backends.cuda.steps import Launch, Replay, Step, copied_launch
from fp8kit.errors import BackendError

log = logging.getLogger("fp8kit")

# times that a call comes again before it becomes a graph, which takes as long as some dozens of launches;
# tried as often again
OFTEN = 8
MOST_GRAPHS = 4096  # of a process: each takes some memory of the device
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_graphing = launch.Locks()
_graphed: weakref.WeakSet[Recording] = weakref.WeakSet()


class Recording(Replay):
    """Steps on one stream of one device, in order. ``complete``: whether they are all that the call did."""

    __slots__ = (
        "__weakref__",
        "_at_once",
        "_calls",
        "_current",
        "_graphable",
        "_kept",
        "_slow",
        "complete",
        "steps",
    )

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.complete = True
        self._kept: list[object] = []  # the kernels of the graph
        self._calls = 0
        # what does it all by one call: the launch of the graph, or the only step
        self._at_once: Callable[[], Any] | None = None
        # of that time: says which device is current; None where there is only one
        self._current: Callable[[], int] | None = None
        self._graphable = True
        self._slow = False

    def add(self, device: int, stream: int, step: Step, slow: bool = False) -> None:
        """Another step; steps of two devices or streams do not make a recording. ``slow``: slower than the
        launch of a graph is."""
        if (self.device, self.stream) not in ((-1, -1), (device, stream)):
            self.complete = False
        self.device, self.stream = device, stream
        self.steps.append(step)
        self.names.append(step.name)
        self._graphable &= step.captured is not None
        self._slow |= slow

    def launched(
        self, kernel: launch.Kernel, memory: launch.LaunchMemory, size: int, stream: int, structure: bytes
    ) -> None:
        """A kernel was launched from the first ``size`` bytes of a thread's memory, a structure last."""
        copied = copied_launch(kernel, ctypes.addressof(memory.buffer), size)
        copied.structure = structure

        def captured(other: int) -> int:
            return copied_launch(kernel, copied.start, size, other)()

        self.add(kernel.device, stream, Step(f"launch of {kernel.name}", copied, captured))

    def moving(self, addresses: Sequence[int | None], sizes: Sequence[int]) -> Any:
        """See ``execution.replay.Replays``."""
        return moving(self, self.steps, addresses, sizes)

    def __call__(self) -> None:
        """See ``Replay``. The same in fewer calls where one call of a library does it, on the device that is
        current."""
        at_once, current, here = self._at_once, self._current, launch.here
        if (
            at_once is None
            or here.recording is not None
            or here.memory is None
            or (current is not None and current() != self.device)
        ):
            super().__call__()
            return
        try:
            status = at_once()
        except BackendError:
            raise
        except RuntimeError as error:
            raise self.refused(error) from error
        if status:
            self.check(0, status)

    def _do(self) -> None:
        # in this order: who makes the graph sets it first and then empties the steps
        steps, at_once = self.steps, self._at_once
        if at_once is not None:
            self.check(0, at_once())
            return
        for i, step in enumerate(steps):
            status = step.replay()
            if status:
                self.check(i, status)
        if not self._graphable:
            return
        self._calls += 1
        if not self._calls % OFTEN:
            if len(steps) == 1 and not self._slow:
                self._graphable = False  # a graph would not be quicker
                self._current, self._at_once = launch.entry_point()[1], steps[0].replay
            elif not launch.capturing(self.stream):
                self._capture()

    def _capture(self) -> None:
        """Make the steps a graph. Where a library cannot be captured they stay what they are: the call itself
        is done."""
        with _graphing[self.device], unsafe_calls():
            if self._at_once is not None or len(_graphed) >= MOST_GRAPHS:
                return
            try:
                aside = _aside(self.device)
                aside.begin_capture()
                try:
                    statuses = [step.captured(aside.ptr) for step in self.steps if step.captured]
                finally:
                    graph = aside.end_capture()
            except (RuntimeError, ValueError, BackendError) as error:
                log.debug("%s: no graph: %s", ", ".join(self.names), error)
                self._graphable = False  # nor will there be one
                return
            held = [graph]
            del graph
            if any(statuses):
                held.clear()
                return
            graph_launch = partial(launch.runtime().graphLaunch, held[0].graphExec, self.stream)
            self._current, self._at_once = launch.entry_point()[1], graph_launch
            weakref.finalize(self, let_go, held).atexit = False
            _graphed.add(self)
            self._kept = [step.replay.kernel for step in self.steps if isinstance(step.replay, Launch)]
            self.steps = []  # not needed any more


def let_go(held: list[Any]) -> None:
    """Destroy what nothing but the list refers to: a graph last in it first, then what it works in."""
    with unsafe_calls():
        while held:
            held.pop()


@functools.cache
def _aside(device: int) -> Any:
    """Returns the stream of a device, which is current, that graphs are captured from; it runs nothing."""
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
    work: Callable[..., Any],
    addresses: tuple[int, ...],
    captured: Callable[..., Any] | None = None,
    slow: bool = False,
) -> None:
    """Do what neither launches a kernel nor is a product of cuBLASLt, here and whenever the call is made
    again. ``work(*addresses, stream)`` does it, on arrays at those addresses and at no others; ``captured``:
    the same on a stream that is captured, where that is another function; ``slow``: see ``Recording.add``."""
    work(*addresses, stream)
    if launch.here.recording is not None:
        step = Step(
            name, partial(work, *addresses, stream), partial(captured or work, *addresses), work, addresses
        )
        launch.here.recording.add(device, stream, step, slow)


def clear(device: int, stream: int, address: int, nbytes: int) -> None:
    """Zeros in so many bytes of the current device."""
    memset = launch.runtime().memsetAsync

    def work(start: int, on: int) -> None:
        memset(start, 0, nbytes, on)

    put(device, stream, "memset", work, (address,))


def mark_unrecordable() -> None:
    """What is done now is done once: the call that it belongs to is not recorded."""
    if launch.here.recording is not None:
        launch.here.recording.complete = False
