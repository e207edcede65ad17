"""Contract cases of the activations, against float64, and of their fused casts, against the codec.

Tolerances, with u = 2^-24: an engine may write GELU with tanh or as x * sigmoid(z). Either way the argument
has a relative error of 4 u, which a saturating function damps to less than 4 u absolute, and exp, tanh and
the division add 4 u: 16 u |x| in all, with a factor 2 in hand. The slope is g + x z'(x) g (1 - g) with g in
[0, 1] known to 8 u absolute (1 - tanh^2 cancels), so 16 u (1 + |x z'(x)|), times |dy|. The other smooth
activations are the same with another z, or without the factor x. Sums with the bias are rounded to float32 in
the oracle too, since clamping decides by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.backends.protocol import Cast, Kernels, Rule
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, DType, Format, float32
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import ROUNDOFF, Array, draw, table, wide
from fp8kit.testing.contract.norm import check_fused

_GELU = math.sqrt(2 / math.pi)
_PARAMS = {"clamped_swiglu": (2.0, 1.3, 0.75)}  # such that many elements lie beyond the limit
_FIRST = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
}  # what a gated activation does to its first half
_RATES = {"silu": 1.0, "qgelu": 1.702}


def _params(activation: str) -> tuple[float, ...]:
    return _PARAMS.get(activation, ())


def _curve(x: Array, curve: str) -> tuple[Array, Array, Array, Array]:
    """Value, slope, and the error bounds of both, of a one-input curve in float64."""
    if curve == "relu":
        return np.maximum(x, 0), (x > 0) * 1.0, ROUNDOFF * np.abs(x), np.zeros_like(x)
    if curve == "srelu":
        top = np.maximum(x, 0)
        return top**2, 2 * top, 4 * ROUNDOFF * top**2, 4 * ROUNDOFF * top
    if curve == "sigmoid":
        g = 1 / (1 + np.exp(-x))
        return g, g * (1 - g), 16 * ROUNDOFF * np.ones_like(x), 16 * ROUNDOFF * np.ones_like(x)
    if curve == "gelu":
        t, inner = np.tanh(_GELU * (x + 0.044715 * x**3)), _GELU * (1 + 3 * 0.044715 * x**2)
        value, slope, rate = 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner, 2 * inner
    else:
        limit, alpha = _PARAMS["clamped_swiglu"][:2] if curve == "clamped" else (np.inf, _RATES[curve])
        c = np.minimum(x, limit)
        g = 1 / (1 + np.exp(-alpha * c))
        value, slope, rate = (
            c * g,
            np.where(x > limit, 0, g + alpha * c * g * (1 - g)),
            np.full_like(x, alpha),
        )
    return value, slope, 16 * ROUNDOFF * np.abs(x), 16 * ROUNDOFF * (1 + np.abs(x * rate))


def _factor(v: Array, activation: str) -> tuple[Array, Array, Array]:
    """What the second half becomes, its slope (0 or 1), and the value's error bound."""
    if activation != "clamped_swiglu":
        return v, np.ones_like(v), np.zeros_like(v)
    limit, _, offset = _PARAMS[activation]
    return (
        np.clip(v, -limit, limit) + offset,
        (np.abs(v) <= limit) * 1.0,
        2 * ROUNDOFF * (np.abs(v) + abs(offset)),
    )


def _oracle(x: Array, activation: str) -> tuple[Array, Array]:
    if not ACTIVATIONS[activation].gated:
        value, _, slack, _ = _curve(x, activation)
        return value, slack
    left, right = np.split(x, 2, axis=1)
    value, _, slack, _ = _curve(left, _FIRST[activation])
    factor, _, factor_slack = _factor(right, activation)
    return value * factor, slack * np.abs(factor) + np.abs(value) * factor_slack + 4 * ROUNDOFF * np.abs(
        value * factor
    )


def _oracle_bwd(dy: Array, x: Array, activation: str) -> tuple[Array, Array]:
    if not ACTIVATIONS[activation].gated:
        _, slope, _, slack = _curve(x, activation)
        return dy * slope, np.abs(dy) * slack + 2 * ROUNDOFF * np.abs(dy * slope)
    left, right = np.split(x, 2, axis=1)
    value, slope, value_slack, slope_slack = _curve(left, _FIRST[activation])
    factor, passes, factor_slack = _factor(right, activation)
    reference = np.concatenate([dy * factor * slope, dy * value * passes], axis=1)
    first_slack = np.abs(dy) * (np.abs(factor) * slope_slack + factor_slack * np.abs(slope))
    slack = np.concatenate([first_slack, np.abs(dy) * value_slack], axis=1)
    return reference, slack + 4 * ROUNDOFF * np.abs(reference)


def _data(
    dtype: DType, shape: tuple[int, int], activation: str, biased: bool
) -> tuple[Array, Array | None, tuple[int, int]]:
    """x of 3 standard deviations (so that both tails are met), a bias or None, and the shape of y."""
    m, f = shape
    columns = ACTIVATIONS[activation].parts * f
    return draw(1, (m, columns), dtype, 3.0), draw(2, (columns,), dtype) if biased else None, (m, f)


def _put(bias: Array | None, device: Device) -> ArrayView | None:
    return None if bias is None else put(bias, device)


def _sum(x: Array, bias: Array | None) -> Array:
    return wide(x) if bias is None else wide(x.astype(np.float32) + bias.astype(np.float32))


def _fwd(
    dtype: DType, activation: str, shape: tuple[int, int], biased: bool = False, start: float | None = None
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, biased)
        y = poisoned(out, dtype, device)
        amax = None if start is None else put(np.array([start], np.float32), device)
        kernels.act_fwd(put(x, device), _put(bias, device), y, amax, None, activation, _params(activation), 0)
        reference, slack = _oracle(_sum(x, bias), activation)
        assert_close("y", get(y), reference, dtype, slack)
        if amax is not None:
            most = max(np.float32(start or 0), np.abs(get(y).astype(np.float32)).max(initial=0))
            assert_same_bits("amax", get(amax), np.array([most], np.float32))

    return run


def _fwd_cast(
    dtype: DType,
    activation: str,
    shape: tuple[int, int],
    fmt: Format,
    pad: tuple[int, int],
    keep_y: bool,
    transposed: bool = True,
    rule: Rule | None = None,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, True)

        def call(y: ArrayView | None, cast: Cast | None) -> None:
            kernels.act_fwd(
                put(x, device), _put(bias, device), y, None, cast, activation, _params(activation), 0
            )

        plain = poisoned(out, dtype, device)
        call(plain, None)
        cast, check = check_fused(kernels, device, out, fmt, get(plain), pad, transposed, rule)
        y = poisoned(out, dtype, device) if keep_y else None
        call(y, cast)
        if y is not None:
            assert_same_bits("y", get(y), get(plain))
        check()

    return run


def _amax_alone(dtype: DType, activation: str, shape: tuple[int, int]) -> Callable[[Kernels, Device], None]:
    """The amax of a result that is written nowhere: the same as of the one that is."""

    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, True)
        y, amaxes = poisoned(out, dtype, device), [put(np.zeros(1, np.float32), device) for _ in range(2)]
        for where, amax in zip((y, None), amaxes, strict=True):
            kernels.act_fwd(
                put(x, device), _put(bias, device), where, amax, None, activation, _params(activation), 0
            )
        assert_same_bits("amax", get(amaxes[1]), get(amaxes[0]))

    return run


def _bwd(
    dtype: DType, activation: str, shape: tuple[int, int], biased: bool = False, start: float | None = None
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, biased)
        dy = draw(3, out, dtype)
        dx, dbias = (
            poisoned(x.shape, dtype, device),
            poisoned((x.shape[1],), dtype, device) if biased else None,
        )
        amax = None if start is None else put(np.array([start], np.float32), device)
        kernels.act_bwd(
            put(dy, device),
            put(x, device),
            _put(bias, device),
            dx,
            dbias,
            amax,
            None,
            activation,
            _params(activation),
            workspace(kernels.act_bwd_workspace(*x.shape), device),
            0,
        )
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


def _bwd_cast(
    dtype: DType,
    activation: str,
    shape: tuple[int, int],
    fmt: Format,
    pad: tuple[int, int],
    keep_dx: bool,
    transposed: bool = True,
    rule: Rule | None = None,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, bias, out = _data(dtype, shape, activation, True)
        dy = draw(3, out, dtype)

        def call(dx: ArrayView | None, dbias: ArrayView | None, cast: Cast | None) -> None:
            kernels.act_bwd(
                put(dy, device),
                put(x, device),
                _put(bias, device),
                dx,
                dbias,
                None,
                cast,
                activation,
                _params(activation),
                workspace(kernels.act_bwd_workspace(*x.shape), device),
                0,
            )

        plain = poisoned(x.shape, dtype, device)
        call(plain, None, None)
        cast, check = check_fused(
            kernels, device, (x.shape[0], x.shape[1]), fmt, get(plain), pad, transposed, rule
        )
        dx, dbias = (
            poisoned(x.shape, dtype, device) if keep_dx else None,
            poisoned((x.shape[1],), dtype, device),
        )
        call(dx, dbias, cast)
        if dx is not None:
            assert_same_bits("dx", get(dx), get(plain))
        _check_dbias(dbias, get(plain), dtype)
        check()

    return run


def _nan(activation: str) -> Callable[[Kernels, Device], None]:
    """A NaN in any half of x gives a NaN in y, there and nowhere else."""

    def run(kernels: Kernels, device: Device) -> None:
        x, _, out = _data(float32, (4, 40), activation, False)
        wanted = np.zeros(out, bool)
        for part in range(ACTIVATIONS[activation].parts):
            x[1 + part, 40 * part + 3 + part] = np.nan
            wanted[1 + part, 3 + part] = True
        y = poisoned(out, float32, device)
        kernels.act_fwd(put(x, device), None, y, None, None, activation, _params(activation), 0)
        assert_same_bits("NaN in y", np.isnan(get(y)).view(np.uint8), wanted.view(np.uint8))

    return run


_SHAPES = ((17, 33), (1, 64), (5, 1), (0, 16), (130, 96))

CASES = [
    *table(
        "act_fwd",
        {
            f"{d.name}-{a}-{s[0]}x{s[1]}": _fwd(d, a, s)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
            for s in _SHAPES
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-{a}-bias-amax-{x}": _fwd(d, a, (19, 40), True, x)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
            for x in (0.0, 1e4)
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-{a}-cast": _fwd_cast(d, a, (32, 48), E4M3, (0, 0), False)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-{a}-cast-{s[0]}x{s[1]}": _fwd_cast(d, a, s, E4M3, (0, 0), False)
            for d in HIGH_PRECISION
            for a in ("gelu", "swiglu")
            for s in ((0, 128), (192, 128))
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-{a}-cast-{f}-whole": _fwd_cast(d, a, (128, 256), f, (0, 0), False)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
            for f in (E4M3, E5M2)
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-{a}-cast-padded-y": _fwd_cast(d, a, (17, 33), E5M2, (15, 15), True)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-{f}-cast-by-amax-{s[0]}-{r.power_2}": _fwd_cast(
                d, "gelu", s, f, (0, 0), False, True, r
            )
            for d in HIGH_PRECISION
            for f in (E4M3, E5M2)
            for s in ((32, 48), (128, 256))
            for r in (Rule(False, 0.0), Rule(True, 1e3))
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-gelu-cast-rowwise": _fwd_cast(d, "gelu", (70, 80), E4M3, (10, 0), False, False)
            for d in HIGH_PRECISION
        },
    ),
    *table(
        "act_fwd",
        {
            f"{d.name}-{a}-amax-alone-{s[0]}x{s[1]}": _amax_alone(d, a, s)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
            for s in ((17, 33), (128, 256))
        },
    ),
    *table("act_fwd", {f"{a}-nan": _nan(a) for a in ACTIVATIONS}),
    *table(
        "act_bwd",
        {
            f"{d.name}-{a}-{s[0]}x{s[1]}": _bwd(d, a, s)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
            for s in _SHAPES
        },
    ),
    *table(
        "act_bwd",
        {
            f"{d.name}-{a}-bias-amax-{x}": _bwd(d, a, (70, 40), True, x)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
            for x in (0.0, 1e4)
        },
    ),
    *table(
        "act_bwd",
        {
            f"{d.name}-{a}-cast": _bwd_cast(d, a, (32, 48), E5M2, (0, 0), False)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
        },
    ),
    *table(
        "act_bwd",
        {
            f"{d.name}-{a}-cast-{s[0]}x{s[1]}": _bwd_cast(d, a, s, E5M2, (0, 0), False)
            for d in HIGH_PRECISION
            for a in ("gelu", "swiglu")
            for s in ((0, 128), (192, 128))
        },
    ),
    *table(
        "act_bwd",
        {
            f"{d.name}-{a}-cast-by-amax": _bwd_cast(
                d, a, (128, 256), E5M2, (0, 0), False, True, Rule(False, 0.0)
            )
            for d in HIGH_PRECISION
            for a in ("gelu", "swiglu")
        },
    ),
    *table(
        "act_bwd",
        {
            f"{d.name}-{a}-cast-{f}-whole": _bwd_cast(d, a, (128, 256), f, (0, 0), False)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
            for f in (E4M3, E5M2)
        },
    ),
    *table(
        "act_bwd",
        {
            f"{d.name}-{a}-cast-padded-dx": _bwd_cast(d, a, (17, 33), E4M3, (15, 14), True)
            for d in HIGH_PRECISION
            for a in ACTIVATIONS
        },
    ),
    *table(
        "act_bwd",
        {
            f"{d.name}-gelu-cast-rowwise": _bwd_cast(d, "gelu", (70, 80), E5M2, (10, 0), False, False)
            for d in HIGH_PRECISION
        },
    ),
]
