"""Contract cases of the cross entropy, against float64.

Tolerances, with u = 2^-24: the log-sum-exp of V terms has the relative error of their sum, (V + 16) u with 8
u of it for exp and log, as an absolute error, and rounds at its own size. A probability exp(x - lse) has the
relative error u (|x| + |lse|) of its argument and 8 u of exp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float16, float32, int32, int64
from fp8kit.testing.compare import assert_close, sum_slack
from fp8kit.testing.contract import get, poisoned, put
from fp8kit.testing.contract.elementwise import ROUNDOFF, Array, draw, table, wide

IGNORE = -100
SHAPES = ((17, 33), (1, 64), (5, 1), (0, 16), (40, 1000))


def _data(dtype: DType, kind: DType, shape: tuple[int, int], ignored: bool) -> tuple[Array, Array]:
    targets = np.random.default_rng(1).integers(0, shape[1], shape[0]).astype(kind.numpy)
    if ignored:
        targets[::3] = IGNORE
    return draw(2, shape, dtype, 4.0), targets


def _lse(x: Array) -> Array:
    top = x.max(1, keepdims=True) if len(x) else np.zeros((0, 1))
    return np.asarray(np.log(np.exp(x - top).sum(1)) + top[:, 0])


def _fwd(
    dtype: DType,
    kind: DType,
    shape: tuple[int, int],
    smoothing: float = 0.0,
    ignored: bool = False,
    mean: bool = True,
    stray: bool = False,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, v = shape
        logits, targets = _data(dtype, kind, shape, ignored)
        if stray:
            targets[1], targets[2] = v, -1
        loss, lse = poisoned((m,), float32, device), poisoned((m,), float32, device)
        total = poisoned((2,), float32, device) if mean else None
        kernels.cross_entropy_fwd(
            put(logits, device), put(targets, device), loss, lse, total, smoothing, IGNORE, 0
        )
        x = wide(logits)
        sums = _lse(x)
        inside = (targets >= 0) & (targets < v)
        picked = x[np.arange(m), np.where(inside, targets, 0)]
        reference = np.where(
            inside,
            sums - (1 - smoothing) * picked - smoothing * x.mean(1),
            np.where(targets == IGNORE, 0, np.nan),
        )
        sums_slack = (v + 16) * ROUNDOFF + 2 * ROUNDOFF * np.abs(sums)
        slack = (
            sums_slack
            + 4 * ROUNDOFF * (np.abs(sums) + np.abs(picked))
            + smoothing * sum_slack(np.abs(x).mean(1), v)
        )
        assert_close("lse", get(lse), sums, float32, sums_slack)
        assert_close("loss", get(loss), reference, float32, slack)
        if total is not None:
            kept = targets != IGNORE
            count = int(kept.sum())
            average = reference[kept].mean() if count else 0.0
            average_slack = (
                (slack[kept].mean() + sum_slack(np.abs(reference[kept]).mean(), count)) if count else 0.0
            )
            assert_close(
                "total",
                get(total),
                np.array([average, count]),
                float32,
                np.array([np.nan_to_num(average_slack), 0.0]),
            )

    return run


def _bwd(
    dtype: DType,
    kind: DType,
    shape: tuple[int, int],
    smoothing: float = 0.0,
    ignored: bool = False,
    mean: bool = False,
    alias: bool = False,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, v = shape
        logits, targets = _data(dtype, kind, shape, ignored)
        x = wide(logits)
        lse = _lse(x).astype(np.float32)
        count = int((targets != IGNORE).sum())
        dloss = draw(3, (1,) if mean else (m,), float32)
        source = put(logits, device)
        dlogits = source if alias else poisoned(shape, dtype, device)
        total = put(np.array([1.5, count], np.float32), device) if mean else None
        kernels.cross_entropy_bwd(
            source,
            put(targets, device),
            put(lse, device),
            put(dloss, device),
            total,
            dlogits,
            smoothing,
            IGNORE,
            0,
        )
        kept = (targets != IGNORE)[:, None]
        onehot = np.zeros(shape)
        onehot[np.arange(m), np.where(targets == IGNORE, 0, targets)] = 1
        p = np.exp(x - wide(lse)[:, None])
        upstream = wide(dloss)[:, None] / (max(count, 1) if mean else 1)
        reference = np.where(kept, (p - (1 - smoothing) * onehot - smoothing / v) * upstream, 0)
        p_slack = p * (ROUNDOFF * (np.abs(x) + np.abs(wide(lse))[:, None]) + 8 * ROUNDOFF)
        slack = np.abs(upstream) * (
            p_slack + 4 * ROUNDOFF * (p + onehot + smoothing / v)
        ) + 2 * ROUNDOFF * np.abs(reference)
        assert_close("dlogits", get(dlogits), reference, dtype, np.where(kept, slack, 0))

    return run


_OPTIONS = {
    "smoothing": {"smoothing": 0.1},
    "ignored": {"ignored": True},
    "smoothing-ignored": {"smoothing": 0.25, "ignored": True},
}


def _all_ignored(kernels: Kernels, device: Device) -> None:
    """The mean of no rows is 0, and its gradient too."""
    logits, targets = draw(1, (4, 9), float32), np.full(4, IGNORE, np.int32)
    loss, lse, total = (poisoned((n,), float32, device) for n in (4, 4, 2))
    kernels.cross_entropy_fwd(put(logits, device), put(targets, device), loss, lse, total, 0.0, IGNORE, 0)
    assert_close("loss", get(loss), np.zeros(4), float32)
    assert_close("total", get(total), np.zeros(2), float32)
    dlogits = poisoned((4, 9), float32, device)
    one = put(np.ones(1, np.float32), device)
    kernels.cross_entropy_bwd(
        put(logits, device), put(targets, device), lse, one, total, dlogits, 0.0, IGNORE, 0
    )
    assert_close("dlogits", get(dlogits), np.zeros((4, 9)), float32)


CASES = [
    *table(
        "cross_entropy_fwd",
        {f"{d.name}-{s[0]}x{s[1]}": _fwd(d, int64, s) for d in HIGH_PRECISION for s in SHAPES},
    ),
    *table(
        "cross_entropy_fwd",
        {
            f"{d.name}-{n}": _fwd(d, int32, (17, 33), **o)  # type: ignore[arg-type]
            for d in HIGH_PRECISION
            for n, o in _OPTIONS.items()
        },
    ),
    *table(
        "cross_entropy_fwd",
        {f"{i.name}-out-of-range": _fwd(float32, i, (7, 33), mean=False, stray=True) for i in (int32, int64)},
    ),
    *table("cross_entropy_fwd", {"all-ignored": _all_ignored}),
    *table(
        "cross_entropy_bwd",
        {f"{d.name}-{s[0]}x{s[1]}": _bwd(d, int64, s) for d in HIGH_PRECISION for s in SHAPES},
    ),
    *table(
        "cross_entropy_bwd",
        {
            f"{d.name}-{n}{'-mean' * m}": _bwd(d, int32, (17, 33), mean=m, **o)  # type: ignore[arg-type]
            for d in HIGH_PRECISION
            for n, o in _OPTIONS.items()
            for m in (False, True)
        },
    ),
    *table(
        "cross_entropy_bwd",
        {
            f"{d.name}-dlogits-is-logits": _bwd(d, int64, (17, 33), 0.1, True, True, True)
            for d in (float32, bfloat16, float16)
        },
    ),
]
