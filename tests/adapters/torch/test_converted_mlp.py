"""Gated MLPs of converted models: when they run as one operation, that their numbers and their layers' FP8
state are those of the layers one by one, and that whatever would be passed by is not."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from fp8kit_torch import autocast, convert, converted_mlp, revert
from fp8kit_torch.converted_mlp import GatedMLP
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8kit.errors import Fp8kitError
from fp8kit.layer_recipes import PerLayer
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from fp8kit.testing.compare import assert_same_bits

from .gated_mlps import MLP, RECIPE, ROWS, WIDE, D, Lora, Net, Tanh, batch, fused_calls, states, train


@pytest.fixture
def calls(monkeypatch):
    return fused_calls(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"bias": True, "act": Tanh()}], ids=["swiglu", "geglu, biases"])
def test_numbers_are_those_of_the_layers(options, calls):
    """act(gate) is rounded before the product in the layers one by one, so codes differ here and there by one
    step of theirs: 2^-3 of E4M3, which products of 48 average. Where that rounding is nothing, as of ReLU,
    all but x's gradient, the sum of two rounded terms, has the same bits."""
    one, other = convert(Net(**options)), convert(Net(**options), gated_mlp=False)
    (y, grads), (y_want, wanted) = train(one), train(other)
    assert len(calls) == 3
    assert (y - y_want).norm() < 2**-4 * y_want.norm()
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert (grad - wanted[name]).norm() < 2**-3 * wanted[name].norm(), name


def test_bits_and_states_are_those_of_the_layers():
    """ReLU's gate is exact, so all codes are the same ones, and so is each layer's state."""
    one, other = (convert(Net(act=nn.ReLU()), gated_mlp=fused) for fused in (True, False))
    for net in (one, other):
        net.first.requires_grad_(False)  # x's gradient is rounded in another way
    (y, grads), (y_want, wanted) = train(one, 6), train(other, 6)
    assert_same_bits("y", y.float().numpy(), y_want.float().numpy())
    for name, grad in grads.items():
        assert_same_bits(name, grad.float().numpy(), wanted[name].float().numpy())
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, state in states(one).items():
        assert torch.equal(state, states(other)[name]), name
    again = convert(Net(act=nn.ReLU()), gated_mlp=False)
    again.load_state_dict(one.state_dict())
    with autocast(recipe=RECIPE), torch.no_grad():
        assert torch.equal(again(batch()), one(batch()))


def test_a_step_may_change_its_way(calls):
    """A hook for some steps: the layers' states go on."""
    one, other = (convert(Net(act=nn.ReLU()), gated_mlp=fused) for fused in (True, False))
    for net in (one, other):
        net.first.requires_grad_(False)
    train(one, 2)
    seen = []
    handle = one.mlp.down_proj.register_forward_pre_hook(lambda part, args: seen.append(args[0].shape))
    train(one, 2)
    handle.remove()
    train(one, 2)
    for _ in range(3):
        train(other, 2)
    assert len(calls) == 4
    assert seen == [(2, ROWS // 2, WIDE)] * 2
    for name, state in states(one).items():
        assert torch.equal(state, states(other)[name]), name


HOOKS = {
    "forward": lambda net, note: net.mlp.gate_proj.register_forward_hook(note),
    "before forward": lambda net, note: net.mlp.up_proj.register_forward_pre_hook(note),
    "backward": lambda net, note: net.mlp.down_proj.register_full_backward_hook(note),
    "before backward": lambda net, note: net.mlp.up_proj.register_full_backward_pre_hook(note),
    "activation": lambda net, note: net.mlp.act_fn.register_forward_hook(note),
    "all modules": lambda net, note: nn.modules.module.register_module_forward_hook(note),
}


@pytest.mark.parametrize("where", HOOKS)
def test_hooks_are_called(where, calls):
    net, seen = convert(Net()), []
    handle = HOOKS[where](net, lambda *args: seen.append(type(args[0]).__name__))
    try:
        train(net, 1)
    finally:
        handle.remove()
    assert seen
    assert not calls


def test_a_hook_of_the_mlp_is_none_of_its_layers(calls):
    net, seen = convert(Net()), []
    net.mlp.register_forward_hook(lambda part, args, y: seen.append(y.shape))
    train(net, 1)
    assert len(calls) == 1
    assert seen == [(2, ROWS // 2, D)]


def test_another_module_in_a_layers_place(calls):
    net = convert(Net())
    net.mlp.gate_proj = Lora(net.mlp.gate_proj)
    _, grads = train(net)
    assert not calls
    assert "mlp.gate_proj.a.weight" in grads
    assert "mlp.gate_proj.base_layer.weight" not in grads


def test_a_forward_that_was_replaced(calls):
    net = convert(Net())
    before, seen = net.mlp.up_proj.forward, []
    net.mlp.up_proj.forward = lambda x: seen.append(1) or before(x)
    train(net, 1)
    assert seen == [1]
    assert not calls


@pytest.mark.parametrize(
    ("frozen", "fused"),
    [
        (("mlp",), True),  # the gradient of x alone
        (("first", "mlp.down_proj"), True),
        (("first",), True),
        (("mlp.gate_proj",), False),  # one of two
        (("first", "mlp", "last"), True),
    ],
    ids=str,
)
def test_some_parameters_frozen(frozen, fused, calls):
    nets = [convert(Net(act=nn.ReLU()), gated_mlp=how) for how in (True, False)]
    found = []
    for net in nets:
        for name in frozen:
            net.get_submodule(name).requires_grad_(False)
        with autocast(recipe=RECIPE):
            y = net(batch())
        if y.requires_grad:
            y.backward(batch(7))
        found.append((y, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}))
    assert len(calls) == fused
    (y, grads), (y_want, wanted) = found
    assert torch.equal(y, y_want)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        if "first" not in name:
            assert torch.equal(grad, wanted[name]), name


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(), None], ids=repr)
def test_other_recipes_go_layer_by_layer(recipe, calls):
    one, other = convert(Net()), convert(Net(), gated_mlp=False)
    if recipe is None:
        y, want = one(batch()), other(batch())
    else:
        (y, _), (want, _) = train(one, 1, recipe), train(other, 1, recipe)
    assert torch.equal(y, want)
    assert not calls


def test_recipes_in_turn_have_their_plans():
    net, further = convert(Net()), DelayedScaling(fp8_format=Format.E4M3, amax_history_len=4)
    train(net, 1)
    train(net, 1, further)
    specs = [each.spec for each in converted_mlp._found[net.mlp]]
    for recipe in (RECIPE, further):
        train(net, 1, recipe)
    assert all(each.spec is spec for each, spec in zip(converted_mlp._found[net.mlp], specs, strict=True))


@pytest.mark.parametrize(("high", "fused"), [("first", True), ("mlp.up_proj", False)])
def test_recipes_by_layer(high, fused, calls):
    net = convert(Net())
    for name, part in net.named_modules():
        part.name = name
    train(net, 1, PerLayer(RECIPE, ((high, None),)))
    assert len(calls) == fused


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint(reentrant, calls):
    """The second pass is as the first one, and records nothing again."""
    plain, kept = convert(Net()), convert(Net())

    def call(x):
        return kept.last(checkpoint(kept.mlp, kept.first(x), use_reentrant=reentrant))

    (y, grads), (y_want, wanted) = train(kept, call=call), train(plain)
    assert len(calls) == 9
    assert torch.equal(y, y_want)
    for name, grad in grads.items():
        assert torch.equal(grad, wanted[name]), name
    for name, state in states(kept).items():
        assert torch.equal(state, states(plain)[name]), name


def test_inference_leaves_the_states(calls):
    net = convert(Net())
    train(net)
    before, own = states(net), len(calls)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), autocast(recipe=RECIPE):
            net(batch(50))
    assert len(calls) == own + 2
    assert all(torch.equal(state, before[name]) for name, state in states(net).items())


def test_within_torch_autocast(calls):
    """Parameters of float32, as a Trainer has them."""
    one, other = (convert(Net(act=nn.ReLU()).float(), gated_mlp=fused) for fused in (True, False))
    found = []
    for net in (one, other):
        with torch.autocast("cpu", torch.bfloat16), autocast(recipe=RECIPE):
            y = net(batch(dtype=torch.float32))
        y.backward(batch(3))
        found.append((y, net.mlp.up_proj.weight.grad))
    assert len(calls) == 1
    assert found[0][1].dtype is torch.float32
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_copied_and_saved(calls):
    net = convert(Net())
    train(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    with autocast(recipe=RECIPE), torch.no_grad():
        want = net(batch())
        for twin in (copy.deepcopy(net), torch.load(file, weights_only=False)):
            assert isinstance(twin.mlp, GatedMLP)
            assert isinstance(twin.mlp, MLP)
            assert torch.equal(twin(batch()), want)
    assert len(calls) == 6
    assert type(revert(copy.deepcopy(net)).mlp) is MLP


@pytest.mark.parametrize("shape", [(0, D), (D,), (3, 1, 5, D)])
def test_shapes(shape, calls):
    found = []
    for fused in (True, False):
        net, x = convert(Net(act=nn.ReLU()), gated_mlp=fused), torch.ones(*shape[:-1], 2 * D)[..., ::2]
        with autocast(recipe=RECIPE):
            y = net.mlp(x.bfloat16())
        y.sum().backward()
        found.append((y, net.mlp.gate_proj.weight.grad, net.mlp.down_proj.weight.grad))
    assert len(calls) == 1
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape
        assert torch.equal(got, want)


def test_what_a_layer_refuses(calls):
    """Under its own name."""
    net = convert(Net())
    for x in (batch()[..., 1:], batch().double()):
        with autocast(recipe=RECIPE), pytest.raises(Fp8kitError, match=r"^Linear: inp"):
            net.mlp(x)
    assert not calls
