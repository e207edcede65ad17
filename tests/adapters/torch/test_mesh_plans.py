"""``parallelize_module`` over converted layers and norms, by two processes; the checks are the worker's."""

from __future__ import annotations

import pytest

from tests.support.processes import PLACES, run

CASES = ["plans_give_one_process", "codes_are_gathered", "torchao_plans"]


@pytest.mark.parametrize("place", PLACES)
def test_plans_of_two_processes(place, tmp_path):
    run("tests.adapters.torch.mesh_worker", 2, tmp_path, place, CASES)


@pytest.mark.programs
def test_meshes_of_two_dimensions(tmp_path):
    run("tests.adapters.torch.mesh_worker", 4, tmp_path, "cpu", ["two_dimensions"])
