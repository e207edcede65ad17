"""Gated MLPs of converted models within ``torch.compile``: one operation where eager code has one, with its
bits and its layers' states, compiled anew where something that decides that is replaced."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fp8kit_torch import autocast, convert
from fp8kit_torch.bound import TorchOp
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fp8kit.errors import Fp8kitError
from fp8kit.layer_recipes import PerLayer
from fp8kit.recipe import Float8CurrentScaling
from tests.support.combinations import combinations

from .gated_mlps import MLP, RECIPE, WIDE, D, Lora, Net, Plain, Tanh, batch, states, train

ONE = {"linear": 2, "gated_mlp": 1}  # what a call of Net runs, with its MLP as one operation
APART = {"linear": 5}


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ran(monkeypatch):
    """Number of operations that ran, by name, forward or backward; cleared by who looks at it."""
    found = Counter()
    for name in ("call", "call_backward"):
        before = getattr(TorchOp, name)

        def noted(op, *rest, before=before, **named):
            found[op.operation.name] += 1
            return before(op, *rest, **named)

        monkeypatch.setattr(TorchOp, name, noted)
    return found


def compiled(net, **options):
    return torch.compile(net, **{"backend": "eager", "fullgraph": True} | options)


def same_training(ran, one, other, call, wanted, recipe=RECIPE):
    """Both train for two steps, one by ``call``, and have the same bits and the operations ``wanted``."""
    found = []
    for net, how in ((one, call), (other, None)):
        ran.clear()
        found.append(train(net, 2, recipe, call=how))
        assert {name: count / 4 for name, count in ran.items()} == wanted
    (y, grads), (y_want, wanted_grads) = found
    assert torch.equal(y, y_want)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, wanted_grads[name]), name
    for name, state in states(one).items():
        assert torch.equal(state, states(other)[name]), name


def pair(device="cpu", **options):
    return [convert(Net(**options).to(device)) for _ in range(2)]


@combinations(
    {
        "backend": {"aot_eager": "aot_eager", "inductor": "inductor"},
        "options": {"swiglu": {}, "geglu, biases": {"bias": True, "act": Tanh()}, "function": {"mlp": Plain}},
    },
    usual=["aot_eager-swiglu"],
)
def test_it_is_the_eager_operation(options, backend, device, ran):
    one, other = pair(device, **options)
    torch.manual_seed(1)
    want = torch.rand(1)
    torch.manual_seed(1)
    same_training(ran, one, other, compiled(one, backend=backend), ONE)
    assert torch.equal(torch.rand(1), want)  # a copy of the MLP is tried while it is traced
    assert counters["stats"]["unique_graphs"] == 1
    with torch.no_grad(), autocast(recipe=RECIPE):
        ran.clear()
        assert torch.equal(compiled(one)(batch(9, device=device)), other(batch(9, device=device)))
    assert ran == {name: 2 * count for name, count in ONE.items()}
    for name, state in states(one).items():
        assert torch.equal(state, states(other)[name]), name


class Reshaped(MLP):
    """Looks at its input's shape, on the way too."""

    def forward(self, x):
        batch, length, _ = x.shape
        gate, up = self.gate_proj(x).reshape(batch * length, -1), self.up_proj(x).view(-1, WIDE)
        return self.down_proj((self.act_fn(gate) * up).view(batch, length, WIDE))


class Inherited(MLP):
    def forward(self, x):
        return super().forward(x)


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return functional.silu(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * s * (1 + x * (1 - s))


class Own(nn.Module):
    """An activation with a gradient of its own."""

    def forward(self, x):
        return Silu.apply(x)


FORWARDS = {
    "inherited": ({"mlp": Inherited}, ONE),
    "a gradient of its own": ({"act": Own()}, ONE),
    "act in another shape": ({"mlp": Reshaped}, APART),
}


@combinations({"what": FORWARDS.keys()}, usual=())  # test_what_is_replaced_later_is_compiled_anew
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_forwards(what, ran):
    """Whatever the MLP's own forward is, the graph is one, and has the operation where eager code has it."""
    options, wanted = FORWARDS[what]
    one, other = pair(**options)
    same_training(ran, one, other, compiled(one), wanted)


def test_nothing_of_the_mlps_own_forward_is_left_in_the_graph():
    """It was looked at on the meta device."""
    seen = []

    def keep(graph, inputs):
        seen.append(graph)
        return make_boxed_func(graph.forward)

    net = convert(Net())
    train(net, 1, call=compiled(net, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)))
    names = [str(node.target) for graph in seen for node in graph.graph.nodes]
    assert len(seen) == 2
    assert not [name for name in names if "silu" in name or "aten.mul" in name or "empty_like" in name]
    devices = {
        node.meta["val"].device.type
        for graph in seen
        for node in graph.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    assert devices == {"cpu"}


REPLACED = {
    "by another known one": lambda mlp: setattr(mlp, "act_fn", nn.ReLU()),
    "by an unknown one": lambda mlp: setattr(mlp, "act_fn", nn.Tanh()),
    "by name": lambda mlp: mlp._modules.update(act_fn=nn.Tanh()),
    "a function": lambda mlp: setattr(mlp, "function", torch.tanh),
    "a layer": lambda mlp: setattr(mlp, "up_proj", Lora(mlp.up_proj)),
    "a layer's forward": lambda mlp: setattr(
        mlp.up_proj, "forward", lambda x, own=mlp.up_proj.forward: own(2 * x)
    ),
    "frozen": lambda mlp: mlp.gate_proj.requires_grad_(False),
}


@combinations({"what": REPLACED.keys()}, usual=["by an unknown one"])
def test_what_is_replaced_later_is_compiled_anew(what, ran):
    one, other = pair(mlp=Plain if what == "a function" else MLP)
    call = compiled(one)
    same_training(ran, one, other, call, ONE)
    for net in (one, other):
        torch.manual_seed(1)  # of the adapter
        REPLACED[what](net.mlp)
    wanted = {"by another known one": ONE, "a layer": {"linear": 5}}.get(what, APART)
    same_training(ran, one, other, call, wanted)


@pytest.mark.combinations
def test_hooks(ran):
    """Which are there before, as everywhere within torch.compile."""
    nets = pair()
    for net in nets:
        net.mlp.down_proj.register_forward_hook(lambda part, args, y: y * 2)
    same_training(ran, *nets, compiled(nets[0]), APART)


RULES = {
    "another recipe": (Float8CurrentScaling(), APART),
    "its layer in high precision": (PerLayer(RECIPE, (("mlp.up_proj", None),)), APART),
    "another layer in high precision": (PerLayer(RECIPE, (("first", None),)), ONE),
}


@combinations({"what": RULES.keys()}, usual=["its layer in high precision"])
def test_other_recipes(what, ran):
    (recipe, wanted), nets = RULES[what], pair()
    for net in nets:
        for name, part in net.named_modules():
            part.name = name
    same_training(ran, *nets, compiled(nets[0]), wanted, recipe)


def test_frozen_as_a_whole(ran):
    one, other = pair()
    for net in (one, other):
        for part in (net.first, net.mlp):
            part.requires_grad_(False)
    same_training(ran, one, other, compiled(one), {"linear": 1.5, "gated_mlp": 0.5})  # one of two backward


class Breaking(nn.SiLU):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.combinations  # test_graph_breaks has breaks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_an_activation_that_breaks_the_graph(ran):
    """What is around it is compiled, and what it would have seen is on the meta device."""
    one, other = convert(Net(act=Breaking())), convert(Net())
    same_training(ran, one, other, compiled(one, fullgraph=False), ONE)
    assert counters["graph_break"]


@pytest.mark.combinations
def test_shapes_that_change():
    """One graph for all lengths, as without the operation."""
    found = []
    for fused in (True, False):
        torch._dynamo.reset()
        counters.clear()
        net = convert(Net(), gated_mlp=fused)
        call = compiled(net, dynamic=True)
        for rows in (10, 33, 7, 100, 16):
            x = batch(rows, rows=rows)
            with autocast(recipe=RECIPE):
                y = call(x)
            y.sum().backward()
            with autocast(recipe=RECIPE), torch.no_grad():
                want = net(x)
            assert y.shape == want.shape == x.shape
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]


def test_autocast_within_the_compiled_function(ran):
    """The graph itself updates the states."""
    one, other = pair()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x):
        with autocast(recipe=RECIPE):
            return one(x)

    for seed in range(3):
        call(batch(seed)).backward(batch(100 + seed))
    train(other, 3)
    for name, state in states(one).items():
        assert torch.equal(state, states(other)[name]), name
    assert ran["gated_mlp"] == 12


@pytest.mark.programs
def test_a_model_of_transformers_calls_what_it_calls_in_eager_code(ran):
    """In both directions: four products and an operation for three a layer, the norms, and the head."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": D, "intermediate_size": WIDE, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(0)
    model = convert(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    tokens, found = torch.randint(64, (2, 16)), []
    for call in (model, compiled(model, dynamic=False)):
        for _ in range(2):
            ran.clear()
            with autocast(recipe=RECIPE):
                loss = call(tokens, labels=tokens).loss
            loss.backward()
        found.append(dict(ran))
    assert found[0] == found[1] == {"linear": 2 * 9, "gated_mlp": 2 * 2, "norm": 2 * 5}


def test_within_torch_autocast(ran):
    """Parameters of float32."""
    one, other = (convert(Net().float()) for _ in range(2))
    found = []
    for call in (compiled(one), other):
        with torch.autocast("cpu", torch.bfloat16), autocast(recipe=RECIPE):
            y = call(batch(dtype=torch.float32))
        y.backward(batch(3))
        found.append(y)
    assert torch.equal(*found)
    assert ran["gated_mlp"] == 4
    assert torch.equal(one.mlp.gate_proj.weight.grad, other.mlp.gate_proj.weight.grad)


def test_a_checkpoint_without_gradients(ran):
    """Its layers one by one, as what is traced there may change nothing around it."""
    one, other = pair()
    train(one, 1), train(other, 1)
    ran.clear()

    def call(x):
        return one.last(checkpoint(one.mlp, one.first(x), use_reentrant=False))

    with autocast(recipe=RECIPE), torch.no_grad():
        y = compiled(call)(batch())
    assert ran == APART
    assert y.shape == (2, 10, D)


@pytest.mark.combinations  # test_it_is_the_eager_operation calls it without gradients, too
def test_in_inference_mode(ran):
    one, other = pair()
    train(one), train(other)
    before = states(one)
    ran.clear()
    with torch.inference_mode(), autocast(recipe=RECIPE):
        assert torch.equal(compiled(one)(batch(9)), other(batch(9)))
    assert ran == {name: 2 * count for name, count in ONE.items()}
    assert all(torch.equal(state, before[name]) for name, state in states(one).items())


def test_on_the_meta_device_a_layer_has_a_shape_alone(ran):
    """What the MLP's own forward sees, in eager code too where a graph breaks within it."""
    net = convert(Net())
    x = torch.empty(3, 1, D, dtype=torch.bfloat16, device="meta")
    with autocast(recipe=RECIPE):
        y = net.mlp.gate_proj(x)
    assert (y.shape, y.dtype, y.device.type) == ((3, 1, WIDE), x.dtype, "meta")
    with pytest.raises(Fp8kitError, match=r"^Linear: inp"):
        net.mlp.gate_proj(x[..., 1:])
    assert not ran
