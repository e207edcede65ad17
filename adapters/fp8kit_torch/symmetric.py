"""Gathering and summing parts by torch's symmetric memory: each GPU's copy engines read and write the other
GPUs' memory, and take no multiprocessor from the kernels beside which they run. No multicast, no multimem.

A workspace has two halves, which calls take in turn, and a call has one barrier, after the ranks have written
and before they read. That is enough: who writes to a half has passed the barrier of the call before, which
every rank enters after it has read the same half. All is put on one stream, in the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit_torch import torch_compat

_GRAIN = 2**20  # bytes: a workspace grows by whole ones, so that it seldom does


class Workspace(NamedTuple):
    """Memory of ``bytes`` of every rank. ``buffers``: each rank's as this one sees it, uint8 (bytes,).
    ``barrier()``: what was put on the stream before it, on every rank, is done before what comes after."""

    buffers: list[Tensor]
    barrier: Callable[[], object]


class Copies:
    """Of rank ``rank`` of ``size``. ``make(bytes)``: a ``Workspace``, for which the ranks meet; called
    where the largest call so far needs more. Flat tensors; every rank makes the same calls."""

    def __init__(self, rank: int, size: int, make: Callable[[int], Workspace]) -> None:
        self.rank, self.size, self._make = rank, size, make
        self._half = self.calls = 0
        self._workspace: Workspace | None = None
        self._sent: set[int] = set()  # ranks that have their parts of a sum that is not complete

    def all_gather(
        self, source: Tensor, target: Tensor, arrived: Callable[[int], object] = lambda rank: None
    ) -> None:
        """Each rank copies its part into its own workspace, and the others' parts from theirs. ``arrived``
        is called after the copy of each other rank's, the following rank's first."""
        self._give_up()
        buffers = self._buffers(source.nbytes)
        buffers[self.rank].copy_(_bytes(source))
        self._meet()
        parts = _bytes(target).chunk(self.size)
        for step in range(1, self.size):  # of different ranks at a time
            other = (self.rank + step) % self.size
            parts[other].copy_(buffers[other])
            arrived(other)
        parts[self.rank].copy_(_bytes(source))

    def reduce_scatter(self, source: Tensor, target: Tensor) -> None:
        """Each rank copies its addends into the others' workspaces, and adds those in its own. Two ranks'
        sum has the bits of NCCL's; more are added in float32 and rounded once."""
        for step in range(1, self.size):
            other = (self.rank + step) % self.size
            if other not in self._sent:
                self.send(source, other)
        self._sent.clear()
        buffers, parts = self._buffers(source.nbytes), source.chunk(self.size)
        self._meet()
        own = buffers[self.rank].view(source.dtype).chunk(self.size)
        if self.size == 2:
            torch.add(parts[self.rank], own[1 - self.rank], out=target)
            return
        own[self.rank].copy_(parts[self.rank])
        torch.sum(buffers[self.rank].view(source.dtype).view(self.size, -1), 0, out=target)

    def send(self, source: Tensor, other: int) -> None:
        """The part of ``reduce_scatter``, which comes next, that one other rank gets."""
        part = source.chunk(self.size)[other]
        buffer = self._buffers(source.nbytes)[other].chunk(self.size)[self.rank]
        buffer.copy_(_bytes(part))
        self._sent.add(other)

    def fits(self, size: int) -> bool:
        """Whether so many bytes of a call fit the workspace."""
        return size <= self._half

    def fit(self, size: int) -> None:
        """Make a larger workspace; nothing is in flight."""
        self._half = -(-size // _GRAIN) * _GRAIN
        self._workspace = None  # the old one goes before there is a new one
        self._workspace = self._make(2 * self._half)

    def _give_up(self) -> None:
        """The half of a sum that an error ended may be written yet: leave it, as a call that is done."""
        if self._sent:
            self._sent.clear()
            self._meet()

    def _buffers(self, size: int) -> list[Tensor]:
        """Where this call's bytes are, of every rank."""
        if not self.fits(size):
            self.fit(size)
        assert self._workspace is not None
        begin = self.calls % 2 * self._half
        return [buffer[begin : begin + size] for buffer in self._workspace.buffers]

    def _meet(self) -> None:
        assert self._workspace is not None
        self.calls += 1
        self._workspace.barrier()


class Beside:
    """``Copies`` of a process group on CUDA, on a stream of their own. RuntimeError where the GPUs cannot
    reach each other's memory."""

    def __init__(self, group: Any, device: torch.device) -> None:
        limit = int(torch_compat.timeout_of(group, device).total_seconds() * 1000)
        ranks, name = group.size(), group.group_name  # the group itself is torch's to keep

        def make(size: int) -> Workspace:
            memory, handle = torch_compat.symmetric_memory(size, device, name)
            buffers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks)]
            # torch's barrier, whose kernel ends the process's use of the GPU if a rank does not come
            kept = memory, handle
            return Workspace(buffers, lambda: kept[1].barrier(0, limit))

        self.copies = Copies(group.rank(), ranks, make)
        # what waits for multiprocessors goes first: it is short
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = device

    def start(self, operation: str, source: Tensor, target: Tensor) -> Callable[..., object]:
        """Begin a call behind torch's current stream; returns what lets that wait for it, or for what a rank
        gives (stream, rank)."""
        arrived: dict[int | None, Any] = {}

        def arrive(rank: int | None) -> None:
            arrived[rank] = self._stream.record_event()

        with self._behind(source):
            if operation == "all_gather":
                self.copies.all_gather(source, target, arrive)
            else:
                self.copies.reduce_scatter(source, target)
            arrive(None)

        def wait(stream: int, rank: int | None = None) -> None:
            torch.cuda.current_stream(self._device).wait_event(arrived.get(rank, arrived[None]))

        return wait

    def send(self, source: Tensor, rank: int) -> None:
        """Begin to move a rank's part of what is to be summed."""
        with self._behind(source):
            self.copies.send(source, rank)

    @contextmanager
    def _behind(self, source: Tensor) -> Iterator[None]:
        """On the stream of the copies, after what torch's current stream has got."""
        # tensors may have been made in inference mode, which can be written in it alone
        with torch.inference_mode():
            if not self.copies.fits(source.nbytes):
                self._stream.synchronize()  # nobody reads or writes the workspace that goes
                self.copies.fit(source.nbytes)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
