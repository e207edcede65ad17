"""What cases start from and end in: numbers that are the same on every machine, and hashes of arrays.

Numbers are made from the raw bits of NumPy's PCG64, a stream that NumPy promises to keep, by integer
arithmetic and at most one division: no library's random numbers, no logarithm, no cosine.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

HostArray = np.ndarray[Any, Any]


class Array(NamedTuple):
    """An argument that is drawn anew for each step.

    ``kind``: what it is made of, see ``draw``. ``grad``: whether its gradient is wanted. ``most``: numbers of
    kind "ids" are below it. ``dtype``: None is the case's own.
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    grad: bool = True
    most: int = 2
    dtype: str | None = None


class Fixed(NamedTuple):
    """An argument with these values, the same at each step, without a gradient."""

    values: Any
    dtype: str = "int32"


class Angles(NamedTuple):
    """The angles that ``RotaryPositionEmbedding(dim, **options)(positions)`` gives."""

    dim: int
    positions: int
    options: dict[str, Any] = {}  # noqa: RUF012


def ids(*shape: int, most: int) -> Array:
    """Whole numbers in [0, ``most``), int32."""
    return Array(shape, "ids", False, most, "int32")


def mask(*shape: int) -> Array:
    """True in one element of four, but never in the last dimension's first."""
    return Array(shape, "mask", False, dtype="bool")


def draw(key: str, spec: Array, step: int = 0, exact: bool = False) -> HostArray:
    """The values of ``spec`` at ``step``, float32, or int64 of "ids", bool of "mask".

    Inputs, kinds "normal", "signs" and "wide", are twice as large at each further step, so that scales move.
    With ``exact`` all are small whole numbers, of which every sum is exact in float32: a sum then has the
    same bits in whatever order it is made.
    """
    bits = np.random.PCG64(zlib.crc32(f"{key}/{step}".encode())).random_raw(max(math.prod(spec.shape), 1))
    bits = bits[: math.prod(spec.shape)].reshape(spec.shape)
    if spec.kind == "ids":
        return (bits % np.uint64(spec.most)).astype(np.int64)
    if spec.kind == "mask":
        hidden = bits % np.uint64(4) == 0
        hidden[..., 0] = False
        return hidden
    found = (_EXACT if exact else _REAL)[spec.kind](bits)
    return (found * (2.0**step if spec.kind in ("normal", "signs", "wide") else 1.0)).astype(np.float32)


def _normal(bits: HostArray) -> HostArray:
    """Nearly normal: the sum of four uniform numbers of 16 bits, of variance 1."""
    parts = sum((bits >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    return (parts.astype(np.float64) - 2 * 0xFFFF) / 37837.0


def _whole(most: int) -> Callable[[HostArray], HostArray]:
    """Whole numbers from -most to most."""
    return lambda bits: (bits % np.uint64(2 * most + 1)).astype(np.float64) - most


def _signs(bits: HostArray) -> HostArray:
    """As many 1 as -1 in each row of an even length: mean 0 and variance 1, exactly."""
    return np.where(np.argsort(bits, axis=-1, kind="stable") % 2, 1.0, -1.0)


_REAL: dict[str, Callable[[HostArray], HostArray]] = {
    "normal": _normal,
    "signs": _normal,
    "wide": _normal,
    "weight": lambda bits: _normal(bits) / 8,
    "gain": lambda bits: 1 + _normal(bits) / 8,
    "shift": lambda bits: _normal(bits) / 8,
}
_EXACT: dict[str, Callable[[HostArray], HostArray]] = {
    "normal": _whole(2),
    "signs": _signs,
    "wide": _whole(61),
    "weight": _whole(1),
    "gain": lambda bits: 1 + (bits % np.uint64(2)).astype(np.float64),
    "shift": _whole(2),
}


def parameter(key: str, name: str, shape: tuple[int, ...], exact: bool) -> HostArray:
    """The values of a parameter, by its name: matrices of small numbers, gains about 1, the rest about 0."""
    last = name.rpartition(".")[2]
    matrix = len(shape) > 1 and "bias" not in last
    gain = len(shape) == 1 and ("weight" in last or last in ("scale", "gamma"))
    return draw(f"{key}/{name}", Array(shape, "weight" if matrix else "gain" if gain else "shift"), 0, exact)


def digest(array: HostArray) -> str:
    """The hash of an array: of its dtype, its shape and its bytes."""
    head = f"{array.dtype.name}{list(array.shape)}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
