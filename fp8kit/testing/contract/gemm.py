"""The matrix products against float64, and FP8's bit for bit where it is known how they are summed.

Tolerance: a float32 sum of K products (``sum_slack``) and one rounding to the output; on a device one more,
half a unit of the last place, before a bias and before an addend joins a 16-bit one (the contract allows it).
FP8 on tensor cores is wider: Hopper cuts the 32 products of one instruction and the accumulator off at 2^-13
of the largest of them. The allowance is 2^-13 of the sum of magnitudes for each instruction: normal values of
both signs, whose cuts mostly cancel, stay within it; values of one size and sign may lose up to 33 times
2^-13 of the largest. ``fast_accumulate`` does all ceil(K / 32) instructions so; the split accumulator at most
4 (128 products) before it promotes to float32. Where the implementation says how it sums (``_sums``: on
Hopper cuBLASLt, unless it cuts a contraction into parts, and our own kernel), each product of two arrays is
``model_gemm``'s, bit for bit. Where a bias or an addend joins a sum is the engine's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from fp8kit import arrays, codec
from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView, Device, Tile
from fp8kit.backends.protocol import Layout
from fp8kit.formats import E4M3, E5M2, DType, Format, bfloat16, float16, float32
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    epsilon,
    host,
    product,
    put,
    sized,
    sum_slack,
    typed,
    wide,
)
from fp8kit.testing.contract.casts import each_scale

TENSOR, ROW = (0, 0), (1, 0)  # tiles: 0 is as many as there are
LAYOUTS: tuple[str, ...] = get_args(Layout)


def joined(s: Sampler, m: int, n: int, out: DType, bias: bool, add: str) -> Arguments:
    """What a product writes and adds: nothing (""), what stands in ``out`` ("accumulate"), or an array apart
    from it ("add")."""
    addend = s.normal(m, n, dtype=out) if add else None
    return {
        "out": addend if add == "accumulate" else s.output(m, n, dtype=out),
        "bias": s.normal(n) if bias else None,
        "addend": addend,
    }


def product_results(a: Any, left: Array, right: Array, slack: Array) -> Results:
    """left @ right with bias and addend; ``slack``: the product's own."""
    product = left @ right
    parts = [wide(part) for part in (a.bias, a.addend) if part is not None]
    slack = slack + joining_slack(product, a.out.dtype, parts, a.device)
    out = product
    for part in parts:
        out, slack = out + part, slack + sum_slack(np.abs(part), 1)
    return {"out": (out, slack)}


def joining_slack(product: Array, dtype: Any, parts: Sequence[Array], device: Device) -> Array:
    """What a device may lose by rounding to a 16-bit ``dtype`` before it adds each of ``parts``, at most two,
    in the order it likes."""
    lossy = device.kind != "cpu" and np.dtype(getattr(dtype, "numpy", dtype)).itemsize == 2
    rounded = np.abs(product) if parts else np.zeros(())
    if len(parts) > 1:
        rounded = rounded + np.max([np.abs(product + part) for part in parts], axis=0)
    return np.asarray(lossy * epsilon(dtype) / 2 * rounded)


def fp8_slack(magnitude: Array, terms: int, fast: bool, device: Device) -> Array:
    """Error that an FP8 sum of ``terms`` products may have made (see this module's text)."""
    slack = sum_slack(magnitude, terms)
    if device.kind != "cpu":
        instructions = -(-terms // 32)
        slack = slack + (instructions if fast else min(instructions, 4)) * 2.0**-13 * magnitude
    return np.asarray(slack)


def gemm(
    s: Sampler,
    m: int,
    n: int,
    k: int | None = None,
    layout: str = "nt",
    out: DType | None = None,
    bias: bool = False,
    add: str = "",
) -> Arguments:
    """Without ``k`` by a square matrix."""
    k = n if k is None else k
    return {
        "a": s.normal(*((k, m) if layout == "tn" else (m, k))),
        "b": s.normal(*((n, k) if layout == "nt" else (k, n))),
        "layout": layout,
        **joined(s, m, n, out or s.dtype, bias, add),
    }


def gemm_oracle(a: Any) -> Results:
    """The product of what the layout says."""
    left = wide(a.a).T if a.layout == "tn" else wide(a.a)
    right = wide(a.b).T if a.layout == "nt" else wide(a.b)
    return product_results(a, left, right, sum_slack(np.abs(left) @ np.abs(right), left.shape[1]))


def fp8_gemm(
    s: Sampler,
    m: int,
    n: int,
    k: int | None = None,
    a: Format = E4M3,
    b: Format = E4M3,
    fast: bool = False,
    bias: bool = False,
    add: str = "",
    by_row: bool = False,
) -> Arguments:
    """Without ``k`` by a square matrix; ``by_row``: a scale for each row of both operands."""
    rows, columns, k = m + -m % 16, n + -n % 16, n if k is None else k
    counts = (rows, columns) if by_row else (1, 1)
    scales = [s.put(s.random.uniform(0.01, 0.1, count), float32) for count in counts]
    return {
        "a": s.codes(rows, k, a),
        "b": s.codes(columns, k, b),
        "a_format": a,
        "b_format": b,
        "a_scale_inv": scales[0],
        "b_scale_inv": scales[1],
        "fast_accumulate": fast,
        **joined(s, m, n, s.dtype, bias, add),
    }


def values_of(codes: Array, fmt: Format, scale_inv: Array, tile: Tile) -> Array:
    """What an operand stands for, float64, of one matrix or of several."""
    if codes.ndim == 3:
        each = scale_inv if scale_inv.ndim == 3 else scale_inv.reshape(len(codes), -1)
        made = [values_of(own, fmt, scales, tile) for own, scales in zip(codes, each, strict=True)]
        return np.stack(made) if made else np.zeros(codes.shape)
    scales = scale_inv.reshape(-1, 1) if tile in (TENSOR, ROW) else each_scale(scale_inv, codes.shape, tile)
    return np.asarray(wide(codec.decode(codes, fmt)) * scales)


def sides(a: Any, rows: int, columns: int) -> tuple[Array, Array]:
    """What both operands of a product of (rows, columns) stand for, without the rows that pad them."""
    tiles = getattr(a, "a_tile", TENSOR), getattr(a, "b_tile", TENSOR)
    left = values_of(a.a, a.a_format, a.a_scale_inv, tiles[0])[:rows]
    return left, values_of(a.b, a.b_format, a.b_scale_inv, tiles[1])[:columns]


def fp8_gemm_oracle(a: Any) -> Results:
    """The product of the decoded operands, whose scales may be those of blocks."""
    left, right = sides(a, *a.out.shape)
    size = np.abs(left) @ np.abs(right).T
    slack = fp8_slack(size, left.shape[1], getattr(a, "fast_accumulate", False), a.device)
    if hasattr(a, "a_tile"):
        slack = slack + 4 * ROUNDOFF * size
    return product_results(a, left, right.T, slack)


def modelled(how: Accumulation, kernels: Any, a: Any) -> Results:
    """The bits of an FP8 product, with scales of a whole array, or of rows or blocks, by ``model_gemm``."""
    (m, n), k = a.out.shape, a.a.shape[1]
    if a.bias is not None or a.addend is not None or not (m and n and k):
        return {}
    out = arrays.empty((m, n), a.out.dtype, a.out.device)
    operands = (a.a_scale_inv, getattr(a, "a_tile", None), m), (a.b_scale_inv, getattr(a, "b_tile", None), n)
    (left, a_tile), (right, b_tile) = (_tiles(*operand, k) for operand in operands)
    codes = a.a.slice(0, 0, m), a.b.slice(0, 0, n)
    scales = left, right, a_tile, b_tile
    kernels.model_gemm(*codes, out, a.a_format, a.b_format, *scales, how, None, None, 0)
    return {"out": host(out)}


def _tiles(scale_inv: ArrayView, tile: Tile | None, rows: int, k: int) -> tuple[ArrayView, tuple[int, int]]:
    """Scales as ``model_gemm`` has them, one a tile and row-major, and the tile."""
    if tile is None:
        return scale_inv.reshape(-1, 1), (int(scale_inv.size > 1), 0)
    blocks = -(-k // tile[1])
    scales = host(scale_inv)
    scales = scales.T[:rows] if tile[0] == 1 else scales[: -(-rows // tile[0]), :blocks]
    return put(np.ascontiguousarray(scales), scale_inv.device), tile


def scale_product(
    s: Sampler,
    m: int,
    n: int,
    scales: tuple[bool, bool] = (True, True),
    lines: tuple[bool, bool] = (False, False),
    bias: bool = False,
    add: str = "",
) -> Arguments:
    """``scales``: which of the two there are; ``lines``: which have a number for each row, or column."""
    factors: list[ArrayView | None] = []
    for value, there, by_line, count in zip((0.3, 7.0), scales, lines, (m, n), strict=True):
        if there and by_line:
            factors.append(s.put(s.random.uniform(0.1, 9.0, count).astype(np.float32)))
        else:
            factors.append(s.full(value, 1) if there else None)
    return {
        "x": s.normal(m, n, dtype=float32),
        "a_scale_inv": factors[0],
        "b_scale_inv": factors[1],
        **joined(s, m, n, s.dtype, bias, add),
    }


def scale_product_oracle(a: Any) -> Results:
    """In float64; four float32 roundings before the last one."""
    scale = np.ones((1, 1))
    for factor, shape in ((a.a_scale_inv, (-1, 1)), (a.b_scale_inv, (1, -1))):
        scale = scale if factor is None else scale * wide(factor).reshape(shape)
    out = wide(a.x) * scale
    magnitude = np.abs(out)
    for part in (a.bias, a.addend):
        if part is not None:
            out, magnitude = out + wide(part), magnitude + np.abs(wide(part))
    return {"out": (out, 4 * 2.0**-24 * magnitude)}


def sizes(*of: tuple[int, int, int]) -> dict[str, Options]:
    """A case for each (m, n, k)."""
    return product("{m}x{n}x{k}", {"m n k": of})


def _strided(gap: int) -> Options:
    """Rows of all matrices lie apart from each other."""
    return {"parts": dict.fromkeys(("a", "b", "out", "addend"), (1, 0, gap))}


ADDED = ("accumulate", "add")
_PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
# at addresses that are multiples of an element's size alone
_ODD: Options = {"bias": True, "add": "add", "parts": {"bias": (None, 1, 0), "addend": (None, 1, 0)}}
_GEMM = product(
    "{layout}-{case}",
    {
        "layout": LAYOUTS,
        "case": {
            **sizes((17, 33, 19), (1, 1, 1), (64, 48, 32), (5, 1, 7), (1, 9, 4), (0, 8, 8), (8, 5, 0)),
            **product("bias-{add}", {"add": ADDED}, m=17, n=24, k=40, bias=True),
            "bias": {"m": 33, "n": 24, "k": 16, "bias": True},
            "strided-16": {"m": 24, "n": 32, "k": 16, "add": "accumulate", **_strided(16)},
            "strided-3": {"m": 24, "n": 32, "k": 16, "add": "add", **_strided(3)},
            "bias-odd": {"m": 32, "n": 24, "k": 40, **_ODD},
        },
    },
)
_INTO_FLOAT32 = product(
    "{layout}-float32-{add}", {"layout": LAYOUTS, "add": ADDED}, m=32, n=17, k=64, out=float32
)
_FP8_SIZES = ((32, 48, 64), (17, 33, 32), (1, 16, 16), (16, 1, 160), (130, 70, 512), (0, 16, 32), (17, 33, 0))
_SPEEDS = {"split": {"fast": False}, "fast": {"fast": True}}
_WITH_BIAS = sized(((48, 32), (17, 33)), k=64)
_FP8 = {
    **product("{case}-{speed}", {"case": sizes(*_FP8_SIZES), "speed": _SPEEDS}),
    **product("{a}-{b}", {"a b": _PAIRS}, m=17, n=48, k=96),
    **product("{case}-bias-{add}", {"case": {**_WITH_BIAS, **sizes((17, 33, 0))}, "add": ADDED}, bias=True),
    **product("{case}-bias-odd", {"case": _WITH_BIAS}, **_ODD),
    **product(
        "strided-{add}",
        {"add": ADDED},
        m=48,
        n=32,
        k=64,
        bias=True,
        parts=dict.fromkeys(("out", "addend"), (1, 0, 3)),
    ),
    "bias-E5M2": {"m": 48, "n": 32, "k": 64, "a": E5M2, "bias": True},
    **product("rows-{m}x{n}", {"m n k": _FP8_SIZES[:2]}, by_row=True),
}

TESTS = (
    KernelTest("gemm", gemm, gemm_oracle, {**typed(_GEMM), **typed(_INTO_FLOAT32, (bfloat16, float16))}),
    KernelTest(
        "scale_product",
        scale_product,
        scale_product_oracle,
        typed(
            {
                **sized(((17, 33), (1, 1), (0, 8), (300, 40))),
                **product("one-{add}", {"add": ADDED}, m=9, n=24, scales=(False, True), bias=True),
                "plain": {"m": 5, "n": 7, "scales": (True, False), "bias": True},
                **product(
                    "lines-{lines}",
                    {"lines": ((True, False), (False, True), (True, True))},
                    m=19,
                    n=40,
                    bias=True,
                ),
            }
        ),
    ),
    KernelTest("fp8_gemm", fp8_gemm, fp8_gemm_oracle, typed(_FP8), {"fast": True}, modelled),
)
