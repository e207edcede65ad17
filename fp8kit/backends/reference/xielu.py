"""xIELU and its gradients; the formula is in ``backends.activation``."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Float32, blocks, f32, quiet, result, store


def _softplus(alpha: np.float64) -> float:
    """log(1 + exp(alpha)), without overflow."""
    return float(max(alpha, 0.0) + np.log1p(np.exp(-abs(alpha))))


def _numbers(alpha_p: ArrayView, alpha_n: ArrayView, beta: float) -> tuple[np.float32, np.float32]:
    """p and n, rounded once."""
    own = (view.numpy().astype(np.float64)[0] for view in (alpha_p, alpha_n))
    p, n = map(_softplus, own)
    return np.float32(p), np.float32(np.float32(beta) + np.float64(n))


def _curved(u: Float32, eps: float) -> Float32:
    """expm1(min(u, eps))."""
    least = np.minimum(u, np.float32(eps))
    return np.expm1(least, out=least)


def _shifted(x: ArrayView, bias: ArrayView | None, part: slice) -> Float32:
    u = x.numpy()[part].astype(np.float32)
    if bias is not None:
        u += f32(bias)
    return u


@quiet
def xielu_fwd(
    x: ArrayView,
    bias: ArrayView | None,
    alpha_p: ArrayView,
    alpha_n: ArrayView,
    y: ArrayView,
    params: tuple[float, ...],
    stream: int,
) -> None:
    """``y = xielu(x + bias)``; see ``protocol.Kernels.xielu_fwd``."""
    beta, eps = params
    p, n = _numbers(alpha_p, alpha_n, beta)
    values, slope = result(y), np.float32(beta)
    for part in blocks(*x.shape):
        u = _shifted(x, bias, part)
        values[part] = np.where(u > 0, p * u * u, n * (_curved(u, eps) - u)) + slope * u
    store(y, values)


@quiet
def xielu_bwd(
    dy: ArrayView,
    x: ArrayView,
    bias: ArrayView | None,
    alpha_p: ArrayView,
    alpha_n: ArrayView,
    dx: ArrayView,
    dalpha_p: ArrayView,
    dalpha_n: ArrayView,
    params: tuple[float, ...],
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """Gradients of ``xielu_fwd``; see ``protocol.Kernels.xielu_bwd``."""
    beta, eps = params
    p, n = _numbers(alpha_p, alpha_n, beta)
    values, slope = result(dx), np.float32(beta)
    sums = np.zeros(2)
    for part in blocks(*x.shape):
        u, g = _shifted(x, bias, part), dy.numpy()[part].astype(np.float32)
        positive, curved = u > 0, _curved(u, eps)
        values[part] = g * (np.where(positive, 2 * p * u, n * curved) + slope)
        sums[0] += np.where(positive, g * u * u, 0).sum(dtype=np.float64)
        sums[1] += np.where(positive, 0, g * (curved - u)).sum(dtype=np.float64)
    store(dx, values)
    for out, alpha, total in ((dalpha_p, alpha_p, sums[0]), (dalpha_n, alpha_n, sums[1])):
        slope_of = 1 / (1 + np.exp(-alpha.numpy().astype(np.float64)))  # of softplus
        store(out, (total * slope_of).astype(np.float32))
