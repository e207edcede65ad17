"""Contract cases of the embedding: the look-up bit for bit, the gradient's sums against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType, float32, int32, int64
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put
from fp8kit.testing.contract.elementwise import Array, draw, table, wide

# rows of ids, rows of the table, columns
SIZES = ((40, 11, 33), (1, 5, 1), (300, 3, 16), (7, 50, 64), (0, 4, 8))


def _ids(kind: DType, count: int, rows: int) -> Array:
    return np.random.default_rng(1).integers(0, rows, count).astype(kind.numpy)


def _fwd(
    dtype: DType, kind: DType, sizes: tuple[int, int, int], stray: bool = False
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        count, rows, columns = sizes
        ids, values = _ids(kind, count, rows), draw(2, (rows, columns), dtype)
        outside = np.zeros(count, bool)
        if stray:
            outside[[0, 5, 9]] = True
            ids[outside] = (-1, rows, np.iinfo(kind.numpy).max)
        out = poisoned((count, columns), dtype, device)
        kernels.embedding_fwd(put(ids, device), put(values, device), out, 0)
        got = get(out)
        assert_same_bits("out", got[~outside], values[ids[~outside]])
        assert np.isnan(got[outside].astype(np.float32)).all(), "a row of an id out of range is not NaN"

    return run


def _bwd(dtype: DType, kind: DType, sizes: tuple[int, int, int]) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        count, rows, columns = sizes
        ids, dout = _ids(kind, count, rows), draw(3, (count, columns), dtype)
        reference, magnitude = np.zeros((rows, columns)), np.zeros((rows, columns))
        for i, row in enumerate(ids):
            reference[row] += wide(dout[i])
            magnitude[row] += np.abs(wide(dout[i]))
        terms = np.bincount(ids.astype(np.int64), minlength=rows)[:, None]
        results = []
        for _ in range(2):
            dtable = poisoned((rows, columns), dtype, device)
            kernels.embedding_bwd(put(ids, device), put(dout, device), dtable, 0)
            results.append(get(dtable))
        # sum_slack with another number of terms in each row
        slack = (terms + 4) * (sum_slack(magnitude, 1) / 5)
        assert_close("dtable", results[0], reference, dtype, slack)
        assert_same_bits("dtable, the second time", results[1], results[0])

    return run


def _order(kernels: Kernels, device: Device) -> None:
    """The sum goes in the order of i: 1 + 2^24 - 2^24 is 0 in float32, every other order gives 1."""
    dout = np.array([[1.0], [2.0**24], [-(2.0**24)]], np.float32)
    dtable = poisoned((2, 1), float32, device)
    kernels.embedding_bwd(put(np.zeros(3, np.int32), device), put(dout, device), dtable, 0)
    assert_same_bits(
        "dtable", get(dtable), np.array([[(np.float32(1) + dout[1, 0]) + dout[2, 0]], [0]], np.float32)
    )


def _name(dtype: DType, kind: DType, sizes: tuple[int, int, int]) -> str:
    return f"{dtype.name}-{kind.name}-{'x'.join(map(str, sizes))}"


CASES = [
    *table(
        "embedding_fwd",
        {_name(d, i, s): _fwd(d, i, s) for d in HIGH_PRECISION for i in (int32, int64) for s in SIZES},
    ),
    *table(
        "embedding_fwd",
        {
            f"{d.name}-{i.name}-out-of-range": _fwd(d, i, (10, 7, 12), True)
            for d in HIGH_PRECISION
            for i in (int32, int64)
        },
    ),
    *table(
        "embedding_bwd",
        {_name(d, i, s): _bwd(d, i, s) for d in HIGH_PRECISION for i in (int32, int64) for s in SIZES},
    ),
    *table("embedding_bwd", {"order": _order}),
]
