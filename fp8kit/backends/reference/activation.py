"""Activations (``backends.activation`` has their formulas), forward and backward.

Two curves make them all. The smooth ones are ``f(u) sigmoid(z(u))`` with ``z(u) = u (a + b u^2)`` and f(u) =
u, or 1 for GLU: GELU in its tanh form has a = 2 sqrt(2 / pi), b = 0.044715 a, since (1 + tanh(t)) / 2 =
sigmoid(2 t). The sigmoid keeps its relative accuracy where 1 + tanh(t) cancels, at large negative u. The
others are powers of max(u, 0). Gated ones multiply the curve of the first half of the columns by the second
half.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.activation import ACTIVATIONS, known
from fp8kit.backends.protocol import Cast
from fp8kit.backends.reference._numpy import Array, Float32, Sink, column_sum, f32, quiet, store
from fp8kit.backends.reference.block import block_quantize
from fp8kit.backends.reference.exponential import exp32
from fp8kit.backends.reference.quantize import quantize_transpose
from fp8kit.backends.reference.threads import njit, prange

_ZERO, _ONE, _THREE = np.float32(0), np.float32(1), np.float32(3)
_GELU = 2 * math.sqrt(2 / math.pi)


class _Smooth(NamedTuple):
    """f(c) sigmoid(c (a + b c^2)) with c = min(u, limit); a second half v becomes d + offset, d = v held in
    [-limit, limit]."""

    a: np.float32
    b: np.float32 = _ZERO
    linear: bool = True  # f(c) is c, else 1
    limit: np.float32 = np.float32(np.inf)
    offset: np.float32 = _ZERO


_GELUS, _SILU, _QGELU = (
    _Smooth(np.float32(_GELU), np.float32(0.044715 * _GELU)),
    _Smooth(_ONE),
    _Smooth(np.float32(1.702)),
)
_SMOOTH = {
    "gelu": _GELUS,
    "geglu": _GELUS,
    "silu": _SILU,
    "swiglu": _SILU,
    "qgelu": _QGELU,
    "qgeglu": _QGELU,
    "glu": _Smooth(_ONE, linear=False),
}
_SQUARED = {"relu": False, "reglu": False, "srelu": True, "sreglu": True}


def _curve(activation: str, params: tuple[float, ...]) -> _Smooth | None:
    """Returns the smooth curve of an activation, None for a power of max(u, 0). BackendError as ``known``."""
    known(activation, params)
    if activation == "clamped_swiglu":
        limit, alpha, offset = (np.float32(value) for value in params)
        return _Smooth(alpha, limit=limit, offset=offset)
    return _SMOOTH.get(activation)


@quiet
def act_fwd(
    x: ArrayView,
    bias: ArrayView | None,
    y: ArrayView | None,
    amax: ArrayView | None,
    cast: Cast | None,
    activation: str,
    params: tuple[float, ...],
    stream: int,
) -> None:
    """``y = activation(x + bias)``; see ``protocol.Kernels.act_fwd``."""
    curve = _curve(activation, params)
    rows, columns = x.shape
    sink = Sink(y, (rows, columns // ACTIVATIONS[activation].parts), x.dtype)
    if curve is not None:
        _forward(f32(x), _shift(bias, columns), sink.values, *curve)
    else:
        _ramp_forward(f32(x) + _shift(bias, columns), sink.values, _SQUARED[activation])
    _finish(sink, amax, cast)


@quiet
def act_bwd(
    dy: ArrayView,
    x: ArrayView,
    bias: ArrayView | None,
    dx: ArrayView | None,
    dbias: ArrayView | None,
    amax: ArrayView | None,
    cast: Cast | None,
    second: Cast | None,
    activation: str,
    params: tuple[float, ...],
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """Gradients of ``act_fwd``; see ``protocol.Kernels.act_bwd``."""
    curve = _curve(activation, params)
    sink = Sink(dx, x.shape, x.dtype)
    if curve is not None:
        _backward(f32(dy), f32(x), _shift(bias, x.shape[1]), sink.values, *curve)
    else:
        _ramp_backward(f32(dy), f32(x) + _shift(bias, x.shape[1]), sink.values, _SQUARED[activation])
    _finish(sink, amax, None if second is not None else cast)
    if cast is not None and second is not None:
        for start, own in ((0, cast), (dy.shape[1], second)):
            quantize_transpose(sink.view.slice(1, start, dy.shape[1]), own, None, None, 0)
    if dbias is not None:
        store(dbias, column_sum(f32(sink.view)))


def _finish(sink: Sink, amax: ArrayView | None, cast: Cast | None) -> None:
    """Store the result, and cast it: by one scale, or by blocks."""
    if cast is None or cast.tile is None or cast.rule is None:
        sink.finish(amax, cast)
        return
    sink.finish(amax, None)
    made = cast.q, cast.scale_inv, cast.q_t, cast.scale_inv_t
    block_quantize(sink.view, *made, cast.format, cast.tile, cast.rule.power_2, cast.rule.epsilon, 0)


def _shift(bias: ArrayView | None, columns: int) -> Float32:
    return np.zeros(columns, np.float32) if bias is None else f32(bias)


def _ramp_forward(u: Float32, y: Float32, squared: bool) -> None:
    """y = max(u, 0), squared or not; multiplied by the second half of u where it is twice as wide as y."""
    n = y.shape[1]
    np.maximum(u[:, :n], _ZERO, out=y)
    if squared:
        np.multiply(y, y, out=y)
    if u.shape[1] != n:
        np.multiply(y, u[:, n:], out=y)


def _ramp_backward(dy: Float32, u: Float32, dx: Float32, squared: bool) -> None:
    """dx = dy where u > 0, else 0, or dy 2 max(u, 0); with a second half v of u: times v, and dy times the
    value for v."""
    n = dy.shape[1]
    gate, first = u[:, :n], dx[:, :n]
    value = np.maximum(gate, _ZERO) if squared or u.shape[1] != n else gate
    np.multiply(dy, value + value if squared else gate > 0, out=first)
    if u.shape[1] != n:
        np.multiply(first, u[:, n:], out=first)
        np.multiply(dy, value * value if squared else value, out=dx[:, n:])


@njit(parallel=True, fastmath={"contract"})
def _forward(x: Array, shift: Array, y: Array, a: Any, b: Any, linear: Any, limit: Any, offset: Any) -> None:
    """y = the ``_Smooth`` curve of u = x + shift; multiplied by the second half of u where x is twice as wide
    as y."""
    n = y.shape[1]
    for i in prange(y.shape[0]):
        for j in range(n):
            u = min(x[i, j] + shift[j], limit)
            y[i, j] = (u if linear else _ONE) / (_ONE + exp32(-u * (a + b * u * u)))
        if x.shape[1] != n:
            for j in range(n):
                y[i, j] *= min(max(x[i, n + j] + shift[n + j], -limit), limit) + offset


@njit(parallel=True, fastmath={"contract"})
def _backward(
    dy: Array, x: Array, shift: Array, dx: Array, a: Any, b: Any, linear: Any, limit: Any, offset: Any
) -> None:
    """dx = dy (f' g + f g (1 - g) z'(u)) with f = u or 1, g = sigmoid(z(u)), z' = a + 3 b u^2; with a second
    half v of u: times v, and dy f g for v. 0 for what lies beyond the limit."""
    n = dy.shape[1]
    lead = _ONE if linear else _ZERO
    for i in prange(dy.shape[0]):
        if x.shape[1] == n:
            for j in range(n):
                u = x[i, j] + shift[j]
                square = u * u
                g = _ONE / (_ONE + exp32(-u * (a + b * square)))
                dx[i, j] = (
                    dy[i, j] * g * (lead + (u if linear else _ONE) * (_ONE - g) * (a + _THREE * b * square))
                )
        else:
            for j in range(n):
                whole = x[i, j] + shift[j]
                v = x[i, n + j] + shift[n + j]
                u = min(whole, limit)
                g = _ONE / (_ONE + exp32(-u * (a + b * u * u)))
                f = u if linear else _ONE
                held = min(max(v, -limit), limit)
                slope = g * (lead + f * (_ONE - g) * (a + _THREE * b * u * u))
                dx[i, n + j] = _ZERO if abs(v) > limit else dy[i, j] * f * g
                dx[i, j] = _ZERO if whole > limit else dy[i, j] * (held + offset) * slope
