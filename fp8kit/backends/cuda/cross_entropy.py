"""Cross entropy of logits with integer targets: one pass over each row forward, one backward."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel, whole_warps
from fp8kit.formats import int64

_SOURCE = "cross_entropy.cu"


def cross_entropy_fwd(
    logits: ArrayView,
    targets: ArrayView,
    loss: ArrayView,
    lse: ArrayView,
    total: ArrayView | None,
    label_smoothing: float,
    ignore_index: int,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    rows, columns = logits.shape
    wide = int(targets.dtype is int64)
    threads = whole_warps(ceil_div(columns, 8), 512)
    sizes = columns, float(label_smoothing), ignore_index, wide
    arguments = (logits.ptr, targets.ptr, loss.ptr, lse.ptr, *sizes)
    launch.launch(kernel(_SOURCE, "cross_entropy_fwd", logits), rows, threads, arguments, stream)
    if total is not None:
        summed = (loss.ptr, targets.ptr, total.ptr, rows, ignore_index, wide)
        launch.launch(kernel(_SOURCE, "cross_entropy_total", logits), 1, 1024, summed, stream)


def cross_entropy_bwd(
    logits: ArrayView,
    targets: ArrayView,
    lse: ArrayView,
    dloss: ArrayView,
    total: ArrayView | None,
    dlogits: ArrayView,
    label_smoothing: float,
    ignore_index: int,
    stream: int,
) -> None:
    """See ``backends.protocol``. A target out of range has no onehot."""
    rows, columns = logits.shape
    threads = whole_warps(ceil_div(columns, 8), 512)
    sizes = columns, float(label_smoothing), ignore_index, int(targets.dtype is int64)
    arguments = (logits.ptr, targets.ptr, lse.ptr, dloss.ptr, address(total), dlogits.ptr, *sizes)
    launch.launch(kernel(_SOURCE, "cross_entropy_bwd", logits), rows, threads, arguments, stream)
