"""Linear layers over ``running_error``: what a module computes, its quantisation simulated with the codec."""

from __future__ import annotations

import numpy as np

from fp8kit import formats
from tests.nn.running_error import R, current_scale, quantised


class Quantiser:
    """How the operands of one GEMM become FP8: ``scales`` None for current scaling, else {"x": .., "w": .., "g": ..} of delayed scaling.

    ``narrow``: FP8 tensor cores add up in 14 bits (Hopper), so each instruction of 32 products may lose 2**-13 of the terms' magnitudes.
    """

    def __init__(self, scales=None, g_format=formats.E5M2, narrow=False):
        self.scales = scales
        self.narrow = narrow
        self.formats = {"x": formats.E4M3, "w": formats.E4M3, "g": g_format}

    def __call__(self, operand, value):
        fmt = self.formats[operand]
        scale = current_scale(value, fmt) if self.scales is None else float(self.scales[operand])
        return quantised(value, scale, fmt)

    def times(self, a, b):
        """The FP8 product a @ b."""
        product = a @ b
        lost = -(-a.v.shape[-1] // 32) * 2.0**-13 if self.narrow else 0.0
        return R(product.v, product.e + lost * (np.abs(a.v) @ np.abs(b.v)))


class Product:
    """y = x W^T (+ b) and its gradients; ``quantiser`` None in high precision. ``w``: float64 (N, K)."""

    def __init__(self, x, w, quantiser):
        self.quantiser = quantiser
        self.times = (lambda a, b: a @ b) if quantiser is None else quantiser.times
        w = R(w)
        self.x, self.w = (x, w) if quantiser is None else (quantiser("x", x), quantiser("w", w))

    def forward(self, bias=None):
        y = self.times(self.x, self.w.T)
        return y if bias is None else y + bias

    def backward(self, g):
        """(dx, dw, db)."""
        q = g if self.quantiser is None else self.quantiser("g", g)
        return self.times(q, self.w), self.times(q.T, self.x), g.sum(0)


def scales_of(module, gemm=0):
    """The scales that a delayed-scaling module will quantise with next."""
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    return {"x": host(forward.scale)[3 * gemm], "w": host(forward.scale)[3 * gemm + 1], "g": host(backward.scale)[2 * gemm]}


def host(array):
    """A NumPy copy of an array of any device."""
    return array.get() if hasattr(array, "get") else np.array(array)


def f64(tensor):
    """A tensor's or view's values as float64."""
    return np.asarray(tensor.numpy()).astype(np.float64)
