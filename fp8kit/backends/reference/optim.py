"""Kernels over many tensors at once: AdamW, SGD, loss scaling, the global gradient norm, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import BLOCK, Array, blocks, f32, quiet, result, store
from fp8kit.backends.reference.threads import njit, prange

_TASK = 1 << 15  # elements that one task of the parallel loop takes
_ZERO, _ONE = np.float32(0), np.float32(1)


@quiet
def adamw_(
    params: Sequence[ArrayView],
    grads: Sequence[ArrayView],
    exp_avgs: Sequence[ArrayView],
    exp_avg_sqs: Sequence[ArrayView],
    masters: Sequence[ArrayView | None],
    lr: float | ArrayView,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decays: Sequence[float],
    step: int | ArrayView,
    inv_scale: ArrayView | None,
    found_inf: ArrayView | None,
    stream: int,
) -> None:
    """One AdamW step on lists of tensors; see ``protocol.Kernels.adamw_``. ``step`` counts from 1."""
    if is_set(found_inf):
        return
    t = int(number(step))
    usual = number(lr), beta1, 1 - beta1, beta2, 1 - beta2, epsilon, 1 - beta1**t, 1 - beta2**t
    numbers, factor = [np.float32(v) for v in usual], unscaling(inv_scale)
    for param, grad, m, v, master, decay in zip(
        params, grads, exp_avgs, exp_avg_sqs, masters, weight_decays, strict=True
    ):
        weights = f32(param) if master is None else master.numpy()
        moments, own = (m.numpy().reshape(-1), v.numpy().reshape(-1)), (np.float32(decay), _ZERO, factor)
        adam(weights.reshape(-1), f32(grad).reshape(-1), *moments, (*numbers, *own))
        store(param, weights)


@quiet
def sgd_(
    params: Sequence[ArrayView],
    grads: Sequence[ArrayView],
    buffers: Sequence[ArrayView | None],
    masters: Sequence[ArrayView | None],
    lr: float | ArrayView,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decays: Sequence[float],
    step: int | ArrayView,
    inv_scale: ArrayView | None,
    found_inf: ArrayView | None,
    stream: int,
) -> None:
    """One step of SGD on lists of tensors; see ``protocol.Kernels.sgd_``. ``step`` counts from 1."""
    if is_set(found_inf):
        return
    rate, keep, add = np.float32(number(lr)), np.float32(momentum), np.float32(1 - dampening)
    first, factor = int(number(step)) == 1, unscaling(inv_scale)
    for param, grad, buffer, master, decay in zip(
        params, grads, buffers, masters, weight_decays, strict=True
    ):
        weights = f32(param) if master is None else master.numpy()
        w, g = weights.reshape(-1), f32(grad).reshape(-1)
        b = g if buffer is None else buffer.numpy().reshape(-1)
        for part in blocks(w.size, 1, BLOCK):
            change = factor * g[part] + np.float32(decay) * w[part]
            if buffer is not None:
                b[part] = change if first else keep * b[part] + add * change
                change = change + keep * b[part] if nesterov else b[part]
            w[part] -= rate * change
        store(param, weights)


@quiet
def scale_(
    xs: Sequence[ArrayView], factor: ArrayView | None, found_inf: ArrayView | None, stream: int
) -> None:
    """Multiply all tensors by a factor and look for Inf and NaN; see ``protocol.Kernels.scale_``."""
    for x in xs:
        values = f32(x)
        if found_inf is not None and not np.isfinite(values).all():
            found_inf.numpy()[0] = 1
        if factor is not None:
            store(x, np.multiply(values, factor.numpy()[0], out=result(x)))


@quiet
def loss_scale_(
    scale: ArrayView,
    inv_scale: ArrayView,
    good_steps: ArrayView,
    found_inf: ArrayView,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    stream: int,
) -> None:
    """Dynamic loss scaling's update; see ``protocol.Kernels.loss_scale_``."""
    value, good = scale.numpy(), good_steps.numpy()
    if is_set(found_inf):
        value[0] *= np.float32(backoff_factor)
        good[0] = 0
    else:
        good[0] += 1
        if good[0] >= growth_interval:
            grown = value[0] * np.float32(growth_factor)
            value[0] = grown if np.isfinite(grown) else value[0]
            good[0] = 0
    inv_scale.numpy()[0] = np.float32(1) / value[0]
    found_inf.numpy()[0] = 0


def count_(counter: ArrayView, found_inf: ArrayView | None, stream: int) -> None:
    """Count a step unless it is skipped; see ``protocol.Kernels.count_``."""
    if not is_set(found_inf):
        counter.numpy()[0] += 1


def is_set(found_inf: ArrayView | None) -> bool:
    """Whether an Inf or NaN was found, so that the step is skipped."""
    return found_inf is not None and bool(found_inf.numpy()[0] != 0)


def number(x: float | ArrayView) -> Any:
    """Returns a number that may lie in an array of one element."""
    return x.numpy()[0] if isinstance(x, ArrayView) else x


def unscaling(inv_scale: ArrayView | None) -> Any:
    """Returns what gradients are multiplied by, float32."""
    return _ONE if inv_scale is None else inv_scale.numpy()[0]


@quiet
def l2norm(xs: Sequence[ArrayView], out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
    """Square root of the sum of all squares, summed in float64 in blocks; see ``protocol.Kernels.l2norm``."""
    total = 0.0
    for x in xs:
        values = f32(x).reshape(-1)
        for part in blocks(values.size, 1, BLOCK):
            total += float(np.add.reduce(np.multiply(values[part], values[part], dtype=np.float64)))
    out.numpy()[0] = math.sqrt(total)


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
def adam(weights: Array, grads: Array, ms: Array, vs: Array, numbers: Any) -> None:
    """One step of Adam on float32 (n,). ``numbers``: float32, the rate, beta1, 1 - beta1, beta2, 1 - beta2,
    epsilon, what the moments are divided by, the decay of weights, that of gradients, their factor."""
    lr, keep1, add1, keep2, add2, epsilon, first, second, loose, tied, factor = numbers
    n = weights.size
    for task in prange((n + _TASK - 1) // _TASK):
        part = slice(task * _TASK, min(n, task * _TASK + _TASK))
        w, gradient, m, v = weights[part], grads[part], ms[part], vs[part]
        # an index that starts at 0 lets LLVM use SIMD: it needs no test for negative ones
        for i in range(w.size):
            g = gradient[i] * factor
            g = g + tied * w[i] if tied != _ZERO else g
            m[i] = keep1 * m[i] + add1 * g
            v[i] = keep2 * v[i] + add2 * (g * g)
            w[i] -= lr * ((m[i] / first) / (np.sqrt(v[i] / second) + epsilon) + loose * w[i])
