"""Linear layers over ``running_error``: what a module computes, its quantisation simulated with the codec."""

from __future__ import annotations

import numpy as np

from fp8kit import formats
from tests.support.running_error import R, current_scale, quantised, quantised_blocks


class Quantiser:
    """How the operands of one GEMM become FP8: ``scales`` None for current scaling, else {"x": .., "w": ..,
    "g": ..} of delayed scaling.

    ``blocks``: a scale for each tile instead, {"x": (tile, power_2), ..}; a tile lies in the orientation in
    which the operand is multiplied, 0 is all of its rows or columns. ``narrow``: FP8 tensor cores add up in
    14 bits (Hopper). Each instruction of 32 products cuts twice, aligning the products with the largest of
    them and their sum with the accumulator, and may lose 2**-13 of the terms' magnitudes each time.
    """

    def __init__(self, scales=None, g_format=formats.E5M2, narrow=False, blocks=None):
        self.scales = scales
        self.blocks = blocks
        self.narrow = narrow
        self.formats = {"x": formats.E4M3, "w": formats.E4M3, "g": g_format}

    def __call__(self, operand, value):
        fmt = self.formats[operand]
        if self.blocks is not None:
            tile, power_2 = self.blocks[operand]
            tile = tuple(own or whole for own, whole in zip(tile, value.v.shape, strict=True))
            return quantised_blocks(value, tile, fmt, power_2)
        scale = current_scale(value, fmt) if self.scales is None else float(self.scales[operand])
        return quantised(value, scale, fmt)

    def times(self, a, b):
        """The FP8 product a @ b."""
        product = a @ b
        lost = -(-a.v.shape[-1] // 32) * 2 * 2.0**-13 if self.narrow else 0.0
        return R(product.v, product.e + lost * (np.abs(a.v) @ np.abs(b.v)))


class Product:
    """y = x W^T (+ b) and its gradients; ``quantiser`` None in high precision. ``w``: float64 (N, K)."""

    def __init__(self, x, w, quantiser):
        self.cast = (lambda operand, value: value) if quantiser is None else quantiser
        self.times = (lambda a, b: a @ b) if quantiser is None else quantiser.times
        self.x, self.w = x, R(w)

    def forward(self, bias=None):
        y = self.times(self.cast("x", self.x), self.cast("w", self.w).T)
        return y if bias is None else y + bias

    def backward(self, g):
        """(dx, dw, db)."""
        dx = self.times(self.cast("g", g), self.cast("w", self.w.T).T)
        return dx, self.times(self.cast("g", g.T), self.cast("x", self.x.T).T), g.sum(0)


def scales_of(module, gemm=0):
    """The scales that a delayed-scaling module will quantise with next."""
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    return {
        "x": host(forward.scale)[3 * gemm],
        "w": host(forward.scale)[3 * gemm + 1],
        "g": host(backward.scale)[2 * gemm],
    }


def host(array):
    """A NumPy copy of an array of any device."""
    if hasattr(array, "get"):
        return array.get()
    return np.array(array.numpy() if hasattr(array, "numpy") else array)


def f64(tensor):
    """A tensor's or view's values as float64."""
    return np.asarray(tensor.numpy()).astype(np.float64)


def bits(state):
    return {
        name: np.asarray(value.numpy() if hasattr(value, "numpy") else value).tobytes()
        for name, value in state.items()
    }
