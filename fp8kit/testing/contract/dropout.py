"""Dropout: the mask against Philox4x32-10 written plainly, the arithmetic against float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    epsilon,
    product,
    sized,
    summed,
    typed,
    wide,
)

RNG = np.array([-0x123456789ABCDEF, 0x5_0000_0003], np.int64)
SIZES = ((17, 33), (1, 64), (5, 1), (0, 16), (130, 96))
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
    return np.choose((np.asarray(indices) % 4).astype(np.int64), c)


def keep_factors(rng: Array | None, p: float, shape: tuple[int, ...]) -> Array:
    """0 or float32(1 / (1 - p)) as float64 for each element of an array of ``shape``."""
    return factors_of(rng, p, np.arange(int(np.prod(shape))).reshape(shape))


def factors_of(rng: Array | None, p: float, indices: Array) -> Array:
    """The same for elements ``indices``, int64 of any shape; 1 without dropout."""
    if not p or rng is None:
        return np.ones(indices.shape)
    kept = philox(rng, indices) >= int(p * 2.0**32)
    return kept * float(np.float32(1 / (1 - p)))


def dropped(x: Any, factors: Array) -> Array:
    """x times its factors in float64; what is dropped is 0, whatever it was."""
    return np.where(factors == 0, 0, wide(x) * factors)


def dropout_add(
    s: Sampler, m: int, n: int, p: float = 0.1, bias: bool = True, residual: bool = True
) -> Arguments:
    """x, and what is added to it."""
    return {
        "x": s.normal(m, n),
        "bias": s.normal(n) if bias else None,
        "residual": s.normal(m, n) if residual else None,
        "y": s.output(m, n),
        "p": p,
        "rng": s.rng() if p else None,
    }


def dropout_add_oracle(a: Any) -> Results:
    """Three operations, one rounding."""
    value = wide(a.x) if a.bias is None else wide(a.x) + wide(a.bias)
    value = dropped(value, keep_factors(a.rng, a.p, a.x.shape))
    y = value if a.residual is None else value + wide(a.residual)
    return {"y": (y, 2 * ROUNDOFF * np.abs(value) + ROUNDOFF * np.abs(y))}


def dropout_bwd(s: Sampler, m: int, n: int, p: float = 0.1, dx: bool = True, dbias: bool = True) -> Arguments:
    """``dx``, ``dbias``: what is asked for."""
    return {
        "dy": s.normal(m, n),
        "dx": s.output(m, n) if dx else None,
        "dbias": s.output(n) if dbias else None,
        "p": p,
        "rng": s.rng() if p else None,
    }


def dropout_bwd_oracle(a: Any) -> Results:
    """dbias sums dx before or after its rounding: half an epsilon of each term is allowed."""
    dx = dropped(a.dy, keep_factors(a.rng, a.p, a.dy.shape))
    dbias, slack = summed(dx)
    slack = slack + epsilon(a.dy.dtype) / 2 * np.abs(dx).sum(0)
    return {"dx": (dx, ROUNDOFF * np.abs(dx)), "dbias": (dbias, slack)}


_PLAIN: Options = {"bias": False, "residual": False}
_IN_PLACE: Options = {"same": {"y": "x"}}
_SMALL: Options = {"m": 9, "n": 37}
_ADD = {
    **product("{p}-{size}", {"p": (0.0, 0.1), "size": sized(SIZES)}),
    **product("{p}-plain", {"p": (0.0, 0.5)}, **_SMALL, **_PLAIN),
    **product("{p}-y-is-x", {"p": (0.0, 0.9)}, **_SMALL, **_IN_PLACE),
    **product("{p}-y-is-x-plain", {"p": (0.0, 0.5)}, **_SMALL, **_PLAIN, **_IN_PLACE),
}
_WANTED: dict[str, Options] = {"dx": {"dbias": False}, "dbias": {"dx": False}, "both": {}}
_BWD = product("{p}-{wanted}-{size}", {"p": (0.0, 0.1), "wanted": _WANTED, "size": sized(SIZES)})
_DX_IS_DY: Options = {**_SMALL, "p": 0.3, "same": {"dx": "dy"}}

TESTS = (
    KernelTest("dropout_add", dropout_add, dropout_add_oracle, typed(_ADD)),
    KernelTest("dropout_bwd", dropout_bwd, dropout_bwd_oracle, typed({**_BWD, "dx-is-dy": _DX_IS_DY})),
)
