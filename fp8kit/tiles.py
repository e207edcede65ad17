"""Where the scales of a quantised array lie: its tiles, along which dimension, and what rotated it before."""

from __future__ import annotations

from typing import Any, NamedTuple

from fp8kit.arguments import choice, shown
from fp8kit.arrays import ArrayView, Shape
from fp8kit.errors import FormatError
from fp8kit.quantization import TILES


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
    choice(operation, "scaling", scaling, TILES, FormatError)
    named = TILES[scaling] if along else TILES[scaling][::-1]
    rows, columns = (tile or max(whole, 1) for tile, whole in zip(named, shape, strict=True))
    grid = max(1, -(-shape[0] // rows)), max(1, -(-shape[1] // columns))
    return (rows, columns), (1,) if scaling == "tensor" else grid
