"""Matrix products: OpenBLAS in float32 on widened or decoded operands."""

from __future__ import annotations

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Layout
from fp8kit.backends.reference._numpy import Array, Float32, f32, quiet, store
from fp8kit.backends.reference.blas import matmul
from fp8kit.backends.reference.quantize import table32
from fp8kit.backends.reference.threads import njit
from fp8kit.formats import Format


@quiet
def gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    layout: Layout,
    bias: ArrayView | None,
    addend: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """High-precision product ``out = a b`` in the layouts nt, nn, tn; see ``protocol.Kernels.gemm``."""
    left, right = f32(a), f32(b)
    product(left.T if layout == "tn" else left, right.T if layout == "nt" else right, out, None, bias, addend)


@quiet
def fp8_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    bias: ArrayView | None,
    addend: ArrayView | None,
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """FP8 product ``out = (a b^T) * a_scale_inv * b_scale_inv``; see ``protocol.Kernels.fp8_gemm``.

    The product of two decoded codes is exact in float32, so the only errors are those of the float32 sum, the
    two scale factors and the last rounding. ``fast_accumulate`` has no effect: a CPU always accumulates in
    float32.
    """
    rows, columns = out.shape
    left, right = decoded(a.numpy()[:rows], a_format), decoded(b.numpy()[:columns], b_format)
    if a_scale_inv.size == 1:
        scale: Array = a_scale_inv.numpy() * b_scale_inv.numpy()
    else:
        scale = np.multiply.outer(a_scale_inv.numpy()[:rows], b_scale_inv.numpy()[:columns])
    product(left, right.T, out, scale, bias, addend)


@quiet
def scale_product(
    x: ArrayView,
    out: ArrayView,
    a_scale_inv: ArrayView | None,
    b_scale_inv: ArrayView | None,
    bias: ArrayView | None,
    addend: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.scale_product``."""
    scale = np.ones((1, 1), np.float32)
    for factor, shape in ((a_scale_inv, (-1, 1)), (b_scale_inv, (1, -1))):
        scale = scale if factor is None else scale * factor.numpy().reshape(shape)
    found = x.numpy() * scale
    for added in (bias, addend):
        if added is not None:
            found += f32(added)
    store(out, found)


def product(
    left: Float32,
    right: Float32,
    out: ArrayView,
    scale: Array | None,
    bias: ArrayView | None,
    addend: ArrayView | None,
) -> None:
    """out = left right * scale + bias + addend, in float32, rounded once. left (M, K), right (K, N); scale
    broadcasts to (M, N)."""
    in_place = out.dtype is formats.float32 and addend is None and out.contiguous
    product = matmul(left, right, out.numpy() if in_place else None)
    if scale is not None:
        product *= scale
    if bias is not None:
        product += f32(bias)
    if addend is not None:
        product += f32(addend)
    store(out, product)


def decoded(codes: Array, format: Format) -> Float32:
    """Returns the float32 values of a uint8 (rows, columns) matrix of codes."""
    values = np.empty(codes.shape, np.float32)
    _look_up(np.ascontiguousarray(codes).reshape(-1), table32(format), values.reshape(-1))
    return values


@njit
def _look_up(codes: Array, table: Float32, values: Float32) -> None:
    for i in range(codes.size):
        values[i] = table[codes[i]]
