"""Contract cases of stochastic depth: samples against Philox4x32-10 written plainly, the arithmetic against
float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.testing.compare import assert_close
from fp8kit.testing.contract import Case, get, poisoned, put
from fp8kit.testing.contract.dropout import RNG, keep_factors
from fp8kit.testing.contract.elementwise import ROUNDOFF, draw, table, wide

COUNT = 6
# an empty sequence among them; rows from 33 on belong to the last
STARTS = np.array([0, 4, 4, 9, 10, 30, 33], np.int32)


def _run(
    dtype: DType,
    shape: tuple[int, int],
    inner: int,
    residual: bool = True,
    packed: bool = False,
    alias: bool = False,
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x, base, p = draw(1, shape, dtype), draw(2, shape, dtype), 0.4
        rows = np.arange(shape[0])
        samples = (
            np.array([max(s for s in range(COUNT) if STARTS[s] <= i) for i in rows], np.int64)
            if packed
            else rows // inner % COUNT
        )
        factors = keep_factors(RNG, p, (COUNT,))
        assert 0 < (factors == 0).sum() < COUNT
        exact = wide(x) * factors[samples][:, None]
        x[factors[samples] == 0] = np.inf  # of no consequence
        source = put(x, device)
        y = source if alias else poisoned(shape, dtype, device)
        kernels.drop_path(
            source,
            put(base, device) if residual else None,
            y,
            put(STARTS, device) if packed else None,
            inner,
            COUNT,
            p,
            put(RNG, device),
            0,
        )
        reference = exact + wide(base) * residual
        assert_close("y", get(y), reference, dtype, ROUNDOFF * (np.abs(exact) + np.abs(reference)))

    return run


CASES: list[Case] = [
    *table(
        "drop_path",
        {
            f"{d.name}-{s[0]}x{s[1]}-{i}": _run(d, s, i)
            for d in HIGH_PRECISION
            for s in ((36, 64), (42, 5), (12, 33))
            for i in (1, 2)
        },
    ),
    *table("drop_path", {f"{d.name}-packed": _run(d, (37, 24), 1, packed=True) for d in HIGH_PRECISION}),
    *table("drop_path", {f"{d.name}-plain": _run(d, (30, 17), 5, residual=False) for d in HIGH_PRECISION}),
    *table("drop_path", {f"{d.name}-y-is-x": _run(d, (30, 17), 5, alias=True) for d in HIGH_PRECISION}),
]
