"""The activations against float64.

Tolerances, with u = 2^-24: an engine may write GELU with tanh or as x * sigmoid(z). Either way the argument
has a relative error of 4 u, which a saturating function damps to less than 4 u absolute, and exp, tanh and
the division add 4 u: 16 u |x| in all, with a factor 2 in hand. The slope is g + x z'(x) g (1 - g) with g in
[0, 1] known to 8 u absolute (1 - tanh^2 cancels), so 16 u (1 + |x z'(x)|), times |dy|. The other smooth
activations are the same with another z, or without the factor x. Sums with the bias are rounded to float32 in
the oracle too, since clamping decides by them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.activation import ACTIVATIONS, rows_in_dy
from fp8kit.backends.protocol import Rule
from fp8kit.formats import E4M3, E5M2, Format, uint8
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
    typed,
    wide,
)

_GELU = math.sqrt(2 / math.pi)
_PARAMS = {"clamped_swiglu": (2.0, 1.3, 0.75)}  # such that many elements lie beyond the limit
# what a gated activation does to its first half
_FIRST = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
}
_RATES = {"silu": 1.0, "qgelu": 1.702}


class Curve(NamedTuple):
    """A function of one input: value, slope, and the error bounds of both."""

    value: Array
    slope: Array
    slack: Array
    slope_slack: Array


def _curve(x: Array, curve: str, params: tuple[float, ...]) -> Curve:
    if curve == "relu":
        return Curve(np.maximum(x, 0), (x > 0) * 1.0, ROUNDOFF * np.abs(x), np.zeros_like(x))
    if curve == "srelu":
        top = np.maximum(x, 0)
        return Curve(top**2, 2 * top, 4 * ROUNDOFF * top**2, 4 * ROUNDOFF * top)
    if curve == "sigmoid":
        g, slack = 1 / (1 + np.exp(-x)), np.full_like(x, 16 * ROUNDOFF)
        return Curve(g, g * (1 - g), slack, slack)
    if curve == "gelu":
        t, inner = np.tanh(_GELU * (x + 0.044715 * x**3)), _GELU * (1 + 3 * 0.044715 * x**2)
        value, slope, rate = 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner, 2 * inner
    else:
        limit, alpha = params[:2] if curve == "clamped" else (np.inf, _RATES[curve])
        c = np.minimum(x, limit)
        g = 1 / (1 + np.exp(-alpha * c))
        value, rate = c * g, np.full_like(x, alpha)
        slope = np.where(x > limit, 0, g + alpha * c * g * (1 - g))
    return Curve(value, slope, 16 * ROUNDOFF * np.abs(x), 16 * ROUNDOFF * (1 + np.abs(x * rate)))


def _factor(v: Array, a: Any) -> Curve:
    """What the second half becomes; its slope, 0 or 1, is exact."""
    if a.activation != "clamped_swiglu":
        return Curve(v, np.ones_like(v), np.zeros_like(v), np.zeros_like(v))
    limit, _, offset = a.params
    slack = 2 * ROUNDOFF * (np.abs(v) + abs(offset))
    return Curve(np.clip(v, -limit, limit) + offset, (np.abs(v) <= limit) * 1.0, slack, np.zeros_like(v))


def _curves(a: Any) -> tuple[Curve, Curve, bool]:
    """Returns the curve of x + bias, or of its first half; of what it is multiplied with, 1 without a second
    half; and whether there is one."""
    x = wide(a.x if a.bias is None else a.x.astype(np.float32) + a.bias.astype(np.float32))
    gated = ACTIVATIONS[a.activation].gated
    left, right = np.split(x, 2, axis=1) if gated else (x, np.ones_like(x))
    return _curve(left, _FIRST.get(a.activation, a.activation), a.params), _factor(right, a), gated


def act_fwd(
    s: Sampler, m: int, n: int, kind: str = "gelu", biased: bool = False, nan: bool = False, **result: Any
) -> Arguments:
    """x of 3 standard deviations, so that both tails are met; ``n``: columns of y. ``nan``: one in each half
    of x, in rows of their own. ``result``: see ``Sampler.result``."""
    columns = ACTIVATIONS[kind].parts * n

    def values() -> Array:
        x = s.draw((m, columns), 3.0).astype(s.dtype.numpy)
        for part in range(columns // n if nan else 0):
            x[1 + part, n * part + 3 + part] = np.nan
        return x

    return {
        "x": s.array((m, columns), s.dtype, values),
        "bias": s.normal(columns) if biased else None,
        **s.result("y", m, n, **result),
        "activation": kind,
        "params": _PARAMS.get(kind, ()),
    }


def act_fwd_oracle(a: Any) -> Results:
    """The formulas of ``backends.activation``."""
    first, factor, gated = _curves(a)
    y = first.value * factor.value
    slack = first.slack * np.abs(factor.value) + np.abs(first.value) * factor.slack
    return {"y": (y, slack + 4 * gated * ROUNDOFF * np.abs(y))}


def act_bwd(
    s: Sampler,
    m: int,
    n: int,
    kind: str = "gelu",
    biased: bool = False,
    in_dy: bool = False,
    split: bool = False,
    **result: Any,
) -> Arguments:
    """As ``act_fwd``; dbias where there is a bias. ``in_dy``: the codes begin in dy's memory. ``split``: the
    halves of dx's columns are cast each by itself, as the options ``cast`` say but for the second scale."""
    forward = act_fwd(s, m, n, kind, biased, y=False)
    columns = forward["x"].shape[1]
    dy = _with_room(s, (m, n), columns) if in_dy else s.normal(m, n)
    made = {
        **forward,
        "dy": dy,
        "dbias": s.output(columns) if biased else None,
        **s.result("dx", m, columns, **result),
    }
    if split:
        made["cast"] = s.cast(m, n, **result["cast"])
        made["second"] = s.cast(m, n, **{**result["cast"], "scale": 5.3, "amax": 0.002})
    if in_dy and made["cast"] is not None:
        first = rows_in_dy(m, dy.nbytes // m, columns)
        at = dy.ptr + dy.nbytes - first * columns
        made["cast"].q = ArrayView(at, (m, columns), uint8, dy.device, dy.owner)
    return made


def _with_room(s: Sampler, shape: tuple[int, int], columns: int) -> ArrayView:
    """dy in front of bytes for as many codes as do not lie in it."""
    values = s.draw(shape).astype(s.dtype.numpy).reshape(-1).view(np.uint8)
    beyond = (shape[0] - rows_in_dy(shape[0], values.size // shape[0], columns)) * columns
    whole = s.put(np.concatenate([values, np.zeros(beyond, np.uint8)]))
    return ArrayView(whole.ptr, shape, s.dtype, whole.device, whole.owner)


def act_bwd_oracle(a: Any) -> Results:
    """Their derivatives."""
    first, factor, gated = _curves(a)
    dy = wide(a.dy)
    left_slack = np.abs(factor.value) * first.slope_slack + factor.slack * np.abs(first.slope)
    slopes = [(factor.value * first.slope, left_slack), (first.value * factor.slope, first.slack)]
    dx, slack = (np.concatenate(halves, axis=1) for halves in zip(*slopes[: 1 + gated], strict=True))
    dy = np.concatenate([dy] * (1 + gated), axis=1)
    return {"dx": (dy * dx, np.abs(dy) * slack + (2 + 2 * gated) * ROUNDOFF * np.abs(dy * dx))}


_SIZES = ((17, 33), (1, 64), (5, 1), (0, 16), (130, 96))
_BIASED: Options = {"biased": True}
_RULES = (Rule(False, 0.0), Rule(True, 1e3))
_KINDS = tuple(ACTIVATIONS)


def _codes(*result: Any, **cast: Any) -> Options:
    """A case with a bias and a cast."""
    return {**_BIASED, **coded(*result, **cast)}


def _cases(result: str, fmt: Any, padded: Options, rows: int) -> dict[str, Options]:
    """Cases of ``act_fwd`` or ``act_bwd``: every activation, and more of two."""
    every = {
        **sized(_SIZES),
        **product("bias-amax-{amax}", {"amax": (0.0, 1e4)}, m=rows, n=40, **_BIASED),
        "cast": _codes(result, 32, 48, fmt=fmt),
        **{f"cast-{f}-whole": _codes(result, 128, 256, fmt=f) for f in (E4M3, E5M2)},
        f"cast-padded-{result}": padded,
    }
    some = {f"cast-{m}x{n}": _codes(result, m, n, fmt=fmt) for m, n in ((0, 128), (192, 128))}
    return {
        **product("{kind}-{case}", {"kind": _KINDS, "case": every}),
        **product("{kind}-{case}", {"kind": ("gelu", "swiglu"), "case": some}),
    }


_FWD = {
    **_cases("y", E4M3, _codes("y", 17, 33, (15, 15), True, fmt=E5M2), 19),
    **{
        f"{fmt}-cast-by-amax-{m}-{rule.power_2}": _codes("y", m, n, fmt=fmt, rule=rule, amax=4.0)
        for fmt in (E4M3, E5M2)
        for m, n in ((32, 48), (128, 256))
        for rule in _RULES
    },
    "gelu-cast-rowwise": _codes("y", 70, 80, (10, 0), only="q"),
    **product(
        "{kind}-amax-alone-{m}x{n}",
        {"kind": _KINDS, "m n": ((17, 33), (128, 256))},
        y=False,
        amax=0.0,
        **_BIASED,
    ),
}
_BWD = {
    **_cases("dx", E5M2, _codes("dx", 17, 33, (15, 14), True), 70),
    **product(
        "{kind}-cast-by-amax",
        {"kind": ("gelu", "swiglu")},
        **_codes("dx", 128, 256, fmt=E5M2, rule=_RULES[0], amax=4.0),
    ),
    "gelu-cast-rowwise": _codes("dx", 70, 80, (10, 0), fmt=E5M2, only="q"),
    **product(
        "{kind}-in-place-{m}x{n}",
        {"kind": [kind for kind in _KINDS if not ACTIVATIONS[kind].gated], "m n": ((17, 33), (128, 256))},
        same={"dx": "dy"},
        amax=0.0,
        **_BIASED,
    ),
}
_IN_DY = product(
    "{kind}-codes-in-dy-{m}x{n}",
    {"kind": ("gelu", "relu", "swiglu"), "m n": ((1040, 48), (1152, 128))},
    in_dy=True,
    dx=False,
    cast={"fmt": E5M2, "pad": (0, 0)},
    **_BIASED,
)
_SPLIT = product(
    "{kind}-halves-{m}x{n}",
    {"kind": [kind for kind in _KINDS if ACTIVATIONS[kind].gated], "m n": ((17, 33), (128, 256))},
    split=True,
    dx=False,
    cast={"fmt": E5M2},
    **_BIASED,
)
_NAN = product("{kind}-nan", {"kind": _KINDS}, m=4, n=40, nan=True)


def _by_blocks(result: str, fmt: Format) -> dict[str, Options]:
    """Cases of casts by blocks of 128: every activation, and more of two."""

    def case(m: int, n: int, keep: bool = False, rule: Rule = _RULES[1], **cast: Any) -> Options:
        return _codes(result, m, n, keep=keep, **{"fmt": fmt, "rule": rule, **cast})

    tiles: dict[str, Any] = {"1x128": {"tile": (1, 128)}, "128x128": {"tile": (128, 128)}}
    found: dict[str, Options] = {}
    for name, tile in tiles.items():
        every = {
            "128x256": case(128, 256, **tile),
            f"130x70-{result}": case(130, 70, True, Rule(True, 0.0), **tile),
        }
        some = {f"{m}x{n}": case(m, n, **tile) for m, n in ((1, 1), (17, 129), (0, 64), (64, 0))}
        some |= {
            "256x384-float": case(256, 384, True, Rule(False, 2.0**-20), **tile),
            "300x200-other-format": case(300, 200, fmt=E4M3 if fmt == E5M2 else E5M2, **tile),
            "144x264-q": case(144, 264, only="q", **tile),
            "144x264-q_t": case(144, 264, True, only="q_t", **tile),
            "plain-600x136": {**case(600, 136, True, **tile), "biased": False},
        }
        for kinds, cases in ((_KINDS, every), (("gelu", "swiglu"), some)):
            found |= product(f"{{kind}}-blocks-{name}-{{case}}", {"kind": kinds, "case": cases})
    return found


_NAN_BLOCKS = product(
    "{kind}-blocks-nan",
    {"kind": ("gelu", "swiglu")},
    nan=True,
    **coded("y", 140, 200, rule=_RULES[0], tile=(1, 128)),
)
_BLOCKS_IN_DY = product(
    "{kind}-blocks-in-dy",
    {"kind": ("gelu", "swiglu")},
    in_dy=True,
    **_codes("dx", 1152, 128, fmt=E5M2, rule=_RULES[0], tile=(1, 128)),
)
_BLOCKS_IN_PLACE = product(
    "gelu-blocks-in-place-{m}x{n}",
    {"m n": ((17, 33), (256, 128))},
    same={"dx": "dy"},
    dx=True,
    cast={"fmt": E4M3, "rule": _RULES[0], "tile": (1, 128)},
    **_BIASED,
)

TESTS = (
    KernelTest(
        "act_fwd",
        act_fwd,
        act_fwd_oracle,
        {**typed({**_FWD, **_by_blocks("y", E4M3)}), **_NAN, **_NAN_BLOCKS},
        {**_BIASED, "y": False, "cast": {}},
    ),
    KernelTest(
        "act_bwd",
        act_bwd,
        act_bwd_oracle,
        typed({**_BWD, **_IN_DY, **_SPLIT, **_by_blocks("dx", E5M2), **_BLOCKS_IN_DY, **_BLOCKS_IN_PLACE}),
        {**_BIASED, "dx": False, "cast": {}},
    ),
)
