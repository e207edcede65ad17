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
    product: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor],
    part: Part,
    x: Tensor,
    weight: Any,
    bias: Any,
    output: Any,
) -> Any:
    """x W + b as a DTensor, x a DTensor or, where it is none, the same on every rank.

    ``product``: (x, weight, bias, sequence) of one rank -> y; it adds no bias where the part is of kind
    "row". With ``sequence`` it gathers the codes of x's rows (columns), or gives its rows of the sum and
    gathers those of the gradient (rows). ``output``: the placement that rows are to give.

    Columns give y sharded over its last dimension, and gather an x that is sharded over another one. Rows
    give terms of sums, or, where ``output`` shards a dimension but the last, its parts.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, last = weight.device_mesh, x.ndim - 1
    given: Any = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
    where = given.placements[0]
    if part.kind == "row":
        own = arrived(given.redistribute(mesh, [Shard(last)]).to_local())
        dim = _sequence(output, given.shape, mesh)
        local = _of_sequence(product, own, weight.to_local(), None, dim)
        y = DTensor.from_local(local, mesh, [Partial() if dim is None else Shard(dim)])
        return y if bias is None else y + bias
    if part.kind == "column":
        local = None if bias is None else bias.to_local()
        dim = _sequence(where, given.shape, mesh)
        if dim is not None:
            own = arrived(given.to_local())
        else:
            own = arrived(given.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()]))
        return DTensor.from_local(
            _of_sequence(product, own, weight.to_local(), local, dim), mesh, [Shard(last)]
        )
    return rows_in_parts(lambda own, w, b: product(own, w, b, False), x, weight, bias)


def rows_in_parts(function: Callable[..., Tensor], x: Any, weight: Any, bias: Any) -> Any:
    """``function(x, weight, bias)`` of each rank's rows of x, a DTensor or the same on every rank, as a
    DTensor; every rank has the whole parameters, DTensors too."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = weight.device_mesh
    given: Any = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
    where = given.placements[0]
    if where.is_partial() or (where.is_shard() and where.dim % x.ndim == x.ndim - 1):
        given, where = given.redistribute(mesh, [Replicate()]), Replicate()
    summed = [Partial()] if where.is_shard() else [Replicate()]  # of which rows of x there are elsewhere
    operands = [None if t is None else t.to_local(grad_placements=summed) for t in (weight, bias)]
    return DTensor.from_local(function(arrived(given.to_local()), *operands), mesh, [where])


def _sequence(placement: Any, shape: Any, mesh: Any) -> int | None:
    """The dimension but the last that a placement shards into equal parts; None where it does not."""
    if placement is None or not placement.is_shard():
        return None
    dim = placement.dim % len(shape)
    return dim if dim < len(shape) - 1 and shape[dim] % mesh.size() == 0 else None


def _of_sequence(
    product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, dim: int | None
) -> Tensor:
    """The product with the sequence, if any, as the first dimension, over which ranks gather and scatter."""
    if dim is None:
        return product(x, weight, bias, False)
    return product(x.movedim(dim, 0).contiguous(), weight, bias, True).movedim(0, dim)
