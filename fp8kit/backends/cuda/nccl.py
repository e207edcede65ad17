"""``NcclCollectives``: NCCL on raw buffers, by nccl4py (extra ``distributed``); processes find each other by
``fp8kit.rendezvous``.

NCCL works on the GPU's stream, so that the host learns of a rank that does not come by waiting alone: one
thread of each process watches the calls that were put on streams, and the others' complaints. When a call is
not done within the timeout, or another rank complains, it asks all what they were doing, says so on standard
error, and aborts the communicator, which ends what hangs on the GPU; the next call raises the same error. Nor
does NCCL notice that ranks call different things, which then hang or compute something: a rank whose call
takes long compares its calls with rank 0's.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.recorded import unsafe_calls
from fp8kit.collectives import Collectives, Reduction, call_failed, described, differing, reason
from fp8kit.errors import BackendError, FormatError
from fp8kit.rendezvous import Store
from fp8kit.settings import Place

# nccl.h: ncclDataType_t by our names, and ncclRedOp_t; codes of formats travel as bytes
_TYPES = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "int32": 2, "int64": 4, "uint8": 1}
_BYTES = 1
_OPS = {"sum": 0, "max": 2}
_FINE = (0, 7)  # ncclResult_t: success, in progress
_NOT_READY = 600  # cudaError_t of an event that is not done
# seconds that ranks which failed wait for what the others have to say, a call for rank 0, and the end of a
# process for NCCL where others have ended
_GRACE = 5.0
_LEFT = 20.0  # seconds after which a process that is still stuck is ended
_SLOW = 2.0  # seconds after which a call is compared with rank 0's
_POLL = 0.5
_REMEMBERED = 512  # calls
_OPEN: list[NcclCollectives] = []  # in the order in which they were made


def connect(place: Place, device: Device, timeout: float) -> NcclCollectives:
    """Returns the group of all processes of a job, ``device`` this one's GPU, which is made current.
    ``timeout``: seconds. BackendError for a device that is not a GPU, if the processes do not meet in time,
    and for an error of NCCL."""
    from nccl.bindings import nccl

    if device.kind != "cuda":
        raise BackendError("distributed.init", "device", str(device), "a GPU for the backend nccl")
    launch.runtime().setDevice(device.index)
    store = Store(place, timeout)
    store.set(f"here/{place.rank}", "")
    try:
        if place.rank == 0:
            _await_all(store, place.size, timeout)  # NCCL would wait for ever
            store.set("nccl/id", bytes(nccl.get_unique_id()).hex())
        given = bytearray.fromhex(store.get("nccl/id", timeout))
        comm = nccl.comm_init_rank_scalable(place.size, place.rank, 1, given, 0)
    except nccl.NCCLError as error:
        wanted = "a communicator of NCCL: NCCL_DEBUG=INFO says more"
        raise BackendError("distributed.init", "nccl", str(error), wanted) from error
    atexit.register(_close_all)
    return NcclCollectives(comm, place.rank, place.size, device, store, "0", timeout)


def _await_all(store: Store, size: int, timeout: float) -> None:
    """BackendError where processes are missing after ``timeout`` seconds."""
    missing, end = list(range(size)), time.monotonic() + timeout
    while missing := [rank for rank in missing if store.peek(f"here/{rank}") is None]:
        if time.monotonic() > end:
            got = f"no rank {', '.join(map(str, missing))} after {timeout:g} s"
            raise BackendError("distributed.init", "ranks", got, f"all {size}")
        time.sleep(0.05)


def _close_all() -> None:
    """Close all groups when the process ends. If a group has failed and no call has raised that, the results
    of its last calls are invalid: the process ends with an error, if it does not do so already."""
    for group in reversed(_OPEN):
        group.close()
    unreported = any(group.failed is not None and not group.reported.is_set() for group in _OPEN)
    if unreported and _exception() is None:
        sys.stdout.flush()
        os._exit(1)


def _exception() -> type[BaseException] | None:
    """Returns the kind of the exception that ended the program; None for none."""
    return getattr(sys, "last_type", None)


class _LoggedCall(NamedTuple):
    """A call in words, its ``number``, and a checksum of it and all before it."""

    number: int
    text: str
    sum: int


class _Pending(NamedTuple):
    """A call that was put on a stream at ``since``, and the event behind it; None for what the host does."""

    text: str
    event: Any
    since: float


class NcclCollectives(Collectives):
    """A communicator of NCCL, of the process's ``device``. Use ``connect``. ``path``: the group's own place
    in the ``store``."""

    def __init__(
        self, comm: Any, rank: int, size: int, device: Device, store: Store, path: str, timeout: float
    ) -> None:
        from nccl.bindings import nccl

        super().__init__(rank, size)
        self.device, self.calls = device, 0
        self._nccl, self._comm, self._store, self._path, self._timeout = nccl, comm, store, path, timeout
        self._splits = 0
        self._side: Any = None  # the stream of calls that run beside kernels
        self.failed: str | None = None  # what all ranks were doing
        self.reported = threading.Event()  # whether a call has raised that
        self._made: deque[_LoggedCall] = deque(maxlen=_REMEMBERED)
        self._shown = 0  # the last call of which the others know
        # calls that are not known to be done, in order; when the first of them became that; events for others
        self._pending: deque[_Pending] = deque()
        self._moved, self._spare = 0.0, list[Any]()
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._ending = threading.RLock()  # held by who asks, aborts or destroys the communicator
        self._last_act: threading.Thread | None = None  # which aborts or destroys it
        _OPEN.append(self)
        threading.Thread(target=self._watch, name=f"fp8kit {self.name}", daemon=True).start()

    def _call(self, operation: str, x: ArrayView, label: str) -> AbstractContextManager[Any]:
        if x.device != self.device:
            raise BackendError("collectives", "x", f"device {x.device}", f"{self.device}, the group's")
        return self._noted(described(operation, x, label))

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        self._want_alive()
        self.calls += 1
        before = self._made[-1].sum if self._made else 0
        self._made.append(
            _LoggedCall(self.calls, f"in call {self.calls}, {what}", zlib.crc32(what.encode(), before))
        )
        try:
            yield
        except self._nccl.NCCLError as error:
            self._fail(str(error))
            self._want_alive()

    def _mark(self, stream: int) -> None:
        """Watch the call that was just put on the stream; not one that is captured into a graph."""
        with launch.current_device(self.device.index):  # whose null stream is meant
            if launch.capturing(stream):
                return
            try:
                event = self._spare.pop()
            except IndexError:
                event = _event()
            launch.runtime().eventRecord(event.ptr, stream)
        self._pending.append(_Pending(self._made[-1].text, event, time.monotonic()))

    def _want_alive(self) -> None:
        if self.failed is not None:
            self.reported.set()
            raise call_failed(self.failed)

    # --- who watches ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look after the calls of this group until it is closed."""
        launch.runtime().setDevice(self.device.index)  # a thread begins on the first GPU
        with unsafe_calls():  # another thread's capture stands the questions about events
            self._look()

    def _look(self) -> None:
        ended = 0.0  # when the process of rank 0 was found to have ended, as it does after its last call
        while not self._closed.wait(_POLL) and self.failed is None:
            oldest, now = self._oldest(), time.monotonic()
            try:
                if oldest is not None and now - oldest.since > self._timeout:
                    self._fail(f"not done after {self._timeout:g} s")
                elif (error := self._error()) is not None:
                    self._fail(error)
                elif (complaint := self._store.peek(f"failed/{self._path}")) is not None:
                    self._fail("another rank failed", int(complaint))
                else:
                    self._compare(oldest is not None and now - oldest.since > _SLOW)
            except TimeoutError:  # the process that keeps the store is busy
                continue
            except OSError:  # it has ended
                ended = ended or now
                if oldest is not None and now - max(ended, oldest.since) > _GRACE:
                    self._fail("the process of rank 0 has ended")

    def _oldest(self) -> _Pending | None:
        """Returns the first call that is not done, ``since`` it was put on its stream and the one before was
        done; None where all are. A device that has failed ends the group."""
        first, status = self._first()
        if status not in (0, _NOT_READY):
            self._fail(f"{self.device}: {launch.error_text(status)}")
        return first

    def _first(self) -> tuple[_Pending | None, int]:
        """Returns the first call that is not done, or None, and CUDA's status of it."""
        with self._looking:
            while self._pending:
                first = self._pending[0]
                status = _NOT_READY if first.event is None else launch.runtime().eventQuery(first.event.ptr)
                if status:
                    return first._replace(since=max(first.since, self._moved)), status
                self._pending.popleft()
                self._spare.append(first.event)
                self._moved = time.monotonic()
            return None, 0

    def _error(self) -> str | None:
        """Returns what NCCL says has failed meanwhile; None for nothing, and where the communicator is
        gone."""
        with self._ending:
            if self._closed.is_set() or self.failed is not None:
                return None
            if int(self._nccl.comm_get_async_error(self._comm)) in _FINE:
                return None
            return self._nccl.get_last_error(self._comm) or "an error of NCCL"

    def _compare(self, slow: bool) -> None:
        """Whether this rank's calls are rank 0's, where one of them is slow."""
        made = self._made.copy()
        if self.rank == 0 and made and made[-1].number != self._shown:
            self._store.set(f"calls/{self._path}", json.dumps([(call.number, call.sum) for call in made]))
            self._shown = made[-1].number
        elif self.rank and slow:
            known = dict(json.loads(self._store.peek(f"calls/{self._path}") or "[]"))
            for call in made:
                if known.get(call.number, call.sum) != call.sum:
                    return self._fail(f"call {call.number} is another one than rank 0's", call.number)

    def _fail(self, why: str, number: int = 0, ask: bool = True) -> None:
        """Say what all ranks were doing, once, and end what hangs. ``number``: of the call that ranks differ
        in; 0 for the first that is not done. ``ask``: whether this rank wants to know what the others do."""
        with self._ending:
            if self.failed is None and not self._closed.is_set():
                self._end(why, number, ask)

    def _end(self, why: str, number: int, ask: bool) -> None:
        texts, first = {call.number: call.text for call in self._made.copy()}, self._first()[0]
        own = texts.get(number) or (first.text if first else "nothing yet")
        if self.calls and own == "nothing yet":
            own = f"nothing since {texts[self.calls].removeprefix('in ')}"
        said = {self.rank: own}
        try:
            self._store.set(f"said/{self._path}/{self.rank}", own)
            self._store.set(f"failed/{self._path}", str(number))
            end = time.monotonic() + _GRACE
            while ask and len(said) < self.size and time.monotonic() < end:
                for rank in set(range(self.size)) - set(said):
                    if (text := self._store.peek(f"said/{self._path}/{rank}")) is not None:
                        said[rank] = text
                time.sleep(0.1)
        except OSError:
            pass
        self.failed = f"{differing(said, self.size)} {reason(why)}" if ask else why
        print(f"fp8kit: rank {self.rank} of {self.size}: {self.failed}", file=sys.stderr, flush=True)
        threading.Thread(target=self._leave, daemon=True).start()
        self._act(self._nccl.comm_abort)

    def _act(self, function: Callable[[Any], object]) -> None:
        """Abort or destroy the communicator, which may wait for the other ranks to do so."""
        self._last_act = threading.Thread(target=function, args=(self._comm,), daemon=True)
        self._last_act.start()

    def _leave(self) -> None:
        """End a process that its error does not reach."""
        if not self.reported.wait(_LEFT):
            os._exit(1)

    def close(self) -> None:
        """End the group: no other call follows. Waits for those that were made and for the other ranks to end
        it too, as long as each has time. Where the process ends by an exception, the others learn of it."""
        if (kind := _exception()) is not None:
            self._fail(f"it ends by {kind.__name__}", ask=False)
        while self.failed is None and self._oldest() is not None:
            time.sleep(0.01)
        with self._ending:
            if not self._closed.is_set():
                self._closed.set()
                if self.failed is None:
                    self._act(self._nccl.comm_destroy)
        assert self._last_act is not None
        end = time.monotonic() + (self._timeout if self.failed is None else _GRACE)
        while self._last_act.is_alive() and time.monotonic() < end:
            self._last_act.join(_POLL)
            try:
                others = self._store.peek(f"failed/{self._path}") is None
            except OSError:
                others = False
            if not others:
                end = min(end, time.monotonic() + _GRACE)

    # --- what NCCL does -------------------------------------------------------------------------------------

    def _type(self, x: ArrayView) -> tuple[int, int]:
        """(NCCL's dtype, elements) of what moves, codes as bytes."""
        found = _TYPES.get(x.dtype.name)
        return (_BYTES, x.nbytes) if found is None else (found, x.size)

    def _sum_type(self, x: ArrayView) -> tuple[int, int]:
        if x.dtype.name not in _TYPES:
            raise FormatError("collectives", "x", x.dtype.name, "a dtype that is summed: no codes of FP8")
        return _TYPES[x.dtype.name], x.size

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Within, sends and receipts are one call. It ends after an error too: in a call that was not ended,
        later ones of this thread would wait for its end."""
        self._nccl.group_start()
        try:
            yield
        finally:
            self._nccl.group_end()

    def _all_reduce(self, x: ArrayView, op: Reduction, stream: int) -> None:
        kind, count = self._sum_type(x)
        self._nccl.all_reduce(x.ptr, x.ptr, count, kind, _OPS[op], self._comm, stream)
        self._mark(stream)

    def _all_gather(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        kind, count = self._type(source)
        self._nccl.all_gather(source.ptr, target.ptr, count, kind, self._comm, stream)
        self._mark(stream)

    def _reduce_scatter(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        kind, count = self._sum_type(target)
        self._nccl.reduce_scatter(source.ptr, target.ptr, count, kind, _OPS["sum"], self._comm, stream)
        self._mark(stream)

    def _start(
        self, operation: str, source: ArrayView, target: ArrayView, stream: int
    ) -> Callable[..., object]:
        calls, index = launch.runtime(), self.device.index
        with launch.current_device(index):
            if self._side is None:
                self._side = _stream()
            before, after, side = _event(), _event(), self._side.ptr
            calls.eventRecord(before.ptr, stream)
            calls.streamWaitEvent(side, before.ptr)
            getattr(self, f"_{operation}")(source, target, side)
            calls.eventRecord(after.ptr, side)

        def wait(stream: int, rank: int | None = None) -> None:
            with launch.current_device(index):
                calls.streamWaitEvent(stream, after.ptr)

        return wait

    def _all_to_all(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        part = source.nbytes // self.size
        with self._together():
            for rank in range(self.size):
                self._nccl.send(source.ptr + rank * part, part, _BYTES, rank, self._comm, stream)
                self._nccl.recv(target.ptr + rank * part, part, _BYTES, rank, self._comm, stream)
        self._mark(stream)

    def _shift(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with self._together():
            self._nccl.send(source.ptr, source.nbytes, _BYTES, following, self._comm, stream)
            self._nccl.recv(target.ptr, target.nbytes, _BYTES, before, self._comm, stream)
        self._mark(stream)

    def _broadcast(self, x: ArrayView, root: int, stream: int) -> None:
        kind, count = self._type(x)
        self._nccl.broadcast(x.ptr, x.ptr, count, kind, root, self._comm, stream)
        self._mark(stream)

    def _split(self, color: int) -> NcclCollectives:
        self._splits += 1
        with self._noted("split"), launch.current_device(self.device.index):
            launch.runtime().deviceSynchronize()
            self._want_alive()  # a call that hung has ended: by an abort, and then the communicator is gone
            waits = _Pending(self._made[-1].text, None, time.monotonic())  # for the others, on the host
            self._pending.append(waits)
            try:
                comm = self._nccl.comm_split(self._comm, color, self.rank, 0)
            finally:
                with self._looking:
                    self._pending.remove(waits)
        rank, size = self._nccl.comm_user_rank(comm), self._nccl.comm_count(comm)
        path = f"{self._path}/{self._splits}.{color}"
        return NcclCollectives(comm, rank, size, self.device, self._store, path, self._timeout)


def _event() -> Any:
    from cupy.cuda import Event

    return Event(disable_timing=True)


def _stream() -> Any:
    from cupy.cuda import Stream

    return Stream(non_blocking=True)
