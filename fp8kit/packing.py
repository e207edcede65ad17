"""Layouts of codes and scales that other libraries and cuBLAS read: two 4-bit codes in a byte, and scales of
blocks in tiles of 128 x 4.

The functions take arrays of NumPy or CuPy, uint8, and return new ones. Sources: cuBLAS's documentation, "1D
Block Scaling Factors Layout"; OCP Microscaling Formats 1.0 leaves both to the implementation.
"""

from __future__ import annotations

import sys
from typing import Any

from fp8kit.errors import ShapeError

# rows and columns of a tile of scales, and the rows of each of its four parts, which lie side by side
_ROWS, _COLUMNS, _PART = 128, 4, 32


def pack(codes: Any) -> Any:
    """Codes of at most 4 bits, uint8 (..., N), two in a byte: (..., N / 2), the even index in the low four
    bits. ShapeError for an odd N, and without a dimension."""
    if not codes.shape or codes.shape[-1] % 2:
        raise ShapeError("pack", "codes", f"shape {codes.shape}", "a last dimension of an even size")
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def unpack(packed: Any) -> Any:
    """Returns what ``pack`` packed: uint8 (..., N) of (..., N / 2). ShapeError without a dimension."""
    if not packed.shape:
        raise ShapeError("unpack", "packed", "no dimension", "at least one")
    codes = packed.repeat(2, axis=-1)
    codes[..., 0::2] &= 15
    codes[..., 1::2] >>= 4
    return codes


def swizzle(scales: Any) -> Any:
    """Scales, uint8 (R, C), a row for each row of an operand and a column for each block along the
    contraction, as block-scaled products read them: uint8 (n,), tiles of 128 x 4 one after the other, row by
    row of tiles; in a tile the element (32 i + j, c) is byte 16 j + 4 i + c. R and C are padded to whole
    tiles with written zeros. ShapeError unless there are two dimensions."""
    if len(scales.shape) != 2:
        raise ShapeError("swizzle", "scales", f"shape {scales.shape}", "2 dimensions")
    rows, columns = scales.shape
    down, across = -(-rows // _ROWS), -(-columns // _COLUMNS)
    library = sys.modules[type(scales).__module__.partition(".")[0]]
    padded = library.zeros((down * _ROWS, across * _COLUMNS), "uint8")
    padded[:rows, :columns] = scales
    parts = padded.reshape(down, _ROWS // _PART, _PART, across, _COLUMNS)
    return parts.transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(swizzled: Any, rows: int, columns: int) -> Any:
    """Returns the scales, uint8 (rows, columns), that ``swizzle`` laid out. ShapeError for another number of
    bytes."""
    down, across = -(-rows // _ROWS), -(-columns // _COLUMNS)
    wanted = down * _ROWS * across * _COLUMNS
    if swizzled.size != wanted:
        got = f"{swizzled.size} bytes"
        raise ShapeError("unswizzle", "swizzled", got, f"{wanted} for ({rows}, {columns}) scales")
    parts = swizzled.reshape(down, across, _PART, _ROWS // _PART, _COLUMNS)
    return parts.transpose(0, 3, 2, 1, 4).reshape(down * _ROWS, across * _COLUMNS)[:rows, :columns]
