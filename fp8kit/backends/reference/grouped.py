"""Grouped products in NumPy: a product for each group, of the values that codes stand for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.grouped import GroupedLayout
from fp8kit.backends.reference._numpy import Float32, f32, quiet, result, store
from fp8kit.formats import Format


def _values(
    view: ArrayView, fmt: Format | None, scale_inv: ArrayView | None, tile: tuple[int, int]
) -> Float32:
    """An operand's values, of a matrix or of several, float32."""
    if fmt is None or scale_inv is None:
        return f32(view)
    rows, columns = view.shape[-2:]
    height, width = tile[0] or max(rows, 1), tile[1] or max(columns, 1)
    down, across = -(-rows // height), -(-columns // width)
    scales = scale_inv.numpy().reshape(-1)[: view.size and view.size // (rows * columns) * down * across]
    scales = scales.reshape(*view.shape[:-2], down, across)
    spread = scales.repeat(height, -2)[..., :rows, :].repeat(width, -1)[..., :columns]
    return np.asarray(codec.decode(view.numpy(), fmt).astype(np.float32) * spread.reshape(view.shape))


def _groups(sizes: ArrayView, rows: int, slots: int) -> Iterator[tuple[int, slice]]:
    """Each group and its rows."""
    start = 0
    for e, size in enumerate(sizes.numpy().tolist()):
        cover = slots or max(0, min(size, rows - start))
        yield e, slice(start, start + max(0, min(size, cover)))
        start += cover


@quiet
def grouped_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    sizes: ArrayView,
    layout: GroupedLayout,
    slots: int,
    bias: ArrayView | None,
    a_format: Format | None,
    b_format: Format | None,
    a_scale_inv: ArrayView | None,
    b_scale_inv: ArrayView | None,
    a_tile: tuple[int, int],
    b_tile: tuple[int, int],
    stream: int,
) -> None:
    """See ``protocol.Kernels.grouped_gemm``."""
    left, right = _values(a, a_format, a_scale_inv, a_tile), _values(b, b_format, b_scale_inv, b_tile)
    made = result(out)
    made[...] = 0
    for e, rows in _groups(sizes, len(left), slots):
        if layout == "tn":
            made[e] = left[rows].T @ right[rows]
            continue
        made[rows] = left[rows] @ (right[e].T if layout == "nt" else right[e])
        if bias is not None:
            made[rows] += f32(bias)[e]
    store(out, made)
