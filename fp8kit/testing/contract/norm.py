"""The normalisations against float64.

Tolerances, with u = 2^-24: the mean's error is that of a sum of N; a deviation d adds its own rounding;
rstd's relative error is half that of the sum of squares, (N + 8) u, plus what the deviations' error does to
it. Products add a few u of each factor.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import NORMALIZATIONS, Rule
from fp8kit.formats import E4M3, E5M2, float32
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    coded,
    product,
    sized,
    sum_slack,
    summed,
    typed,
    wide,
)
from fp8kit.testing.contract.dropout import SIZES

LAYER, _, L2 = NORMALIZATIONS
NORMS = NORMALIZATIONS[:2]  # those with parameters
EPSILON = 1e-5


def _statistics(x: Array, kind: str, epsilon: float) -> tuple[Array, Array]:
    """Mean (0 but for LayerNorm) and rstd of each row."""
    mean = x.mean(1, keepdims=True) * (kind == LAYER)
    epsilon = epsilon / max(x.shape[1], 1) if kind == L2 else epsilon
    return mean, 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + epsilon)


def _row_means(x: Array) -> tuple[Array, Array]:
    """The mean of each row, (rows, 1), and its slack."""
    return x.mean(1, keepdims=True), sum_slack(np.abs(x).mean(1, keepdims=True), x.shape[1])


def _gain(a: Any) -> Any:
    """The factor of each column."""
    return a.x.shape[1] ** -0.5 if a.weight is None else wide(a.weight) + a.zero_centered_gamma


def norm_fwd(
    s: Sampler,
    m: int,
    n: int,
    kind: str = LAYER,
    centred: bool = False,
    biased: bool = True,
    offset: float = 0.3,
    **result: Any,
) -> Arguments:
    """Rows round ``offset``; ``result``: see ``Sampler.result``."""
    return {
        "x": s.normal(m, n, scale=2.0, mean=offset),
        "weight": s.normal(n) if kind != L2 else None,
        "bias": s.normal(n) if kind == LAYER and biased else None,
        "mean": s.output(m, dtype=float32) if kind == LAYER else None,
        "rstd": s.output(m, dtype=float32),
        **s.result("y", m, n, **result),
        "normalization": kind,
        "epsilon": EPSILON,
        "zero_centered_gamma": centred,
    }


def norm_fwd_oracle(a: Any) -> Results:
    """The definition."""
    x, n, gain = wide(a.x), a.x.shape[1], _gain(a)
    mean, rstd = _statistics(x, a.normalization, a.epsilon)
    shift = 0.0 if a.bias is None else wide(a.bias)
    mean_slack = _row_means(x)[1] * (a.normalization == LAYER)
    d_slack = mean_slack + 2 * ROUNDOFF * (np.abs(x) + np.abs(mean))
    relative = (n + 8) * ROUNDOFF + 2 * d_slack.max(1, keepdims=True, initial=0) * rstd
    relative = 0.5 * relative + 4 * ROUNDOFF
    scaled = (x - mean) * rstd * gain
    slack = np.abs(gain) * rstd * d_slack + np.abs(scaled) * (relative + 4 * ROUNDOFF)
    return {
        "mean": (mean[:, 0], mean_slack[:, 0]),
        "rstd": (rstd[:, 0], (rstd * relative)[:, 0]),
        "y": (scaled + shift, slack + 2 * ROUNDOFF * np.abs(shift)),
    }


def norm_bwd(
    s: Sampler, m: int, n: int, kind: str = LAYER, centred: bool = False, residual: bool = False
) -> Arguments:
    """The statistics are those of x, rounded."""
    forward = norm_fwd(s, m, n, kind, centred, y=False)

    def statistic(which: int) -> ArrayView:
        x = forward["x"]
        return s.array((m,), float32, lambda: _statistics(wide(x.numpy()), kind, EPSILON)[which])

    return {
        **forward,
        "dy": s.normal(m, n),
        "mean": statistic(0) if kind == LAYER else None,
        "rstd": statistic(1),
        "residual": s.normal(m, n) if residual else None,
        "dx": s.output(m, n),
        "dweight": s.output(n) if kind != L2 else None,
        "dbias": s.output(n) if kind == LAYER else None,
    }


def norm_bwd_oracle(a: Any) -> Results:
    """Derivatives of the definition, for the statistics that come with the call."""
    x, dy, rstd = wide(a.x), wide(a.dy), wide(a.rstd)[:, None]
    layer = a.normalization == LAYER
    mean = wide(a.mean)[:, None] if layer else np.zeros((len(x), 1))
    unit = (x - mean) * rstd
    unit_slack = 3 * ROUNDOFF * (np.abs(x) + np.abs(mean)) * rstd
    d = dy * _gain(a)
    along, along_slack = _row_means(d * unit)
    along_slack = along_slack + (np.abs(d) * unit_slack).mean(1, keepdims=True)
    level, level_slack = (layer * found for found in _row_means(d))
    residual = 0.0 if a.residual is None else wide(a.residual)
    dx = rstd * (d - level - unit * along) + residual
    terms = 4 * ROUNDOFF * (np.abs(d) + np.abs(level) + np.abs(unit * along))
    slack = rstd * (terms + level_slack + np.abs(unit) * along_slack + unit_slack * np.abs(along))
    dweight, dweight_slack = summed(dy * unit)
    return {
        "dx": (dx, slack + 2 * ROUNDOFF * (np.abs(dx) + np.abs(residual))),
        "dweight": (dweight, dweight_slack + (np.abs(dy) * unit_slack).sum(0)),
    }


WIDE = (2053, 9001)  # rows of thousands, no multiple of anything
WHOLE = (136, 768, 2048, 4096, 8192)  # and of vectors


def _kinds(cases: dict[str, Options], kinds: tuple[str, ...] = NORMS) -> dict[str, Options]:
    """Cases of several normalisations."""
    return product("{kind}-{case}", {"kind": kinds, "case": cases})


_codes = functools.partial(coded, "y")


_FWD = {
    **_kinds(sized(SIZES), NORMALIZATIONS),
    **_kinds(
        {
            "zero_centered": {"m": 9, "n": 48, "centred": True},
            **product("amax-{amax}", {"amax": (0.0, 99.0)}, m=33, n=40),
            **{f"cast-{fmt}": _codes(32, 48, fmt=fmt) for fmt in (E4M3, E5M2)},
            "cast-by-amax": _codes(32, 48, rule=Rule(True, 0.0), amax=4.0),
            "cast-padded-y": _codes(17, 33, (15, 15), True),
            "cast-rowwise": _codes(70, 80, (10, 0), only="q"),
            "cast-zero_centered": {**_codes(33, 40, (15, 8), True), "centred": True},
            **product("3x{n}", {"n": WIDE}, m=3, centred=True),
            **{f"cast-33x{n}": _codes(33, n, (15, 16 * (n == 768)), True) for n in WHOLE},
        }
    ),
    "no-bias": {"m": 9, "n": 48, "biased": False},
}
_FULL: Options = {"centred": True, "residual": True}
_BWD = {
    **_kinds(sized(SIZES), NORMALIZATIONS),
    **_kinds(
        {f"dx-is-{a}": {"m": 17, "n": 40, "residual": True, "same": {"dx": a}} for a in ("dy", "residual")},
        NORMALIZATIONS,
    ),
    **_kinds(
        {
            "residual-zero_centered": {"m": 70, "n": 48, **_FULL},
            **product("3x{n}", {"n": WIDE}, m=3, **_FULL),
            **product("33x{n}", {"n": WHOLE}, m=33, **_FULL),
        }
    ),
}
_LARGE_MEAN = {"large-mean": {"m": 9, "n": 200, "offset": 100.0}}

TESTS = (
    KernelTest(
        "norm_fwd",
        norm_fwd,
        norm_fwd_oracle,
        {**typed(_FWD), **_kinds(_LARGE_MEAN)},
        {"y": False, "cast": {}},
    ),
    KernelTest("norm_bwd", norm_bwd, norm_bwd_oracle, {**typed(_BWD), "repeatable": {"m": 300, "n": 64}}),
)
