"""Ranks that share weights, or divide sequences, natively: the losses of one rank over a hundred steps. The
ranks are threads; divided optimiser states are in ``test_sharded_optimizer``."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn, optim, recipe
from fp8kit.collectives import FakeCollectives
from fp8kit.distributed import all_reduce, own_state, reduce_sequence_parallel_gradients
from fp8kit.recipes import NAMED

S, B, H, F, STEPS = 32, 2, 64, 128, 100
RECIPES = {
    "high": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "rowwise": NAMED["rowwise"].recipe,
    "nvfp4": recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
LOCK = threading.Lock()  # the random state is the process's


def model(**parallel):
    with LOCK:
        nn.manual_seed(0)
        return nn.TransformerLayer(
            H, F, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **parallel
        )


def layer(scheme, ranks):
    """The layer of a rank, or of one alone."""
    if ranks is None or scheme in ("p2p", "all_gather", "a2a"):
        made = model()
        if ranks is not None:
            made.set_context_parallel_group(ranks, None, None, scheme)
        return made
    made = model(tp_group=ranks, set_parallel_mode=True, sequence_parallel=scheme == "TP, SP")
    made.load_state_dict(own_state(model().state_dict(), made, ranks))
    return made


def rows(scheme, x, ranks):
    """A rank's part of x (S, B, H): of the sequence, of two of its chunks, or all of it."""
    if ranks is None or scheme == "TP":
        return x
    if scheme == "TP, SP":
        return np.ascontiguousarray(np.split(x, ranks.size)[ranks.rank])
    chunks = np.split(x, 2 * ranks.size)
    return np.concatenate([chunks[ranks.rank], chunks[2 * ranks.size - 1 - ranks.rank]])


def train(how, scheme=None, ranks=None):
    """Losses of steps of gradient descent."""
    net, divided = layer(scheme, ranks), scheme not in (None, "TP")
    optimizer, losses = optim.SGD(net.parameters(), lr=2.0), []
    for step in range(STEPS):
        x, goal = np.random.default_rng(step).standard_normal((2, S, B, H)).astype(np.float32)
        x, goal = rows(scheme, x, ranks), rows(scheme, np.tanh(goal + 2 * x), ranks)
        optimizer.zero_grad()
        with fk.autocast(enabled=how is not None, recipe=how, amax_reduction_group=ranks):
            y = net(fk.tensor(x, device="cpu"))
        off = y.numpy() - goal
        y.backward(fk.tensor(2 * off / (S * B * H), device="cpu"))
        if scheme == "TP, SP":
            reduce_sequence_parallel_gradients(net.parameters(), ranks)
        elif divided:
            for parameter in net.parameters():
                all_reduce(fk.tensor(parameter.grad, device="cpu"), ranks)
        optimizer.step()
        loss = fk.tensor(
            np.array([np.square(off, dtype=np.float64).sum() / (S * B * H)], np.float32), device="cpu"
        )
        losses.append((all_reduce(loss, ranks) if divided else loss).item())
    return losses


@functools.cache
def alone(how):
    return train(RECIPES[how])


@pytest.mark.programs
@pytest.mark.parametrize("scheme", ["TP", "TP, SP", "p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("how", RECIPES)
def test_losses_of_a_hundred_steps_are_those_of_one_rank(how, scheme):
    """In total; a sum in another order moves a code now and then, which is felt for some steps."""
    wanted = alone(how)
    assert wanted[-1] < 0.9 * wanted[0]
    for losses in FakeCollectives(2).run(lambda ranks: train(RECIPES[how], scheme, ranks)):
        assert losses[0] == pytest.approx(wanted[0], rel=1e-3)
        assert losses == pytest.approx(wanted, rel=1e-2)
        assert sum(losses) == pytest.approx(sum(wanted), rel=1e-3)
