"""``Sampler``: the arrays of a sample call, each between guards, outputs poisoned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.backends.protocol import Cast, block_shapes
from fp8kit.formats import E4M3, DType, Format, float32, int32, int64, uint8
from fp8kit.testing.compare import Array

GUARD = 512  # elements before and after an array
_POOL = 1048573  # the largest prime below 2**20: rows of a matrix that repeats so many values are not alike
_SPECIAL = (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 448, -464, 464.5, 57344, -61440, 1e-40, -1e-45)
_TIES = (2.0**-10, 3 * 2.0**-10, 2.0**-17, 1.0625, 1.1875, 5, 7)


def narrowed(x: Array, fmt: Format) -> Array:
    """FP8 codes of values, by ml_dtypes."""
    kind = formats.dtype_of_format(fmt)
    assert kind is not None
    return np.asarray(x.astype(kind.numpy).view(np.uint8))


@dataclass
class Sampler:
    """Makes arrays on ``device`` for calls of ``kernels``, from a fixed seed: the same calls give the same
    values. ``dtype`` is that of the high-precision arrays.

    ``guard`` elements of 0xFF (NaN in every type) lie before and after each array, so that what reads beyond
    one shows in the results, and what writes there in ``buffers``, the whole memory of each.
    """

    kernels: Any
    device: Device
    dtype: DType = float32
    guard: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.Generator(np.random.Philox(1))
        self.buffers: list[ArrayView] = []

    def array(self, shape: Shape, dtype: DType, fill: Callable[[], Array] | None = None) -> ArrayView:
        """An array that holds what ``fill`` gives, or poison."""
        size = math.prod(shape)
        host = np.full((size + 2 * self.guard) * dtype.itemsize, 0xFF, np.uint8).view(dtype.numpy)
        if fill is not None:
            host[self.guard : self.guard + size] = fill().reshape(-1)
        self.buffers.append(arrays.to(host, self.device))
        return self.buffers[-1].slice(0, self.guard, size).reshape(*shape)

    def put(self, values: Any, dtype: DType | None = None) -> ArrayView:
        """Values of the host; ``dtype`` None is their own."""
        host = np.asarray(values, None if dtype is None else dtype.numpy)
        return self.array(host.shape, formats.dtype(host.dtype), lambda: host)

    def output(self, *shape: int, dtype: DType | None = None) -> ArrayView:
        """An array to be written."""
        return self.array(shape, dtype or self.dtype)

    def full(self, value: float, *shape: int, dtype: DType = float32) -> ArrayView:
        """One value everywhere."""
        return self.array(shape, dtype, lambda: np.full(shape, value, dtype.numpy))

    def scalar(self, value: float | None) -> ArrayView | None:
        """One float32, or None."""
        return None if value is None else self.full(value, 1)

    def draw(self, shape: Shape, scale: float = 1.0, mean: float = 0.0) -> Array:
        """Normal values on the host, float32."""
        values = self.random.standard_normal(min(math.prod(shape), _POOL), np.float32)
        return np.resize(values * np.float32(scale) + np.float32(mean), shape)

    def normal(
        self, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: DType | None = None
    ) -> ArrayView:
        """Normal values."""
        kind = dtype or self.dtype
        return self.array(shape, kind, lambda: self.draw(shape, scale, mean).astype(kind.numpy))

    def codes(self, rows: int, columns: int, fmt: Format = E4M3) -> ArrayView:
        """FP8 codes of normal values."""
        shape = rows, columns
        return self.array(shape, uint8, lambda: narrowed(self.draw(shape, 8.0), fmt))

    def strewn(self, rows: int, columns: int, finite: bool = False) -> ArrayView:
        """Values over many binades with every special one among them: +-0, subnormals, ties, the
        formats' limits and, unless ``finite``, Inf and NaN."""
        shape = rows, columns
        x = self.random.standard_normal(shape) * np.exp2(self.random.integers(-14, 10, shape))
        at = self.random.random(shape) < 0.15
        x[at] = self.random.choice(_SPECIAL + _TIES, int(at.sum()))
        with np.errstate(over="ignore", invalid="ignore"):
            x = x.astype(self.dtype.numpy)
        if finite:
            x[~np.isfinite(x.astype(np.float64))] = 1
        return self.put(x)

    def sums(self, *values: int) -> ArrayView:
        """int32 running sums."""
        return self.put(values, int32)

    def rng(self) -> ArrayView:
        """A generator's seed and offset."""
        return self.put((-0x123456789ABCDEF, 0x5_0000_0003), int64)

    def result(
        self,
        name: str,
        rows: int,
        columns: int,
        amax: float | None = None,
        cast: Mapping[str, Any] | None = None,
        **wanted: bool,
    ) -> dict[str, Any]:
        """A result of (rows, columns) by its ``name``, None where that is not ``wanted``, beside its ``amax``
        and, where they are not None, what the options ``cast`` say of its cast."""
        return {
            name: self.output(rows, columns) if wanted.get(name, True) else None,
            "amax": self.scalar(amax),
            "cast": None if cast is None else self.cast(rows, columns, **cast),
        }

    def cast(
        self,
        rows: int,
        columns: int,
        fmt: Format = E4M3,
        pad: tuple[int, int] | None = None,
        only: str = "",
        amax: float | None = 0.001,
        scale: float = 37.7,
        rule: Any = None,
        wider: bool = False,
        tile: Any = None,
    ) -> Cast:
        """Where a result of (rows, columns) goes in FP8. ``pad``: rows and columns more (None: up to
        multiples of 16); ``only`` "q" or "q_t"; ``amax``: what the running maximum holds before (None: there
        is none); ``scale``, or a ``rule`` that makes it; ``wider``: q_t lies in a wider buffer. With a
        ``tile`` it is cast by blocks, with a ``rule``, and ``fmt`` and ``only`` say the rest."""
        if tile is not None:
            sides: list[ArrayView | None] = []
            for other, size in (("q_t", (rows, columns)), ("q", (columns, rows))):
                codes, scales = block_shapes(*size, tile)
                none = only == other
                sides.append(None if none else self.output(*codes, dtype=uint8))
                sides.append(None if none else self.output(*scales, dtype=float32))
            codes_q, inverse, codes_t, inverse_t = sides
            return Cast(fmt, codes_q, codes_t, None, inverse, None, rule, tile, inverse_t)
        m, n = (k + more for k, more in zip((rows, columns), pad or (-rows % 16, -columns % 16), strict=True))
        q, q_t = (
            None if only == other else self.output(*shape, dtype=uint8)
            for other, shape in (("q_t", (m, n)), ("q", (n, m)))
        )
        if wider and q_t is not None:
            q_t = self.part(q_t, 1, 32, 16)
        own = None if rule is not None else self.scalar(scale)
        return Cast(fmt, q, q_t, own, self.output(1, dtype=float32), self.scalar(amax), rule)

    def part(self, view: ArrayView, axis: int | None, before: int, after: int) -> ArrayView:
        """An array's values as a part of a larger one, which has so many elements more along ``axis``. None:
        so many elements further on in memory."""
        host = arrays.to(view, arrays.CPU).numpy()
        if axis is None:
            padded = np.concatenate([host.reshape(-1)[:1], host.reshape(-1)])
            return self.put(padded).slice(0, 1, host.size).reshape(*host.shape)
        shape = list(host.shape)
        shape[axis] += before + after
        whole = self.output(*shape, dtype=view.dtype)
        target = whole.slice(axis, before, host.shape[axis])
        arrays.assign(target, view)
        return target

    def workspace(self, nbytes: int) -> ArrayView:
        """A workspace of that many bytes."""
        return self.output(max(nbytes, 1), dtype=uint8)


class Outline(Sampler):
    """Makes arrays that have shapes and addresses, but no memory."""

    def __init__(self, dtype: DType) -> None:
        super().__init__(None, arrays.CPU, dtype)

    def array(self, shape: Shape, dtype: DType, fill: Callable[[], Array] | None = None) -> ArrayView:
        """An array elsewhere than every other."""
        self.buffers.append(ArrayView((len(self.buffers) + 1) << 40, shape, dtype, self.device))
        return self.buffers[-1]
