"""Recomputation gives the same bits as none: outputs, gradients, FP8 state and random state, nested and under
autocast."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autocast import autocast
from fp8kit.autograd import no_grad, tensor
from fp8kit.errors import AutogradError, Fp8kitError
from fp8kit.optim import SGD
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.support.combinations import combinations
from tests.support.layers import draw
from tests.support.products import bits

RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
H = 32


class Net(nn.Module):
    """Two layers with dropout; ``how`` says what is checkpointed."""

    def __init__(self, how, device):
        options = {
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "params_dtype": "bfloat16",
            "device": device,
        }
        self.a = nn.TransformerLayer(H, 2 * H, 2, **options)
        self.b = nn.TransformerLayer(H, 2 * H, 2, **options)
        self.how = how
        if how in ("mlp", "both"):
            self.a.layernorm_mlp.checkpoint = self.b.layernorm_mlp.checkpoint = True

    def forward(self, x, first):
        if self.how == "each":
            return fk.checkpoint(
                self.b, fk.checkpoint(self.a, x, is_first_microbatch=first), is_first_microbatch=first
            )
        if self.how == "nested":
            return fk.checkpoint(
                lambda v: fk.checkpoint(
                    self.b, self.a(v, is_first_microbatch=first), is_first_microbatch=first
                ),
                x,
            )
        return self.b(self.a(x, is_first_microbatch=first), is_first_microbatch=first)


def run(how, recipe, device, micro):
    """Two steps of two microbatches; everything that must not depend on ``how``."""
    nn.manual_seed(7)
    net = Net(how, device)
    opt, seen = SGD(net.parameters(), lr=0.1, momentum=0.9), []
    for step in range(2):
        for part in range(2):
            x = tensor(draw(10 * step + part, (16, 2, H), "bfloat16"), requires_grad=True, device=device)
            with autocast(enabled=recipe is not None, recipe=recipe):
                y = net(x, (part == 0) if micro else None)
                # twice in one graph: gradients and amaxes of both uses meet
                y = net(y, False if micro else None)
            y.backward(draw(99, (16, 2, H), "bfloat16"))
            seen += [y.numpy().tobytes(), x.grad.numpy().tobytes()]
        seen += [p.grad.numpy().tobytes() for p in net.parameters()]
        opt.step()
        opt.zero_grad()
    return seen, bits(net.state_dict()), bits(nn.get_rng_state())


@combinations(
    {"recipe": RECIPES.keys(), "micro": {"": False, "microbatches": True}}, usual=["delayed-microbatches"]
)
def test_same_bits_as_without(device, recipe, micro):
    with fk.deterministic():
        plain = run("plain", RECIPES[recipe], device, micro)
        for how in ("each", "nested", "mlp", "both"):
            assert run(how, RECIPES[recipe], device, micro) == plain, how


def test_calibrating_and_inference(device):
    recipe = DelayedScaling(amax_history_len=2)
    states = []
    for how in ("plain", "each"):
        nn.manual_seed(3)
        net = Net(how, device)
        x = tensor(draw(1, (16, 2, H), "bfloat16"), requires_grad=True, device=device)
        with autocast(enabled=False, calibrating=True, recipe=recipe):
            y = net(x, None)
        y.backward(draw(2, (16, 2, H), "bfloat16"))
        with no_grad(), autocast(recipe=recipe):
            z = net.eval()(x, None)
        states.append(
            (bits(net.state_dict()), x.grad.numpy().tobytes(), y.numpy().tobytes(), z.numpy().tobytes())
        )
    assert states[0] == states[1]


def test_the_autocast_may_be_inside_and_the_policy_is_restored(device):
    recipe, grads = DelayedScaling(amax_history_len=2), []
    for wrap in (lambda f, x: f(x), fk.checkpoint):
        nn.manual_seed(3)
        layer = nn.Linear(H, H, device=device)
        x = tensor(draw(1, (16, H), "float32"), requires_grad=True, device=device)

        def inside(v, layer=layer):
            with autocast(recipe=recipe):
                return layer(v)

        with fk.deterministic():
            outs = [wrap(inside, x) for _ in range(2)]
        for y in outs:
            y.backward(draw(2, (16, H), "float32"))
        grads.append(
            (x.grad.numpy().tobytes(), layer.weight.grad.numpy().tobytes(), bits(layer.state_dict()))
        )
    assert grads[0] == grads[1]


def test_nothing_is_kept_between(device):
    """What the function computes is alive neither after the forward pass nor after backward."""
    import weakref

    alive = []
    layer = nn.Linear(H, H, device=device)

    def function(x):
        middle = layer(x)
        alive.append(weakref.ref(middle))
        return layer(middle)

    x = tensor(draw(1, (4, H), "float32"), requires_grad=True, device=device)
    y = fk.checkpoint(function, x)
    assert [ref() for ref in alive] == [None]
    y.backward(draw(2, (4, H), "float32"), retain_graph=True)
    first = x.grad.numpy().copy()
    y.backward(draw(2, (4, H), "float32"))
    np.testing.assert_array_equal(x.grad.numpy(), first + first)
    assert [ref() for ref in alive] == [None] * 3
    with pytest.raises(AutogradError, match="already run"):
        y.backward(draw(2, (4, H), "float32"))


def test_nests_of_results_and_values_that_need_no_gradient(device):
    x = tensor(draw(1, (4, H), "float32"), requires_grad=True, device=device)
    still = tensor(draw(2, (4, H), "float32"), device=device)
    out = fk.checkpoint(lambda a, *, b: {"sum": a + b, "parts": (a, [b, "word"])}, x, b=still)
    assert out["parts"][1][1] == "word"
    (out["sum"] + out["parts"][0]).backward(np.ones((4, H), np.float32))
    np.testing.assert_array_equal(x.grad.numpy(), 2)
    assert not fk.checkpoint(lambda a: a + a, still).requires_grad
    with no_grad():
        assert not fk.checkpoint(lambda a: a + a, x).requires_grad
    with pytest.raises(Fp8kitError, match="function"):
        fk.checkpoint(3, x)


def test_changes_between_the_passes_are_errors(device):
    layer = nn.Linear(H, H, bias=False, device=device)
    x = tensor(draw(1, (4, H), "float32"), requires_grad=True, device=device)
    g = draw(2, (4, H), "float32")

    y = fk.checkpoint(layer, x)
    with no_grad():
        x.add_(x)
    with pytest.raises(AutogradError, match="checkpoint: argument 0"):
        y.backward(g)

    y = fk.checkpoint(layer, x)
    with no_grad():
        layer.weight.zero_()
    with pytest.raises(AutogradError, match="linear: weight"):
        y.backward(g)

    calls = []
    y = fk.checkpoint(lambda v: calls.append(0) or (layer(v), v)[: len(calls)], x)
    with pytest.raises(AutogradError, match="the second time"):
        y[0].backward(g)

    other = nn.Linear(H, H, bias=False, device=device)
    calls.clear()
    with autocast():
        y = fk.checkpoint(lambda v: calls.append(0) or (layer, other)[len(calls) - 1](v), x)
    before = bits(layer.state_dict())
    with pytest.raises(AutogradError, match="same layers in the same order"):
        y.backward(g)
    assert bits(layer.state_dict()) == before


def test_backward_of_the_function_failing_restores_what_was(device):
    layer, dropout = nn.Linear(H, H, device=device), nn.Dropout(0.5)
    x = tensor(draw(1, (4, H), "float32"), requires_grad=True, device=device)
    calls = []

    def function(v):
        calls.append(0)
        y = dropout(layer(v))
        if len(calls) == 2:
            raise ZeroDivisionError
        return y

    with autocast():
        y = fk.checkpoint(function, x)
    before = bits(nn.get_rng_state()), bits(layer.state_dict())
    with pytest.raises(ZeroDivisionError):
        y.backward(draw(2, (4, H), "float32"))
    assert (bits(nn.get_rng_state()), bits(layer.state_dict())) == before
    assert x.grad is None
    from fp8kit.autocast import current

    assert current() is None


def test_other_threads_may_draw_between(device):
    """Between the passes' start and their draws others draw: the second pass has the first one's numbers all
    the same."""

    def others():
        thread = threading.Thread(target=lambda: nn.random.next_rng(arrays.device(device)))
        thread.start()
        thread.join()

    def gradient(again):
        nn.manual_seed(4)
        layer = nn.TransformerLayer(H, 2 * H, 2, hidden_dropout=0.3, attention_dropout=0.3, device=device)
        x = tensor(draw(1, (8, 2, H), "float32"), requires_grad=True, device=device)

        def function(v):
            others()
            return layer(v)

        y = fk.checkpoint(function, x) if again else function(x)
        y.backward(draw(2, (8, 2, H), "float32"))
        return [
            y.numpy().tobytes(),
            x.grad.numpy().tobytes(),
            *(p.grad.numpy().tobytes() for p in layer.parameters()),
        ]

    with fk.deterministic():
        assert gradient(True) == gradient(False)


def test_a_second_pass_that_draws_more_is_refused(device):
    times = []

    def function(v):
        times.append(0)
        for _ in times:
            nn.random.next_rng(v.device)
        return v + v

    x = tensor(np.ones(3, np.float32), requires_grad=True, device=device)
    with pytest.raises(
        AutogradError,
        match=r"another draw on .*, expected as many draws on the same devices as in the first pass",
    ):
        fk.checkpoint(function, x).backward(np.ones(3, np.float32))
