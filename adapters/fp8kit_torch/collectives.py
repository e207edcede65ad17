"""``TorchCollectives``: a process group of ``torch.distributed`` as fp8kit's ``Collectives``.

Calls are put on torch's current stream, which operations work on. Where one fails, because a process has
ended, does not come within the group's timeout or calls something else, each process writes into the group's
store what it was doing, reads what the others were, and raises one BackendError that says so. Gloo does not
notice that processes call different things: over Gloo they compare what they are about to do.
"""

from __future__ import annotations

import ctypes
import time
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8kit.arguments import shown
from fp8kit.arrays import ArrayView
from fp8kit.collectives import Collectives, Reduction, call_failed, described, differing, reason
from fp8kit.errors import ArgumentError, BackendError
from fp8kit.lru import LRU
from fp8kit_torch import torch_compat
from fp8kit_torch.symmetric import Beside
from fp8kit_torch.views import dtype_of

_GRACE = 5.0  # seconds that processes which failed wait for what the others have to say
_OPS = {"sum": "SUM", "max": "MAX"}
_TENSORS: LRU[Any, Tensor] = LRU(1024, name="tensors of collectives")
_RUNS: Counter[str] = Counter()  # groups of each name that this process has had
_OF: weakref.WeakKeyDictionary[Any, TorchCollectives] = weakref.WeakKeyDictionary()


class TorchCollectives(Collectives):
    """``group``: a process group with this process. Use ``of``, which makes one for each group."""

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = weakref.ref(group)  # torch holds it until it is destroyed
        self._compares = dist.get_backend(group) == "gloo"
        self.calls = 0
        # groups of one name may follow each other with one store: that of a job which starts them again
        self._run = _RUNS[group.group_name] = _RUNS[group.group_name] + 1
        # how many failures outside of calls were diagnosed: each has a place of its own in the store
        self._outside = 0
        self._beside: Any = None  # once a call has been started by symmetric memory

    @property
    def group(self) -> Any:
        """The process group. BackendError where it was destroyed."""
        found = self._group()
        if found is None:
            raise BackendError("collectives", "group", "one that was destroyed", "a live process group")
        return found

    @classmethod
    def of(cls, group: Any) -> TorchCollectives:
        """That of a process group, the same one as long as something holds it."""
        found = _OF.get(group)
        if found is None:
            found = _OF[group] = cls(group)
        return found

    def __deepcopy__(self, memo: Mapping[int, Any]) -> TorchCollectives:
        return self

    @contextmanager
    def _watch(self, what: str) -> Iterator[None]:
        number = self.calls = self.calls + 1
        with self._failing(what, number):
            if self._compares:
                self._compare(what)
            yield

    @contextmanager
    def _failing(self, what: str, number: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # the reason is part of it: torch's own frames would bury it
            raise self._diagnosed(f"in call {number}, {what}", error, str(number)) from None

    def _compare(self, what: str) -> None:
        """RuntimeError where another process is about to do something else."""
        own = torch.tensor([zlib.crc32(what.encode())])
        others = own.new_empty(self.size)
        torch_compat.all_gather_single(others, own, group=self.group)
        if (others != own).any():
            raise RuntimeError("the calls differ")

    def _call(self, operation: str, x: ArrayView, label: str) -> AbstractContextManager[Any]:
        return self._watch(described(operation, x, label))

    def _waiting(self, what: str) -> AbstractContextManager[Any]:
        return self._failing(what, self.calls)

    def _start(
        self, operation: str, source: ArrayView, target: ArrayView, stream: int
    ) -> Callable[..., object]:
        given, made = tensor_of(source), tensor_of(target)
        if given.is_cuda and self._copies(given.device):
            return self._beside.start(operation, given, made)
        call: Any = getattr(torch_compat, f"{operation}_single")
        work = call(made, given, group=self.group, async_op=True)
        return lambda stream, rank=None: work.wait()

    @property
    def by_parts(self) -> bool:
        """See ``Collectives``: where torch's switch is on for the group."""
        on = torch_compat.has_symmetric_memory(self.group.group_name)
        return on and not (torch.cuda.is_initialized() and torch_compat.is_capturing())

    def _send(self, source: ArrayView, rank: int, stream: int) -> None:
        given = tensor_of(source)
        if given.is_cuda and self._copies(given.device):
            self._beside.send(given, rank)

    def _copies(self, device: torch.device) -> bool:
        """Whether calls that are started go by symmetric memory. Not into a CUDA graph, for which a workspace
        may not grow."""
        if not self.by_parts:
            return False
        if self._beside is None:
            self._beside = Beside(self.group, device)
        return True

    def outside(self, own: str, error: RuntimeError) -> BackendError:
        """The error of all processes for what failed outside of this group's calls. Each process's n-th one
        belongs to the others' n-th."""
        self._outside += 1
        return self._diagnosed(own, error, f"outside/{self._outside}")

    def _diagnosed(self, own: str, error: RuntimeError, place: str) -> BackendError:
        """The error of all processes, of what each wrote into the store at ``place``."""
        key = f"fp8kit_failed/{self._run}/{place}"
        said = {self.rank: own}
        try:
            store = torch_compat.store_of(self.group)
            store.set(f"{key}/{self.rank}", own)
            end = time.monotonic() + _GRACE
            while len(said) < self.size and time.monotonic() < end:
                for rank in range(self.size):
                    if rank not in said and store.check([f"{key}/{rank}"]):
                        said[rank] = store.get(f"{key}/{rank}").decode()
                time.sleep(0.05)
        except RuntimeError:  # the process that keeps the store has ended
            said.setdefault(-1, "")
        return call_failed(f"{differing(said, self.size)} {reason(str(error))}")

    def _all_reduce(self, x: ArrayView, op: Reduction, stream: int) -> None:
        dist.all_reduce(tensor_of(x), getattr(dist.ReduceOp, _OPS[op]), self.group)

    def _all_gather(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        torch_compat.all_gather_single(tensor_of(target), tensor_of(source), group=self.group)

    def _reduce_scatter(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        torch_compat.reduce_scatter_single(tensor_of(target), tensor_of(source), group=self.group)

    def _all_to_all(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        dist.all_to_all_single(tensor_of(target), tensor_of(source), group=self.group)

    def _shift(self, source: ArrayView, target: ArrayView, stream: int) -> None:
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        calls = [
            dist.P2POp(dist.isend, tensor_of(source), group=self.group, group_peer=following),
            dist.P2POp(dist.irecv, tensor_of(target), group=self.group, group_peer=before),
        ]
        for call in dist.batch_isend_irecv(calls):
            call.wait()

    def _broadcast(self, x: ArrayView, root: int, stream: int) -> None:
        dist.broadcast(tensor_of(x), group=self.group, group_src=root)

    def _split(self, color: int) -> TorchCollectives:
        colors: list[Any] = [None] * self.size
        dist.all_gather_object(colors, color, self.group)
        own = self.group
        for each in sorted(set(colors)):  # every process makes every group
            ranks = [dist.get_global_rank(self.group, i) for i, c in enumerate(colors) if c == each]
            made = dist.new_group(ranks)
            own = made if each == color else own
        return TorchCollectives.of(own)


@contextmanager
def naming_failures(group: Any = None) -> Iterator[None]:
    """Around a training: what a collective of torch's own raises where another process has ended or does not
    come (``fully_shard``, DTensor, DistributedDataParallel, pipelines) becomes a BackendError that names
    what each process of ``group``, None all of them, was doing, and in which layer. Other errors pass, those
    of fp8kit's collectives too, which say so themselves. ArgumentError for what is no group."""
    if group is not None and not is_group(group):
        wanted = "None or a process group of torch.distributed"
        raise ArgumentError("naming_failures", "group", shown(group), wanted)
    try:
        yield
    except RuntimeError as error:
        of_torch = torch_compat.is_of_processes(error) and dist.is_initialized()
        if not of_torch or isinstance(error, BackendError):
            raise
        ranks = TorchCollectives.of(dist.group.WORLD if group is None else group)
        raise ranks.outside(f"in {_doing(error)}", error) from error


def _doing(error: BaseException) -> str:
    """The function of torch.distributed that raised, and the layer that it was called for: that of the
    innermost frames of the traceback which say so."""
    function, layer = "a collective", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        where, owner = frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
        if where.startswith("torch.distributed"):
            function = frame.f_code.co_name
        # a group of parameters of fully_shard's, or a module
        if (path := torch_compat.path_of_shards(owner)) is not None:
            layer = path
        elif isinstance(owner, torch.nn.Module):
            layer = type(owner).__name__
    return f"{function} for {layer}" if layer else function


def tensor_of(view: ArrayView) -> Tensor:
    """The memory of a C-contiguous view as a flat tensor, with no copy; FP8 codes as uint8. The caller keeps
    the memory."""
    dtype = dtype_of(view.dtype)
    if view.device.kind == "cpu":
        memory = (ctypes.c_uint8 * view.nbytes).from_address(view.ptr)
        return torch.frombuffer(memory, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)
    key = view.ptr, view.size, dtype, view.device.index
    found = _TENSORS.get(key)
    if found is None:
        # of nobody's memory: of the same address there will be another array some time
        flat = ArrayView(view.ptr, (view.size,), view.dtype, view.device, None)
        found = torch.from_dlpack(flat)
        _TENSORS.put(key, found)
    return found


def is_group(value: object) -> bool:
    """Whether it is a process group of ``torch.distributed``."""
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def ranks_of(operation: str, argument: str, group: Any) -> Collectives | None:
    """What a process group, or a ``Collectives`` itself, communicates by; None for None. ArgumentError for
    what is neither, and for a group without this process."""
    if group is None or isinstance(group, Collectives):
        return group
    if not is_group(group) or dist.get_world_size(group) < 1:
        wanted = "None or a process group of torch.distributed with this process"
        raise ArgumentError(operation, argument, shown(group), wanted)
    return TorchCollectives.of(group)
