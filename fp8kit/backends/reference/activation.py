"""Activations: GELU, SiLU, ReLU and SwiGLU, forward and backward.

NumPy's float32 exp uses SIMD and a compiled scalar loop does not, so these are NumPy expressions over blocks that stay in cache.
GELU and SiLU are one formula, ``x * sigmoid(z(x))`` with ``z(x) = x (a + b x^2)``: SiLU has a = 1, b = 0; GELU in its tanh form (Hendrycks
& Gimpel 2016) a = 2 sqrt(2 / pi), b = 0.044715 a, since (1 + tanh(u)) / 2 = sigmoid(2 u). The sigmoid keeps its relative accuracy where
1 + tanh(u) cancels, at large negative x.
"""

from __future__ import annotations

import math

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Cast
from fp8kit.backends.reference._numpy import Float32, Sink, blocks, column_sum, f32, quiet, store
from fp8kit.errors import BackendError, expected

_ONE = np.float32(1)
_GATES = {  # (a, b) of z(x)
    "gelu": (np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715 * 2 * math.sqrt(2 / math.pi))),
    "silu": (np.float32(1), np.float32(0)),
}
ACTIVATIONS = ("gelu", "silu", "relu", "swiglu")


@quiet
def act_fwd(x: ArrayView, bias: ArrayView | None, y: ArrayView | None, amax: ArrayView | None, cast: Cast | None,
            activation: str, stream: int) -> None:
    """``y = activation(x + bias)``; see ``protocol.Kernels.act_fwd``."""
    _known(activation)
    rows, columns = x.shape
    shift = None if bias is None else f32(bias)
    sink = Sink(y, (rows, columns // 2 if activation == "swiglu" else columns), x.dtype)
    source = f32(x)
    for part in blocks(rows, columns):
        block = source[part] if shift is None else source[part] + shift
        _forward(block, sink.values[part], activation)
    sink.finish(amax, cast)


@quiet
def act_bwd(dy: ArrayView, x: ArrayView, bias: ArrayView | None, dx: ArrayView | None, dbias: ArrayView | None,
            amax: ArrayView | None, cast: Cast | None, activation: str, workspace: ArrayView | None, stream: int) -> None:
    """Gradients of ``act_fwd``; see ``protocol.Kernels.act_bwd``."""
    _known(activation)
    rows, columns = x.shape
    shift = None if bias is None else f32(bias)
    sink = Sink(dx, x.shape, x.dtype)
    source, upstream = f32(x), f32(dy)
    for part in blocks(rows, columns):
        block = source[part] if shift is None else source[part] + shift
        _backward(upstream[part], block, sink.values[part], activation)
    sink.finish(amax, cast)
    if dbias is not None:
        store(dbias, column_sum(f32(sink.view)))


def act_bwd_workspace(rows: int, columns: int) -> int:
    """No workspace on the CPU."""
    return 0


def _known(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise BackendError(expected("activation", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}"))


def _gate(x: Float32, activation: str) -> tuple[Float32, Float32]:
    """sigmoid(z) and x^2 for a block."""
    a, b = _GATES[activation]
    square = x * x
    gate = square * -b
    gate -= a
    gate *= x
    np.exp(gate, out=gate)
    gate += _ONE
    np.divide(_ONE, gate, out=gate)
    return gate, square


def _forward(x: Float32, y: Float32, activation: str) -> None:
    if activation == "relu":
        np.maximum(x, np.float32(0), out=y)
    elif activation == "swiglu":
        half = x.shape[1] // 2
        _forward(x[:, :half], y, "silu")
        y *= x[:, half:]
    else:
        gate, _ = _gate(x, activation)
        np.multiply(gate, x, out=y)


def _backward(dy: Float32, x: Float32, dx: Float32, activation: str) -> None:
    if activation == "relu":
        np.multiply(dy, x > 0, out=dx)
    elif activation == "swiglu":
        half = x.shape[1] // 2
        left, right = x[:, :half], x[:, half:]
        silu = np.empty_like(dy)
        _forward(left, silu, "silu")
        _backward(dy * right, left, dx[:, :half], "silu")
        np.multiply(dy, silu, out=dx[:, half:])
    else:
        # d/dx [x g] = g + x g (1 - g) z'(x) with g = sigmoid(z), z' = a + 3 b x^2
        a, b = _GATES[activation]
        gate, slope = _gate(x, activation)
        slope *= np.float32(3) * b
        slope += a
        slope *= x
        rest = _ONE - gate
        slope *= rest
        slope += _ONE
        slope *= gate
        np.multiply(dy, slope, out=dx)
