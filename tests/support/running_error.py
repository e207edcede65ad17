"""Float64 arithmetic that carries a bound on the error of the float32 computation it stands for.

``R(v, e)`` says: the computed value lies within ``e`` of ``v``. Each operation adds the first-order
propagation of its operands' bounds and its own float32 roundings (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, section 3.3, running error analysis). A monotone function, such as rounding to a narrow
format, is bounded by its values at both ends, so that a value that rounds the other way is allowed where, and
only where, it can.
"""

from __future__ import annotations

import math

import numpy as np

from fp8kit import codec, formats
from fp8kit.testing.compare import assert_close, epsilon, relative_error

U = 2.0**-23  # two float32 roundings an operation


NARROW_LIMIT = 2.0**-2 / math.sqrt(6)


class R:
    """A float64 array ``v`` and its bound ``e``."""

    __array_priority__ = 100

    limit = 2.0**-4  # of the error's 2-norm, relative to the values': see ``assert_within``

    def __init__(self, v, e=0.0):
        self.v = np.asarray(v, np.float64)
        self.e = np.broadcast_to(np.asarray(e, np.float64), self.v.shape)

    def _with(self, v, e):
        return R(v, e + U * np.abs(v))

    def __add__(self, other):
        other = lift(other)
        return self._with(self.v + other.v, self.e + other.e + U * (np.abs(self.v) + np.abs(other.v)))

    def __sub__(self, other):
        return self + lift(other) * -1.0

    def __mul__(self, other):
        other = lift(other)
        return self._with(
            self.v * other.v, np.abs(self.v) * other.e + self.e * np.abs(other.v) + self.e * other.e
        )

    __radd__, __rmul__ = __add__, __mul__

    @property
    def T(self):
        return R(self.v.T, self.e.T)

    def __getitem__(self, index):
        return R(self.v[index], self.e[index])

    def reshape(self, *shape):
        return R(self.v.reshape(*shape), self.e.reshape(*shape))

    def transpose(self, *axes):
        return R(self.v.transpose(*axes), self.e.transpose(*axes))

    def __matmul__(self, other):
        a, b = np.abs(self.v), np.abs(other.v)
        terms = self.v.shape[-1]
        return R(self.v @ other.v, a @ other.e + self.e @ b + self.e @ other.e + (terms + 4) * U * (a @ b))

    def sum(self, axis, keepdims=False):
        terms = self.v.shape[axis]
        bound = self.e.sum(axis, keepdims=keepdims) + (terms + 4) * U * np.abs(self.v).sum(
            axis, keepdims=keepdims
        )
        return R(self.v.sum(axis, keepdims=keepdims), bound)

    def mean(self, axis=-1):
        return self.sum(axis, True) * (1 / self.v.shape[axis])

    def monotone(self, f):
        """f of the value, f nondecreasing and exact."""
        middle = f(self.v)
        return R(middle, np.maximum(np.abs(f(self.v + self.e) - middle), np.abs(middle - f(self.v - self.e))))

    def smooth(self, f, slope, roundings=16):
        """f of the value, |f'| <= slope, computed with that many float32 roundings relative to |value| +
        |f|."""
        out = f(self.v)
        return R(out, slope * self.e + roundings * U * (np.abs(out) + np.abs(self.v)))

    def rounded(self, dtype):
        """Stored in ``dtype``: exact where the bound leaves no doubt. A bound may reach beyond float16's
        range where no value does."""
        wide = (
            self.e
            + epsilon(dtype) * (np.abs(self.v) + self.e)
            + (2.0**-25 if dtype == "float16" else 2.0**-149)
        )
        if dtype == "float32":
            return R(self.v, wide)
        with np.errstate(over="ignore"):
            stored = self.monotone(
                lambda v: v.astype(np.float32).astype(formats.dtype(dtype).numpy).astype(np.float64)
            )
        stored = R(stored.v, np.where(np.isfinite(stored.e), stored.e, wide))
        stored.limit = NARROW_LIMIT
        return stored

    def rsqrt(self):
        out = 1 / np.sqrt(self.v)
        return R(out, out**3 / 2 * self.e * 1.1 + 8 * U * out)


def lift(value):
    """A number or an array as an exact ``R``."""
    return value if isinstance(value, R) else R(value)


def quantised(x, scale, fmt):
    """What FP8 keeps of x: decode(encode(x * scale)) / scale. ``scale``: exact float32 number, or an ``R`` of
    one element."""
    scale = lift(scale)
    inverse = R(1 / scale.v, 1.1 * scale.e / scale.v**2 + U / scale.v)
    return (x * scale).monotone(lambda v: codec.decode(codec.encode(v, fmt), fmt)) * inverse


def current_scale(x, fmt):
    """Current scaling's scale of x: fp8_max / amax."""
    at = np.argmax(np.abs(x.v))
    amax, doubt = np.abs(x.v).flat[at], x.e.max()
    return R(fmt.max / amax, fmt.max / amax**2 * doubt * 1.1 + U * fmt.max / amax)


def quantised_blocks(x, tile, fmt, power_2):
    """What FP8 keeps of a matrix whose tiles each have current scaling's scale, rounded down to a power of
    two with ``power_2``.

    Where the doubt about an amax reaches over a power of two, several scales are possible. What is normal at
    the least of them rounds alike at all; what is subnormal there moves by two of its steps at most (one of
    rounding, one of a doubtful value), which the bound takes in. The value is that of the likeliest scale,
    the one of the values as they are: a wide bound must not make the reference coarse.
    """
    starts = [np.arange(0, n, t) for n, t in zip(x.v.shape, tile, strict=True)]

    def largest(a):
        """Of each tile, at every element of it."""
        for axis, (start, n) in enumerate(zip(starts, x.v.shape, strict=True)):
            a = np.repeat(np.maximum.reduceat(a, start, axis), np.diff([*start, n]), axis)
        return a

    def power_below(top):
        return 2.0 ** np.floor(np.log2(fmt.max / top))

    size = np.abs(x.v)
    most, amax, least = largest(size + x.e), largest(size), largest(size - x.e)
    zero = most == 0
    if not power_2:
        amax, doubt = np.where(zero, fmt.max, amax), largest(x.e)
        bound = fmt.max / amax**2 * doubt * 1.1 + U * fmt.max / amax
        return quantised(x, R(fmt.max / amax, np.where(zero, 0, bound)), fmt)
    low = power_below(np.where(zero, fmt.max, most))
    kept = quantised(x, low, fmt)
    sure = zero | ((least > 0) & (low == power_below(np.where(least > 0, least, fmt.max))))
    subnormal = (size - x.e) * low < fmt.smallest_normal
    e_low = kept.e + subnormal * 2 * fmt.smallest_subnormal / low
    likely = np.where(amax, quantised(x, power_below(np.where(amax, amax, fmt.max)), fmt).v, kept.v)
    return R(np.where(sure, kept.v, likely), np.where(sure, kept.e, e_low + np.abs(likely - kept.v)))


def norm(x, weight, bias, kind, eps, zero_centered=False):
    """(y, xhat, rstd) of LayerNorm or RMSNorm over the last axis; ``weight``, ``bias`` float64 arrays."""
    centred = x - x.mean() if kind == "LayerNorm" else x
    rstd = ((centred * centred).mean() + eps).rsqrt()
    xhat = centred * rstd
    y = xhat * (weight + (1.0 if zero_centered else 0.0))
    return (y + bias if bias is not None else y), xhat, rstd


def norm_grad(dy, xhat, rstd, weight, kind, zero_centered=False):
    """(dx, dweight, dbias) of ``norm``."""
    g = dy * (weight + (1.0 if zero_centered else 0.0))
    dx = g - xhat * (g * xhat).mean()
    if kind == "LayerNorm":
        dx = dx - g.mean()
    return dx * rstd, (dy * xhat).sum(0), dy.sum(0)


_SQRT = math.sqrt(2 / math.pi)


def _gelu(v):
    return 0.5 * v * (1 + np.tanh(_SQRT * (v + 0.044715 * v**3)))


def _gelu_slope(v):
    t = np.tanh(_SQRT * (v + 0.044715 * v**3))
    return 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * _SQRT * (1 + 3 * 0.044715 * v * v)


def _sigmoid(v):
    return 1 / (1 + np.exp(-v))


def _silu_slope(v):
    s = _sigmoid(v)
    return s * (1 + v * (1 - s))


def _sigmoid_slope(v):
    s = _sigmoid(v)
    return s * (1 - s)


# value, derivative, bound of |derivative|, bound of |second derivative|
_SMOOTH = {
    "gelu": (_gelu, _gelu_slope, 1.13, 0.8),
    "silu": (lambda v: v * _sigmoid(v), _silu_slope, 1.1, 0.5),
    "sigmoid": (_sigmoid, _sigmoid_slope, 0.25, 0.1),
}
_FIRST = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
}  # what a gated activation does to its first half


def _where(x, holds, edge):
    """1 where x is on the side that ``holds``, 0 elsewhere; in doubt where it may lie on both sides of
    ``edge``."""
    return R(holds(x.v).astype(float), np.where(np.abs(np.abs(x.v) - edge) <= x.e, 1.0, 0.0))


def _curve(x, kind, params):
    """(value, slope) of a one-input curve."""
    if kind == "relu":
        return x.monotone(lambda v: np.maximum(v, 0)), _where(x, lambda v: v > 0, 0.0)
    if kind == "srelu":
        top = x.monotone(lambda v: np.maximum(v, 0))
        return top * top, top * 2.0
    if kind in _SMOOTH:
        value, slope, first, second = _SMOOTH[kind]
        return x.smooth(value, first), x.smooth(slope, second)
    # x sigmoid(alpha x) is silu(alpha x) / alpha
    limit, alpha = params[:2] if kind == "clamped" else (np.inf, 1.702)
    held = x.monotone(lambda v: np.minimum(v, limit))
    value = held.smooth(lambda v: v * _sigmoid(alpha * v), 1.1)
    slope = held.smooth(lambda v: _silu_slope(alpha * v), 0.5 * alpha)
    return value, slope if kind == "qgelu" else slope * _where(x, lambda v: v <= limit, limit)


def activation(x, kind, params=()):
    """(y, function dy -> dx) of an activation of the kernel contract."""
    if kind not in _FIRST:
        value, slope = _curve(x, kind, params)
        return value, lambda dy: dy * slope
    half = x.v.shape[1] // 2
    second, passes = x[:, half:], 1.0
    value, slope = _curve(x[:, :half], _FIRST[kind], params)
    if kind == "clamped_swiglu":
        limit, _, offset = params
        passes = _where(second, lambda v: np.abs(v) <= limit, limit)
        second = second.monotone(lambda v: np.clip(v, -limit, limit)) + offset

    def back(dy):
        first, other = dy * second * slope, dy * value * passes
        return R(np.concatenate([first.v, other.v], 1), np.concatenate([first.e, other.e], 1))

    return value * second, back


def assert_within(what, got, r):
    """``assert_close`` with the bound as slack.

    Where the worst case of a deep chain is large and says little, the 2-norm of the error must also stay
    below 2**-4 of the values' own: below what rounding to E5M2 costs (step 2**-2 relative, step / sqrt(12) in
    the mean), so that a missing or doubled cast would show. Where results are stored in 16 bits, their
    rounding moves what is cast to FP8 further on, and each code may be rounded anew: there the limit is the
    distance of two independent roundings to E5M2, sqrt(2) times the cost of one.
    """
    assert np.isfinite(r.v).all(), f"{what}: the reference is not finite"
    assert_close(what, got, r.v, "float64", r.e)
    if np.median(r.e) > 0.1 * np.abs(r.v).max():
        assert relative_error(got, r.v) < r.limit, f"{what}: relative error {relative_error(got, r.v):.3g}"
