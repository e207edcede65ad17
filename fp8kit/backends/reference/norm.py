"""LayerNorm (Ba et al. 2016), RMSNorm (Zhang & Sennrich 2019) and L2 normalisation, forward and backward, one
pass over each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import NORMALIZATIONS, Cast, Normalization
from fp8kit.backends.reference._numpy import Array, Float32, Sink, f32, quiet, result, store
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.errors import BackendError

# Rows that one task of the parallel loops takes. Fixed, so that partial sums do not depend on the number of
# threads.
_TASK = 64
# A row is summed in this many partial sums, element j in sum j % _LANES, which SIMD registers can hold; then
# these are added in order. The order is said here: the compiler's own (fast-math) may differ between code
# that it has just made and code from its cache.
_LANES = 64
# an index that cannot be negative: else Numba asks at each element whether it counts from the end
_U = np.uint64
_STEP = _U(_LANES)
_NOTHING = np.empty(0, np.float32)
_NO_MATRIX = np.empty((0, 0), np.float32)


@quiet
def norm_fwd(
    x: ArrayView,
    weight: ArrayView | None,
    bias: ArrayView | None,
    y: ArrayView | None,
    mean: ArrayView | None,
    rstd: ArrayView,
    amax: ArrayView | None,
    cast: Cast | None,
    normalization: Normalization,
    epsilon: float,
    zero_centered_gamma: bool,
    stream: int,
) -> None:
    """``y = (x - mean) * rstd * g + bias``, or ``x * rstd * g``; see ``protocol.Kernels.norm_fwd``.

    The variance is the mean of the squared deviations (two passes over a row), not a difference of moments.
    """
    centred, gain = _centred(normalization), _gain(weight, zero_centered_gamma, x.shape[1])
    if cast is not None:
        cast.by_tensor("norm_fwd")
    sink = Sink(y, x.shape, x.dtype)
    means = mean.numpy() if mean is not None else _NOTHING
    shift = f32(bias) if bias is not None else _NOTHING
    if x.size:
        small = np.float32(epsilon / x.shape[1] if normalization == "L2Normalization" else epsilon)
        _forward(f32(x), gain, shift, sink.values, means, rstd.numpy(), small, centred)
    sink.finish(amax, cast)


@quiet
def norm_bwd(
    dy: ArrayView,
    x: ArrayView,
    weight: ArrayView | None,
    mean: ArrayView | None,
    rstd: ArrayView,
    residual: ArrayView | None,
    dx: ArrayView,
    dweight: ArrayView | None,
    dbias: ArrayView | None,
    normalization: Normalization,
    zero_centered_gamma: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """Gradients of ``norm_fwd``; see ``protocol.Kernels.norm_bwd``.

    With xhat = (x - mean) * rstd and d = dy * g: dx = rstd * (d - mean(d) - xhat * mean(d * xhat)) over each
    row, without mean(d) for RMSNorm; dweight = sum of dy * xhat, dbias = sum of dy over the rows.
    """
    centred = _centred(normalization)
    rows, columns = x.shape
    partial = np.zeros((2, -(-rows // _TASK), columns), np.float32)
    values = result(dx)
    if x.size:
        means = mean.numpy() if mean is not None else _NOTHING
        onto = f32(residual) if residual is not None else _NO_MATRIX
        gain = _gain(weight, zero_centered_gamma, columns)
        _backward(f32(dy), f32(x), gain, means, rstd.numpy(), onto, values, partial, centred)
    store(dx, values)
    if dweight is not None:
        store(dweight, np.add.reduce(partial[0], axis=0))
    if dbias is not None:
        store(dbias, np.add.reduce(partial[1], axis=0))


def _centred(normalization: str) -> bool:
    if normalization not in NORMALIZATIONS:
        raise BackendError(
            "norm", "normalization", repr(normalization), f"one of {', '.join(NORMALIZATIONS)}"
        )
    return normalization == "LayerNorm"


def _gain(weight: ArrayView | None, zero_centered: bool, columns: int) -> Float32:
    if weight is None:
        return np.full(columns, 1 / np.sqrt(columns), np.float32)
    gain = f32(weight)
    return gain + np.float32(1) if zero_centered else gain


@njit
def _total(lanes: Array) -> Any:
    total = np.float32(0)
    for lane in range(_LANES):
        total += lanes[lane]
        lanes[lane] = 0
    return total


@njit(parallel=True)
def _forward(
    x: Array, gain: Array, shift: Array, y: Array, means: Array, rstds: Array, epsilon: Any, centred: Any
) -> None:
    rows, columns = x.shape
    inverse = np.float32(1.0 / columns)
    blocks, rest = columns // _LANES, columns // _LANES * _LANES
    for task in prange((rows + _TASK - 1) // _TASK):
        lanes = np.zeros(_LANES, np.float32)
        for i in range(task * _TASK, min(rows, task * _TASK + _TASK)):
            row = x[i]
            mean = np.float32(0)
            if centred:
                for block in range(blocks):
                    for lane in range(_LANES):
                        lanes[lane] += row[_U(block) * _STEP + _U(lane)]
                for j in range(rest, columns):
                    lanes[j - rest] += row[j]
                mean = _total(lanes) * inverse
                if means.size:
                    means[i] = mean
            for block in range(blocks):
                for lane in range(_LANES):
                    d = row[_U(block) * _STEP + _U(lane)] - mean
                    lanes[lane] += d * d
            for j in range(rest, columns):
                d = row[j] - mean
                lanes[j - rest] += d * d
            rstd = np.float32(1) / np.sqrt(_total(lanes) * inverse + epsilon)
            rstds[i] = rstd
            if shift.size:
                for j in range(columns):
                    y[i, j] = (x[i, j] - mean) * rstd * gain[j] + shift[j]
            else:
                for j in range(columns):
                    y[i, j] = (x[i, j] - mean) * rstd * gain[j]


@njit(parallel=True)
def _backward(
    dy: Array,
    x: Array,
    gain: Array,
    means: Array,
    rstds: Array,
    residual: Array,
    dx: Array,
    partial: Array,
    centred: Any,
) -> None:
    rows, columns = x.shape
    inverse = np.float32(1.0 / columns)
    blocks, rest = columns // _LANES, columns // _LANES * _LANES
    for task in prange((rows + _TASK - 1) // _TASK):
        alongs, levels = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
        dweight = partial[0, task]
        dbias = partial[1, task]
        for i in range(task * _TASK, min(rows, task * _TASK + _TASK)):
            mean = means[i] if centred else np.float32(0)
            rstd = rstds[i]
            values, upstream = x[i], dy[i]
            for j in range(columns):
                dweight[j] += upstream[j] * ((values[j] - mean) * rstd)
                dbias[j] += upstream[j]
            for block in range(blocks):
                for lane in range(_LANES):
                    at = _U(block) * _STEP + _U(lane)
                    d = upstream[at] * gain[at]
                    alongs[lane] += d * ((values[at] - mean) * rstd)
                    levels[lane] += d
            for j in range(rest, columns):
                d = upstream[j] * gain[j]
                alongs[j - rest] += d * ((values[j] - mean) * rstd)
                levels[j - rest] += d
            along, level = _total(alongs) * inverse, _total(levels) * inverse
            if not centred:
                level = np.float32(0)
            if residual.size:
                for j in range(columns):
                    xhat = (x[i, j] - mean) * rstd
                    dx[i, j] = rstd * (dy[i, j] * gain[j] - level - xhat * along) + residual[i, j]
            else:
                for j in range(columns):
                    xhat = (x[i, j] - mean) * rstd
                    dx[i, j] = rstd * (dy[i, j] * gain[j] - level - xhat * along)
