"""Scaling by blocks of 128: the cast of a matrix and of its transpose, and the product of two operands scaled
so."""

from __future__ import annotations

import numpy as np

from fp8kit import arrays, packing
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.reference._numpy import Float32, f32, quiet
from fp8kit.backends.reference.gemm import decoded, product
from fp8kit.backends.reference.quantize import member, quantize, table32
from fp8kit.backends.reference.scales import amax, scale_from_amax, tiles
from fp8kit.formats import E4M3, E8M0, Format

_BLOCK = 128


@quiet
def block_quantize(
    x: ArrayView,
    q: ArrayView | None,
    scale_inv: ArrayView | None,
    q_t: ArrayView | None,
    scale_inv_t: ArrayView | None,
    format: Format,
    tile: Tile,
    power_2: bool,
    epsilon: float,
    stream: int,
) -> None:
    """See ``Kernels.block_quantize``."""
    values = f32(x)
    rule = format, tile, power_2, epsilon, x.dtype.max
    if q is not None and scale_inv is not None:
        _operand(values, q, scale_inv, *rule)
    if q_t is not None and scale_inv_t is not None:
        _operand(np.ascontiguousarray(values.T), q_t, scale_inv_t, *rule)


def block_quantize_stack(
    x: ArrayView,
    q: ArrayView | None,
    scale_inv: ArrayView | None,
    q_t: ArrayView | None,
    scale_inv_t: ArrayView | None,
    format: Format,
    tile: Tile,
    power_2: bool,
    epsilon: float,
    stream: int,
) -> None:
    """See ``Kernels.block_quantize_stack``."""
    for e in range(x.shape[0]):
        part, *written = (member(view, e) for view in (x, q, scale_inv, q_t, scale_inv_t))
        assert part is not None
        codes, scales, codes_t, scales_t = written
        block_quantize(part, codes, scales, codes_t, scales_t, format, tile, power_2, epsilon, stream)


def _operand(
    values: Float32,
    q: ArrayView,
    scale_inv: ArrayView,
    format: Format,
    tile: Tile,
    power_2: bool,
    epsilon: float,
    largest: float,
) -> None:
    """Cast one orientation, float32 (R, K), with its scales."""
    rows, columns = values.shape
    grid = tiles((rows, columns), tile)
    found, scale, inverse = (np.zeros(grid, np.float32) for _ in range(3))
    views = [arrays.as_view(array) for array in (found, scale, inverse)]
    source = arrays.as_view(values)
    amax(source, views[0], tile, 0)
    scale_from_amax(views[0], views[1], views[2], format.max, power_2, epsilon, largest, 0)
    codes, inverses = q.numpy(), scale_inv.numpy()
    quantize(source, q, views[1], views[2], None, format, tile, True, 0, 0, None, 0)
    codes[rows:] = 0
    codes[:rows, columns:] = 0
    inverses[...] = 1
    if tile[0] == 1:
        inverses[:, :rows] = inverse.T
    else:
        inverses[: grid[0], : grid[1]] = inverse


@quiet
def block_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    a_tile: Tile,
    b_tile: Tile,
    bias: ArrayView | None,
    addend: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.block_gemm``. The operands are decoded and scaled in float32 (exact for scales that are
    powers of two)."""
    rows, columns = out.shape
    left = _decoded(a, a_format, a_scale_inv, a_tile, rows)
    right = _decoded(b, b_format, b_scale_inv, b_tile, columns)
    product(left, right.T, out, None, bias, addend)


def _decoded(codes: ArrayView, format: Format, scale_inv: ArrayView, tile: Tile, rows: int) -> Float32:
    """Returns the float32 values (rows, K) of an operand's first rows."""
    if tile[1] < _BLOCK:
        plain = codes.numpy() if tile[1] == 32 else packing.unpack(codes.numpy())
        own, count = table32(E8M0 if tile[1] == 32 else E4M3), plain.shape[1] // tile[1]
        scales = own[packing.unswizzle(scale_inv.numpy(), len(plain), count)[:rows]]
        return np.asarray(decoded(plain[:rows], format) * np.repeat(scales, tile[1], axis=1), np.float32)
    values = decoded(codes.numpy()[:rows], format)
    count = values.shape[1] // _BLOCK
    inverses = scale_inv.numpy()
    per_row = inverses.T if tile[0] == 1 else np.repeat(inverses[:, :count], tile[0], axis=0)
    blocks = values.reshape(rows, count, _BLOCK)
    blocks *= per_row[:rows, :, None]
    return values


def block_operand(
    codes: ArrayView,
    scales: ArrayView,
    q: ArrayView,
    q_scales: ArrayView,
    tile: Tile,
    along: int,
    stream: int,
) -> None:
    """See ``Kernels.block_operand``."""
    plain, grid = (array.numpy() if along else array.numpy().T for array in (codes, scales))
    (rows, k), width = plain.shape, tile[1]
    padded = np.zeros((q.shape[0], q.shape[1] * 32 // width), np.uint8)
    padded[:rows, :k] = plain
    q.numpy()[...] = packing.pack(padded) if width == 16 else padded
    each = np.zeros((q.shape[0], padded.shape[1] // width), np.uint8)
    each[:rows, : grid.shape[1]] = np.repeat(grid, tile[0], axis=0)[:rows]
    q_scales.numpy()[...] = packing.swizzle(each)
