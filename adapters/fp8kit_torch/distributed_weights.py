"""Products with a weight that torch's ``parallelize_module`` distributes over one dimension of a device mesh
(``ColwiseParallel``, ``RowwiseParallel``): each rank multiplies its part, and DTensor moves what ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def arrived(tensor: Tensor) -> Tensor:
    """The tensor; one that a collective of DTensor is still to fill, once it has."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    return _Arrived.apply(tensor)  # type: ignore[no-any-return]


class Part(NamedTuple):
    """What a rank has of a weight. ``kind``: "whole", "column" (some of the outputs), "row" (some of the
    inputs); ``features``, ``out``: its sizes."""

    kind: str
    features: int
    out: int


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return type(tensor) is not torch.nn.Parameter and hasattr(type(tensor), "placements")


def part_of_weight(weight: Any, layout: str) -> Part | None:
    """This rank's part of a distributed weight, (out, in) with layout "oi", (in, out) with "io"; None for a
    plain tensor. UnsupportedError for a mesh of several dimensions and for parts that are no shards."""
    if not is_distributed(weight):
        return None
    placements = weight.placements
    if len(placements) != 1 or not (placements[0].is_shard() or placements[0].is_replicate()):
        wanted = "one dimension of a mesh, over which the weight is sharded or replicated"
        raise UnsupportedError("Linear", "weight", f"a DTensor with placements {placements}", wanted)
    own = weight.to_local().shape
    out, features = own if layout == "oi" else reversed(own)
    if placements[0].is_replicate():
        return Part("whole", int(features), int(out))
    column = placements[0].dim == (0 if layout == "oi" else 1)
    return Part("column" if column else "row", int(features), int(out))


def product_in_parts(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor], part: Part, x: Tensor, weight: Any, bias: Any
) -> Any:
    """x W + b as a DTensor, x a DTensor or, where it is none, the same on every rank.

    ``product``: (x, weight, bias) of one rank -> y; it adds no bias where the part is of kind "row". Columns
    give y sharded over its last dimension, rows give sums that are not reduced yet.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, last = weight.device_mesh, x.ndim - 1
    given: Any = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
    where = given.placements[0]
    if part.kind == "row":
        own = arrived(given.redistribute(mesh, [Shard(last)]).to_local())
        y = DTensor.from_local(product(own, weight.to_local(), None), mesh, [Partial()])
        return y if bias is None else y + bias
    if part.kind == "column":
        own = arrived(given.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()]))
        local = None if bias is None else bias.to_local()
        return DTensor.from_local(product(own, weight.to_local(), local), mesh, [Shard(last)])
    if where.is_partial() or (where.is_shard() and where.dim % x.ndim == last):
        given, where = given.redistribute(mesh, [Replicate()]), Replicate()
    summed = [Partial()] if where.is_shard() else [Replicate()]  # of which rows of x there are elsewhere
    operands = [None if t is None else t.to_local(grad_placements=summed) for t in (weight, bias)]
    return DTensor.from_local(product(arrived(given.to_local()), *operands), mesh, [where])
