"""Where the scales of a quantised array lie: its tiles, along which dimension, and what rotated it before."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from fp8kit import arrays
from fp8kit.arguments import choice, shown
from fp8kit.arrays import ArrayView, Shape
from fp8kit.errors import FormatError
from fp8kit.quantization import TILES, Quantizer


class Rotation(NamedTuple):
    """What was done to an array before it was cast: ``n`` neighbours along ``QuantizedArray.along`` were
    rotated by a Hadamard matrix whose columns have ``signs``; ``rng``: (seed, offset) of signs "random",
    int64 (2,), else None. See ``fp8kit.blocks.hadamard``."""

    n: int
    signs: str
    rng: ArrayView | None = None

    def __str__(self) -> str:
        return f"hadamard={self.n}, signs={self.signs!r}"


def along_of(operation: str, along: Any) -> int:
    """1 for the last dimension, 0 for the first."""
    if isinstance(along, int) and not isinstance(along, bool) and along in (-1, 0, 1):
        return abs(along)
    raise FormatError(operation, "along", shown(along), "-1 (the last dimension; 1 says so too) or 0")


def tiling(
    scaling: str, shape: Shape, along: int = 1, operation: str = "quantize"
) -> tuple[tuple[int, int], Shape]:
    """Tile size, and the shape of one value a tile."""
    if isinstance(scaling, str) and (lying := re.fullmatch(r"(\w+)_(\d+)x1", scaling)):
        rows_of = f"{lying[1]}_1x{lying[2]}"
        if rows_of in TILES:
            raise FormatError(operation, "scaling", repr(scaling), f"{rows_of!r} with along=0")
    choice(operation, "scaling", scaling, TILES, FormatError)
    named = TILES[scaling] if along else TILES[scaling][::-1]
    rows, columns = (tile or max(whole, 1) for tile, whole in zip(named, shape, strict=True))
    grid = max(1, -(-shape[0] // rows)), max(1, -(-shape[1] // columns))
    return (rows, columns), (1,) if scaling == "tensor" else grid


@lru_cache(maxsize=256)
def _by_blocks(own: Quantizer) -> Quantizer:
    return replace(own, granularity="block_1x128", scale_source="current")


def cast_rotated(
    kernels: Any,
    x: ArrayView,
    codes: ArrayView | None,
    values: ArrayView | None,
    scales: tuple[ArrayView, ArrayView, ArrayView],
    own: Quantizer,
    along: int,
    draw: int,
    rng: ArrayView | None,
    stream: int,
    share: Callable[[ArrayView], None] | None = None,
) -> None:
    """The cast of x, h (R, C), rotated, with one scale from the rotated values: one pass for its amax, one
    for the cast, and nothing that is rotated in memory. ``codes``: uint8 like x, ``values``: like x, or None;
    ``scales``: float32 [1], the amax, which ``share`` makes that of all ranks, the scale and its inverse, all
    written; ``draw``, ``rng``: of random bits and signs."""
    amax, scale, inverse = scales
    arrays.fill_zero(amax, stream)
    drawn = rng if own.signs == "random" else None
    kernels.rotate(x, None, amax, own.hadamard, own.signs, along, drawn, stream)
    if share is not None:
        share(amax)
    kernels.scale_from_amax(amax, scale, inverse, *own.scale_limits, stream)
    how = _by_blocks(own), along, draw, rng if own.needs_rng else None, None
    kernels.cast_blocks(x, codes, None, None, values, amax, None, *how, stream)


def whole_amax(
    kernels: Any,
    x: ArrayView,
    own: Quantizer,
    along: int,
    amax: ArrayView,
    rotated: ArrayView | None,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """Raise ``amax`` to what a cast with two levels of scales takes before it: the largest magnitude of x, h
    (R, C), rotated as the quantizer says; float32 (1,), or where rows have scales one for each line along the
    contraction. ``rotated``: float32 like x, for lines that are rotated, else None. ``rng``: of random
    signs."""
    how = own.hadamard, own.signs, along, rng if own.signs == "random" else None
    if own.hadamard and not own.row_scaled:
        kernels.rotate(x, None, amax, *how, stream)
        return
    tile = x.shape
    if own.row_scaled:
        tile = (1, x.shape[1]) if along else (x.shape[0], 1)
        if own.hadamard:
            assert rotated is not None
            kernels.rotate(x, rotated, None, *how, stream)
            x = rotated
    kernels.amax(x, amax, tile, stream)
