"""Scales of lines: rows or columns of a matrix that are scaled as a whole."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import blocks, f32, quiet, result, store

_LEAST, _MOST = np.float32(2.0**-100), np.float32(2.0**100)


@quiet
def line_scales(
    x: ArrayView, bias: ArrayView | None, scales: ArrayView, axis: int, power_2: bool, stream: int
) -> None:
    """Each line's largest magnitude, or the power of two below; see ``protocol.Kernels.line_scales``."""
    rows, columns = x.shape
    most = np.zeros(columns if axis else rows, np.float32)
    for part in blocks(rows, columns):
        values = x.numpy()[part].astype(np.float32)
        if bias is not None:
            values += f32(bias)
        np.abs(values, out=values)
        if axis:
            np.fmax(most, np.fmax.reduce(values, axis=0, initial=0), out=most)
        else:
            most[part] = np.fmax.reduce(values, axis=1, initial=0)
    # the exponent alone: exact, subnormal numbers and Inf included
    powers = (most.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32) if power_2 else most
    scales.numpy()[...] = np.where(most == 0, np.float32(1), np.clip(powers, _LEAST, _MOST))


@quiet
def scale_lines(
    x: ArrayView,
    scales: ArrayView | None,
    out: ArrayView,
    axis: int,
    factor: float,
    divide: bool,
    stream: int,
) -> None:
    """``out = x factor scale``, or divided by it; see ``protocol.Kernels.scale_lines``."""
    values = result(out)
    np.multiply(f32(x), np.float32(factor), out=values)
    if scales is not None:
        own = scales.numpy() if axis else scales.numpy()[:, None]
        (np.divide if divide else np.multiply)(values, own, out=values)
    store(out, values)
