"""Scales of lines: every bit from float64, where the powers of two are exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.formats import float32
from fp8kit.testing.contract import Arguments, Array, KernelTest, Results, Sampler, product, typed, wide

_SIZES = ((17, 33), (1, 64), (5, 1), (0, 16), (3, 0), (130, 96), (9, 4100))


def line_scales(
    s: Sampler,
    m: int,
    n: int,
    axis: int = 0,
    power_2: bool = True,
    biased: bool = False,
    special: bool = False,
) -> Arguments:
    """Lines of very different sizes. ``special``: a line of zeros, one with NaN, one with Inf, one of the
    least numbers there are."""

    def values() -> Array:
        x = s.draw((m, n)) * 2.0 ** np.arange(-8, -8 + m)[:, None].clip(-8, 8)
        if special:
            lines = x if axis == 0 else x.T
            lines[0], lines[1, 0], lines[2, 0], lines[3] = 0, np.nan, -np.inf, 1e-44
        return x.astype(s.dtype.numpy)

    return {
        "x": s.array((m, n), s.dtype, values),
        "bias": s.normal(n) if biased else None,
        "scales": s.output(n if axis else m, dtype=float32),
        "axis": axis,
        "power_2": power_2,
    }


def line_scales_oracle(a: Any) -> Results:
    """The definition, by ``frexp``."""
    x = np.abs(a.x.astype(np.float32) + (0 if a.bias is None else a.bias.astype(np.float32)))
    most = np.fmax.reduce(wide(x), axis=1 - a.axis, initial=0)
    exponents = np.where(np.isinf(most), 128, np.frexp(most)[1]) - 1
    found = 2.0 ** exponents.clip(-100, 100) if a.power_2 else most.clip(2.0**-100, 2.0**100)
    return {"scales": np.where(most == 0, 1.0, found).astype(np.float32)}


def scale_lines(
    s: Sampler,
    m: int,
    n: int,
    axis: int = 0,
    factor: float = 1.0,
    divide: bool = False,
    scaled: bool = True,
    powers: bool = True,
) -> Arguments:
    """``powers``: scales that are powers of two, else any."""
    count = n if axis else m
    scales = s.draw((count,)) + 4.0
    scales = np.exp2(np.round(scales)) if powers else scales
    return {
        "x": s.normal(m, n),
        "scales": s.put(scales.astype(np.float32)) if scaled else None,
        "out": s.output(m, n),
        "axis": axis,
        "factor": factor,
        "divide": divide,
    }


def scale_lines_oracle(a: Any) -> Results:
    """Two float32 operations, the second rounded once more to a narrower type."""
    out = a.x.astype(np.float32) * np.float32(a.factor)
    if a.scales is not None:
        scales = a.scales if a.axis else a.scales[:, None]
        out = out / scales if a.divide else out * scales
    return {"out": out.astype(a.x.dtype)}


_SCALES = {
    **product("{m}x{n}-{axis}-{biased}", {"m n": _SIZES, "axis": (0, 1), "biased": (False, True)}),
    **product(
        "special-{axis}-{power_2}", {"axis": (0, 1), "power_2": (True, False)}, m=12, n=40, special=True
    ),
    **product("exact-{axis}", {"axis": (0, 1)}, m=17, n=33, power_2=False),
    **product(
        "half-{axis}", {"axis": (0, 1)}, m=12, n=40, biased=True, parts={"x": (1, 40, 0), "bias": (0, 40, 0)}
    ),
}
_APPLIED = {
    **product("{m}x{n}-{axis}-{divide}", {"m n": _SIZES, "axis": (0, 1), "divide": (False, True)}),
    **product("any-{divide}", {"divide": (False, True)}, m=12, n=40, powers=False, factor=0.3),
    "constant": {"m": 12, "n": 41, "scaled": False, "factor": 0.7},
    "in-place": {"m": 12, "n": 41, "same": {"out": "x"}},
}

TESTS = (
    KernelTest("line_scales", line_scales, line_scales_oracle, typed(_SCALES), {"biased": True}),
    KernelTest("scale_lines", scale_lines, scale_lines_oracle, typed(_APPLIED)),
)
