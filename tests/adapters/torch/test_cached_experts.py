"""Experts whose weights micro-batches share in FP8, with sizes on the device; eagerly, and as CUDA graphs. On
a CPU an object stands in a graph's place, as in ``test_graphed_calls``."""

from __future__ import annotations

import copy
from functools import partial

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import checks, graph_capture, graphs, grouped_on_device

from fp8kit.errors import ArgumentError, FormatError
from fp8kit.recipe import Float8BlockScaling, Float8CurrentScaling
from tests.support.combinations import combinations

from .replayed import Again

E, K, N, ROWS = 4, 48, 64, 40
RECIPES = {"current": Float8CurrentScaling(), "block": Float8BlockScaling()}
ONE = {"single_grouped_weight": True, "single_grouped_bias": True}
SIZES = [(7, 0, 20, 6), (0, 13, 13, 14), (40, 0, 0, 0)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


def module(place, kind=ft.GroupedLinear, **options):
    torch.manual_seed(0)
    return kind(E, K, N, params_dtype=torch.bfloat16, device=place, use_grouped_tensor=True, **options)


def batch(layer, seed):
    """x, the sizes of groups, and y's gradient."""
    host = torch.Generator("cpu").manual_seed(seed)
    wide = K if isinstance(layer, ft.GroupedMLP) else N
    place = next(layer.parameters()).device
    x, g = (torch.randn(ROWS, n, generator=host).to(place, torch.bfloat16) for n in (K, wide))
    sizes = torch.tensor(SIZES[seed % len(SIZES)], dtype=torch.int32, device=place)
    return x.requires_grad_(), sizes, g


def trained(layer, recipe, firsts, call=None):
    """Outputs and gradients of micro-batches, of which each says whether it is a step's first, or None."""
    made = []
    for seed, first in enumerate(firsts):
        x, sizes, g = batch(layer, seed)
        with ft.autocast(recipe=recipe):
            y = (layer if call is None else call)(x, sizes, is_first_microbatch=first)
        y.backward(g)
        made += [y.detach().clone(), x.grad]
    return made + [p.grad.clone() for p in layer.parameters()]


def same(got, want):
    assert [i for i, pair in enumerate(zip(got, want, strict=True)) if not torch.equal(*pair)] == []


@combinations(
    {
        "recipe": RECIPES.keys(),
        "kind": [ft.GroupedLinear, ft.GroupedMLP],
        "options": {"several": {}, "one": ONE},
    }
)
def test_shared_casts_give_the_same_bits(place, recipe, kind, options):
    made = [
        trained(module(place, kind, **options), RECIPES[recipe], firsts)
        for firsts in ([None] * 3, [True, False, False])
    ]
    same(*made)


def test_later_micro_batches_read_the_first_ones_weights(place):
    layer, recipe = module(place), RECIPES["current"]
    x, sizes, _ = batch(layer, 1)

    def y(first, recipe=recipe):
        with ft.autocast(recipe=recipe):
            return layer(x, sizes, is_first_microbatch=first).detach()

    was = y(True)
    with torch.no_grad():
        layer.weight2.mul_(-1)
    assert torch.equal(y(False), was)
    now = y(None)
    assert not torch.equal(now, was)
    assert torch.equal(y(False), was)  # None keeps nothing
    assert torch.equal(y(False, RECIPES["block"]), y(None, RECIPES["block"]))  # none by this recipe
    assert torch.equal(y(True), now)
    assert torch.equal(y(False), now)
    host = layer(x, sizes.tolist(), is_first_microbatch=False)  # in high precision
    layer.sizes_on_device = False
    with ft.autocast(recipe=recipe):  # casts of single weights are others
        by_groups = [layer(x, sizes.tolist(), is_first_microbatch=first) for first in (False, True)]
    assert torch.equal(*by_groups)
    assert not torch.equal(by_groups[0], host)


def test_a_refused_call_changes_no_shared_cast(place):
    layer = module(place)
    x, sizes, _ = batch(layer, 1)
    with ft.autocast(recipe=RECIPES["current"]):
        was = layer(x, sizes, is_first_microbatch=True).detach()
        with torch.no_grad():
            layer.weight1.mul_(3)
        with pytest.raises(FormatError, match="x"):
            layer(x.float(), sizes, is_first_microbatch=True)
        if place == "cpu":  # where sizes are looked at
            with pytest.raises(ArgumentError, match="m_splits"):
                layer(x, sizes + ROWS, is_first_microbatch=True)
        assert torch.equal(layer(x, sizes, is_first_microbatch=False), was)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wants", ["nothing", "weights", "x"])
def test_shared_casts_where_less_is_differentiated(place, recipe, wants):
    made = []
    for firsts in ([None, None], [True, False]):
        layer = module(place)
        layer.requires_grad_(wants == "weights")
        for seed, first in enumerate(firsts):
            x, sizes, g = batch(layer, seed)
            x.requires_grad_(wants == "x")
            with ft.autocast(recipe=RECIPES[recipe]):
                y = layer(x, sizes, is_first_microbatch=first)
            if y.requires_grad:
                y.backward(g)
            made += [t.detach() for t in (y, x.grad) if t is not None]
        made += [p.grad for p in layer.parameters() if p.grad is not None]
    half = len(made) // 2
    same(made[:half], made[half:])


def test_a_checkpoint_casts_them_once(place, monkeypatch):
    layer, casts = module(place), []
    cast = grouped_on_device.expert_weight_cast
    forward = type(cast).forward
    monkeypatch.setattr(type(cast), "forward", lambda *given: (casts.append(1), forward(*given)))
    want = trained(module(place), RECIPES["current"], [True, False])
    casts.clear()

    def again(*given, **named):
        return torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False, **named)

    same(trained(layer, RECIPES["current"], [True, False], again), want)
    assert len(casts) == 1 if place == "cpu" else len(casts) <= 1  # a GPU may replay a recording


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoints_later_pass_reads_the_codes_of_the_first(place, reentrant):
    made = []
    for recomputed in (False, True):
        layer = module(place)
        x, sizes, g = batch(layer, 1)
        call = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=reentrant)

        def y(call, x=x, sizes=sizes):
            with ft.autocast(recipe=RECIPES["current"]):
                return call(x, sizes, True)

        first = y(call if recomputed else layer)
        with torch.no_grad():
            layer.weight1.mul_(3)
        later = y(layer)
        first.backward(g)
        made += [first.detach(), later.detach(), x.grad, *(p.grad for p in layer.parameters())]
    half = len(made) // 2
    same(made[:half], made[half:])


@combinations(
    {
        "recipe": RECIPES.keys(),
        "kind": [ft.GroupedLinear, ft.GroupedMLP],
        "options": {"several": {}, "one": ONE},
    },
    usual=(),  # test_compiled_later_micro_batches_cast_no_weight
)
def test_compiled_micro_batches_share_casts(place, recipe, kind, options):
    """With the bits of eager ones."""
    firsts = [True, False, False, None, True, False]
    layer = module(place, kind, **options)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same(
        trained(layer, RECIPES[recipe], firsts, call),
        trained(module(place, kind, **options), RECIPES[recipe], firsts),
    )


@pytest.mark.combinations
def test_compiled_later_micro_batches_read_the_first_ones_weights(place):
    layer, other = module(place), RECIPES["block"]
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, sizes, _ = batch(layer, 1)

    def y(function, first, recipe=RECIPES["current"]):
        with ft.autocast(enabled=recipe is not None, recipe=recipe):
            return function(x, sizes, is_first_microbatch=first).detach()

    was = y(call, True)
    with torch.no_grad():
        layer.weight2.mul_(-1)
    for function in (call, layer):
        assert torch.equal(y(function, False), was)
    now = y(layer, None)
    assert torch.equal(y(call, None), now)
    assert not torch.equal(now, was)
    assert torch.equal(y(call, False, None), y(layer, None, None))  # in high precision
    assert torch.equal(y(call, False), was)
    assert torch.equal(y(layer, True), now)  # eagerly cast, read by what is compiled
    with torch.no_grad():
        layer.weight2.mul_(-1)
    assert torch.equal(y(call, False), now)
    assert torch.equal(y(call, False, other), y(layer, None, other))  # none by this recipe


def test_compiled_later_micro_batches_cast_no_weight(monkeypatch):
    """And have the bits of eager ones, with gradients."""
    layer, casts = module("cpu"), []
    call = torch.compile(layer, fullgraph=True, backend="eager")
    firsts, recipe = [True, False, False, True], RECIPES["current"]
    want = trained(module("cpu"), recipe, firsts)
    kind = type(grouped_on_device.expert_weight_cast)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given: (casts.append(1), forward(*given)))
    counts = []

    def counted(*given, **named):
        y = call(*given, **named)
        counts.append(len(casts))
        return y

    same(trained(layer, recipe, firsts, counted), want)
    assert counts == [1, 1, 1, 2]


@pytest.mark.parametrize("first", [None, True, False])
def test_nothing_reads_the_sizes(place, first, monkeypatch):
    """No value goes from the device to the host: a CUDA graph can hold a step."""
    layer = module(place, ft.GroupedMLP)
    monkeypatch.setitem(checks.CALLED, "m_splits", lambda *given: None)  # which reads those on a CPU
    trained(layer, RECIPES["current"], [first])
    layer.zero_grad()

    def read(*given):
        raise AssertionError("a value was read")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__int__", "__index__", "__bool__", "__float__"):
            patch.setattr(torch.Tensor, name, read)
        made = trained(layer, RECIPES["current"], [first])
    assert all(t.isfinite().all() for t in made)


@combinations(
    {
        "recipe": RECIPES.keys(),
        "options": {"several": {}, "one": ONE},
        "caching": {"cast at each call": False, "cast once": True},
    }
)
def test_graphed_callables_follow_other_sizes(place, recipe, options, caching, monkeypatch):
    """The graphs of one call's sizes do those of others, with the bits of eager calls."""
    layer = module(place, ft.GroupedMLP, bias=False, **options)
    twin = copy.deepcopy(layer)
    if place == "cpu":
        own = {"layers": [layer.fc1, layer.fc2]} if caching else {}
        monkeypatch.setattr(graph_capture, "Graph", type("Replayed", (Again,), own))
        monkeypatch.setattr(graphs, "want_device", lambda *given: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    x, sizes, _ = batch(layer, 2)
    ft.make_graphed_callables(
        layer, (x, sizes), enabled=True, recipe=RECIPES[recipe], cache_quantized_params=caching
    )

    def graphed(x, sizes, is_first_microbatch):
        return layer(x, sizes, **({"is_first_microbatch": is_first_microbatch} if caching else {}))

    firsts = [True, False, True, False] if caching else [None] * 4
    same(trained(layer, RECIPES[recipe], firsts, graphed), trained(twin, RECIPES[recipe], firsts))
    for owner in (layer, twin):
        owner.zero_grad()
        with torch.no_grad():
            for parameter in owner.parameters():
                parameter.mul_(1.5)
    same(trained(layer, RECIPES[recipe], firsts, graphed), trained(twin, RECIPES[recipe], firsts))
