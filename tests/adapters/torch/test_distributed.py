"""Two processes, on the CPU or on two GPUs: amaxes reduced over them, DistributedDataParallel, fully_shard.
The checks are the worker's."""

from __future__ import annotations

import pytest

from fp8kit.errors import RecipeError
from tests.support.processes import PLACES, run

WORLD, WORKER = 2, "tests.adapters.torch.distributed_worker"
CASES = [
    "ddp",
    "single",
    "ddp_recompute",
    "groups",
    "tensor_parallel",
    "own_rows_under_fully_shard",
    "exact_products",
    "context_parallel",
    "sharded",
    "sharded_parts",
    "held_in_fp8",
    "loaded_unevenly",
    "collected_late",
    "masters_in_parts",
]


@pytest.mark.parametrize("place", PLACES)
def test_processes_share_their_amaxes(place, tmp_path):
    run(WORKER, WORLD, tmp_path, place, CASES)


@pytest.mark.parametrize("place", PLACES)
def test_layers_come_from_the_meta_device(place, tmp_path):
    cases = ["same_as_made_on_a_device", "same_without_codes", "trained_and_saved"]
    run("tests.adapters.torch.meta_worker", WORLD, tmp_path, place, cases)


@pytest.mark.programs
def test_rows_that_three_processes_do_not_divide(tmp_path):
    run(WORKER, 3, tmp_path, "cpu", ["loaded_unevenly"])


@pytest.mark.parametrize("place", PLACES)
def test_collectives_write_to_weights_in_fp8(place, tmp_path):
    run("tests.adapters.torch.held_worker", WORLD, tmp_path, place, ["collectives", "first_of_ddp"])


def test_what_is_no_group_is_refused():
    from fp8kit_torch import autocast

    with pytest.raises(RecipeError, match="amax_reduction_group"):
        autocast(amax_reduction_group="all")
