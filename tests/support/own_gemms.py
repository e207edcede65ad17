"""Operands of our own FP8 products, with scales of tensors, lines and squares, for them and for the model."""

from __future__ import annotations

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import block_shapes
from fp8kit.bench.random import codes as drawn
from fp8kit.formats import E4M3, Format
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
