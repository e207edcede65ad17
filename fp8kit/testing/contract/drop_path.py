"""Stochastic depth: samples against Philox4x32-10 written plainly, the arithmetic against float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.testing.contract import ROUNDOFF, Arguments, KernelTest, Results, Sampler, product, typed, wide
from fp8kit.testing.contract.dropout import dropped, keep_factors
from fp8kit.testing.contract.running_sums import TOKENS, bad_cases

COUNT = 6
# an empty sequence among them; rows from 33 on belong to the last
STARTS = (0, 4, 4, 9, 10, 30, 33)


def drop_path(
    s: Sampler,
    m: int,
    n: int,
    inner: int = 1,
    count: int = 0,
    residual: bool = True,
    starts: tuple[int, ...] | None = None,
    p: float = 0.4,
    infinite: bool = False,
) -> Arguments:
    """``count`` samples, 0 for one a row. ``infinite``: where a sample is dropped, which is of no
    consequence."""
    count = len(starts) - 1 if starts else count or m
    x = s.draw((m, n)).astype(s.dtype.numpy)
    rng = s.rng()
    if infinite:
        factors = keep_factors(rng.numpy(), p, (count,))
        x[factors[samples(m, inner, count, starts)] == 0] = np.inf
    return {
        "x": s.put(x),
        "residual": s.normal(m, n) if residual else None,
        "y": s.output(m, n),
        "starts": s.sums(*starts) if starts else None,
        "inner": inner,
        "count": count,
        "p": p,
        "rng": rng,
    }


def samples(m: int, inner: int, count: int, starts: Any) -> Any:
    """The sample of each row."""
    rows = np.arange(m)
    if starts is None:
        return rows // inner % count
    return np.searchsorted(starts[:count], rows, side="right") - 1


def drop_path_oracle(a: Any) -> Results:
    """The definition."""
    factors = keep_factors(a.rng, a.p, (a.count,))[samples(len(a.x), a.inner, a.count, a.starts)]
    value = dropped(a.x, factors[:, None] + np.zeros(a.x.shape))
    y = value if a.residual is None else value + wide(a.residual)
    return {"y": (y, ROUNDOFF * (np.abs(value) + np.abs(y)))}


_PLACES = {
    **product("{m}x{n}-{inner}", {"m n": ((36, 64), (42, 5), (12, 33)), "inner": (1, 2)}),
    "plain": {"m": 30, "n": 17, "inner": 5, "residual": False},
    "y-is-x": {"m": 30, "n": 17, "inner": 5, "same": {"y": "x"}},
}
_CASES = {
    **product("{case}", {"case": _PLACES}, count=COUNT, infinite=True),
    "packed": {"m": 37, "n": 24, "starts": STARTS, "infinite": True},
}
_BAD = bad_cases({"m": TOKENS, "n": 24, "residual": False, "p": 0.5}, {"starts": ("starts",)})

TESTS = (KernelTest("drop_path", drop_path, drop_path_oracle, {**typed(_CASES), **_BAD}, {"p": 0.1}),)
