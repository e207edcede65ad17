"""Grouped products in NumPy: a product for each group, of the values that codes stand for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView, Tile, as_view
from fp8kit.backends.protocol.block import BLOCK
from fp8kit.backends.protocol.grouped import GroupedAlong, GroupedLayout
from fp8kit.backends.reference import block, scales
from fp8kit.backends.reference._numpy import Float32, f32, quiet, result, store
from fp8kit.formats import Format


def _values(codes: Float32, scale_inv: ArrayView, tile: Tile) -> Float32:
    """What an operand's decoded codes stand for, of a matrix or of several."""
    (rows, columns), scales = codes.shape[-2:], scale_inv.numpy()
    if tile == (1, BLOCK):
        scales = np.swapaxes(scales, -1, -2).repeat(BLOCK, -1)
    elif tile == (BLOCK, BLOCK):
        scales = scales.repeat(BLOCK, -1).repeat(BLOCK, -2)
    else:
        scales = scales.reshape(*codes.shape[:-2], -1, 1)
    return np.asarray(codes * scales[..., :rows, :columns])


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
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.grouped_gemm``."""
    left, right = f32(a), f32(b)
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


@quiet
def grouped_fp8_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    sizes: ArrayView,
    along: GroupedAlong,
    slots: int,
    bias: ArrayView | None,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    a_tile: Tile,
    b_tile: Tile,
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.grouped_fp8_gemm``; ``fast_accumulate`` changes nothing."""
    left = _values(codec.decode(a.numpy(), a_format), a_scale_inv, a_tile)
    right = _values(codec.decode(b.numpy(), b_format), b_scale_inv, b_tile)
    made = result(out)
    made[...] = 0
    m, n = out.shape[-2:]
    if along == "terms":
        for e, terms in _groups(sizes, left.shape[1], slots):
            made[e] = left[:m, terms] @ right[:n, terms].T
        store(out, made)
        return
    for e, rows in _groups(sizes, m, slots):
        made[rows] = left[rows] @ right[e, :n].T
        if bias is not None:
            made[rows] += f32(bias)[e]
    store(out, made)


def _live(x: ArrayView, sizes: ArrayView, slots: int) -> ArrayView:
    """x with zeros in rows of no group; itself where there are none."""
    live = np.zeros(x.shape[0], bool)
    for _, rows in _groups(sizes, x.shape[0], slots):
        live[rows] = True
    if live.all():
        return x
    values = np.array(x.numpy())
    values[~live] = 0
    return as_view(values)


def group_amax(x: ArrayView, amax: ArrayView, sizes: ArrayView, tile: Tile, slots: int, stream: int) -> None:
    """See ``protocol.Kernels.group_amax``."""
    scales.amax(_live(x, sizes, slots), amax, tile, stream)


def block_quantize_groups(
    x: ArrayView,
    q: ArrayView | None,
    scale_inv: ArrayView | None,
    q_t: ArrayView | None,
    scale_inv_t: ArrayView | None,
    sizes: ArrayView,
    slots: int,
    format: Format,
    tile: Tile,
    power_2: bool,
    epsilon: float,
    stream: int,
) -> None:
    """See ``protocol.Kernels.block_quantize_groups``."""
    made = q, scale_inv, q_t, scale_inv_t
    block.block_quantize(_live(x, sizes, slots), *made, format, tile, power_2, epsilon, stream)
