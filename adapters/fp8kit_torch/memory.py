"""``TorchMemory``: the memory of an operation's buffers from torch's allocator, for the executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fp8kit.arrays import ArrayView, Device, contiguous_strides
from fp8kit.errors import FormatError
from fp8kit.execution.memory import Arena, Scratch
from fp8kit.spec import Meta
from fp8kit_torch import torch_compat
from fp8kit_torch.views import dtype_of

KINDS = ("cpu", "cuda")
_EMPTY = {kind: torch_compat.empty_strided(kind) for kind in KINDS}


@lru_cache(maxsize=64)
def place_of(device: torch.device) -> Device:
    """torch's device as fp8kit's; FormatError for one that is neither CPU nor CUDA."""
    if device.type not in KINDS:
        raise FormatError("fp8kit_torch", "tensor", f"device {device}", "cpu or cuda")
    return Device(device.type, device.index or 0)


def _bytes(nbytes: int, device: Device) -> tuple[int, Tensor]:
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device(device.kind, device.index))
    return memory.data_ptr(), memory


scratch = Scratch(_bytes)


class TorchMemory:
    """``execution.Memory`` of a device: its arrays are tensors, allocated on torch's current device, which
    must be this one.

    ``compiled``: for operations in a compiled graph. All that they allocate is fresh: a graph may be
    captured, and then accounts for all memory that it finds allocated.
    """

    address: Callable[[Tensor], int] = staticmethod(Tensor.data_ptr)
    release: Callable[[Arena, int], None] = staticmethod(scratch.release)

    def __init__(self, device: torch.device, compiled: bool = False) -> None:
        self.device, self.where, self.compiled = place_of(device), device, compiled
        self.cuda = cuda = device.type == "cuda"
        self.stream: Callable[[], int] = (
            partial(torch_compat.current_stream, self.device.index) if cuda else int
        )
        # an only device is always the current one
        self.several = cuda and torch.cuda.device_count() > 1
        self._nothing = Arena(0, 0, None, self.device, False)

    def maker(self, meta: Meta) -> Callable[[], Tensor]:
        dtype = dtype_of(meta.dtype)
        if meta.zero:
            return partial(torch.zeros, meta.shape, dtype=dtype, device=self.where)
        return partial(_EMPTY[self.device.kind], meta.shape, contiguous_strides(meta.shape), dtype)

    def view(self, meta: Meta) -> ArrayView:
        tensor = torch.empty(meta.shape, dtype=dtype_of(meta.dtype), device=self.where)
        return ArrayView(tensor.data_ptr(), meta.shape, meta.dtype, self.device, tensor)

    def arena(self, nbytes: int, stream: int) -> Arena:
        if not nbytes:
            return self._nothing
        if self.compiled or not self.cuda or torch_compat.is_capturing():
            # a graph may be replayed beside what the thread does later; the CPU's memory costs little
            owner = _EMPTY[self.device.kind]((nbytes,), (1,), torch.uint8)
            return Arena(nbytes, owner.data_ptr(), owner, self.device, False)
        return scratch.arena(nbytes, self.device, stream)


memory_of: Any = lru_cache(maxsize=64)(TorchMemory)
