"""The cross entropy against float64.

Tolerances, with u = 2^-24: the log-sum-exp of V terms has the relative error of their sum, (V + 16) u with 8
u of it for exp and log, as an absolute error, and rounds at its own size. A probability exp(x - lse) has the
relative error u (|x| + |lse|) of its argument and 8 u of exp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.formats import DType, float32, int32, int64
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    sized,
    sum_slack,
    typed,
    wide,
)

IGNORE = -100


def _lse(x: Array) -> Array:
    return np.logaddexp.reduce(x, axis=1, initial=-np.inf)  # type: ignore[no-any-return]


def _inputs(
    s: Sampler,
    m: int,
    n: int,
    kind: DType = int64,
    smoothing: float = 0.0,
    ignored: int = 0,
    stray: bool = False,
) -> Arguments:
    """Returns sample arguments: every ``ignored``-th target is ``IGNORE``, none with 0; with ``stray`` two
    targets are out of range."""

    def targets() -> Array:
        found = s.random.integers(0, max(n, 1), m)
        if ignored:
            found[::ignored] = IGNORE
        if stray:
            found[1], found[2] = n, -1
        return found

    return {
        "logits": s.normal(m, n, scale=4.0),
        "targets": s.array((m,), kind, targets),
        "ignore_index": IGNORE,
        "label_smoothing": smoothing,
    }


def cross_entropy_fwd(s: Sampler, m: int, n: int, mean: bool = True, **inputs: Any) -> Arguments:
    """``mean``: the total is asked for; ``inputs``: see ``_inputs``."""
    return {
        **_inputs(s, m, n, **inputs),
        "loss": s.output(m, dtype=float32),
        "lse": s.output(m, dtype=float32),
        "total": s.output(2, dtype=float32) if mean else None,
    }


def cross_entropy_fwd_oracle(a: Any) -> Results:
    """The definition."""
    x, t, smoothing = wide(a.logits), a.targets, a.label_smoothing
    (m, v), lse = x.shape, _lse(x)
    inside, kept = (t >= 0) & (t < v), t != a.ignore_index
    picked = x[np.arange(m), np.where(inside, t, 0)]
    loss = lse - (1 - smoothing) * picked - smoothing * x.mean(1)
    loss = np.where(kept, np.where(inside, loss, np.nan), 0)
    lse_slack = (v + 16) * ROUNDOFF + 2 * ROUNDOFF * np.abs(lse)
    slack = lse_slack + 4 * ROUNDOFF * (np.abs(lse) + np.abs(picked))
    slack = slack + smoothing * sum_slack(np.abs(x).mean(1), v)
    count, mean, mean_slack = int(kept.sum()), 0.0, 0.0
    if count:
        mean = loss[kept].mean()
        mean_slack = slack[kept].mean() + sum_slack(np.abs(loss[kept]).mean(), count)
    return {
        "loss": (loss, np.where(kept, slack, 0)),
        "lse": (lse, lse_slack),
        "total": (np.array([mean, count]), np.nan_to_num(np.array([mean_slack, 0.0]))),
    }


def cross_entropy_bwd(s: Sampler, m: int, n: int, mean: bool = False, **inputs: Any) -> Arguments:
    """``mean``: dloss is one number, and the total comes; ``inputs``: see ``_inputs``."""
    made = _inputs(s, m, n, **inputs)
    count = float((made["targets"].numpy() != IGNORE).sum()) if mean else 0.0
    return {
        **made,
        "lse": s.array((m,), float32, lambda: _lse(wide(made["logits"].numpy()))),
        "dloss": s.normal(1 if mean else m, dtype=float32),
        "total": s.put((1.5, count), float32) if mean else None,
        "dlogits": s.output(m, n),
    }


def cross_entropy_bwd_oracle(a: Any) -> Results:
    """The derivative."""
    x, t, lse, smoothing = wide(a.logits), a.targets, wide(a.lse)[:, None], a.label_smoothing
    v = x.shape[1]
    kept = (t != a.ignore_index)[:, None]
    onehot = (np.arange(v) == t[:, None]) * 1.0
    p = np.exp(x - lse)
    upstream = wide(a.dloss)[:, None] / (1 if a.total is None else max(float(a.total[1]), 1))
    dlogits = np.where(kept, (p - (1 - smoothing) * onehot - smoothing / v) * upstream, 0)
    slack = p * (ROUNDOFF * (np.abs(x) + np.abs(lse)) + 8 * ROUNDOFF)
    slack = np.abs(upstream) * (slack + 4 * ROUNDOFF * (p + onehot + smoothing / v))
    return {"dlogits": (dlogits, np.where(kept, slack + 2 * ROUNDOFF * np.abs(dlogits), 0))}


_SIZES = sized(((17, 33), (1, 64), (5, 1), (0, 16), (40, 1000)))
_OPTIONS: dict[str, Options] = {
    "smoothing": {"smoothing": 0.1},
    "ignored": {"ignored": 3},
    "smoothing-ignored": {"smoothing": 0.25, "ignored": 3},
}
_SMALL: Options = {"m": 17, "n": 33}
_CASES = {**_SIZES, **product("{case}", {"case": _OPTIONS}, kind=int32, **_SMALL)}
_MEAN = product("{case}-mean", {"case": _OPTIONS}, kind=int32, mean=True, **_SMALL)
_IN_PLACE: Options = {**_SMALL, "smoothing": 0.1, "ignored": 3, "mean": True, "same": {"dlogits": "logits"}}
_ALL_IGNORED: Options = {"m": 4, "n": 9, "kind": int32, "ignored": 1}
_STRAY = product("{kind.name}-out-of-range", {"kind": (int32, int64)}, m=7, n=33, mean=False, stray=True)

TESTS = (
    KernelTest(
        "cross_entropy_fwd",
        cross_entropy_fwd,
        cross_entropy_fwd_oracle,
        {**typed(_CASES), **_STRAY, "all-ignored": _ALL_IGNORED},
    ),
    KernelTest(
        "cross_entropy_bwd",
        cross_entropy_bwd,
        cross_entropy_bwd_oracle,
        {
            **typed({**_CASES, **_MEAN, "dlogits-is-logits": _IN_PLACE}),
            "all-ignored": {**_ALL_IGNORED, "mean": True},
        },
    ),
)
