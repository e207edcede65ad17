"""What one of two ranks does in ``tests/adapters/torch/test_failing_ranks.py``: rank 1 is killed between two
steps of a model whose weights are in parts ("tp"), or divided by ``fully_shard`` ("fsdp")."""

from __future__ import annotations

import os
import signal
import sys
import time

import fp8kit_torch as te
import torch
import torch.distributed as dist
from fp8kit_torch.collectives import naming_failures
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def model(how: str) -> torch.nn.Module:
    if how == "tp":
        parts = {"tp_group": dist.group.WORLD, "set_parallel_mode": True, "sequence_parallel": True}
        return te.LayerNormMLP(64, 128, device="cpu", name="mlp", **parts)
    with te.quantized_model_init(recipe=te.Float8CurrentScaling()):
        net = torch.nn.Sequential(te.Linear(64, 64, device="cpu"), te.Linear(64, 64, device="cpu"))
    mesh = init_device_mesh("cpu", (2,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main(how: str) -> None:
    dist.init_process_group("gloo")
    net = model(how)
    with naming_failures():
        for step in range(3):
            if dist.get_rank() == 1 and step == 1:
                print(f"fails at {time.monotonic()}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            with te.autocast(recipe=te.Float8CurrentScaling()):
                net(torch.ones(32, 64)).square().sum().backward()


if __name__ == "__main__":
    main(sys.argv[1])
