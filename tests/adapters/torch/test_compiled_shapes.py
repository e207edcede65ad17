"""How many graphs ``torch.compile`` makes of a layer whose batch and length change from call to call: as many
as of plain torch's modules, because no size of memory is compared while it is a symbol."""

from __future__ import annotations

import functools

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import router
from torch import nn
from torch._dynamo.utils import counters

from fp8kit.recipe import Float8BlockScaling
from tests.support.combinations import combinations

from .twins import RECIPES, WIDTH, same, scope

HEADS, FFN = 4, 64
# buffers of these take from 2 KiB to 2 MiB, below and above every size from which memory is shared
LENGTHS = (7, 100, 33, 520, 9, 1030, 16, 17, 250, 260, 64, 128, 127, 5, 1, 2)
SHAPES = {
    "batches and lengths": [(1 + length % 5, length) for length in LENGTHS],
    "lengths": [(4, length) for length in (*LENGTHS[:-2], 2, 2040, 3)],
}


class Block(nn.Module):
    """A layer of plain torch's modules."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x):
        """float32 (batch, length, WIDTH) to the same."""
        batch, length, _ = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def graphs_of(module, recipe, shapes, dynamic):
    """How many graphs forward and backward of these shapes make, in order."""
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with scope(ft, recipe):
        for shape in shapes:
            call(torch.randn(*shape, WIDTH)).sum().backward()
    return counters["stats"]["unique_graphs"]


@functools.cache
def graphs_of_plain_torch(shapes, dynamic):
    return graphs_of(Block(), None, SHAPES[shapes], dynamic)


def layer():
    return ft.TransformerLayer(
        WIDTH, FFN, HEADS, attn_input_format="bshd", hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    )


@combinations(
    {"recipe": RECIPES.keys(), "shapes": SHAPES.keys(), "dynamic": {"told": True, "found": None}}, usual=()
)
def test_no_more_than_of_plain_torch(recipe, shapes, dynamic):
    wanted = graphs_of_plain_torch(shapes, dynamic)
    assert wanted > 0
    if dynamic and recipe in ("delayed", "recent") and shapes == "batches and lengths":
        # all extents are symbols then, the states' too, and torch takes those that are equal at first (three
        # scales, a batch of three) for the same one
        wanted += 1
    assert graphs_of(layer(), RECIPES[recipe], SHAPES[shapes], dynamic) == wanted


EXPERTS, CHOICES = 4, 2


def choices(logits, score="softmax"):
    return router.fused_topk_with_score_function(logits, CHOICES, False, None, None, None, score, None)


def dispatched(x, logits):
    probs, mask = choices(logits)
    rows, _, row_map, _, sizes = ft.token_dispatch(x, mask, CHOICES * len(x), probs, align_size=16)
    return ft.moe_unpermute(rows, row_map, restore_shape=x.shape), sizes


def merged(x, logits):
    probs, index = logits.softmax(-1).topk(CHOICES, -1)
    rows, _, row_map, _, _ = ft.token_dispatch(x, index, CHOICES * len(x), num_experts=EXPERTS)
    return ft.moe_unpermute(rows, row_map, probs)


def permuted(x, logits):
    probs, mask = choices(logits, "sigmoid")
    rows, row_probs, row_map = ft.moe_permute_with_probs(x, probs, mask, CHOICES * len(x))
    return ft.moe_unpermute(rows * row_probs[:, None], row_map, restore_shape=x.shape)


def permuted_by_index(x, logits):
    rows, row_map = ft.moe_permute(x, logits.topk(CHOICES, -1).indices, 0, map_type="index")
    return ft.moe_unpermute(rows, row_map, logits.softmax(-1)[:, :CHOICES], map_type="index")


def aux_loss(x, logits):
    _, mask = choices(logits)
    _, scores = router.fused_compute_score_for_moe_aux_loss(logits, CHOICES, "softmax")
    return router.fused_moe_aux_loss(scores, mask.sum(0), len(x), EXPERTS, CHOICES, 0.1)


OF_EXPERTS = (dispatched, merged, permuted, permuted_by_index, aux_loss)


def calls_of(function, counts, **how):
    """(graphs, results of each number of tokens by the compiled function, by the function itself)."""
    torch._dynamo.reset()
    counters.clear()
    call, found = torch.compile(function, fullgraph=True, **how), []
    generator = torch.Generator().manual_seed(3)
    for count in counts:
        given = [torch.randn(count, n, generator=generator) for n in (WIDTH, EXPERTS)]
        found.append([call(*given), function(*given)])
    return counters["stats"]["unique_graphs"], found


def all_same(got, want):
    """Equal bits of a result, or of each of several."""
    several = isinstance(want, tuple)
    for i, pair in enumerate(zip(got, want, strict=True) if several else [(got, want)]):
        same(*pair, i)


@combinations({"function": OF_EXPERTS}, usual=["dispatched"])
def test_experts_take_any_number_of_tokens(function):
    """Two graphs for ten numbers, as of plain torch, and what the function gives itself."""
    graphs, found = calls_of(function, (5, 7, 9, 12, 17, 20, 33, 40, 41, 50), backend="aot_eager")
    assert graphs == calls_of(lambda x, logits: x.sum(-1), (5, 7, 9), backend="aot_eager")[0] == 2
    for got, want in found:
        all_same(got, want)


@pytest.mark.combinations
def test_experts_by_inductor():
    """Whose C++ takes no view of bytes as truth values between router and dispatch."""
    _, found = calls_of(dispatched, (16, 63))
    for got, want in found:
        all_same(got, want)


@combinations({"rows": {str(rows): rows for rows in ([0], [5, 6, 0], [0, 5, 6])}}, usual=["[5, 6, 0]"])
def test_no_rows(rows):
    """Of an input without a gradient, of which blocks alone are saved; by Inductor too."""
    linear = ft.Linear(WIDTH, WIDTH, device="cpu")
    call = torch.compile(linear, fullgraph=True)
    for count in rows:
        x, grads = torch.randn(count, WIDTH), []
        for function in (linear, call):
            linear.zero_grad()
            with ft.autocast(recipe=Float8BlockScaling()):
                y = function(x)
            y.sum().backward()
            grads.append((y.detach(), linear.weight.grad, linear.bias.grad))
        for got, want in zip(*grads, strict=True):
            same(got, want, count)


def test_a_list_that_compiled_code_reads_is_refused_by_name():
    """A graph is made for each list of sizes; one that the graph itself reads has no values yet."""
    layer = ft.GroupedLinear(EXPERTS, WIDTH, FFN, device="cpu")
    torch._dynamo.reset()
    call = torch.compile(lambda x, sizes: layer(x, sizes), fullgraph=True, backend="eager")
    for sizes in ([2, 3, 1, 2], [8, 0, 0, 0]):
        x = torch.randn(8, WIDTH)
        assert torch.equal(call(x, sizes), layer(x, sizes))
    read = torch.compile(lambda x, sizes: layer(x, sizes.tolist()), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"GroupedLinear.*the tensor itself, with use_grouped_tensor=True"):
        read(torch.randn(8, WIDTH), torch.tensor([2, 3, 1, 2]))
