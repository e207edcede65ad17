"""Named random states."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch.rng import CudaRNGStatesTracker, get_rng_state

from fp8kit.errors import Fp8kitError
from fp8kit.testing.compare import assert_same_bits


def draw():
    return torch.rand(5, device="cuda" if torch.cuda.is_available() else "cpu").cpu().numpy()


def test_forks_draw_their_own_numbers_and_go_on_where_they_were_left():
    tracker = CudaRNGStatesTracker()
    before = get_rng_state()
    tracker.add("model-parallel-rng", 11)
    tracker.add("other", 12)
    assert torch.equal(get_rng_state(), before)
    with tracker.fork():
        first = draw()
    assert torch.equal(get_rng_state(), before)
    with tracker.fork("other"):
        other = draw()
    states = tracker.get_states()
    with tracker.fork():
        second = draw()
    tracker.set_states(states)
    with tracker.fork():
        assert_same_bits("after set_states", draw(), second)
    again = CudaRNGStatesTracker()
    again.add("model-parallel-rng", 11)
    with again.fork():
        assert_same_bits("same seed", draw(), first)
    assert (first != second).any()
    assert (first != other).any()


def test_a_fork_that_raises_restores_the_state_and_wrong_names_are_refused():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    before = get_rng_state()
    with pytest.raises(ZeroDivisionError), tracker.fork("a"):
        draw().fill(1 / 0)
    assert torch.equal(get_rng_state(), before)
    for arguments, word in ((("a", 2), "name"), (("b", 1), "seed")):
        with pytest.raises(Fp8kitError, match=word):
            tracker.add(*arguments)
    with pytest.raises(Fp8kitError, match="model-parallel-rng"):
        tracker.fork().__enter__()
    tracker.reset()
    assert tracker.get_states() == {}
