"""Cross entropy of logits with integer targets, label smoothing and an ignored index.

NumPy over blocks of rows: its float32 exp uses SIMD. The log-sum-exp takes out the row's maximum first, so no
exp overflows.
"""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array, blocks, f32, quiet, result, store


@quiet
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
    """Loss and log-sum-exp of each row, and the mean loss; see ``protocol.Kernels.cross_entropy_fwd``. The
    mean is summed in float64."""
    rows, columns = logits.shape
    x, t, losses, sums = f32(logits), targets.numpy(), loss.numpy(), lse.numpy()
    smooth = np.float32(label_smoothing)
    ignored, valid = t == ignore_index, _in_range(t, columns)
    for part in blocks(rows, columns):
        block = x[part]
        top = block.max(axis=1, keepdims=True, initial=-np.inf)
        top[~np.isfinite(top)] = 0
        shifted = block - top
        np.exp(shifted, out=shifted)
        sums[part] = np.log(np.add.reduce(shifted, axis=1)) + top[:, 0]
        column = np.where(valid[part], t[part], 0)
        picked = (
            np.take_along_axis(block, column[:, None], axis=1)[:, 0]
            if columns
            else np.full(len(block), np.nan, np.float32)
        )
        value = sums[part] - (1 - smooth) * picked
        if label_smoothing:
            value -= smooth * block.mean(axis=1)
        losses[part] = np.where(ignored[part], 0, np.where(valid[part], value, np.nan))
    if total is not None:
        count = rows - int(np.count_nonzero(ignored))
        total.numpy()[:] = (losses.sum(dtype=np.float64) / count if count else 0.0, count)


@quiet
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
    """``(softmax(logits) - (1 - s) onehot(t) - s / V) * dloss``; see ``protocol.Kernels.cross_entropy_bwd``.

    A target out of range has an all-zero onehot (its loss is NaN).
    """
    rows, columns = logits.shape
    x, t, sums, values = f32(logits), targets.numpy(), lse.numpy(), result(dlogits)
    upstream = dloss.numpy().reshape(-1)
    if total is not None:
        upstream = np.broadcast_to(upstream / total.numpy()[1], (rows,))
    ignored, valid = t == ignore_index, _in_range(t, columns)
    smooth = np.float32(label_smoothing)
    for part in blocks(rows, columns):
        block = x[part] - sums[part, None]
        np.exp(block, out=block)
        named = np.flatnonzero(valid[part])
        block[named, t[part][named]] -= 1 - smooth
        if label_smoothing:
            block -= np.float32(label_smoothing / columns)
        block *= upstream[part, None]
        block[ignored[part]] = 0
        values[part] = block
    store(dlogits, values)


def _in_range(targets: Array, columns: int) -> Array:
    return (targets >= 0) & (targets < columns)
