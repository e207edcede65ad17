"""What one of two processes does in ``test_symmetric`` (``tests.support.processes``)."""

from __future__ import annotations

import sys
import warnings
from functools import partial

import fp8kit_torch as te
import pytest
import torch
import torch.distributed as dist
from fp8kit_torch.collectives import TorchCollectives
from torch.distributed import _symmetric_memory as symmetric_memory

from fp8kit import deterministic
from fp8kit.ops import product_parallel
from fp8kit.testing.compare import assert_same_bits
from tests.adapters.torch import distributed_worker
from tests.support.processes import work

# more steps than calls are made anew before they are recorded; a longer input is in the middle, for which
# workspaces grow
STEPS, ROWS, LONGER, H, F = 24, 512, 1024, 512, 1024


def switched_on(group):
    """The same group, with torch's switch on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later versions of torch need no switch themselves
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    return group


def trained(group, recipe, place):
    """y, dx and gradients of every step of a column and a row product and an MLP, each rank with its rows."""
    torch.manual_seed(0)
    options = {"tp_group": group, "sequence_parallel": True, "params_dtype": torch.bfloat16, "device": place}
    net = torch.nn.Sequential(
        te.Linear(H, F, parallel_mode="column", **options),
        te.Linear(F, H, parallel_mode="row", **options),
        te.LayerNormMLP(H, F, set_parallel_mode=True, **options),
    )
    optimizer, found = torch.optim.SGD(net.parameters(), lr=1e-2), []
    draw = torch.Generator(place).manual_seed(dist.get_rank(group))
    for step in range(STEPS):
        rows = LONGER if step == STEPS // 2 else ROWS
        x = torch.randn(rows, 1, H, generator=draw, device=place, dtype=torch.bfloat16, requires_grad=True)
        optimizer.zero_grad()
        with te.autocast(recipe=recipe) if recipe is not None else torch.enable_grad():
            y = net(x)
        y.square().mean().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())])
        optimizer.step()
    return found


def training_is_the_same(rank, ranks, recipe):
    """With symmetric memory every bit is the one that NCCL alone gives."""
    place = torch.device("cuda", rank)
    plain, symmetric = dist.new_group(range(ranks)), switched_on(dist.new_group(range(ranks)))
    with deterministic():
        pairs = zip(trained(plain, recipe, place), trained(symmetric, recipe, place), strict=True)
        for step, (wanted, got) in enumerate(pairs):
            for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
                assert_same_bits(f"step {step}, {i}", b.float().cpu().numpy(), a.float().cpu().numpy())
    assert TorchCollectives.of(plain)._beside is None
    assert TorchCollectives.of(symmetric)._beside.copies.calls > STEPS


high = partial(training_is_the_same, recipe=None)
delayed = partial(training_is_the_same, recipe=te.DelayedScaling(amax_history_len=4))
current = partial(training_is_the_same, recipe=te.Float8CurrentScaling())
block = partial(training_is_the_same, recipe=te.Float8BlockScaling())


def products_by_parts(rank, ranks):
    """With symmetric memory products are made rank by rank, and are those of one process."""
    switched_on(dist.group.WORLD)
    assert TorchCollectives.of(dist.group.WORLD).by_parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_parallel, "LEAST_OPERATIONS", 0)
        distributed_worker.exact_products(rank, ranks)
    copies = TorchCollectives.of(dist.group.WORLD)._beside
    assert (copies is not None) == (distributed_worker.PLACE.type == "cuda")


if __name__ == "__main__":
    if sys.argv[4] == "cuda":
        distributed_worker.PLACE = torch.device("cuda", int(sys.argv[1]))
    work(globals(), sys.argv[1:])
