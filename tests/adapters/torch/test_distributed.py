"""Two processes, on the CPU or on two GPUs: amaxes reduced over them, DistributedDataParallel, fully_shard.
The checks are the worker's."""

from __future__ import annotations

import pytest
import torch

from fp8kit.errors import RecipeError
from tests.support.processes import run

WORLD, WORKER = 2, "tests.adapters.torch.distributed_worker"
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


@pytest.mark.programs
def test_processes_share_their_amaxes(tmp_path):
    run(WORKER, WORLD, tmp_path, "cpu", CASES)


@pytest.mark.gpu2
def test_processes_with_a_gpu_each_share_their_amaxes(tmp_path):
    assert torch.cuda.device_count() >= WORLD, (
        f"a gpu2 test needs {WORLD} CUDA devices, torch finds {torch.cuda.device_count()}"
    )
    run(WORKER, WORLD, tmp_path, "cuda", CASES)


def test_what_is_no_group_is_refused():
    from fp8kit_torch import autocast

    with pytest.raises(RecipeError, match="amax_reduction_group"):
        autocast(amax_reduction_group="all")
