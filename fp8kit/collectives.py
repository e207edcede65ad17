"""Collectives: what the ranks of a group do together, on raw buffers, in the order of a stream.

A frontend registers what its ranks communicate by (process groups of torch.distributed, NCCL, threads); specs
know it by name, and a plan finds it there. Sums are made in high precision alone: FP8 codes travel as bytes.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np

from fp8kit.arguments import choice, integer
from fp8kit.arrays import CPU, ArrayView, Device, copy
from fp8kit.devices import provider
from fp8kit.errors import ArgumentError, BackendError

log = logging.getLogger("fp8kit")
Reduction = Literal["sum", "max"]
_NAMES = itertools.count(1)
# the group of all processes, where the native frontend made one; looked at in every step
EVERYONE: list[Collectives] = []
_KNOWN: weakref.WeakValueDictionary[str, Collectives] = weakref.WeakValueDictionary()


class Collectives:
    """What one rank calls; every rank of the group makes the same calls in the same order.

    ``rank`` of ``size`` ranks. ``name``: this process's (or thread's) own name of the group, by which specs
    find it as long as the object lives. Views are C-contiguous and on one device; calls are put on
    ``stream`` and may return before they are done. BackendError where a rank fails, hangs, or calls something
    else: it names the ranks, what each did last, and for which layer (``label``).

    A backend derives from this and gives the methods whose names begin with "_"; a group of one rank needs
    none.
    """

    # where the ranks' tensors are, where the backend says it
    device: Device = CPU

    @property
    def by_parts(self) -> bool:
        """Whether parts of a call that was started arrive, or leave, one by one, so that it is worth to
        multiply each by itself. Parts may be waited for, and started, either way."""
        return False

    def __init__(self, rank: int, size: int) -> None:
        integer("Collectives", "size", size, 1, 2**31 - 1)
        integer("Collectives", "rank", rank, 0, size - 1)
        self.rank, self.size = rank, size
        self.name = f"group {next(_NAMES)}: rank {rank} of {size}"
        # address of the target of a call that was started -> what waits for it
        self._started: dict[int, _Started] = {}
        _KNOWN[self.name] = self

    def all_reduce(self, x: ArrayView, op: Reduction, stream: int, label: str = "") -> None:
        """x = the sum, or the largest, over the ranks of their x, in place. Each rank gets the same bits."""
        choice("all_reduce", "op", op, ("sum", "max"), ArgumentError)
        if self.size > 1:
            self._do(f"all_reduce {op}", label, lambda x, on: self._all_reduce(x, op, on), stream, x)

    def all_gather(self, source: ArrayView, target: ArrayView, stream: int, label: str = "") -> None:
        """``target`` = the ranks' sources, one after the other: ``size`` times as many elements."""
        self._want_parts("all_gather", target, source)
        if self.size == 1:
            return _same(source, target)
        self._do("all_gather", label, self._all_gather, stream, source, target)

    def reduce_scatter(self, source: ArrayView, target: ArrayView, stream: int, label: str = "") -> None:
        """``target`` = this rank's part of the sum over the ranks of their ``source``, which has ``size``
        times as many elements."""
        self._want_parts("reduce_scatter", source, target)
        if self.size == 1:
            return _same(source, target)
        self._do("reduce_scatter", label, self._reduce_scatter, stream, source, target)

    def start(
        self,
        operation: Literal["all_gather", "reduce_scatter"],
        source: ArrayView,
        target: ArrayView,
        stream: int,
        label: str = "",
    ) -> None:
        """``all_gather`` or ``reduce_scatter`` beside what follows on ``stream``, which calls
        ``wait(target)`` before it reads ``target`` or writes to ``source``. The caller keeps both until
        then; where an error comes between, it calls ``abandon``."""
        choice("start", "operation", operation, ("all_gather", "reduce_scatter"), ArgumentError)
        whole, part = (target, source) if operation == "all_gather" else (source, target)
        self._want_parts(operation, whole, part)
        if self.size == 1:
            return _same(source, target)

        def begin(source: ArrayView, target: ArrayView, on: int) -> None:
            wait = self._start(operation, source, target, on)
            what = described(operation, source, label)
            self._started[target.ptr] = _Started(wait, what, threading.get_ident())

        self._do(operation, label, begin, stream, source, target)

    def start_part(
        self, source: ArrayView, target: ArrayView, rank: int, stream: int, label: str = ""
    ) -> None:
        """``start("reduce_scatter", ...)`` by parts: rank ``rank``'s part of ``source`` is there. Called once
        for each rank, this one last, with no other call between."""
        self._want_parts("reduce_scatter", source, target)
        if rank == self.rank:
            self.start("reduce_scatter", source, target, stream, label)
        elif self.by_parts:

            def send(source: ArrayView, on: int) -> None:
                self._send(source, rank, on)

            self._do("part of a reduce_scatter", label, send, stream, source)

    def wait(self, target: ArrayView, stream: int) -> None:
        """Let ``stream`` wait for the call that writes ``target``, if one was started."""

        def arrive(address: int, on: int) -> None:
            started = self._started.pop(address)
            with self._waiting(started.what):
                started.wait(on)

        if target.ptr in self._started:
            _put(target.device, "wait", arrive, (target.ptr,), stream)

    def wait_part(self, target: ArrayView, rank: int, stream: int) -> None:
        """Let ``stream`` wait for rank ``rank``'s part of what is gathered into ``target``, or for more of
        it. ``wait`` comes after the last one."""

        def arrive(address: int, on: int) -> None:
            started = self._started[address]
            with self._waiting(started.what):
                started.wait(on, rank)

        if target.ptr in self._started:
            _put(target.device, "wait for a part", arrive, (target.ptr,), stream)

    def all_to_all(self, source: ArrayView, target: ArrayView, stream: int, label: str = "") -> None:
        """``target``'s part i of ``size`` equal ones = part ``rank`` of rank i's ``source``."""
        if source.size != target.size or source.size % self.size:
            got, wanted = f"{source.size} and {target.size} elements", f"as many, a multiple of {self.size}"
            raise ArgumentError("all_to_all", "source, target", got, wanted)
        if self.size == 1:
            return _same(source, target)
        self._do("all_to_all", label, self._all_to_all, stream, source, target)

    def shift(self, source: ArrayView, target: ArrayView, stream: int, label: str = "") -> None:
        """``target`` = the ``source`` of the rank before this one, of the last rank for the first: one step
        round a ring. ArgumentError for parts of different sizes or dtypes."""
        if source.size != target.size or source.dtype is not target.dtype:
            got = f"{source.size} elements of {source.dtype.name}, {target.size} of {target.dtype.name}"
            raise ArgumentError("shift", "source, target", got, "as many of one dtype")
        if self.size == 1:
            return _same(source, target)
        self._do("shift", label, self._shift, stream, source, target)

    def broadcast(self, x: ArrayView, root: int, stream: int, label: str = "") -> None:
        """x = that of the rank ``root``, in place. ArgumentError if ``root`` is not a rank."""
        integer("broadcast", "root", root, 0, self.size - 1)
        if self.size > 1:
            what = f"broadcast from {root}"
            self._do(what, label, lambda x, on: self._broadcast(x, root, on), stream, x)

    def split(self, color: int) -> Collectives:
        """Returns the group of the ranks that gave the same ``color``, 0 or more, in their order here. All
        ranks of this group call it. BackendError where a backend cannot."""
        color = integer("split", "color", color, 0, 2**31 - 1)
        return self if self.size == 1 else self._split(color)

    def _want_parts(self, operation: str, whole: ArrayView, part: ArrayView) -> None:
        if whole.size != self.size * part.size or whole.dtype is not part.dtype:
            got = f"{whole.size} elements of {whole.dtype.name}, parts of {part.size} of {part.dtype.name}"
            wanted = f"{self.size} parts of one dtype"
            raise ArgumentError(operation, "source, target", got, wanted)

    def _do(
        self, operation: str, label: str, work: Callable[..., None], stream: int, *views: ArrayView
    ) -> None:
        """``work(*views, stream)``, and the same on arrays at other addresses where a recorded call is made
        again."""
        device, made = views[0].device, [(view.shape, view.dtype) for view in views]
        # of the last call; set as one, since two threads may make a recorded call again at the same time
        first: tuple[tuple[int, ...], Sequence[ArrayView]] = tuple(view.ptr for view in views), views
        known = [first]

        def again(*given: int) -> None:
            addresses, own = known[0]
            if given[:-1] != addresses:
                found = zip(given[:-1], made, strict=True)
                own = [ArrayView(at, *how, device, None) for at, how in found]
                known[0] = given[:-1], own
            with self._call(operation, own[0], label):
                work(*own, given[-1])

        _put(device, operation, again, first[0], stream)
        known[0] = (), ()  # a recording keeps no memory alive

    # --- what a backend gives -------------------------------------------------------------------------------

    def _call(self, operation: str, x: ArrayView, label: str) -> AbstractContextManager[Any]:
        """Around a call: makes a failure of it a BackendError that names the ranks."""
        return nullcontext()

    def _waiting(self, what: str) -> AbstractContextManager[Any]:
        """Around waiting for a call that was started: as ``_call``."""
        return nullcontext()

    def _start(
        self, operation: str, source: ArrayView, target: ArrayView, stream: int
    ) -> Callable[..., object]:
        """Begin a call; returns what lets a stream wait for it, or for what a rank gives (stream, rank). Here
        it is done at once."""
        getattr(self, f"_{operation}")(source, target, stream)
        return lambda stream, rank=None: None

    def _send(self, source: ArrayView, rank: int, stream: int) -> None:
        """Begin to move a rank's part of ``source``, which will be started as a reduce_scatter."""

    def _all_reduce(self, x: ArrayView, op: Reduction, stream: int) -> None:
        raise NotImplementedError

    def _all_gather(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        raise NotImplementedError

    def _reduce_scatter(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        raise NotImplementedError

    def _all_to_all(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        raise NotImplementedError

    def _shift(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        raise NotImplementedError

    def _broadcast(self, x: ArrayView, root: int, stream: int) -> None:
        raise NotImplementedError

    def _split(self, color: int) -> Collectives:
        raise BackendError(type(self).__name__, "split", "asked for", "a backend that splits groups")


class _Started(NamedTuple):
    """A call that was started: ``wait`` lets a stream wait for it, or for a rank's part; the call in words;
    the thread that made it."""

    wait: Callable[..., object]
    what: str
    thread: int


def abandon(stream: int) -> None:
    """After an error: let ``stream`` wait for every call that this thread has started and will not wait for,
    of any group, so that the memory which they read and fill may be freed behind them. An error of theirs is
    logged: the first one is on its way."""
    own = threading.get_ident()
    for ranks in list(_KNOWN.values()):
        for address, started in list(ranks._started.items()):
            if started.thread == own:
                del ranks._started[address]
                try:
                    started.wait(stream)
                except Exception as error:
                    log.warning("%s, which was started before an error: %s", started.what, error)


def _put(
    device: Device, name: str, work: Callable[..., None], addresses: tuple[int, ...], stream: int
) -> None:
    """``work(*addresses, stream)``, by the device's provider where that records calls."""
    put = getattr(provider(device), "put", None)
    if put is None:
        work(*addresses, stream)
    else:
        put(device, stream, name, work, addresses)


def _same(source: ArrayView, target: ArrayView) -> None:
    """``target`` = ``source``, of one rank."""
    copy(target, source.reshape(*target.shape))


def named(name: str) -> Collectives:
    """Returns the group of that name; ArgumentError where it has gone."""
    found = _KNOWN.get(name)
    if found is None:
        raise ArgumentError("collectives", "group", repr(name), "a group of this process that is alive")
    return found


def want_ranks(operation: str, argument: str, given: Any) -> Collectives:
    """Returns what was given as ranks. ArgumentError if it is none."""
    if not isinstance(given, Collectives):
        wanted = "a Collectives, such as distributed.init() gives"
        raise ArgumentError(operation, argument, type(given).__name__, wanted)
    return given


def everyone() -> Collectives | None:
    """Returns the group of all processes that ``fp8kit.distributed.init`` made; None before."""
    return EVERYONE[0] if EVERYONE else None


def set_everyone(ranks: Collectives) -> None:
    """Make ``ranks`` the group of all processes."""
    EVERYONE[:] = [ranks]


def described(operation: str, x: ArrayView, label: str) -> str:
    """Returns a call in words, for errors."""
    return f"{operation} of {x.dtype.name} {x.shape}{f' in {label}' if label else ''}"


class CallFailed(BackendError):
    """A call that all ranks have to make failed, or they did not all make it: ``got`` is what each did."""

    def __str__(self) -> str:
        return f"{self.operation}: the ranks' call failed: {self.got}"


def call_failed(got: str) -> CallFailed:
    """Returns the error that says what the ranks did, such as ``differing`` of it. Uncaught, it is printed
    with the program's own lines alone, since each rank ends with one."""
    if not isinstance(sys.excepthook, _Shortening):
        sys.excepthook = _Shortening(sys.excepthook)
    return CallFailed("collectives", "ranks", got, "the same call of all ranks")


class _Shortening:
    """``sys.excepthook`` that leaves out a ``CallFailed``'s calls within libraries, if others are left."""

    _LIBRARIES = ("fp8kit", "fp8kit_torch", "fp8kit_jax", "torch", "contextlib")

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, CallFailed) and not sys.flags.dev_mode:
            calls, at = [], trace
            while at is not None:
                calls.append(at)
                at = at.tb_next
            own = [call for call in calls if self._library(call) not in self._LIBRARIES]
            if 0 < len(own) < len(calls):
                trace = None
                for call in reversed(own):
                    trace = TracebackType(trace, call.tb_frame, call.tb_lasti, call.tb_lineno)
                error.with_traceback(trace)
                left = f"{len(calls) - len(own)} calls within libraries"
                error.add_note(f"({left} are not shown: python -X dev shows them)")
        self._before(kind, error, trace)

    @staticmethod
    def _library(call: TracebackType) -> str:
        return str(call.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def reason(text: str) -> str:
    """Returns the first line of what another library says, in brackets, at most 200 characters of it."""
    return f"({textwrap.shorten(text.partition(chr(10))[0], 200, placeholder=' ...')})"


def differing(said: dict[int, str], size: int) -> str:
    """Returns what the ranks did last, those that did the same together; ranks that said nothing hang or are
    gone."""
    groups: dict[str, list[int]] = {}
    for rank in range(size):
        groups.setdefault(said.get(rank, "nothing: it hangs or has ended"), []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in groups.items())


# --- threads as ranks ---------------------------------------------------------------------------------------


class FakeCollectives:
    """``size`` ranks as threads of this process, on the CPU: for tests, and to try what many ranks compute.

    ``run(function)`` calls ``function(collectives)`` once for each rank and returns the results in their
    order. Sums are made in float32 (float64 for float64), rank by rank, and rounded once. Where a rank
    raises, calls something else than the others, or does not come within ``timeout`` seconds, all others end
    too, and ``run`` raises one error.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        integer("FakeCollectives", "size", size, 1, 1024)
        self.size, self.timeout = size, timeout
        self._barrier = threading.Barrier(size)
        self._posted: list[tuple[str, Any]] = [("", None)] * size
        self._parts: dict[tuple[int, int], FakeCollectives] = {}
        self.ranks = [_Thread(self, rank) for rank in range(size)]

    def run(self, function: Callable[[Collectives], Any]) -> list[Any]:
        """Returns the results of ``function`` of each rank. Raises what the first rank that failed of itself
        raised."""
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = function(self.ranks[rank])
            except BaseException as error:  # handed to the caller of run
                errors[rank] = error
                self.end()

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._barrier.reset()
        self._posted = [("", None)] * self.size
        self._parts.clear()
        own = [error for error in errors.values() if not isinstance(error, _Ended)]
        for error in own or list(errors.values()):
            raise error
        return results

    def end(self) -> None:
        """End all ranks that wait, also in the groups that were split off."""
        self._barrier.abort()
        for part in list(self._parts.values()):
            part.end()

    def exchange(self, rank: int, what: str, array: Any) -> list[Any]:
        """Returns what every rank posted, by rank; BackendError where one posted another thing or none."""
        self._posted[rank] = what, array
        self._wait(rank, what)
        posted = list(self._posted)
        if any(other != what for other, _ in posted):
            said = {i: f"in {other}" for i, (other, _) in enumerate(posted)}
            self._wait(rank, what)
            raise call_failed(differing(said, self.size))
        return [own for _, own in posted]

    def part(self, rank: int, number: int, color: int) -> Collectives:
        """Returns the rank's place in the group of its ``color``, in the ranks' split of that ``number``."""
        colors = self.exchange(rank, f"split {number}", color)
        own = [i for i, other in enumerate(colors) if other == color]
        if rank == own[0]:
            self._parts[number, color] = FakeCollectives(len(own), self.timeout)
        self.done(rank)
        return self._parts[number, color].ranks[own.index(rank)]

    def done(self, rank: int) -> None:
        """Wait until every rank has read what was posted."""
        self._wait(rank, self._posted[rank][0])

    def _wait(self, rank: int, what: str) -> None:
        try:
            self._barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            said = {i: f"in {other}" for i, (other, _) in enumerate(self._posted) if other}
            got = differing(said, self.size)
            raise _Ended("collectives", f"rank {rank}, {what}", got, "all ranks") from None


class _Ended(BackendError):
    """A rank was ended because another one failed or did not come."""


class _Thread(Collectives):
    """One of ``FakeCollectives``' ranks."""

    def __init__(self, group: FakeCollectives, rank: int) -> None:
        super().__init__(rank, group.size)
        self._group = group
        self._what = ""
        self._splits = 0

    def _call(self, operation: str, x: ArrayView, label: str) -> AbstractContextManager[Any]:
        self._what = described(operation, x, label)
        return nullcontext()

    def _posted(self, x: ArrayView) -> list[Any]:
        if x.device.kind != "cpu":
            raise BackendError("FakeCollectives", "x", f"device {x.device}", "the CPU")
        return self._group.exchange(self.rank, self._what, x.numpy())

    def _all_reduce(self, x: ArrayView, op: Reduction, stream: int) -> None:
        made = _reduced(self._posted(x), op)
        self._group.done(self.rank)
        x.numpy()[...] = made

    def _all_gather(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        out = target.numpy().reshape(self.size, -1)
        for i, part in enumerate(self._posted(source)):
            out[i] = part.reshape(-1)
        self._group.done(self.rank)

    def _reduce_scatter(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        parts = [part.reshape(self.size, -1)[self.rank] for part in self._posted(source)]
        target.numpy().reshape(-1)[...] = _reduced(parts, "sum")
        self._group.done(self.rank)

    def _all_to_all(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        out = target.numpy().reshape(self.size, -1)
        for i, part in enumerate(self._posted(source)):
            out[i] = part.reshape(self.size, -1)[self.rank]
        self._group.done(self.rank)

    def _shift(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        value = self._posted(source)[self.rank - 1].reshape(-1).copy()
        self._group.done(self.rank)
        target.numpy().reshape(-1)[...] = value

    def _broadcast(self, x: ArrayView, root: int, stream: int) -> None:
        value = self._posted(x)[root].copy()
        self._group.done(self.rank)
        x.numpy()[...] = value

    def _split(self, color: int) -> Collectives:
        self._splits += 1
        return self._group.part(self.rank, self._splits, color)


def _reduced(parts: list[Any], op: Reduction) -> Any:
    """Returns the sum or the largest of arrays, in the order of the ranks, rounded once. NaN wins a
    maximum."""
    wide = np.float64 if parts[0].dtype == np.float64 else np.float32
    out = parts[0].astype(wide)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            out = out + part.astype(wide) if op == "sum" else np.maximum(out, part.astype(wide))
        return out.astype(parts[0].dtype)


def share(total: int, size: int, operation: str, name: str) -> int:
    """``total`` / ``size``; ArgumentError where it does not divide."""
    if total % size:
        raise ArgumentError(operation, name, total, f"a multiple of {size}, the number of ranks")
    return total // size


def flat(x: ArrayView) -> ArrayView:
    """Returns the same elements as one dimension."""
    return x.reshape(math.prod(x.shape))


__all__ = [
    "Collectives",
    "FakeCollectives",
    "Reduction",
    "abandon",
    "call_failed",
    "described",
    "differing",
    "flat",
    "named",
    "reason",
    "share",
]
