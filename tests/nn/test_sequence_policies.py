"""``thd_attention_policies``: each sequence attends as it does alone, by its policy's mask and window."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn
from fp8kit.autograd import tensor
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.testing.compare import assert_same_bits

H, G, D = 4, 2, 64
LENGTHS, GAPS = (5, 3, 9, 4), (0, 2, 1, 0)
SUMS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
STARTS = np.concatenate([[0], np.cumsum(np.add(LENGTHS, GAPS))]).astype(np.int32)
POLICIES = [
    {"sequence_ids": np.array([0, 2]), "mask_type": "padding_causal", "window_size": (2, 0)},
    {"sequence_ids": np.array([], np.int64), "mask_type": "padding", "window_size": None},
    {"sequence_ids": np.array([1], np.int32), "mask_type": "padding,causal", "window_size": None},
    {
        "sequence_ids": np.array([3]),
        "mask_type": "padding",
        "window_size": (2, 1),
        "bottom_right_diagonal": False,
    },
]
SEEN = {"qkv_format": "thd", "attn_mask_type": "padding", "softcap": 2.0}


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layers(tokens):
    return draw(1, tokens, H, D), draw(2, tokens, G, D), draw(3, tokens, G, D), draw(4, tokens, H * D)


def step(core, arrays, g, device, **call):
    """o and the gradients of the layers."""
    leaves = [tensor(x, requires_grad=True, dtype="bfloat16", device=device) for x in arrays]
    o = core(*leaves, **call)
    o.backward(fk.tensor(g, dtype="bfloat16", device=device))
    return [o.numpy(), *(leaf.grad.numpy() for leaf in leaves)]


@pytest.mark.parametrize("gaps", [False, True])
def test_each_sequence_attends_as_alone(device, gaps):
    starts = STARTS if gaps else SUMS
    core = nn.DotProductAttention(H, D, G, device=device, **SEEN)
    *arrays, g = layers(starts[-1])
    sums = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), SUMS)
    if gaps:
        sums |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), starts)
    longest = {"max_seqlen_q": 9, "max_seqlen_kv": 9}
    call = {**sums, **longest, "thd_attention_policies": POLICIES}
    found = step(core, arrays, g, device, **call, thd_attention_policy_dispatch="grouped")
    wanted = [np.zeros_like(x) for x in found]
    for policy in POLICIES:
        for i in policy["sequence_ids"]:
            own = slice(starts[i], starts[i] + LENGTHS[i])
            alone = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), np.array([0, LENGTHS[i]], np.int32))
            rules = {
                "attn_mask_type": policy["mask_type"],
                "window_size": policy["window_size"],
                "bottom_right_diagonal": policy.get("bottom_right_diagonal"),
            }
            arguments = [x[own] for x in arrays], g[own], device
            for x, part in zip(wanted, step(core, *arguments, **alone, **longest, **rules), strict=True):
                x[own] = part
    for x, y in zip(found, wanted, strict=True):
        assert_same_bits("o, dq, dk, dv", x, y)
    again = step(core, arrays, g, device, **call, checkpoint_core_attention=True)
    for x, y in zip(again, wanted, strict=True):
        assert_same_bits("o, dq, dk, dv", x, y)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.TransformerLayer])
def test_layers_hand_them_to_their_attention(device, kind):
    """Policies that all say one thing are that."""
    mlp = (128,) if kind is nn.TransformerLayer else ()
    mask, form = ("self_attn_mask_type", "attn_input_format") if mlp else ("attn_mask_type", "qkv_format")
    fk.manual_seed(3)
    options = {mask: "padding", form: "thd", "attention_dropout": 0.0, "device": device}
    layer = kind(H * D, *mlp, H, **options, **({"hidden_dropout": 0.0} if mlp else {}))
    x = draw(5, SUMS[-1], H * D)
    call = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), SUMS) | {"max_seqlen_q": 9, "max_seqlen_kv": 9}
    call["rotary_pos_emb"] = nn.RotaryPositionEmbedding(D, device=device)(9)
    same = {"mask_type": "padding_causal", "window_size": (2, 0)}
    policies = [{"sequence_ids": np.array(ids), **same} for ids in ([0, 3], [1, 2])]
    found = layer(tensor(x, device=device), **call, thd_attention_policies=policies)
    want = layer(tensor(x, device=device), **call, **{mask: "padding_causal", "window_size": (2, 0)})
    assert_same_bits("y", found.numpy(), want.numpy())


def test_what_is_refused():
    core = nn.DotProductAttention(H, D, G, device="cpu", **SEEN)
    q, k, v, _ = layers(SUMS[-1])
    call = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), SUMS) | {"thd_attention_policies": POLICIES}

    def policies(*changes):
        return {"thd_attention_policies": [{**POLICIES[0], **change} for change in changes]}

    slopes = {"core_attention_bias_type": "alibi"}
    for changes, error, text in (
        ({"thd_attention_policies": []}, ArgumentError, "a list of policies"),
        ({"thd_attention_policies": [7]}, ArgumentError, "policies of sequence_ids"),
        (policies({"mask": "padding"}), ArgumentError, "policies of sequence_ids"),
        (policies({"mask_type": "causal"}), ArgumentError, "one of the padding masks"),
        (policies({"window_size": 3}), ArgumentError, "window_size"),
        (policies({"sequence_ids": np.array(1)}), ArgumentError, "sequence_ids, int32 or int64"),
        (
            policies({"sequence_ids": np.array([0, 2], np.uint8)}),
            ArgumentError,
            "sequence_ids, int32 or int64",
        ),
        (policies({"sequence_ids": np.array([2, 0])}), ArgumentError, "each above the last"),
        (policies({"mask_type": None}), ArgumentError, "one of the padding masks"),
        (policies({}), ArgumentError, r"got sequences \[0, 2\], expected each of 4 in one policy"),
        (policies({}, {}), ArgumentError, r"sequences \[0, 0, 2, 2\]"),
        ({"cu_seqlens_q": None}, ArgumentError, "cu_seqlens_q, cu_seqlens_kv"),
        ({"qkv_format": "sbhd"}, ArgumentError, "qkv_format: got 'sbhd', expected 'thd'"),
        ({"thd_attention_policy_dispatch": "both"}, ArgumentError, "thd_attention_policy_dispatch"),
        ({"attn_mask_type": "padding"}, UnsupportedError, "each policy says its own"),
        ({"window_size": (1, 0)}, UnsupportedError, "each policy says its own"),
        (slopes, UnsupportedError, "core_attention_bias_type: got 'alibi'"),
    ):
        with pytest.raises(error, match=text):
            core(q, k, v, **{**call, **changes})
