"""Functions of ``fp8kit_jax``, and modules of its ``flax`` and ``nnx``, with the arguments of their calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.golden.modules import GROUPS, HEADS, LENGTHS, D, Function, heads
from tests.golden.values import Angles, Array, Fixed, ids, mask


class Sets(NamedTuple):
    """``count`` fresh QuantizerSets, one alone for 1, whose gradients are their next values."""

    count: int


class Key(NamedTuple):
    """A JAX key of this seed, another one at each step."""

    seed: int


_X = Array((2, 10, 48))
_GAMMA, _BETA = Array((48,), "gain"), Array((48,), "shift")
_NORM = {"x": _X, "gamma": _GAMMA, "beta": _BETA}
_DENSE = {"x": _X, "kernel": Array((48, 40), "weight"), "quantizer_set": Sets(1)}
_NORM_DENSE = {**_NORM, **_DENSE, "bias": Array((40,), "shift")}
_JAX_MLP = {
    **_NORM,
    "kernels": (Array((48, 1, 64), "weight"), Array((64, 48), "weight")),
    "biases": (Array((1, 64), "shift"), Array((48,), "shift")),
    "quantizer_sets": Sets(2),
}
_GATED = {
    **_JAX_MLP,
    "beta": None,
    "norm_type": "rmsnorm",
    "kernels": (Array((48, 2, 64), "weight"), Array((64, 48), "weight")),
    "biases": (None, None),
    "activation_type": ("silu", "linear"),
}
_JAX_QKV = {"query": heads("bshd", 12), "key": heads("bshd", 12), "value": heads("bshd", 12)}
_JAX_THD = {
    "query": heads("thd", 12),
    "key": heads("thd", 12),
    "value": heads("thd", 12),
    "qkv_format": "thd",
    "attn_mask_type": "padding_causal",
    **LENGTHS,
    "max_seqlen_q": 12,
    "max_seqlen_kv": 12,
}
_PLAIN_ACTS = ("gelu", "quick_gelu", "relu", "squared_relu", "silu")
_JAX_ACTS = (*((name,) for name in _PLAIN_ACTS), *((name, "linear") for name in (*_PLAIN_ACTS, "sigmoid")))
JAX = {
    "dense.plain": Function("dense", {**_DENSE, "bias": Array((40,), "shift")}),
    "dense.oi": Function(
        "dense", {**_DENSE, "kernel": Array((40, 48), "weight"), "contracting_dims": ((-1,), (1,))}
    ),
    "dense.many": Function(
        "dense",
        {
            **_DENSE,
            "x": Array((7, 3, 11)),
            "kernel": Array((3, 11, 5, 4), "weight"),
            "contracting_dims": ((1, 2), (0, 1)),
        },
    ),
    "dense.residual": Function("dense", {**_DENSE, "residual": Array((2, 10, 40))}),
    "dense.return_bias": Function("dense", {**_DENSE, "bias": Array((40,), "shift"), "return_bias": True}),
    "layernorm_dense.plain": Function("layernorm_dense", _NORM_DENSE),
    "layernorm_dense.rms": Function(
        "layernorm_dense",
        {
            **_NORM_DENSE,
            "beta": None,
            "bias": None,
            "norm_type": "rmsnorm",
            "zero_centered_gamma": True,
            "return_layernorm_output": True,
            "return_residual": True,
        },
    ),
    "layernorm_dense.oi": Function(
        "layernorm_dense", {**_NORM_DENSE, "kernel": Array((40, 48), "weight"), "kernel_layout": "oi"}
    ),
    "layernorm_mlp.plain": Function("layernorm_mlp", _JAX_MLP),
    "layernorm_mlp.gated": Function("layernorm_mlp", {**_GATED, "join_residual": True}),
    "layernorm_mlp.returns": Function(
        "layernorm_mlp",
        {
            **_JAX_MLP,
            "return_bias": True,
            "return_layernorm_output": True,
            "activation_type": ("quick_gelu",),
        },
    ),
    "layernorm_mlp.clamped": Function(
        "layernorm_mlp",
        {
            **_GATED,
            "activation_type": ("clamped_silu", "clamped_linear"),
            "activation_params": {"limit": 1.0, "alpha": 1.5},
        },
    ),
    **{
        f"layernorm_mlp.{'_'.join(names)}": Function(
            "layernorm_mlp",
            {
                **_JAX_MLP,
                "kernels": (Array((48, len(names), 64), "weight"), Array((64, 48), "weight")),
                "biases": (Array((len(names), 64), "shift"), Array((48,), "shift")),
                "activation_type": names,
            },
        )
        for names in _JAX_ACTS
    },
    "layernorm.plain": Function("layernorm", _NORM),
    "rmsnorm.plain": Function("rmsnorm", {"x": _X, "gamma": _GAMMA, "zero_centered_gamma": True}),
    "l2norm.plain": Function("l2norm", {"x": _X}),
    "softmax.masked": Function(
        "softmax", {"logits": Array((2, 4, 9)), "mask": mask(2, 1, 9), "scale_factor": 0.5}
    ),
    "activation.gelu": Function("activation", {"x": Array((20, 1, 32)), "activation_type": ("gelu",)}),
    "activation.geglu": Function(
        "activation", {"x": Array((20, 2, 32)), "activation_type": ("gelu", "linear")}
    ),
    **{
        f"activation.{'_'.join(names)}": Function(
            "activation", {"x": Array((20, len(names), 32)), "activation_type": names}
        )
        for names in _JAX_ACTS
    },
    "attention.causal": Function("dot_product_attention", _JAX_QKV),
    "attention.alibi": Function(
        "dot_product_attention",
        {**_JAX_QKV, "alibi_slopes": Fixed((0.5, 0.25, 1.0, 0.125), "float32"), "attn_bias_type": "alibi"},
    ),
    "attention.off_by_one": Function("dot_product_attention", {**_JAX_QKV, "softmax_type": "off-by-one"}),
    "attention.lengths": Function(
        "dot_product_attention", {**_JAX_QKV, "attn_mask_type": "padding", **LENGTHS}
    ),
    "attention.gaps": Function(
        "dot_product_attention",
        {
            **_JAX_THD,
            "attn_mask_type": "padding",
            "cu_seqlens_q_padded": Fixed((0, 8, 24)),
            "cu_seqlens_kv_padded": Fixed((0, 10, 24)),
        },
    ),
    "running_sums.plain": Function("running_sums", {"lengths": Fixed((3, 0, 5))}),
    "attention.groups": Function(
        "dot_product_attention",
        {
            **_JAX_QKV,
            "key": heads("bshd", 15, GROUPS),
            "value": heads("bshd", 15, GROUPS),
            "attn_mask_type": "causal_bottom_right",
            "window_size": (6, 0),
            "scale_factor": 0.4,
        },
    ),
    "attention.bias": Function(
        "dot_product_attention", {**_JAX_QKV, "attn_mask_type": "no_mask", "bias": Array((1, HEADS, 12, 12))}
    ),
    "attention.masked": Function(
        "dot_product_attention", {**_JAX_QKV, "attn_mask_type": "arbitrary", "mask": mask(2, 1, 12, 12)}
    ),
    "attention.thd": Function("dot_product_attention", _JAX_THD),
    "attention.packed": Function(
        "dot_product_attention",
        {
            "query": Array((2, 12, 3, HEADS, D)),
            "softmax_type": "learnable",
            "softmax_offset": Array((4,), "shift", dtype="float32"),
        },
    ),
    "attention.dropout": Function(
        "dot_product_attention", {**_JAX_QKV, "dropout_rate": 0.3, "dropout_key": Key(5)}
    ),
    "rope.plain": Function("rope", {"x": heads("bshd", 12), "freqs": Angles(D, 12)}),
    "rope.starts": Function(
        "rope",
        {
            "x": heads("sbhd", 12),
            "freqs": Angles(D, 16, {"interleaved": True}),
            "interleaved": True,
            "qkv_format": "sbhd",
            "start_positions": Fixed((3, 0)),
        },
    ),
    "dropout_add.plain": Function(
        "dropout_add", {"x": _X, "residual": _X, "bias": Array((48,), "shift"), "rate": 0.3, "key": Key(7)}
    ),
    "drop_path.plain": Function("drop_path", {"x": _X, "residual": _X, "rate": 0.5, "key": Key(9)}),
    "drop_path.thd": Function(
        "drop_path",
        {
            "x": Array((24, 48)),
            "residual": Array((24, 48)),
            "rate": 0.5,
            "key": Key(9),
            "qkv_format": "thd",
            "cu_seqlens": Fixed((0, 9, 24)),
        },
    ),
    "cross_entropy.plain": Function(
        "fused_cross_entropy",
        {"logits": Array((20, 17)), "targets": ids(20, most=17), "label_smoothing": 0.1},
    ),
    "cross_entropy.none": Function(
        "fused_cross_entropy",
        {"logits": Array((20, 17)), "targets": ids(20, most=17), "reduction": "none", "ignore_index": 3},
    ),
}
# which of them run under every recipe, and which inputs they have where all sums are to be exact
JAX_FP8 = tuple(name for name in JAX if name.startswith(("dense", "layernorm_dense", "layernorm_mlp")))
_EXACT_X = {
    "x": Array((4, 5, 32), "signs"),
    "epsilon": 1e-30,
    "gamma": Array((32,), "gain"),
    "beta": Array((32,), "shift"),
}
JAX_EXACT = {
    "dense.plain": JAX["dense.plain"],
    "dense.many": JAX["dense.many"],
    "dense.residual": JAX["dense.residual"],
    "layernorm_dense.exact": Function(
        "layernorm_dense",
        {
            **_EXACT_X,
            "kernel": Array((32, 40), "weight"),
            "bias": Array((40,), "shift"),
            "quantizer_set": Sets(1),
        },
    ),
    "layernorm_mlp.exact": Function(
        "layernorm_mlp",
        {
            **_EXACT_X,
            "kernels": (Array((32, 1, 48), "weight"), Array((48, 32), "weight")),
            "biases": (Array((1, 48), "shift"), Array((32,), "shift")),
            "quantizer_sets": Sets(2),
            "activation_type": ("relu",),
        },
    ),
    "dropout_add.plain": JAX["dropout_add.plain"],
    "drop_path.plain": JAX["drop_path.plain"],
}


class Model(NamedTuple):
    """A Flax module: its name, its fields or its constructor's arguments, its inputs, and what else its call
    takes, by name."""

    module: str
    args: dict[str, Any]
    inputs: tuple[Any, ...]
    call: dict[str, Any] = {}  # noqa: RUF012


_B = Array((2, 8, 32))
_JAX_LAYER = {
    "hidden_size": 32,
    "mlp_hidden_size": 48,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_LINEN_LAYER = {**_JAX_LAYER, "enable_relative_embedding": False}
FLAX = {
    "DenseGeneral": Model("DenseGeneral", {"features": (2, 24)}, (_B,)),
    "DenseGeneral.lora": Model(
        "DenseGeneral",
        {"features": 24, "enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 4},
        (_B,),
    ),
    "LayerNorm": Model("LayerNorm", {"zero_centered_gamma": True}, (_B,)),
    "LayerNormDenseGeneral": Model(
        "LayerNormDenseGeneral", {"features": 40, "use_bias": True, "return_layernorm_output": True}, (_B,)
    ),
    "LayerNormMLP": Model(
        "LayerNormMLP",
        {"intermediate_dim": 48, "activations": ("silu", "linear"), "layernorm_type": "rmsnorm"},
        (_B,),
    ),
    "LayerNormMLP.dropout": Model(
        "LayerNormMLP", {"intermediate_dim": 48, "use_bias": True, "intermediate_dropout_rate": 0.2}, (_B,)
    ),
    "MultiHeadAttention": Model(
        "MultiHeadAttention",
        {"head_dim": 8, "num_attention_heads": 4, "num_gqa_groups": 2, "enable_rotary_pos_emb": True},
        (_B, _B),
    ),
    "TransformerLayer": Model("TransformerLayer", _LINEN_LAYER, (_B,)),
    "TransformerLayer.relative": Model(
        "TransformerLayer", {**_JAX_LAYER, "hidden_dropout": 0.1, "drop_path": 0.2, "use_bias": True}, (_B,)
    ),
    "TransformerLayer.decoder": Model(
        "TransformerLayer",
        {**_LINEN_LAYER, "layer_type": "DECODER", "fuse_qkv_params": False, "qk_norm_type": "RMSNorm"},
        (_B, _B),
    ),
}
_HEADS = Array((2, 8, 4, 8))
_ATTENTION = {"head_dim": 8, "num_attention_heads": 4}
_HIDES = {"mask": mask(2, 1, 8, 8)}
FLAX |= {
    "DenseGeneral.axes": Model("DenseGeneral", {"features": 24, "axis": (1, 2), "return_bias": True}, (_B,)),
    "DenseGeneral.residual": Model("DenseGeneral", {"features": 32, "use_bias": False}, (_B, _B)),
    "LayerNorm.rms": Model("LayerNorm", {"layernorm_type": "rmsnorm", "epsilon": 1e-3}, (_B,)),
    "LayerNormDenseGeneral.rms": Model(
        "LayerNormDenseGeneral",
        {
            "features": 24,
            "layernorm_type": "rmsnorm",
            "zero_centered_gamma": True,
            "depth_scaling": 2.0,
            "return_residual": True,
        },
        (_B,),
    ),
    "LayerNormDenseGeneral.no_norm": Model(
        "LayerNormDenseGeneral",
        {"features": 24, "enable_layernorm": False, "enable_low_rank_adaptation": True},
        (_B,),
    ),
    "LayerNormMLP.joined": Model(
        "LayerNormMLP", {"intermediate_dim": 48, "use_bias": True, "join_residual": True}, (_B,)
    ),
    "LayerNormMLP.returns": Model(
        "LayerNormMLP",
        {
            "intermediate_dim": 48,
            "use_bias": True,
            "return_residual": True,
            "return_bias": True,
            "return_layernorm_output": True,
            "enable_low_rank_adaptation": True,
            "zero_centered_gamma": True,
        },
        (_B,),
    ),
    "DotProductAttention": Model("DotProductAttention", _ATTENTION, (_HEADS, _HEADS, _HEADS)),
    "DotProductAttention.packed": Model(
        "DotProductAttention",
        {**_ATTENTION, "qkv_layout": "bs3hd", "softmax_type": "learnable", "window_size": (3, 0)},
        (Array((2, 8, 3, 4, 8)),),
    ),
    "DotProductAttention.padding": Model(
        "DotProductAttention",
        {**_ATTENTION, "attn_mask_type": "padding_causal", "attention_dropout": 0.2},
        (_HEADS, _HEADS, _HEADS),
        {"sequence_descriptor": Fixed((5, 8))},
    ),
    "DotProductAttention.masked": Model(
        "DotProductAttention",
        {**_ATTENTION, "attn_mask_type": "padding", "scale_factor": 0.3, "attn_bias_type": "post_scale_bias"},
        (_HEADS, _HEADS, _HEADS),
        {**_HIDES, "bias": Array((1, 4, 8, 8), grad=False)},
    ),
    "RelativePositionBiases": Model(
        "RelativePositionBiases",
        {"num_buckets": 8, "max_distance": 16, "num_attention_heads": 4},
        (),
        {"q_seqlen": 8, "k_seqlen": 11},
    ),
    "MultiHeadAttention.joined": Model(
        "MultiHeadAttention",
        {**_ATTENTION, "use_bias": True, "join_residual": True, "softmax_type": "off-by-one"},
        (_B, _B),
    ),
    "MultiHeadAttention.returns": Model(
        "MultiHeadAttention",
        {
            **_ATTENTION,
            "use_bias": True,
            "return_layernorm_output": True,
            "return_residual": True,
            "return_bias": True,
            "fuse_qkv_params": False,
            "qk_norm_type": "LayerNorm",
            "low_rank_adaptation_scope": "all",
            "low_rank_adaptation_dim": 4,
        },
        (_B, _B),
    ),
    "MultiHeadAttention.no_norm": Model(
        "MultiHeadAttention",
        {
            **_ATTENTION,
            "input_layernorm": False,
            "attn_mask_type": "padding",
            "qk_norm_type": "L2Normalization",
            "qk_norm_before_rope": True,
            "enable_rotary_pos_emb": True,
            "rotary_pos_emb_group_method": "alternate",
            "window_size": (3, 2),
        },
        (_B, _B),
        _HIDES,
    ),
    "TransformerLayer.post_norm": Model(
        "TransformerLayer",
        {
            **_LINEN_LAYER,
            "apply_residual_connection_post_layernorm": True,
            "output_layernorm": True,
            "mlp_activations": ("silu", "linear"),
            "num_gqa_groups": 2,
            "enable_rotary_pos_emb": True,
        },
        (_B,),
    ),
    "TransformerLayer.dropout_dims": Model(
        "TransformerLayer",
        {
            **_LINEN_LAYER,
            "hidden_dropout": 0.2,
            "hidden_dropout_dims": (1,),
            "intermediate_dropout": 0.2,
            "attention_dropout": 0.1,
            "layernorm_type": "rmsnorm",
            "zero_centered_gamma": True,
            "self_attn_mask_type": "no_mask",
        },
        (_B,),
    ),
}
NNX = {
    "DenseGeneral.returns": Model(
        "DenseGeneral", {"in_features": 32, "features": 24}, (_B,), {"return_bias": True}
    ),
    "LayerNorm.rms": Model(
        "LayerNorm", {"num_features": 32, "layernorm_type": "rmsnorm", "zero_centered_gamma": True}, (_B,)
    ),
    "LayerNormDenseGeneral.rms": Model(
        "LayerNormDenseGeneral",
        {"in_features": 32, "features": 24, "layernorm_type": "rmsnorm", "epsilon": 1e-3},
        (_B,),
        {"return_residual": True},
    ),
    "LayerNormMLP.gated": Model(
        "LayerNormMLP",
        {"num_features": 32, "intermediate_dim": 48, "activations": ("gelu", "linear"), "use_bias": True},
        (_B,),
        {"join_residual": True},
    ),
    "LayerNormMLP.returns": Model(
        "LayerNormMLP",
        {"num_features": 32, "intermediate_dim": 48, "use_bias": True},
        (_B,),
        {"return_residual": True, "return_bias": True},
    ),
    "DotProductAttention": Model(
        "DotProductAttention",
        {"num_attention_heads": 4, "softmax_type": "learnable", "window_size": (4, 0)},
        (_HEADS, _HEADS, _HEADS),
    ),
    "MultiHeadAttention.cross": Model(
        "MultiHeadAttention",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "cross": True,
            "qk_norm_type": "RMSNorm",
            "attn_mask_type": "arbitrary",
        },
        (_B, _B),
        _HIDES,
    ),
    "MultiHeadAttention.no_norm": Model(
        "MultiHeadAttention",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "head_dim": 12,
            "input_layernorm": False,
            "qk_norm_type": "L2Normalization",
            "qk_norm_before_rope": True,
            "rotary": True,
            "attention_dropout": 0.2,
        },
        (_B,),
        {"join_residual": True},
    ),
    "TransformerLayer.llama": Model(
        "TransformerLayer",
        {
            **_JAX_LAYER,
            "mlp_activations": ("silu", "linear"),
            "layernorm_type": "rmsnorm",
            "num_gqa_groups": 2,
            "rotary": True,
        },
        (_B,),
    ),
    "DenseGeneral": Model("DenseGeneral", {"in_features": 32, "features": 24}, (_B,)),
    "LayerNorm": Model("LayerNorm", {"num_features": 32}, (_B,)),
    "LayerNormDenseGeneral": Model(
        "LayerNormDenseGeneral", {"in_features": 32, "features": (2, 24), "use_bias": True}, (_B,)
    ),
    "LayerNormMLP": Model("LayerNormMLP", {"num_features": 32, "intermediate_dim": 48}, (_B,)),
    "MultiHeadAttention": Model(
        "MultiHeadAttention",
        {"hidden_size": 32, "num_attention_heads": 4, "num_gqa_groups": 2, "rotary": True, "use_bias": True},
        (_B,),
    ),
    "TransformerLayer": Model("TransformerLayer", {**_JAX_LAYER, "use_bias": True}, (_B,)),
    "TransformerLayer.dropout": Model(
        "TransformerLayer", {**_JAX_LAYER, "hidden_dropout": 0.1, "drop_path": 0.2}, (_B,)
    ),
}
