"""Grouped products against float64 products of the values that codes stand for; the order of sums is free.

Codes are multiplied exactly and summed in float32, 128 at a time, each part scaled by a product of two
scales: the error of a sum of K terms, and two roundings more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, Format, bfloat16, float16, float32, int32, uint8
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    narrowed,
    sum_slack,
    wide,
)

Tile = tuple[int, int]


def _coded(s: Sampler, shape: tuple[int, ...], fmt: Format, tile: Tile) -> tuple[Any, Any]:
    """(codes, their scales)."""
    rows, columns = shape[-2:]
    height, width = tile[0] or max(rows, 1), tile[1] or max(columns, 1)
    count = -(-rows // height) * -(-columns // width) * int(np.prod(shape[:-2], dtype=int))
    codes = s.array(shape, uint8, lambda: narrowed(s.draw(shape, 8.0), fmt))
    scales = s.array((count,), float32, lambda: np.exp2(s.random.uniform(-3, 3, count)).astype(np.float32))
    return codes, scales


def grouped_gemm(
    s: Sampler,
    m: int,
    n: int,
    k: int = 64,
    layout: str = "nt",
    sizes: tuple[int, ...] | None = None,
    slots: int = 0,
    bias: bool = False,
    formats: tuple[Format, Format] | None = None,
    tiles: tuple[Tile, Tile] = ((0, 0), (0, 0)),
) -> Arguments:
    """``m`` rows, results of ``n`` columns, ``k`` features of a; ``sizes`` None: eight equal groups."""
    sizes = (m // 8,) * 8 if sizes is None else sizes
    groups = len(sizes)
    left = (m, k)
    right = {"nt": (groups, n, k), "nn": (groups, k, n), "tn": (m, n)}[layout]
    a_inv = b_inv = a_format = b_format = None
    if formats is None:
        a, b = s.normal(*left), s.normal(*right)
    else:
        a_format, b_format = formats
        (a, a_inv), (b, b_inv) = _coded(s, left, a_format, tiles[0]), _coded(s, right, b_format, tiles[1])
    return {
        "a": a,
        "b": b,
        "out": s.output(*((groups, k, n) if layout == "tn" else (m, n))),
        "sizes": s.put(sizes, int32),
        "layout": layout,
        "slots": slots,
        "bias": s.normal(groups, n) if bias else None,
        "a_format": a_format,
        "b_format": b_format,
        "a_scale_inv": a_inv,
        "b_scale_inv": b_inv,
        "a_tile": tiles[0],
        "b_tile": tiles[1],
    }


def _values(codes: Array, fmt: Format | None, scales: Array | None, tile: Tile) -> Array:
    if fmt is None or scales is None:
        return wide(codes)
    rows, columns = codes.shape[-2:]
    height, width = tile[0] or max(rows, 1), tile[1] or max(columns, 1)
    grid = wide(scales).reshape(*codes.shape[:-2], -(-rows // height), -(-columns // width))
    at = np.ix_(np.arange(rows) // height, np.arange(columns) // width)
    spread = grid[at] if codes.ndim == 2 else np.stack([own[at] for own in grid])
    return np.asarray(wide(codec.decode(codes, fmt)) * spread)


def _rows(a: Any) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, size in enumerate(a.sizes.tolist()):
        cover = a.slots or max(0, min(size, len(a.a) - start))
        yield e, slice(start, start + max(0, min(size, cover)))
        start += cover


def grouped_gemm_oracle(a: Any) -> Results:
    """A product for each group."""
    left = _values(a.a, a.a_format, a.a_scale_inv, a.a_tile)
    right = _values(a.b, a.b_format, a.b_scale_inv, a.b_tile)
    out, slack = np.zeros(a.out.shape), np.zeros(a.out.shape)
    at: Any
    for e, rows in _rows(a):
        if a.layout == "tn":
            x, w, at = left[rows].T, right[rows], e
        else:
            x, w, at = left[rows], right[e].T if a.layout == "nt" else right[e], rows
        size = np.abs(x) @ np.abs(w)
        out[at], slack[at] = x @ w, sum_slack(size, x.shape[1]) + 4 * ROUNDOFF * size
        if a.bias is not None:
            out[at] += wide(a.bias)[e]
            slack[at] += 2 * ROUNDOFF * np.abs(wide(a.bias)[e])
    return {"out": (out, slack)}


_SIZES = {
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
_TILES: dict[str, dict[str, tuple[Tile, Tile]]] = {
    "nt": {"tensor": ((0, 0), (0, 0)), "row": ((1, 0), (1, 0)), "block": ((1, 128), (128, 128))},
    "nn": {"tensor": ((0, 0), (0, 0)), "row": ((1, 0), (0, 1)), "block": ((1, 128), (128, 128))},
    "tn": {"tensor": ((0, 0), (0, 0)), "row": ((0, 1), (0, 1)), "block": ((128, 1), (128, 1))},
}
_CASES: dict[str, Options] = {
    f"{layout}-{size}": {**options, "layout": layout} for layout in _TILES for size, options in _SIZES.items()
}
for _layout, _kinds in _TILES.items():
    for _dtype in HIGH_PRECISION:
        _CASES[f"{_layout}-{_dtype.name}"] = {**_SIZES["uneven"], "layout": _layout, "dtype": _dtype}
    for _kind, _tiles in _kinds.items():
        for _pair in ((E4M3, E4M3), (E5M2, E4M3)):
            _own: Options = {"layout": _layout, "formats": _pair, "tiles": _tiles, "dtype": bfloat16}
            _large: Options = {"m": 300, "n": 150, "k": 260, "sizes": (100, 0, 133, 40)}
            _CASES[f"{_layout}-{_kind}-{_pair[0].name}"] = _own | _large
        _own = {"layout": _layout, "formats": (E4M3, E5M2), "tiles": _tiles, "dtype": float16}
        _CASES[f"{_layout}-{_kind}-odd"] = _own | _SIZES["odd"]
        _CASES[f"{_layout}-{_kind}-slots"] = _own | _SIZES["slots"] | {"dtype": float32}
for _layout in ("nt", "nn"):
    _CASES[f"{_layout}-bias"] = {**_SIZES["rest"], "layout": _layout, "bias": True, "dtype": bfloat16}

TESTS = (KernelTest("grouped_gemm", grouped_gemm, grouped_gemm_oracle, _CASES),)
