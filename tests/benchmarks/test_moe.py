"""The part ``moe`` of the benchmarks: its groups, and that each contender's result is that of its problem."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import moe
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.bench.report import setting_for
from fp8kit.testing.compare import assert_close


def test_groups_are_uneven_and_aligned() -> None:
    for size in moe.FULL:
        rows = moe.uneven(size)
        assert sum(rows) == size.rows
        assert not any(count % 16 for count in rows)
        assert max(rows) > 2 * size.rows / size.experts > min(rows)


def test_products_one_after_another_are_the_grouped_one() -> None:
    """Of groups of rows: along the terms each product has operands of its own."""
    kernels = dispatch.kernels(CPU)
    for mode in moe.MODES:
        if mode.along == "terms":
            continue
        problem = moe.Problem(moe.SMALL[0], mode, CPU)
        problem.ours(kernels)()
        grouped = problem.out.numpy().astype(np.float64)
        problem.out.numpy()[...] = 0
        problem.singles(kernels)(0)
        single = problem.out.numpy()
        assert_close(mode.name, single, grouped, "bfloat16", 2.0**-8 * np.abs(grouped))


@pytest.mark.combinations
def test_every_case_runs_and_is_right() -> None:
    rows = moe.moe_part(setting_for(CPU, rounds=1, calls=1))
    for row in rows:
        wanted = "not installed" if row["case"].startswith("torch") else "ok"
        assert row["status"].startswith(wanted), row
    errors = [row["error"] for row in rows if row["case"] == moe.OURS]
    assert len(errors) == len(moe.MODES)
    assert max(errors) < moe.BOUND
