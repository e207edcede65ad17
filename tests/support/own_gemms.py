"""Operands of our own FP8 products, with scales of tensors, lines and squares, for them and for the model."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import block_shapes
from fp8kit.bench.random import codes as drawn
from fp8kit.formats import E4M3, Format, float32
from fp8kit.testing.contract import get, put
from tests.support.hopper import GPU

LINE, SQUARE = (1, 128), (128, 128)


def operand(
    rows: int, k: int, fmt: Format, seed: int, tile: tuple[int, int] | None
) -> tuple[ArrayView, ArrayView]:
    """Codes (rows, k up to what ``tile`` asks for), zeros beyond, and scales, each another one."""
    shape, scales = ((rows + -rows % 16, k), (1,)) if tile is None else block_shapes(rows, k, tile)
    spread = 64.0 if fmt == E4M3 else 8192.0
    dtype = formats.dtype_of_format(fmt)
    assert dtype is not None
    values = drawn(shape, seed, dtype, spread).view(np.uint8).copy()
    values[rows:], values[:, k:] = 0, 0
    inverse = np.exp2(np.random.default_rng(seed).uniform(-7, -5, scales)).astype(np.float32)
    return put(values, GPU), put(inverse, GPU)


def model_scales(inverse: ArrayView, tile: tuple[int, int] | None, rows: int, k: int) -> ArrayView:
    """Scales as ``model_gemm`` has them: one a tile, row-major."""
    values = get(inverse)
    if tile is None:
        return put(values.reshape(1, 1), GPU)
    values = values.T[:rows] if tile == LINE else values[: -(-rows // 128), : -(-k // 128)]
    return put(np.ascontiguousarray(values), GPU)


def multiply(
    kernels: Any,
    a: tuple[ArrayView, ArrayView],
    b: tuple[ArrayView, ArrayView],
    out: ArrayView,
    tiles: Any,
    fast: bool,
    more: tuple[ArrayView | None, ArrayView | None] = (None, None),
    pair: tuple[Format, Format] = (E4M3, E4M3),
) -> None:
    """The product of two operands, with scales of tensors or, where ``tiles`` are theirs, of blocks.
    ``more``: bias and addend."""
    (a_codes, a_inv), (b_codes, b_inv) = a, b
    if tiles is None:
        kernels.fp8_gemm(a_codes, b_codes, out, *pair, a_inv, b_inv, *more, fast, None, 0)
    else:
        kernels.block_gemm(a_codes, b_codes, out, *pair, a_inv, b_inv, *tiles, *more, None, 0)


def by_the_model(
    kernels: Any,
    a: tuple[ArrayView, ArrayView],
    b: tuple[ArrayView, ArrayView],
    size: tuple[int, int, int],
    tiles: Any,
    how: Accumulation | bool,
    pair: tuple[Format, Format] = (E4M3, E4M3),
) -> Any:
    """The same, of ``size`` (m, n, k) without bias and addend, by the model of the sums: float32 values.
    ``how``: they are added, or whether by fast accumulation."""
    (m, n, k), ((a_codes, a_inv), (b_codes, b_inv)) = size, (a, b)
    if isinstance(how, bool):
        how = ACCUMULATIONS["hopper_fast" if how else "hopper_split"]
    of_a, of_b = tiles or (None, None)
    scales = model_scales(a_inv, of_a, m, k), model_scales(b_inv, of_b, n, k)
    want = arrays.empty((m, n), float32, GPU)
    codes = a_codes.slice(0, 0, m), b_codes.slice(0, 0, n)
    blocks = tiles or ((0, 0), (0, 0))
    kernels.model_gemm(*codes, want, *pair, *scales, *blocks, how, None, None, 0)
    return get(want)
