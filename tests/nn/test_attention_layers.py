"""DotProductAttention with every mask, bias and softmax type, against float64; what attention refuses."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats, nn
from fp8kit.autograd import tensor
from fp8kit.errors import Fp8kitError
from fp8kit.layers import attention_call
from fp8kit.testing.attention import Oracle, Rules, Sizes
from fp8kit.testing.compare import assert_close
from tests.support.layers import draw, make
from tests.support.products import f64, host

B, ROWS, COLUMNS, HEADS, GROUPS, D = 2, 7, 11, 4, 2, 8
LENGTHS_Q, LENGTHS_KV = (7, 3), (5, 11)
U = 2.0**-24
# Press et al. 2022, section 3: 2^-2, 2^-4, ... for 4 heads
SLOPES = np.array([0.25, 0.0625, 0.015625, 0.00390625], np.float32)


def cu(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


# name -> constructor's options, call's options, the rules that they mean
CASES = {
    "bottom_right": ({"attn_mask_type": "causal_bottom_right"}, {}, Rules(window=(-1, 0), bottom_right=True)),
    "window": (
        {"attn_mask_type": "no_mask", "window_size": (3, 1)},
        {},
        Rules(window=(3, 1), bottom_right=True),
    ),
    "window_top_left": (
        {"attn_mask_type": "no_mask", "window_size": (3, 1), "bottom_right_diagonal": False},
        {},
        Rules(window=(3, 1)),
    ),
    "window_in_the_call": ({}, {"window_size": (2, 0)}, Rules(window=(2, 0))),
    "window_of_numpy_integers": (
        {"window_size": (np.int64(1), np.int64(0))},
        {"window_size": (np.int32(2), np.int64(0))},
        Rules(window=(2, 0)),
    ),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, {}, Rules(masked=True)),
    "alias": ({"attn_mask_type": "padding,causal"}, {}, Rules(window=(-1, 0), padded=True)),
    "padding_bottom_right": (
        {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "off-by-one"},
        {},
        Rules(window=(-1, 0), bottom_right=True, padded=True, softmax_type="off-by-one"),
    ),
    "padding_by_masks": ({"attn_mask_type": "padding"}, {}, Rules(padded=True)),
    "pre_scale_bias": (
        {"attn_mask_type": "no_mask"},
        {"core_attention_bias_type": "pre_scale_bias"},
        Rules(bias="pre_scale_bias"),
    ),
    "post_scale_bias": (
        {},
        {"core_attention_bias_type": "post_scale_bias"},
        Rules(window=(-1, 0), bias="post_scale_bias"),
    ),
    "alibi": (
        {"attn_mask_type": "causal_bottom_right"},
        {"core_attention_bias_type": "alibi"},
        Rules(window=(-1, 0), bottom_right=True, bias="alibi"),
    ),
    "learnable": ({"softmax_type": "learnable"}, {}, Rules(window=(-1, 0), softmax_type="learnable")),
    "depth_of_v": ({"kv_channels": (D, 12)}, {}, Rules(window=(-1, 0))),
    "softcap": ({"softcap": 1.5}, {}, Rules(window=(-1, 0), softcap=1.5)),
    "softcap_in_the_call": (
        {"softcap": 30},
        {"softcap": np.float32(1.5), "core_attention_bias_type": "pre_scale_bias"},
        Rules(window=(-1, 0), bias="pre_scale_bias", softcap=1.5),
    ),
    "no_softcap_in_the_call": ({"softcap": 1.5}, {"softcap": 0}, Rules(window=(-1, 0))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_dot_product_attention(device, name, dtype):
    options, call, rules = CASES[name]
    call, options = dict(call), {"kv_channels": D, **options}
    channels = options.pop("kv_channels")
    module = nn.DotProductAttention(HEADS, channels, GROUPS, softmax_scale=0.4, device=device, **options)
    rules = Rules(
        "sbhd",
        rules.window,
        rules.bottom_right,
        0.4,
        0.0,
        rules.bias,
        rules.softmax_type,
        rules.padded,
        rules.masked,
        softcap=rules.softcap,
    )
    depth = channels[1] if isinstance(channels, tuple) else D
    lengths = (LENGTHS_Q, LENGTHS_KV) if rules.padded else ((), ())
    sizes = Sizes(B, ROWS, COLUMNS, HEADS, GROUPS, D, *lengths, depth)
    q, do = draw(1, (B, HEADS, ROWS, D), dtype), draw(4, (B, HEADS, ROWS, depth), dtype)
    k, v = draw(2, (B, GROUPS, COLUMNS, D), dtype), draw(3, (B, GROUPS, COLUMNS, depth), dtype)
    mask = np.random.default_rng(5).random((B, 1, ROWS, COLUMNS)) < 0.4 if rules.masked else None
    bias = (
        draw(6, (1, HEADS, ROWS, COLUMNS), dtype)
        if rules.bias.endswith("bias") and rules.bias != "no_bias"
        else None
    )
    offset = draw(7, (HEADS,), "float32") if rules.softmax_type == "learnable" else None
    oracle = Oracle(
        formats.dtype(dtype),
        sizes,
        rules,
        False,
        q,
        k,
        v,
        do,
        mask,
        bias,
        SLOPES if rules.bias == "alibi" else None,
        offset,
    )

    def place(x):
        return np.ascontiguousarray(x.transpose(2, 0, 1, 3))

    inputs = [tensor(place(x), requires_grad=True, device=device) for x in (q, k, v)]
    if mask is not None:
        call["attention_mask"] = mask
    if name == "padding_by_masks":
        call["attention_mask"] = tuple(
            np.arange(n) >= np.array(m)[:, None, None, None]
            for n, m in ((ROWS, LENGTHS_Q), (COLUMNS, LENGTHS_KV))
        )
    elif rules.padded:
        call |= {"cu_seqlens_q": cu(LENGTHS_Q), "cu_seqlens_kv": cu(LENGTHS_KV)}
    if bias is not None:
        call["core_attention_bias"] = given = tensor(bias, requires_grad=True, device=device)
    if offset is not None:
        module.load_state_dict({"softmax_offset": offset})
    o = module(*inputs, **call)
    assert_close("o", f64(o).reshape(ROWS, B, HEADS, depth), place(oracle.o), dtype, place(oracle.o_slack))
    o.backward(place(do).reshape(o.shape))
    for what, x in zip(("dq", "dk", "dv"), inputs, strict=True):
        assert_close(what, f64(x.grad), place(oracle.grads[what]), dtype, place(oracle.forward_slack(what)))
    if bias is not None:
        assert_close("dbias", f64(given.grad), oracle.grads["dbias"], dtype, oracle.forward_slack("dbias"))
    if offset is not None:
        assert_close(
            "doffset",
            f64(module.softmax_offset.grad),
            oracle.grads["doffset"],
            "float32",
            oracle.forward_slack("doffset"),
        )


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("most", [None, 16])
def test_sequences_one_after_the_other_are_a_padded_batch(device, most, gaps):
    packed = nn.DotProductAttention(HEADS, D, GROUPS, qkv_format="thd", attn_mask_type="padding_causal")
    padded = nn.DotProductAttention(HEADS, D, GROUPS, qkv_format="bshd", attn_mask_type="padding_causal")
    longest = ROWS
    raw = [draw(i, (B, longest, n, D), "float32") for i, n in enumerate((HEADS, GROUPS, GROUPS))]
    starts = cu(np.add(LENGTHS_Q, 2)) if gaps else cu(LENGTHS_Q)

    def pack(x):
        out = np.zeros((int(starts[-1]), *x.shape[2:]), np.float32)
        for b, n in enumerate(LENGTHS_Q):
            out[starts[b] : starts[b] + n] = x[b, :n]
        return out

    lengths = {"cu_seqlens_q": cu(LENGTHS_Q), "cu_seqlens_kv": cu(LENGTHS_Q)}
    more = (
        {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts, "pad_between_seqs": True}
        if gaps
        else {}
    )
    do = draw(9, (B, longest, HEADS, D), "float32")
    one = [tensor(pack(x), requires_grad=True, device=device) for x in raw]
    other = [tensor(x, requires_grad=True, device=device) for x in raw]
    o = packed(*one, max_seqlen_q=most, max_seqlen_kv=most, **lengths, **more)
    p = padded(*other, **lengths)
    o.backward(pack(do).reshape(o.shape))
    p.backward(do.reshape(p.shape))
    slack = 64 * D * U  # the padded lengths differ, and with them the order of sums
    assert_close("o", f64(o).reshape(-1, HEADS, D), pack(f64(p).reshape(do.shape)), "float32", slack)
    for a, b in zip(one, other, strict=True):
        assert_close("grad", f64(a.grad), pack(f64(b.grad)), "float32", 4 * slack)


def test_a_layer_hands_the_attentions_options_down(device):
    layer = make(
        nn.TransformerLayer,
        device,
        "float32",
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        window_size=(2, 0),
        softmax_type="off-by-one",
    ).eval()
    x = draw(1, (9, 2, 32), "float32")
    other = x.copy()
    other[0] = 9  # beyond the window of rows 3 and later
    freqs = nn.RotaryPositionEmbedding(8, device=device)(9)
    a, b = (f64(layer(tensor(v, device=device), rotary_pos_emb=freqs)) for v in (x, other))
    np.testing.assert_array_equal(a[3:], b[3:])
    assert not np.array_equal(a[2], b[2])
    assert not np.array_equal(a[3:], f64(layer(tensor(x, device=device)))[3:])


X = np.ones((4, 2, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nn.DotProductAttention(4, 8)(X, X), ["layers", "query_layer and key_layer"]),
        (
            lambda: nn.DotProductAttention(4, 8)(X, X, X, core_attention_bias_type="bias"),
            ["core_attention_bias_type"],
        ),
        (
            lambda: nn.DotProductAttention(4, 8)(X, X, X, core_attention_bias_type="post_scale_bias"),
            ["bias", "missing"],
        ),
        (lambda: nn.DotProductAttention(4, 8)(X, X, X, core_attention_bias=X), ["bias", "no_bias"]),
        (
            lambda: nn.DotProductAttention(4, 8)(X, X, X, bottom_right_diagonal=True),
            ["bottom_right_diagonal", "causal"],
        ),
        (lambda: nn.DotProductAttention(4, 8)(X, X, X, window_size=(1, 1)), ["window_size", "(1, 1)"]),
        (lambda: nn.DotProductAttention(4, 8)(X, X, X, pad_between_seqs=True), ["pad_between_seqs", "True"]),
        (
            lambda: nn.DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding")(X, X, X),
            ["cu_seqlens_q", "thd"],
        ),
        (
            lambda: nn.DotProductAttention(4, 8, qkv_format="thd")(
                X[0], X[0], X[0], cu_seqlens_q=cu((1, 1)), cu_seqlens_kv=cu((1, 1))
            ),
            ["mask", "padding"],
        ),
        (
            lambda: nn.DotProductAttention(4, 8, attn_mask_type="padding")(
                X, X, X, attention_mask=np.ones((2, 4), bool)
            ),
            ["attention_mask"],
        ),
        (
            lambda: nn.DotProductAttention(4, 8, attn_mask_type="padding")(
                X, X, X, attention_mask=np.zeros((2, 1, 1, 99), bool)
            ),
            ["attention_mask", "(2, 1, 1, 99)", "queries"],
        ),
        (
            lambda: nn.DotProductAttention(4, 8, attn_mask_type="padding")(
                X, X[:-1], X[:-1], attention_mask=np.zeros((X.shape[1], 1, 1, len(X)), bool)
            ),
            ["attention_mask", "keys, a pair"],
        ),
        (
            lambda: nn.DotProductAttention(4, 8, attn_mask_type="padding")(
                X, X, X, attention_mask=np.eye(2, 4, dtype=bool)[:, None, None]
            ),
            ["attention_mask", "before a true position"],
        ),
        (
            lambda: nn.DotProductAttention(4, 8, attn_mask_type="padding")(X, X[:-1], X[:-1]),
            [
                f"attention_mask: missing, expected bool {(X.shape[1], 1, 1, len(X))} for queries and ",
                f"{(X.shape[1], 1, 1, len(X) - 1)} for keys, True at padding, or cu_seqlens_q and ",
                f"or cu_seqlens_q and cu_seqlens_kv, int32 ({X.shape[1] + 1},), with mask 'padding'",
            ],
        ),
        (
            lambda: nn.DotProductAttention(4, 8, attn_mask_type="padding")(X, X, X, cu_seqlens_q=cu((1, 1))),
            ["cu_seqlens_kv: missing, expected int32"],
        ),
        (
            lambda: nn.MultiheadAttention(
                32, 4, device="cpu", qkv_format="bshd", attn_mask_type="padding_causal"
            )(np.ones((3, 2, 32), np.float32)),
            ["MultiheadAttention: attention_mask: missing, expected bool (3, 1, 1, 2), True at padding"],
        ),
        (lambda: nn.DotProductAttention(4, (8, 0)), ["kv_channels", "0"]),
        (
            lambda: nn.MultiheadAttention(32, 4, device="cpu", attention_type="cross")(
                np.ones((2, 1, 32), np.float32)
            ),
            ["encoder_output"],
        ),
        (
            lambda: nn.MultiheadAttention(32, 4, device="cpu", qk_norm_type="BatchNorm"),
            ["qk_norm_type", "L2Normalization"],
        ),
    ],
)
def test_refusals_name_the_argument(call, words):
    with pytest.raises(Fp8kitError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_a_checkpointed_call_gives_the_same_bits(device):
    """Dropout, biases and lengths included; what backward needs is computed once more, with what the
    arguments were."""
    found = []
    for again in (False, True):
        nn.manual_seed(5)
        module = nn.DotProductAttention(
            HEADS,
            D,
            GROUPS,
            attention_dropout=0.3,
            attn_mask_type="padding_causal",
            softmax_type="learnable",
            device=device,
        )
        q, k, v = (
            tensor(draw(i, (7, 2, n, D), "float32"), requires_grad=True, device=device)
            for i, n in enumerate((HEADS, GROUPS, GROUPS))
        )
        bias = tensor(draw(4, (1, HEADS, 7, 7), "float32"), requires_grad=True, device=device)
        sums = np.array([0, 7, 12], np.int32)
        with fk.deterministic(True):
            o = module(
                q,
                k,
                v,
                cu_seqlens_q=sums,
                cu_seqlens_kv=sums,
                core_attention_bias_type="pre_scale_bias",
                core_attention_bias=bias,
                checkpoint_core_attention=again,
            )
            o.backward(draw(5, o.shape, "float32"))
        found.append([host(x) for x in (o, q.grad, k.grad, v.grad, bias.grad, module.softmax_offset.grad)])
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_offset_of_minus_infinity_and_a_row_that_sees_nothing(device):
    """Such a row has no probabilities and gives the offset no gradient; the other heads' gradients are as
    they were."""
    found = []
    for offset in (-np.inf, 0.5):
        module = nn.DotProductAttention(
            HEADS, D, attn_mask_type="arbitrary", softmax_type="learnable", device=device
        )
        module.load_state_dict({"softmax_offset": np.array([offset] + [0.25] * (HEADS - 1), np.float32)})
        parts = [
            tensor(draw(i, (5, 2, HEADS, D), "float32"), requires_grad=True, device=device) for i in range(3)
        ]
        mask = np.zeros((1, 1, 5, 5), bool)
        mask[..., 2, :] = True
        o = module(*parts, attention_mask=mask)
        o.backward(draw(4, o.shape, "float32"))
        assert not o.numpy()[2].any()
        assert all(np.isfinite(part.grad.numpy()).all() for part in parts)
        found.append(module.softmax_offset.grad.numpy())
    assert found[0][0] == 0
    assert found[1][0] != 0
    np.testing.assert_array_equal(found[0][1:], found[1][1:])


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"attn_mask_type": "arbitrary"}, "attention_mask"),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias"),
    ],
)
def test_what_is_missing_has_the_users_name(options, argument):
    x = np.zeros((5, 2, 4, 8), np.float32)
    with pytest.raises(fk.ShapeError, match=f"DotProductAttention: {argument}: missing, expected"):
        nn.DotProductAttention(4, 8, device="cpu")(x, x, x, **options)
    with pytest.raises(fk.ShapeError, match=f"MultiheadAttention: {argument}: missing, expected"):
        nn.MultiheadAttention(32, 4, device="cpu")(x.reshape(5, 2, 32), **options)


@pytest.mark.parametrize("mask", ["causal", "no_mask", "padding"])
def test_a_mask_that_is_not_read_is_told_once(mask: str, caplog: pytest.LogCaptureFixture) -> None:
    attention_call._say_unread.cache_clear()
    layer = nn.DotProductAttention(2, 8, attn_mask_type=mask)
    q = fk.Tensor(np.ones((4, 1, 2, 8), np.float32))
    for _ in range(2):
        layer(q, q, q, attention_mask=np.zeros((1, 1, 1, 4), bool))
    told = [message for message in caplog.messages if "attention_mask is not read" in message]
    assert len(told) == (mask != "padding")
