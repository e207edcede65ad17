"""``torch.distributed.pipelining`` over FP8 layers, by two processes; the checks are the worker's."""

from __future__ import annotations

import pytest

from tests.support.processes import PLACES, run


@pytest.mark.parametrize("place", PLACES)
def test_pipelines_of_two_processes(place, tmp_path):
    run("tests.adapters.torch.mesh_worker", 2, tmp_path, place, ["pipelines_give_one_process"])
