"""FP8 products with what follows them. The operands are small integers, and scales powers of two: every
engine sums such products exactly, in any order, so that the product is known and what follows is as exact
as where it is a kernel of its own (the texts of ``activation`` and ``block``). Sums of real operands are
tested with the products themselves; ``exact`` False makes such, for what is timed.

Of such operands h differs by the product's tolerance (the text of ``gemm``) and one rounding more, and what
follows by that times the largest slope: of the smooth curves 1.13, of max(u, 0)^2 2 u, of a sigmoid 1/4; a
gradient is linear in dy. Codes with a scale for every line have no tolerance then: a maximum that differs in
the last bit may double a scale.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.backends.protocol import Rule, block_shapes
from fp8kit.formats import E4M3, E5M2, Format, dtype, float32, uint8
from fp8kit.testing.contract import (
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    coded,
    epsilon,
    narrowed,
    product,
    typed,
    wide,
)
from fp8kit.testing.contract.activation import act_bwd_oracle, act_fwd_oracle
from fp8kit.testing.contract.block import LINE, SQUARE
from fp8kit.testing.contract.casts import operand
from fp8kit.testing.contract.gemm import TENSOR, fp8_slack, joining_slack, sides

_SCALE = 2.0**-3  # of both operands: a sum of K products of -2 ... 2 has a spread of sqrt(K) / 32


def _operand(
    s: Sampler, rows: int, k: int, fmt: Format, exact: bool, tile: Tile = TENSOR
) -> tuple[ArrayView, ArrayView]:
    """Codes, zero beyond ``rows``, and their scale_inv: of the tensor, or the powers of two of blocks."""
    shape, scales = ((-(-rows // 16) * 16, k), (1,)) if tile == TENSOR else block_shapes(rows, k, tile)

    def values() -> Array:
        made = s.random.integers(-2, 3, shape).astype(np.float32) if exact else s.draw(shape, 8.0)
        made[rows:], made[:, k:] = 0, 0
        return narrowed(made, fmt)

    def inverse() -> Array:
        powers = s.random.integers(-4, -2, scales) if tile != TENSOR else np.log2(_SCALE)
        return np.full(scales, np.exp2(powers), np.float32)

    return s.array(shape, uint8, values), s.array(scales, float32, inverse)


def _product(
    s: Sampler,
    m: int,
    n: int,
    k: int,
    a: Format,
    fast: bool,
    exact: bool,
    tiles: tuple[tuple[int, int], tuple[int, int]] = (TENSOR, TENSOR),
) -> Arguments:
    left, right = _operand(s, m, k, a, exact, tiles[0]), _operand(s, n, k, E4M3, exact, tiles[1])
    return {
        "a": left[0],
        "b": right[0],
        "a_format": a,
        "b_format": E4M3,
        "a_scale_inv": left[1],
        "b_scale_inv": right[1],
        "fast_accumulate": fast,
    }


def _joined(s: Sampler, m: int, n: int, bias: bool, add: bool, out: bool) -> Arguments:
    """The product itself, and what is added to it: multiples of 1 / 4, so that sums stay exact."""

    def quarters(*shape: int) -> ArrayView:
        return s.put((s.random.integers(-8, 9, shape) / 4).astype(s.dtype.numpy))

    return {
        "out": s.output(m, n) if out else None,
        "shape": (m, n),
        "dtype": s.dtype,
        "bias": quarters(n) if bias else None,
        "addend": quarters(m, n) if add else None,
    }


def _product_of(a: Any, rows: int, columns: int) -> tuple[Array, Array, Array]:
    """The product with bias and addend where it has them, in float64; as it is stored; and by how much that
    may differ, 0 where sums are exact."""
    left, right = sides(a, rows, columns)
    product = found = left @ right.T
    parts = [part for part in (a.bias, a.addend) if part is not None] if hasattr(a, "addend") else []
    for part in parts:
        found = found + wide(part)
    kind = a.x.dtype if hasattr(a, "x") else a.dtype.numpy
    stored = found.astype(np.float32).astype(kind)
    codes = codec.decode(a.a, a.a_format), codec.decode(a.b, a.b_format)
    if all(np.isin(values, range(-2, 3)).all() for values in codes):
        return found, stored, np.zeros(())
    slack = fp8_slack(np.abs(left) @ np.abs(right).T, left.shape[1], a.fast_accumulate, a.device)
    slack = slack + joining_slack(product, kind, [wide(part) for part in parts], a.device)
    return found, stored, slack + epsilon(kind) * np.abs(found)


def _bounds(a: Any, x: Array, error: Array) -> tuple[Array, Array, Array, Array]:
    """Returns, for an activation's input with an ``error``, the largest slope and value of its curve, the
    largest value that these are multiplied with, and the error of that."""
    x = np.abs(wide(x) if a.bias is None else wide(x) + wide(a.bias)) + error
    gated = ACTIVATIONS[a.activation].gated
    (u, v), errors = np.split(x, 2, 1) if gated else (x, np.ones(())), np.broadcast_to(error, x.shape)
    if a.activation in ("srelu", "sreglu"):
        slope, value = 2 * u, u**2
    elif a.activation == "glu":
        slope, value = np.full_like(u, 0.25), np.ones_like(u)
    else:
        slope, value = np.full_like(u, 1.13), u
    offset = abs(a.params[-1]) if a.params else 0.0  # of clamped_swiglu
    return slope, value, v + offset, np.split(errors, 2, 1)[1] if gated else np.zeros(())


def fp8_gemm_act(
    s: Sampler,
    m: int,
    n: int,
    k: int = 128,
    kind: str = "gelu",
    biased: bool = False,
    h: bool = True,
    a: Format = E4M3,
    fast: bool = True,
    exact: bool = True,
    **result: Any,
) -> Arguments:
    """``n``: columns of y; ``h``: the product is wanted. ``result``: see ``Sampler.result``."""
    columns = ACTIVATIONS[kind].parts * n
    return {
        **_product(s, m, columns, k, a, fast, exact),
        "h": s.output(m, columns) if h else None,
        "shape": (m, columns),
        "dtype": s.dtype,
        "bias": s.normal(columns) if biased else None,
        **s.result("y", m, n, **result),
        "activation": kind,
        "params": tuple(ACTIVATIONS[kind].params.values()),
    }


def fp8_gemm_act_oracle(a: Any) -> Results:
    """``act_fwd`` of the exact product."""
    product, h, error = _product_of(a, *a.shape)
    (y, slack) = act_fwd_oracle(SimpleNamespace(**{**vars(a), "x": h}))["y"]
    if not error.any():
        return {"h": h, "y": (y, slack)}
    slope, value, factor, second = _bounds(a, h, error)
    first = np.split(error, 2, 1)[0] if ACTIVATIONS[a.activation].gated else error
    return {"h": (product, error), "y": (y, slack + slope * first * factor + value * second)}


def fp8_gemm_act_bwd(
    s: Sampler,
    m: int,
    n: int,
    k: int = 128,
    kind: str = "gelu",
    biased: bool = False,
    a: Format = E5M2,
    fast: bool = False,
    exact: bool = True,
    **result: Any,
) -> Arguments:
    """As ``fp8_gemm_act``, with dbias where there is a bias."""
    columns = ACTIVATIONS[kind].parts * n
    return {
        **_product(s, m, n, k, a, fast, exact),
        "x": s.normal(m, columns, scale=3.0),
        "bias": s.normal(columns) if biased else None,
        "dbias": s.output(columns) if biased else None,
        **s.result("dx", m, columns, **result),
        "activation": kind,
        "params": tuple(ACTIVATIONS[kind].params.values()),
    }


def fp8_gemm_act_bwd_oracle(a: Any) -> Results:
    """``act_bwd`` with the exact product."""
    rows, columns = a.x.shape[0], a.x.shape[1] // ACTIVATIONS[a.activation].parts
    _, dy, error = _product_of(a, rows, columns)
    dx, slack = act_bwd_oracle(SimpleNamespace(**{**vars(a), "dy": dy}))["dx"]
    if error.any():
        slope, value, factor, _ = _bounds(a, a.x, np.zeros(()))
        halves = (slope * factor, value) if ACTIVATIONS[a.activation].gated else (slope,)
        slack = slack + np.concatenate([error * half for half in halves], 1)
    return {"dx": (dx, slack)}


def fp8_gemm_cast(
    s: Sampler,
    m: int,
    n: int,
    k: int = 128,
    bias: bool = False,
    add: bool = False,
    out: bool = True,
    a: Format = E4M3,
    fast: bool = True,
    exact: bool = True,
    cast: Any = None,
    **more: Any,
) -> Arguments:
    """``cast``: options of ``Sampler.cast``, None for none."""
    return {
        **_product(s, m, n, k, a, fast, exact),
        **_joined(s, m, n, bias, add, out),
        "cast": None if cast is None else s.cast(m, n, **cast),
    }


def fp8_gemm_cast_oracle(a: Any) -> Results:
    """The product."""
    product, out, error = _product_of(a, *a.shape)
    return {"out": (product, error) if error.any() else out}


def fp8_gemm_lines(
    s: Sampler,
    m: int,
    n: int,
    k: int = 128,
    bias: bool = False,
    add: bool = False,
    out: bool = True,
    blocks: bool = False,
    power_2: bool = True,
    epsilon: float = 0.0,
    fmt: Format = E4M3,
    fast: bool = True,
    exact: bool = True,
) -> Arguments:
    """``blocks``: the operands have scales of 1 x 128 and 128 x 128."""
    tiles = (LINE, SQUARE) if blocks else (TENSOR, TENSOR)
    codes, scales = block_shapes(m, n, LINE)
    return {
        **_product(s, m, n, k, E4M3, fast, exact, tiles),
        **_joined(s, m, n, bias, add, out),
        "a_tile": tiles[0],
        "b_tile": tiles[1],
        "q": s.output(*codes, dtype=uint8),
        "scale_inv": s.output(*scales, dtype=float32),
        "format": fmt,
        "power_2": power_2,
        "epsilon": epsilon,
    }


def fp8_gemm_lines_oracle(a: Any) -> Results:
    """The product and its lines."""
    product, out, error = _product_of(a, *a.shape)
    q, scale_inv = operand(out, LINE, a.format, a.power_2, a.epsilon, dtype(out.dtype).max)
    return {"out": (product, error) if error.any() else out, "q": q, "scale_inv": scale_inv}


_KINDS = ("gelu", "relu", "swiglu")
_BIASED: Options = {"biased": True}
_SUMS = {"fast": {"fast": True}, "split": {"fast": False}}
# one tile, none of which is whole; several of the largest
_SIZES = {"33x48": {"m": 33, "n": 48, "k": 32}, "300x256": {"m": 300, "n": 256, "k": 320}}


def _cases(result: str, fmt: Format) -> dict[str, Options]:
    """Returns the cases of both activations' kernels; ``fmt``: the result's format."""
    sizes = {name: {**size, **_BIASED, "cast": {"fmt": fmt}, result: False} for name, size in _SIZES.items()}
    return {
        **product("{kind}-{case}", {"kind": _KINDS, "case": {name: dict(s) for name, s in _SIZES.items()}}),
        **product("{kind}-cast-{case}-{sums}", {"kind": _KINDS, "case": sizes, "sums": _SUMS}),
        **product("{kind}-amax", {"kind": _KINDS}, m=130, n=128, amax=0.5, **_BIASED),
        "gelu-cast-and-result": {**coded(result, 48, 64, (0, 0), True, fmt=fmt), **_BIASED},
        "gelu-cast-padded": {**coded(result, 17, 33, (15, 15), fmt=fmt), **_BIASED},
        "gelu-cast-by-amax": {**coded(result, 128, 256, fmt=fmt, rule=Rule(False, 0.0), amax=4.0), **_BIASED},
        "gelu-cast-q": coded(result, 130, 128, (14, 0), fmt=fmt, only="q"),
        "gelu-cast-q_t": coded(result, 130, 128, (14, 0), fmt=fmt, only="q_t"),
        # an activation that no kernel has fused, and sizes that none takes
        "srelu-cast": {**coded(result, 48, 64, fmt=fmt), "kind": "srelu", **_BIASED},
        "swiglu-cast-17x33": {**coded(result, 17, 33, fmt=fmt), "kind": "swiglu", **_BIASED},
    }


_CAST = {
    **product("{case}", {"case": _SIZES}, bias=True, add=True),
    **product("cast-{case}-{sums}", {"case": _SIZES, "sums": _SUMS}, cast={}, out=False),
    **product(
        "cast-{case}-joined-{fmt}", {"case": _SIZES, "fmt": {f: {"cast": {"fmt": f}} for f in (E4M3, E5M2)}}
    ),
    "real": {"m": 48, "n": 128, "exact": False, "bias": True},
    "cast-padded": {"m": 17, "n": 33, "cast": {"pad": (15, 15)}, "bias": True},
    "cast-padded-17x40": {"m": 17, "n": 40, "cast": {"pad": (15, 8)}, "bias": True},
    "cast-joined": {"m": 33, "n": 48, "cast": {}, "bias": True, "add": True},
}
_LINES = {
    **product(
        "{case}-{sums}-blocks-{blocks}", {"case": _SIZES, "sums": _SUMS, "blocks": (False, True)}, out=False
    ),
    **product("{case}-joined", {"case": _SIZES}, bias=True, add=True, power_2=False, epsilon=0.5),
    "e5m2": {"m": 130, "n": 200, "fmt": E5M2},
}
_REAL = product("{kind}-real", {"kind": tuple(ACTIVATIONS)}, m=48, n=128, exact=False, **_BIASED)
_TIMED: Options = {"exact": False, "cast": {}}

TESTS = (
    KernelTest(
        "fp8_gemm_act",
        fp8_gemm_act,
        fp8_gemm_act_oracle,
        typed({**_cases("y", E4M3), "without-h": {"m": 48, "n": 64, "h": False}, **_REAL}),
        {**_TIMED, **_BIASED, "y": False},
    ),
    KernelTest(
        "fp8_gemm_act_bwd",
        fp8_gemm_act_bwd,
        fp8_gemm_act_bwd_oracle,
        typed({**_cases("dx", E5M2), "e4m3": {"m": 48, "n": 64, "a": E4M3}, **_REAL}),
        {**_TIMED, **_BIASED, "dx": False},
    ),
    KernelTest("fp8_gemm_cast", fp8_gemm_cast, fp8_gemm_cast_oracle, typed(_CAST), {**_TIMED, "out": False}),
    KernelTest(
        "fp8_gemm_lines", fp8_gemm_lines, fp8_gemm_lines_oracle, typed(_LINES), {"exact": False, "out": False}
    ),
)
