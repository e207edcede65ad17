"""Attention of ranks that divide the sequences gives what one rank gives. The ranks are threads; what
processes add is in ``test_distributed``, the native frontend in ``tests/nn/test_context_parallel``."""

from __future__ import annotations

import functools

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch import layer as torch_layer
from fp8kit_torch.te_compat import context_batches as batches
from fp8kit_torch.te_compat import parallel
from fp8kit_torch.te_compat.extension_sequences import thd_get_partitioned_indices

from fp8kit import recipe
from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit.recipes import NAMED
from fp8kit.testing import sum_slack
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close, largest

B, S, H, D = 2, 32, 4, 16
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LAYOUTS = [
    (form, mask)
    for form in ("sbhd", "bshd", "thd")
    for mask in ("no_mask", "causal", "padding", "padding_causal")
    if form != "thd" or "padding" in mask
]
# A number is a sum of at most S products, in another order: S roundings of 2^-24; merging the parts of a row
# rounds some times more. Relative to the largest number.
APART = (S + 8) * 2.0**-24


class Case:
    """Arrays of whole sequences, and which part of them a rank has."""

    def __init__(self, form, mask, size, groups=H, dims=(D, D), gaps=False, keys=S):
        draws = torch.Generator().manual_seed(0)
        self.form, self.size, self.options = form, size, {}
        shapes = [(H, dims[0]), (groups, dims[0]), (groups, dims[1]), (H * dims[1],)]
        lengths = [S, keys, keys, S]
        if form == "thd":
            whole = torch.tensor([16, 8, S, 8])
            starts = torch.nn.functional.pad(whole.cumsum(0), (1, 0)).int()
            sums = torch.tensor([0, 13, 20, 20 + S, 28 + S], dtype=torch.int32) if gaps else starts
            self.options = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
            if gaps:
                self.options |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
            self.starts, tokens = starts, int(starts[-1])
            leading = [(tokens,)] * 4
        else:
            leading = [(n, B) if form == "sbhd" else (B, n) for n in lengths]
            if "padding" in mask:
                sums = torch.tensor([0, 29, 43], dtype=torch.int32)
                self.options = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
        made = (torch.randn(*lead, *s, generator=draws) for lead, s in zip(leading, shapes, strict=True))
        self.q, self.k, self.v, self.g = made

    def part(self, x, rank):
        """A rank's two chunks of each sequence."""
        if self.form == "thd":
            return x[thd_get_partitioned_indices(self.starts, len(x), self.size, rank).long()].contiguous()
        dim = self.form.index("s")
        chunks = x.chunk(2 * self.size, dim)
        return torch.cat([chunks[rank], chunks[2 * self.size - 1 - rank]], dim).contiguous()


def group_of(kind, ranks):
    """``cp_group``: pairs of neighbours exchange heads where there are two groups."""
    return [ranks.split(ranks.rank // 2), ranks.split(ranks.rank % 2)] if kind == "a2a+p2p" else ranks


def compare(case, kind, make, call=None, apart=APART):
    """o, dq, dk and dv of ranks against those of one rank. Returns the modules, the single one last."""

    def step(layer, own):
        leaves = [own(x).clone().requires_grad_() for x in (case.q, case.k, case.v)]
        o = layer(*leaves, **case.options) if call is None else call(layer, *leaves)
        o.backward(own(case.g).to(o.dtype))
        return [o.detach(), *(leaf.grad for leaf in leaves)]

    alone = make()
    wanted = step(alone, lambda x: x)
    layers = [make() for _ in range(case.size)]

    def rank(ranks):
        layer = layers[ranks.rank]
        layer.set_context_parallel_group(group_of(kind, ranks), [0, 1], None, kind)
        return step(layer, lambda x: case.part(x, ranks.rank))

    for i, got in enumerate(FakeCollectives(case.size).run(rank)):
        for name, own, whole in zip(("o", "dq", "dk", "dv"), got, wanted, strict=True):
            off = (own - case.part(whole, i)).abs().max() / whole.abs().max()
            assert off <= apart, (name, i, float(off))
    return [*layers, alone]


@combinations(
    {
        "kind": {kind.replace("+", "_"): kind for kind in KINDS},
        "layout": {"_".join(layout): layout for layout in LAYOUTS},
        "size": (2, 4),
    }
)
def test_each_way_gives_what_one_rank_gives(kind, layout, size):
    form, mask = layout
    case = Case(form, mask, size)
    compare(case, kind, lambda: te.DotProductAttention(H, D, qkv_format=form, attn_mask_type=mask))


OPTIONS = {
    "grouped_heads": ("bshd", "causal", {"num_gqa_groups": 2}, {"groups": 2}, KINDS),
    "values_of_other_size": ("sbhd", "causal", {"kv_channels": (D, 8)}, {"dims": (D, 8)}, KINDS),
    "gaps": ("thd", "padding_causal", {}, {"gaps": True}, KINDS),
    "other_keys": ("sbhd", "no_mask", {}, {"keys": 2 * S}, KINDS),
    "other_keys_in_chunks": ("bshd", "padding", {}, {"keys": 2 * S}, KINDS),
    "window": ("bshd", "causal", {"window_size": (5, 0)}, {}, ("all_gather", "a2a")),
    "packed_window": ("thd", "padding_causal", {"window_size": (5, 0)}, {}, ("all_gather", "a2a")),
    "two_sided_window": ("sbhd", "no_mask", {"window_size": (5, 3)}, {}, ("a2a",)),
    "bottom_right": ("bshd", "causal_bottom_right", {}, {}, ("a2a",)),
    "softcap": ("bshd", "causal", {"softcap": 0.5}, {}, KINDS),
    "packed_softcap": ("thd", "padding_causal", {"softcap": 0.5}, {"gaps": True}, KINDS),
    "off_by_one": ("bshd", "causal", {"softmax_type": "off-by-one"}, {}, ("all_gather", "a2a")),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    form, mask, options, sizes, kinds = OPTIONS[name]
    options = {"kv_channels": D} | options
    for kind in kinds:
        case = Case(form, mask, 2, **sizes)
        compare(
            case, kind, lambda: te.DotProductAttention(H, qkv_format=form, attn_mask_type=mask, **options)
        )


@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
def test_gradients_of_learnable_offsets_are_summed_over_the_ranks(kind):
    def make():
        made = te.DotProductAttention(H, D, softmax_type="learnable", device="cpu")
        made.softmax_offset.data.copy_(torch.arange(H) - 1.0)
        return made

    *layers, alone = compare(Case("sbhd", "causal", 2), kind, make)
    total, wanted = sum(layer.softmax_offset.grad for layer in layers), alone.softmax_offset.grad
    # sums over batch and rows, of either sign
    assert_tensor_close("doffset", total, wanted, sum_slack(1 + largest(wanted), B * S))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_layers_and_recomputing(kind):
    """``qkv_layer``, interleaved too, and ``kv_layer``; ``checkpoint_core_attention``."""
    case = Case("sbhd", "causal", 2)

    def one_array(layer, q, k, v):
        return layer(
            qkv_layer=torch.cat([x.flatten(2) for x in (q, k, v)], 2), checkpoint_core_attention=True
        )

    def head_by_head(layer, q, k, v):
        return layer(qkv_layer=torch.cat([q, k, v], 3).flatten(2), qkv_interleave_dim=-2)

    def two_arrays(layer, q, k, v):
        return layer(q, kv_layer=torch.cat([k.flatten(2), v.flatten(2)], 2))

    for call in (one_array, head_by_head, two_arrays):
        compare(case, kind, lambda: te.DotProductAttention(H, D), call)


@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_exchanged_heads_drop_what_they_drop_on_one_rank(form, monkeypatch):
    """Given one random state; draws are counted by head, row and column of the whole."""
    monkeypatch.setattr(torch_layer, "next_rng", lambda device: torch.tensor([3, 4]))
    mask = "padding_causal" if form == "thd" else "no_mask"
    options = {"qkv_format": form, "attn_mask_type": mask, "attention_dropout": 0.3}
    compare(Case(form, mask, 2), "a2a", lambda: te.DotProductAttention(H, D, **options), apart=0)


@combinations({"form": ["bshd", "thd"], "kind": KINDS})
def test_quantised_attention(kind, form):
    """Parts are cast by amaxes of their own, so that codes differ; the errors are of the size of one rank's:
    twice as large at most, of operands that are drawn alike everywhere."""
    mask = "padding_causal" if form == "thd" else "causal"
    case, how = Case(form, mask, 2), recipe.Float8CurrentScaling(fp8_dpa=True)

    def outputs(enabled, layer, own):
        leaves = [own(x).clone().requires_grad_() for x in (case.q, case.k, case.v)]
        with te.autocast(enabled=enabled, recipe=how):
            o = layer(*leaves, **case.options)
        o.backward(own(case.g))
        return [o.detach(), *(leaf.grad for leaf in leaves)]

    def rank(ranks):
        layer = te.DotProductAttention(
            H, D, qkv_format=form, attn_mask_type=mask, cp_group=group_of(kind, ranks), cp_comm_type=kind
        )
        return outputs(True, layer, lambda x: case.part(x, ranks.rank))

    alone = te.DotProductAttention(H, D, qkv_format=form, attn_mask_type=mask)
    exact, single = (outputs(enabled, alone, lambda x: x) for enabled in (False, True))
    ranks = FakeCollectives(2).run(rank)
    for i, (high, low) in enumerate(zip(exact, single, strict=True)):
        off = torch.cat([ranks[r][i] - case.part(high, r) for r in range(2)], 0 if form == "thd" else 1)
        usual = torch.linalg.vector_norm(low - high)
        assert 0 < torch.linalg.vector_norm(off) <= 2 * usual


# --- layers -------------------------------------------------------------------------------------------------


def layer(seed=0, **options):
    common = {"hidden_dropout": 0, "attention_dropout": 0, "num_gqa_groups": 2, "device": "cpu"}
    made = te.TransformerLayer(64, 128, 4, **(common | options))
    draws = torch.Generator().manual_seed(seed)  # threads share torch's own
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2, generator=draws)
    return made


@combinations({"kind": KINDS[:3], "form": ["sbhd", "bshd", "thd"]})
def test_a_transformer_layer(kind, form):
    """With rotary embeddings of the whole positions: y, dx, and the sums of the weights' gradients."""
    mask = "padding_causal" if form == "thd" else "causal"
    options = {"attn_input_format": form, "self_attn_mask_type": mask}
    if kind == "p2p":
        options |= {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm"}
    case = Case(form, mask, 2)
    x = case.g
    angles = te.RotaryPositionEmbedding(16)(S)

    def step(made, x):
        x = x.clone().requires_grad_()
        y = made(x, rotary_pos_emb=angles, **case.options)
        y.square().sum().backward()
        return y.detach(), x.grad, [parameter.grad for parameter in made.parameters()]

    def rank(ranks):
        made = layer(**options)
        made.set_context_parallel_group(ranks, [0, 1], None, kind)
        assert made.self_attention.core_attention.context.kind == kind
        return step(made, case.part(x, ranks.rank))

    def close(got, wanted):
        # a dozen products, each of sums in another order
        assert torch.linalg.vector_norm(got - wanted) <= 12 * APART * torch.linalg.vector_norm(wanted)

    y, dx, weights = step(layer(**options), x)
    ranks = FakeCollectives(2).run(rank)
    for r, (own, grad, _) in enumerate(ranks):
        close(own, case.part(y, r))
        close(grad, case.part(dx, r))
    for i, wanted in enumerate(weights):
        close(sum(grads[i] for *_, grads in ranks), wanted)


def test_parts_of_weights_and_of_sequences():
    """Two ranks share the weights, two pairs of them divide the sequences."""
    case, x = Case("sbhd", "causal", 2), torch.randn(S, B, 64, generator=torch.Generator().manual_seed(2))
    options = {"num_gqa_groups": 4, "parallel_attention_mlp": True}
    whole = layer(**options)
    y = whole(x).detach()

    def rank(ranks):
        context, tensor = ranks.split(ranks.rank % 2), ranks.split(ranks.rank // 2)
        made = layer(tp_group=tensor, set_parallel_mode=True, **options)
        for name, parameter in made.named_parameters():
            value = whole.get_parameter(name).detach()
            dim = next((i for i, n in enumerate(parameter.shape) if n != value.shape[i]), None)
            parameter.data.copy_(value if dim is None else value.tensor_split(2, dim)[tensor.rank])
        made.set_context_parallel_group(context, None, None, "p2p")
        got, wanted = made(case.part(x, context.rank)).detach(), case.part(y, context.rank)
        return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted))

    assert max(FakeCollectives(4).run(rank)) <= 12 * APART


def train(case, how, steps, ranks=None, kind=None):
    """Losses over all ranks."""
    net = layer(attn_input_format="sbhd")
    group = {} if ranks is None else {"amax_reduction_group": ranks}
    if ranks is not None:
        net.set_context_parallel_group(group_of(kind, ranks), None, None, kind)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.02), []
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, goal = torch.randn(2, S, B, 64, generator=draws)
        if ranks is not None:
            x, goal = case.part(x, ranks.rank), case.part(goal, ranks.rank)
        optimizer.zero_grad()
        with te.autocast(enabled=how is not None, recipe=how, **group):
            y = net(x)
        loss = (y - goal).square().sum() / (S * B * 64)
        loss.backward()
        for parameter in net.parameters():
            parallel.allreduce(parameter.grad, ranks)
        optimizer.step()
        losses.append(parallel.allreduce(loss.detach().reshape(1).clone(), ranks)[0].item())
    return losses


@functools.cache
def alone(how, steps):
    return train(Case("sbhd", "causal", 2), how, steps)


def compare_training(how, kind, steps):
    case = Case("sbhd", "causal", 2)
    wanted = alone(how, steps)
    for losses in FakeCollectives(2).run(lambda ranks: train(case, how, steps, ranks, kind)):
        assert losses[0] == pytest.approx(wanted[0], rel=1e-2)
        assert sum(losses) == pytest.approx(sum(wanted), rel=1e-3)
    assert wanted[-1] < wanted[0]


def test_losses_of_some_steps():
    compare_training(None, "p2p", 4)


RECIPES = {
    "high": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "rowwise": NAMED["rowwise"].recipe,
    "nvfp4": recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}


@pytest.mark.programs
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("how", RECIPES.values(), ids=RECIPES)
def test_losses_of_a_hundred_steps_are_those_of_one_rank(how, kind):
    compare_training(how, kind, 100)


# --- batches ------------------------------------------------------------------------------------------------


def test_batches_of_a_rank():
    """Transformer Engine's functions: packed sequences are padded to multiples of 2 P, and each rank gets its
    chunks."""
    sums = torch.tensor([0, 3, 8], dtype=torch.int32)
    ids, labels = torch.arange(1, 9)[None], torch.arange(11, 19)[None]
    padded, targets, starts = batches.pad_thd_sequences_for_cp(ids, labels, sums, 4, 0, -1)
    assert padded.tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]
    assert targets.tolist() == [11, 12, 13, -1, 14, 15, 16, 17, 18, -1, -1, -1]
    assert starts.tolist() == [0, 4, 12]
    places = batches.generate_positional_ids_for_cp(sums, 4)
    assert places.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]

    def rank(ranks):
        found = batches.get_batch_on_this_cp_rank(starts, padded[None], targets, places, ranks)
        assert found[1].tolist() == [-1 if not i else 10 + i for i in found[0][0].tolist()]
        whole = torch.arange(24).reshape(3, 8)
        for form, x in (("bshd", whole), ("sbhd", whole.T.contiguous())):
            part = batches.get_batch_on_this_cp_rank(None, x, x, None, ranks, form)
            assert part[2] is None
            assert torch.equal(part[0], Case(form, "causal", 2).part(x, ranks.rank))
        first = padded[:, None].expand(-1, 2)
        part = batches.get_batch_on_this_cp_rank(starts, first, first, None, ranks)[0]
        assert torch.equal(part, found[0][0][:, None].expand(-1, 2))
        with pytest.raises(ShapeError, match="labels_padded: got 3 tokens, expected a multiple of 4"):
            batches.get_batch_on_this_cp_rank(starts, padded, targets[:3], None, ranks)
        with pytest.raises(ShapeError, match=r"input_ids_padded: got \(8,\), expected at least 2 dimensions"):
            batches.get_batch_on_this_cp_rank(None, whole[0], whole, None, ranks, "bshd")
        return found[0][0].tolist(), found[2].tolist()

    first, second = FakeCollectives(2).run(rank)
    assert first == ([1, 0, 4, 5, 0, 0], [0, 3, 0, 1, 6, 7])
    assert second == ([2, 3, 6, 7, 8, 0], [1, 2, 2, 3, 4, 5])
    assert batches.get_batch_on_this_cp_rank(starts, padded, targets)[0] is padded


# --- groups and refusals ------------------------------------------------------------------------------------


def test_groups():
    one, two = FakeCollectives(1).ranks[0], FakeCollectives(2).ranks[1]
    made = te.DotProductAttention(H, D, cp_group=one)
    assert made.context is None
    made.set_context_parallel_group([one, two], None, None, "a2a+p2p")
    assert (made.context.size, made.context.rank) == (2, 1)
    whole = te.TransformerLayer(64, 128, 4, layer_number=2, device="cpu")
    whole.set_context_parallel_group(two, [0, 1], None, ["p2p", "a2a"])
    assert whole.self_attention.core_attention.context.kind == "a2a"
    whole.set_context_parallel_group(None)
    assert whole.self_attention.core_attention.context is None
    for group, kind, error in (
        ("all", "p2p", "cp_group"),
        (two, "ring", "cp_comm_type"),
        ([two, two], "p2p", "cp_group: got 2 groups"),
        (two, "a2a+p2p", "cp_group: got 1 groups"),
        (two, [], "cp_comm_type"),
    ):
        with pytest.raises(ArgumentError, match=error):
            te.DotProductAttention(H, D).set_context_parallel_group(group, None, None, kind)


@pytest.mark.parametrize(
    ("kind", "options", "call", "error", "text"),
    [
        ("p2p", {"attention_dropout": 0.1}, {}, UnsupportedError, "attention_dropout: got 0.1"),
        ("all_gather", {"attention_dropout": 0.1}, {}, UnsupportedError, "attention_dropout"),
        ("p2p", {"window_size": (4, 0)}, {}, UnsupportedError, "window_size"),
        ("all_gather", {"attn_mask_type": "no_mask", "window_size": (4, 4)}, {}, UnsupportedError, "window"),
        ("p2p", {"softmax_type": "off-by-one"}, {}, UnsupportedError, "softmax_type"),
        ("p2p", {"attn_mask_type": "causal_bottom_right"}, {}, UnsupportedError, "attn_mask_type"),
        ("a2a", {"return_max_logit": True}, {}, UnsupportedError, "return_max_logit"),
        ("a2a", {}, {"inference_params": te.InferenceParams(B, S)}, UnsupportedError, "inference_params"),
        ("a2a", {}, {"core_attention_bias_type": "alibi"}, UnsupportedError, "core_attention_bias_type"),
        (
            "a2a",
            {"attn_mask_type": "arbitrary"},
            {"attention_mask": torch.zeros(1, 1, S, S, dtype=torch.bool)},
            UnsupportedError,
            "attn_mask_type",
        ),
        (
            "a2a",
            {"attn_mask_type": "padding"},
            {"attention_mask": torch.zeros(B, 1, 1, S, dtype=torch.bool)},
            UnsupportedError,
            "attention_mask: got a mask, expected cu_seqlens_q",
        ),
        ("a2a", {"num_gqa_groups": 1}, {}, ArgumentError, "num_gqa_groups: got 1"),
    ],
)
def test_what_ranks_cannot_share_is_refused(kind, options, call, error, text):
    ranks = FakeCollectives(2).ranks[0]
    groups = options.get("num_gqa_groups", H)
    case = Case("sbhd", "causal", 2, groups)
    made = te.DotProductAttention(H, D, cp_group=ranks, cp_comm_type=kind, **options)
    with pytest.raises(error, match=text):
        made(*(case.part(x, 0) for x in (case.q, case.k, case.v)), **call)


def test_sequences_that_do_not_fall_into_chunks_are_refused():
    ranks = FakeCollectives(2).ranks[0]
    x, keys = torch.randn(2, 3, B, H, D)[0], torch.randn(4, B, H, D)
    with pytest.raises(ShapeError, match="3 tokens a rank, expected an even number"):
        te.DotProductAttention(H, D, cp_group=ranks)(x, x, x)
    with pytest.raises(ShapeError, match="queries and keys"):
        te.DotProductAttention(H, D, cp_group=ranks)(keys[:2], keys, keys)
    packed = te.DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding", cp_group=ranks)
    sums, x = torch.tensor([0, 6, 8], dtype=torch.int32), torch.randn(4, H, D)
    with pytest.raises(ShapeError, match=r"cu_seqlens_q: got \[6, 2\], expected lengths"):
        packed(x, x, x, cu_seqlens_q=sums, cu_seqlens_kv=sums)
    attention = te.MultiheadAttention(64, H, attention_dropout=0, device="cpu")
    attention.set_context_parallel_group(ranks)
    with pytest.raises(ShapeError, match="rotary_pos_emb: got 4 positions for 4 tokens of 2 ranks"):
        attention(torch.randn(4, B, 64), rotary_pos_emb=te.RotaryPositionEmbedding(16)(4))


def test_within_compile_it_is_refused():
    made = te.DotProductAttention(H, D, cp_group=FakeCollectives(2).ranks[0])
    x = torch.randn(4, B, H, D)
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        torch.compile(lambda x: made(x, x, x), backend="eager", fullgraph=True)(x)
