"""What an operation reads and writes, as views of torch's memory: blocks of buffers, the thread's scratch,
scales and amaxes.

What forward saves for backward is one block of bytes, and, in an eager call that saves much, a tensor for
each large buffer (``fp8kit.scratch``), so that backward can give it back early. The amaxes of a layer's
operands, forward or backward, are float32 slots in the order of its ``ScalingState``: the state's own row, or
one small tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from fp8kit.scratch import Buffers, Scratch, large
from torch import Tensor

from fp8kit.arrays import ArrayView, Device, Shape, contiguous_strides
from fp8kit.errors import FormatError
from fp8kit.formats import DType, float32
from fp8kit.spec import Meta
from fp8kit_torch.views import dtype_of

KINDS = ("cpu", "cuda")
Empty = Callable[[Shape, Shape, torch.dtype], Tensor]


def _empty(kind: str) -> Empty:
    """(shape, strides, dtype) -> a tensor on the current device of a kind. What Inductor's code calls, where
    torch has it: it goes past the dispatcher, which takes longer than the allocator."""
    quick: Empty | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    return quick or (
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=kind)
    )


EMPTY = {kind: _empty(kind) for kind in KINDS}
_ALIGNMENT = 256  # bytes, of every buffer in a block
Views = dict[str, ArrayView]
Make = Callable[[Meta], ArrayView]


class Placed(dict[str, ArrayView]):
    """Scales or amaxes by name, and ``at``, where they lie."""

    __slots__ = ("at",)

    def __init__(self, views: Mapping[str, ArrayView]) -> None:
        super().__init__(views)
        self.at = tuple([view.ptr for view in views.values()])


NOTHING = Placed({})


@lru_cache(maxsize=64)
def place_of(device: torch.device) -> Device:
    """torch's device as fp8kit's; FormatError for one that is neither CPU nor CUDA."""
    if device.type not in KINDS:
        raise FormatError("fp8kit_torch", "tensor", f"device {device}", "cpu or cuda")
    return Device(device.type, device.index or 0)


def _memory(nbytes: int, device: Device) -> tuple[int, Tensor]:
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device(device.kind, device.index))
    return memory.data_ptr(), memory


_SCRATCH = Scratch(_memory)


class Block:
    """Buffers that live and die together, laid out in one tensor of bytes. With ``make`` the large ones lie
    ``apart``, made by it."""

    __slots__ = ("apart", "make", "parts", "size")

    def __init__(self, metas: Mapping[str, Meta], make: Make | None = None) -> None:
        self.size: Any = 0
        self.parts: list[tuple[str, int, Shape, DType]] = []
        self.make, self.apart = make, {} if make is None else large(metas)
        for name, meta in metas.items():
            if name in self.apart:
                continue
            self.parts.append((name, self.size, meta.shape, meta.dtype))
            self.size += (
                (math.prod(meta.shape) * meta.dtype.itemsize + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
            )

    def carve(self, memory: Tensor, device: Device) -> Views:
        """The buffers by name in ``memory``, uint8 (size,)."""
        return self._laid(memory.data_ptr(), memory, device)

    def opened(self, held: list[Tensor], device: Device) -> Views:
        """The buffers by name in what ``Ready.forward`` gave, and nowhere else: the list is empty then."""
        views = self.carve(held[0], device) if self.parts else {}
        if self.apart:
            own = zip(self.apart.items(), held[-len(self.apart) :], strict=True)
            views = Buffers(
                views | {name: view_of(tensor, meta, device) for (name, meta), tensor in own}, {}, self.make
            )
        held.clear()
        return views

    def kept_at(self, device: Device, stream: int) -> int:
        """Address of the thread's memory for these temporaries, 0 for none; -1 where they lie elsewhere at
        each call (see ``room``)."""
        if device.kind == "cpu" or torch._C._cuda_isCurrentStreamCapturing():
            return -1
        return _SCRATCH.room(self.size, device, stream).ptr if self.parts else 0

    def room(self, device: Device, where: torch.device, stream: int, kept: bool) -> Views:
        """Buffers for one operation's temporaries on ``stream``, not to be changed. ``kept``: those in the
        thread's ``fp8kit.scratch``; but fresh ones on the CPU, and while a graph is captured, which may be
        replayed beside what the thread does later."""
        if self.apart:
            return Buffers(
                self._room(device, where, stream, kept) if self.parts else {}, self.apart, self.make
            )
        return self._room(device, where, stream, kept) if self.parts else {}

    def _room(self, device: Device, where: torch.device, stream: int, kept: bool) -> Views:
        """The buffers that do not lie apart."""
        if not kept or device.kind == "cpu" or torch._C._cuda_isCurrentStreamCapturing():
            return self.carve(torch.empty(self.size, dtype=torch.uint8, device=where), device)
        room = _SCRATCH.room(self.size, device, stream)
        views: Views | None = room.carved.get(self)
        if views is None:
            views = self._laid(room.ptr, room.owner, device)
            room.keep(self, views)
        return views

    def _laid(self, start: int, owner: object, device: Device) -> Views:
        return {
            name: ArrayView(start + offset, shape, kind, device, owner)
            for name, offset, shape, kind in self.parts
        }


def view_of(tensor: Tensor, meta: Meta, device: Device) -> ArrayView:
    """A tensor as what ``meta`` says."""
    return ArrayView(tensor.data_ptr(), meta.shape, meta.dtype, device, tensor)


def maker(where: torch.device, device: Device) -> Make:
    """A function that allocates an array of a meta there."""
    return lambda meta: view_of(
        torch.empty(meta.shape, dtype=dtype_of(meta.dtype), device=where), meta, device
    )


class Out(NamedTuple):
    """A tensor that is to be allocated, which ``made()`` does."""

    name: str
    shape: Shape
    dtype: torch.dtype
    kind: DType
    made: Callable[[], Tensor]


def outs_of(metas: Mapping[str, Meta], slots: Mapping[str, int], where: torch.device) -> list[Out]:
    """What is to be allocated there; amaxes are not."""
    return [
        Out(name, meta.shape, dtype_of(meta.dtype), meta.dtype, _making(meta, where))
        for name, meta in metas.items()
        if not (name.endswith("_amax") and name.removesuffix("_amax") in slots)
    ]


def _making(meta: Meta, where: torch.device) -> Callable[[], Tensor]:
    if meta.zero:
        return partial(torch.zeros, meta.shape, dtype=dtype_of(meta.dtype), device=where)
    return partial(EMPTY[where.type], meta.shape, contiguous_strides(meta.shape), dtype_of(meta.dtype))


def amax_views(slots: Mapping[str, int], row: Tensor, device: Device) -> Placed:
    """A row of float32 slots as the amaxes of the operands."""
    start = row.data_ptr()
    return Placed(
        {
            f"{name}_amax": ArrayView(start + 4 * slot, (1,), float32, device, row)
            for name, slot in slots.items()
        }
    )


def scale_views(slots: Mapping[str, int], scale: Tensor, device: Device) -> Placed:
    """A state's scales as the operands' inputs."""
    start = scale.data_ptr()
    return Placed(
        {
            f"{name}_scale": ArrayView(start + 4 * slot, (1,), float32, device, scale)
            for name, slot in slots.items()
        }
    )
