"""Attention and what stands round it, on no tokens at all and on sequences of no length."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import apply, call, tensor
from fp8kit.backends import dispatch
from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit.ops.drop_path import DropPathSpec, drop_path
from fp8kit.ops.kv_cache import cached_attention
from fp8kit.ops.rope import RopeSpec, rope
from fp8kit.ops.split_heads import SplitHeadsSpec, split_heads
from tests.support.combinations import combinations
from tests.support.layers import draw, make, step
from tests.support.products import f64, host

HEADS, GROUPS, D = 4, 2, 8
H = HEADS * D
# kernels that are never asked about nothing
SPIED = (
    "attention_fwd",
    "attention_bwd",
    "attention_workspace",
    "pack_sequences",
    "unpack_sequences",
    "cache_append_",
    "cache_gather",
    "rope_fwd",
    "rope_bwd",
    "drop_path",
    "copy",
)


@pytest.fixture(autouse=True)
def spied(monkeypatch):
    """Fail where one of ``SPIED`` is given an array, or a shape, of nothing."""

    def watched(name, kernel):
        @functools.wraps(kernel)
        def call(*args):
            shapes = [getattr(arg, "shape", arg) for arg in args[:2] if arg is not None]
            assert not any(0 in shape for shape in shapes), f"{name} of {shapes}"
            return kernel(*args)

        return call if name in SPIED else kernel

    @functools.cache
    def kernels(device):
        return SimpleNamespace(
            **{name: watched(name, kernel) for name, kernel in vars(dispatch.kernels(device)).items()}
        )

    monkeypatch.setattr(call, "dispatch", SimpleNamespace(kernels=kernels))


def shaped(form, s, b, *rest):
    return ((s, b) if form == "sbhd" else (b, s)) + rest


def leaf(seed, shape, device, dtype="float32"):
    return tensor(draw(seed, shape, dtype), requires_grad=True, device=device)


def zero(what, leaves):
    for name, value in leaves.items():
        assert value.grad is not None, (what, name)
        assert value.grad.shape == value.shape
        np.testing.assert_array_equal(f64(value.grad), 0, err_msg=f"{what}: {name}")


# s_q, s_kv, b
SIZES = {"no batch": (3, 5, 0), "no queries": (0, 5, 2), "no keys": (3, 0, 2), "nothing": (0, 0, 0)}
WAYS = {
    "causal": ({"attn_mask_type": "causal"}, {}),
    "dropout": ({"attn_mask_type": "no_mask", "attention_dropout": 0.3}, {}),
    "padding": ({"attn_mask_type": "padding_causal", "softmax_type": "learnable"}, {}),
    "bias": (
        {"attn_mask_type": "no_mask", "softmax_type": "off-by-one"},
        {"core_attention_bias_type": "post_scale_bias"},
    ),
    "mask": ({"attn_mask_type": "arbitrary"}, {"core_attention_bias_type": "alibi"}),
}


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_dot_product_attention(device, size, way, form):
    (s_q, s_kv, b), (options, call) = SIZES[size], WAYS[way]
    module = nn.DotProductAttention(HEADS, D, GROUPS, qkv_format=form, device=device, **options)
    shapes = {
        "query_layer": (s_q, b, HEADS, D),
        "key_layer": (s_kv, b, GROUPS, D),
        "value_layer": (s_kv, b, GROUPS, D),
    }
    leaves = {name: leaf(1, shaped(form, *shape), device) for name, shape in shapes.items()}
    beside = {}
    if way == "padding":
        beside = {
            f"cu_seqlens_{side}": np.arange(b + 1, dtype=np.int32) * length
            for side, length in (("q", s_q), ("kv", s_kv))
        }
    if way == "bias":
        leaves["core_attention_bias"] = leaf(4, (1, HEADS, s_q, s_kv), device)
    if way == "mask":
        beside["attention_mask"] = np.zeros((b, 1, s_q, s_kv), bool)
    o = module(**leaves, **beside, **call)
    assert o.shape == shaped(form, s_q, b, H)
    np.testing.assert_array_equal(f64(o), 0)
    o.backward(draw(5, o.shape, "float32"))
    zero(size, leaves | dict(module.named_parameters()))


@pytest.mark.parametrize(
    ("t_q", "t_kv", "b", "packed"),
    [(0, 0, 2, False), (0, 0, 2, True), (0, 0, 0, True), (7, 0, 2, False), (0, 7, 2, False)],
)
def test_dot_product_attention_of_no_tokens_in_a_row(device, t_q, t_kv, b, packed):
    module = nn.DotProductAttention(
        HEADS, D, qkv_format="thd", attn_mask_type="padding_causal", device=device
    )
    leaves = (
        {"qkv_layer": leaf(1, (t_q, 3 * H), device)}
        if packed
        else {"query_layer": leaf(1, (t_q, HEADS, D), device), "kv_layer": leaf(2, (t_kv, 2 * H), device)}
    )
    sums = {
        f"cu_seqlens_{side}": np.linspace(0, t, b + 1).astype(np.int32)
        for side, t in (("q", t_q), ("kv", t_kv))
    }
    o = module(**leaves, **sums)
    assert o.shape == (t_q, H)
    np.testing.assert_array_equal(f64(o), 0)
    o.backward(draw(3, o.shape, "float32"))
    zero("thd", leaves)
    with pytest.raises(fk.ShapeError, match="batch at least 1"):
        module(
            leaf(1, (3, HEADS, D), device),
            kv_layer=leaf(2, (3, 2 * H), device),
            **dict.fromkeys(sums, np.zeros(1, np.int32)),
        )


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_sequences_of_no_length_among_others(device, mask):
    """A batch with such sequences is the batch without them, bit for bit, padded and one after the other;
    their own rows are 0."""
    lengths = np.array([0, 3, 0, 5, 0], np.int32)
    there = lengths > 0
    q, kv, do = (draw(i, (8, width), "float32") for i, width in ((1, H), (2, 2 * H), (3, H)))

    def sums(counts):
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    def run(counts, form):
        module = nn.DotProductAttention(HEADS, D, qkv_format=form, attn_mask_type=mask, device=device)
        given = q, kv, do
        if form == "bshd":
            given = [np.zeros((len(counts), 5, x.shape[1]), np.float32) for x in given]
            for whole, x in zip(given, (q, kv, do), strict=True):
                for row, (first, count) in enumerate(zip(sums(counts), counts, strict=False)):
                    whole[row, :count] = x[first : first + count]
        query = tensor(given[0].reshape(*given[0].shape[:-1], HEADS, D), requires_grad=True, device=device)
        pair = tensor(given[1], requires_grad=True, device=device)
        o = module(query, kv_layer=pair, cu_seqlens_q=sums(counts), cu_seqlens_kv=sums(counts))
        o.backward(given[2])
        return [host(x) for x in (o, query.grad, pair.grad)]

    for got, want in zip(run(lengths, "thd"), run(lengths[there], "thd"), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()
    for got, want in zip(run(lengths, "bshd"), run(lengths[there], "bshd"), strict=True):
        np.testing.assert_array_equal(got[there], want)
        np.testing.assert_array_equal(got[~there], 0)


def states(module):
    """(child, direction) -> scales and histories of every FP8 module below."""
    return {
        (name, direction): (host(state.scale).copy(), host(state.amax_history).copy())
        for name, child in module.named_modules()
        for direction, state in getattr(child, "fp8_meta", {}).items()
    }


LAYERS = {
    "MultiheadAttention": (nn.MultiheadAttention, {"attention_dropout": 0.0}),
    "MultiheadAttention normed": (
        nn.MultiheadAttention,
        {
            "num_gqa_groups": GROUPS,
            "input_layernorm": True,
            "fuse_qkv_params": True,
            "qk_norm_type": "RMSNorm",
        },
    ),
    "MultiheadAttention cross": (
        nn.MultiheadAttention,
        {"attention_type": "cross", "attn_mask_type": "no_mask", "input_layernorm": True},
    ),
    "encoder": (nn.TransformerLayer, {"ffn_hidden_size": 48, "drop_path_rate": 0.2}),
    "encoder parallel": (nn.TransformerLayer, {"ffn_hidden_size": 48, "parallel_attention_mlp": True}),
    "decoder": (
        nn.TransformerLayer,
        {"ffn_hidden_size": 48, "layer_type": "decoder", "output_layernorm": True},
    ),
}
MODES = [
    ("high", "bfloat16"),
    ("delayed", "float32"),
    ("current", "float16"),
    ("e4m3", "float32"),
    ("block", "bfloat16"),
    ("block_f32", "float32"),
]


@combinations({"name": list(LAYERS), "how": {"-".join(how): how for how in MODES}})
def test_layers(device, name, how):
    mode, dtype = how
    kind, options = LAYERS[name]
    module = make(kind, device, dtype, hidden_size=H, num_attention_heads=HEADS, **options)
    beside = {"rotary_pos_emb": nn.RotaryPositionEmbedding(D, device=device)(4)}
    source = "cross" in name or name == "decoder"

    def run(leading):
        beside_too = (
            {"encoder_output": tensor(draw(3, (*leading, H), dtype), device=device)} if source else {}
        )
        return step(
            module, mode, draw(1, (*leading, H), dtype), draw(2, (*leading, H), dtype), **beside, **beside_too
        )

    run((4, 3))
    run((4, 3))
    before = states(module)
    for leading in ((0, 3), (4, 0)):
        y, dx, grads = run(leading)
        assert y.shape == dx.shape == (0, H)
        for parameter, grad in grads.items():
            np.testing.assert_array_equal(grad, 0, err_msg=parameter)
    for place, (scale, history) in states(module).items():
        assert np.isfinite(scale).all()
        assert (scale > 0).all()
        seen = place[1] == "scaling_bwd" or np.arange(len(scale)) % 3 != 1  # of all slots but the weights'
        np.testing.assert_array_equal(scale[seen], before[place][0][seen])
        np.testing.assert_array_equal(history[:, seen], before[place][1][:, seen])
    y = run((4, 3))[0]
    assert np.isfinite(y).all()


def test_a_layer_of_no_tokens_in_a_row(device):
    module = make(
        nn.TransformerLayer,
        device,
        "float32",
        hidden_size=H,
        ffn_hidden_size=48,
        num_attention_heads=HEADS,
        attn_input_format="thd",
        self_attn_mask_type="padding_causal",
        drop_path_rate=0.2,
    )
    angles = nn.RotaryPositionEmbedding(D, device=device)(4)
    for sums in ([0], [0, 0, 0]):
        starts = np.array(sums, np.int32)
        y, dx, grads = step(
            module,
            "delayed",
            draw(1, (0, H), "float32"),
            draw(2, (0, H), "float32"),
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            rotary_pos_emb=angles,
        )
        assert y.shape == dx.shape == (0, H)
        assert not any(grad.any() for grad in grads.values())


def test_encoder_output_of_no_length(device):
    """A decoder that attends over nothing adds the projection's bias alone there."""
    module = make(
        nn.MultiheadAttention,
        device,
        "float32",
        hidden_size=H,
        num_attention_heads=HEADS,
        attention_type="cross",
        attn_mask_type="no_mask",
    )
    x = leaf(1, (3, 2, H), device)
    source = leaf(2, (0, 2, H), device)
    y = module(x, encoder_output=source)
    np.testing.assert_array_equal(f64(y), np.broadcast_to(f64(module.proj.bias), (3, 2, H)))
    y.backward(draw(3, (3, 2, H), "float32"))
    zero("over nothing", {"x": x, "source": source})


def test_operations(device):
    angles = nn.RotaryPositionEmbedding(D, device=device)(4)
    for form, shape in (("sbhd", (0, 2, HEADS, D)), ("bshd", (0, 3, HEADS, D)), ("thd", (0, HEADS, D))):
        x = leaf(1, shape, device)
        inputs = {"x": x, "freqs": angles.reshape(4, D)}
        if form == "thd":
            inputs["cu_seqlens"] = tensor(np.zeros(3, np.int32), device=device)
        y = apply(rope, RopeSpec(((HEADS, D, "freqs"),), form), inputs)["y"]
        y.backward(draw(2, shape, "float32"))
        assert y.shape == x.grad.shape == shape

        flat = (*shape[:-2], H)
        x, residual = leaf(3, flat, device), leaf(4, flat, device)
        inputs = {"x": x, "residual": residual, "rng": nn.random.next_rng(x.device)}
        if form == "thd":
            inputs["starts"] = tensor(np.zeros(1, np.int32), device=device)
        y = apply(drop_path, DropPathSpec(H, 0.5, form), inputs)["y"]
        y.backward(draw(5, flat, "float32"))
        assert y.shape == x.grad.shape == residual.grad.shape == flat

        x = leaf(6, flat, device)
        parts = apply(split_heads, SplitHeadsSpec((("q", 2), ("k", 2)), D), {"x": x})
        parts["q"].backward(draw(7, (*flat[:-1], 2, D), "float32"))
        assert parts["k"].shape == (*flat[:-1], 2, D)
        assert x.grad.shape == flat


@pytest.mark.parametrize(("form", "leading"), [("sbhd", (0, 2)), ("bshd", (2, 0)), ("thd", (0,))])
def test_a_step_of_no_tokens_leaves_the_cache_alone(device, form, leading):
    cache = {
        name: tensor(draw(i, (4, 8, GROUPS, D), "float32"), device=device)
        for i, name in enumerate(("k_cache", "v_cache"))
    }
    before = {name: host(x).copy() for name, x in cache.items()}
    spec = AttentionSpec(
        HEADS,
        D,
        GROUPS,
        form,
        "padding_causal_bottom_right",
        layout="separate",
        max_seqlen_q=1,
        max_seqlen_kv=8,
    )
    whole = {
        "cu_seqlens_q": np.zeros(3, np.int32),
        "cu_seqlens_kv": np.array([0, 3, 8], np.int32),
        "pages": np.zeros((2, 1), np.int32),
    }
    inputs = {"q": tensor(np.zeros((*leading, HEADS, D), np.float32), device=device)}
    inputs |= {name: tensor(np.zeros((*leading, GROUPS, D), np.float32), device=device) for name in "kv"}
    inputs |= {name: tensor(value, device=device) for name, value in whole.items()} | cache
    assert apply(cached_attention, spec, inputs)["o"].shape == (*leading, H)
    arrays.synchronize(inputs["q"].device)
    for name, x in cache.items():
        np.testing.assert_array_equal(host(x), before[name])
