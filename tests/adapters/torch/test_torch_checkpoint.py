"""torch.utils.checkpoint by itself, and what is built on it, around FP8 layers: the same bits as without."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from fp8kit_torch import (
    GroupedLinear,
    LayerNormMLP,
    Linear,
    autocast,
    checkpoint_contexts,
    convert,
    recompute,
    torch_checkpoint,
    torch_compat,
)
from fp8kit_torch import checkpoint as own_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fp8kit as fk
from fp8kit.errors import AutogradError, BackendError
from fp8kit.recipe import Float8CurrentScaling
from fp8kit.testing.compare import assert_same_bits
from tests.support.combinations import combinations

from .recomputed import RECIPES, K, same_all, steps
from .twins import RECIPES as ALL
from .twins import batches, same, torch_step, twins


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


class Block(torch.nn.Module):
    """A function as a module."""

    def __init__(self, block, first):
        super().__init__()
        self.block, self.first = block, first

    def forward(self, x):
        return self.block(x, self.first)


def other(block, x, first):
    return checkpoint(block, x, first=first, use_reentrant=False)


def reentrant(block, x, first):
    return checkpoint(block, x, first, use_reentrant=True)


def with_contexts(block, x, first):
    return checkpoint(block, x, first, use_reentrant=False, context_fn=checkpoint_contexts)


def to_the_end(block, x, first):
    with set_checkpoint_early_stop(False):
        return other(block, x, first)


def sequential(block, x, first, use_reentrant):
    return checkpoint_sequential(
        [lambda t: t * 2, Block(block, first), lambda t: t.sin()], 2, x, use_reentrant=use_reentrant
    ).tanh()


def sequential_plain(block, x, first):
    return block(x * 2, first).sin().tanh()


def wrapped(block, x, first, impl):
    return checkpoint_wrapper(Block(block, first), impl)(x)


def selective(block, x, first):
    """What the user calls after the layers is saved, by how many there were of its kind: a layer has no such
    call in one pass only."""
    aten = torch.ops.aten
    saved = [aten.clone.default, aten.zeros.default, aten.ones.default, aten.mul.Tensor]

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def more(t, first):
        t = block(t, first).clone() * torch.ones(1, device=t.device)
        return t * (torch.zeros(1, device=t.device) + 1)

    return checkpoint(
        more,
        x,
        first,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
    )


def beneath_hooks(block, x, first):
    """What the block saves goes through hooks of the user's own."""

    def hooked(t, first):
        with torch.autograd.graph.saved_tensors_hooks(lambda s: s.clone(), lambda s: s):
            return block(t, first)

    return other(hooked, x, first)


def nest(outer, inner, block, x, first):
    return outer(lambda t, first: inner(block, t, first), x, first)


class Older(torch.autograd.Function):
    """A reentrant checkpoint as Megatron and DeepSpeed write theirs."""

    @staticmethod
    def forward(ctx, run_function, first, x):
        ctx.run_function, ctx.first, ctx.state = run_function, first, torch.get_rng_state()
        ctx.states = torch.cuda.get_rng_state_all() if x.is_cuda else []
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run_function(x, first)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(range(len(ctx.states))), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            if ctx.states:
                torch.cuda.set_rng_state_all(ctx.states)
            x = x.detach().requires_grad_()
            y = ctx.run_function(x, ctx.first)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


def older(block, x, first):
    return Older.apply(block, first, x)


HOWS = {
    "other": other,
    "reentrant": reentrant,
    "contexts": with_contexts,
    "to-the-end": to_the_end,
    "older": older,
    "hooks": beneath_hooks,
    "wrapper": functools.partial(wrapped, impl=CheckpointImpl.NO_REENTRANT),
    "reentrant-wrapper": functools.partial(wrapped, impl=CheckpointImpl.REENTRANT),
    "other-in-other": functools.partial(nest, other, other),
    "reentrant-in-other": functools.partial(nest, other, reentrant),
    "other-in-reentrant": functools.partial(nest, reentrant, other),
    "reentrant-in-reentrant": functools.partial(nest, reentrant, reentrant),
    "own-in-other": functools.partial(nest, other, lambda block, x, first: own_checkpoint(block, x, first)),
}
plainly = functools.cache(steps)


@combinations(
    {
        "how": ["other", "reentrant"],
        "recipe": ["delayed", "current", "block"],
        "where": ["around", "inside", "mixed"],
    }
)
def test_same_bits(place, recipe, where, how):
    same_all(steps(place, recipe, where, HOWS[how]), plainly(place, recipe, where, None))


@combinations(
    {
        "how": [name for name in HOWS if name not in ("other", "reentrant")],
        "where": ["around", "inside", "mixed"],
    }
)
def test_whoever_calls_it(place, where, how):
    same_all(steps(place, "delayed", where, HOWS[how]), plainly(place, "delayed", where, None))


@combinations({"use_reentrant": [False, True], "where": ["around", "inside"]})
def test_in_a_sequence(place, where, use_reentrant):
    how = functools.partial(sequential, use_reentrant=use_reentrant)
    same_all(steps(place, "delayed", where, how), steps(place, "delayed", where, sequential_plain))


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_selective_one(place, where):
    same_all(steps(place, "delayed", where, selective), plainly(place, "delayed", where, None))


@pytest.mark.parametrize("how", ["other", "contexts", "other-in-other"])
def test_a_retained_graph_is_recomputed_each_time(place, how):
    same_all(
        steps(place, "delayed", "inside", HOWS[how], passes=2),
        plainly(place, "delayed", "inside", None, passes=2),
    )


@pytest.mark.parametrize("how", ["other", "reentrant"])
def test_micro_batches_and_cached_weights(place, how):
    same_all(
        steps(place, "delayed", "around", HOWS[how], micro=True),
        plainly(place, "delayed", "around", None, micro=True),
    )


class Split(GroupedLinear):
    """With 8 rows a group."""

    def forward(self, x):
        return super().forward(x, [8, 8])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_groups(place, recipe, use_reentrant):
    found = []
    for how in (lambda f, x: f(x), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        layer = Split(2, K, K, device=place)
        found.append([])
        for _ in range(3):
            x = torch.randn(16, K, device=place, requires_grad=True)
            with autocast(recipe=RECIPES[recipe]):
                y = how(layer, x)
            y.square().sum().backward()
            found[-1] += [
                t.detach().cpu().numpy() for t in (y, x.grad, layer.weight0.grad, layer.get_extra_state())
            ]
    same_all(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_whole_layer_with_dropout(place, use_reentrant):
    plain, _ = twins("TransformerLayer", place, hidden_dropout=0.2, attention_dropout=0.1)
    other = copy.deepcopy(plain)
    calls = (plain, plain), (other, functools.partial(checkpoint, other, use_reentrant=use_reentrant))
    for seed, x in enumerate(batches(place)):
        found = []
        for layer, call in calls:
            torch.manual_seed(seed)
            y, dx, grads, _ = torch_step(layer, call, ALL["delayed"], x, torch.ones_like(x))
            states = {
                path: m.get_extra_state() for path, m in layer.named_modules() if hasattr(m, "fp8_meta")
            }
            found.append({"y": y, "dx": dx, **grads, **states})
        for name, wanted in found[0].items():
            same(found[1][name], wanted, name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_autocast_off_in_the_first_pass_and_on_around_backward(place, use_reentrant):
    found = []
    for how in (lambda f, x: f(x), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        layer, x = LayerNormMLP(K, K, device=place), torch.randn(16, K, device=place, requires_grad=True)
        with autocast():
            with autocast(enabled=False):
                y = how(layer, x)
            y.square().sum().backward()
        found.append(
            [
                t.detach().cpu().numpy()
                for t in (y, x.grad, *(p.grad for p in layer.parameters()), layer.get_extra_state())
            ]
        )
    same_all(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_high_precision_beside_an_autocast_within(place, use_reentrant):
    """What is outside of the autocast within stays outside: also where that is the native one."""
    found = []
    for how in (lambda f, x: f(x), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        one, two = Linear(K, K, device=place), Linear(K, K, device=place)
        found.append([])
        for _ in range(2):

            def function(t, one=one, two=two):
                with fk.autocast(recipe=RECIPES["delayed"]):
                    t = one(t)
                return two(t).exp()

            x = torch.randn(16, K, device=place, requires_grad=True)
            y = how(function, x)
            y.sum().backward()
            found[-1] += [
                t.detach().cpu().numpy()
                for t in (y, x.grad, one.weight.grad, two.weight.grad, one.get_extra_state())
            ]
    same_all(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_without_gradients_it_is_inference(place, use_reentrant):
    """A first pass that nothing will come back to changes no state, and neither does what runs without
    gradients in one that is differentiated; in the reentrant one, where no layer can tell, that is a part of
    the step."""
    layer, x = Linear(K, K, device=place), torch.randn(16, K, device=place, requires_grad=True)
    with autocast(recipe=RECIPES["delayed"]):
        layer(x)
    before = layer.get_extra_state().numpy()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), autocast(recipe=RECIPES["delayed"]):
            y = checkpoint(layer, x, use_reentrant=use_reentrant)
            assert_same_bits("y", y.cpu().numpy(), layer(x).cpu().numpy())
        assert_same_bits("state", layer.get_extra_state().numpy(), before)

    def function(t):
        with torch.no_grad():
            layer(t)
        return t.exp()

    with autocast(recipe=RECIPES["delayed"]):
        y = checkpoint(function, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert (layer.get_extra_state().numpy() != before).any() == use_reentrant
    assert_same_bits("dx", x.grad.cpu().numpy(), x.detach().exp().cpu().numpy())


def test_a_model_in_ddp(place, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        found = []
        for recomputed in (False, True):
            torch.manual_seed(0)
            blocks = torch.nn.Sequential(
                *[torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.GELU()) for _ in range(3)]
            ).to(place)
            convert(blocks)
            model = torch.nn.parallel.DistributedDataParallel(Chain(blocks, recomputed))
            found.append([])
            for _ in range(3):
                model.zero_grad()
                for micro in range(2):
                    x = torch.randn(16, K, device=place)
                    with (
                        contextlib.nullcontext() if micro else model.no_sync(),
                        autocast(recipe=RECIPES["delayed"]),
                    ):
                        model(x).square().mean().backward()
                found[-1] += [p.grad.clone().cpu().numpy() for p in model.parameters()]
                found[-1] += [block[0].get_extra_state().numpy() for block in blocks]
        same_all(*found)
    finally:
        torch.distributed.destroy_process_group()


class Chain(torch.nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks, recomputed):
        super().__init__()
        self.blocks, self.recomputed = blocks, recomputed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_another_function_in_the_second_pass_is_refused(place, use_reentrant):
    layers, calls = [Linear(K, K, device=place) for _ in range(2)], []

    def fickle(x):
        calls.append(1)
        return layers[len(calls) - 1](x)

    def late(x):
        calls.append(1)
        return layers[0](x) if len(calls) > 1 else x @ layers[0].weight.T

    x = torch.randn(16, K, device=place, requires_grad=True)
    for function in (fickle, late) if not use_reentrant else (fickle,):
        calls.clear()
        with autocast(recipe=Float8CurrentScaling()):
            y = checkpoint(
                function,
                x,
                use_reentrant=use_reentrant,
                **({} if use_reentrant else {"determinism_check": "none"}),
            )
            with pytest.raises(AutogradError, match="the same layers in the same order"):
                y.exp().sum().backward()


def test_a_checkpoint_that_is_not_known_is_refused_where_it_would_leave_fp8(place):
    """Its second pass runs outside of the autocast: gradients of another pass than the one that gave the
    loss."""

    class Unknown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                ctx.function(x).backward(grad)
            return None, x.grad

    layer, x = LayerNormMLP(K, 64, device=place), torch.randn(16, K, device=place, requires_grad=True)
    with autocast():
        y = Unknown.apply(layer, x)
    with pytest.raises(AutogradError, match=r": autocast: got none in the second pass of a checkpoint"):
        y.sum().backward()
    with torch.no_grad(), autocast():
        layer(x)
    layer(x).sum().backward()  # FP8 in evaluation, and training in high precision
    plain = x.grad.clone()
    x.grad = None
    Unknown.apply(layer, x).sum().backward()
    assert_same_bits("dx", x.grad.cpu().numpy(), plain.cpu().numpy())


def test_a_state_that_was_copied_in_inference_mode_is_updated(place):
    """Such tensors have no version that autograd could look at."""
    layer = Linear(K, K, device=place)
    layer.prepare(3)
    with torch.inference_mode():
        layer = copy.deepcopy(layer)
        with autocast(calibrating=True, recipe=RECIPES["delayed"]):
            layer(torch.ones(16, K, device=place))
    assert float(layer.fp8_meta["scaling_fwd"].scale[0]) == 448  # E4M3's largest number, for an amax of 1


@combinations({"use_reentrant": [False, True]}, usual=["False"])
def test_within_a_compiled_function_later_scales_are_refused(place, use_reentrant):
    """There torch's compiler computes forward once more in backward, from the scales as they are by then.
    Where it need not compile everything, the checkpoint is an eager one."""
    for recipe, fullgraph in (("current", True), ("delayed", False), ("delayed", True)):
        torch._dynamo.reset()
        found = []
        for compiled in (False, True):
            torch.manual_seed(0)
            layer, x = Linear(K, K, device=place), torch.randn(16, K, device=place, requires_grad=True)
            call = net = torch.nn.Sequential(layer, torch.nn.GELU())
            if compiled:
                call = functools.partial(checkpoint, net, use_reentrant=use_reentrant)
                call = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
            if compiled and fullgraph and recipe == "delayed":
                with (
                    autocast(recipe=RECIPES[recipe]),
                    pytest.raises(
                        Exception,
                        match=r"a checkpoint with delayed scaling is not supported within torch\.compile",
                    ),
                ):
                    call(x)
                break
            for _ in range(2):
                x.grad = layer.weight.grad = None
                with autocast(recipe=RECIPES[recipe]):
                    y = call(x)
                y.square().sum().backward()
            found.append([t.detach().cpu().numpy() for t in (y, x.grad, layer.weight.grad)])
        else:
            same_all(found[1], found[0])


def test_torchs_own_names():
    """What is read of torch's checkpoint is where it is looked for; where a later torch has it elsewhere,
    that is said."""
    found = []

    def function(x):
        found.append(
            (
                len(torch_checkpoint.frames(None)),
                len(list(torch_checkpoint.contexts(None))),
                torch_checkpoint.recomputing(),
            )
        )
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    for use_reentrant, wanted in (
        (False, [(1, 0, False), (0, 0, True)]),
        (True, [(0, 1, False), (0, 0, False)]),
    ):
        found.clear()
        checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
        assert found == wanted
    with pytest.raises(BackendError, match="torch"):
        torch_compat._required(torch.utils.checkpoint, "_no_such_name")

    def pack_hook(tensor):
        return tensor

    pack_hook.__module__, pack_hook.__qualname__ = "torch.utils.checkpoint", "_later_torchs.pack_hook"
    hooks = torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda t: t)
    with hooks, pytest.raises(BackendError, match=r"torch\.utils\.checkpoint: hooks"):
        recompute.idle()


@pytest.mark.parametrize("reentrant", [True, False])
def test_one_in_high_precision_with_inference_in_fp8_before_its_backward(reentrant):
    """The second pass is in high precision because the first one was."""
    torch.manual_seed(0)
    layer, x = Linear(32, 32, device="cpu"), torch.randn(4, 32, requires_grad=True)
    want = torch.autograd.grad(layer(x).sum(), x)[0]
    y = checkpoint(layer, x, use_reentrant=reentrant)
    with autocast(), torch.no_grad():
        layer(x)
    y.sum().backward()
    assert torch.equal(x.grad, want)
