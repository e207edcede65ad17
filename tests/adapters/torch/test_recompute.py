"""checkpoint: the same bits as without, in outputs, gradients, scales and histories."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch import CudaRNGStatesTracker, LayerNormMLP, Linear, autocast, checkpoint

from fp8kit.errors import AutogradError, Fp8kitError
from fp8kit.testing.compare import assert_same_bits
from tests.support.combinations import combinations

from .recomputed import RECIPES, K, same_all, steps
from .twins import RECIPES as ALL
from .twins import batches, same, torch_step, twins


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


def reentrant(block, x, first):
    return checkpoint(block, x, first=first, use_reentrant=True)


def other(block, x, first):
    return checkpoint(block, x, first=first, use_reentrant=False)


def nested(block, x, first):
    return other(lambda t, first: other(block, t, first), x, first)


@combinations({"how": [reentrant, other, nested], "where": ["around", "inside"], "recipe": list(RECIPES)})
def test_same_bits(place, recipe, where, how):
    same_all(steps(place, recipe, where, how), steps(place, recipe, where, None))


@combinations({"how": [other, nested], "recipe": list(RECIPES)})
def test_a_retained_graph_is_recomputed_each_time(place, recipe, how):
    same_all(steps(place, recipe, "around", how, passes=2), steps(place, recipe, "around", None, passes=2))


@pytest.mark.parametrize("how", [reentrant, other])
def test_cached_weights_are_those_of_the_first_pass(place, how):
    same_all(
        steps(place, "delayed", "around", how, micro=True),
        steps(place, "delayed", "around", None, micro=True),
    )


@combinations({"recipe": list(ALL), "first": {"plain": None, "cached": True}})
def test_a_whole_layer(place, recipe, first):
    plain, _ = twins("TransformerLayer", place, hidden_dropout=0.2)
    other, _ = twins("TransformerLayer", place, hidden_dropout=0.2)
    other.load_state_dict(plain.state_dict())

    def again(x):
        return checkpoint(other, x, is_first_microbatch=first)

    for seed, x in enumerate(batches(place)):
        torch.manual_seed(seed)
        y, dx, grads, g = torch_step(
            plain, plain, ALL[recipe], x, torch.ones_like(x), is_first_microbatch=first
        )
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
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel() * t.element_size()) or t, lambda t: t
        ):
            function(x)
        return sum(sizes)

    assert saved(lambda x: checkpoint(layer, x)) <= x.numel() * 4 < saved(layer)


def test_compiled_it_says_what_it_does_not_do(place):
    layer = Linear(K, K, device=place)
    with pytest.raises(Exception, match=r"checkpoint is not supported within torch\.compile"):
        torch.compile(lambda x: checkpoint(layer, x), fullgraph=True, backend="aot_eager")(
            torch.randn(4, K, device=place)
        )


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
    with pytest.raises(NotImplementedError, match="checkpoint: distribute_saved_activations: got"):
        checkpoint(layer, x, distribute_saved_activations=True)
    with pytest.raises(Fp8kitError, match="checkpoint: tp_group: got"):
        checkpoint(layer, x, tp_group="model")
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
