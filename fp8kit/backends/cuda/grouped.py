"""Grouped products whose sizes lie on the device: one kernel for every layout and granularity of scales.

It is written to be read and to be right on every chip, not to be the fastest: groups whose sizes the host
knows are multiplied one by one by cuBLASLt (``ops.grouped_linear``).
"""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.protocol.grouped import GroupedLayout
from fp8kit.formats import E4M3, Format

_TILE = 64  # rows and columns of a block's part of the result: raw_kernels/grouped.cu
_GROUPED = Packer("2P8q2P8q6q")  # struct Grouped there


def _matrix(
    view: ArrayView, scale_inv: ArrayView | None, tile: tuple[int, int], transposed: bool
) -> tuple[int, ...]:
    """struct Matrix: (rows, columns), or (E, rows, columns), whose contraction is its last dimension, or, if
    ``transposed``, the one before."""
    rows, columns = view.shape[-2:]
    height, width = (
        min(own or extent, max(extent, 1)) for own, extent in zip(tile, (rows, columns), strict=True)
    )
    height, width = max(height, 1), max(width, 1)
    down, across = ceil_div(rows, height), ceil_div(columns, width)
    pair = [(columns, height, across), (1, width, 1)]  # strides, tiles and strides of scales: of i and of k
    (step_i, tile_i, scale_i), (step_k, tile_k, scale_k) = reversed(pair) if transposed else pair
    steps = step_i, step_k, rows * columns
    return (view.ptr, address(scale_inv), *steps, tile_i, tile_k, scale_i, scale_k, down * across)


def _type(view: ArrayView, fmt: Format | None) -> str:
    if fmt is None:
        return launch.type_name(view.dtype)
    return "e4m3" if fmt == E4M3 else "e5m2"


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
    """See ``backends.protocol``."""
    groups, by_depth = sizes.size, layout == "tn"
    rows, columns = out.shape[-2:]
    depth = a.shape[0] if by_depth else a.shape[1]
    down = groups * ceil_div(rows, _TILE) if by_depth else ceil_div(rows, _TILE) + groups + 1
    names: dict[str, Any] = {
        "LEFT": _type(a, a_format),
        "RIGHT": _type(b, b_format),
        "T": launch.type_name(out.dtype),
    }
    function = launch.kernel("grouped.cu", "grouped_gemm", a.device.index, **names)
    problem = _GROUPED.pack(
        *_matrix(a, a_scale_inv, a_tile, by_depth),
        *_matrix(b, b_scale_inv, b_tile, layout != "nt"),
        groups,
        rows,
        columns,
        depth,
        slots,
        int(by_depth),
    )
    grid = down * ceil_div(columns, _TILE)
    launch.launch(function, grid, 128, (sizes.ptr, address(bias), out.ptr, problem), stream)
