"""``torch.distributed.pipelining`` over FP8 layers, by two processes; the checks are the worker's."""

from __future__ import annotations

import pytest

from tests.support.processes import run


@pytest.mark.programs
def test_pipelines_of_two_processes(tmp_path):
    run("tests.adapters.torch.mesh_worker", 2, tmp_path, "cpu", ["pipelines_give_one_process"])
