"""Data parallel training with divided optimiser states is the training of one rank with all rows. The ranks
are threads; what processes add is in ``tests/commands/test_launch.py``."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import distributed, nn, optim, recipe
from fp8kit.collectives import FakeCollectives
from fp8kit.distributed import all_reduce, grid, own_state, reduce_sequence_parallel_gradients, whole_state
from fp8kit.errors import ArgumentError, CheckpointError, UnsupportedError
from fp8kit.recipes import NAMED
from fp8kit.settings import Place
from fp8kit.testing.compare import assert_same_bits

PACKED = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
LOCK = threading.Lock()
S, B, H, F = 16, 4, 64, 128
RECIPES = {
    "high": None,
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "rowwise": NAMED["rowwise"].recipe,
}
# scales of x and g are those of a rank's own rows: other codes, so that steps differ, and the total less
OWN_SCALES = {
    "current": recipe.Float8CurrentScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}


def model(dtype=None, **parallel):
    nn.manual_seed(0)
    return nn.TransformerLayer(
        H, F, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, device="cpu", **parallel
    )


def groups(net):
    return [
        {"params": [p for p in net.parameters() if len(p.shape) > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if len(p.shape) == 1], "weight_decay": 0.0},
    ]


def own(array, ranks, dim):
    return np.ascontiguousarray(np.split(array, ranks.size, dim)[ranks.rank])


def steps(net, optimizer, how, count, data, tensor=None, first=0):
    """Losses of so many steps, each rank of ``data`` with its sequences and each of ``tensor`` with its
    rows."""
    losses = []
    for step in range(first, first + count):
        x, goal = np.random.default_rng(step).standard_normal((2, S, B, H)).astype(np.float32)
        for group, dim in ((data, 1), (tensor, 0)):
            if group is not None:
                x, goal = own(x, group, dim), own(goal, group, dim)
        optimizer.zero_grad()
        x, goal = (
            fk.tensor(part, dtype=net.self_attention.proj.weight.dtype, device="cpu") for part in (x, goal)
        )
        both = None if data is None else data if tensor is None else tensor.everyone
        with fk.autocast(enabled=how is not None, recipe=how, amax_reduction_group=both):
            y = net(x)
        error = y.numpy().astype(np.float32) - goal.numpy().astype(np.float32)
        count_of_all = S * B * H
        mine = float(np.square(error, dtype=np.float64).sum()) / count_of_all
        y.backward(fk.tensor(2 * error / count_of_all, dtype=y.dtype, device="cpu"))
        if tensor is not None:
            reduce_sequence_parallel_gradients(net.parameters(), tensor)
        if isinstance(optimizer, optim.ShardedOptimizer):
            optimizer.clip_grad_norm_(0.5)
        else:
            optim.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        loss = fk.tensor(np.array([mine], np.float32), device="cpu")
        for group in (data, tensor):
            if group is not None:
                all_reduce(loss, group)
        losses.append(loss.item())
    return losses


def alone(how, count, dtype=None):
    net = model(dtype)
    optimizer = optim.AdamW(groups(net), lr=0.01)
    return steps(net, optimizer, how, count, None), net, optimizer


def together(how, count, size, dtype=None, **options):
    nets = [model(dtype) for _ in range(size)]  # the random state is the process's

    def work(ranks):
        net = nets[ranks.rank]
        optimizer = optim.ShardedOptimizer(
            optim.AdamW, groups(net), ranks, average=False, lr=0.01, bucket_bytes=20000, **options
        )
        return steps(net, optimizer, how, count, ranks), net, optimizer.state_dict()

    return FakeCollectives(size).run(work)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_a_step_that_is_left_out_and_parameters_that_are_changed(kind):
    """Gradients that were clipped and dropped, by the model or for others, are of no later step; what
    parameters are loaded with between steps stays."""

    def train(params, optimizer, clip):
        (param,) = params

        def pull(value):
            param.grad = fk.tensor(np.full(4, value, np.float32), device="cpu").view

        pull(np.inf)
        clip(1.0)
        param.grad = None
        optimizer.step()
        pull(1.0)
        clip(1.0)
        pull(-3.0)
        optimizer.step()
        with fk.no_grad():
            param.copy_(np.full(4, 100.0, np.float32))
        optimizer.step()
        return param.numpy().copy()

    def made():
        return [fk.tensor(np.ones(4, np.float32), requires_grad=True, device="cpu")]

    def work(ranks):
        params = made()
        optimizer = optim.ShardedOptimizer(kind, params, ranks, lr=0.25)
        return train(params, optimizer, optimizer.clip_grad_norm_)

    one = made()
    wanted = train(one, kind(one, lr=0.25), lambda norm: optim.clip_grad_norm_(one, norm))
    for got in FakeCollectives(2).run(work):
        assert_same_bits("parameters", got, wanted)


@pytest.mark.parametrize("how", RECIPES)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.combinations)])
def test_losses_and_states_are_those_of_one_rank(how, size):
    wanted, net, optimizer = alone(RECIPES[how], 3)
    made = together(RECIPES[how], 3, size)
    for losses, other, state in made:
        assert losses == pytest.approx(wanted, rel=1e-3)
        for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
            assert_same_bits(name, q.numpy(), made[0][1].state_dict()[name].numpy())
            assert p.shape == q.shape
        whole = optimizer.state_dict()
        assert {n: (v.shape, v.dtype) for n, v in state.items()} == {
            n: (v.shape, v.dtype) for n, v in whole.items()
        }
    states = [made[0][2][f"exp_avg.{i}"].numpy() for i in range(len(list(net.parameters())))]
    exact = [whole[f"exp_avg.{i}"].numpy() for i in range(len(states))]
    error = sum(float(np.square(a - b).sum()) for a, b in zip(states, exact, strict=True))
    # sums of gradients in another order, which move a code of FP8 now and then: of one element in a
    # thousand by 2^-3 of it
    assert error <= 1e-4 * sum(float(np.square(b).sum()) for b in exact)


@pytest.mark.programs
@pytest.mark.parametrize("how", RECIPES | OWN_SCALES)
def test_losses_of_a_hundred_steps(how):
    recipe_ = (RECIPES | OWN_SCALES)[how]
    wanted = alone(recipe_, 100)[0]
    losses = together(recipe_, 100, 2)[1][0]
    assert losses == pytest.approx(wanted, rel=5e-2 if how in OWN_SCALES else 1e-2)
    assert sum(losses) == pytest.approx(sum(wanted), rel=1e-3)


@pytest.mark.parametrize("average", [True, False])
def test_gradients_whose_sums_are_exact_give_one_ranks_bits(average):
    """Integers, of sizes that fill no bucket, in groups of their own hyperparameters; bfloat16 with
    masters."""
    shapes = [(3, 5), (257,), (2, 128), (1,)]
    draws = np.random.default_rng(0)
    values = [draws.standard_normal(shape).astype(np.float32) for shape in shapes]
    pulls = [[draws.integers(-8, 9, shape).astype(np.float32) for shape in shapes] for _ in range(2)]

    def made():
        kinds = ("float32", "bfloat16", "float32", "bfloat16")
        return [
            fk.tensor(value.copy(), dtype=kind, requires_grad=True, device="cpu")
            for value, kind in zip(values, kinds, strict=True)
        ]

    def train(params, optimizer, grads, count):
        for _ in range(count):
            for param, grad in zip(params, grads, strict=True):
                param.grad = fk.tensor(grad, dtype=param.dtype, device="cpu").view
            optimizer.step()
        return [param.numpy().copy() for param in params]

    def how(params):
        return [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.01, "weight_decay": 0.3}]

    factor = 0.5 if average else 1.0
    one = made()
    sums = [factor * (a + b) for a, b in zip(*pulls, strict=True)]
    single = optim.AdamW(how(one))
    wanted = train(one, single, sums, 3)

    def work(ranks):
        params = made()
        if ranks.rank:
            params = [
                fk.tensor(np.zeros(p.shape), dtype=p.dtype, requires_grad=True, device="cpu") for p in params
            ]
        optimizer = optim.ShardedOptimizer(optim.AdamW, how(params), ranks, average=average, bucket_bytes=600)
        got = train(params, optimizer, pulls[ranks.rank], 2)
        state = optimizer.state_dict()
        # on a rank of its own it goes on from there, and two go on from what one saved
        fresh = made()
        for param, value in zip(fresh, got, strict=True):
            param.detach().copy_(value)
        later = optim.AdamW(how(fresh))
        later.load_state_dict(state)
        assert [a.tobytes() for a in train(fresh, later, sums, 1)] == [w.tobytes() for w in wanted]
        optimizer.load_state_dict(state)
        assert optimizer.lr == 0.1
        return train(params, optimizer, pulls[ranks.rank], 1), optimizer.state_dict()

    whole = single.state_dict()
    for got, state in FakeCollectives(2).run(work):
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_same_bits(f"parameter {i}", a, b)
        assert state.keys() == whole.keys()
        for name in whole:
            assert_same_bits(name, state[name].numpy(), whole[name].numpy())


@pytest.mark.parametrize("how", ["high", "delayed"])
def test_ranks_that_share_rows_and_weights(how):
    """Four: two by two. Weights' parts, gradients of a rank's rows, norms over both groups."""
    wanted, _, _ = alone(RECIPES[how], 3)
    values = model().state_dict()

    def work(ranks):
        data, tensor = grid(ranks, tensor=2)
        tensor.everyone = ranks
        with LOCK:
            net = model(tp_group=tensor, set_parallel_mode=True, sequence_parallel=True)
        net.load_state_dict(own_state(values, net, tensor))
        optimizer = optim.ShardedOptimizer(
            optim.AdamW, groups(net), data, average=False, lr=0.01, tensor=tensor
        )
        return steps(net, optimizer, RECIPES[how], 3, data, tensor)

    for losses in FakeCollectives(4).run(work):
        assert losses == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {
            "activation": "swiglu",
            "fuse_qkv_params": True,
            "qkv_weight_interleaved": False,
            "num_gqa_groups": 2,
        },
        {"activation": "geglu", "fuse_qkv_params": True, "bias": False},
        {"layer_type": "decoder", "fuse_qkv_params": True, "qkv_weight_interleaved": False},
    ],
)
def test_a_layers_state_in_parts_and_whole(options):
    """The layer of each rank computes its part of the whole one's; its parts, put together, are the whole."""
    whole = model(**options)
    state, x = whole.state_dict(), np.random.default_rng(0).standard_normal((S, B, H)).astype(np.float32)
    more = {"encoder_output": fk.tensor(x, device="cpu")} if "layer_type" in options else {}
    want = whole(fk.tensor(x, device="cpu"), **more).numpy()

    def work(ranks):
        with LOCK:
            net = model(tp_group=ranks, set_parallel_mode=True, **options)
        net.load_state_dict(own_state(state, net, ranks))
        with pytest.raises(CheckpointError, match=r"proj\.weight: got shape"):
            own_state({"self_attention.proj.weight": np.zeros((H, H + 1))}, net, ranks)
        return net(fk.tensor(x, device="cpu"), **more).numpy(), whole_state(net, ranks)

    for y, found in FakeCollectives(2).run(work):
        assert np.linalg.norm(y - want) <= 1e-6 * np.linalg.norm(want)
        assert found.keys() == state.keys()
        for name, value in found.items():
            assert_same_bits(name, value, state[name].numpy())


def test_what_it_refuses():
    def leaf(size=4):
        return fk.tensor(np.ones(size, np.float32), requires_grad=True, device="cpu")

    ranks = FakeCollectives(1).ranks[0]
    with pytest.raises(ArgumentError, match=r"kind: got .*, expected a class of optimisers"):
        optim.ShardedOptimizer("AdamW", [leaf()], ranks)
    with pytest.raises(ArgumentError, match="ranks: got int, expected a Collectives"):
        optim.ShardedOptimizer(optim.AdamW, [leaf()], 2)
    with pytest.raises(UnsupportedError, match="exp_avg_scale of shape"):
        optim.ShardedOptimizer(optim.AdamW, [leaf()], ranks, states="ms_amp")
    one, other = leaf(), leaf()
    made = optim.ShardedOptimizer(optim.SGD, [one, other], ranks, lr=0.1, momentum=0.9)
    made.step()  # no gradient, no step
    with pytest.raises(ArgumentError, match="no gradient, expected at least one"):
        made.clip_grad_norm_(1.0)
    one.grad = leaf().view
    with pytest.raises(ArgumentError, match="1 of 2 parameters without a gradient"):
        made.step()
    other.grad = leaf().view
    made.step()
    state = made.state_dict()
    state["steps"] = np.array([1, 2])
    with pytest.raises(CheckpointError, match="other numbers of steps"):
        made.load_state_dict(state)
    del state["momentum_buffer.0"]
    with pytest.raises(CheckpointError, match="missing: momentum"):
        made.load_state_dict(state)


def test_a_group_that_is_none_is_refused():
    with pytest.raises(fk.RecipeError, match="amax_reduction_group: got 'all'"):
        fk.autocast(amax_reduction_group="all")
    assert copy.deepcopy(model().self_attention.proj.weight).partition_dim is None


def test_what_is_no_ranks_is_refused():
    for given in (2, "all", None):
        with pytest.raises(ArgumentError, match=r"grid: ranks: got \w+, expected a Collectives"):
            grid(given)


def test_a_process_says_that_it_waits_for_the_others(monkeypatch):
    waiting = threading.Event()

    def connect(place, device, timeout):
        assert waiting.wait(10)
        return FakeCollectives(1).run(lambda ranks: ranks)[0]

    monkeypatch.setattr(distributed, "PATIENCE", 0.01)
    monkeypatch.setattr(distributed.settings, "place", lambda: Place(1, 2, address="there", port=7))
    monkeypatch.setattr(distributed, "everyone", lambda: None)
    monkeypatch.setattr(distributed, "set_everyone", lambda ranks: None)
    monkeypatch.setattr(distributed.importlib, "import_module", lambda name: SimpleNamespace(connect=connect))
    monkeypatch.setattr(distributed.log, "warning", lambda *said: (told.append(said), waiting.set()))
    told = []
    distributed.init("gloo", "cpu", timeout=30)
    assert told[0][0] % told[0][1:] == (
        "distributed.init: rank 1 of 2 waits for the others at there:7, for at most 30 s"
    )
