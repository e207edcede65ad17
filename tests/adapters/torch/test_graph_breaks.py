"""An autocast within a compiled function holds where the function is not traced, too."""

import fp8kit_torch as ft
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.support.combinations import combinations

X = torch.randn(8, 32)


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return ft.Linear(32, 32, device="cpu")


def _within(recipe, call):
    with ft.autocast(recipe=recipe):
        return call()


def _breaks(layer):
    """Functions with a piece that is not traced: name -> what runs within the autocast, from x."""
    plain = torch._dynamo.disable(lambda y: layer(y))
    nested = torch._dynamo.disable(lambda y: _within(Float8BlockScaling(), lambda: layer(y)))

    def broken(x):
        y = layer(x)
        torch._dynamo.graph_break()
        return layer(y)

    def branched(x):
        y = layer(x)
        return layer(y) if y.sum() > 0 else layer(-y)

    return {
        "disabled": lambda x: plain(x * 2),
        "disabled behind a traced layer": lambda x: plain(layer(x)),
        "another autocast": lambda x: layer(nested(layer(x))),
        "graph break": broken,
        "branch": branched,
    }


@combinations({"name": list(_breaks(None))}, usual=["graph break"])
def test_it_holds_there(layer, name):
    inner = _breaks(layer)[name]

    def function(x):
        with ft.autocast(recipe=Float8CurrentScaling()):
            return inner(x)

    with torch.no_grad():  # Dynamo itself warns of a tensor between two pieces that wants a gradient
        wanted = function(X)
        high = inner(X)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(X), wanted)
        assert not torch.equal(wanted, high)
        assert torch.equal(inner(X), high)  # nothing stays on


def test_an_error_within_leaves_nothing_on(layer):
    @torch._dynamo.disable
    def fail(y):
        raise ValueError("a user's own")

    def function(x):
        with ft.autocast(recipe=Float8CurrentScaling()):
            return fail(layer(x))

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    high = layer(X)
    for _ in range(2):
        with pytest.raises(ValueError, match="a user's own"):
            compiled(X)
        assert torch.equal(layer(X), high)


def _untraced(layer):
    """What no graph holds, beside a layer that is traced: name -> what runs within the autocast."""
    first, second = layer
    return {
        "disabled": lambda x: torch._dynamo.disable(second)(first(x)),
        "a graph break": lambda x: (torch._dynamo.graph_break(), second(first(x)))[1],
        "a checkpoint": lambda x: second(checkpoint(first, x, use_reentrant=False)),
        "a reentrant checkpoint": lambda x: second(checkpoint(first, x, use_reentrant=True)),
        "fp8_output": lambda x: second(first(x, fp8_output=True)),
        "main_grad": lambda x: second(first(x)),
        "weights in FP8": lambda x: second(first(x)),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@combinations({"name": list(_untraced((None, None)))}, usual=["a checkpoint"])
def test_delayed_scaling_goes_on_in_what_is_left_to_eager_code(name):
    def trained(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        fused = {"fuse_wgrad_accumulation": True} if name == "main_grad" else {}
        with ft.quantized_model_init(enabled=name == "weights in FP8"):
            first = ft.Linear(32, 64, device="cpu", **fused)
        layer = torch.nn.Sequential(first, ft.LayerNormMLP(64, 32, device="cpu"))
        if fused:
            layer[0].weight.main_grad = torch.zeros(64, 32)
        inner, recipe = _untraced(layer)[name], DelayedScaling(amax_history_len=3)

        def function(x):
            with ft.autocast(recipe=recipe):
                return inner(x)

        call = torch.compile(function, backend="eager") if compiled else function
        found = []
        for step in range(4):
            x = (X * (step + 1)).requires_grad_()
            y = call(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        grads = [p.grad if p.grad is not None else p.main_grad for p in layer.parameters()]
        states = [part for own in layer for state in own.fp8_meta.values() for part in state.parts]
        return found + grads + [part.clone() for part in states]

    for got, want in zip(trained(True), trained(False), strict=True):
        assert torch.equal(got, want)


def _attention():
    """A function whose attention gives FP8, and its input."""
    attention = ft.DotProductAttention(2, 16, attention_dropout=0.0)
    recipe = Float8CurrentScaling(fp8_dpa=True)

    def function(q):
        with ft.autocast(recipe=recipe):
            return attention(q * 2, q, q, fp8_output=True)

    torch._dynamo.reset()
    return function, torch.randn(8, 2, 2, 16)


@pytest.mark.combinations
def test_attention_gives_fp8_from_eager_code():
    function, q = _attention()
    compiled = torch.compile(function, backend="eager")(q)
    assert isinstance(compiled, ft.QuantizedTensor)
    assert torch.equal(compiled.dequantize(), function(q).dequantize())


@pytest.mark.filterwarnings("ignore:.*Dynamo detected a call:UserWarning")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_a_wrong_keyword_is_told_the_right_one(kind, whole):
    layer = getattr(ft, kind)(16, 16, device="cpu")
    call = torch.compile(layer, fullgraph=whole, backend="eager")
    kind_of_error = torch._dynamo.exc.Unsupported if whole else TypeError
    with pytest.raises(kind_of_error, match=rf"{kind}.forward\(\) .* did you mean is_first_microbatch\?"):
        call(torch.ones(16, 16), first=True)


def test_attention_gives_no_fp8_in_one_graph():
    function, q = _attention()
    with pytest.raises(Exception, match="fp8_output of DotProductAttention is not supported within"):
        torch.compile(function, backend="eager", fullgraph=True)(q)


def test_what_it_recorded_before_an_error_is_dropped():
    torch.manual_seed(0)
    layer, recipe = ft.Linear(32, 32, device="cpu"), DelayedScaling(amax_history_len=3)

    @torch._dynamo.disable
    def fail(x):
        layer(x)
        raise ValueError("a user's own")

    def function(x):
        with ft.autocast(recipe=recipe):
            return fail(x * 2)

    torch._dynamo.reset()
    with pytest.raises(ValueError, match="a user's own"):
        torch.compile(function, backend="eager")(X)
    state = layer.fp8_meta["scaling_fwd"]
    assert (state.amax_history == 0).all()
    assert (state.scale == 1).all()
