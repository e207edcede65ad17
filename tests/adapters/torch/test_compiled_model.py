"""What a converted model becomes within ``torch.compile``: one graph, one opaque op for each product and
norm, and no copies at their boundaries."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fp8kit_torch import autocast, convert
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from tests.support.combinations import combinations
from tests.support.torch_norms import LlamaLikeRMSNorm

D, HEADS, WIDE = 32, 2, 48


class Block(nn.Module):
    """A Llama's layer without its rotation: two norms, seven products."""

    def __init__(self):
        super().__init__()
        self.first, self.second = LlamaLikeRMSNorm(D), LlamaLikeRMSNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(D, WIDE, bias=False), nn.Linear(D, WIDE, bias=False)
        self.down = nn.Linear(WIDE, D, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        h = self.first(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def graphs_of(recipe):
    """Calls by name of the forward's and of the backward's graph."""
    found = []

    def count(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        names = []
        for node in nodes:
            inner = node.args[0] if "auto_functionalized" in str(node.target) else node.target
            names.append(str(inner).removesuffix(".default"))
        found.append(Counter(names))
        return lambda values: graph.forward(*values)

    def boxed(graph, inputs):
        call = count(graph, inputs)
        call._boxed_call = True
        return call

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=boxed,
        bw_compiler=boxed,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    block = torch.compile(convert(Block()), backend=backend, fullgraph=True)
    x = torch.randn(2, 16, D, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=recipe):
        y = block(x)
    y.backward(torch.ones_like(y))
    torch._dynamo.reset()
    assert len(found) == 2  # one graph, and its backward
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@combinations({"recipe": {"delayed": DelayedScaling(), "current": Float8CurrentScaling()}}, usual=["delayed"])
def test_what_is_in_the_graphs(recipe):
    """Every product and norm is called once in each direction, and that call records delayed scaling's amaxes
    too. No copy is made for them: what is left beside them the compiler fuses."""
    directions = graphs_of(recipe)
    records = ".recorded" if isinstance(recipe, DelayedScaling) else ""
    for found, suffix in zip(directions, ("_forward", "_backward"), strict=True):
        ours = {name: count for name, count in found.items() if name.startswith("fp8kit")}
        assert ours == {f"fp8kit.linear{suffix}{records}": 7, f"fp8kit.norm{suffix}": 2}
    forward, backward = directions
    assert forward["aten.clone"] == 0
    assert backward["aten.clone"] == 0


def test_a_record_is_refused_for_a_state_that_is_gone():
    from fp8kit_torch.library import FORWARD, record_

    from fp8kit.errors import ArgumentError
    from fp8kit.execution.codec import encode

    history, amaxes = torch.zeros(2, 3), torch.tensor([1.0, float("nan"), 2.0])
    handle = torch.tensor(2**40)
    with pytest.raises(ArgumentError, match="a state of a module that is alive"):
        record_(history, amaxes, handle, encode(DelayedScaling().history), FORWARD)
    assert history[0].tolist() == [1.0, 0.0, 2.0]
