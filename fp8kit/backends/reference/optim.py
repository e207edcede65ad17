"""Kernels over many tensors at once: AdamW, the global gradient norm, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import BLOCK, Array, blocks, f32, quiet, result, store
from fp8kit.backends.reference.threads import njit, prange

_TASK = 1 << 15  # elements that one task of the parallel loop takes


@quiet
def adamw_(params: Sequence[ArrayView], grads: Sequence[ArrayView], exp_avgs: Sequence[ArrayView],
           exp_avg_sqs: Sequence[ArrayView], masters: Sequence[ArrayView | None], lr: float, beta1: float, beta2: float,
           epsilon: float, weight_decays: Sequence[float], step: int, stream: int) -> None:
    """One AdamW step on lists of tensors; see ``protocol.Kernels.adamw_``. ``step`` counts from 1."""
    first, second = np.float32(1 - beta1**step), np.float32(1 - beta2**step)
    keep1, add1, keep2, add2 = (np.float32(v) for v in (beta1, 1 - beta1, beta2, 1 - beta2))
    for param, grad, m, v, master, decay in zip(params, grads, exp_avgs, exp_avg_sqs, masters, weight_decays, strict=True):
        weights = f32(param) if master is None else master.numpy()
        _adamw(weights.reshape(-1), f32(grad).reshape(-1), m.numpy().reshape(-1), v.numpy().reshape(-1), np.float32(lr), keep1, add1,
               keep2, add2, np.float32(epsilon), np.float32(decay), first, second)
        store(param, weights)


@quiet
def l2norm(xs: Sequence[ArrayView], out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
    """Square root of the sum of all squares, summed in float64 in blocks; see ``protocol.Kernels.l2norm``."""
    total = 0.0
    for x in xs:
        values = f32(x).reshape(-1)
        for part in blocks(values.size, 1, BLOCK):
            total += float(np.add.reduce(np.multiply(values[part], values[part], dtype=np.float64)))
    out.numpy()[0] = math.sqrt(total)


def l2norm_workspace(sizes: Sequence[int]) -> int:
    """No workspace on the CPU."""
    return 0


@quiet
def clip_(xs: Sequence[ArrayView], norm: ArrayView, max_norm: float, stream: int) -> None:
    """``x *= min(1, max_norm / (norm + 1e-6))`` for every tensor; see ``protocol.Kernels.clip_``."""
    factor = np.minimum(np.float32(1), np.float32(max_norm) / (norm.numpy()[0] + np.float32(1e-6)))
    if factor == 1:
        return
    for x in xs:
        values = result(x)
        np.multiply(f32(x), factor, out=values)
        store(x, values)


@njit(parallel=True)
def _adamw(weights: Array, grads: Array, ms: Array, vs: Array, lr: Any, keep1: Any, add1: Any, keep2: Any, add2: Any, epsilon: Any,
           decay: Any, first: Any, second: Any) -> None:
    n = weights.size
    for task in prange((n + _TASK - 1) // _TASK):
        part = slice(task * _TASK, min(n, task * _TASK + _TASK))
        w, g, m, v = weights[part], grads[part], ms[part], vs[part]
        for i in range(w.size):  # an index that starts at 0 lets LLVM use SIMD: it needs no test for negative ones
            m[i] = keep1 * m[i] + add1 * g[i]
            v[i] = keep2 * v[i] + add2 * (g[i] * g[i])
            w[i] -= lr * ((m[i] / first) / (np.sqrt(v[i] / second) + epsilon) + decay * w[i])
