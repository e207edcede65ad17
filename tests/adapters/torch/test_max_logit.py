"""DotProductAttention(return_max_logit=True): the largest score of each head, against scores written out."""

from __future__ import annotations

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch import max_logit

from fp8kit.errors import UnsupportedError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

B, S, S_KV, H, G, D = 2, 6, 9, 4, 2, 16
LENGTHS = {"q": [4, 6], "kv": [9, 7]}
SIDES = ("q", "kv", "kv")  # of queries, keys and values
SLACK = sum_slack(32, D + 2)  # sums of D products, which add up to 32 or so, a scale and a bias


def layers(grad=False):
    torch.manual_seed(0)
    sizes = ((B, S, H, D), (B, S_KV, G, D), (B, S_KV, G, D))
    return [torch.randn(size, requires_grad=grad) for size in sizes]


def sums(lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def scores(q, k, scale=D**-0.5):
    return torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(H // G, 2)) * scale


def visible(mask, corner, lengths, window=(-1, -1)):
    """(b, 1, s, s_kv): the definition."""
    left, right = (window[0], 0) if "causal" in mask else window
    seen = torch.zeros(B, 1, S, S_KV, dtype=torch.bool)
    for b in range(B):
        rows, columns = (lengths["q"][b], lengths["kv"][b]) if "padding" in mask else (S, S_KV)
        shift = columns - rows if corner else 0
        for i in range(rows):
            for j in range(columns):
                at = j - i - shift
                seen[b, 0, i, j] = (left < 0 or at >= -left) and (right < 0 or at <= right)
    return seen


def core(**options):
    return te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", return_max_logit=True, **options)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("block", [2**24, B * H * S_KV * 2], ids=["one block", "blocks of two rows"])
@pytest.mark.parametrize(
    ("mask", "corner"),
    [
        ("no_mask", None),
        ("causal", False),
        ("causal_bottom_right", True),
        ("padding", None),
        ("padding_causal", False),
        ("padding_causal_bottom_right", True),
    ],
)
def test_masks(mask, corner, block, monkeypatch):
    monkeypatch.setattr(max_logit, "_ELEMENTS", block)
    q, k, v = layers()
    lengths = {f"cu_seqlens_{side}": sums(own) for side, own in LENGTHS.items()}
    given = lengths if "padding" in mask else {}
    o, found = core(attn_mask_type=mask)(q, k, v, **given)
    wanted = scores(q, k).masked_fill(~visible(mask, corner, LENGTHS), -torch.inf).amax((0, 2, 3))
    assert_tensor_close("max_logit", found, wanted, SLACK)
    plain = te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", attn_mask_type=mask)
    assert torch.equal(o, plain(q, k, v, **given))


def test_a_window():
    q, k, v = layers()
    _, found = core(attn_mask_type="no_mask", window_size=(1, 2))(q, k, v)
    seen = visible("no_mask", True, LENGTHS, (1, 2))
    wanted = scores(q, k).masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    assert_tensor_close("max_logit", found, wanted, SLACK)


def test_a_mask_of_ones_own_and_biases():
    q, k, v = layers()
    hidden = torch.rand(B, 1, S, S_KV) < 0.5
    _, found = core(attn_mask_type="arbitrary")(q, k, v, attention_mask=hidden)
    wanted = scores(q, k).masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    assert_tensor_close("max_logit", found, wanted, SLACK)
    bias = torch.randn(1, H, S, S_KV)
    for kind, factor in (("pre_scale_bias", D**-0.5), ("post_scale_bias", 1.0)):
        call = core(attn_mask_type="no_mask")
        _, found = call(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias)
        wanted = (scores(q, k) + factor * bias).amax((0, 2, 3))
        assert_tensor_close(kind, found, wanted, SLACK)
        call, inner = core(attn_mask_type="no_mask", softcap=0.5), scores(q, k)
        _, found = call(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias)
        inner, outer = (inner + factor * bias, 0.0) if kind == "pre_scale_bias" else (inner, bias)
        wanted = (0.5 * torch.tanh(inner / 0.5) + outer).amax((0, 2, 3))
        assert_tensor_close(f"{kind}, capped", found, wanted, SLACK)


def test_alibi():
    q, k, v = layers()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    call = core(attn_mask_type="causal_bottom_right")
    _, found = call(q, k, v, core_attention_bias_type="alibi", alibi_slopes=slopes)
    distance = (torch.arange(S_KV) - torch.arange(S)[:, None] - (S_KV - S)).abs()
    wanted = scores(q, k) - slopes[:, None, None] * distance
    wanted = wanted.masked_fill(~visible("causal", True, LENGTHS), -torch.inf).amax((0, 2, 3))
    assert_tensor_close("max_logit", found, wanted, SLACK)


@pytest.mark.parametrize("gaps", [False, True], ids=["together", "with gaps"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_packed_sequences(mask, gaps):
    """Each by itself."""
    q, k, v = layers()
    starts = {side: [0, 8] if gaps and side == "q" else [0, 10] if gaps else None for side in LENGTHS}

    def packed(x, side):
        rows = [x[b, : LENGTHS[side][b]] for b in range(B)]
        if not gaps:
            return torch.cat(rows)
        whole = torch.full((starts[side][1] + LENGTHS[side][1], *x.shape[2:]), 50.0)
        for start, part in zip(starts[side], rows, strict=True):
            whole[start : start + len(part)] = part
        return whole

    given = {f"cu_seqlens_{side}": sums(own) for side, own in LENGTHS.items()}
    if gaps:
        for side, own in LENGTHS.items():
            ends = torch.tensor([*starts[side], starts[side][1] + own[1]], dtype=torch.int32)
            given[f"cu_seqlens_{side}_padded"] = ends
    call = te.DotProductAttention(
        H, D, num_gqa_groups=G, qkv_format="thd", attn_mask_type=mask, return_max_logit=True
    )
    _, found = call(packed(q, "q"), packed(k, "kv"), packed(v, "kv"), **given)
    corner = mask.endswith("right") or mask == "padding"
    wanted = scores(q, k).masked_fill(~visible(mask, corner, LENGTHS), -torch.inf).amax((0, 2, 3))
    assert_tensor_close("max_logit", found, wanted, SLACK)


@pytest.mark.parametrize("size", [(1, H, S, S_KV), (B, 1, S, S_KV), (B, H, 1, S_KV)], ids=str)
def test_a_bias_of_packed_sequences(size):
    """Its places are those within a sequence, as in the attention itself."""
    q, k, v = layers()
    bias = 4 * torch.randn(size)
    pairs = zip((q, k, v), SIDES, strict=True)
    rows = [torch.cat([x[b, : LENGTHS[side][b]] for b in range(B)]) for x, side in pairs]
    given = {f"cu_seqlens_{side}": sums(own) for side, own in LENGTHS.items()}
    given |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    options = {"num_gqa_groups": G, "attn_mask_type": "padding", "return_max_logit": True}
    call = te.DotProductAttention(H, D, qkv_format="thd", **options)
    o, found = call(*rows, **given, max_seqlen_q=S, max_seqlen_kv=S_KV)
    wanted = (scores(q, k) + bias).masked_fill(~visible("padding", True, LENGTHS), -torch.inf)
    assert_tensor_close("max_logit", found, wanted.amax((0, 2, 3)), SLACK)
    whole, _ = te.DotProductAttention(H, D, qkv_format="bshd", **options)(q, k, v, **given)
    wide = torch.cat([part[:length] for part, length in zip(whole, LENGTHS["q"], strict=True)])
    assert_tensor_close("o", o, wide, SLACK)


@pytest.mark.parametrize("layout", ["qkv", "interleaved", "q_kv", "sbhd"])
def test_layouts(layout):
    torch.manual_seed(0)
    qkv = torch.randn(S, B, 3, H, D)
    q, k = (qkv[:, :, i].transpose(0, 1) for i in range(2))
    call = te.DotProductAttention(H, D, return_max_logit=True, softmax_type="off-by-one")
    given = {
        "qkv": {"qkv_layer": qkv},
        "interleaved": {"qkv_layer": qkv.transpose(2, 3).contiguous(), "qkv_interleave_dim": -2},
        "q_kv": {"query_layer": qkv[:, :, 0], "kv_layer": qkv[:, :, 1:]},
        "sbhd": {f"{n}_layer": qkv[:, :, i] for i, n in enumerate(("query", "key", "value"))},
    }[layout]
    _, found = call(**given)
    wanted = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    wanted = wanted.masked_fill(~causal, -torch.inf).amax((0, 2, 3))
    assert_tensor_close("max_logit", found, wanted, SLACK)


def test_it_has_no_gradient_and_leaves_attentions_alone():
    q, k, v = layers(grad=True)
    o, found = core(attn_mask_type="no_mask")(q, k, v)
    assert not found.requires_grad
    o.sum().backward()
    assert q.grad is not None


def test_within_torch_compile():
    torch._dynamo.reset()
    q, k, v = layers()
    call = core(attn_mask_type="causal")
    for found, wanted in zip(
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v), strict=True
    ):
        assert torch.equal(found, wanted)


def test_a_cache_has_none():
    cache = te.InferenceParams(1, 8, G, D, torch.float32)
    cache.allocate_memory(1)
    call = core(layer_number=1).eval()
    cache.pre_step({0: 4})
    given = [x[:1, :4] for x in layers()]
    with torch.no_grad(), pytest.raises(UnsupportedError, match="return_max_logit"):
        call(*given, inference_params=cache)
