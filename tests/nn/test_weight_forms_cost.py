"""What FP8 weights that the optimiser writes cost: memory that is used again, calls of the engine, nothing
where they are not used."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import Tensor
from fp8kit.autograd.derived import renewing
from fp8kit.backends import dispatch
from fp8kit.errors import Fp8kitError
from fp8kit.optim import AdamW
from fp8kit.testing import assert_same_bits
from tests.nn.test_weight_forms import RECIPES, TOKENS, H, Net, World


def test_memory_is_used_again(device):
    world = World(device, True)
    places = set()
    for _ in range(4):
        world.step()
        places.add(world.net.out._form.written.arrays["w_q"].ptr)
    y = world.forward()
    world.backward(y)
    world.update()  # what came out of the pass does not keep what it was computed from
    places.add(world.net.out._form.written.arrays["w_q"].ptr)
    assert len(places) == 1
    y = world.forward()
    codes = world.net.out._form.written.arrays["w_q"]
    before = codes.numpy().copy()
    world.opt.param_groups[0]["params"][0].grad = world.net.qkv.query_weight.view
    for p in world.net.parameters():
        p.grad = p.view
    world.update()
    # the pass may yet be gone back through
    assert world.net.out._form.written.arrays["w_q"].ptr not in places
    assert_same_bits("codes", codes.numpy(), before)
    assert isinstance(y, Tensor)


def counting(calls, name, function):
    def counted(*given):
        calls.update([name])
        function(*given)

    return counted


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_calls_of_a_step(name, monkeypatch):
    """Whatever the number of layers, one cast; no layer casts a weight."""
    nets = [Net("cpu") for _ in range(4)]
    opt = AdamW([p for net in nets for p in net.parameters()], write_fp8_weights=True)
    calls = Counter()

    def step():
        with fk.autocast(recipe=RECIPES[name]):
            x = fk.tensor(np.ones((TOKENS, H), np.float32), dtype="bfloat16", device="cpu")
            for net in nets:
                x = net(x)
        x.backward(x.view)
        opt.step()
        opt.zero_grad()

    step()
    kernels = dispatch.kernels(arrays.CPU)
    for kernel in (
        "amax",
        "amax_many",
        "scale_from_amax",
        "quantize_transpose",
        "quantize_transpose_many",
        "block_quantize",
        "block_quantize_many",
    ):
        monkeypatch.setattr(kernels, kernel, counting(calls, kernel, getattr(kernels, kernel)))
    step()
    gemms = 4 * len(nets)
    if name == "block":
        assert calls == {"block_quantize": 2 * gemms, "block_quantize_many": 1}  # of inputs and of gradients
    else:
        assert calls["quantize_transpose_many"] == calls["amax_many"] == 1
        assert calls["quantize_transpose"] <= 2 * gemms
        # of the weights; the other casts make theirs themselves
        assert calls["scale_from_amax"] == (name == "current")


def test_without_fp8_it_is_nothing():
    layer = nn.Linear(H, H, device="cpu")
    opt = AdamW(layer.parameters(), write_fp8_weights=True)
    layer(np.ones((4, H), np.float32)).backward(np.ones((4, H), np.float32))
    opt.step()
    assert layer.weight._derived is None
    renewing(layer.parameters())()
    with pytest.raises(Fp8kitError, match="write_fp8_weights"):
        AdamW(layer.parameters(), write_fp8_weights="yes")


def test_what_is_not_used_is_given_up(device):
    """A layer that went on without FP8 is written no more; once it comes back, again."""
    world = World(device, True)
    world.step()
    form = world.net.out._form
    for i in range(6):
        world.backward(world.net(world.draw()))
        world.update()
        assert (form.written is None) == (i > 1)
    world.step()
    assert form.written is not None


def test_what_others_change_is_given_up(device):
    """An optimiser that writes nothing goes on with the weights."""
    world = World(device, True)
    for _ in range(2):
        world.step()
    form = world.net.out._form
    assert form.written is not None
    world.opt = AdamW(world.net.parameters(), lr=1e-2)
    for _ in range(2):
        world.step()
    assert form.written is None
    assert form._room is None
