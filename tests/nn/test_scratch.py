"""Memory for temporaries: the same for the next operation on a stream, another for another stream, for much
of it, and for who asks meanwhile."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats, nn
from fp8kit.arrays import CPU, Device
from fp8kit.autograd import call
from fp8kit.execution.memory import Arena, Layout, Scratch
from fp8kit.recipe import DelayedScaling, Float8BlockScaling
from fp8kit.spec import Meta, Operation

GPU = Device("cuda", 0)


def counting():
    made = []

    def alloc(nbytes, where):
        made.append(nbytes)
        return len(made) << 20, object()

    return Scratch(alloc), made


def used(scratch, nbytes, device, stream):
    """An arena that was taken and given back."""
    found = scratch.arena(nbytes, device, stream)
    scratch.release(found, stream)
    return found


def test_one_arena_is_kept_for_each_stream():
    scratch, made = counting()
    first = used(scratch, 100, GPU, 0)
    assert used(scratch, 100, GPU, 0) is first
    assert used(scratch, 40, GPU, 0) is first
    larger = used(scratch, 101, GPU, 0)
    assert larger is not first
    assert used(scratch, 100, GPU, 0) is larger
    assert used(scratch, 100, GPU, 5) is not larger
    assert used(scratch, 100, Device("cuda", 1), 0) is not larger
    assert made == [100, 101, 100, 100]


def test_threads_share_an_arena_but_not_at_once():
    scratch, _ = counting()
    first = used(scratch, 100, GPU, 0)
    others = []

    def ask(give_back):
        others.append(scratch.arena(100, GPU, 0))
        if give_back:
            scratch.release(others[-1], 0)

    def elsewhere(give_back):
        thread = threading.Thread(target=ask, args=(give_back,))
        thread.start()
        thread.join()

    elsewhere(True)
    assert others == [first]
    elsewhere(False)  # at work
    assert others[1] is first
    second = scratch.arena(100, GPU, 0)
    assert second is not first
    scratch.release(second, 0)
    elsewhere(True)
    assert others[2] is second


def test_much_is_not_kept_nor_anything_on_the_cpu():
    scratch, made = counting()
    used(scratch, 8, GPU, 0)
    assert used(scratch, Scratch.KEPT + 1, GPU, 0) is not used(scratch, Scratch.KEPT + 1, GPU, 0)
    assert not scratch.arenas  # the small one went first, since much was wanted
    small = used(scratch, 8, GPU, 0)
    assert used(scratch, 8, GPU, 0) is small
    assert used(scratch, 8, CPU, 0) is not used(scratch, 8, CPU, 0)
    assert made == [8, Scratch.KEPT + 1, Scratch.KEPT + 1, 8, 8, 8]


def test_arenas_of_ever_new_streams_do_not_pile_up():
    scratch, made = counting()
    arenas = [used(scratch, 8, GPU, stream) for stream in range(3 * Scratch.STREAMS)]
    assert len(scratch.arenas) == Scratch.STREAMS
    last = len(arenas) - 1
    assert used(scratch, 8, GPU, last) is arenas[last]
    larger = used(scratch, 9, GPU, last - Scratch.STREAMS + 1)  # in place of the oldest: no other goes
    assert len(scratch.arenas) == Scratch.STREAMS
    assert used(scratch, 8, GPU, last - Scratch.STREAMS + 1) is larger
    assert used(scratch, 8, GPU, last - Scratch.STREAMS + 2) is arenas[last - Scratch.STREAMS + 2]
    assert used(scratch, 8, GPU, 0) is not arenas[0]
    assert len(made) == len(arenas) + 2


def test_separate_arenas_are_given_away():
    scratch, _ = counting()
    before = used(scratch, 8, GPU, 0)
    with scratch.separate() as arenas:
        inner = used(scratch, 8, GPU, 0)
        assert inner is not before
        assert list(arenas.values()) == [inner]
    assert used(scratch, 8, GPU, 0) is before


def test_layouts_of_ever_new_sizes_do_not_pile_up():
    arena = Arena(8, 0, None, GPU, True)
    for _ in range(3 * Arena.LIMIT):
        layout = Layout({"a": Meta((2,), formats.uint8)})
        assert arena.views(layout, None) is arena.views(layout, None)
    assert len(arena._views) <= Arena.LIMIT


@pytest.mark.parametrize(
    "recipe",
    [None, DelayedScaling(amax_history_len=2), Float8BlockScaling()],
    ids=["high", "delayed", "block"],
)
def test_no_two_operations_at_work_share_an_arena(recipe, monkeypatch):
    """Arenas are kept on the CPU too, and lent out: who asks while another operation of the thread is at work
    fails. A step with recomputation in backward, and with a hook that calls another layer, gives the bits
    that fresh memory gives."""

    def step():
        nn.manual_seed(3)
        first, aside = (nn.TransformerLayer(32, 64, 2, hidden_dropout=0.1, device="cpu") for _ in range(2))
        x = fk.tensor(
            np.random.default_rng(1).standard_normal((16, 2, 32)).astype(np.float32), requires_grad=True
        )
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = fk.checkpoint(first, x) + first(aside(x), checkpoint_core_attention=True)
        y.backward(y.view)
        return [
            y.numpy().tobytes(),
            x.grad.numpy().tobytes(),
            *(p.grad.numpy().tobytes() for p in first.parameters()),
        ]

    want = step()
    lent = []
    arenas = {}

    def arena(nbytes, where, stream):
        assert not lent, f"asked for while {lent} is at work"
        found = arenas.get(stream)
        if found is None or found.nbytes < nbytes:
            memory = np.full(nbytes, 0xA5, np.uint8)
            found = arenas[stream] = Arena(nbytes, memory.ctypes.data, memory, where, True)
        found.owner[:] = 0xA5
        return found

    monkeypatch.setattr(call.scratch, "arena", arena, raising=False)
    for operation in Operation.__subclasses__():
        for name in ("forward", "backward"):
            monkeypatch.setattr(operation, name, lending(getattr(operation, name), lent))
    assert step() == want
    assert arenas


def lending(function, lent):
    @functools.wraps(function)
    def call(self, plan, *args):
        lent.append(type(self).__name__)
        try:
            return function(self, plan, *args)
        finally:
            lent.pop()

    return call
