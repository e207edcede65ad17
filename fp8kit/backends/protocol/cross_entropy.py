"""The contract of cross entropy."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class CrossEntropies(Protocol):
    """Cross entropy."""

    @kernel(writes="loss lse total")
    def cross_entropy_fwd(
        self,
        logits: ArrayView,
        targets: ArrayView,
        loss: ArrayView,
        lse: ArrayView,
        total: ArrayView | None,
        label_smoothing: float,
        ignore_index: int,
        stream: int,
    ) -> None:
        """loss[i] = lse[i] - (1 - s) * logits[i, t] - s * mean(logits[i]), s = label_smoothing, t =
        targets[i]; 0 where t is ignore_index; NaN where t is out of range (the operation refuses that on the
        CPU, where it can look). logits: h (M, V); targets: int32 or int64 (M,); loss, lse: float32 (M,);
        total: float32 [2] or None, written with (mean loss over the rows not ignored, their number), summed
        in a fixed order; the mean of no rows is 0."""

    @kernel(writes="dlogits")
    def cross_entropy_bwd(
        self,
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
        """dlogits = (softmax(logits) - (1 - s) * onehot(t) - s / V) * dloss, 0 in ignored rows. dloss:
        float32 (M,), or float32 [1] with ``total`` given: then divided by total[1] (the mean's gradient). A
        target out of range has no onehot. dlogits may be logits' memory."""
