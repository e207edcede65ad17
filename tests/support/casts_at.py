"""Casts by blocks as their kernels are launched: from addresses, by the CPU engine."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import CPU, ArrayView
from fp8kit.backends import dispatch
from fp8kit.formats import E4M3, E5M2, DType, bfloat16, float16, float32, uint8

TYPES = {"f32": float32, "bf16": bfloat16, "f16": float16}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def tiles(size: int, tile: int) -> int:
    return max(1, -(-size // tile))


def at(address: int, matrix: int, shape: tuple[int, ...], dtype: DType) -> ArrayView | None:
    """Matrix number ``matrix`` of those of this shape that lie from the address on; None where that is 0."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return ArrayView(address + matrix * size, shape, dtype, CPU, None) if address else None


def blocks(how: dict[str, str], grid: int, *args: Any) -> int:
    """``block_quantize_stack``, likewise."""
    x, q, scale_inv, q_t, scale_inv_t, rows, columns, high, high_t, scales, scales_t, square, *rule = args
    fmt, dtype = FORMATS[how["FORMAT"]], TYPES[how["T"]]
    across, down = tiles(columns, 128), tiles(rows, 128)
    count, rest = divmod(grid, across * down)
    assert not rest
    assert rule[0] == fmt.max
    assert rule[2] == dtype.max

    def grid_of(lines: int, along: int, size: int) -> tuple[int, int]:
        shape = (tiles(lines, 128), -(-along // 4) * 4) if square else (along, lines)
        assert not lines or shape[0] * shape[1] == size
        return shape

    for e in range(count):
        to = (
            at(q, e, (high, across * 128), uint8),
            at(scale_inv, e, grid_of(high, across, scales), float32),
            at(q_t, e, (high_t, down * 128), uint8),
            at(scale_inv_t, e, grid_of(high_t, down, scales_t), float32),
        )
        source: Any = at(x, e, (rows, columns), dtype)
        tile = (128, 128) if square else (1, 128)
        dispatch.kernels(CPU).block_quantize(source, *to, fmt, tile, bool(rule[3]), rule[1], 0)
    return count
