"""Tensor- and sequence-parallel layers compute what one rank does. The ranks are threads; what processes add
is in ``test_processes``."""

from __future__ import annotations

import functools

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch.te_compat import parallel

from fp8kit import recipe
from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.recipes import NAMED
from fp8kit.testing import sum_slack
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close, largest

S, B, H, F, HEADS = 32, 2, 64, 128, 4
RECIPES = {
    "high": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "rowwise": NAMED["rowwise"].recipe,
    "nvfp4": recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}


def layer(ranks=None, sequence=False, **options):
    """A layer on the CPU with the same parameters at each call, those of a rank where there are ranks."""
    draws = torch.Generator().manual_seed(0)  # threads share torch's own
    common = {"hidden_dropout": 0, "attention_dropout": 0, "device": "cpu"} | options
    whole = te.TransformerLayer(H, F, HEADS, **common)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2, generator=draws)
    if ranks is None:
        return whole
    own = te.TransformerLayer(
        H, F, HEADS, tp_group=ranks, set_parallel_mode=True, sequence_parallel=sequence, **common
    )
    gated = options.get("activation") == "swiglu"
    for name, parameter in own.named_parameters():
        value = whole.get_parameter(name).detach()
        halves = 2 if gated and "fc1" in name else 1
        if parameter.shape != value.shape:
            dim = next(i for i in range(value.ndim) if value.shape[i] != parameter.shape[i])
            value = torch.cat([mine(half, ranks, dim) for half in value.chunk(halves, dim)], dim)
        parameter.data.copy_(value)
    return own


def mine(tensor, ranks, dim=0):
    return tensor.tensor_split(ranks.size, dim)[ranks.rank].contiguous()


def train(net, how, steps, ranks=None, sequence=False, **autocast):
    """Losses of so many steps, and y of the last one."""
    group = {} if ranks is None else {"amax_reduction_group": ranks}
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.02), []
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, goal = torch.randn(2, S, B, H, generator=draws)
        if sequence:
            x, goal = mine(x, ranks), mine(goal, ranks)
        optimizer.zero_grad()
        with te.autocast(enabled=how is not None, recipe=how, **group):
            y = net(x)
        loss = (y - goal).square().sum() / (S * B * H)
        loss.backward()
        if sequence:
            parallel.reduce_sequence_parallel_gradients(net, ranks)
        optimizer.step()
        total = loss.detach().reshape(1).clone()
        losses.append((parallel.allreduce(total, ranks)[0] if sequence else total).item())
    return losses, y.detach()


@functools.cache
def alone(how, steps, **options):
    return train(layer(**options), how, steps)


def compare(how, size, sequence, steps, **options):
    wanted, y = alone(how, steps, **options)
    made = FakeCollectives(size).run(
        lambda ranks: train(layer(ranks, sequence, **options), how, steps, ranks, sequence)
    )
    for losses, _ in made:
        # a sum in another order moves a code now and then, and a layer this small feels it for a while
        assert losses == pytest.approx(wanted, rel=1e-3 if steps < 10 else 1e-2)
        assert sum(losses) == pytest.approx(sum(wanted), rel=1e-3)
    whole = torch.cat([part for _, part in made]) if sequence else made[0][1]
    return y, whole


@combinations(
    {
        "how": list(RECIPES),
        "layout": {
            "2 ranks, by sequence": (2, True),
            "4 ranks, by sequence": (4, True),
            "2 ranks": (2, False),
        },
    }
)
def test_a_transformer_layer_of_several_ranks_is_that_of_one(how, layout, request):
    """Losses of three steps, and the last output: but for float32 sums in another order, which move a code
    now and then."""
    y, got = compare(RECIPES[how], *layout, 3)
    assert torch.linalg.vector_norm(got - y) < 1e-3 * torch.linalg.vector_norm(y)


@pytest.mark.programs
@pytest.mark.parametrize("how", [name for name in RECIPES if name != "high"])
@pytest.mark.parametrize("sequence", [False, True])
def test_losses_of_a_hundred_steps_are_those_of_one_rank(how, sequence):
    compare(RECIPES[how], 2, sequence, 100)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swiglu", "normalization": "RMSNorm", "fuse_qkv_params": True},
        {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm", "attn_input_format": "sbhd"},
        {"layer_type": "encoder", "parallel_attention_mlp": True, "bias": False},
        {"output_layernorm": True},
        {"norm_position": "after"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arrangements(options):
    y, got = compare(RECIPES["current"], 2, True, 1, **options)
    assert torch.linalg.vector_norm(got - y) < 1e-3 * torch.linalg.vector_norm(y)


def test_cached_weights_checkpoints_and_norms_of_all_rows():
    """``is_first_microbatch``, ``checkpoint``, ``return_layernorm_output_gathered``, ``return_bias``."""
    torch.manual_seed(0)
    x, how = torch.randn(S, B, H), RECIPES["current"]

    def make(ranks=None):
        shared = {"device": "cpu", "tp_group": ranks, "sequence_parallel": True}
        mlp = te.LayerNormMLP(H, F, set_parallel_mode=True, checkpoint=True, return_bias=True, **shared)
        kind = {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
        first = te.LayerNormLinear(H, F, parallel_mode="column", **kind, **shared)
        for i, parameter in enumerate([*mlp.parameters(), *first.parameters()]):
            with torch.no_grad():
                parameter.fill_(0.02 * (1 + i))
        return mlp, first

    def run(mlp, first, x):
        with te.autocast(recipe=how):
            for micro in (True, False):
                y, bias = mlp(x, is_first_microbatch=micro)
                z, normed = first(x, is_first_microbatch=micro)
        (y.sum() + z.sum() + normed.sum()).backward()
        return y.detach(), bias.detach(), z.detach(), normed.detach(), first.weight.grad

    def rank(ranks):
        return run(*make(ranks), mine(x, ranks))

    y, bias, z, normed, grad = run(*make(), x)
    parts = FakeCollectives(2).run(rank)
    assert torch.equal(parts[0][1], bias)
    assert torch.equal(torch.cat([p[2] for p in parts], -1), z)
    assert torch.equal(parts[1][3], normed)
    # F products in FP8, and gradients of S * B rows, in another order
    joined = torch.cat([p[0] for p in parts])
    assert_tensor_close("y", joined, y, sum_slack(largest(y), F))
    assert_tensor_close("dw", torch.cat([p[4] for p in parts]), grad, sum_slack(largest(grad), S * B))


def test_a_group_may_be_set_later():
    x = torch.randn(S, B, H)

    def rank(ranks):
        made = te.Linear(H, F, parallel_mode="column", tp_size=2, device="cpu")
        assert made.weight.shape == (F // 2, H)
        assert (made.weight.tensor_model_parallel, made.weight.partition_dim) == (True, 0)
        with pytest.raises(ArgumentError, match="Linear: tp_group: missing, expected a group of 2 ranks"):
            made(x)
        made.set_tensor_parallel_group(ranks)
        assert made.tp_group is ranks
        return made(x).shape

    assert FakeCollectives(2).run(rank) == [(S, B, F // 2)] * 2
    attention = te.MultiheadAttention(H, HEADS, tp_size=2, set_parallel_mode=True, device="cpu")
    group = FakeCollectives(3).ranks[0]
    with pytest.raises(ArgumentError, match=r"tp_group: got a group of 3, expected a group of 2 ranks"):
        attention.set_tensor_parallel_group(group)


def test_what_marks_parameters():
    """Megatron's names: parts, and gradients of the rank's rows alone."""
    ranks = FakeCollectives(2).ranks[0]
    made = te.TransformerLayer(
        H, F, HEADS, tp_group=ranks, set_parallel_mode=True, sequence_parallel=True, device="cpu"
    )
    summed = {n for n, p in made.named_parameters() if getattr(p, "sequence_parallel", False)}
    assert summed == {
        "self_attention.layernorm_qkv.layer_norm_weight",
        "self_attention.layernorm_qkv.layer_norm_bias",
        "self_attention.proj.bias",
        "layernorm_mlp.layer_norm_weight",
        "layernorm_mlp.layer_norm_bias",
        "layernorm_mlp.fc2_bias",
    }
    assert made.layernorm_mlp.fc2_weight.partition_dim == 1
    assert made.self_attention.core_attention.num_attention_heads == HEADS // 2


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda g: te.Linear(H, 33, parallel_mode="column", tp_group=g),
            ArgumentError,
            "out_features: got 33",
        ),
        (lambda g: te.Linear(33, H, parallel_mode="row", tp_group=g), ArgumentError, "in_features: got 33"),
        (lambda g: te.Linear(H, H, tp_group=g, tp_size=3), ArgumentError, "tp_size: got 3, expected 1, or 2"),
        (lambda g: te.LayerNormLinear(H, H, parallel_mode="row", tp_group=g), ArgumentError, "parallel_mode"),
        (
            lambda g: te.MultiheadAttention(H, HEADS, tp_group=g),
            ArgumentError,
            "set_parallel_mode: got False",
        ),
        (
            lambda g: te.MultiheadAttention(60, 3, tp_group=g, set_parallel_mode=True),
            ArgumentError,
            "num_attention_heads: got 3",
        ),
        (
            lambda g: te.LayerNormMLP(
                H, F, tp_group=g, set_parallel_mode=True, activation="swiglu", smooth_swiglu="token"
            ),
            UnsupportedError,
            "smooth_swiglu",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make(FakeCollectives(2).ranks[0])


def test_codes_come_and_go_in_high_precision():
    made = te.Linear(H, F, parallel_mode="column", tp_group=FakeCollectives(2).ranks[0], device="cpu")
    with pytest.raises(
        UnsupportedError, match="fp8_output: got True, expected False with tensor parallelism"
    ):
        made(torch.ones(S, H), fp8_output=True)


def test_functions_of_groups():
    """Sums, gathering and their gradients, as Transformer Engine's names have them."""

    def rank(ranks):
        x = torch.full((2, 3), float(ranks.rank + 1), requires_grad=True)
        whole, handle = parallel.gather_along_first_dim(x, ranks)
        assert handle is None
        assert whole[:, 0].tolist() == [1, 1, 2, 2]
        part, _ = parallel.reduce_scatter_along_first_dim(whole, ranks)
        assert part.tolist() == [[2.0 * (ranks.rank + 1)] * 3] * 2
        part.sum().backward()
        assert x.grad.tolist() == [[2.0] * 3] * 2
        assert parallel.allreduce(torch.ones(2), ranks)[0].tolist() == [2, 2]
        chunk = parallel.split_tensor_into_1d_equal_chunks(torch.arange(6.0), ranks, new_buffer=True)
        assert chunk.tolist() == [[0, 1, 2], [3, 4, 5]][ranks.rank]
        assert parallel.gather_split_1d_tensor(chunk, ranks).tolist() == list(range(6))

    FakeCollectives(2).run(rank)
