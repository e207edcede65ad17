"""xIELU against float64.

Tolerances, with u = 2^-24 (``ROUNDOFF``): p and n come of two library functions and a sum, within 8 u of
themselves; expm1 is within 4 u of its value. Each of value and slope is then at most five more roundings of
terms no larger than the magnitudes that are summed. Sums with the bias are rounded to float32 in the oracle
too. The numbers' gradients are sums of as many terms as x has elements, each with the error of its factors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Results,
    Sampler,
    product,
    sum_slack,
    typed,
    wide,
)

_PARAMS = (0.5, -1e-6)
_SIZES = ((17, 33), (1, 64), (5, 1), (0, 16), (3, 0), (130, 96), (64, 4100))


class _Curve(NamedTuple):
    u: Array
    above: Array
    curved: Array
    p: float
    n: float
    beta: float


def _curve(a: Any) -> _Curve:
    u = wide(a.x if a.bias is None else a.x.astype(np.float32) + a.bias.astype(np.float32))
    beta, eps = (float(np.float32(value)) for value in a.params)
    p, n = (float(np.logaddexp(0.0, wide(alpha)[0])) for alpha in (a.alpha_p, a.alpha_n))
    return _Curve(u, u > 0, np.expm1(np.where(u > eps, eps, u)), p, beta + n, beta)


def xielu_fwd(
    s: Sampler,
    m: int,
    n: int,
    biased: bool = False,
    special: bool = False,
    alphas: tuple[float, float] = (0.2, -1.05),
) -> Arguments:
    """x of 3 standard deviations, 0 and numbers above eps among them. ``special``: NaN and Inf too."""

    def values() -> Array:
        x = s.draw((m, n), 3.0)
        flat = x.reshape(-1)
        flat[: min(flat.size, 3)] = (0.0, -5e-7, 5e-7)[: flat.size]
        if special:
            x[1, 3], x[2, 4], x[3, 5] = np.nan, np.inf, -np.inf
        return x.astype(s.dtype.numpy)

    return {
        "x": s.array((m, n), s.dtype, values),
        "bias": s.normal(n) if biased else None,
        "alpha_p": s.put(np.array(alphas[:1]).astype(s.dtype.numpy)),
        "alpha_n": s.put(np.array(alphas[1:]).astype(s.dtype.numpy)),
        "y": s.output(m, n),
        "params": _PARAMS,
    }


def xielu_fwd_oracle(a: Any) -> Results:
    """The formula of ``backends.activation``."""
    c = _curve(a)
    y = np.where(c.above, c.p * c.u**2, c.n * (c.curved - c.u)) + c.beta * c.u
    size = np.where(c.above, c.p * c.u**2, c.n * (np.abs(c.curved) + np.abs(c.u))) + c.beta * np.abs(c.u)
    return {"y": (y, 16 * ROUNDOFF * size)}


def xielu_bwd(s: Sampler, m: int, n: int, **options: Any) -> Arguments:
    """As ``xielu_fwd``."""
    forward = xielu_fwd(s, m, n, **options)
    del forward["y"]
    outputs = {"dx": s.output(m, n), "dalpha_p": s.output(1), "dalpha_n": s.output(1)}
    return {**forward, "dy": s.normal(m, n), **outputs}


def xielu_bwd_oracle(a: Any) -> Results:
    """Its derivatives."""
    c, dy = _curve(a), wide(a.dy)
    slope = np.where(c.above, 2 * c.p * c.u, c.n * c.curved)
    found: Results = {"dx": (dy * (slope + c.beta), 16 * ROUNDOFF * np.abs(dy) * (np.abs(slope) + c.beta))}
    terms = {
        "alpha_p": (np.where(c.above, dy * c.u**2, 0), np.where(c.above, np.abs(dy) * c.u**2, 0)),
        "alpha_n": (
            np.where(c.above, 0, dy * (c.curved - c.u)),
            np.where(c.above, 0, np.abs(dy) * (np.abs(c.curved) + np.abs(c.u))),
        ),
    }
    for name, (values, sizes) in terms.items():
        bend = 1 / (1 + np.exp(-wide(getattr(a, name))))
        total, most = values.sum(keepdims=True).reshape(1), sizes.sum()
        # sums of sums: see the contract
        slack = sum_slack(most, 64 + values.size / 2**16) + 16 * ROUNDOFF * most
        found[f"d{name}"] = (total * bend, slack * bend)
    return found


_CASES = {
    **product("{m}x{n}-{biased}", {"m n": _SIZES, "biased": (False, True)}),
    "steep": {"m": 12, "n": 40, "alphas": (30.0, -30.0)},
}
_FWD = {**_CASES, "special": {"m": 12, "n": 40, "special": True}}

TESTS = (
    KernelTest("xielu_fwd", xielu_fwd, xielu_fwd_oracle, typed(_FWD), {"biased": True}),
    KernelTest("xielu_bwd", xielu_bwd, xielu_bwd_oracle, typed(_CASES), {"biased": True}),
)
