"""The benchmark of our FP8 product beside cuBLASLt's, on the CPU's engine."""

from __future__ import annotations

import pytest

from benchmarks import own_gemms, targets
from benchmarks.own_gemms import (
    BLOCKS,
    FEW,
    LIBRARY,
    OURS,
    TENSORS,
    Case,
    cases,
    epilogues,
    measure,
    measure_epilogue,
    speed,
)
from fp8kit.arrays import CPU
from fp8kit.backends import dispatch
from fp8kit.bench.gemms import Product
from fp8kit.bench.report import Report, Unavailable, setting_for
from fp8kit.bench.sizes import FULL
from fp8kit.formats import E4M3, E5M2


@pytest.mark.parametrize(
    ("name", "a", "scales"),
    [
        ("fc1 forward", E4M3, TENSORS),
        ("fc1 dgrad", E5M2, TENSORS),
        ("fc1 forward", E4M3, BLOCKS),
        ("fc1 wgrad", E5M2, BLOCKS),
    ],
)
def test_both_are_checked_and_timed(name, a, scales):
    case = Case(Product(name, 96, 160, 128, a, False), scales)
    rows = measure(case, setting_for(CPU), dispatch.kernels(CPU), dispatch.kernels(CPU))
    assert [row["case"] for row in rows] == [OURS, LIBRARY]
    assert all(row["status"] == "ok" and row["gpu_ms"] > 0 and row["error"] < 2**-7 for row in rows)
    assert rows[1]["of_best"] == 1


def test_the_twelve_products_and_numbers_of_rows():
    found = list(cases(True, FULL.large))
    few = len(own_gemms.ROWS) + 3 * len(own_gemms.FEW_ROWS)
    assert [case.scales for case in found] == [TENSORS] * 12 + [BLOCKS] * 12 + [FEW] * few
    assert len({str(case) for case in found}) == len(found)
    with pytest.raises(Unavailable, match=r"capability 9\.0"):
        own_gemms.own_part(setting_for(CPU))


@pytest.mark.parametrize("case", list(epilogues(FULL.large)), ids=str)
def test_epilogues_are_timed_beside_a_product_and_a_pass(case):
    small = case._replace(shape=(32, 128, 64))
    rows = measure_epilogue(small, setting_for(CPU), dispatch.kernels(CPU), dispatch.kernels(CPU))
    assert [(row["case"], row["status"]) for row in rows] == [(OURS, "ok"), (LIBRARY, "ok")]
    assert rows[1]["of_best"] == 1


def _row(scales, share, rows=64, **more):
    workload = str(Case(Product("forward", rows, 4, 4, E4M3, True), scales))
    return {"case": OURS, "scales": scales, "workload": workload, "status": "ok", "of_best": share} | more


def test_speed():
    rows = [_row(TENSORS, 0.5), _row(TENSORS, 2.0), _row(FEW, 2.0, 16), _row(FEW, 0.72), _row(FEW, 0.5, 256)]
    assert speed(rows, TENSORS) == pytest.approx(1.0)
    assert speed(rows, FEW) == pytest.approx(1.2)
    assert speed(rows, FEW, least=True) == 0.72
    assert speed(rows, BLOCKS) is None
    assert speed([*rows, _row(TENSORS, 1.0, status="WRONG")], TENSORS) is None


def test_targets_without_figures():
    report = Report({"settings": {"sizes": FULL.name}})
    found = {row["what"]: row for row in targets.evaluate(report) if row["part"] == "own"}
    assert len(found) == 5
    assert all(row["verdict"] == "not measured" for row in found.values())
