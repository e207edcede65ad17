"""checkpoint: the same bits as without, in outputs, gradients, scales and histories."""

from __future__ import annotations

import functools

import pytest
import torch
from fp8kit_torch import CudaRNGStatesTracker, GroupedLinear, LayerNormMLP, Linear, autocast, checkpoint, checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fp8kit.errors import AutogradError, Fp8kitError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing.compare import assert_same_bits

from .twins import RECIPES as ALL
from .twins import batches, same, torch_step, twins

K = 32
RECIPES = {"delayed": DelayedScaling(amax_history_len=3), "current": Float8CurrentScaling(), "plain": None}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


class Split(GroupedLinear):
    """With 8 rows a group."""

    def forward(self, x):
        return super().forward(x, [8, 8])


class Net(torch.nn.Module):
    """``inside``: the autocast is opened within the checkpointed part."""

    def __init__(self, place, recipe, inside, how):
        super().__init__()
        self.a, self.b = Linear(K, 48, device=place), Linear(48, K, device=place)
        self.mlp = LayerNormMLP(K, 64, device=place)
        self.recipe, self.inside, self.how = recipe, inside, how

    def scope(self, on):
        return autocast(enabled=self.recipe is not None and on, recipe=self.recipe)

    def block(self, x, first=None):
        with self.scope(True) if self.inside else self.scope(self.recipe is not None):
            y = self.b(torch.nn.functional.dropout(self.a(x, first), 0.3), first)
            return x + self.mlp(y, first)

    def forward(self, x, first=None):
        if self.how is None:
            return self.block(self.block(x, first).tanh(), first)
        if self.how == "nested":
            inner = lambda t: checkpoint(self.block, t, first=first, use_reentrant=False)  # noqa: E731
            return checkpoint(lambda t: inner(inner(t).tanh()), x, use_reentrant=False)
        if self.how == "torch":
            own = functools.partial(torch_checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)
            return own(self.block, own(self.block, x, first=first).tanh(), first=first)
        reentrant = self.how == "reentrant"
        x = checkpoint(self.block, x, first=first, use_reentrant=reentrant)
        return checkpoint(self.block, x.tanh(), first=first, use_reentrant=reentrant)


def steps(place, recipe, inside, how, micro, walks=1):
    torch.manual_seed(0)
    net = Net(place, RECIPES[recipe], inside, how)
    out = []
    for step in range(3):
        x = torch.randn(16, K, device=place, requires_grad=True)
        with autocast(enabled=not inside and recipe != "plain", recipe=RECIPES[recipe]):
            y = net(x, step == 0 if micro else None)
        net.zero_grad()
        loss = y.square().sum()
        for walk in range(walks):
            loss.backward(retain_graph=walk + 1 < walks)
        out += [y, x.grad, *(p.grad for p in net.parameters())]
        out += [part.clone() for m in net.modules() for s in getattr(m, "fp8_meta", {}).values() for part in s.parts]
    return [t.detach().clone().cpu().numpy() for t in out]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("how", ["reentrant", "other", "nested", "torch"])
def test_same_bits(place, recipe, inside, how):
    wanted = steps(place, recipe, inside, None, False)
    got = steps(place, recipe, inside, how, False)
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(f"result {i}", a, b)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["other", "nested", "torch"])
def test_a_retained_graph_is_recomputed_each_time(place, recipe, how):
    wanted, got = (steps(place, recipe, False, way, False, walks=2) for way in (None, how))
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(f"result {i}", a, b)


@pytest.mark.parametrize("how", ["reentrant", "other", "torch"])
def test_cached_weights_are_those_of_the_first_pass(place, how):
    for i, (a, b) in enumerate(zip(steps(place, "delayed", False, how, True), steps(place, "delayed", False, None, True), strict=True)):
        assert_same_bits(f"result {i}", a, b)


@pytest.mark.parametrize("first", [None, True], ids=["plain", "cached"])
@pytest.mark.parametrize("recipe", ALL)
def test_a_whole_layer(place, recipe, first):
    plain, _ = twins("TransformerLayer", place, hidden_dropout=0.2)
    other, _ = twins("TransformerLayer", place, hidden_dropout=0.2)
    other.load_state_dict(plain.state_dict())

    def again(x):
        return checkpoint(other, x, is_first_microbatch=first)

    for seed, x in enumerate(batches(place)):
        torch.manual_seed(seed)
        y, dx, grads, g = torch_step(plain, plain, ALL[recipe], x, torch.ones_like(x), is_first_microbatch=first)
        torch.manual_seed(seed)
        y2, dx2, grads2, _ = torch_step(other, again, ALL[recipe], x, g)
        same(y2, y, "y")
        same(dx2, dx, "dx")
        for name, grad in grads.items():
            same(grads2[name], grad, name)
        for path, module in plain.named_modules():
            if hasattr(module, "fp8_meta"):
                same(other.get_submodule(path).get_extra_state(), module.get_extra_state(), path)


def test_it_keeps_the_input_alone(place):
    layer = LayerNormMLP(K, 64, device=place)
    x = torch.randn(64, K, device=place, requires_grad=True)

    def saved(function):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel() * t.element_size()) or t, lambda t: t):
            function(x)
        return sum(sizes)

    assert saved(lambda x: checkpoint(layer, x)) <= x.numel() * 4 < saved(layer)


@pytest.mark.parametrize("make", [lambda d: LayerNormMLP(K, 64, device=d), lambda d: Split(2, K, 64, device=d)], ids=["mlp", "grouped"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_torchs_own_reentrant_one_is_refused_where_it_would_leave_fp8(place, recipe, make):
    """Its second pass runs outside of the autocast: gradients of another pass than the one that gave the loss."""
    layer, x = make(place), torch.randn(16, K, device=place, requires_grad=True)
    with autocast(recipe=RECIPES[recipe]):
        y = torch_checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(AutogradError, match=r": autocast: got none in the second pass of torch\.utils\.checkpoint"):
        y.sum().backward()
    with torch.no_grad(), autocast(recipe=RECIPES[recipe]):
        layer(x)
    layer(x).sum().backward()  # FP8 in evaluation, and training in high precision
    plain = x.grad.clone()
    x.grad = None
    torch_checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert_same_bits("dx", x.grad.cpu().numpy(), plain.cpu().numpy())


def test_compiled_it_says_what_it_does_not_do(place):
    layer = Linear(K, K, device=place)
    with pytest.raises(Exception, match=r"checkpoint is not supported within torch\.compile"):
        torch.compile(lambda x: checkpoint(layer, x), fullgraph=True, backend="aot_eager")(torch.randn(4, K, device=place))


@pytest.mark.parametrize("reentrant", [True, False])
def test_tracked_random_states_are_drawn_again(place, reentrant):
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    start = tracker.get_states()
    drawn = []

    def noisy(x):
        with tracker.fork():
            drawn.append(torch.rand(4, device=place))
        return x * drawn[-1]

    x = torch.ones(4, device=place, requires_grad=True)
    checkpoint(noisy, x, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker).sum().backward()
    assert_same_bits("numbers", drawn[1].cpu().numpy(), drawn[0].cpu().numpy())
    assert_same_bits("dx", x.grad.cpu().numpy(), drawn[0].cpu().numpy())
    once = CudaRNGStatesTracker()
    once.set_states(start)
    with once.fork():
        torch.rand(4, device=place)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], once.get_states()["model-parallel-rng"])


def test_without_gradients_it_is_a_plain_call_and_wrong_use_is_refused():
    layer, x = Linear(K, K, device="cpu"), torch.randn(4, K, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(checkpoint(layer, x), layer(x))
    with pytest.raises(Fp8kitError, match="function"):
        checkpoint(3, x)
    with pytest.raises(Fp8kitError, match="distribute_saved_activations"):
        checkpoint(layer, x, distribute_saved_activations=True)
    with pytest.raises(Fp8kitError, match="debug"):
        checkpoint(layer, x, debug=True)
    other, calls = Linear(K, K, device="cpu"), []

    def fickle(t):
        calls.append(1)
        return (layer if len(calls) == 1 else other)(t)

    with autocast():
        y = checkpoint(fickle, x)
    with pytest.raises(AutogradError, match="same layers"):
        y.sum().backward()
