"""Routers: a warp a token; sums in a fixed order."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.protocol.router import SCORES, Routing
from fp8kit.errors import BackendError
from fp8kit.formats import float32, int64

_TOKENS = 4  # of a block: raw_kernels/router.cu
_BLOCKS = 528  # of partial sums, at most: fixed, so that sums are the same on every device


def _kernel(function: str, like: ArrayView, probs: ArrayView) -> launch.Kernel:
    return kernel("router.cu", function, like, P=launch.type_name(probs.dtype))


def _rule(rule: Routing) -> tuple[int, int, int, float, int]:
    return SCORES.index(rule.score), rule.topk, int(rule.before), float(rule.factor), int(rule.dense)


def _kind(counts: ArrayView) -> int:
    """Returns how the kernels read counts: int32, int64, float32."""
    return 2 if counts.dtype is float32 else int(counts.dtype is int64)


def route(
    logits: ArrayView, bias: ArrayView | None, probs: ArrayView, chosen: ArrayView, rule: Routing, stream: int
) -> None:
    """See ``backends.protocol``."""
    tokens, experts = logits.shape
    sizes = tokens, experts, rule.groups, rule.group_topk
    arguments = (logits.ptr, address(bias), probs.ptr, chosen.ptr, *sizes, *_rule(rule))
    function = _kernel("route", logits, probs)
    launch.launch(function, ceil_div(tokens, _TOKENS), (32, _TOKENS), arguments, stream)


def route_bwd(
    logits: ArrayView, chosen: ArrayView, dprobs: ArrayView, dlogits: ArrayView, rule: Routing, stream: int
) -> None:
    """See ``backends.protocol``."""
    arguments = (logits.ptr, chosen.ptr, dprobs.ptr, dlogits.ptr, *logits.shape, *_rule(rule))
    function = _kernel("route_bwd", logits, dprobs)
    launch.launch(function, ceil_div(logits.shape[0], _TOKENS), (32, _TOKENS), arguments, stream)


def _partial_sums(rows: int) -> int:
    """Blocks of ``aux_partial``, one at least."""
    return max(1, min(_BLOCKS, ceil_div(rows, 32)))


def aux_loss_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``."""
    return 4 * _partial_sums(rows)


def aux_loss(
    probs: ArrayView,
    counts: ArrayView,
    total: ArrayView | None,
    loss: ArrayView,
    factor: float,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for a missing workspace."""
    if workspace is None:
        raise BackendError("aux_loss", "workspace", None, f"{aux_loss_workspace(*probs.shape)} bytes")
    blocks = _partial_sums(probs.shape[0])
    arguments = (probs.ptr, counts.ptr, workspace.ptr, *probs.shape, _kind(counts))
    launch.launch(_kernel("aux_partial", probs, probs), blocks, (32, 8), arguments, stream)
    summed = (workspace.ptr, address(total), loss.ptr, blocks, float(factor))
    launch.launch(_kernel("aux_total", probs, probs), 1, 256, summed, stream)


def aux_loss_bwd(
    dloss: ArrayView,
    counts: ArrayView,
    total: ArrayView | None,
    dprobs: ArrayView,
    factor: float,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    arguments = (dloss.ptr, counts.ptr, address(total), dprobs.ptr, *dprobs.shape, _kind(counts))
    function = _kernel("aux_loss_bwd", dprobs, dprobs)
    launch.launch(function, ceil_div(dprobs.shape[0], 8), (32, 8), (*arguments, float(factor)), stream)
