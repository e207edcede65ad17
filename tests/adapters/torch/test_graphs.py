"""make_graphed_callables: replays give the same bits as eager steps, FP8 state included."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from fp8kit_torch import LayerNormMLP, Linear, TransformerLayer, autocast, make_graphed_callables

import fp8kit as fk
from fp8kit.errors import BackendError, RecipeError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing.compare import assert_same_bits

K, ROWS = 64, 32
RECIPES = {"delayed": DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling()}


def net():
    torch.manual_seed(0)
    layers = (
        Linear(K, 96, device="cuda"),
        torch.nn.GELU(),
        Linear(96, K, device="cuda"),
        LayerNormMLP(K, 128, device="cuda"),
    )
    return torch.nn.Sequential(*layers)


def sample():
    return (torch.randn(ROWS, K, device="cuda", requires_grad=True),)


def steps(call, model, recipe):
    opt, out = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for step in range(5):
        x = torch.randn(
            ROWS, K, device="cuda", generator=torch.Generator("cuda").manual_seed(step), requires_grad=True
        )
        opt.zero_grad(set_to_none=False)
        with autocast(recipe=recipe):
            y = call(x)
        y.square().mean().backward()
        opt.step()
        out += [y.detach().clone(), x.grad.clone()]
    out += [p.detach().clone() for p in model.parameters()]
    return out + [
        part.clone() for m in model.modules() for s in getattr(m, "fp8_meta", {}).values() for part in s.parts
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_replays_equal_eager_steps(name):
    with fk.deterministic():
        model = net()
        twin = copy.deepcopy(model)
        graphed = make_graphed_callables(model, sample(), enabled=True, recipe=RECIPES[name])
        assert graphed is model
        assert all(p.grad is None for p in model.parameters())
        for i, (a, b) in enumerate(
            zip(steps(graphed, model, RECIPES[name]), steps(twin, twin, RECIPES[name]), strict=True)
        ):
            assert_same_bits(f"result {i}", a.cpu().numpy(), b.cpu().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*RECIPES.values(), Float8BlockScaling()], ids=[*RECIPES, "block"])
def test_a_captured_training_step_has_the_bits_of_eager_ones(recipe):
    """``torch.cuda.graph`` around forward, loss, backward, the optimiser's step and the updates of the
    scales."""
    warm, inputs = 3, [torch.randn(8, 2, K, device="cuda") * 2.0**i for i in range(7)]

    def stepper(model):
        opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

        def step(x):
            opt.zero_grad()
            with autocast(recipe=recipe):
                y = model(x)
            y.square().mean().backward()
            opt.step()
            return y

        return step

    def all_of(model, y):
        states = [
            part for m in model.modules() for s in getattr(m, "fp8_meta", {}).values() for part in s.parts
        ]
        return [
            t.detach().cpu().numpy()
            for t in (y, *model.parameters(), *(p.grad for p in model.parameters()), *states)
        ]

    with fk.deterministic():
        torch.manual_seed(0)
        model = TransformerLayer(K, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cuda")
        twin = copy.deepcopy(model)
        step, eager, x = stepper(model), stepper(twin), torch.empty_like(inputs[0])
        wanted = [all_of(twin, eager(given)) for given in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for given in inputs[:warm]:
                step(x.copy_(given))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step(x)
        for i, given in enumerate(inputs[warm:], warm):
            x.copy_(given)
            graph.replay()
            for j, (a, b) in enumerate(zip(all_of(model, y), wanted[i], strict=True)):
                assert_same_bits(f"step {i}, result {j}", a, b)


@pytest.mark.gpu
def test_another_recipe_is_refused():
    graphed = make_graphed_callables(net(), sample(), enabled=True, recipe=RECIPES["delayed"])
    with autocast(recipe=DelayedScaling(amax_history_len=7)), pytest.raises(RecipeError, match="as captured"):
        graphed(torch.randn(ROWS, K, device="cuda"))


def test_a_cpu_has_no_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    layer = Linear(K, K, device="cpu")
    with pytest.raises(BackendError, match="no CUDA device"):
        make_graphed_callables(layer, (torch.randn(2, K),), enabled=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match="fp8_enabled"):
        make_graphed_callables(layer, (torch.randn(2, K),), enabled=True, fp8_enabled=True)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["counted", "collected", "outlived"])
def test_a_native_graph_that_is_let_go_does_not_end_a_capture(how):
    """Its memory is freed and its graph destroyed, perhaps by the collector, while torch captures on this
    thread. A gradient that it has left keeps its memory, which goes with the gradient, in a cycle:
    "outlived"."""
    layers = fk.nn.Sequential(*[fk.nn.Linear(K, K, device="cuda") for _ in range(3)])
    x, given = fk.tensor(np.ones((ROWS, K), np.float32), device="cuda"), torch.ones(4, device="cuda")

    def step(x):
        layers.zero_grad()
        y = layers(x)
        y.backward(x)
        return y

    call = fk.graph(step)
    for _ in range(4):
        call(x)
    wanted = [fk.arrays.as_view(p.grad).numpy().copy() for p in layers.parameters()]
    cycle = [call]
    if how == "collected":
        cycle.append(cycle)
    elif how == "outlived":
        cycle = [layers]
        cycle.append(cycle)
        del call, step, layers
    gc.collect()  # graphs of torch's own that others have left: these do end a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call = cycle = None
        gc.collect()
        gc.collect()
        doubled = given * 2
    graph.replay()
    assert doubled.tolist() == [2.0] * 4
    fk.tensor(np.full(2**22, np.nan, np.float32), device="cuda")  # whoever had freed memory would see it
    if how == "outlived":
        return
    for p, was in zip(layers.parameters(), wanted, strict=True):
        assert_same_bits("gradient", fk.arrays.as_view(p.grad).numpy(), was)
    layers.zero_grad()
    gc.collect()
