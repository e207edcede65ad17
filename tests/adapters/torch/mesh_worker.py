"""What one of several processes does in ``test_mesh_checkpoint``, ``test_mesh_plans`` and
``test_mesh_pipeline`` (``tests.support.processes``)."""

from __future__ import annotations

import copy
import sys
import tempfile
from contextlib import nullcontext

import fp8kit_torch as te
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fp8kit_torch.collectives import TorchCollectives
from fp8kit_torch.parallel_styles import FP8ColwiseParallel, FP8RowwiseParallel
from fp8kit_torch.pipelining import PipelineStage
from fp8kit_torch.torchao_compat.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8kit_torch.torchao_compat.training import convert_to_float8_training
from torch import nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fp8kit import deterministic
from fp8kit.errors import ArgumentError
from fp8kit.testing.compare import assert_same_bits, relative_error
from tests.support.processes import work

RECIPE = te.DelayedScaling(amax_history_len=4)
STEPS, FEATURES, HIDDEN = 3, 64, 96
PLACE = torch.device("cpu")  # of this process; ``main`` says
# By how much results may be off (2-norm) whose sums are made by ranks, or over other rows. On a CPU sums of
# float32 in another order move a code of 2^15 once in a while, by 2^-4 of it: 2^-11.5 of them all. A GPU's
# FP8 products keep 14 bits of a sum, which moves one E5M2 code in 2^11 by 2^-2 of it: 2^-7.5. About twice
# that is allowed; codes by a part's own scale would be off by 2^-5.
APART = {"cpu": 2.0**-10, "cuda": 2.0**-6.5}


def mesh_of(ranks):
    return init_device_mesh(PLACE.type, (ranks,))


def shared_folder(rank):
    """A folder of all processes."""
    found = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def train(net, optimizer, start, recipe=RECIPE, steps=STEPS):
    """Losses of some steps; all processes have the same rows."""
    losses = []
    for step in range(start, start + steps):
        x = drawn(step, 32, FEATURES)
        optimizer.zero_grad()
        with te.autocast(recipe=recipe):
            loss = (net(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(value):
    return value.detach().cpu().numpy()


def drawn(seed, *shape):
    """Normal values, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(PLACE)


def fp8_states(net):
    return {
        f"{name}.{key}.{field}": getattr(state, field)
        for name, part in net.named_modules()
        for key, state in getattr(part, "fp8_meta", {}).items()
        for field in ("scale", "scale_inv", "amax_history")
    }


# --- distributed checkpoints --------------------------------------------------------------------------------


def model(seed, held=False):
    """``held``: with weights in FP8."""
    torch.manual_seed(seed)
    with te.quantized_model_init(recipe=RECIPE) if held else nullcontext():
        return nn.Sequential(
            te.Linear(FEATURES, HIDDEN, device=PLACE),
            te.LayerNormMLP(HIDDEN, 128, device=PLACE),
            te.Linear(HIDDEN, FEATURES, device=PLACE),
        )


def converted(seed):
    """A plain model's layers, converted; their keys are there before the first step."""
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES)).to(PLACE)
    return te.keep_extra_state(te.convert(plain))


def sharded(net, mesh, **options):
    for layer in net:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def in_parts(net, mesh):
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def resharded(rank, make, place, ranks, first_apart, apart):
    """Save by several processes, load by several and by one alone; and the other way round. The loaded model
    has the FP8 state to the last bit; its first loss is the continued one's within ``first_apart``, the
    others within ``apart``."""
    mesh, folder = mesh_of(ranks), shared_folder(rank)

    def state_of(net, optimizer):
        own, states = get_state_dict(net, optimizer)
        return {"model": own, "optim": states}

    def made(seed, several):
        net = place(make(seed), mesh) if several else make(seed)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3)

    for number, several in enumerate((True, False)):
        net, optimizer = made(0, several)
        train(net, optimizer, 0)
        path = f"{folder}/{number}"
        if several or rank == 0:
            dcp.save(state_of(net, optimizer), checkpoint_id=path, no_dist=not several)
        dist.barrier()
        saved = {name: part.clone() for name, part in fp8_states(net).items()}
        wanted = train(net, optimizer, STEPS)
        for as_before in (True, False):
            other, states = made(1, several is as_before)
            state = state_of(other, states)
            dcp.load(state, checkpoint_id=path, no_dist=several is not as_before)
            set_state_dict(other, states, model_state_dict=state["model"], optim_state_dict=state["optim"])
            for name, part in fp8_states(other).items():
                assert_same_bits(name, bits(part), bits(saved[name] if as_before else saved.pop(name)))
            got = train(other, states, STEPS)
            if as_before:
                assert got == wanted
            else:
                assert got[0] == pytest.approx(wanted[0], rel=first_apart), (several, got, wanted)
                assert got == pytest.approx(wanted, rel=apart), (several, got, wanted)
        assert saved == {}


def checkpoint_of_sharded_weights(rank, ranks):
    """``fully_shard`` gathers the weights: what is computed is one process' to the last bit."""
    resharded(rank, model, sharded, ranks, 0.0, 0.0)


def checkpoint_of_sharded_codes(rank, ranks):
    """Weights in FP8: processes have rows in high precision, one alone has codes, by which it starts. From
    then on masters move where codes do not."""
    resharded(rank, lambda seed: model(seed, held=True), sharded, ranks, 0.0, 1e-2)


def checkpoint_of_parts(rank, ranks):
    """``parallelize_module``: sums over processes are in another order, which moves a code now and then; on a
    GPU more of them (``APART``), of values whose mean square the loss is."""
    apart = 1e-3 if PLACE.type == "cpu" else 2 * APART["cuda"]
    resharded(rank, converted, in_parts, ranks, apart, apart)


def asynchronous_checkpoint(rank, ranks):
    """What ``async_save`` writes while training goes on is what there was when it was called: rows in high
    precision, of plain tensors, and the FP8 state."""
    mesh, folder = mesh_of(ranks), shared_folder(rank)

    def made(seed):
        net = sharded(model(seed, held=True), mesh)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3)

    def state_of(net, optimizer):
        own, states = get_state_dict(net, optimizer)
        return {"model": own, "optim": states}

    net, optimizer = made(0)
    train(net, optimizer, 0)
    beside = dist.new_group(backend="gloo")  # training goes on in the other one
    saving = dcp.async_save(state_of(net, optimizer), checkpoint_id=folder, process_group=beside)
    wanted = train(net, optimizer, STEPS)
    saving.result()
    net, optimizer = made(1)
    state = state_of(net, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert train(net, optimizer, STEPS) == wanted


# --- other ways of fully_shard ------------------------------------------------------------------------------


def losses_of(mesh, **options):
    """Of training weights in FP8 that are sharded, and where their rows are."""
    net = sharded(model(0, held=True), mesh, **options)
    losses = train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), 0)
    return losses, {parameter.device.type for parameter in net.parameters()}


def rows_on_the_host(rank, ranks):
    """``CPUOffloadPolicy``: rows and the optimizer's states are on the host. Its AdamW rounds otherwise than
    a GPU's, so codes move once in a while."""
    mesh = mesh_of(ranks)
    wanted, here = losses_of(mesh)
    found, there = losses_of(mesh, offload_policy=CPUOffloadPolicy(pin_memory=PLACE.type == "cuda"))
    assert (here, there) == ({PLACE.type}, {"cpu"})
    assert found[0] == wanted[0]
    assert found == pytest.approx(wanted, rel=0.0 if PLACE.type == "cpu" else APART["cuda"])


def copies_of_shards(rank, ranks):
    """Two dimensions of processes: the rows are whole in each, and gradients are averaged over the copies.
    All have the same inputs, so a mean is what each of them has."""
    two = init_device_mesh(PLACE.type, (ranks, 1), mesh_dim_names=("copies", "shards"))
    assert losses_of(two) == losses_of(mesh_of(ranks))


# --- plans of parallelize_module ----------------------------------------------------------------------------


class Block(nn.Module):
    """A norm and two linear layers: x (batch, sequence, features)."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(FEATURES, 256), nn.Linear(256, FEATURES)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def step(net, x, g, recipe):
    """y, the gradients of x and of all parameters, whole."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe or te.DelayedScaling()):
        y = net(x)
    y.backward(g)
    grads = {name: p.grad for name, p in net.named_parameters()}
    full = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return {"y": y.detach(), "dx": x.grad, **full}


def plans(mode):
    """Of a block whose sequence, dimension 1, is sharded outside of it, or not at all."""
    columns, rows = (
        (FP8ColwiseParallel, FP8RowwiseParallel) if mode == "codes" else (ColwiseParallel, RowwiseParallel)
    )
    if mode == "whole":
        return {"up": columns(), "down": rows()}
    return {
        "norm": SequenceParallel(sequence_dim=1),
        "up": columns(input_layouts=Shard(1)),
        "down": rows(output_layouts=Shard(1)),
    }


def plans_give_one_process(rank, ranks):
    """Columns, rows, sequences and norms: y and all gradients of one process, but for the order of float32's
    sums; so scales and codes are one process's. What one process casts by its part's scale would be off by
    2^-4 of an element in some of these."""
    mesh, (b, s) = mesh_of(ranks), (2, 64)
    torch.manual_seed(5)
    x, g = torch.randn(2, b, s, FEATURES).to(PLACE)
    x[0, 3, 5], g[1, 40, 7] = 30.0, -25.0
    part = slice(rank * s // ranks, (rank + 1) * s // ranks)
    for norm in (nn.LayerNorm, nn.RMSNorm, lambda n: te.LayerNorm(n, device=PLACE)):
        torch.manual_seed(0)
        plain = te.convert(Block(norm(FEATURES)).to(PLACE))
        with torch.no_grad():
            plain.up.weight[200, 3], plain.down.weight[5, 250] = 1.0, -1.0
        for recipe in (
            None,
            te.Float8CurrentScaling(),
            te.DelayedScaling(amax_history_len=2),
            te.Float8BlockScaling(),
        ):
            for mode in ("whole", "high", "codes"):
                alone, net = copy.deepcopy(plain), copy.deepcopy(plain)
                parallelize_module(net, mesh, plans(mode))
                # scales are those of the step before
                for _ in range(2 if isinstance(recipe, te.DelayedScaling) else 1):
                    wanted = step(alone, x, g, recipe)
                    if mode == "whole":
                        got = step(net, x, g, recipe)
                    else:
                        got = step(net, x[:, part], g[:, part], recipe)
                for name, value in got.items():
                    want = wanted[name]
                    if mode != "whole" and name in ("y", "dx"):
                        want = want[:, part]
                    error = relative_error(bits(value), bits(want))
                    assert error <= APART[PLACE.type], (recipe, mode, name, error)


def codes_are_gathered(rank, ranks):
    """Bytes that each kind of plan gathers: codes, an element each, where torch's own has four of float32."""
    found, real = {}, TorchCollectives._start
    for mode in ("high", "codes"):
        moved = found[mode] = []

        def noted(self, operation, source, target, stream, moved=moved):
            if operation == "all_gather":
                moved.append(source.nbytes)
            return real(self, operation, source, target, stream)

        torch.manual_seed(0)
        net = te.convert(Block(nn.LayerNorm(FEATURES)).to(PLACE))
        parallelize_module(net, mesh_of(ranks), plans(mode))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchCollectives, "_start", noted)
            x = drawn(0, 2, 64 // ranks, FEATURES)
            step(net, x, torch.ones_like(x), te.Float8CurrentScaling())
    rows = 2 * 64 // ranks
    # x for fprop and for wgrad, and both orientations of the gradient of down's output
    assert found == {"high": [], "codes": [rows * FEATURES] * 4}, found


def torchao_plans(rank, ranks):
    """torchao's names, over its own layers."""
    mesh = mesh_of(ranks)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, FEATURES)).to(PLACE)
    x, g = torch.randn(2, 64, FEATURES).to(PLACE)
    plan = {
        "0": Float8ColwiseParallel(input_layouts=Shard(0)),
        "2": Float8RowwiseParallel(output_layouts=Shard(0)),
    }
    prepared = {
        "": PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "0": ColwiseParallel(),
        "2": plan["2"],
    }
    wanted = step(convert_to_float8_training(copy.deepcopy(plain)), x, g, None)
    for own in (plan, prepared):
        net = convert_to_float8_training(copy.deepcopy(plain))
        parallelize_module(net, mesh, own)
        got = step(net, x.chunk(ranks)[rank], g.chunk(ranks)[rank], None)
        for name, value in got.items():
            want = wanted[name].chunk(ranks)[rank] if name in ("y", "dx") else wanted[name]
            error = relative_error(bits(value), bits(want))
            assert error <= APART[PLACE.type], (name, error)
    with pytest.raises(ArgumentError, match=r"fp8kit_torch.Linear takes tp_group itself"):
        parallelize_module(te.Linear(32, 32, device=PLACE), mesh, FP8ColwiseParallel())


# --- meshes of two dimensions -------------------------------------------------------------------------------


def two_dimensions(rank, ranks):
    """Copies of shards (weights in FP8), and ``fully_shard`` beside plans of ``parallelize_module``, as
    training programs have them: gradients of two micro-batches, which ranks share after the second, clipped
    by the norm of all."""
    mesh = init_device_mesh(PLACE.type, (2, ranks // 2), mesh_dim_names=("rows", "parts"))
    gain = 2.0**10  # no gradient is too small for E5M2 with the first step's scale of 1
    across, within = (mesh[name].get_local_rank() for name in mesh.mesh_dim_names)

    def follow(net, own, several):
        optimizer, found = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True), []
        for number in range(2 * STEPS):
            x = drawn(number, 8, 32, FEATURES)
            if several:
                net.set_requires_gradient_sync(number % 2 == 1)
            with te.autocast(recipe=RECIPE):
                loss = gain * (net(own(x)) - own(x.roll(1, -1))).square().mean()
            loss.backward()
            loss = loss.detach()
            if several:
                dist.all_reduce(loss)
                loss /= ranks
            found.append(loss.item())
            if number % 2:
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05 * gain, foreach=True)
                found.append((norm.full_tensor() if several else norm).item())
                optimizer.step()
                optimizer.zero_grad()
        return found

    def rows(x):
        return x.chunk(ranks)[rank]

    def rows_and_places(x):
        return x.chunk(2)[across].chunk(ranks // 2, 1)[within]

    def blocks():
        torch.manual_seed(0)
        return te.convert(nn.Sequential(*(Block(nn.RMSNorm(FEATURES)) for _ in range(2))).to(PLACE))

    alone, net = model(0), model(0, held=True)
    with torch.no_grad():
        for own, held in zip(alone.parameters(), net.parameters(), strict=True):
            own.copy_(held)
    wanted = follow(alone, lambda x: x, False)
    got = follow(sharded(net, mesh), rows, True)
    # weights in FP8 have scales of their own values, where those in high precision have earlier ones
    assert got == pytest.approx(wanted, rel=5e-3), (got, wanted)

    wanted, net = follow(blocks(), lambda x: x, False), blocks()
    for block in net:
        parallelize_module(block, mesh["parts"], plans("codes"))
    # gradients are sums over "parts", whose losses are means of a part: a factor that the norm shows
    got = follow(sharded(net, mesh["rows"]), rows_and_places, True)
    got[2::3] = [norm / (ranks // 2) for norm in got[2::3]]
    assert got == pytest.approx(wanted, rel=1e-3), (got, wanted)


# --- pipelines ----------------------------------------------------------------------------------------------


class Part(nn.Module):
    """A stage's layers. ``first``: of the next micro-batch, where weights are cast once a step."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.first = nn.ModuleList(layers), None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, is_first_microbatch=self.first)
        self.first = None if self.first is None else False
        return x


def stages(count):
    """``count`` stages of two layers each."""
    torch.manual_seed(0)
    layers = [te.Linear(FEATURES, FEATURES, device=PLACE) for _ in range(2 * count)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(4)
    return [Part(layers[2 * i : 2 * i + 2]) for i in range(count)]


def square(y, target):
    return (y - target).square().mean()


def pipeline(rank, ranks, kind, per_rank, recipe, cached=False, micro=4, steps=5):
    """Losses, gradients and the FP8 state of all layers, of a schedule and of one process, to the last bit;
    both sum the gradients of the same micro-batches. ``cached``: weights are cast once a step."""
    count = ranks * per_rank
    parts, alone = stages(count), stages(count)
    group = dist.new_group([rank], use_local_synchronization=True)  # a stage has its own amaxes
    own = [parts[i] for i in range(rank, count, ranks)]

    def stage(part, i):
        """With shapes that torch is told, or finds itself."""
        if not cached:
            return PipelineStage(part, i, count, PLACE)
        shape = 32 // micro, FEATURES
        told = {"input_args": torch.empty(shape, device=PLACE, requires_grad=i > 0)}
        told |= {"output_args": torch.empty(shape, device=PLACE, requires_grad=True)}
        return torch_pipelining.PipelineStage(part, i, count, PLACE, **told)

    made = [stage(part, i) for i, part in zip(range(rank, count, ranks), own, strict=True)]
    schedule = kind(made if per_rank > 1 else made[0], micro, loss_fn=square)
    optimizer = torch.optim.SGD([p for part in own for p in part.parameters()], lr=0.1)
    whole = nn.Sequential(*alone)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for number in range(steps):
        for part in (*own, *alone):
            part.first = True if cached else None
        x = drawn(number, 32, FEATURES)
        target = x.roll(1, -1)
        optimizer.zero_grad()
        reference.zero_grad()
        losses = []
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            if rank == 0 or per_rank > 1:
                args = (x,) if rank == 0 else ()
                schedule.step(*args, target=target if rank == ranks - 1 else None, losses=losses)
            else:
                schedule.step(target=target, losses=losses)
        wanted = []
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            for part, goal in zip(x.chunk(micro), target.chunk(micro), strict=True):
                loss = square(whole(part), goal)
                loss.backward()
                wanted.append(loss.detach())
        for q in whole.parameters():
            q.grad.div_(micro)
        for mine, i in zip(own, range(rank, count, ranks), strict=True):
            for (name, p), q in zip(mine.named_parameters(), alone[i].parameters(), strict=True):
                assert_same_bits(f"{number} {i} {name} grad", bits(p.grad), bits(q.grad))
            for name, state in fp8_states(mine).items():
                assert_same_bits(name, bits(state), bits(fp8_states(alone[i])[name]))
        if rank == ranks - 1:
            assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]
        optimizer.step()
        reference.step()


def pipelines_give_one_process(rank, ranks):
    """Schedules over our layers. Forward states change once a step, backward ones after each micro-batch."""
    for recipe in (te.DelayedScaling(amax_history_len=2), te.Float8CurrentScaling()):
        for cached in (False, True):
            pipeline(rank, ranks, Schedule1F1B, 1, recipe, cached)
            pipeline(rank, ranks, ScheduleInterleaved1F1B, 2, recipe, cached)
    # its backward passes are two each, of x and of weights, and delayed scaling's states change after each;
    # torch 2.11 does not divide the backward pass of a torch.autograd.Function so, 2.13 does
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return
    for recipe in (te.Float8CurrentScaling(), te.Float8BlockScaling()):
        pipeline(rank, ranks, ScheduleInterleavedZeroBubble, 2, recipe)


def main(arguments):
    """The cases that the ``arguments`` of the process name; on GPUs with sums in one order at each call."""
    global PLACE
    rank, place = int(arguments[0]), arguments[3]
    PLACE = torch.device(place, rank) if place == "cuda" else torch.device(place)
    with deterministic():
        work(globals(), arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
