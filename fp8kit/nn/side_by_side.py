"""Parameters of one module that lie side by side in memory, so that all are one array without a copy."""

from __future__ import annotations

from collections.abc import Sequence

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, is_grad_enabled, tape
from fp8kit.autograd.tape import Node
from fp8kit.autograd.tensors import on_tape, unchanged
from fp8kit.nn.module import Parameter
from fp8kit.ops.product import side_by_side

_ALIGNED = 256  # bytes of a part are a multiple: it begins where memory of its own might


def put(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Returns new parameters with the values of some that are alike, in one memory; those themselves where
    their bytes are no multiple of 256."""
    first = parameters[0].view
    if first.nbytes % _ALIGNED or len(parameters) < 2:
        return list(parameters)
    whole = arrays.empty((len(parameters), *first.shape), first.dtype, first.device)
    made = [Parameter(whole.at(i)) for i in range(len(parameters))]
    for to, parameter in zip(made, parameters, strict=True):
        arrays.copy(to.view, parameter.view)
    return made


def as_one(operation: str, parameters: Sequence[Parameter]) -> tuple[Tensor, bool]:
    """Parameters of one shape as one tensor (N, ...) on the tape, and whether it is their own memory: it is a
    copy where they do not, or no longer, lie side by side. Their gradients are parts of the tensor's.
    ``operation``: what errors of the tape call it."""
    views = [parameter.view for parameter in parameters]
    found, shape = side_by_side(views, 0), (len(views), *views[0].shape)
    if found is None:
        found = arrays.empty(shape, views[0].dtype, views[0].device)
        for i, view in enumerate(views):
            arrays.copy(found.at(i), view)
        own = False
    else:
        found, own = found.reshape(*shape), True
    whole, wanted = Tensor(found), any(p.requires_grad for p in parameters)
    probe = tape.probe()
    if probe is not None and wanted:
        probe.wanted = True
        probe.used += [unchanged(operation, f"weight {i}", p) for i, p in enumerate(parameters)]
    if wanted and is_grad_enabled():
        edges = [p.edge() if p.requires_grad else None for p in parameters]

        def backward(cotangents: list[ArrayView]) -> list[ArrayView | None]:
            parts = [cotangents[0].at(i) for i in range(len(edges))]
            return [arrays.duplicate(g) if g.nbytes % _ALIGNED else g for g in parts]

        on_tape(Node(operation, 1, edges, backward), [whole])
    return whole, own
