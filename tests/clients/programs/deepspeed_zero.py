"""DeepSpeed's ZeRO 1 to 3 over layers of fp8kit, on two processes by gloo: the numbers of one process."""

import os
import tempfile

import torch
from torch import nn

from tests.clients.programs.checks import main

STEPS = 4


def layers():
    import fp8kit_torch as te

    torch.manual_seed(0)
    return nn.Sequential(te.Linear(32, 64, device="cpu"), nn.GELU(), te.Linear(64, 32, device="cpu"))


def rows(step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def worker(rank, folder, stage, results):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "OMP_NUM_THREADS": "1"}
    import deepspeed
    import fp8kit_torch as te

    # collectives by gloo alone, and no C++ compiled for those by shared memory
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/s{stage}", rank=rank, world_size=2
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = layers()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        x = rows(step).chunk(2)[rank]
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
            loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        losses.append(whole.item() / 2)
    if rank == 0:
        results.put(losses)
    torch.distributed.destroy_process_group()


def alone():
    import fp8kit_torch as te

    model, losses = layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = rows(step)
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(stage):
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, args=(folder, stage, results), nprocs=2)
    found, wanted = results.get(), alone()
    # amaxes are reduced over the ranks, so the scales are those of one process; sums are in another order
    assert all(abs(a - b) < 1e-3 * b for a, b in zip(found, wanted, strict=True)), (found, wanted)
    assert found[-1] < found[0]


def check_stage_1():
    run(1)


def check_stage_2():
    run(2)


def check_stage_3():
    run(3)


if __name__ == "__main__":
    main(globals())
