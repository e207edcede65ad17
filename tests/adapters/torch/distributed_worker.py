"""What one of several processes does in ``test_distributed``: ``python -m tests.adapters.torch.distributed_worker rank world folder``.

Every case checks its own numbers; a process that finds one wrong ends with an error.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist
from fp8kit_torch import DelayedScaling, Linear, autocast, checkpoint
from fp8kit_torch.optimizers import FusedAdam
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8kit.testing.compare import assert_same_bits, relative_error

K, ROWS, STEPS = 32, 16, 3


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(K, 48, device="cpu"), torch.nn.GELU(), Linear(48, K, device="cpu"))


def batch(step, rank):
    """Processes see data of different sizes, so that their amaxes differ."""
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, K, generator=g) * (1 + 3 * ((rank + step) % 2))


def largest(value):
    return np.float32(value.abs().max())


def scale_of(amax):
    return np.float32(448) / np.float32(amax)


def same_everywhere(what, tensor, group=None):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group)
    for part in parts[1:]:
        assert_same_bits(what, part.numpy(), parts[0].numpy())


def states(net):
    return [(n, s) for n, m in net.named_modules() for s in getattr(m, "fp8_meta", {}).values()]


def train(net, opt, rank, recipe, **options):
    """STEPS of training; returns the losses."""
    losses = []
    for step in range(STEPS):
        x = batch(step, rank)
        opt.zero_grad()
        with autocast(recipe=recipe, **options):
            loss = (net(x) - x).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def ddp(rank, world):
    """Scales come from all processes' amaxes, and are the same everywhere; so are the weights."""
    net = model()
    wrapped = DistributedDataParallel(net)
    train(wrapped, FusedAdam(net.parameters(), lr=1e-3), rank, DelayedScaling(amax_history_len=1))
    wanted = scale_of(max(largest(batch(STEPS - 1, r)) for r in range(world)))
    assert_same_bits("scale of x", net[0].fp8_meta["scaling_fwd"].scale[0].numpy(), wanted)
    for name, state in states(net):
        for part in state.parts:
            same_everywhere(name, part)
    for name, p in net.named_parameters():
        same_everywhere(name, p.detach())


def ddp_recompute(rank, world):
    """With activations recomputed: the same bits as without."""
    results = []
    for recomputed in (False, True):
        net = model()
        wrapped = DistributedDataParallel(net)
        call = (lambda x, w=wrapped: checkpoint(w, x, use_reentrant=False)) if recomputed else wrapped
        train(call, FusedAdam(net.parameters(), lr=1e-3), rank, DelayedScaling(amax_history_len=2))
        results.append([p.detach().clone() for p in net.parameters()] + [part.clone() for _, s in states(net) for part in s.parts])
    for a, b in zip(*results, strict=True):
        assert_same_bits("recomputed", a.numpy(), b.numpy())


def groups(rank, world):
    """A group of its own, and none at all."""
    own = [dist.new_group([r]) for r in range(world)][rank]
    for recipe, options in ((DelayedScaling(amax_history_len=1), {"amax_reduction_group": own}),
                            (DelayedScaling(amax_history_len=1, reduce_amax=False), {})):
        net = model()
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), rank, recipe, **options)
        wanted = scale_of(largest(batch(STEPS - 1, rank)))
        assert_same_bits("scale of x", net[0].fp8_meta["scaling_fwd"].scale[0].numpy(), wanted)


def sharded(rank, world):
    """fully_shard: the weights that DistributedDataParallel arrives at, from shards; and the same FP8 state."""
    twin = model()
    train(DistributedDataParallel(twin), FusedAdam(twin.parameters(), lr=1e-3), rank, DelayedScaling(amax_history_len=2))
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    opt = FusedAdam(net.parameters(), lr=1e-3)
    train(net, opt, rank, DelayedScaling(amax_history_len=2))
    for (name, p), t in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert p.to_local().shape[0] * world == t.shape[0], name
        assert opt.state[p]["exp_avg"].to_local().shape == p.to_local().shape
        # both add two processes' float32 gradients and halve them: in whatever order, one rounding apart at most; Adam amplifies it
        assert relative_error(p.full_tensor().detach(), t.detach()) < 1e-4, name
    for (name, state), (_, other) in zip(states(net), states(twin), strict=True):
        same_everywhere(name, state.scale)
        assert relative_error(state.scale, other.scale) < 1e-3, name


def main(rank, world, folder):
    """All cases, one after the other."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        for case in (ddp, ddp_recompute, groups, sharded):
            case(rank, world)
            print(case.__name__, "passed", flush=True)
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
