"""Activations: GELU, SiLU, ReLU and SwiGLU, forward and backward.

All but ReLU are one formula, ``x * sigmoid(z(x))`` with ``z(x) = x (a + b x^2)``: SiLU has a = 1, b = 0; GELU in its tanh form (Hendrycks &
Gimpel 2016) a = 2 sqrt(2 / pi), b = 0.044715 a, since (1 + tanh(u)) / 2 = sigmoid(2 u). The sigmoid keeps its relative accuracy where
1 + tanh(u) cancels, at large negative x. SwiGLU (Shazeer 2020) multiplies the SiLU of the first half of the columns by the second half.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Cast
from fp8kit.backends.reference._numpy import Array, Float32, Sink, column_sum, f32, quiet, store
from fp8kit.backends.reference.exponential import exp32
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.errors import BackendError, expected

_ONE, _THREE = np.float32(1), np.float32(3)
_GELU = 2 * math.sqrt(2 / math.pi)
_GATES = {  # (a, b) of z(x)
    "gelu": (np.float32(_GELU), np.float32(0.044715 * _GELU)),
    "silu": (np.float32(1), np.float32(0)),
    "swiglu": (np.float32(1), np.float32(0)),
}
ACTIVATIONS = ("relu", *_GATES)


@quiet
def act_fwd(x: ArrayView, bias: ArrayView | None, y: ArrayView | None, amax: ArrayView | None, cast: Cast | None,
            activation: str, stream: int) -> None:
    """``y = activation(x + bias)``; see ``protocol.Kernels.act_fwd``."""
    _known(activation)
    rows, columns = x.shape
    sink = Sink(y, (rows, columns // 2 if activation == "swiglu" else columns), x.dtype)
    if activation == "relu":
        np.maximum(f32(x) + _shift(bias, columns), np.float32(0), out=sink.values)
    else:
        _forward(f32(x), _shift(bias, columns), sink.values, *_GATES[activation])
    sink.finish(amax, cast)


@quiet
def act_bwd(dy: ArrayView, x: ArrayView, bias: ArrayView | None, dx: ArrayView | None, dbias: ArrayView | None,
            amax: ArrayView | None, cast: Cast | None, activation: str, workspace: ArrayView | None, stream: int) -> None:
    """Gradients of ``act_fwd``; see ``protocol.Kernels.act_bwd``."""
    _known(activation)
    sink = Sink(dx, x.shape, x.dtype)
    if activation == "relu":
        np.multiply(f32(dy), f32(x) + _shift(bias, x.shape[1]) > 0, out=sink.values)
    else:
        _backward(f32(dy), f32(x), _shift(bias, x.shape[1]), sink.values, *_GATES[activation])
    sink.finish(amax, cast)
    if dbias is not None:
        store(dbias, column_sum(f32(sink.view)))


def act_bwd_workspace(rows: int, columns: int) -> int:
    """No workspace on the CPU."""
    return 0


def _known(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise BackendError(expected("activation", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}"))


def _shift(bias: ArrayView | None, columns: int) -> Float32:
    return np.zeros(columns, np.float32) if bias is None else f32(bias)


@njit(parallel=True, fastmath={"contract"})
def _forward(x: Array, shift: Array, y: Array, a: Any, b: Any) -> None:
    """y = u sigmoid(z(u)), u = x + shift; multiplied by the second half of u where x is twice as wide as y."""
    n = y.shape[1]
    for i in prange(y.shape[0]):
        for j in range(n):
            u = x[i, j] + shift[j]
            y[i, j] = u / (_ONE + exp32(-u * (a + b * u * u)))
        if x.shape[1] != n:
            for j in range(n):
                y[i, j] *= x[i, n + j] + shift[n + j]


@njit(parallel=True, fastmath={"contract"})
def _backward(dy: Array, x: Array, shift: Array, dx: Array, a: Any, b: Any) -> None:
    """dx = dy (g + u g (1 - g) z'(u)) with g = sigmoid(z(u)), z' = a + 3 b u^2; with a second half v of u: times v, and dy u g for v."""
    n = dy.shape[1]
    for i in prange(dy.shape[0]):
        if x.shape[1] == n:
            for j in range(n):
                u = x[i, j] + shift[j]
                square = u * u
                g = _ONE / (_ONE + exp32(-u * (a + b * square)))
                dx[i, j] = dy[i, j] * g * (_ONE + u * (_ONE - g) * (a + _THREE * b * square))
        else:
            for j in range(n):
                u = x[i, j] + shift[j]
                g = _ONE / (_ONE + exp32(-u * (a + b * u * u)))
                dx[i, n + j] = dy[i, j] * u * g
                dx[i, j] = dy[i, j] * (x[i, n + j] + shift[n + j]) * g * (_ONE + u * (_ONE - g) * (a + _THREE * b * u * u))
