"""MultiheadAttention and TransformerLayer in every form that Transformer Engine's have, against float64 with
running error bounds."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import apply, call, tensor
from fp8kit.nn.layers import DotProductAttention
from fp8kit.ops.attention import attention
from fp8kit.ops.split_heads import SplitHeadsSpec, split_heads
from fp8kit.testing.compare import assert_close, assert_same_bits
from fp8kit.testing.contract.dropout import keep_factors
from tests.support.layer_oracle import Block, Normed, layer_step
from tests.support.layers import draw, make, scope
from tests.support.products import f64
from tests.support.running_error import R, assert_within

S, OTHER, B, H, HEADS = 7, 9, 2, 32, 4
BASE = {"hidden_size": H, "num_attention_heads": HEADS, "attention_dropout": 0.0}
LAYER = BASE | {"ffn_hidden_size": 48, "hidden_dropout": 0.0, "activation": "silu"}
G = 2.0**-6  # gradients are small numbers, as in training


def exact(x):
    return R(x.astype(np.float64).reshape(-1, x.shape[-1]))


def run(module, mode, x, g, source=None, **options):
    """One forward and backward; (y, dx, d source or None, gradients by name) as float64 matrices."""
    device = next(module.parameters()).device
    x = tensor(x, requires_grad=True, device=device)
    source = None if source is None else tensor(source, requires_grad=True, device=device)
    with scope(mode):
        y = module(x, encoder_output=source, **options)
    y.backward(g)
    grads = {
        name: f64(parameter.grad)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    module.zero_grad()
    rows = [
        None if t is None else f64(t).reshape(-1, H)
        for t in (y, x.grad, None if source is None else source.grad)
    ]
    return *rows, grads


def prepared(module, mode, dtype, cross, g_scale=G, **options):
    """Inputs, after two steps on others so that delayed scales are not at their start."""

    def data(seed, scale):
        source = draw(seed + 2, (OTHER, B, H), dtype, scale) if cross else None
        return draw(seed, (S, B, H), dtype, scale), draw(seed + 1, (S, B, H), dtype, g_scale), source

    if mode == "delayed":
        for seed in (10, 20):
            run(module, mode, *data(seed, 2.0), **options)
    return *data(1, 1.0), {name: f64(parameter) for name, parameter in module.named_parameters()}


def check(got, want):
    """Outputs and all gradients, each parameter's among them."""
    for name, a, b in zip(("y", "dx", "dsource"), got[:3], want[:3], strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            assert_within(name, a, b)
    for name, a in got[3].items():
        b = want[3][name]
        # 0 but for rounding, or nearly: a softmax does not see what all keys share
        if name.endswith(("key_bias", "k_norm.bias")):
            assert (np.abs(a - b.v) <= b.e).all(), name
        else:
            assert_within(name, a, b)


ATTENTIONS = {
    "plain": {},
    "grouped": {"num_gqa_groups": 2},
    "fused": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "rms": {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm"},
    "layer_before": {
        "num_gqa_groups": 2,
        "qk_norm_type": "LayerNorm",
        "qk_norm_before_rope": True,
        "fuse_qkv_params": True,
        "input_layernorm": True,
    },
    "l2": {"qk_norm_type": "L2Normalization", "fuse_qkv_params": True, "qk_norm_eps": 0.25},
    "l2_before": {"qk_norm_type": "L2Normalization", "qk_norm_before_rope": True, "bias": False},
    "one_group": {
        "num_gqa_groups": 1,
        "fuse_qkv_params": True,
        "input_layernorm": True,
        "normalization": "RMSNorm",
    },
    "wide_heads": {
        "kv_channels": 12,
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
        "qk_norm_type": "RMSNorm",
    },
    "cross": {
        "attention_type": "cross",
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
        "input_layernorm": True,
    },
    "cross_layer": {"attention_type": "cross", "qk_norm_type": "LayerNorm", "bias": False},
    "cross_rms": {
        "attention_type": "cross",
        "num_gqa_groups": 1,
        "fuse_qkv_params": True,
        "qk_norm_type": "RMSNorm",
        "qk_norm_before_rope": True,
    },
}
MAIN = ("layer_before", "cross")
PLAIN = ("plain", "grouped", "fused")
CASES = [(name, "high", "float32") for name in ATTENTIONS if name not in PLAIN]
CASES += [(name, "high", dtype) for name in MAIN for dtype in ("bfloat16", "float16")]
CASES += [(name, mode, "float32") for name in (*MAIN, "l2") for mode in ("delayed", "current", "block")]
CASES = [(*case, rotary) for case in CASES for rotary in (True, False)]
CASES += [
    (name, mode, "float32", False) for name in PLAIN for mode in ("high", "delayed", "current", "block")
]


@pytest.mark.parametrize(("name", "mode", "dtype", "rotary"), CASES)
def test_attention(device, name, mode, dtype, rotary):
    options = ATTENTIONS[name]
    cross = "attention_type" in options
    module = make(
        nn.MultiheadAttention,
        device,
        dtype,
        attn_mask_type="no_mask" if cross else "causal",
        **BASE,
        **options,
    )
    channels, embedding, angles = options.get("kv_channels", H // HEADS), {}, None
    if rotary:
        made = nn.RotaryPositionEmbedding(channels, device=device)
        speeds = 10000.0 ** (-np.arange(0, channels, 2) / channels)
        places = np.arange(S) + 2, np.arange(OTHER if cross else S) + 2 - 2 * cross
        angles = [at[:, None] * speeds for at in places]
        embedding["rotary_pos_emb"] = (made(S, offset=2), made(OTHER)) if cross else made(S, offset=2)
    x, g, source, p = prepared(module, mode, dtype, cross, **embedding)
    want = Block(
        module,
        p,
        "",
        mode,
        dtype,
        exact(x),
        exact(source) if cross else None,
        B,
        options.get("normalization", "LayerNorm"),
        angles,
        not cross,
        options.get("qk_norm_type", ""),
        options.get("qk_norm_eps", 1e-6),
    )
    got = run(module, mode, x, g, source, **embedding)
    y = (want.y if want.bias is None else want.y + want.bias).rounded(dtype)
    check(got, (y, *want.backward(exact(g)), want.grads))


SELF = {
    "pre": {},
    "post_residual": {"apply_residual_connection_post_layernorm": True},
    "output_norm": {"output_layernorm": True},
}
FORMS = SELF | {
    "decoder": {"layer_type": "decoder"},
    "decoder_post": {
        "layer_type": "decoder",
        "apply_residual_connection_post_layernorm": True,
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
    },
    "decoder_output": {"layer_type": "decoder", "output_layernorm": True, "bias": False},
    "post_and_output": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "decoder_post_and_output": {
        "layer_type": "decoder",
        "apply_residual_connection_post_layernorm": True,
        "output_layernorm": True,
    },
    "parallel": {"parallel_attention_mlp": True, "num_gqa_groups": 2},
    "parallel_plain": {"parallel_attention_mlp": True, "bias": False, "drop_path_rate": 0.4},
    "path": {"drop_path_rate": 0.4},
    "path_plain": {"drop_path_rate": 0.4, "bias": False, "output_layernorm": True},
    "path_post": {
        "drop_path_rate": 0.4,
        "apply_residual_connection_post_layernorm": True,
        "layer_type": "decoder",
        "kv_channels": 12,
    },
}
LAYERS = [(form, "high", "float32", "LayerNorm") for form in FORMS if form not in SELF]
LAYERS += [
    (form, "high", dtype, "RMSNorm")
    for form in ("decoder", "parallel", "path")
    for dtype in ("bfloat16", "float16")
]
LAYERS += [
    (form, mode, "float32", "LayerNorm")
    for form in ("decoder_post", "parallel")
    for mode in ("delayed", "current", "block")
]
LAYERS += [
    (form, mode, dtype, kind)
    for form in SELF
    for kind in ("LayerNorm", "RMSNorm")
    for mode, dtype in (
        ("high", "float32"),
        ("high", "bfloat16"),
        ("delayed", "float32"),
        ("current", "float32"),
        ("block", "float32"),
    )
]
LAYERS += [("post_residual", "high", "float16", "RMSNorm"), ("pre", "current", "float16", "RMSNorm")]
LAYERS += [("pre", mode, "float16", "LayerNorm") for mode in ("high", "delayed", "block")]


def draws(device, count):
    """The factors of ``B`` samples that the next ``count`` operations on the device will draw."""
    state = nn.get_rng_state()[f"device.{arrays.device(device)}"]
    return [keep_factors(np.array([state[0], state[1] + i]), 0.4, (B,)) for i in range(count)]


@pytest.mark.parametrize(("form", "mode", "dtype", "kind"), LAYERS)
def test_layer(device, form, mode, dtype, kind):
    options = FORMS[form]
    module = make(nn.TransformerLayer, device, dtype, normalization=kind, **LAYER, **options)
    cross, factors = module.inter_attention is not None, (None, None)
    # in float16 the loss is scaled, or else an attention's own gradients fall below its normal numbers, where
    # a fused kernel that keeps them in float16 rounds them coarsely
    scale = 1.0 if dtype == "float16" and form in SELF else G
    x, g, source, p = prepared(module, mode, dtype, cross, scale)
    if "drop_path_rate" in options:
        nn.random.next_rng(arrays.device(device))  # the state exists from now on
        while not any(0 in f and f.any() for f in draws(device, 2)):
            nn.random.next_rng(arrays.device(device))
        factors = tuple(np.tile(f, S)[:, None] for f in draws(device, 2))
    want = layer_step(
        module, p, mode, dtype, kind, exact(x), exact(g), exact(source) if cross else None, factors
    )
    check(run(module, mode, x, g, source), want)
    module.eval()
    assert np.isfinite(run(module, mode, x, g, source)[0]).all()


def layout(x, form):
    """(s, b, ...) in a format; all sequences are whole."""
    if form == "sbhd":
        return x
    x = np.ascontiguousarray(x.swapaxes(0, 1))
    return x if form == "bshd" else x.reshape(-1, *x.shape[2:])


@pytest.mark.parametrize(
    "options",
    [{"drop_path_rate": 0.4}, {"qk_norm_type": "RMSNorm", "num_gqa_groups": 2, "fuse_qkv_params": True}],
)
def test_formats_agree(device, options):
    """The same samples are dropped and the same rows computed wherever the batch's dimension lies."""
    x, g = draw(1, (S, B, H), "float32"), draw(2, (S, B, H), "float32", G)
    starts = (np.arange(B + 1) * S).astype(np.int32)
    found = {}
    # in each branch, the first of two operations that draw, one sample of two is dropped
    seed = next(
        s
        for s in range(100)
        if all(0 < keep_factors(np.array([s, i]), 0.4, (B,)).astype(bool).sum() < B for i in range(2))
    )
    for form in ("sbhd", "bshd", "thd"):
        nn.manual_seed(seed)
        mask = "padding_causal" if form == "thd" else "causal"
        module = make(
            nn.TransformerLayer,
            device,
            "float32",
            attn_input_format=form,
            self_attn_mask_type=mask,
            **LAYER,
            **options,
        )
        freqs = nn.RotaryPositionEmbedding(H // HEADS, device=device)(S)
        more = (
            {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": S, "max_seqlen_kv": S}
            if form == "thd"
            else {}
        )
        a = tensor(layout(x, form), requires_grad=True, device=device)
        y = module(a, rotary_pos_emb=freqs, **more)
        y.backward(layout(g, form))
        found[form] = f64(y), f64(a.grad)
    for form in ("bshd", "thd"):
        for what, got, want in zip(("y", "dx"), found[form], found["sbhd"], strict=True):
            slack = 64 * H * 2.0**-24 * np.abs(want).max()
            assert_close(what, got, layout(want, form), "float64", slack)


@pytest.mark.parametrize("options", [{}, {"layer_type": "decoder"}, {"parallel_attention_mlp": True}])
@pytest.mark.parametrize("mode", ["high", "delayed"])
def test_a_recomputed_core_has_the_same_bits(device, mode, options, monkeypatch):
    calls = []  # of the core, whether it goes through the operation or is done again
    bound = call.bound
    monkeypatch.setattr(
        call, "bound", lambda what, *given: (what is attention and calls.append(1), bound(what, *given))[1]
    )
    found = []
    for again in (False, True):
        nn.manual_seed(3)
        module = make(
            nn.TransformerLayer,
            device,
            "bfloat16",
            **LAYER | {"attention_dropout": 0.2, "hidden_dropout": 0.2},
            **options,
        )
        source = draw(3, (OTHER, B, H), "bfloat16") if "layer_type" in options else None
        calls.clear()
        with fk.deterministic(True):
            found.append(
                run(
                    module,
                    mode,
                    draw(1, (S, B, H), "bfloat16"),
                    draw(2, (S, B, H), "bfloat16"),
                    source,
                    checkpoint_core_attention=again,
                )
            )
        assert len(calls) == (1 + again) * (1 + (source is not None))
    for a, b in zip(found[0][:3], found[1][:3], strict=True):
        if a is not None:
            assert_same_bits("value", b, a)
    for name, grad in found[0][3].items():
        assert_same_bits(name, found[1][3][name], grad)


@pytest.mark.parametrize("cross", [False, True])
def test_what_attention_returns(device, cross):
    options = BASE | {
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
        "input_layernorm": True,
        "attn_mask_type": "no_mask",
        "attention_type": "cross" if cross else "self",
    }
    more = {"return_bias": True, "return_layernorm_output": True}
    whole, parts = (
        make(nn.MultiheadAttention, device, "float32", **options, **extra) for extra in ({}, more)
    )
    x, source = (tensor(draw(i, (n, B, H), "float32"), device=device) for i, n in ((1, S), (2, OTHER)))
    given = {"encoder_output": source} if cross else {}
    y, bias, normed = parts(x, **given)
    assert bias is parts.proj.bias
    want = f64(y) + f64(bias)
    assert_close("y", f64(whole(x, **given)), want, "float64", 16 * H * 2.0**-24 * np.abs(want).max())
    first = parts.layernorm_query if cross else parts.layernorm_qkv
    norm = nn.LayerNorm(H, device=device)
    norm.load_state_dict({kind: getattr(first, f"layer_norm_{kind}").numpy() for kind in ("weight", "bias")})
    assert_same_bits("normed", normed.numpy(), norm(x).numpy())


@pytest.mark.parametrize("options", [{}, {"num_gqa_groups": 2, "fuse_qkv_params": True}])
def test_positions_start_where_the_inference_says(device, options, monkeypatch):
    module = make(nn.MultiheadAttention, device, "float32", **{**BASE, "layer_number": 1}, **options)
    cache, seen, forward = (
        nn.InferenceParams(B, S + 3, qkv_format="sbhd", device=device),
        [],
        DotProductAttention.forward,
    )
    embedding, x = (
        nn.RotaryPositionEmbedding(H // HEADS, device=device),
        tensor(draw(1, (S, B, H), "float32"), device=device),
    )

    def without(self, *given, inference_params=None, prepared=None, **named):
        seen.append(inference_params)
        return forward(self, *given, **named)

    with fk.no_grad():
        cache.pre_step(dict.fromkeys(range(B), 3))
        module(
            tensor(draw(2, (3, B, H), "float32"), device=device),
            inference_params=cache,
            rotary_pos_emb=embedding(S + 3),
        )
        cache.pre_step(dict.fromkeys(range(B), S))
        monkeypatch.setattr(DotProductAttention, "forward", without)
        y = module(x, inference_params=cache, rotary_pos_emb=embedding(S + 3))
    assert seen == [cache]
    assert_same_bits("y", y.numpy(), module(x, rotary_pos_emb=embedding(S, offset=3)).numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_l2_normalization(device, dtype):
    x, g = draw(1, (3, 5, 40), dtype), draw(2, (3, 5, 40), dtype)
    a = tensor(x, requires_grad=True, device=device)
    y = nn.L2Normalization(eps=0.5)(a)
    y.backward(g)
    want = Normed(exact(x), {}, "", "L2Normalization", 0.5, dtype, {})
    first = x[0, 0].astype(np.float64)
    first /= np.sqrt((first**2).sum() + 0.5)
    assert_close("oracle", want.y.v[0], first, "float64", 2.0**-8 * np.abs(first))
    assert_within("y", f64(y).reshape(-1, 40), want.y)
    assert_within("dx", f64(a.grad).reshape(-1, 40), want.backward(exact(g)).rounded(dtype))


def test_heads_that_nothing_was_made_of_have_no_gradient(device):
    spec = SplitHeadsSpec((("q", 4), ("k", 2), ("v", 2)), 3, 2)
    x = tensor(draw(1, (S, B, 24), "float32"), requires_grad=True, device=device)
    parts = apply(split_heads, spec, {"x": x})
    g = draw(2, parts["k"].shape, "float32")
    parts["k"].backward(g)
    want = np.zeros((S, B, 2, 4, 3), np.float32)
    want[:, :, :, 2] = g
    np.testing.assert_array_equal(x.grad.numpy().reshape(want.shape), want)
    np.testing.assert_array_equal(
        parts["q"].numpy().reshape(S, B, 2, 2, 3), x.numpy().reshape(want.shape)[:, :, :, :2]
    )
