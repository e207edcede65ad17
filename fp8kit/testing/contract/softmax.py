"""Softmax and its gradient against float64.

Tolerances, with u = 2^-24: exp(x - top) has the relative error u |x - top| of its argument and 8 u of exp;
the sum of N such terms N + 4 roundings more, and the quotient one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Results,
    Sampler,
    sized,
    sum_slack,
    typed,
    wide,
)


def softmax_fwd(s: Sampler, m: int, n: int, special: bool = False) -> Arguments:
    """``special``: rows with NaN, Inf and -Inf among others, and one of -Inf alone."""
    x = s.normal(m, n, scale=4.0)
    if special:
        values = x.numpy().copy()
        values[0, 1], values[1, 2], values[2, :-1], values[3] = np.nan, np.inf, -np.inf, -np.inf
        x = s.put(values)
    return {"x": x, "y": s.output(m, n)}


def _softmax(x: Array) -> Array:
    with np.errstate(invalid="ignore"):
        terms = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
        return terms / terms.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]


def softmax_fwd_oracle(a: Any) -> Results:
    """The definition."""
    x = wide(a.x)
    y = _softmax(x)
    with np.errstate(invalid="ignore"):
        apart = np.abs(x - x.max(axis=1, keepdims=True, initial=-np.inf))
    # the largest argument of a term that is not 0 in float32
    slack = y * ROUNDOFF * (np.minimum(apart, 128) + 128 + 16 + x.shape[1])
    return {"y": (y, np.nan_to_num(slack))}


def softmax_bwd(s: Sampler, m: int, n: int) -> Arguments:
    """Probabilities and a gradient."""
    y = s.put(_softmax(s.draw((m, n)) * 4.0), s.dtype)
    return {"y": y, "dy": s.normal(m, n), "dx": s.output(m, n)}


def softmax_bwd_oracle(a: Any) -> Results:
    """The derivative."""
    y, dy = wide(a.y), wide(a.dy)
    dot = (y * dy).sum(axis=1, keepdims=True)
    slack = sum_slack((y * np.abs(dy)).sum(axis=1, keepdims=True), y.shape[1])
    dx = y * (dy - dot)
    return {"dx": (dx, y * (slack + ROUNDOFF * (np.abs(dy) + np.abs(dot))) + ROUNDOFF * np.abs(dx))}


_CASES = typed(sized(((17, 33), (1, 64), (5, 1), (0, 16), (3, 0), (4, 5000))))

TESTS = (
    KernelTest(
        "softmax_fwd",
        softmax_fwd,
        softmax_fwd_oracle,
        _CASES
        | typed({"special": {"m": 6, "n": 9, "special": True}})
        | typed({"in-place": {"m": 5, "n": 40, "same": {"y": "x"}}}),
    ),
    KernelTest(
        "softmax_bwd",
        softmax_bwd,
        softmax_bwd_oracle,
        _CASES | typed({"in-place": {"m": 5, "n": 40, "same": {"dx": "dy"}}}),
    ),
)
