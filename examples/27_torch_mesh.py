"""torchrun: a device mesh of two dimensions, sharded data parallel (fully_shard) and tensor parallel.

Shows: ``te.convert``, ``parallelize_module`` with collectives that move FP8 codes, ``fully_shard``, delayed
scaling over all ranks, and a checkpoint that any number of ranks continues. Needs: PyTorch (extra
torch); on GPUs one for each process.

    python examples/27_torch_mesh.py                                   # one process
    torchrun --nproc-per-node 2 examples/27_torch_mesh.py 2            # two share weights and sequences
    torchrun --nproc-per-node 2 examples/27_torch_mesh.py 1            # two with other rows, weights sharded
    torchrun --nproc-per-node 4 examples/27_torch_mesh.py 2 FOLDER     # both, and a checkpoint in FOLDER

All learn the same: losses differ by the order of sums, and by codes that these move. With a folder a run
continues what the last one saved there, whatever its number of ranks.
"""

import os
import sys

import fp8kit_torch as te
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fp8kit_torch.parallel_styles import FP8ColwiseParallel, FP8RowwiseParallel
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from fp8kit.errors import ArgumentError

BATCH, SEQUENCE, HIDDEN, STEPS = 8, 64, 64, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(tensor=1, folder=None):
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks % tensor:
        raise ArgumentError("torch_mesh", "tensor", tensor, f"a divisor of {ranks}, the number of ranks")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    shape = ranks // tensor, tensor
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)  # the same weights everywhere
    model = te.keep_extra_state(te.convert(nn.Sequential(Block(), Block()).to(device)))
    for block in model:
        plan = {
            "norm": SequenceParallel(sequence_dim=1),
            "up": FP8ColwiseParallel(input_layouts=Shard(1)),
            "down": FP8RowwiseParallel(output_layouts=Shard(1)),
        }
        if tensor > 1:
            parallelize_module(block, mesh["tensor"], plan)
        if shape[0] > 1:
            fully_shard(block, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recipe = te.recipe.DelayedScaling(amax_history_len=4)

    first = max((int(step) for step in os.listdir(folder)), default=0) if folder else 0
    if first:
        own, states = get_state_dict(model, optimizer)
        dcp.load({"model": own, "optimizer": states}, checkpoint_id=os.path.join(folder, str(first)))
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=states)

    rows, columns = BATCH // shape[0], SEQUENCE // tensor
    at, part = mesh["data"].get_local_rank() * rows, mesh["tensor"].get_local_rank() * columns
    for step in range(first, first + STEPS):
        x = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(step))
        target = x.roll(1, -1)[at : at + rows, part : part + columns].to(device)
        x = x[at : at + rows, part : part + columns].to(device)
        optimizer.zero_grad()
        with te.autocast(recipe=recipe):
            # a rank has a part of the sequence: gradients are sums over "tensor", and means over "data"
            loss = (model(x) - target).square().mean() / tensor
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step:2}  loss {total.item() / shape[0]:.4f}")
    if folder:
        own, states = get_state_dict(model, optimizer)
        path = os.path.join(folder, str(first + STEPS))
        dcp.save({"model": own, "optimizer": states}, checkpoint_id=path)
    dist.destroy_process_group()


if __name__ == "__main__":
    tensor, *folder = sys.argv[1:] or ["1"]
    main(int(tensor), *folder)
