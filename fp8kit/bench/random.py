"""Random data for timing, never zeros: power, and so a GPU's speed, depends on the bits.

Large arrays repeat a drawn pool. Its length is prime, so no two rows of a matrix are alike, and drawing costs
little beside the timing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import Device, Shape
from fp8kit.formats import DType
from fp8kit.testing.contract import poisoned

HostArray = np.ndarray[Any, Any]
_POOL = 1048573  # the largest prime below 2**20
_SPREAD = 64.0  # of E4M3 codes of normal values: 6 sigma is 384 of 448


@functools.lru_cache(maxsize=16)
def _pool(seed: int) -> HostArray:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(_POOL, np.float32)


def normal(
    shape: Shape, seed: int, dtype: Any = np.float32, spread: float = 1.0, mean: float = 0.0
) -> HostArray:
    """Normal values of that spread and mean, rounded to ``dtype``."""
    pool = _pool(seed)
    if (spread, mean) != (1.0, 0.0):
        pool = pool * np.float32(spread) + np.float32(mean)
    return np.resize(pool.astype(dtype, copy=False), shape)


def codes(
    shape: Shape, seed: int, dtype: DType = formats.float8_e4m3fn, spread: float = _SPREAD
) -> HostArray:
    """uint8: FP8 codes of normal values."""
    return np.resize((_pool(seed) * np.float32(spread)).astype(dtype.numpy).view(np.uint8), shape)


def poison_free(device: Device, shape: Shape, dtype: DType, count: int = 4) -> None:
    """Fill memory that the allocator is about to hand out again for arrays of this shape: a result that a
    kernel did not write is then NaN, not the right one of an earlier call."""
    taken = [arrays.empty(shape, dtype, device) for _ in range(count)]
    source = poisoned(shape, dtype, device)
    for view in taken:
        arrays.copy(view, source)
