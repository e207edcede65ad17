"""``torch.compile(fullgraph=True)``: the eager result and the eager FP8 state, with autocast around the
function or inside of it."""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import fp8kit_torch as ft
import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import fp8kit as fk
from fp8kit.backends import dispatch
from fp8kit.backends import policy as policies
from fp8kit.backends.policy import get_policy
from fp8kit.errors import UnsupportedError
from fp8kit.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, QParams, Recipe
from tests.support.combinations import combinations

from .twins import RECIPES, WIDTH, batches, same, same_steps, torch_step, twins


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


@combinations(
    {"kind": ["Linear", "LayerNormMLP", "TransformerLayer"], "recipe": RECIPES.keys()},
    usual=["Linear-current", "LayerNormMLP-recent"],  # test_quantized_attention has a TransformerLayer
)
def test_autocast_around(device, kind, recipe):
    ours, native = twins(kind, device)
    same_steps(ours, native, compiled(ours), RECIPES[recipe], device, around=RECIPES[recipe])


@combinations(
    {
        "options": {
            "parallel": {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm", "parallel_attention_mlp": True},
            "clamped": {
                "qk_norm_type": "L2Normalization",
                "activation": "clamped_swiglu",
                "activation_params": {"limit": 1.0},
            },
        }
    },
    usual=(),
)
def test_variants(device, options):
    ours, native = twins("TransformerLayer", device, **options)
    same_steps(ours, native, compiled(ours), RECIPES["delayed"], device, around=RECIPES["delayed"])


@combinations(
    {"kind": ["Linear", "TransformerLayer"], "recipe": ["delayed", "current", "block"]},
    usual=(),  # test_a_recipe_made_inside
)
def test_autocast_inside(device, kind, recipe):
    ours, native = twins(kind, device)

    def function(x):
        with ft.autocast(recipe=RECIPES[recipe]):
            return ours(x)

    same_steps(ours, native, compiled(function), RECIPES[recipe], device)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", ["high", "delayed", "current", "block"])
def test_inductor(recipe):
    ours, native = twins("TransformerLayer", "cuda")
    same_steps(ours, native, compiled(ours, "inductor"), RECIPES[recipe], "cuda", around=RECIPES[recipe])


def test_a_recipe_made_inside(device):
    ours, native = twins("Linear", device)

    def function(x):
        with ft.autocast(recipe=DelayedScaling(amax_history_len=3, margin=1)):
            return ours(x)

    same_steps(ours, native, compiled(function), RECIPES["delayed"], device)


# CustomRecipe has no default: it is a function of the user's
KINDS = [
    kind
    for name in ft.__all__
    if isinstance(kind := getattr(ft, name), type) and issubclass(kind, Recipe) and kind is not CustomRecipe
]


@combinations({"kind": KINDS}, usual=())  # test_a_recipe_made_inside
def test_every_recipe_made_inside(device, kind):
    """With its defaults; the result is that of a recipe made outside."""
    layer = ft.Linear(WIDTH, 32, device=device)
    x = torch.randn(16, WIDTH, device=device, requires_grad=True)

    def function(x):
        with ft.autocast(recipe=kind()):
            return layer(x)

    results = []
    for run in (compiled(function), function):
        layer.reset_fp8_meta_tensors()
        y = run(x)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), (x, layer.weight))])
    for got, want in list(zip(*results, strict=True))[: 1 if kind().quantization.needs_rng else None]:
        assert torch.equal(got, want)


# torch.compile looks at it on inputs that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_block_and_a_recipe_of_each_step_compile_nothing_anew(device):
    """An autocast object, and a recipe with the same fields, of its own in each step; another recipe once,
    and the first one again."""
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    layer = torch.compile(ft.Linear(WIDTH, 32, device=device), backend=backend, fullgraph=True)
    x = torch.randn(16, WIDTH, device=device, requires_grad=True)
    for make, count in (
        (lambda: DelayedScaling(amax_history_len=3), 1),
        (Float8CurrentScaling, 2),
        (lambda: DelayedScaling(amax_history_len=3), 2),
    ):
        for _ in range(3):
            with ft.autocast(recipe=make()):
                layer(x).sum().backward()
            assert len(compiled) == count


# Dynamo looks, and hides it from showing only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_share_one_compilation(device):
    def init(weight):
        # keeps the size of what goes through, so that no scale stays at its start
        torch.nn.init.normal_(weight, 0.0, WIDTH**-0.5)

    layers = [ft.Linear(WIDTH, WIDTH, init_method=init, device=device) for _ in range(12)]
    count = CompileCounterWithBackend("eager")
    calls = [torch.compile(layer, fullgraph=True, backend=count) for layer in layers]
    x = torch.randn(4, WIDTH, device=device, requires_grad=True) * 1.0
    with ft.autocast(recipe=RECIPES["delayed"]):
        for function in calls:
            x = function(x)
    x.sum().backward()
    assert count.frame_count == 1
    assert len({layer.fp8_meta["scaling_fwd"].scale[0].item() for layer in layers}) == 12
    assert all((layer.fp8_meta["scaling_bwd"].amax_history[-1, 0] > 0).item() for layer in layers)


def test_second_derivatives_are_refused(device):
    """Also where the ops are called as they are, which torch itself lets pass with a warning."""
    layer = ft.Linear(WIDTH, WIDTH, device=device)
    function = compiled(layer, "eager")
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    for made in (function(x).square().sum(), function(x).sum()):
        (grad,) = torch.autograd.grad(made, x, create_graph=True)
        with pytest.raises(RuntimeError, match="fp8kit_torch: double backward is not supported"):
            (made + grad.square().sum()).backward()


def test_one_module_used_twice(device):
    eager, other = ft.Linear(WIDTH, WIDTH, device=device), ft.Linear(WIDTH, WIDTH, device=device)
    other.load_state_dict(eager.state_dict())

    def twice(module):
        def function(x):
            with ft.autocast(recipe=RECIPES["delayed"]):
                return module(module(x))

        return function

    for x in batches(device):
        y, dx, grads, g = torch_step(eager, twice(eager), None, x)
        yc, dxc, gradsc, _ = torch_step(other, compiled(twice(other)), None, x, g)
        for got, want in ((yc, y), (dxc, dx), (gradsc["weight"], grads["weight"])):
            same(got, want, "twice")
        for name in ("scaling_fwd", "scaling_bwd"):
            same(other.fp8_meta[name].amax_history, eager.fp8_meta[name].amax_history, name)


def pair(kind, device):
    """Two modules with the same parameters."""
    one, _ = twins(kind, device)
    other, _ = twins(kind, device)
    other.load_state_dict(one.state_dict())
    return one, other


def same_as_eager(ours, call_, eager, recipe, device, **options):
    """Four steps, of micro-batches where ``options`` say so: outputs, gradients and FP8 states of both, bit
    for bit."""
    for i, x in enumerate(batches(device, steps=4)):
        given = {name: of(i) for name, of in options.items()}
        y, dx, grads, g = torch_step(eager, eager, recipe, x, **given)
        yc, dxc, gradsc, _ = torch_step(ours, call_, recipe, x, g, **given)
        same(yc, y, "y")
        same(dxc, dx, "dx")
        for name, grad in grads.items():
            same(gradsc[name], grad, name)
        for path, module in eager.named_modules():
            if hasattr(module, "fp8_meta"):
                same(ours.get_submodule(path).get_extra_state(), module.get_extra_state(), path)


@combinations(
    {"kind": ["Linear", "LayerNormMLP", "TransformerLayer"], "recipe": ["delayed", "current", "block"]},
    usual=["Linear-block"],
)
def test_microbatches(device, kind, recipe):
    ours, eager = pair(kind, device)
    same_as_eager(
        ours, compiled(ours), eager, RECIPES[recipe], device, is_first_microbatch=lambda i: i % 2 == 0
    )


@combinations(
    {"kind": ["Linear", "TransformerLayer"], "recipe": ["high", "delayed", "current", "block"]},
    usual=["Linear-delayed"],
)
def test_beside_torchs_autocast(device, kind, recipe):
    ours, eager = pair(kind, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        same_as_eager(ours, compiled(ours), eager, RECIPES[recipe], device)


def test_changing_batch_sizes(device):
    ours, _ = twins("Linear", device)
    call_ = compiled(ours)
    for rows in (5, 7, 9):
        x = torch.randn(rows, WIDTH, device=device)
        eager = torch_step(ours, ours, RECIPES["current"], x)
        again = torch_step(ours, call_, RECIPES["current"], x, eager[-1])
        same(again[0], eager[0], "y")
        same(again[1], eager[1], "dx")


def drawn(function, given):
    """Result and gradients of the first tensor with torch's generator at a known place."""
    torch.manual_seed(7)
    x, *others = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    y = function(x, *others)
    return y, *torch.autograd.grad(y, [t for t in (x, *others) if t.requires_grad], torch.ones_like(y) / 3)


def same_numbers(call_, eager, *given):
    """The compiled call's result and gradients are the eager ones, bit for bit. Returns the result."""
    got, want = drawn(call_, given), drawn(eager, given)
    for one, other in zip(got, want, strict=True):
        same(one, other, "compiled")
    return want[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@combinations(
    {
        "options": {
            "hidden": {"hidden_dropout": (0.1, 0.3, 0.2), "attention_dropout": (0.0, 0.0, 0.0)},
            "attention": {"hidden_dropout": (0.0, 0.0, 0.0), "attention_dropout": (0.1, 0.3, 0.2)},
            "path": {
                "hidden_dropout": (0.0, 0.0, 0.0),
                "attention_dropout": (0.0, 0.0, 0.0),
                "drop_path_rate": (0.1, 0.3, 0.2),
            },
        }
    },
    usual=[],  # test_changed_numbers_are_seen has what a number does to a compiled layer
)
def test_layers_of_different_dropouts(device, options):
    x = torch.randn(5, 3, WIDTH, device=device)
    for i in range(3):
        layer = ft.TransformerLayer(
            WIDTH, 64, 2, device=device, **{name: values[i] for name, values in options.items()}
        )
        same_numbers(compiled(layer), layer, x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_changed_numbers_are_seen(device):
    """A number of a spec that is another one at a later call, and again the first one, which compiles nothing
    anew."""
    core = ft.DotProductAttention(2, 8, device=device)
    count = CompileCounterWithBackend("eager")
    call_, qkv = torch.compile(core, fullgraph=True, backend=count), torch.randn(3, 5, 3, 2, 8, device=device)
    results = []
    for p in (0.1, 0.3):
        core.attention_dropout = p
        results.append(same_numbers(call_, core, *qkv))
    assert not torch.equal(*results)
    compilations = count.frame_count
    for p in (0.1, 0.3):
        core.attention_dropout = p
        same_numbers(call_, core, *qkv)
    assert count.frame_count == compilations


@pytest.mark.combinations
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_packed_batches_of_other_longest_sequences(device):
    layer = ft.TransformerLayer(
        WIDTH,
        64,
        2,
        attn_input_format="thd",
        self_attn_mask_type="padding_causal",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=device,
    )
    call_ = compiled(layer)
    for sums, longest in (([0, 3, 8], 5), ([0, 2, 8], 6), ([0, 4, 9, 10], 5), ([0, 1, 8], 7)):
        cu = torch.tensor(sums, dtype=torch.int32, device=device)
        options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        same_numbers(
            functools.partial(call_, **options),
            functools.partial(layer, **options),
            torch.randn(sums[-1], WIDTH, device=device),
        )


def test_attentions_of_different_scales_and_windows(device):
    qkv = [torch.randn(5, 3, 2, 8, device=device) for _ in range(3)]
    results = []
    for scale, windows in ((0.3, [(3, 0)]), (0.1, [(1, 0), (3, 0)])):
        core = ft.DotProductAttention(2, 8, softmax_scale=scale, attention_dropout=0.0, device=device)
        call_ = compiled(core, "eager")
        for window in windows:
            options = {"window_size": window, "attn_mask_type": "causal"}
            results.append(
                same_numbers(functools.partial(call_, **options), functools.partial(core, **options), *qkv)
            )
    assert not any(torch.equal(one, other) for i, one in enumerate(results) for other in results[:i])


@pytest.mark.combinations  # test_a_recipe_in_force_is_guarded_by_its_name has another epsilon
def test_recipes_of_different_epsilons(device):
    ours, eager = pair("Linear", device)
    call_ = compiled(ours)
    for epsilon in (0.0, 8.0):
        recipe = Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=epsilon))
        same_as_eager(ours, call_, eager, recipe, device)


def test_a_recipe_in_force_is_guarded_by_its_text(device, monkeypatch):
    """Its fields would be most of what is traced. An equal recipe compiles nothing; a field that is set
    does."""
    monkeypatch.setattr(Float8CurrentScaling, "parts", lambda self: pytest.fail("its fields are traced"))
    counter = CompileCounterWithBackend("eager")
    ours, eager = pair("Linear", device)
    call_ = compiled(ours, counter)
    x = torch.randn(5, WIDTH, device=device)
    recipe = Float8CurrentScaling()
    for _ in range(2):
        for again in (recipe, Float8CurrentScaling(), dataclasses.replace(recipe)):
            with torch.no_grad(), ft.autocast(recipe=again):
                same(call_(x), eager(x), "y")
    assert counter.frame_count == 1
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=8.0)
    with torch.no_grad(), ft.autocast(recipe=recipe):
        same(call_(x), eager(x), "y")
    assert counter.frame_count == 2


def test_functions_that_are_no_modules(device):
    logits, targets = torch.randn(4, 6, 16, device=device), torch.arange(24, device=device).reshape(4, 6) % 16
    x, residual, bias = (
        torch.randn(6, 16, device=device),
        torch.randn(6, 16, device=device),
        torch.randn(16, device=device),
    )

    def added(x, residual, bias):
        return torch.stack([ft.dropout_add(x, residual, bias, p=p) for p in (0.1, 0.3)])

    def losses(logits, targets):
        options = ({}, {"label_smoothing": 0.2}, {"reduce_loss": True})
        return torch.cat([ft.parallel_cross_entropy(logits, targets, **more).flatten() for more in options])

    def looked_up(table, ids):
        return ft.embedding(ids, table)

    same_numbers(compiled(added), added, x, residual, bias)
    same_numbers(compiled(losses), losses, logits, targets)
    same_numbers(compiled(looked_up), looked_up, x, torch.arange(6, device=device) % 4)


def test_a_function_compiled_before_the_policy_was_read(device, monkeypatch):
    logits, targets = torch.randn(6, 16, device=device), torch.arange(6, device=device)
    want = drawn(ft.parallel_cross_entropy, (logits, targets))
    monkeypatch.setattr(policies, "_GLOBAL", None)
    with ThreadPoolExecutor(1) as fresh:  # a thread without a block of a policy
        got = fresh.submit(drawn, compiled(ft.parallel_cross_entropy), (logits, targets)).result()
    for one, other in zip(got, want, strict=True):
        same(one, other, "compiled")


@combinations({"fullgraph": {"pieces": False, "fullgraph": True}}, usual=["fullgraph"])
def test_an_exception_within_an_inner_autocast_leaves_the_outer_ones_amaxes(device, fullgraph):
    """Where the function itself catches it, in eager code too: one autocast is left by an exception, and the
    one that updates states is not."""
    recipe = DelayedScaling(amax_history_len=4)

    def trained(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        first, second = (ft.Linear(32, 32, device=device) for _ in range(2))

        def function(x):
            with ft.autocast(recipe=recipe):
                y = first(x)
                try:
                    with ft.autocast(recipe=recipe):
                        second(y)
                        raise ValueError
                except ValueError:
                    return y + 1

        call = torch.compile(function, backend="eager", fullgraph=fullgraph) if compiled else function
        call(torch.ones(16, 32, device=device, requires_grad=True)).sum().backward()
        return [part for layer in (first, second) for part in layer.fp8_meta["scaling_fwd"].parts]

    compiled, eager = trained(True), trained(False)
    for got, want in zip(compiled, eager, strict=True):
        assert torch.equal(got, want)
    assert all((scale[:2] != 1).all() for scale in (eager[0], eager[3]))


def test_inference_leaves_no_trace(device):
    ours, _ = twins("Linear", device)
    x = torch.randn(4, WIDTH, device=device)
    call_ = compiled(ours)
    for inference in (torch.no_grad, torch.inference_mode):
        with inference(), ft.autocast(recipe=RECIPES["delayed"]):
            same(call_(x), ours(x), "y")
        assert not ours.fp8_meta["scaling_fwd"].amax_history.any()


@combinations(
    {
        "kind": ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"],
        "grad": {"no_grad": False, "grad": True},
        "inside": {"around": False, "inside": True},
    },
    usual=["Linear-grad-inside"],
)
def test_calibration(device, kind, grad, inside):
    ours, _ = twins(kind, device)
    eager, _ = twins(kind, device)
    eager.load_state_dict(ours.state_dict())

    def scope():
        return ft.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"])

    def within(module):
        def function(x):
            with scope():
                return module(x)

        return function

    def states(module):
        return [m for m in module.modules() if hasattr(m, "fp8_meta")]

    call_ = compiled(within(ours) if inside else ours)
    for x in batches(device):
        with torch.set_grad_enabled(grad):
            y = within(eager)(x)
            if inside:
                z = call_(x)
            else:
                with scope():
                    z = call_(x)
        same(z, y, "y")
        if grad:
            y.sum().backward()
            z.sum().backward()
        for one, other in zip(states(ours), states(eager), strict=True):
            same(one.get_extra_state(), other.get_extra_state(), "state")
    assert all(module.fp8_meta["scaling_fwd"].scale[0] != 1 for module in states(ours))
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) == (not grad)
        if grad:
            same(p.grad, q.grad, "grad")


def _fused(device):
    layer = ft.Linear(WIDTH, 40, fuse_wgrad_accumulation=True, device=device)
    layer.weight.main_grad = torch.zeros(40, WIDTH, device=device)
    return layer, RECIPES["current"]


def _callable(device):
    recipe = DelayedScaling(amax_compute_algo=lambda history: history.max(0))
    return ft.Linear(WIDTH, 40, device=device), recipe


def _recomputed(device):
    layer = ft.Linear(WIDTH, 40, device=device)
    return (lambda x: ft.checkpoint(layer, x)), None


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (_fused, "fuse_wgrad_accumulation"),
        (_callable, "DelayedScaling: amax_compute_algo: a function"),
        (_recomputed, "checkpoint"),
    ],
    ids=["main_grad", "callable", "checkpoint"],
)
def test_what_cannot_be_compiled_says_so(device, make, named):
    function, recipe = make(device)
    with (
        ft.autocast(enabled=recipe is not None, recipe=recipe),
        pytest.raises(Exception, match=rf"{named} is not supported within torch\.compile"),
    ):
        compiled(function)(torch.randn(8, WIDTH, device=device))


def test_the_policy_of_forward_is_backwards_too(monkeypatch):
    chosen, real = [], dispatch.kernels

    def spy(place, policy=None):
        chosen.append((policy or get_policy()).deterministic)
        return real(place, policy)

    monkeypatch.setattr(dispatch, "kernels", spy)
    ours = ft.Linear(WIDTH, 56, device="cpu")
    call_ = compiled(ours)
    for wanted in (True, False):
        with fk.deterministic(wanted):
            y = call_(torch.randn(4, WIDTH))
        chosen.clear()
        with fk.deterministic(not wanted):
            y.sum().backward()
        assert chosen == [wanted]


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, strict):
    """What has no state from step to step is exported; delayed scaling has, and is refused."""
    module, x = ft.Linear(WIDTH, 32, device=device), torch.randn(16, WIDTH, device=device)
    with ft.autocast(recipe=RECIPES["current"]):
        want, program = module(x), torch.export.export(module, (x,), strict=strict)
    same(program.module()(x).detach(), want.detach(), "y")
    refused = r"delayed scaling is not supported within torch\.export"
    with (
        ft.autocast(recipe=RECIPES["delayed"]),
        pytest.raises(Unsupported if strict else NotImplementedError, match=refused),
    ):
        torch.export.export(module, (x,), strict=strict)


def test_a_graph_that_computes_forward_again_by_later_scales_is_refused():
    layer = ft.Linear(32, 32, device="cpu")

    def step(x):
        with ft.autocast(recipe=DelayedScaling()):
            return layer(torch.tanh(layer(x)))

    with torch._functorch.config.patch(activation_memory_budget=0.0):
        y = compiled(step)(torch.randn(32, 32))
        with pytest.raises(UnsupportedError, match="backward computes again"):
            y.sum().backward()
