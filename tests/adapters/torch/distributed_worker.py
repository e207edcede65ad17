"""What one of several processes does in ``test_distributed``: run as a module with
``rank world folder place case...``; place: "cpu" (gloo), or "cuda" (NCCL, a GPU for each process).

Every case checks its own numbers; a process that finds one wrong ends with an error.
"""

from __future__ import annotations

import gc
import itertools
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fp8kit_torch import (
    DelayedScaling,
    DotProductAttention,
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TransformerLayer,
    autocast,
    checkpoint,
    quantized_model_init,
    sharded_weight,
)
from fp8kit_torch.operand_tensor import OperandTensor
from fp8kit_torch.optimizers import FusedAdam
from fp8kit_torch.te_compat.context_batches import get_batch_on_this_cp_rank
from fp8kit_torch.te_compat.dtypes import DType
from fp8kit_torch.te_compat.parallel import reduce_sequence_parallel_gradients
from fp8kit_torch.te_compat.recipe_quantizers import quantizer_of_operand
from fp8kit_torch.te_compat.saved_tensors import cast_master_weights_to_fp8, post_all_gather_processing
from fp8kit_torch.te_compat.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8kit.testing.compare import ROUNDOFF, assert_same_bits, relative_error
from tests.support.processes import work

K, ROWS, STEPS = 32, 16, 3
PLACE = torch.device("cpu")  # of this process; ``main`` says
# By how much what two processes compute may be off (2-norm) from what one does with all rows. On a CPU:
# float32 sums in another order, and once in a while a code of FP8 that falls on the other side because of
# them. On a GPU sums keep 14 bits, in an order that depends on the number of rows: a relative 2^-13, which
# moves one E5M2 code in 2^11 by 2^-2 of it, 2^-7.5 of them all; twice that is allowed.
APART = {"cpu": 1e-4, "cuda": 2.0**-6.5}
AMAX_APART = {"cpu": 1e-3, "cuda": 2.0**-6.5}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(K, 48, device="cpu"), torch.nn.GELU(), Linear(48, K, device="cpu")).to(
        PLACE
    )


def batch(step, rank):
    """Processes see data of different sizes, so that their amaxes differ."""
    g = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(ROWS, K, generator=g) * (1 + 3 * ((rank + step) % 2))).to(PLACE)


def shard(*layers):
    """``fully_shard`` each where this process computes; by itself torch takes the machine's accelerator, also
    for modules on the CPU."""
    mesh = init_device_mesh(PLACE.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)


def bits(value):
    return value.detach().cpu().numpy()


def largest(value):
    return np.float32(value.abs().max().cpu())


def scale_of(amax):
    return np.float32(448) / np.float32(amax)


def same_everywhere(what, tensor, group=None):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group)
    for part in parts[1:]:
        assert_same_bits(what, bits(part), bits(parts[0]))


def states(net):
    return [(n, s) for n, m in net.named_modules() for s in getattr(m, "fp8_meta", {}).values()]


def train(net, opt, rank, recipe, gain=1.0, **options):
    """STEPS of training; returns the losses. ``rank``: whose data, or of several ranks together; ``gain``: of
    the loss."""
    losses = []
    for step in range(STEPS):
        x = torch.cat([batch(step, r) for r in ([rank] if isinstance(rank, int) else rank)])
        opt.zero_grad()
        with autocast(recipe=recipe, **options):
            loss = gain * (net(x) - x).square().mean()
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
    assert_same_bits("scale of x", bits(net[0].fp8_meta["scaling_fwd"].scale[0]), wanted)
    for name, state in states(net):
        for part in state.parts:
            same_everywhere(name, part)
    for name, p in net.named_parameters():
        same_everywhere(name, p.detach())


def single(rank, world):
    """DistributedDataParallel and ``fully_shard`` arrive where one process does that has the data of all."""
    # no gradient is so small that E5M2, with the first step's scale of 1, has fewer bits for it
    alone, gain = model(), 2.0**10
    recipe, own_recipe = (
        DelayedScaling(amax_history_len=2),
        DelayedScaling(amax_history_len=2, reduce_amax=False),
    )
    losses = train(alone, torch.optim.SGD(alone.parameters(), lr=0.1 / gain), range(world), own_recipe, gain)
    for how in ("ddp", "fsdp"):
        net = model()
        if how == "fsdp":
            shard(net[0], net[2], net)
        wrapped = DistributedDataParallel(net) if how == "ddp" else net
        own = torch.tensor(
            train(wrapped, torch.optim.SGD(net.parameters(), lr=0.1 / gain), rank, recipe, gain), device=PLACE
        )
        dist.all_reduce(own)
        assert relative_error(own.cpu() / world, torch.tensor(losses)) < APART[PLACE.type], how
        for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
            whole = p.full_tensor() if how == "fsdp" else p
            assert relative_error(whole.detach().cpu(), q.detach().cpu()) < APART[PLACE.type], (how, name)
        for (name, state), (_, other) in zip(states(net), states(alone), strict=True):
            same_everywhere(name, state.scale)
            # a process's loss is the mean of its own rows: its gradients are ``world`` times those of the
            # mean of all rows
            times = 1 if state.scale.numel() % 3 == 0 else world
            scale, apart = state.scale.cpu(), AMAX_APART[PLACE.type]
            assert relative_error(scale * torch.where(scale == 1, 1, times), other.scale.cpu()) < apart, (
                how,
                name,
            )
            assert relative_error(state.amax_history.cpu() / times, other.amax_history.cpu()) < apart, (
                how,
                name,
            )


def held_in_fp8(rank, world):
    """``fully_shard`` of weights that ``quantized_model_init`` made: codes are gathered, those of one
    process, in half the bytes of bfloat16 or a quarter; amaxes are reduced once a step; training is that of
    DistributedDataParallel with weights in high precision."""
    reductions, gathered = [], []
    known, pre = sharded_weight._share_amaxes, sharded_weight.ShardedWeight.fsdp_pre_all_gather

    def share(group):
        reductions.append(group)
        known(group)

    def noted(self, mesh, size, stride, module, policy):
        found = pre(self, mesh, size, stride, module, policy)
        gathered.append((self._rows.padded.numel(), *(part.nbytes for part in found[0])))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_weight, "_share_amaxes", share)
        patch.setattr(sharded_weight.ShardedWeight, "fsdp_pre_all_gather", noted)
        held_under_recipes(rank, world, reductions, gathered)


def held_under_recipes(rank, world, reductions, gathered):
    """What ``held_in_fp8`` says. ``reductions`` has an item for each of amaxes, ``gathered`` for each weight
    that is gathered its elements and the bytes that move. Of MXFP8 and NVFP4 a code has a byte or half of
    one, and each block of 32 or 16 a scale of a byte."""
    small = {MXFP8BlockScaling: (1, 32), NVFP4BlockScaling: (2, 16)}
    for recipe, features, hidden, steps in (
        (Float8CurrentScaling(), 64, 96, 100),
        (DelayedScaling(amax_history_len=2), 64, 96, 100),
        (Float8BlockScaling(), 256, 512, 100),
        (MXFP8BlockScaling(), 128, 256, 30),
        (NVFP4BlockScaling(), 128, 256, 30),
        (NVFP4BlockScaling(disable_2d_quantization=True), 128, 256, 10),
        (MXFP8BlockScaling(), 128, 32, 5),  # blocks of the columns that processes do not divide
        (NVFP4BlockScaling(), 64, 48, 5),  # squares that they do not: in high precision
        (Float8CurrentScaling(), 64, 37, 5),  # rows that they do not
        (Float8BlockScaling(), 64, 96, 5),  # blocks that they do not: in high precision
    ):
        torch.manual_seed(0)
        sizes = [(features, hidden), (hidden, features)]
        with quantized_model_init(recipe=recipe):
            net = torch.nn.Sequential(*(Linear(*each, device=PLACE) for each in sizes))
        twin = torch.nn.Sequential(*(Linear(*each, device=PLACE) for each in sizes))
        with torch.no_grad():
            for own, other in zip(net.parameters(), twin.parameters(), strict=True):
                other.copy_(own)
        shard(net[0], net[1], net)
        reductions.clear(), gathered.clear()
        found = follow(net, recipe, rank, features, steps)
        wanted = follow(DistributedDataParallel(twin), recipe, rank, features, steps)
        far = [abs(a / b - 1) for a, b in zip(found, wanted, strict=True)]
        assert max(far) < 1e-2, (recipe.short_name(), [f"{x:.1e}" for x in far], wanted)
        assert sum(found) == pytest.approx(sum(wanted), rel=1e-3), recipe
        if steps > 5:
            in_a_byte, block = small.get(type(recipe), (1, 0))
            for elements, first, *scales in gathered:
                assert first == elements // in_a_byte
                assert sum(scales) == (elements // (block or 128**2 // 4) if scales else 0)
        if isinstance(recipe, DelayedScaling | Float8CurrentScaling):
            # the first step learns which weights belong together
            assert len(reductions) == steps + 1, (len(reductions), steps)
        same_as_alone(net, recipe)


def same_as_alone(net, recipe):
    """What is gathered of these layers' weights are the codes of one process."""
    for layer in net:
        values = layer.weight.full_tensor()
        layer.unshard()
        same_parts(recipe, layer.weight, quantizer_of_operand(recipe, "w")(values))
        layer.reshard()


def same_parts(what, held, alone):
    """Codes and scales of a gathered weight, which of small blocks are those of rows."""
    assert type(held) is type(alone), what
    operand = isinstance(held, OperandTensor)
    found, wanted = (each._operands() if operand else each._parts for each in (held, alone))
    assert found.keys() == {name for name in wanted if operand or name.startswith("rowwise")}
    for name, part in found.items():
        assert_same_bits(f"{what} {name}", bits(part.clone()), bits(wanted[name]))


def loaded_unevenly(rank, world):
    """A state is loaded where the last process has fewer rows: torch pads its rows again, there alone, also
    where nothing was written (``float``)."""
    loaded_again(rank, Float8CurrentScaling(), 37)
    for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling(disable_2d_quantization=True)):
        loaded_again(rank, recipe, 32)


def loaded_again(rank, recipe, hidden):
    with quantized_model_init(recipe=recipe):
        net = torch.nn.Sequential(Linear(64, hidden, device=PLACE), Linear(hidden, 64, device=PLACE))
    shard(net[0], net[1], net)
    follow(net, recipe, rank, 64, 1)
    state = {
        name: value.clone() for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)
    }
    for assign in (False, False, True):
        same_as_alone(net, recipe)
        net.float()
        same_as_alone(net, recipe)
        follow(net, recipe, rank, 64, 1)
        net.load_state_dict(state, strict=False, assign=assign)
        for name, parameter in net.named_parameters():
            assert_same_bits(name, bits(parameter.full_tensor()), bits(state[name].full_tensor()))
    same_as_alone(net, recipe)
    follow(net, recipe, rank, 64, 1)
    same_as_alone(net, recipe)


def collected_late(rank, world):
    """A model that was deleted, and that one process still has in memory: the others do not wait for its
    amaxes. Its places go once no process has it."""

    def held():
        with quantized_model_init(recipe=Float8CurrentScaling()):
            net = torch.nn.Sequential(Linear(64, 32, device=PLACE), Linear(32, 64, device=PLACE))
        shard(net[0], net[1], net)
        return net

    def places():
        return [len(own) for own in sharded_weight._OF_GROUP.values()]

    gc.collect()
    gc.disable()
    try:
        first = held()
        follow(first, Float8CurrentScaling(), rank, 64, 1)
        before = places()
        if rank == 0:  # its own list keeps it, as a cycle of references does
            first.itself = [first]
        del first
        if rank != 0:
            gc.collect()
        net = held()
        follow(net, Float8CurrentScaling(), rank, 64, 2)
        assert sum(places()) == sum(before) + 2
        gc.collect()
        follow(net, Float8CurrentScaling(), rank, 64, 1)
        assert sum(places()) == 2, places()
        for parameter in net.parameters():
            same_everywhere("weight", parameter.full_tensor())
    finally:
        gc.enable()


def follow(net, recipe, rank, features, steps):
    """Losses of the mean over all processes, of so many steps."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.5), []
    for step in range(steps):
        g = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(32, features, generator=g).to(PLACE)
        optimizer.zero_grad()
        with autocast(recipe=recipe):
            loss = (net(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def masters_in_parts(rank, world):
    """Each process casts its part of the masters; with the gathered codes that is the cast of the whole."""
    torch.manual_seed(0)
    first, master = (torch.randn(256, 128, device=PLACE) for _ in range(2))
    given = torch.full((1,), 8.0, device=PLACE), torch.zeros(1, device=PLACE)
    dtype = DType.kFloat8E4M3
    for quantizer in (
        Float8CurrentScalingQuantizer(dtype),
        Float8BlockQuantizer(dtype, rowwise=True, columnwise=True),
        Float8Quantizer(*given, dtype),
    ):
        weight, wanted = quantizer(first), quantizer(3 * master)
        flat, cuts = 3 * master.view(-1), [0, 20000, master.numel()]
        own = slice(cuts[rank], cuts[rank + 1])
        how = {"manual_post_all_gather_processing": True}
        cast_master_weights_to_fp8([weight], [flat[own]], [own.start], dist.group.WORLD, **how)
        gathered = [torch.empty_like(weight._rowwise_data) for _ in range(world)]
        dist.all_gather(gathered, weight._rowwise_data.contiguous())
        for r, codes in enumerate(gathered):
            there = slice(cuts[r], cuts[r + 1])
            weight._rowwise_data.view(-1)[there] = codes.view(-1)[there]
        post_all_gather_processing([weight])
        for name in ("_rowwise_data", "_columnwise_data"):
            assert torch.equal(getattr(weight, name), getattr(wanted, name)), (quantizer, name)
        assert torch.equal(weight.dequantize(), wanted.dequantize())


def ddp_recompute(rank, world):
    """With activations recomputed: the same bits as without."""
    results = []
    for recomputed in (False, True):
        net = model()
        wrapped = DistributedDataParallel(net)
        call = (lambda x, w=wrapped: checkpoint(w, x, use_reentrant=False)) if recomputed else wrapped
        train(call, FusedAdam(net.parameters(), lr=1e-3), rank, DelayedScaling(amax_history_len=2))
        results.append(
            [p.detach().clone() for p in net.parameters()]
            + [part.clone() for _, s in states(net) for part in s.parts]
        )
    for a, b in zip(*results, strict=True):
        assert_same_bits("recomputed", bits(a), bits(b))


def groups(rank, world):
    """A group of its own, and none at all."""
    own = [dist.new_group([r]) for r in range(world)][rank]
    for recipe, options in (
        (DelayedScaling(amax_history_len=1), {"amax_reduction_group": own}),
        (DelayedScaling(amax_history_len=1, reduce_amax=False), {}),
    ):
        net = model()
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), rank, recipe, **options)
        wanted = scale_of(largest(batch(STEPS - 1, rank)))
        assert_same_bits("scale of x", bits(net[0].fp8_meta["scaling_fwd"].scale[0]), wanted)


def tensor_parallel(rank, world):
    """Two Linear layers, split as "column" and "row", the rows between split too: y and gradients are one
    rank's, but for the order of float32's sums; on a GPU by codes that its sums move."""
    features, group = (64, 128, 64), dist.group.WORLD
    torch.manual_seed(0)
    x, g = torch.randn(64, 4, features[0], device=PLACE), torch.randn(64, 4, features[2], device=PLACE)
    for recipe in (Float8CurrentScaling(), DelayedScaling(), Float8BlockScaling()):
        one = [Linear(*sizes, device=PLACE) for sizes in itertools.pairwise(features)]
        split = [
            Linear(*sizes, device=PLACE, parallel_mode=mode, tp_group=group, sequence_parallel=True)
            for sizes, mode in zip(itertools.pairwise(features), ("column", "row"), strict=True)
        ]
        for whole, part, dim in zip(one, split, (0, 1), strict=True):
            for parameter in whole.parameters():
                dist.broadcast(parameter.detach(), 0)
            with torch.no_grad():
                part.weight.copy_(whole.weight.chunk(world, dim)[rank])
                part.bias.copy_(whole.bias if dim else whole.bias.chunk(world)[rank])
        own = x.detach().chunk(world)[rank].clone().requires_grad_()
        with autocast(recipe=recipe):
            y = split[1](split[0](own))
            want = one[1](one[0](x.requires_grad_()))
        y.backward(g.chunk(world)[rank])
        x.grad = None
        want.backward(g)
        for what, got, wanted in (
            ("y", y, want.chunk(world)[rank]),
            ("dx", own.grad, x.grad.chunk(world)[rank]),
            ("dw column", split[0].weight.grad, one[0].weight.grad.chunk(world)[rank]),
            ("dw row", split[1].weight.grad, one[1].weight.grad.chunk(world, 1)[rank]),
        ):
            error = relative_error(bits(got), bits(wanted))
            apart = features[1] * ROUNDOFF if PLACE.type == "cpu" else APART["cuda"]
            assert error <= apart, (what, type(recipe).__name__, error)


def own_rows_under_fully_shard(rank, world):
    """``reduce_sequence_parallel_gradients`` of layers whose parameters ``fully_shard`` has replaced, on a
    mesh of two dimensions: the gradients without it, which it divides among one process here."""
    mesh, found = init_device_mesh(PLACE.type, (1, world), mesh_dim_names=("data", "tensor")), []
    group = mesh["tensor"].get_group()
    options = {"tp_group": group, "set_parallel_mode": True, "sequence_parallel": True, "device": "cpu"}
    for sharded_too in (False, True):
        torch.manual_seed(0)
        layer = TransformerLayer(K, 48, 2, hidden_dropout=0.0, attention_dropout=0.0, **options).to(PLACE)
        if sharded_too:
            fully_shard(layer, mesh=mesh["data"])
        with autocast(recipe=Float8CurrentScaling()):
            y = checkpoint(layer, batch(0, rank)[:, None].clone().requires_grad_(), tp_group=group)
        y.square().sum().backward()
        reduce_sequence_parallel_gradients(layer, group)
        whole = {n: p.grad.full_tensor() if sharded_too else p.grad for n, p in layer.named_parameters()}
        found.append({name: bits(grad) for name, grad in whole.items()})
    for name, grad in found[1].items():
        assert_same_bits(name, grad, found[0][name])
        if "layer_norm" in name:
            same_everywhere(name, torch.from_numpy(grad).to(PLACE))


def exact_products(rank, world):
    """Each product on its own, to the last bit. Operands are whole numbers with one outlier in one process's
    part: it is the format's largest number, so that the scale is 1, and meets zeros. All sums are below 2^13,
    exact in whatever order, also in the 14 bits of a GPU; by the amax of a part alone codes would round."""
    n, group = 128 * world, dist.group.WORLD
    draw = torch.Generator().manual_seed(0)
    x, w, g = (torch.randint(-3, 4, (n, n), generator=draw).float() for _ in range(3))
    b = torch.randint(-3, 4, (n,), generator=draw).float()
    x[:, 7], x[-2], w[:, 5], w[9] = 0, 0, 0, 0
    x[-1, 5], w[-1, 7] = 448, 448
    for recipe in (Float8CurrentScaling(), DelayedScaling(amax_history_len=1), Float8BlockScaling()):
        g[-2, 9] = 448 if isinstance(recipe, Float8BlockScaling) else 57344
        whole = step_of(Linear(n, n, device=PLACE), recipe, x, w, b, g)
        for mode, sequence in itertools.product(("column", "row"), (True, False)):
            layer = Linear(n, n, device=PLACE, parallel_mode=mode, tp_group=group, sequence_parallel=sequence)

            def own(tensor, dim, split, world=world):
                return tensor.chunk(world, dim)[rank].contiguous() if split else tensor

            column = mode == "column"
            split_x = (0 if column else 1, sequence or not column)
            split_y = (1 if column else 0, sequence or column)
            dim = 0 if column else 1
            given = own(x, *split_x), own(w, dim, True), own(b, 0, column), own(g, *split_y)
            y, dx, dw, db = step_of(layer, recipe, *given)
            if sequence and not column:
                dist.all_reduce(db)
            wanted = [(y, *split_y), (dx, *split_x), (dw, dim, True), (db, 0, column)]
            for i, (got, *how) in enumerate(wanted):
                assert_same_bits(f"{recipe} {mode} {sequence} {i}", bits(got), bits(own(whole[i], *how)))


def step_of(layer, recipe, x, w, b, g):
    """y, dx, dW and db of the last of equal steps: delayed scaling has seen the values then, and a GPU's
    calls are done from recordings."""
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(b)
    for _ in range(STEPS + 2):
        leaf = x.detach().to(PLACE, copy=True).requires_grad_()
        layer.zero_grad()
        with autocast(recipe=recipe):
            y = layer(leaf)
        y.backward(g.to(PLACE))
    return [y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]


def context_parallel(rank, world):
    """Attention of which each process has two chunks of the sequences: o and gradients are one process's, but
    for the order of float32's sums; on a GPU, where operands are bfloat16, but for some roundings of 2^-9."""
    tokens, heads, features = 64, 4, 64
    dtype, apart = (torch.bfloat16, 2.0**-6) if PLACE.type == "cuda" else (torch.float32, tokens * ROUNDOFF)
    torch.manual_seed(0)
    whole = [torch.randn(2, tokens, heads, features, device=PLACE).to(dtype) for _ in range(3)]
    whole.append(torch.randn(2, tokens, heads * features, device=PLACE).to(dtype))
    for x in whole:
        dist.broadcast(x, 0)

    def own(x):
        chunks = x.chunk(2 * world, 1)
        return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], 1)

    part, labels, _ = get_batch_on_this_cp_rank(None, whole[0], whole[3], qvk_format="bshd")  # of all ranks
    assert torch.equal(part, own(whole[0]))
    assert torch.equal(labels, own(whole[3]))

    def step(layer, q, k, v, g):
        for _ in range(STEPS):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o = layer(*leaves)
            o.backward(g)
        return [o, *(leaf.grad for leaf in leaves)]

    wanted = step(DotProductAttention(heads, features, qkv_format="bshd"), *whole)
    for kind in ("p2p", "all_gather", "a2a"):
        layer = DotProductAttention(heads, features, qkv_format="bshd")
        layer.set_context_parallel_group(dist.group.WORLD, [0, 1], None, kind)
        for what, got, want in zip(
            ("o", "dq", "dk", "dv"), step(layer, *map(own, whole)), wanted, strict=True
        ):
            error = relative_error(bits(got.float()), bits(own(want).float()))
            assert error <= apart, (kind, what, error)


def sharded(rank, world):
    """fully_shard: the weights that DistributedDataParallel arrives at, from shards; and the same FP8
    state."""
    twin = model()
    train(
        DistributedDataParallel(twin),
        FusedAdam(twin.parameters(), lr=1e-3),
        rank,
        DelayedScaling(amax_history_len=2),
    )
    net = model()
    shard(net[0], net[2], net)
    opt = FusedAdam(net.parameters(), lr=1e-3)
    train(net, opt, rank, DelayedScaling(amax_history_len=2))
    for (name, p), t in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert p.to_local().shape[0] * world == t.shape[0], name
        assert opt.state[p]["exp_avg"].to_local().shape == p.to_local().shape
        # both add two processes' float32 gradients and halve them: in whatever order, one rounding apart at
        # most; Adam amplifies it
        assert relative_error(p.full_tensor().detach().cpu(), t.detach().cpu()) < 1e-4, name
    for (name, state), (_, other) in zip(states(net), states(twin), strict=True):
        same_everywhere(name, state.scale)
        assert relative_error(state.scale.cpu(), other.scale.cpu()) < 1e-3, name


def sharded_parts(rank, world):
    """fully_shard of a layer's parts, each of its own, arrives where that of the whole layer does."""
    found = []
    for parts in (False, True):
        torch.manual_seed(0)
        layer = TransformerLayer(K, 48, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu").to(PLACE)
        # a product that adds the residual is another algorithm's on a GPU; the whole layer's does so unless
        # somebody watches
        for watched in (layer.self_attention.proj, layer.layernorm_mlp):
            watched.register_forward_hook(lambda *given: None)
        shard(*((layer.self_attention, layer.layernorm_mlp) if parts else ()), layer)
        opt = FusedAdam(layer.parameters(), lr=1e-3)
        train(
            lambda x, layer=layer: layer(x[:, None].clone())[:, 0],
            opt,
            rank,
            DelayedScaling(amax_history_len=2),
        )
        found.append({name: bits(p.full_tensor()) for name, p in layer.named_parameters()})
    for name, whole in found[0].items():
        assert relative_error(found[1][name], whole) < 1e-4, name  # biases are added at another place


def main(arguments, module):
    """The cases, functions of ``module``, that the ``arguments`` of the process name."""
    global PLACE
    rank, place = int(arguments[0]), arguments[3]
    PLACE = torch.device(place, rank) if place == "cuda" else torch.device(place)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    # a branch hands the residual stream on as it got it, and nothing writes over that
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    work(module, arguments)


if __name__ == "__main__":
    main(sys.argv[1:], globals())
