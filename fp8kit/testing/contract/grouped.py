"""Grouped products against float64 products of the values that codes stand for; the order of sums is free.

Tolerances: a float32 sum of K products; of codes that of ``fp8_gemm`` or ``block_gemm``, which each group's
product is (see the text of ``gemm`` and of ``block``), with the same bits where these are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol import BLOCK, block_shapes
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, Format, bfloat16, float16, float32, int32, uint8
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    host,
    narrowed,
    put,
    sum_slack,
    wide,
)
from fp8kit.testing.contract.block import LINE, SQUARE, block_quantize, block_quantize_oracle
from fp8kit.testing.contract.casts import tile_amax
from fp8kit.testing.contract.gemm import ROW, TENSOR, fp8_slack, joining_slack, modelled, values_of
from fp8kit.testing.contract.scales import tile_count


def _equal(m: int, sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Eight equal groups, where nothing else is said."""
    return (m // 8,) * 8 if sizes is None else sizes


def grouped_gemm(
    s: Sampler,
    m: int,
    n: int,
    k: int = 64,
    layout: str = "nt",
    sizes: tuple[int, ...] | None = None,
    slots: int = 0,
    bias: bool = False,
) -> Arguments:
    """``m`` rows, results of ``n`` columns, ``k`` features of a."""
    sizes = _equal(m, sizes)
    groups = len(sizes)
    return {
        "a": s.normal(m, k),
        "b": s.normal(*{"nt": (groups, n, k), "nn": (groups, k, n), "tn": (m, n)}[layout]),
        "out": s.output(*((groups, k, n) if layout == "tn" else (m, n))),
        "sizes": s.put(sizes, int32),
        "layout": layout,
        "slots": slots,
        "bias": s.normal(groups, n) if bias else None,
    }


def _operand(
    s: Sampler, groups: tuple[int, ...], rows: int, columns: int, fmt: Format, tile: Tile
) -> tuple[ArrayView, ArrayView]:
    """(codes, their scale_inv) of a matrix, or of one for each group, padded as casts pad; zeros beyond."""
    codes: tuple[int, ...] = (-(-rows // 16) * 16, -(-columns // 16) * 16)
    if tile in (TENSOR, ROW):
        scales: tuple[int, ...] = (int(np.prod(groups, dtype=int)) * (codes[0] if tile == ROW else 1),)
    else:
        codes, grid = block_shapes(rows, columns, tile)
        scales = (*groups, *grid)

    def values() -> Array:
        made = s.draw((*groups, *codes), 8.0)
        made[..., rows:, :], made[..., columns:] = 0, 0
        return narrowed(made, fmt)

    inverse = s.array(scales, float32, lambda: np.exp2(s.random.uniform(-3, 3, scales)).astype(np.float32))
    return s.array((*groups, *codes), uint8, values), inverse


def grouped_fp8_gemm(
    s: Sampler,
    m: int,
    n: int,
    k: int = 64,
    along: str = "rows",
    sizes: tuple[int, ...] | None = None,
    slots: int = 0,
    bias: bool = False,
    formats: tuple[Format, Format] = (E4M3, E4M3),
    tiles: tuple[Tile, Tile] = (TENSOR, TENSOR),
    fast: bool = False,
) -> Arguments:
    """``m`` rows in groups, results of ``n`` columns, ``k`` features of a."""
    sizes = _equal(m, sizes)
    groups = len(sizes)
    stack, left, right = ((groups,), (m, k), (n, k)) if along == "rows" else ((), (k, m), (n, m))
    a, a_inv = _operand(s, (), *left, formats[0], tiles[0])
    b, b_inv = _operand(s, stack, *right, formats[1], tiles[1])
    return {
        "a": a,
        "b": b,
        "out": s.output(*((m, n) if along == "rows" else (groups, k, n))),
        "sizes": s.put(sizes, int32),
        "along": along,
        "slots": slots,
        "bias": s.normal(groups, n) if bias else None,
        "a_format": formats[0],
        "b_format": formats[1],
        "a_scale_inv": a_inv,
        "b_scale_inv": b_inv,
        "a_tile": tiles[0],
        "b_tile": tiles[1],
        "fast_accumulate": fast,
    }


def groups_of(sizes: Array, rows: int, slots: int) -> Iterator[tuple[int, slice]]:
    """Each group and its rows."""
    start = 0
    for e, size in enumerate(sizes.tolist()):
        cover = slots or max(0, min(size, rows - start))
        yield e, slice(start, start + max(0, min(size, cover)))
        start += cover


def grouped_gemm_oracle(a: Any) -> Results:
    """A product for each group."""
    left, right = wide(a.a), wide(a.b)
    out, slack = np.zeros(a.out.shape), np.zeros(a.out.shape)
    at: Any
    for e, rows in groups_of(a.sizes, len(left), a.slots):
        if a.layout == "tn":
            x, w, at = left[rows].T, right[rows], e
        else:
            x, w, at = left[rows], right[e].T if a.layout == "nt" else right[e], rows
        size = np.abs(x) @ np.abs(w)
        out[at], slack[at] = x @ w, sum_slack(size, x.shape[1])
        _add_bias(a, e, at, out, slack)
    return {"out": (out, slack)}


def _add_bias(a: Any, e: int, at: Any, out: Array, slack: Array) -> None:
    if a.bias is not None:
        slack[at] += 2 * ROUNDOFF * np.abs(wide(a.bias)[e])
        out[at] += wide(a.bias)[e]


def grouped_fp8_gemm_oracle(a: Any) -> Results:
    """A product of decoded operands for each group."""
    left = values_of(a.a, a.a_format, a.a_scale_inv, a.a_tile)
    right = values_of(a.b, a.b_format, a.b_scale_inv, a.b_tile)
    out, slack = np.zeros(a.out.shape), np.zeros(a.out.shape)
    m, n = a.out.shape[-2:]
    at: Any
    terms = a.along == "terms"
    for e, group in groups_of(a.sizes, left.shape[1] if terms else m, a.slots):
        x, w, at = (left[:m, group], right[:n, group], e) if terms else (left[group], right[e, :n], group)
        size = np.abs(x) @ np.abs(w).T
        fast = a.fast_accumulate and BLOCK not in (a.a_tile[1], a.b_tile[1])
        out[at], slack[at] = x @ w.T, fp8_slack(size, x.shape[1], fast, a.device) + 4 * ROUNDOFF * size
        if a.bias is not None:
            slack[at] += joining_slack(out[at], a.out.dtype, [a.bias], a.device)
        _add_bias(a, e, at, out, slack)
    return {"out": (out, slack)}


def modelled_groups(how: Accumulation, kernels: Any, a: Any) -> Results:
    """The bits of groups' products by the model of single ones. Along the terms a group's sum begins at the
    last multiple of 16 of them before it, or of 128, where these have scales; what is before it is 0."""
    if a.bias is not None or not a.out.size:
        return {}
    (m, n), terms = a.out.shape[-2:], a.along == "terms"
    codes, inverses = [host(x) for x in (a.a, a.b)], [host(x) for x in (a.a_scale_inv, a.b_scale_inv)]
    blocks, out = BLOCK in (a.a_tile[1], a.b_tile[1]), np.zeros(a.out.shape, a.out.dtype.numpy)
    for e, group in groups_of(host(a.sizes), codes[0].shape[1] if terms else m, a.slots):
        if group.start == group.stop:
            continue
        own: dict[str, Any] = {"a_format": a.a_format, "b_format": a.b_format, "bias": None, "addend": None}
        first = group.start - group.start % (BLOCK if blocks else 16)
        for name, i, tile, rows in (
            ("a", 0, a.a_tile, slice(0, m) if terms else group),
            ("b", 1, a.b_tile, slice(0, n)),
        ):
            x, inverse = codes[i], inverses[i]
            if x.ndim == 3:
                x, inverse = x[e], inverse.reshape(len(x), *(inverse.shape[1:] or (-1,)))[e]
                inverse = inverse.reshape(-1) if inverse.ndim < 2 else inverse
            x = x[rows]
            if terms:
                x = x[:, first : group.stop].copy()
                x[:, : group.start - first] = 0
                x = np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
            if tile == LINE:
                inverse = inverse[first // BLOCK : -(-group.stop // BLOCK)] if terms else inverse
                inverse = inverse[:, rows]
            elif tile == ROW:
                inverse = inverse[rows]
            own |= {name: put(x, a.a.device), f"{name}_scale_inv": put(inverse, a.a.device)}
            own |= {f"{name}_tile": tile} if blocks else {}
        shape = (m if terms else group.stop - group.start, n)
        like = ArrayView(a.out.ptr, shape, a.out.dtype, a.out.device)
        out[e if terms else group] = modelled(how, kernels, SimpleNamespace(out=like, **own))["out"]
    return {"out": out}


def group_amax(
    s: Sampler,
    m: int,
    n: int,
    sizes: tuple[int, ...] | None = None,
    slots: int = 0,
    by_column: bool = False,
    start: float = 0.0,
    strewn: bool = True,
) -> Arguments:
    """``m`` rows of ``n`` columns; ``start``: what the amaxes are before."""
    tile = max(m, 1), 1 if by_column else max(n, 1)
    return {
        "x": s.strewn(m, n) if strewn else s.normal(m, n),
        "amax": s.full(start, tile_count(m, n, tile)),
        "sizes": s.put(_equal(m, sizes), int32),
        "tile": tile,
        "slots": slots,
    }


def live(x: Array, sizes: Array, slots: int) -> Array:
    """x with zeros in the rows of no group."""
    made = np.zeros_like(x)
    for _, rows in groups_of(sizes, len(x), slots):
        made[rows] = x[rows]
    return made


def group_amax_oracle(a: Any) -> Results:
    """That of ``amax`` without the rows of no group."""
    return {"amax": tile_amax(live(a.x, a.sizes, a.slots), a.tile, a.amax)}


def block_quantize_groups(
    s: Sampler, m: int, n: int, sizes: tuple[int, ...] | None = None, slots: int = 0, **options: Any
) -> Arguments:
    """``options``: as ``block_quantize``'s."""
    made = block_quantize(s, m, n, **options)
    return {**made, "sizes": s.put(_equal(m, sizes), int32), "slots": slots}


def block_quantize_groups_oracle(a: Any) -> Results:
    """That of ``block_quantize`` with zeros in the rows of no group."""
    return block_quantize_oracle(SimpleNamespace(**{**vars(a), "x": live(a.x, a.sizes, a.slots)}))


_SIZES: dict[str, Options] = {
    "uneven": {"m": 90, "n": 40, "k": 64, "sizes": (3, 0, 70, 17)},
    "odd": {"m": 37, "n": 21, "k": 19, "sizes": (5, 11, 9)},
    "rest": {"m": 70, "n": 16, "k": 32, "sizes": (2, 1)},
    "too-many": {"m": 20, "n": 16, "k": 32, "sizes": (12, 12, 7)},
    "one": {"m": 200, "n": 130, "k": 140, "sizes": (200,)},
    "none": {"m": 0, "n": 8, "k": 16, "sizes": (0, 0)},
    "negative": {"m": 10, "n": 8, "k": 16, "sizes": (-3, 6)},
    "slots": {"m": 48, "n": 24, "k": 40, "sizes": (5, 0, 16), "slots": 16},
    "slots-full": {"m": 150, "n": 24, "k": 40, "sizes": (75, 99), "slots": 75},
}
_LARGE: Options = {"m": 700, "n": 150, "k": 260, "sizes": (100, 0, 333, 40, 200)}
_CASES: dict[str, Options] = {}
for _layout in ("nt", "nn", "tn"):
    _CASES |= {f"{_layout}-{size}": {**options, "layout": _layout} for size, options in _SIZES.items()}
    for _dtype in HIGH_PRECISION:
        _CASES[f"{_layout}-{_dtype.name}"] = {**_SIZES["uneven"], "layout": _layout, "dtype": _dtype}
    for _size in ("rest", "too-many", "negative", "slots", "slots-full"):
        _CASES[f"{_layout}-{_size}-bfloat16"] = {**_SIZES[_size], "layout": _layout, "dtype": bfloat16}
    _whole: Options = {**_LARGE, "n": 152, "k": 264}  # rows of whole chunks of 16 bytes
    _CASES[f"{_layout}-large"] = {**_whole, "layout": _layout, "dtype": float16}
for _layout in ("nt", "nn"):
    _CASES[f"{_layout}-bias"] = {**_SIZES["rest"], "layout": _layout, "bias": True, "dtype": bfloat16}

_TILES: dict[str, dict[str, tuple[Tile, Tile]]] = {
    "rows": {
        "tensor": (TENSOR, TENSOR),
        "row": (ROW, ROW),
        "block": (LINE, SQUARE),
        "lines": (LINE, LINE),
        "squares": (SQUARE, SQUARE),
        "mixed": (ROW, TENSOR),
    },
    "terms": {
        "tensor": (TENSOR, TENSOR),
        "row": (ROW, ROW),
        "block": (LINE, LINE),
        "squares": (SQUARE, LINE),
    },
}
_FP8: dict[str, Options] = {}
for _along, _kinds in _TILES.items():
    for _size, _options in _SIZES.items():
        _FP8[f"{_along}-{_size}"] = {**_options, "along": _along}
        _own: Options = {"along": _along, "tiles": _kinds["block"], "dtype": bfloat16}
        _FP8[f"{_along}-{_size}-block"] = _options | _own
    for _kind, _tiles in _kinds.items():
        for _pair in ((E4M3, E4M3), (E5M2, E4M3)):
            _own = {"along": _along, "formats": _pair, "tiles": _tiles, "dtype": bfloat16}
            _FP8[f"{_along}-{_kind}-{_pair[0].name}"] = _own | _LARGE
        _own = {"along": _along, "formats": (E4M3, E5M2), "tiles": _tiles, "dtype": float16}
        _FP8[f"{_along}-{_kind}-odd"] = _own | _SIZES["odd"]
    for _kind in ("tensor", "row"):
        _own = {"along": _along, "tiles": _kinds[_kind], "fast": True}
        _FP8[f"{_along}-{_kind}-fast"] = _own | _LARGE
for _kind in ("tensor", "row", "block"):
    _own = {"tiles": _TILES["rows"][_kind], "bias": True}
    _FP8[f"bias-{_kind}"] = _own | _SIZES["rest"]
    _FP8[f"bias-{_kind}-large"] = _own | _LARGE | {"n": 144, "dtype": bfloat16}
    _FP8[f"bias-{_kind}-slots"] = _own | _SIZES["slots-full"] | {"dtype": float16}

_AMAX: dict[str, Options] = {}
_BLOCKS: dict[str, Options] = {}
for _size, _options in _SIZES.items():
    _own = {name: value for name, value in _options.items() if name != "k"}
    for _by_column in (False, True):
        _AMAX[f"{_size}-{'columns' if _by_column else 'whole'}"] = {**_own, "by_column": _by_column}
    for _tile, _name in ((LINE, "lines"), (SQUARE, "squares")):
        _BLOCKS[f"{_size}-{_name}"] = {**_own, "tile": _tile}
for _dtype in HIGH_PRECISION:
    for _by_column in (False, True):
        _own = {"m": 70, "n": 2056, "sizes": (31, 0, 8), "start": 2.0**-70, "dtype": _dtype}
        _AMAX[f"{_dtype.name}-{'columns' if _by_column else 'whole'}"] = _own | {"by_column": _by_column}
    _BLOCKS[_dtype.name] = {"m": 300, "n": 136, "sizes": (100, 0, 61), "dtype": _dtype}
for _only in ("q", "q_t"):
    _BLOCKS[_only] = {"m": 300, "n": 136, "sizes": (3, 130), "only": _only, "epsilon": 1e-4, "fmt": E5M2}

TESTS = (
    KernelTest("grouped_gemm", grouped_gemm, grouped_gemm_oracle, _CASES),
    KernelTest("grouped_fp8_gemm", grouped_fp8_gemm, grouped_fp8_gemm_oracle, _FP8, bits=modelled_groups),
    KernelTest("group_amax", group_amax, group_amax_oracle, _AMAX, {"strewn": False}),
    KernelTest(
        "block_quantize_groups",
        block_quantize_groups,
        block_quantize_groups_oracle,
        _BLOCKS,
        {"strewn": False},
    ),
)
