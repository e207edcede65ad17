"""What the committed logs hold of what is promised about sums and emulation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.arithmetic import CPU_CUBE, CUBE, DATA, MODES, PAIRS
from tests.support.source import ROOT

RESULTS = ROOT / "benchmarks/results"


def rows(log: str, part: str) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / log).read_text())["parts"][part]["rows"]
    return [row for row in found if row["status"] == "ok"]


def test_every_bit_is_cublaslts_but_of_products_that_it_splits() -> None:
    compared: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows("h200/arithmetic.json", "arithmetic"):
        if "same" in row:
            size, formats, data = row["workload"].split(", ")
            compared.setdefault((f"{formats}, {data}", row["case"]), []).append({"size": size, **row})
    wanted = {(f"{a} x {b}, {data}", f"hopper_{mode}") for a, b in PAIRS for data in DATA for mode in MODES}
    assert compared.keys() == wanted
    for found in compared.values():
        lengths = {int(row["size"].split(" x ")[2]) for row in found if row["splits"] == 1}
        assert lengths >= {32, 64, 128, 512, 4096, 16384}
        assert {row["same"] for row in found if row["splits"] == 1} == {1.0}
        assert [row["size"] for row in found if row["splits"] > 1] == ["64 x 128 x 8192"]


@pytest.mark.parametrize(("log", "size", "most"), [("h200", CUBE, 2.0), ("cpu", CPU_CUBE, 10.0)])
def test_the_model_is_fast_enough_for_studies(log: str, size: tuple[int, ...], most: float) -> None:
    by = f"{' x '.join(map(str, size))}, E4M3 x E4M3, normal"
    found = {
        row["case"]: row["seconds"]
        for row in rows(f"{log}/arithmetic.json", "arithmetic")
        if row["workload"] == by and row["case"].endswith(", time")
    }
    assert found.keys() >= {f"{name}, time" for name in ("exact", "hopper_fast", "hopper_split")}
    assert max(found.values()) <= most


def test_emulated_layers_take_at_most_three_times_as_long_as_in_bfloat16() -> None:
    found = {(row["workload"], row["case"]): row for row in rows("h200/recipes.json", "recipes")}
    for workload in ("layer 4096, 2048 x 4", "layer 1024, 1024 x 4"):
        for case in ("mxfp8", "nvfp4"):
            assert found[workload, case]["ratio"] <= 3
