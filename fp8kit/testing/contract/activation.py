"""Contract cases of the activations, against float64, and of their fused casts, against the codec.

Tolerances, with u = 2^-24: an engine may write GELU with tanh or as x * sigmoid(z). Either way the argument has a relative error of 4 u,
which a saturating function damps to less than 4 u absolute, and exp, tanh and the division add 4 u: 16 u |x| in all, with a factor 2 in
hand. The slope is g + x z'(x) g (1 - g) with g in [0, 1] known to 8 u absolute (1 - tanh^2 cancels), so 16 u (1 + |x z'(x)|), times |dy|.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Cast, Kernels
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, DType, Format
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import ROUNDOFF, Array, draw, table, wide
from fp8kit.testing.contract.norm import check_fused

ACTIVATIONS = ("gelu", "relu", "silu", "swiglu")
_GELU = math.sqrt(2 / math.pi)


def _curve(x: Array, activation: str) -> tuple[Array, Array, Array, Array]:
    """Value, slope, and the error bounds of both, of a one-input activation in float64."""
    if activation == "relu":
        return np.maximum(x, 0), (x > 0) * 1.0, ROUNDOFF * np.abs(x), np.zeros_like(x)
    if activation == "gelu":
        t, inner = np.tanh(_GELU * (x + 0.044715 * x**3)), _GELU * (1 + 3 * 0.044715 * x**2)
        value, slope, rate = 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner, 2 * inner
    else:
        g = 1 / (1 + np.exp(-x))
        value, slope, rate = x * g, g + x * g * (1 - g), np.ones_like(x)
    return value, slope, 16 * ROUNDOFF * np.abs(x), 16 * ROUNDOFF * (1 + np.abs(x * rate))


def _oracle(x: Array, activation: str) -> tuple[Array, Array]:
    if activation != "swiglu":
        value, _, slack, _ = _curve(x, activation)
        return value, slack
    left, right = np.split(x, 2, axis=1)
    value, _, slack, _ = _curve(left, "silu")
    return value * right, slack * np.abs(right) + 4 * ROUNDOFF * np.abs(value * right)


def _oracle_bwd(dy: Array, x: Array, activation: str) -> tuple[Array, Array]:
    if activation != "swiglu":
        _, slope, _, slack = _curve(x, activation)
        return dy * slope, np.abs(dy) * slack + 2 * ROUNDOFF * np.abs(dy * slope)
    left, right = np.split(x, 2, axis=1)
    value, slope, value_slack, slope_slack = _curve(left, "silu")
    reference = np.concatenate([dy * right * slope, dy * value], axis=1)
    slack = np.concatenate([np.abs(dy * right) * slope_slack, np.abs(dy) * value_slack], axis=1)
    return reference, slack + 4 * ROUNDOFF * np.abs(reference)


def _data(dtype: DType, shape: tuple[int, int], activation: str, biased: bool) -> tuple[Array, Array | None, tuple[int, int]]:
    """x of 3 standard deviations (so that both tails are met), a bias or None, and the shape of y."""
    m, f = shape
    columns = 2 * f if activation == "swiglu" else f
    return draw(1, (m, columns), dtype, 3.0), draw(2, (columns,), dtype) if biased else None, (m, f)


def _put(bias: Array | None, device: Device) -> ArrayView | None:
    return None if bias is None else put(bias, device)


def _sum(x: Array, bias: Array | None) -> Array:
    return wide(x) if bias is None else wide(x) + wide(bias)


def _fwd(dtype: DType, activation: str, shape: tuple[int, int], biased: bool = False,
         start: float | None = None) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, biased)
        y = poisoned(out, dtype, device)
        amax = None if start is None else put(np.array([start], np.float32), device)
        kernels.act_fwd(put(x, device), _put(bias, device), y, amax, None, activation, 0)
        reference, slack = _oracle(_sum(x, bias), activation)
        assert_close("y", get(y), reference, dtype, slack)
        if amax is not None:
            most = max(np.float32(start or 0), np.abs(get(y).astype(np.float32)).max(initial=0))
            assert_same_bits("amax", get(amax), np.array([most], np.float32))

    return run


def _fwd_cast(dtype: DType, activation: str, shape: tuple[int, int], fmt: Format, pad: tuple[int, int], keep_y: bool,
              transposed: bool = True) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, True)

        def call(y: ArrayView | None, cast: Cast | None) -> None:
            kernels.act_fwd(put(x, device), _put(bias, device), y, None, cast, activation, 0)

        plain = poisoned(out, dtype, device)
        call(plain, None)
        cast, check = check_fused(kernels, device, out, fmt, get(plain), pad, transposed)
        y = poisoned(out, dtype, device) if keep_y else None
        call(y, cast)
        if y is not None:
            assert_same_bits("y", get(y), get(plain))
        check()

    return run


def _bwd(dtype: DType, activation: str, shape: tuple[int, int], biased: bool = False,
         start: float | None = None) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, biased)
        dy = draw(3, out, dtype)
        dx, dbias = poisoned(x.shape, dtype, device), poisoned((x.shape[1],), dtype, device) if biased else None
        amax = None if start is None else put(np.array([start], np.float32), device)
        kernels.act_bwd(put(dy, device), put(x, device), _put(bias, device), dx, dbias, amax, None, activation,
                        workspace(kernels.act_bwd_workspace(*x.shape), device), 0)
        reference, slack = _oracle_bwd(wide(dy), _sum(x, bias), activation)
        assert_close("dx", get(dx), reference, dtype, slack)
        _check_dbias(dbias, get(dx), dtype)
        if amax is not None:
            most = max(np.float32(start or 0), np.abs(get(dx).astype(np.float32)).max(initial=0))
            assert_same_bits("amax", get(amax), np.array([most], np.float32))

    return run


def _check_dbias(dbias: ArrayView | None, dx: Array, dtype: DType) -> None:
    """dbias holds the column sums of the dx that was stored."""
    if dbias is not None:
        assert_close("dbias", get(dbias), wide(dx).sum(0), dtype, sum_slack(np.abs(wide(dx)).sum(0), len(dx)))


def _bwd_cast(dtype: DType, activation: str, shape: tuple[int, int], fmt: Format, pad: tuple[int, int], keep_dx: bool,
              transposed: bool = True) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, True)
        dy = draw(3, out, dtype)

        def call(dx: ArrayView | None, dbias: ArrayView | None, cast: Cast | None) -> None:
            kernels.act_bwd(put(dy, device), put(x, device), _put(bias, device), dx, dbias, None, cast, activation,
                            workspace(kernels.act_bwd_workspace(*x.shape), device), 0)

        plain = poisoned(x.shape, dtype, device)
        call(plain, None, None)
        cast, check = check_fused(kernels, device, (x.shape[0], x.shape[1]), fmt, get(plain), pad, transposed)
        dx, dbias = poisoned(x.shape, dtype, device) if keep_dx else None, poisoned((x.shape[1],), dtype, device)
        call(dx, dbias, cast)
        if dx is not None:
            assert_same_bits("dx", get(dx), get(plain))
        _check_dbias(dbias, get(plain), dtype)
        check()

    return run


_SHAPES = ((17, 33), (1, 64), (5, 1), (0, 16), (130, 96))

CASES = [
    *table("act_fwd", {f"{d.name}-{a}-{s[0]}x{s[1]}": _fwd(d, a, s) for d in HIGH_PRECISION for a in ACTIVATIONS for s in _SHAPES}),
    *table("act_fwd", {f"{d.name}-{a}-bias-amax-{x}": _fwd(d, a, (19, 40), True, x) for d in HIGH_PRECISION for a in ACTIVATIONS
                       for x in (0.0, 1e4)}),
    *table("act_fwd", {f"{d.name}-{a}-cast": _fwd_cast(d, a, (32, 48), E4M3, (0, 0), False) for d in HIGH_PRECISION for a in ACTIVATIONS}),
    *table("act_fwd", {f"{d.name}-{a}-cast-padded-y": _fwd_cast(d, a, (17, 33), E5M2, (15, 15), True)
                       for d in HIGH_PRECISION for a in ACTIVATIONS}),
    *table("act_fwd", {f"{d.name}-gelu-cast-rowwise": _fwd_cast(d, "gelu", (70, 80), E4M3, (10, 0), False, False) for d in HIGH_PRECISION}),
    *table("act_bwd", {f"{d.name}-{a}-{s[0]}x{s[1]}": _bwd(d, a, s) for d in HIGH_PRECISION for a in ACTIVATIONS for s in _SHAPES}),
    *table("act_bwd", {f"{d.name}-{a}-bias-amax-{x}": _bwd(d, a, (70, 40), True, x) for d in HIGH_PRECISION for a in ACTIVATIONS
                       for x in (0.0, 1e4)}),
    *table("act_bwd", {f"{d.name}-{a}-cast": _bwd_cast(d, a, (32, 48), E5M2, (0, 0), False) for d in HIGH_PRECISION for a in ACTIVATIONS}),
    *table("act_bwd", {f"{d.name}-{a}-cast-padded-dx": _bwd_cast(d, a, (17, 33), E4M3, (15, 14), True)
                       for d in HIGH_PRECISION for a in ACTIVATIONS}),
    *table("act_bwd", {f"{d.name}-gelu-cast-rowwise": _bwd_cast(d, "gelu", (70, 80), E5M2, (10, 0), False, False) for d in HIGH_PRECISION}),
]
