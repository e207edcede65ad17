"""``NcclCollectives``: NCCL on raw buffers, by nccl4py (extra ``distributed``); processes find each other by
``fp8kit.rendezvous``.

NCCL works on the GPU's stream, so that the host learns of a rank that does not come by waiting alone: one
thread of each process watches a call that was put on the stream, and the others' complaints. When a call is
not done within the timeout, or another rank complains, it asks all what they were doing, says so on standard
error, and aborts the communicator, which ends what hangs on the GPU; the next call raises the same error.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fp8kit.arrays import ArrayView, Device
from fp8kit.collectives import Collectives, Reduction, described, differing
from fp8kit.errors import BackendError, FormatError
from fp8kit.rendezvous import Store
from fp8kit.settings import Place

# nccl.h: ncclDataType_t by our names, and ncclRedOp_t; codes of formats travel as bytes
_TYPES = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "int32": 2, "int64": 4, "uint8": 1}
_BYTES = 1
_OPS = {"sum": 0, "max": 2}
_FINE = (0, 7)  # ncclResult_t: success, in progress
_GRACE = 5.0  # seconds that ranks which failed wait for what the others have to say, and a call for rank 0
_LEFT = 20.0  # seconds after which a process that is still stuck is ended
_POLL = 0.5


def connect(place: Place, device: Device, timeout: float) -> NcclCollectives:
    """The group of all processes of a job, ``device`` this one's GPU. ``timeout``: seconds. BackendError for
    a device that is none, and where processes do not meet."""
    import cupy
    from nccl.bindings import nccl

    if device.kind != "cuda":
        raise BackendError("distributed.init", "device", str(device), "a GPU for the backend nccl")
    store = Store(place, timeout)
    if place.rank == 0:
        store.set("nccl/id", bytes(nccl.get_unique_id()).hex())
    given = bytearray.fromhex(store.get("nccl/id", timeout))
    with cupy.cuda.Device(device.index):
        comm = nccl.comm_init_rank_scalable(place.size, place.rank, 1, given, 0)
    made = NcclCollectives(comm, place.rank, place.size, device, store, "0", timeout)
    atexit.register(made.close)
    return made


class NcclCollectives(Collectives):
    """A communicator of NCCL, of the process's ``device``. Use ``connect``. ``path``: the group's own place
    in the ``store``."""

    def __init__(
        self, comm: int, rank: int, size: int, device: Device, store: Store, path: str, timeout: float
    ) -> None:
        from nccl.bindings import nccl

        super().__init__(rank, size)
        self.device, self.calls = device, 0
        self._nccl, self._comm, self._store, self._path, self._timeout = nccl, comm, store, path, timeout
        self._splits = 0
        self._side: Any = None  # the stream of calls that run beside kernels
        self._failed: str | None = None
        self._last = "nothing yet"
        # the call that is watched: what it is, an event behind it, when it was put on the stream
        self._watched: tuple[str, Any, float] | None = None
        self._closed = threading.Event()
        self._ending = threading.RLock()  # held by who asks, aborts or destroys the communicator
        threading.Thread(target=self._watch, name=f"fp8kit {self.name}", daemon=True).start()

    def _call(self, operation: str, x: ArrayView, label: str) -> AbstractContextManager[Any]:
        return self._noted(described(operation, x, label), x)

    @contextmanager
    def _noted(self, what: str, x: ArrayView) -> Iterator[None]:
        self._want_alive()
        if x.device != self.device:
            raise BackendError("collectives", "x", f"device {x.device}", f"{self.device}, the group's")
        self.calls += 1
        self._last = f"in call {self.calls}, {what}"
        try:
            yield
        except self._nccl.NCCLError as error:
            self._fail(str(error))
            self._want_alive()

    def _mark(self, stream: int) -> None:
        """Watch the call that was just put on the stream, unless an earlier one still is."""
        if self._watched is None:
            from cupy.cuda import Device, Event, runtime

            if not runtime.streamIsCapturing(stream):
                with Device(self.device.index):
                    event = Event(disable_timing=True)
                    runtime.eventRecord(event.ptr, stream)
                self._watched = self._last, event, time.monotonic()

    def _want_alive(self) -> None:
        if self._failed is not None:
            where = f"rank {self.rank} of {self.size}"
            raise BackendError("collectives", where, self._failed, "the same call of all ranks")

    # --- who watches ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look after the calls of this group until it is closed."""
        ended = 0.0  # when the process of rank 0 was found to have ended, as it does after its last call
        while not self._closed.wait(_POLL) and self._failed is None:
            watched = self._watched
            try:
                if watched is not None:
                    what, event, since = watched
                    if event.done:
                        self._watched = None
                    elif time.monotonic() - since > self._timeout:
                        self._last = what
                        self._fail(f"not done after {self._timeout:g} s")
                        continue
                if (error := self._error()) is not None:
                    self._fail(error)
                elif self._store.has(f"failed/{self._path}"):
                    self._fail("another rank failed")
            except OSError:  # from the process that keeps the store
                ended, watched = ended or time.monotonic(), self._watched
                if watched is not None and time.monotonic() - max(ended, watched[2]) > _GRACE:
                    self._last = watched[0]
                    self._fail("the process of rank 0 has ended")

    def _error(self) -> str | None:
        """What NCCL says has failed meanwhile; None for nothing, and where the communicator is gone."""
        with self._ending:
            if self._closed.is_set() or self._failed is not None:
                return None
            if int(self._nccl.comm_get_async_error(self._comm)) in _FINE:
                return None
            return self._nccl.get_last_error(self._comm) or "an error of NCCL"

    def _fail(self, why: str) -> None:
        """Say what all ranks were doing, once, and end what hangs."""
        with self._ending:
            if self._failed is None and not self._closed.is_set():
                self._end(why)

    def _end(self, why: str) -> None:
        said = {self.rank: self._last}
        try:
            self._store.set(f"failed/{self._path}", why)
            self._store.set(f"said/{self._path}/{self.rank}", self._last)
            end = time.monotonic() + _GRACE
            while len(said) < self.size and time.monotonic() < end:
                for rank in set(range(self.size)) - set(said):
                    if self._store.has(f"said/{self._path}/{rank}"):
                        said[rank] = self._store.get(f"said/{self._path}/{rank}", 1.0)
                time.sleep(0.1)
        except OSError:
            pass
        self._failed = f"{differing(said, self.size)} ({why.splitlines()[0][:200]})"
        print(f"fp8kit: rank {self.rank} of {self.size}: {self._failed}", file=sys.stderr, flush=True)
        self._nccl.comm_abort(self._comm)
        threading.Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        """End a process that its error does not reach."""
        if not self._closed.wait(_LEFT):
            os._exit(1)

    def close(self) -> None:
        """End the group: all ranks' calls are done, and no other follows."""
        with self._ending:
            if not self._closed.is_set():
                self._closed.set()
                if self._failed is None:
                    self._nccl.comm_destroy(self._comm)

    # --- what NCCL does -------------------------------------------------------------------------------------

    def _type(self, x: ArrayView) -> tuple[int, int]:
        """(NCCL's dtype, elements) of what moves, codes as bytes."""
        found = _TYPES.get(x.dtype.name)
        return (_BYTES, x.nbytes) if found is None else (found, x.size)

    def _sum_type(self, x: ArrayView) -> tuple[int, int]:
        if x.dtype.name not in _TYPES:
            raise FormatError("collectives", "x", x.dtype.name, "a dtype that is summed: no codes of FP8")
        return _TYPES[x.dtype.name], x.size

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
    ) -> Callable[[int], object]:
        from cupy.cuda import Device, Event, Stream, runtime

        with Device(self.device.index):
            if self._side is None:
                self._side = Stream(non_blocking=True)
            before, after = Event(disable_timing=True), Event(disable_timing=True)
            side = self._side.ptr
            runtime.eventRecord(before.ptr, stream)
            runtime.streamWaitEvent(side, before.ptr)
            getattr(self, f"_{operation}")(source, target, side)
            runtime.eventRecord(after.ptr, side)
        return lambda stream: runtime.streamWaitEvent(stream, after.ptr)

    def _all_to_all(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        part = source.nbytes // self.size
        self._nccl.group_start()
        for rank in range(self.size):
            self._nccl.send(source.ptr + rank * part, part, _BYTES, rank, self._comm, stream)
            self._nccl.recv(target.ptr + rank * part, part, _BYTES, rank, self._comm, stream)
        self._nccl.group_end()
        self._mark(stream)

    def _shift(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        self._nccl.group_start()
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self._nccl.send(source.ptr, source.nbytes, _BYTES, following, self._comm, stream)
        self._nccl.recv(target.ptr, target.nbytes, _BYTES, before, self._comm, stream)
        self._nccl.group_end()
        self._mark(stream)

    def _broadcast(self, x: ArrayView, root: int, stream: int) -> None:
        kind, count = self._type(x)
        self._nccl.broadcast(x.ptr, x.ptr, count, kind, root, self._comm, stream)
        self._mark(stream)

    def _split(self, color: int) -> NcclCollectives:
        import cupy

        self._want_alive()
        self._splits += 1
        with cupy.cuda.Device(self.device.index):
            cupy.cuda.get_current_stream().synchronize()
            comm = self._nccl.comm_split(self._comm, color, self.rank, 0)
        rank, size = self._nccl.comm_user_rank(comm), self._nccl.comm_count(comm)
        path = f"{self._path}/{self._splits}.{color}"
        made = NcclCollectives(comm, rank, size, self.device, self._store, path, self._timeout)
        atexit.register(made.close)
        return made
