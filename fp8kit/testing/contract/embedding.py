"""The embedding bit for bit: its gradient is a float32 sum in the order of the ids, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.formats import HIGH_PRECISION, DType, int32, int64
from fp8kit.testing.contract import Arguments, Array, KernelTest, Options, Results, Sampler, product

# 1 + 2^24 - 2^24 is 0 in float32, every other order gives 1
_ORDER = np.array([[1.0], [2.0**24], [-(2.0**24)]], np.float32)


def _ids(s: Sampler, m: int, rows: int, kind: DType, stray: bool) -> ArrayView:
    ids = s.random.integers(0, max(rows, 1), m)
    if stray:
        ids[[0, 5, 9]] = -1, rows, np.iinfo(kind.numpy).max
    return s.put(ids, kind)


def embedding_fwd(
    s: Sampler, m: int, n: int, rows: int = 0, kind: DType = int64, stray: bool = False
) -> Arguments:
    """A table of ``rows`` (0: ``m``); ``stray``: ids out of range among the others."""
    ids = _ids(s, m, rows or m, kind, stray)
    return {"ids": ids, "table": s.normal(rows or m, n), "out": s.output(m, n)}


def embedding_fwd_oracle(a: Any) -> Results:
    """The rows; NaN for an id out of range."""
    known = (a.ids >= 0) & (a.ids < len(a.table))
    out = a.table[np.where(known, a.ids, 0)]
    out[~known] = np.nan
    return {"out": out}


def embedding_bwd(
    s: Sampler, m: int, n: int, rows: int = 0, kind: DType = int64, values: Array | None = None
) -> Arguments:
    """``values``: dout, all of the first row."""
    ids = _ids(s, m, 1 if values is not None else rows or m, kind, False)
    dout = s.normal(m, n) if values is None else s.put(values)
    return {"ids": ids, "dout": dout, "dtable": s.output(rows or m, n)}


def embedding_bwd_oracle(a: Any) -> Results:
    """One float32 addition after the other."""
    total = np.zeros(a.dtable.shape, np.float32)
    for row, dout in zip(a.ids, a.dout.astype(np.float32), strict=True):
        if 0 <= row < len(total):
            total[row] += dout
    return {"dtable": total.astype(a.dtable.dtype)}


# rows of ids, rows of the table, columns
_SIZES = ((40, 11, 33), (1, 5, 1), (300, 3, 16), (7, 50, 64), (0, 4, 8))
_KINDS = {"dtype": HIGH_PRECISION, "kind": (int32, int64)}
_CASES = product("{dtype.name}-{kind.name}-{m}x{rows}x{n}", {**_KINDS, "m rows n": _SIZES})
_STRAY = product("{dtype.name}-{kind.name}-out-of-range", _KINDS, m=10, rows=7, n=12, stray=True)
_IN_ORDER: Options = {"m": 3, "n": 1, "rows": 2, "kind": int32, "values": _ORDER}

TESTS = (
    KernelTest("embedding_fwd", embedding_fwd, embedding_fwd_oracle, {**_CASES, **_STRAY}),
    KernelTest("embedding_bwd", embedding_bwd, embedding_bwd_oracle, {**_CASES, "order": _IN_ORDER}),
)
