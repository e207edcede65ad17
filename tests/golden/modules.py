"""Modules and functions that ``fp8kit.nn`` and ``fp8kit_torch`` both have, with Transformer Engine's names,
and the arguments that they are made and called with; at the end those of ``fp8kit_torch`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.golden.values import Angles, Array, Fixed, ids, mask


class Layer(NamedTuple):
    """A module: its name, its constructor's arguments, and those of its call (see ``values``)."""

    module: str
    args: dict[str, Any]
    call: dict[str, Any]


def _of(module: str, args: Mapping[str, Any], call: Mapping[str, Any], **variants: Any) -> dict[str, Layer]:
    """Variants of one module by name: (further arguments of the constructor, further arguments of the call).

    One that is None takes an argument away.
    """

    def joined(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**base, **more}.items() if value is not None}

    found = {}
    for name, (own, called) in variants.items():
        found[f"{module}.{name}"] = Layer(module, joined(args, own), joined(call, called))
    return found


_NOTHING: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
_ROWS = {"inp": Array((20, 48))}
_ODD = {"inp": Array((7, 3, 37))}

LINEAR = _of(
    "Linear",
    {"in_features": 48, "out_features": 40},
    _ROWS,
    plain=_NOTHING,
    odd=({"in_features": 37, "out_features": 23}, _ODD),
    no_bias=({"bias": False}, {}),
    return_bias=({"return_bias": True}, {}),
    split=({"parameters_split": {"query": 24, "key": 16}}, {}),
    named_split=({"parameters_split": ("a", "b")}, {}),
    one_row=({}, {"inp": Array((1, 48))}),
    no_gradient=({}, {"inp": Array((20, 48), grad=False)}),
    blocks=({"in_features": 272, "out_features": 144}, {"inp": Array((130, 272))}),
)
NORMS = {
    **_of(
        "LayerNorm",
        {"normalized_shape": 48},
        _ROWS,
        plain=_NOTHING,
        zero_centered=({"zero_centered_gamma": True, "eps": 1e-3}, {}),
        odd=({"normalized_shape": None, "hidden_size": 37}, _ODD),
    ),
    **_of(
        "RMSNorm", {"normalized_shape": 48}, _ROWS, plain=_NOTHING, zero=({"zero_centered_gamma": True}, {})
    ),
    **_of("L2Normalization", {}, _ROWS, plain=_NOTHING, eps=({"eps": 1e-2}, _ODD)),
}
NORM_LINEAR = _of(
    "LayerNormLinear",
    {"in_features": 48, "out_features": 40},
    _ROWS,
    plain=_NOTHING,
    odd=({"in_features": 37, "out_features": 23, "normalization": "RMSNorm"}, _ODD),
    rms_zero=({"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False}, {}),
    returns=({"return_layernorm_output": True, "return_bias": True, "eps": 1e-3}, {}),
    split=({"parameters_split": {"query": 24, "key": 16}, "return_layernorm_output": True}, {}),
)
ACTIVATIONS = (
    *("gelu", "qgelu", "relu", "silu", "srelu"),
    *("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"),
)
ACTS = _of(
    "LayerNormMLP",
    {"hidden_size": 48, "ffn_hidden_size": 64},
    _ROWS,
    **{name: ({"activation": name}, {}) for name in ACTIVATIONS},
)
_CLAMPED = {"activation": "clamped_swiglu", "activation_params": {"limit": 1.0, "alpha": 1.5}}
MLP = _of(
    "LayerNormMLP",
    {"hidden_size": 48, "ffn_hidden_size": 64},
    _ROWS,
    odd=({"hidden_size": 37, "ffn_hidden_size": 23, "activation": "swiglu"}, _ODD),
    clamped=({**_CLAMPED, "bias": False}, {}),
    checkpoint=({"checkpoint": True}, {}),
    checkpoint_gated=({"checkpoint": True, "activation": "geglu", "return_layernorm_output": True}, {}),
    returns=({"return_bias": True, "return_layernorm_output": True, "normalization": "RMSNorm"}, {}),
    zero_centered=({"zero_centered_gamma": True, "bias": False}, {}),
)

HEADS, GROUPS, D = 4, 2, 8


def heads(form: str, tokens: int, heads: int = HEADS, width: int = D, kind: str = "normal") -> Array:
    """Queries, keys or values of two sequences."""
    shape = {"sbhd": (tokens, 2), "bshd": (2, tokens), "thd": (2 * tokens,)}[form]
    return Array((*shape, heads, width), kind)


def _qkv(
    form: str = "sbhd", q: int = 12, kv: int = 12, groups: int = HEADS, kind: str = "normal", v: int = D
) -> dict[str, Any]:
    return {
        "query_layer": heads(form, q, kind=kind),
        "key_layer": heads(form, kv, groups, kind=kind),
        "value_layer": heads(form, kv, groups, v, kind),
    }


_SUMS_Q, _SUMS_KV = Fixed((0, 7, 19)), Fixed((0, 9, 17))
LENGTHS = {"cu_seqlens_q": _SUMS_Q, "cu_seqlens_kv": _SUMS_KV}
_THD = {**_qkv("thd"), **LENGTHS, "max_seqlen_q": 12, "max_seqlen_kv": 12}
_PADDED = {"cu_seqlens_q_padded": Fixed((0, 8, 24)), "cu_seqlens_kv_padded": Fixed((0, 10, 24))}
_PACKED = dict.fromkeys(("query_layer", "key_layer", "value_layer"))
_UNEVEN = _qkv(q=7, kv=13)


def _padding(tokens: int, *lengths: int) -> Fixed:
    """A padding mask, True where a sequence has ended."""
    return Fixed([[[[t >= n for t in range(tokens)]]] for n in lengths], "bool")


def _attention(scale: float | None, kind: str) -> dict[str, Layer]:
    """``DotProductAttention`` with each of its options; ``scale`` and ``kind`` of its inputs."""
    drawn = _qkv(kind=kind)
    bias = Array((1, HEADS, 12, 12))
    found = _of(
        "DotProductAttention",
        {"num_attention_heads": HEADS, "kv_channels": D, "softmax_scale": scale},
        drawn,
        causal=_NOTHING,
        no_mask=({"attn_mask_type": "no_mask"}, {}),
        bshd=({"qkv_format": "bshd"}, _qkv("bshd", kind=kind)),
        uneven=({"attn_mask_type": "causal"}, _UNEVEN),
        bottom_right=({"attn_mask_type": "causal_bottom_right"}, _UNEVEN),
        corner=({"attn_mask_type": "no_mask", "window_size": (3, 1), "bottom_right_diagonal": True}, _UNEVEN),
        window=({"window_size": (3, 0)}, {}),
        window_both=({"attn_mask_type": "no_mask", "window_size": (2, 4)}, _UNEVEN),
        groups=({"num_gqa_groups": GROUPS}, _qkv(groups=GROUPS, kind=kind)),
        depth_of_v=({"kv_channels": (D, 12), "num_gqa_groups": 1}, _qkv(groups=1, v=12, kind=kind)),
        arbitrary=({"attn_mask_type": "arbitrary"}, {"attention_mask": mask(2, 1, 12, 12)}),
        padding=(
            {"attn_mask_type": "padding", "attention_type": "cross"},
            {"attention_mask": (_padding(12, 7, 12), _padding(12, 9, 8))},
        ),
        padding_causal=(
            {"attn_mask_type": "padding,causal"},
            {"cu_seqlens_q": Fixed((0, 7, 19)), "cu_seqlens_kv": Fixed((0, 7, 19))},
        ),
        padding_bottom_right=({"attn_mask_type": "padding_causal_bottom_right"}, LENGTHS),
        thd=({"qkv_format": "thd", "attn_mask_type": "padding"}, _THD),
        thd_causal=(
            {"qkv_format": "thd", "attn_mask_type": "padding_causal", "num_gqa_groups": GROUPS},
            {**_THD, **_qkv("thd", groups=GROUPS, kind=kind)},
        ),
        thd_gaps=(
            {"qkv_format": "thd", "attn_mask_type": "padding", "window_size": (3, 3)},
            {**_THD, **_PADDED, "pad_between_seqs": True},
        ),
        alibi=({}, {"core_attention_bias_type": "alibi"}),
        alibi_slopes=(
            {"attn_mask_type": "no_mask"},
            {"core_attention_bias_type": "alibi", "alibi_slopes": Fixed((0.5, 0.25, 1.0, 0.125), "float32")},
        ),
        post_scale_bias=({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}),
        pre_scale_bias=(
            {"attn_mask_type": "no_mask"},
            {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": Array((2, 1, 12, 12))},
        ),
        off_by_one=({"softmax_type": "off-by-one"}, {}),
        learnable=({"softmax_type": "learnable"}, {}),
        dropout=({"attention_dropout": 0.3}, {}),
        dropout_thd=({"attention_dropout": 0.3, "qkv_format": "thd", "attn_mask_type": "padding"}, _THD),
        kv_packed=({}, {**_PACKED, "query_layer": heads("sbhd", 12), "kv_layer": Array((12, 2, 64))}),
        qkv_packed=({}, {**_PACKED, "qkv_layer": Array((12, 2, 96))}),
        qkv_interleaved=({}, {**_PACKED, "qkv_layer": Array((12, 2, 96)), "qkv_interleave_dim": -2}),
        checkpoint=({"attention_dropout": 0.2}, {"checkpoint_core_attention": True}),
        scale=({"softmax_scale": 0.2}, {}),
    )
    return found


ATTENTION = _attention(None, "normal")
_HIDDEN = 32
_TOKENS = Array((12, 2, _HIDDEN))
_BATCH_FIRST = Array((2, 12, _HIDDEN))
_FLAT = Array((24, _HIDDEN))
_ENCODED = Array((9, 2, _HIDDEN))
_ROPE = {"rotary_pos_emb": Angles(D, 12)}
MHA = _of(
    "MultiheadAttention",
    {"hidden_size": _HIDDEN, "num_attention_heads": HEADS, "attention_dropout": 0.0},
    {"hidden_states": _TOKENS},
    plain=_NOTHING,
    fused=({"fuse_qkv_params": True}, {}),
    fused_blocks=({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, {}),
    groups=({"num_gqa_groups": GROUPS, "fuse_qkv_params": True, "bias": False}, {}),
    norm=({"input_layernorm": True, "return_layernorm_output": True, "return_bias": True}, {}),
    norm_rms=(
        {"input_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True, "kv_channels": 12},
        {},
    ),
    cross=({"attention_type": "cross", "attn_mask_type": "no_mask"}, {"encoder_output": _ENCODED}),
    cross_fused=(
        {
            "attention_type": "cross",
            "attn_mask_type": "no_mask",
            "fuse_qkv_params": True,
            "num_gqa_groups": GROUPS,
            "input_layernorm": True,
        },
        {"encoder_output": _ENCODED},
    ),
    rope=({"num_gqa_groups": GROUPS}, _ROPE),
    rope_pair=(
        {"fuse_qkv_params": True},
        {"rotary_pos_emb": (Angles(D, 12), Angles(D, 12, {"rotary_base": 100.0}))},
    ),
    rope_interleaved=(
        {"rotary_pos_interleaved": True, "qkv_format": "bshd", "fuse_qkv_params": True},
        {
            "hidden_states": _BATCH_FIRST,
            "rotary_pos_emb": Angles(D, 12, {"interleaved": True, "rotary_percent": 0.5}),
        },
    ),
    qk_l2=({"qk_norm_type": "L2Normalization", "qk_norm_eps": 1e-3}, _ROPE),
    qk_rms=({"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True, "fuse_qkv_params": True}, _ROPE),
    qk_layer_norm=({"qk_norm_type": "LayerNorm", "num_gqa_groups": GROUPS}, {}),
    thd=(
        {"qkv_format": "thd", "attn_mask_type": "padding_causal"},
        {
            "hidden_states": _FLAT,
            "cu_seqlens_q": Fixed((0, 9, 24)),
            "cu_seqlens_kv": Fixed((0, 9, 24)),
            "max_seqlen_q": 15,
            "max_seqlen_kv": 15,
            "rotary_pos_emb": Angles(D, 16),
        },
    ),
    window=({"window_size": (4, 0), "softmax_type": "learnable"}, {}),
    checkpoint_core=(
        {"attention_dropout": 0.2, "fuse_qkv_params": True},
        {"checkpoint_core_attention": True},
    ),
)
_SMALL = {
    "hidden_size": _HIDDEN,
    "ffn_hidden_size": 48,
    "num_attention_heads": HEADS,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_DECODER = {"layer_type": "decoder"}
TRANSFORMER = _of(
    "TransformerLayer",
    _SMALL,
    {"hidden_states": _TOKENS},
    plain=_NOTHING,
    fused=({"fuse_qkv_params": True, "num_gqa_groups": GROUPS}, {}),
    llama=(
        {
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "bias": False,
            "num_gqa_groups": GROUPS,
            "fuse_qkv_params": True,
            "attn_input_format": "bshd",
        },
        {"hidden_states": _BATCH_FIRST, **_ROPE},
    ),
    output_norm=({"output_layernorm": True}, {}),
    output_norm_rms=({"output_layernorm": True, "normalization": "RMSNorm"}, {}),
    post_norm=({"apply_residual_connection_post_layernorm": True}, {}),
    parallel=({"parallel_attention_mlp": True, "zero_centered_gamma": True}, {}),
    decoder=(_DECODER, {"encoder_output": _ENCODED}),
    decoder_masked=(
        {**_DECODER, "enc_dec_attn_mask_type": "padding", "enc_dec_window_size": (4, 4)},
        {"encoder_output": _ENCODED, "enc_dec_attn_mask": (_padding(12, 7, 12), _padding(9, 9, 6))},
    ),
    decoder_post_norm=(
        {**_DECODER, "apply_residual_connection_post_layernorm": True, "fuse_qkv_params": True},
        {"encoder_output": _ENCODED},
    ),
    dropout=({"hidden_dropout": 0.2, "attention_dropout": 0.1}, {}),
    dropout_decoder=(
        {**_DECODER, "hidden_dropout": 0.2, "drop_path_rate": 0.3},
        {"encoder_output": _ENCODED},
    ),
    drop_path=({"drop_path_rate": 0.5, "hidden_dropout": 0.1}, {}),
    drop_path_thd=(
        {"drop_path_rate": 0.5, "attn_input_format": "thd", "self_attn_mask_type": "padding_causal"},
        {
            "hidden_states": _FLAT,
            "cu_seqlens_q": Fixed((0, 9, 24)),
            "cu_seqlens_kv": Fixed((0, 9, 24)),
            "max_seqlen_q": 15,
            "max_seqlen_kv": 15,
        },
    ),
    qk_norm=({"qk_norm_type": "RMSNorm", "activation": "srelu"}, _ROPE),
    clamped=({**_CLAMPED, "parallel_attention_mlp": True, "fuse_qkv_params": True}, {}),
    masked=({"self_attn_mask_type": "arbitrary"}, {"attention_mask": mask(2, 1, 12, 12)}),
    alibi=({"window_size": (5, 0)}, {"core_attention_bias_type": "alibi"}),
    overridden=({}, {"self_attn_mask_type": "no_mask", "window_size": (2, 2)}),
    odd=(
        {"hidden_size": 36, "ffn_hidden_size": 27, "num_attention_heads": 3},
        {"hidden_states": Array((11, 3, 36))},
    ),
)
OTHERS = {
    **_of("Dropout", {"p": 0.4}, _ROWS, plain=_NOTHING),
    **_of(
        "Embedding",
        {"num_embeddings": 13, "embedding_dim": 20},
        {"ids": ids(5, 7, most=13)},
        plain=_NOTHING,
        wide=({}, {"ids": Array((33,), "ids", False, 13, "int64")}),
    ),
}
GROUPED = _of(
    "GroupedLinear",
    {"num_gemms": 4, "in_features": 48, "out_features": 40},
    {"inp": Array((26, 48)), "m_splits": [5, 0, 16, 5]},
    plain=_NOTHING,
    no_bias=({"bias": False}, {}),
    return_bias=({"return_bias": True}, {}),
)
# sums of small whole numbers alone, and norms that divide by powers of two alone: see ``values.draw``
_SIGNS = {"inp": Array((20, 32), "signs")}
EXACT = {
    **LINEAR,
    **GROUPED,
    **OTHERS,
    **_of(
        "LayerNorm",
        {"normalized_shape": 32, "eps": 1e-30},
        _SIGNS,
        exact=_NOTHING,
        exact_zero=({"zero_centered_gamma": True}, {}),
    ),
    **_of("RMSNorm", {"normalized_shape": 32, "eps": 1e-30}, _SIGNS, exact=_NOTHING),
    **_of(
        "LayerNormLinear",
        {"in_features": 32, "out_features": 40, "eps": 1e-30},
        _SIGNS,
        exact=_NOTHING,
        exact_rms=({"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False}, {}),
        exact_returns=({"return_layernorm_output": True, "return_bias": True}, {}),
        exact_split=({"parameters_split": {"query": 24, "key": 16}}, {}),
    ),
    **_of(
        "LayerNormMLP",
        {"hidden_size": 32, "ffn_hidden_size": 48, "eps": 1e-30},
        _SIGNS,
        exact=({"activation": "relu"}, {}),
        exact_rms=({"activation": "relu", "normalization": "RMSNorm", "zero_centered_gamma": True}, {}),
        exact_gated=({"activation": "reglu", "bias": False}, {}),
        exact_checkpoint=({"activation": "relu", "checkpoint": True}, {}),
    ),
    # scores that differ by 87 at least, or not at all: each row of the softmax is a 1 and zeros
    **{
        name.replace(".", ".exact_"): layer
        for name, layer in _attention(128.0, "wide").items()
        if name.rpartition(".")[2] in ("causal", "bshd", "groups", "depth_of_v", "arbitrary", "window")
    },
}
LAYERS = {
    **EXACT,
    **LINEAR,
    **NORMS,
    **NORM_LINEAR,
    **ACTS,
    **MLP,
    **ATTENTION,
    **MHA,
    **TRANSFORMER,
    **GROUPED,
    **OTHERS,
}

LAYERS |= {
    "LayerNorm.chain": Layer("LayerNorm", {"normalized_shape": 40}, {}),
    "LayerNormMLP.chain": Layer("LayerNormMLP", {"hidden_size": 40, "ffn_hidden_size": 24}, {}),
    "Linear.chain": Layer("Linear", {"in_features": 40, "out_features": 48}, {}),
}
# --- functions of fp8kit.nn and fp8kit_torch ----------------------------------------------------------------


class Function(NamedTuple):
    """A function: its name, and the arguments of its call."""

    function: str
    call: dict[str, Any]


_LOSS = {"logits": Array((20, 17)), "targets": Array((20,), "ids", False, 17, "int64")}
FUNCTIONS = {
    "cross_entropy.mean": Function("cross_entropy", _LOSS),
    "cross_entropy.none": Function("cross_entropy", {**_LOSS, "reduction": "none"}),
    "cross_entropy.smoothed": Function("cross_entropy", {**_LOSS, "label_smoothing": 0.1, "ignore_index": 3}),
    **{
        f"rope.{name}": Function("apply_rotary_pos_emb", {"freqs": Angles(D, 16), **call})
        for name, call in {
            "sbhd": {"t": heads("sbhd", 12)},
            "bshd": {
                "t": heads("bshd", 12),
                "tensor_format": "bshd",
                "interleaved": True,
                "freqs": Angles(D, 12, {"interleaved": True}),
            },
            "starts": {"t": heads("sbhd", 12), "start_positions": Fixed((3, 0))},
            "part": {"t": heads("sbhd", 12, width=12)},
            "thd": {"t": heads("thd", 12), "tensor_format": "thd", "cu_seqlens": Fixed((0, 9, 24))},
            "interpolated": {
                "t": heads("sbhd", 12),
                "freqs": Angles(
                    D, 12, {"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 4}
                ),
            },
        }.items()
    },
}
TORCH_FUNCTIONS = {
    "parallel_cross_entropy": Function(
        "parallel_cross_entropy",
        {"inp": _LOSS["logits"], "target": _LOSS["targets"], "label_smoothing": 0.2, "reduce_loss": True},
    ),
    "embedding": Function("embedding", {"ids": ids(5, 7, most=13), "table": Array((13, 20), "weight")}),
    "dropout_add": Function(
        "dropout_add",
        {"x": Array((20, 48)), "residual": Array((20, 48)), "bias": Array((48,), "shift"), "p": 0.3},
    ),
    "fused_qkv_rope": Function(
        "apply_fused_qkv_rotary_pos_emb",
        {
            "qkv": Array((12, 2, 4, 3 * D)),
            "q_freqs": Angles(D, 12),
            "k_freqs": Angles(D, 12),
            "qkv_split_arg_list": (D, D, D),
        },
    ),
    "moe_permute": Function(
        "moe_permute", {"inp": Array((10, 16)), "routing_map": mask(10, 4), "num_out_tokens": 12}
    ),
    "moe_permute_index": Function(
        "moe_permute",
        {"inp": Array((10, 16)), "routing_map": ids(10, 2, most=4), "num_out_tokens": 0, "map_type": "index"},
    ),
    "moe_permute_with_probs": Function(
        "moe_permute_with_probs",
        {
            "inp": Array((10, 16)),
            "probs": Array((10, 4), "gain"),
            "routing_map": mask(10, 4),
            "num_out_tokens": 12,
        },
    ),
    "moe_sort_chunks_by_index": Function(
        "moe_sort_chunks_by_index",
        {
            "inp": Array((10, 16)),
            "split_sizes": Fixed((3, 0, 5, 2), "int64"),
            "sorted_index": Fixed((2, 0, 3, 1), "int64"),
        },
    ),
    "moe_sort_chunks_by_index_with_probs": Function(
        "moe_sort_chunks_by_index_with_probs",
        {
            "inp": Array((10, 16)),
            "probs": Array((10,), "gain"),
            "split_sizes": Fixed((3, 0, 5, 2), "int64"),
            "sorted_index": Fixed((2, 0, 3, 1), "int64"),
        },
    ),
}

_PLAIN_ACTS = ("GELU", "QGELU", "ReLU", "SReLU", "SiLU")
_GATED_ACTS = ("GEGLU", "GLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU")
OPS = {
    **{
        f"act.{name}": (
            ("BasicLinear", {"in_features": 48, "out_features": 32}),
            (name, {}),
            ("Bias", {"size": 32 if name in _PLAIN_ACTS else 16}),
            ("Identity", {}),
        )
        for name in (*_PLAIN_ACTS, *_GATED_ACTS)
    },
    "linear": (("Linear", {"in_features": 48, "out_features": 40}),),
    "mlp": (
        ("RMSNorm", {"normalized_shape": 48}),
        ("BasicLinear", {"in_features": 48, "out_features": 64}),
        ("Bias", {"size": 64}),
        ("SwiGLU", {}),
        ("Linear", {"in_features": 32, "out_features": 48, "bias": False}),
        ("ConstantScale", {"scale": 0.5}),
        ("Reshape", {"shape": (4, 5, 48)}),
    ),
    "activations": (
        ("LayerNorm", {"normalized_shape": 48, "zero_centered_gamma": True}),
        ("GELU", {}),
        ("L2Normalization", {}),
        ("SReLU", {}),
        ("ClampedSwiGLU", {"limit": 1.0}),
        ("Dropout", {"p": 0.2}),
    ),
}
