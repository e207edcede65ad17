"""An autocast within a compiled function holds where the function is not traced, too."""

import fp8kit_torch as ft
import pytest
import torch

from fp8kit.recipe import Float8BlockScaling, Float8CurrentScaling
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


@combinations({"name": list(_breaks(None))}, usual=["disabled", "another autocast", "graph break"])
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
