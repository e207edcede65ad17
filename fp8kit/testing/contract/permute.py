"""Permutations bit for bit: sums are float32 sums in the order of the rows, rounded once. The gradient of
probabilities is a sum over columns, in any order."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float32, int32, uint8
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    sum_slack,
    wide,
)


def _map(s: Sampler, rows: int, tokens: int, slots: int, stray: bool) -> Any:
    """A map of ``rows`` places: different pairs in any order, and empty rows; ``stray``: pairs out of
    range among them."""

    def values() -> Array:
        pairs = s.random.permutation(max(tokens * slots, 1))[:rows]
        found = np.full((rows, 2), -1, np.int32)
        if tokens * slots:
            found[: len(pairs)] = np.stack((pairs // slots, pairs % slots), 1)
        found = found[s.random.permutation(rows)]
        if rows > 2:
            found[1] = -1
        if stray:
            found[[0, 5, 9]] = (tokens, 0), (-7, 1), (np.iinfo(np.int32).max, 2)
        return found

    return s.array((rows, 2), int32, values)


def row_sample(
    s: Sampler,
    m: int,
    n: int,
    rows: int = 0,
    slots: int = 4,
    probs: DType | None = None,
    stray: bool = False,
    back: bool = False,
) -> Arguments:
    """``m`` tokens to ``rows`` rows (0: 2 m), or ``back``; ``probs``: the type of the probabilities, None
    without."""
    rows = rows or 2 * m
    weights = None if probs is None else s.normal(m, slots, dtype=probs)
    row_map, (given, made) = _map(s, rows, m, slots, stray), (rows, m) if back else (m, rows)
    return {"x": s.normal(given, n), "row_map": row_map, "probs": weights, "out": s.output(made, n)}


def _filled(a: Any, tokens: int, slots: int | None = None) -> Any:
    """(row, token, slot) of the rows that are not empty, in order."""
    for r, (token, slot) in enumerate(a.row_map.tolist()):
        if 0 <= token < tokens and (slots is None or 0 <= slot < slots):
            yield r, token, slot


def _scaled(a: Any, row: Array, token: int, slot: int) -> Array:
    row = row.astype(np.float32)
    return row if a.probs is None else row * a.probs[token, slot].astype(np.float32)


def _slots(a: Any) -> int | None:
    return None if a.probs is None else a.probs.shape[1]


def permute_rows_oracle(a: Any) -> Results:
    """The rows, times their factor in float32."""
    out = np.zeros(a.out.shape, np.float32)
    for r, token, slot in _filled(a, len(a.x), _slots(a)):
        out[r] = _scaled(a, a.x[token], token, slot)
    return {"out": out.astype(a.out.dtype)}


def unpermute_rows_oracle(a: Any) -> Results:
    """One float32 addition after the other."""
    total = np.zeros(a.out.shape, np.float32)
    for r, token, slot in _filled(a, len(total), _slots(a)):
        total[token] += _scaled(a, a.x[r], token, slot)
    return {"out": total.astype(a.out.dtype)}


def permute_probs(
    s: Sampler, m: int, n: int, rows: int = 0, slots: int = 4, stray: bool = False
) -> Arguments:
    """Probabilities of ``m`` tokens for ``rows`` rows (0: 2 m); ``n``: not used."""
    row_map = _map(s, rows or 2 * m, m, slots, stray)
    return {"probs": s.normal(m, slots), "row_map": row_map, "out": s.output(rows or 2 * m)}


def permute_probs_oracle(a: Any) -> Results:
    """The probabilities."""
    out = np.zeros_like(a.out)
    for r, token, slot in _filled(a, *a.probs.shape):
        out[r] = a.probs[token, slot]
    return {"out": out}


def unpermute_probs(
    s: Sampler,
    m: int,
    n: int,
    rows: int = 0,
    slots: int = 4,
    probs: DType = float32,
    alone: bool = False,
    stray: bool = False,
) -> Arguments:
    """``rows`` rows (0: 2 m) to probabilities of type ``probs`` of ``m`` tokens; ``alone``: without x."""
    rows, n = rows or 2 * m, 1 if alone else n
    row_map, x = _map(s, rows, m, slots, stray), None if alone else s.normal(m, n)
    return {"rows": s.normal(rows, n), "x": x, "row_map": row_map, "out": s.output(m, slots, dtype=probs)}


def unpermute_probs_oracle(a: Any) -> Results:
    """A sum over columns each."""
    out, size = np.zeros(a.out.shape), np.zeros(a.out.shape)
    for r, token, slot in _filled(a, *out.shape):
        products = wide(a.rows[r]) * (1 if a.x is None else wide(a.x[token]))
        out[token, slot], size[token, slot] = products.sum(), np.abs(products).sum()
    if a.x is None:
        return {"out": out.astype(np.float32).astype(a.out.dtype)}
    return {"out": (out, sum_slack(size, a.rows.shape[1]) + ROUNDOFF * size)}


def expert_rows(
    s: Sampler, m: int, n: int, rows: int | None = None, align: int = 1, width: int = 0, density: float = 0.3
) -> Arguments:
    """``m`` tokens, ``n`` experts, 256 at most, ``rows`` rows (None: 2 m); ``width``: choices of a token, 0
    for a mask of such a ``density``."""
    n, rows = min(n, 256), 2 * m if rows is None else rows

    def values() -> Array:
        if width:
            return s.random.integers(-1, n + 1, (m, width)).astype(np.int32)
        return (s.random.random((m, n)) < density).astype(np.uint8)

    return {
        "routing": s.array((m, width or n), int32 if width else uint8, values),
        "row_map": s.output(rows, 2, dtype=int32),
        "sizes": s.output(n, dtype=int32),
        "counts": s.output(n, dtype=int32),
        "align": align,
    }


def expert_rows_oracle(a: Any) -> Results:
    """Expert after expert, pair after pair."""
    row_map, experts, start = np.full(a.row_map.shape, -1, np.int32), len(a.counts), 0
    counts, sizes = np.zeros(experts, np.int32), np.zeros(experts, np.int32)
    for e in range(experts):
        found = np.argwhere(a.routing != 0 if a.routing.dtype == np.uint8 else a.routing == e).tolist()
        found = [pair for pair in found if a.routing.dtype != np.uint8 or pair[1] == e]
        for i, pair in enumerate(found):
            if start + i < len(row_map):
                row_map[start + i] = pair
        end = start + -(-len(found) // a.align) * a.align
        counts[e], sizes[e] = len(found), min(end, len(row_map)) - min(start, len(row_map))
        start = end
    return {"row_map": row_map, "sizes": sizes, "counts": counts}


_MAPS: dict[str, Options] = {
    "mask": {"m": 40, "n": 5, "rows": 70},
    "mask-aligned": {"m": 40, "n": 5, "rows": 160, "align": 16},
    "mask-dropping": {"m": 300, "n": 3, "rows": 100, "align": 8},
    "mask-many": {"m": 700, "n": 9, "rows": 3000, "align": 128, "density": 0.5},
    "indices": {"m": 33, "n": 6, "rows": 70, "width": 2},
    "indices-aligned": {"m": 300, "n": 4, "rows": 1000, "width": 3, "align": 32},
    "indices-dropping": {"m": 300, "n": 4, "rows": 500, "width": 3, "align": 16},
    "no-tokens": {"m": 0, "n": 3, "rows": 8, "align": 4},
    "no-rows": {"m": 9, "n": 3, "rows": 0},
}

# tokens, columns, rows, slots
_SIZES = ((11, 33, 30, 4), (1, 1, 5, 1), (50, 16, 9, 3), (7, 1100, 28, 4), (0, 8, 3, 2), (5, 0, 6, 2))
_CASES: dict[str, Options] = {
    **product("{m}x{n}x{rows}x{slots}", {"m n rows slots": _SIZES}),
    "many-rows": {"m": 60, "n": 8, "rows": 2100, "slots": 40},
    "out-of-range": {"m": 7, "n": 12, "rows": 16, "slots": 3, "stray": True},
}


def _cases(**kinds: Options) -> dict[str, Options]:
    return product("{dtype.name}-{kind}-{case}", {"dtype": HIGH_PRECISION, "kind": kinds, "case": _CASES})


_WEIGHTED = {f"probs-{kind.name}": {"probs": kind} for kind in (float32, bfloat16)}
_ROWS = _cases(plain={}, **_WEIGHTED)

TESTS = (
    KernelTest("permute_rows", row_sample, permute_rows_oracle, _ROWS),
    KernelTest("unpermute_rows", functools.partial(row_sample, back=True), unpermute_rows_oracle, _ROWS),
    KernelTest("expert_rows", expert_rows, expert_rows_oracle, _MAPS),
    KernelTest("permute_probs", permute_probs, permute_probs_oracle, _cases(plain={})),
    KernelTest(
        "unpermute_probs", unpermute_probs, unpermute_probs_oracle, _cases(alone={"alone": True}, **_WEIGHTED)
    ),
)
