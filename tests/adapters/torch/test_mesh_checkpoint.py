"""``torch.distributed.checkpoint`` of models with FP8 state, by two processes and by one, and weights in FP8
under ``fully_shard``; the checks are the worker's."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import fp8kit_torch as te
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fp8kit_torch import DelayedScaling, Linear, autocast, convert, keep_extra_state
from torch import nn

from tests.support.processes import PLACES, run
from tests.support.source import ROOT

CASES = [
    "checkpoint_of_sharded_weights",
    "checkpoint_of_sharded_codes",
    "checkpoint_of_parts",
    "asynchronous_checkpoint",
    "rows_on_the_host",
    "copies_of_shards",
]
HELD = [te.DelayedScaling(), te.Float8BlockScaling(), te.MXFP8BlockScaling(), te.NVFP4BlockScaling()]


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("place", PLACES)
def test_checkpoints_of_two_processes_are_read_by_one_and_by_two(place, tmp_path):
    run("tests.adapters.torch.mesh_worker", 2, tmp_path, place, CASES)


@pytest.mark.programs
def test_the_example_continues_with_another_number_of_ranks(tmp_path):
    """Losses of one process, but for sums in another order, and codes that these move."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def losses(ranks, tensor, *folder):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        words = [*command, "examples/27_torch_mesh.py", tensor, *folder]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        return [float(line.split()[-1]) for line in done.stdout.splitlines()]

    whole, folder = tmp_path / "whole", tmp_path / "parts"
    for each in (whole, folder):
        each.mkdir()
    one = losses("1", "1", str(whole)) + losses("1", "1", str(whole))
    several = losses("2", "2", str(folder)) + losses("2", "1", str(folder))
    assert len(one) == 20
    assert one[-1] < 0.1 * one[0]
    assert several == pytest.approx(one, rel=2e-2)


def test_fp8_state_is_a_plain_tensor_in_files():
    layer = Linear(16, 16, device="cpu")
    with autocast(recipe=DelayedScaling()):
        layer(torch.randn(16, 16)).sum().backward()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)["_extra_state"]
    assert type(read) is torch.Tensor
    assert torch.equal(read, layer.get_extra_state().as_subclass(torch.Tensor))


@pytest.mark.parametrize("recipe", HELD, ids=lambda recipe: type(recipe).__name__)
def test_an_asynchronous_checkpoint_has_the_codes_of_its_moment(recipe, one_process, tmp_path):
    with te.quantized_model_init(recipe=recipe):
        net, other = (Linear(128, 128, device="cpu") for _ in range(2))
    wanted = net.weight.dequantize()
    saving = dcp.async_save({"model": net.state_dict()}, checkpoint_id=tmp_path)
    with torch.no_grad():
        net.weight.mul_(2)
    saving.result()
    state = {"model": other.state_dict()}
    assert type(state["model"]["weight"]) is type(net.weight.detach())
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    assert torch.equal(other.weight.dequantize(), wanted)
    assert type(wanted) is type(net.weight.new_empty(net.weight.shape)) is torch.Tensor  # as before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_converted_model_that_has_not_run_reads_its_state(tmp_path):
    def made():
        return keep_extra_state(convert(nn.Sequential(nn.Linear(16, 16))))

    net, other = made(), made()
    with autocast(recipe=DelayedScaling()):
        net(torch.randn(16, 16)).sum().backward()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    other.load_state_dict(state["model"])
    assert torch.equal(other[0].fp8_meta["scaling_fwd"].scale, net[0].fp8_meta["scaling_fwd"].scale)
    assert (other[0].fp8_meta["scaling_fwd"].scale != 1).any()
