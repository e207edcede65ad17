"""Two processes, on the CPU or on two GPUs: amaxes reduced over them, DistributedDataParallel, fully_shard.
The checks are the worker's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fp8kit.errors import RecipeError
from tests.support.source import ROOT

WORLD = 2
CASES = [
    "ddp",
    "single",
    "ddp_recompute",
    "groups",
    "tensor_parallel",
    "context_parallel",
    "sharded",
    "sharded_parts",
    "held_in_fp8",
    "collected_late",
    "masters_in_parts",
]


def work(tmp_path, place):
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.adapters.torch.distributed_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(tmp_path), place],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        results = [worker.communicate(timeout=200) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for (out, err), worker in zip(results, workers, strict=True):
        assert worker.returncode == 0, err[-4000:]
        assert out.split()[::2] == CASES


@pytest.mark.programs
def test_processes_share_their_amaxes(tmp_path):
    work(tmp_path, "cpu")


@pytest.mark.gpu2
def test_processes_with_a_gpu_each_share_their_amaxes(tmp_path):
    assert torch.cuda.device_count() >= WORLD, (
        f"a gpu2 test needs {WORLD} CUDA devices, torch finds {torch.cuda.device_count()}"
    )
    work(tmp_path, "cuda")


def test_what_is_no_group_is_refused():
    from fp8kit_torch import autocast

    with pytest.raises(RecipeError, match="amax_reduction_group"):
        autocast(amax_reduction_group="all")
