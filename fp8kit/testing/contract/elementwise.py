"""Contract cases of the small kernels (copy, add, sum_rows, rng_next_), and what the other modules make their
data with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float16, float32, int64, uint8
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import Case, get, poisoned, put, workspace

Array = np.ndarray[Any, Any]
ROUNDOFF = 2.0**-24  # float32: the largest relative error of one operation


def draw(seed: int, shape: tuple[int, ...], dtype: DType, scale: float = 1.0, offset: float = 0.0) -> Array:
    """Normal values, rounded to ``dtype``, from a fixed seed."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale + offset
    return values.astype(np.float32).astype(dtype.numpy)


def wide(values: Array) -> Array:
    """Values as float64, for the oracles."""
    return np.asarray(values).astype(np.float64)


def spread(values: Array, device: Device, gap: int) -> ArrayView:
    """A matrix on ``device`` whose rows lie ``gap`` elements apart from each other (NaN there); ``gap`` 0 is
    contiguous."""
    rows, columns = values.shape
    host = np.full((rows, columns + gap), np.nan if values.dtype != np.uint8 else 0xFF).astype(values.dtype)
    host[:, :columns] = values
    return put(host, device).slice(1, 0, columns) if gap else put(host, device)


def hole(
    shape: tuple[int, int], dtype: DType, device: Device, gap: int
) -> tuple[ArrayView, Callable[[], None]]:
    """A poisoned output whose rows lie ``gap`` apart, and a check that nothing was written between the
    rows."""
    rows, columns = shape
    whole = poisoned((rows, columns + gap), dtype, device)

    def check() -> None:
        between = np.ascontiguousarray(get(whole)[:, columns:]).view(np.uint8)
        assert_same_bits("between the rows of a strided output", between, np.full_like(between, 0xFF))

    return (whole.slice(1, 0, columns) if gap else whole), check


def host(view: ArrayView) -> Array:
    """Values of a view that may be strided, on the host."""
    return get(arrays.contiguous(view))


def table(kernel: str, rows: dict[str, Callable[[Kernels, Device], None]]) -> list[Case]:
    """Cases of one kernel: name -> run."""
    return [Case(kernel, name, run) for name, run in rows.items()]


def _copy(
    source: DType, target: DType, shape: tuple[int, ...], axes: tuple[int, ...]
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x = (
            np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
            if source is uint8
            else draw(1, shape, source, 3.0)
        )
        y = poisoned(tuple(shape[a] for a in axes), target, device)
        kernels.copy(put(x, device).transpose(*axes), y, 0)
        assert_same_bits(
            "copy",
            get(y),
            np.ascontiguousarray(x.transpose(axes)).astype(np.float32).astype(target.numpy)
            if source is not uint8
            else np.ascontiguousarray(x.transpose(axes)),
        )

    return run


def _narrow(target: DType, axes: tuple[int, int]) -> Callable[[Kernels, Device], None]:
    """float64, through float32: numbers that one of the two types cannot hold, and one that two roundings
    turn elsewhere than one."""

    def run(kernels: Kernels, device: Device) -> None:
        x = np.random.default_rng(1).standard_normal((8, 16))
        x[:, 0] = 1e-46, -1e-45, 1e-40, 1e300, -np.inf, np.nan, 1 + 2.0**-9 + 2.0**-40, -0.0
        y = poisoned(tuple(x.shape[a] for a in axes), target, device)
        kernels.copy(put(x, device).transpose(*axes), y, 0)
        with np.errstate(over="ignore"):
            want = np.ascontiguousarray(x.transpose(axes)).astype(np.float32).astype(target.numpy)
        assert_same_bits("copy", np.where(np.isnan(get(y)), target.numpy.type(np.nan), get(y)), want)

    return run


def _copy_into(dtype: DType) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x = draw(2, (7, 5), dtype)
        y, check = hole((7, 5), dtype, device, 3)
        kernels.copy(put(x, device), y, 0)
        assert_same_bits("copy", host(y), x)
        check()

    return run


def _add(
    dtype: DType, shape: tuple[int, ...], repeated: tuple[int, ...]
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        a, b = draw(3, shape, dtype), draw(4, repeated, dtype)
        out = poisoned(shape, dtype, device)
        kernels.add(put(a, device), put(b, device), out, 0)
        # one float32 addition, then the rounding: bit for bit
        assert_same_bits("add", get(out), (a.astype(np.float32) + b.astype(np.float32)).astype(dtype.numpy))

    return run


def _sum_rows(dtype: DType, shape: tuple[int, int]) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x = draw(5, shape, dtype)
        out = poisoned((shape[1],), dtype, device)
        kernels.sum_rows(put(x, device), out, workspace(kernels.column_sum_workspace(*shape), device), 0)
        assert_close("sum_rows", get(out), wide(x).sum(0), dtype, sum_slack(np.abs(wide(x)).sum(0), shape[0]))

    return run


def _rng_next(kernels: Kernels, device: Device) -> None:
    state, out = put(np.array([-7, 2**40], np.int64), device), poisoned((2,), int64, device)
    for step in range(3):
        kernels.rng_next_(state, out, 0)
        assert_same_bits("out", get(out), np.array([-7, 2**40 + step], np.int64))
    assert_same_bits("state", get(state), np.array([-7, 2**40 + 3], np.int64))


SIZES = ((17, 33), (1, 64), (5, 1), (0, 16), (130, 96))

CASES = [
    *table(
        "copy",
        {f"{s.name}-{t.name}": _copy(s, t, (17, 33), (0, 1)) for s in HIGH_PRECISION for t in HIGH_PRECISION},
    ),
    *table(
        "copy",
        {f"{d.name}-5d": _copy(d, d, (2, 3, 4, 5, 6), (3, 0, 2, 1, 4)) for d in (*HIGH_PRECISION, uint8)},
    ),
    *table(
        "copy",
        {
            f"{d.name}-to-float32-transposed": _copy(d, float32, (5, 3, 7), (2, 1, 0))
            for d in (bfloat16, float16)
        },
    ),
    *table("copy", {f"{d.name}-into-rows": _copy_into(d) for d in HIGH_PRECISION}),
    *table(
        "copy",
        {
            f"float64-{t.name}{'-transposed' if axes[0] else ''}": _narrow(t, axes)
            for t in HIGH_PRECISION
            for axes in ((0, 1), (1, 0))
        },
    ),
    *table("copy", {"empty": _copy(float32, bfloat16, (0, 4), (0, 1))}),
    *table(
        "add",
        {
            f"{d.name}-{math.prod(s)}-{math.prod(r)}": _add(d, s, r)
            for d in HIGH_PRECISION
            for s, r in (
                ((17, 33), (17, 33)),
                ((4, 6, 5), (6, 5)),
                ((9, 7), (7,)),
                ((3, 5), (1,)),
                ((0, 3), (3,)),
            )
        },
    ),
    *table(
        "sum_rows",
        {f"{d.name}-{s[0]}x{s[1]}": _sum_rows(d, s) for d in HIGH_PRECISION for s in (*SIZES, (1000, 40))},
    ),
    Case("rng_next_", "steps", _rng_next),
]
