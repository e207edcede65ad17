"""What Transformer Engine 2.20.2 has in attention: caps of scores, and sequences with masks of their own."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch

from fp8kit.errors import ArgumentError, UnsupportedError
from tests.support.tensors import assert_tensor_close, largest

S, B, H, D, CAP = 6, 2, 4, 8, 0.5


def layers(*lead):
    torch.manual_seed(0)
    return [x.requires_grad_() for x in torch.randn(3, *lead, H, D)]


def written_out(q, k, v, cap=CAP):
    """o of bshd layers under a causal mask."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    scores = cap * torch.tanh(scores / cap)
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def step(function, *leaves, **call):
    o = function(*leaves, **call)
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]


# float32's sums of D and S products of numbers up to some 10, on either side
SLACK = 64 * 2.0**-24


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("made", [{"softcap": CAP}, {"softcap": 3.0}])
def test_a_cap_is_that_of_the_call_or_else_of_the_module(made, compiled):
    core = ft.DotProductAttention(H, D, qkv_format="bshd", device="cpu", **made)
    assert core.softcap == made["softcap"]
    assert f"softcap={made['softcap']}" in repr(core)
    call = {} if made["softcap"] == CAP else {"softcap": CAP}
    run = torch.compile(core, fullgraph=True, backend="aot_eager") if compiled else core
    found, wanted = step(run, *layers(B, S), **call), step(written_out, *layers(B, S))
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        assert_tensor_close(name, x, y, SLACK * largest(y))


def test_layers_cap_both_of_a_decoders_attentions():
    sizes = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_type": "decoder", "device": "cpu"}

    def made(**more):
        torch.manual_seed(1)
        return ft.TransformerLayer(32, 64, H, **sizes, **more)

    x, encoded = torch.randn(1, B, 32), torch.randn(S, B, 32)  # the layer's own has one score a row
    want = made(softcap=CAP)(x, encoder_output=encoded)
    assert torch.equal(made()(x, encoder_output=encoded, softcap=CAP), want)
    assert torch.equal(
        made(softcap=CAP)(x, encoder_output=encoded, softcap=0.0), made()(x, encoder_output=encoded)
    )
    assert not torch.equal(made()(x, encoder_output=encoded), want)
    later = made()
    later.softcap = CAP
    assert torch.equal(later(x, encoder_output=encoded), want)


@pytest.mark.parametrize("cap", [-1.0, float("inf"), float("nan"), 1e-40, "50", True])
def test_what_is_no_cap_is_refused(cap):
    with pytest.raises(ArgumentError, match="softcap: got"):
        ft.DotProductAttention(H, D, softcap=cap)
    core = ft.DotProductAttention(H, D, device="cpu")
    with pytest.raises(ArgumentError, match="softcap: got"):
        core(*layers(S, B), softcap=cap)


def test_sequences_attend_by_their_policies():
    """As alone; also behind projections, with an activation checkpoint, and in eager code between graphs."""
    core = ft.DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding", device="cpu")
    lengths = [3, 5, 4]
    sums = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    call = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    rules = {"padding_causal": [0, 2], "padding": [1]}
    policies = [
        {"sequence_ids": torch.tensor(ids), "mask_type": mask, "window_size": (1, 0) if ids[1:] else None}
        for mask, ids in rules.items()
    ]
    leaves = layers(sum(lengths))
    found = step(core, *leaves, **call, thd_attention_policies=policies)
    parts = zip(*(x.split(lengths) for x in leaves), strict=True)
    alone = []
    for i, part in enumerate(parts):
        ends = torch.tensor([0, lengths[i]], dtype=torch.int32)
        own = {**call, "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        kind = {"attn_mask_type": "padding"} if i == 1 else {"attn_mask_type": "padding_causal"}
        kind["window_size"] = None if i == 1 else (1, 0)
        alone.append(step(core, *part, **own, **kind))
    for x, y in zip(found, map(torch.cat, zip(*alone, strict=True)), strict=True):
        assert torch.equal(x, y)
    again = step(core, *leaves, **call, thd_attention_policies=policies, checkpoint_core_attention=True)
    assert all(map(torch.equal, again, found))
    compiled = torch.compile(core, backend="eager")
    assert torch.equal(compiled(*leaves, **call, thd_attention_policies=policies), found[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="thd_attention_policies of DotProductAttention"):
        torch.compile(core, fullgraph=True)(*leaves, **call, thd_attention_policies=policies)
    torch.manual_seed(2)
    layer = ft.TransformerLayer(
        32,
        64,
        H,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="thd",
        device="cpu",
        self_attn_mask_type="padding",
    )
    x = torch.randn(sum(lengths), 32)
    same = [{**policy, "mask_type": "padding_causal", "window_size": (1, 0)} for policy in policies]
    want = layer(x, **call, self_attn_mask_type="padding_causal", window_size=(1, 0))
    assert torch.equal(layer(x, **call, thd_attention_policies=same), want)
    with pytest.raises(UnsupportedError, match="each policy says its own"):
        layer(x, **call, self_attn_mask_type="padding", thd_attention_policies=same)
