"""Contract cases of dropout: the mask against Philox4x32-10 written plainly, the arithmetic against
float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.testing.compare import assert_close, epsilon, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import ROUNDOFF, SIZES, Array, draw, table, wide

RNG = np.array([-0x123456789ABCDEF, 0x5_0000_0003], np.int64)
_LOW = np.uint64(0xFFFFFFFF)


def philox(rng: Array, indices: Array) -> Array:
    """The words, uint32 as uint64, of elements ``indices`` of the stream ``rng`` = (seed, offset) (Salmon et
    al., SC'11)."""
    seed, offset = (int(v) & (2**64 - 1) for v in rng)
    block = np.asarray(indices, np.uint64) // np.uint64(4)
    c = [
        block & _LOW,
        block >> np.uint64(32),
        np.full_like(block, offset & 0xFFFFFFFF),
        np.full_like(block, offset >> 32),
    ]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            second & _LOW,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            first & _LOW,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.asarray(np.choose((np.asarray(indices) % 4).astype(np.int64), c))


def keep_factors(rng: Array, p: float, shape: tuple[int, ...]) -> Array:
    """0 or float32(1 / (1 - p)) as float64 for each element of an array of ``shape``."""
    return factors_of(rng, p, np.arange(int(np.prod(shape))).reshape(shape))


def factors_of(rng: Array, p: float, indices: Array) -> Array:
    """The same for elements ``indices``, int64 of any shape."""
    kept = philox(rng, indices) >= int(p * 2.0**32)
    return np.asarray(kept * float(np.float32(1 / (1 - p))))


def _add(
    dtype: DType,
    shape: tuple[int, int],
    p: float,
    biased: bool = True,
    residual: bool = True,
    alias: bool = False,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, base = draw(1, shape, dtype), draw(2, shape[1:], dtype), draw(3, shape, dtype)
        source = put(x, device)
        y = source if alias else poisoned(shape, dtype, device)
        kernels.dropout_add(
            source,
            put(bias, device) if biased else None,
            put(base, device) if residual else None,
            y,
            p,
            put(RNG, device) if p else None,
            0,
        )
        value = (wide(x) + wide(bias) * biased) * (keep_factors(RNG, p, shape) if p else 1.0)
        reference = value + wide(base) * residual
        assert_close(
            "y", get(y), reference, dtype, 2 * ROUNDOFF * np.abs(value) + ROUNDOFF * np.abs(reference)
        )

    return run


def _bwd(
    dtype: DType, shape: tuple[int, int], p: float, wants: str, alias: bool = False
) -> Callable[[Kernels, Device], None]:
    """``wants``: "dx", "dbias" or "both". dbias sums dx before or after its rounding: half an epsilon of each
    term is allowed."""

    def run(kernels: Kernels, device: Device) -> None:
        dy = draw(4, shape, dtype)
        source = put(dy, device)
        dx = None if wants == "dbias" else source if alias else poisoned(shape, dtype, device)
        dbias = None if wants == "dx" else poisoned(shape[1:], dtype, device)
        kernels.dropout_bwd(
            source,
            dx,
            dbias,
            p,
            put(RNG, device) if p else None,
            workspace(kernels.column_sum_workspace(*shape), device),
            0,
        )
        reference = wide(dy) * (keep_factors(RNG, p, shape) if p else 1.0)
        if dx is not None:
            assert_close("dx", get(dx), reference, dtype, ROUNDOFF * np.abs(reference))
        if dbias is not None:
            magnitude = np.abs(reference).sum(0)
            assert_close(
                "dbias",
                get(dbias),
                reference.sum(0),
                dtype,
                sum_slack(magnitude, shape[0]) + epsilon(dtype) / 2 * magnitude,
            )

    return run


CASES = [
    *table(
        "dropout_add",
        {
            f"{d.name}-{p}-{s[0]}x{s[1]}": _add(d, s, p)
            for d in HIGH_PRECISION
            for p in (0.0, 0.1)
            for s in SIZES
        },
    ),
    *table(
        "dropout_add",
        {
            f"{d.name}-{p}-plain": _add(d, (9, 37), p, False, False)
            for d in HIGH_PRECISION
            for p in (0.0, 0.5)
        },
    ),
    *table(
        "dropout_add",
        {f"{d.name}-{p}-y-is-x": _add(d, (9, 37), p, alias=True) for d in HIGH_PRECISION for p in (0.0, 0.9)},
    ),
    *table(
        "dropout_add",
        {
            f"{d.name}-{p}-y-is-x-plain": _add(d, (9, 37), p, False, False, True)
            for d in HIGH_PRECISION
            for p in (0.0, 0.5)
        },
    ),
    *table(
        "dropout_bwd",
        {
            f"{d.name}-{p}-{w}-{s[0]}x{s[1]}": _bwd(d, s, p, w)
            for d in HIGH_PRECISION
            for p in (0.0, 0.1)
            for w in ("dx", "dbias", "both")
            for s in SIZES
        },
    ),
    *table(
        "dropout_bwd", {f"{d.name}-dx-is-dy": _bwd(d, (9, 37), 0.3, "both", True) for d in HIGH_PRECISION}
    ),
]
