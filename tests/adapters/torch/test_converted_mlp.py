"""Gated MLPs of converted models: which run as one operation and when, that their numbers and their layers'
FP8 state are those of the layers one by one, and that whatever would be passed by is not."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from fp8kit_torch import autocast, convert, converted_mlp, coverage, revert
from fp8kit_torch.converted_mlp import GatedMLP
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.layer_recipes import PerLayer
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from fp8kit.testing.compare import assert_same_bits

D, WIDE, ROWS = 32, 48, 20
RECIPE = DelayedScaling(amax_history_len=4)


class MLP(nn.Module):
    """As transformers write it."""

    def __init__(self, act=None, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, WIDE, bias=bias), nn.Linear(D, WIDE, bias=bias)
        self.down_proj = nn.Linear(WIDE, D, bias=bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Tanh(nn.GELU):
    def __init__(self):
        super().__init__("tanh")


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


class Net(nn.Module):
    def __init__(self, mlp=MLP, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mlp, self.last = nn.Linear(D, D), mlp(**options), nn.Linear(D, D)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.last(self.mlp(self.first(x)))


@pytest.fixture
def calls(monkeypatch):
    """Names of the operation's calls."""
    found, before = [], converted_mlp.run
    monkeypatch.setattr(converted_mlp, "run", lambda op, *rest: found.append(op.needs) or before(op, *rest))
    return found


def batch(seed=1, dtype=torch.bfloat16):
    return torch.randn(2, ROWS // 2, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(net, steps=3, recipe=RECIPE, call=None):
    """Outputs and gradients of the last step."""
    for seed in range(steps):
        net.zero_grad()
        with autocast(recipe=recipe):
            y = (net if call is None else call)(batch(seed))
        y.backward(batch(100 + seed))
    return y.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def states(net):
    return {
        name: layer.get_extra_state() for name, layer in net.named_modules() if hasattr(layer, "fp8_meta")
    }


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


class Plain(MLP):
    """Its activation is a function."""

    function = staticmethod(functional.silu)

    def forward(self, x):
        return self.down_proj(self.function(self.gate_proj(x)) * self.up_proj(x))


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


class Lora(nn.Module):
    """What PEFT puts in a layer's place."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a, self.b = nn.Linear(D, 4, bias=False), nn.Linear(4, WIDE, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


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


def test_compiled_it_is_the_plain_forward(calls):
    """The compiler has a kernel of its own for what stands between the products."""
    one, other = convert(Net()), convert(Net(), gated_mlp=False)
    torch._dynamo.reset()
    found = []
    for net in (one, other):
        found.append(train(net, call=torch.compile(net, backend="aot_eager", fullgraph=True)))
    assert not calls
    assert torch.equal(found[0][0], found[1][0])
    for name, state in states(one).items():
        assert torch.equal(state, states(other)[name]), name


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
