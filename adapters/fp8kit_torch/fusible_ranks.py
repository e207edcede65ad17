"""Operations of ``te.ops`` by which ranks move or add whole tensors, under Transformer Engine's names. With
one rank each gives its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import flag
from fp8kit.collectives import Collectives
from fp8kit.layers.base import spec_object
from fp8kit.ops.communicate import gather_rows, reduce_all, reduce_rows
from fp8kit.spec import Operation
from fp8kit_torch.call import apply
from fp8kit_torch.collectives import ranks_of
from fp8kit_torch.fusion import BasicOperation


def tensor_ranks(operation: str, argument: str, group: Any) -> Collectives | None:
    """What a group given as ``argument`` communicates by, None: all processes; None for one rank.
    ArgumentError for what is no group."""
    known = torch.distributed
    if group is None and known.is_available() and known.is_initialized():
        group = known.group.WORLD
    found = ranks_of(operation, argument, group)
    return None if found is None or found.size == 1 else found


class _OfRanks(BasicOperation):
    """``process_group``: the ranks, a process group or a ``Collectives``; None: all processes."""

    does: Operation

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self._ranks()

    def _ranks(self) -> Collectives | None:
        return tensor_ranks(f"ops.{type(self).__name__}", "process_group", self.process_group)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (n, ...)."""
        ranks = self._ranks()
        if ranks is None:
            return inp
        spec = spec_object("GroupSpec", ranks.name, f"ops.{type(self).__name__}")
        return apply(self.does, spec, {"x": inp})["y"]


class AllGather(_OfRanks):
    """The ranks' inputs one after the other along the first dimension; the gradient is summed over the ranks,
    of which each gets its rows."""

    does = gather_rows


class ReduceScatter(_OfRanks):
    """This rank's rows of the sum of the ranks' inputs; the gradient is gathered. ShapeError where the ranks
    do not divide the rows."""

    does = reduce_rows


class AllReduce(_OfRanks):
    """The sum of the ranks' inputs. ``reduce_in_backward``: the gradient is summed too; False: it passes."""

    does = reduce_all

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = flag("ops.AllReduce", "reduce_in_backward", reduce_in_backward)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (n, ...)."""
        y = super().forward(inp)
        return y if self._reduce_in_backward or y is inp else _Passing.apply(inp, y.detach())


class _Passing(torch.autograd.Function):
    """y, whose gradient is x's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None
