"""Which gated MLPs of converted models are known to be one, from their forward as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from fp8kit_torch import autocast, convert, converted_mlp, coverage, revert
from fp8kit_torch.converted_mlp import GatedMLP
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fp8kit.errors import ArgumentError

from .gated_mlps import MLP, RECIPE, WIDE, D, Lora, Net, Plain, Tanh, batch, fused_calls, train


class Squared(nn.ReLU):
    def forward(self, x):
        return super().forward(x).square()


class Dropped(MLP):
    rate = 0.5

    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(functional.dropout(h, self.rate, self.training))


class Residual(MLP):
    def forward(self, x):
        return super().forward(x) + x


class Swapped(MLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Strict(MLP):
    def forward(self, x):
        assert x.is_cuda, "a kernel for GPUs"
        return super().forward(x)


class Looking(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(x @ self.gate_proj.weight.T) * self.up_proj(x))


class Twice(torch.autograd.Function):
    """Of the gradient alone."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Changed(MLP):
    """Computes what ``how`` makes of the three layers and the activation."""

    how = None

    def forward(self, x):
        return type(self).how(self, x, self.gate_proj, self.up_proj, self.act_fn, self.down_proj)


def kept(mlp, x, gate, up, act, down):
    mlp.seen = act(gate(x)) * up(x)
    return down(mlp.seen)


def hooked(mlp, x, gate, up, act, down):
    h = gate(x)
    h.register_hook(lambda g: 2 * g)
    return down(act(h) * up(x))


CHANGED = {
    "limited gate": lambda mlp, x, gate, up, act, down: down(act(gate(x).clamp(max=10)) * up(x)),
    "limited up": lambda mlp, x, gate, up, act, down: down(act(gate(x)) * up(x).clamp(-100, 100)),
    "scaled y in place": lambda mlp, x, gate, up, act, down: down(act(gate(x)) * up(x)).mul_(2),
    "scaled gate in place": lambda mlp, x, gate, up, act, down: down(act(gate(x).mul_(2)) * up(x)),
    "no gradient of gate": lambda mlp, x, gate, up, act, down: down(act(gate(x).detach()) * up(x)),
    "another gradient": lambda mlp, x, gate, up, act, down: down(act(Twice.apply(gate(x))) * up(x)),
    "another gradient of x": lambda mlp, x, gate, up, act, down: down(act(gate(Twice.apply(x))) * up(x)),
    "another gradient of y": lambda mlp, x, gate, up, act, down: Twice.apply(down(act(gate(x)) * up(x))),
    "a hook": hooked,
    "something kept": kept,
    "in training": lambda mlp, x, gate, up, act, down: down(act(gate(x)) * up(x) * (1 + mlp.training)),
    "in inference": lambda mlp, x, gate, up, act, down: down(act(gate(x)) * up(x) * (2 - mlp.training)),
}


@pytest.fixture
def calls(monkeypatch):
    return fused_calls(monkeypatch)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "swiglu"),
        ({"bias": True}, "swiglu"),
        ({"act": Tanh()}, "geglu"),
        ({"act": nn.ReLU()}, "reglu"),
        ({"act": Squared()}, "sreglu"),
        ({"act": nn.Sigmoid()}, "glu"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_known(options, kind, calls):
    net = convert(Net(**options))
    assert isinstance(net.mlp, MLP)
    assert converted_mlp.activation(net.mlp) == kind
    train(net)
    assert len(calls) == 3
    assert type(revert(net).mlp) is MLP
    assert vars(net.mlp).keys() == vars(Net(**options).mlp).keys()


@pytest.mark.parametrize(
    ("mlp", "options"),
    [
        (MLP, {"act": nn.GELU()}),  # the exact one
        (MLP, {"act": nn.PReLU()}),
        (MLP, {"act": nn.Softplus()}),
        (Dropped, {}),
        (Residual, {}),
        (Swapped, {}),
        (Looking, {}),
        (Strict, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_left(mlp, options, calls):
    net = convert(Net(mlp, **options))
    assert type(net.mlp) is mlp
    if mlp is not Strict:
        train(net)
    assert not calls


@pytest.mark.parametrize("how", CHANGED)
def test_a_forward_that_does_something_more_is_left(how):
    """Also where that shows in large numbers only, in gradients, or in another mode."""
    kind = type("Changed", (Changed,), {"how": staticmethod(CHANGED[how])})
    assert type(convert(Net(kind)).mlp) is kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert isinstance(convert(Net()).mlp, GatedMLP)
    finally:
        torch.set_default_dtype(before)


def test_a_trial_leaves_random_numbers_alone():
    torch.manual_seed(1)
    want = torch.rand(1)
    net = Net(Dropped)
    torch.manual_seed(1)
    convert(net)
    assert torch.equal(torch.rand(1), want)


REPLACED = {
    "part": lambda mlp: setattr(mlp, "act_fn", nn.Tanh()),
    "part by name": lambda mlp: mlp._modules.update(act_fn=nn.Tanh()),
    "function": lambda mlp: setattr(mlp, "function", torch.tanh),
    "forward": lambda mlp: setattr(
        type(mlp).__mro__[2], "forward", lambda mlp, x: mlp.down_proj(mlp.up_proj(x))
    ),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_later_counts(what, calls):
    """By the activation itself, or the class' forward; also in a copy."""
    kind = type("Own", (Plain if what == "function" else MLP,), {})
    one, other = convert(Net(kind)), convert(Net(kind), gated_mlp=False)
    twin = copy.deepcopy(one)
    train(one, 1)
    assert len(calls) == 1
    for net in (one,) if what == "forward" else (one, twin, other):
        REPLACED[what](net.mlp)
    (found, own), (y, grads) = train(twin, 1), train(other, 1)
    assert torch.equal(found, y)
    assert all(torch.equal(own[name], grads[name]) for name in grads)
    other.load_state_dict(one.state_dict())
    with autocast(recipe=RECIPE), torch.no_grad():
        assert torch.equal(one(batch()), other(batch()))
    assert len(calls) == 1


def test_another_known_activation(calls):
    net = convert(Net())
    net.mlp.act_fn = nn.ReLU()
    train(net, 1)
    assert converted_mlp.activation(net.mlp) == "reglu"
    assert len(calls) == 1


def test_an_attribute_that_is_new_at_each_call(calls):
    """After a few trials there are no more."""
    net = convert(Net())
    for _ in range(20):
        net.mlp.note = object()
        train(net, 1)
    assert 0 < len(calls) < 10


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_copy_whose_first_call_is_in_a_checkpoint(reentrant, calls):
    """The trial that it begins with is not recomputed."""
    plain, other = copy.deepcopy(convert(Net())), copy.deepcopy(convert(Net()))

    def call(x):
        return other.last(checkpoint(other.mlp, other.first(x), use_reentrant=reentrant))

    (y, grads), (want, wanted) = train(other, 1, call=call), train(plain, 1)
    assert torch.equal(y, want)
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)
    assert len(calls) == 3


def test_left_when_asked_and_where_a_layer_is():
    assert type(convert(Net(), gated_mlp=False).mlp) is MLP
    again = convert(convert(Net()), gated_mlp=False)
    assert type(again.mlp) is MLP
    assert isinstance(convert(again).mlp, GatedMLP)
    assert type(convert(Net(), lambda part, name: "up_proj" not in name).mlp) is MLP
    with pytest.raises(ArgumentError, match="convert: gated_mlp: got 'no', expected"):
        convert(Net(), gated_mlp="no")


def test_coverage_says_which_run_as_one_operation_and_why_others_do_not():
    title = "MLPs as one operation under delayed scaling:"
    net = nn.ModuleDict({"a": Net(), "b": Net(), "odd": Net(Residual)})
    assert coverage(net).mlps == {}
    assert title not in str(coverage(net))
    convert(net)
    odd = "a forward that no operation has"
    assert coverage(net).mlps == {"a.mlp": "", "b.mlp": "", "odd.mlp": odd}
    lines = [f"{title} 2 of 3", f"  layer by layer: 1 ({odd}), the first is odd.mlp"]
    assert str(coverage(net)).splitlines()[-3:-1] == lines
    a, b = net["a"].mlp, net["b"].mlp
    for where, said in {"gate_proj": "a hook on gate_proj", "act_fn": "a hook on act_fn"}.items():
        hook = a.get_submodule(where).register_forward_hook(lambda *args: None)
        assert coverage(net).mlps["a.mlp"] == said
        hook.remove()
    for layer in (a.gate_proj, b.gate_proj):
        layer.requires_grad_(False)
    frozen = "gate_proj or up_proj is frozen"
    assert str(coverage(net)).splitlines()[-4:-2] == [
        f"{title} 0 of 3",
        f"  layer by layer: 2 ({frozen}), the first is a.mlp",
    ]
    a.down_proj.forward = a.down_proj.forward
    assert coverage(net).mlps["a.mlp"] == "a forward of down_proj that was replaced"
    b.gate_proj = Lora(b.gate_proj)
    assert coverage(net).mlps["b.mlp"] == "Lora as gate_proj"
    asked = coverage(convert(Net(), gated_mlp=False))
    assert asked.mlps == {"mlp": "convert was not asked to"}


FAMILIES = {"llama": "swiglu", "mistral": "swiglu", "qwen2": "swiglu", "gemma": "geglu", "qwen3": "swiglu"}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family, calls):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": D, "intermediate_size": WIDE, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    config = transformers.CONFIG_MAPPING[family](**sizes, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = convert(transformers.AutoModelForCausalLM.from_config(config))
    found = [converted_mlp.activation(part) for part in model.modules() if isinstance(part, GatedMLP)]
    assert found
    assert set(found) == {FAMILIES[family]}
    tokens = torch.randint(64, (2, 16))
    with autocast(recipe=RECIPE):
        model(tokens, labels=tokens).loss.backward()
    assert len(calls) == len(found)
