"""Calls of modules: their constructors, and their ``forward`` as it is and in FP8."""

from __future__ import annotations

from typing import Any

import fp8kit_torch as ft
import torch
from fp8kit_torch import fusible

from tests.adapters.torch.calls.call import (
    FFN,
    FREQS,
    HEADS,
    Call,
    D,
    H,
    X,
    call,
    forward,
    ints,
    linear,
    method,
    module,
    ramp,
)


def params(**more: Any) -> ft.InferenceParams:
    made = ft.InferenceParams(2, 8, HEADS, D, torch.float32, qkv_format="sbhd", device="cpu", **more)
    made.pre_step({0: 2, 1: 3})
    return made


def cached(inference_params: Any) -> Any:
    core = ft.DotProductAttention(HEADS, D, layer_number=1)
    with torch.no_grad():
        return core(*[ramp(3, 2, HEADS, D)] * 3, inference_params=inference_params)


NONE = dict.fromkeys(("sequence_parallel", "tp_group"), None)

WEIGHTS = {
    "init_method": None,
    "bias": True,
    "return_bias": False,
    "params_dtype": torch.float32,
    "device": "cpu",
    "fuse_wgrad_accumulation": False,
    "name": None,
}

NORM = {
    "eps": 1e-5,
    "normalization": "LayerNorm",
    "zero_centered_gamma": False,
    "return_layernorm_output": False,
}

HALF = {"sequence_parallel": False, "tp_size": 1, "tp_group": None, "get_rng_state_tracker": None}

GEOMETRY = {
    "attention_dropout": 0.0,
    "window_size": (1, 0),
    "bottom_right_diagonal": False,
    "layer_number": 1,
    "name": None,
    "softmax_type": "vanilla",
    "softcap": 2.0,
}

QK = {"qk_norm_type": "RMSNorm", "qk_norm_eps": 1e-6, "qk_norm_before_rope": False}

LAYER = {
    "num_gqa_groups": 1,
    "init_method": None,
    "output_layer_init_method": None,
    "params_dtype": torch.float32,
    "device": "cpu",
    "bias": True,
    "normalization": "LayerNorm",
    "zero_centered_gamma": False,
    "fuse_wgrad_accumulation": False,
    "kv_channels": 4,
    "fuse_qkv_params": False,
    "qkv_weight_interleaved": True,
    "rotary_pos_interleaved": False,
    "seq_length": 3,
    "micro_batch_size": 2,
}

CORE = {
    "core_attention_bias_type": "post_scale_bias",
    "core_attention_bias": lambda: ramp(1, HEADS, 3, 3),
    "alibi_slopes": None,
    "cu_seqlens_q": lambda: ints(0, 2, 5),
    "cu_seqlens_kv": lambda: ints(0, 2, 5),
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "fast_zero_fill": True,
    "pad_between_seqs": None,
}

ATTEND = {
    "attention_mask": None,
    "window_size": (1, 1),
    "bottom_right_diagonal": None,
    "checkpoint_core_attention": False,
    "inference_params": None,
    "softcap": 2.0,
    "thd_attention_policies": None,
    "thd_attention_policy_dispatch": "auto",
}

INFERENCE = {
    "max_batch_size": 2,
    "max_sequence_length": 8,
    "num_heads_kv": HEADS,
    "head_dim_k": D,
    "head_dim_v": D,
    "dtype": torch.float32,
    "is_paged": True,
    "total_num_pages": 8,
    "page_size": 2,
    "max_ctx_len": 4,
    "qkv_format": "sbhd",
    "custom_cache_manager": None,
    "device": "cpu",
}


def infer(**given: Any) -> Any:
    made = ft.InferenceParams(**given)
    made.pre_step({0: 2, 1: 3})
    return cached(made)


CALLS: dict[str, Call] = {
    "Linear": module(
        ft.Linear,
        X,
        in_features=H,
        out_features=6,
        parameters_split=("query", "key"),
        rng_tracker_name=None,
        parallel_mode=None,
        **HALF,
        **WEIGHTS,
    ),
    "LayerNormLinear": module(
        ft.LayerNormLinear,
        X,
        in_features=H,
        out_features=6,
        parameters_split={"query": 2, "key": 4},
        return_layernorm_output_gathered=False,
        **WEIGHTS,
        **NORM,
    ),
    "LayerNormMLP": module(
        ft.LayerNormMLP,
        X,
        hidden_size=H,
        ffn_hidden_size=FFN,
        activation="gelu",
        activation_params=None,
        output_layer_init_method=None,
        seq_length=3,
        micro_batch_size=2,
        set_parallel_mode=False,
        checkpoint=False,
        **WEIGHTS,
        **NORM,
    ),
    "LayerNorm": module(
        ft.LayerNorm,
        X,
        normalized_shape=H,
        eps=1e-5,
        params_dtype=torch.float32,
        zero_centered_gamma=False,
        device="cpu",
        hidden_size=None,
        sequence_parallel=None,
        dtype=None,
    ),
    "RMSNorm": module(
        ft.RMSNorm,
        X,
        hidden_size=H,
        eps=1e-5,
        params_dtype=torch.float32,
        zero_centered_gamma=False,
        device="cpu",
    ),
    "L2Normalization": module(ft.L2Normalization, X, eps=1e-6, seq_length=3, micro_batch_size=2),
    "GroupedLinear": module(
        ft.GroupedLinear,
        lambda: ramp(5, H),
        lambda: [2, 3],
        num_gemms=2,
        in_features=H,
        out_features=6,
        **WEIGHTS,
    ),
    "DotProductAttention": module(
        ft.DotProductAttention,
        *[lambda: ramp(3, 2, HEADS, D)] * 3,
        num_attention_heads=HEADS,
        kv_channels=(D, D),
        num_gqa_groups=HEADS,
        qkv_format="sbhd",
        attn_mask_type="causal",
        attention_type="self",
        softmax_scale=0.5,
        device="cpu",
        return_max_logit=False,
        **GEOMETRY,
        **HALF,
    ),
    "MultiheadAttention": module(
        ft.MultiheadAttention,
        X,
        hidden_size=H,
        num_attention_heads=HEADS,
        attn_mask_type="causal",
        qkv_format="sbhd",
        layernorm_epsilon=1e-5,
        input_layernorm=True,
        attention_type="self",
        return_bias=False,
        return_layernorm_output=False,
        **LAYER,
        **GEOMETRY,
        **QK,
    ),
    "TransformerLayer": module(
        ft.TransformerLayer,
        X,
        hidden_size=H,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        self_attn_mask_type="causal",
        enc_dec_attn_mask_type="no_mask",
        enc_dec_bottom_right_diagonal=None,
        enc_dec_window_size=None,
        activation="gelu",
        activation_params=None,
        apply_residual_connection_post_layernorm=False,
        output_layernorm=False,
        parallel_attention_mlp=False,
        layer_type="encoder",
        drop_path_rate=0.0,
        attn_input_format="sbhd",
        **LAYER,
        **GEOMETRY,
        **QK,
    ),
    "RotaryPositionEmbedding": module(
        ft.RotaryPositionEmbedding,
        4,
        dim=D,
        rotary_percent=1.0,
        seq_len_interpolation_factor=2,
        pretrained_max_position_embeddings=2,
        rotary_base=10000.0,
        interleaved=False,
        device="cpu",
    ),
    "Fp8Padding": module(ft.Fp8Padding, lambda: ramp(5, H), lambda: [2, 3], num_gemms=2, align_size=4),
    "Fp8Unpadding": module(ft.Fp8Unpadding, lambda: ramp(8, H), lambda: [2, 3], num_gemms=2, align_size=4),
    "InferenceParams": call(infer, **INFERENCE),
    "ops.Linear": module(
        fusible.Linear,
        X,
        in_features=H,
        out_features=6,
        bias=True,
        device="cpu",
        dtype=torch.float32,
        accumulate_into_main_grad=False,
    ),
    "ops.Bias": module(fusible.Bias, X, size=H, device="cpu", dtype=torch.float32, tensor_parallel=False),
    "Linear.forward": forward(linear, inp=X, is_first_microbatch=None, fp8_output=False, fp8_grad=False),
    "Linear.forward, delayed": forward(
        linear, ft.DelayedScaling(), inp=X, is_first_microbatch=True, fp8_output=False, fp8_grad=False
    ),
    "Linear.forward, current": forward(
        linear, ft.Float8CurrentScaling(), inp=X, is_first_microbatch=None, fp8_output=True, fp8_grad=True
    ),
    "Linear.reset_parameters": method("reset_parameters", linear, defer_init=False),
    "Linear.set_extra_state": method(
        "set_extra_state", linear, state=lambda: torch.zeros(0, dtype=torch.uint8)
    ),
    "LayerNormLinear.forward": forward(
        lambda: ft.LayerNormLinear(H, 6, device="cpu"),
        ft.DelayedScaling(),
        inp=X,
        is_first_microbatch=None,
        fp8_output=False,
        fp8_grad=False,
    ),
    "LayerNormMLP.forward": forward(
        lambda: ft.LayerNormMLP(H, FFN, device="cpu"), ft.DelayedScaling(), inp=X, is_first_microbatch=None
    ),
    "LayerNorm.forward": forward(lambda: ft.LayerNorm(H, device="cpu"), inp=X),
    "L2Normalization.forward": forward(ft.L2Normalization, inp=X),
    "GroupedLinear.forward": forward(
        lambda: ft.GroupedLinear(2, H, 6, device="cpu"),
        ft.DelayedScaling(),
        inp=lambda: ramp(5, H),
        m_splits=lambda: [2, 3],
        is_first_microbatch=None,
    ),
    "DotProductAttention.forward": forward(
        lambda: ft.DotProductAttention(HEADS, D),
        query_layer=lambda: ramp(3, 2, HEADS, D),
        key_layer=lambda: ramp(3, 2, HEADS, D),
        value_layer=lambda: ramp(3, 2, HEADS, D),
        qkv_format="sbhd",
        attn_mask_type="padding",
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=-3,
        **ATTEND,
        **CORE,
    ),
    "DotProductAttention.forward, thd": forward(
        lambda: ft.DotProductAttention(HEADS, D, qkv_format="thd"),
        query_layer=lambda: ramp(5, HEADS, D),
        kv_layer=lambda: ramp(5, HEADS * 2 * D),
        attn_mask_type="padding_causal",
        cu_seqlens_q=lambda: ints(0, 2, 4),
        cu_seqlens_kv=lambda: ints(0, 2, 4),
        cu_seqlens_q_padded=lambda: ints(0, 3, 5),
        cu_seqlens_kv_padded=lambda: ints(0, 3, 5),
        max_seqlen_q=3,
        max_seqlen_kv=3,
    ),
    "DotProductAttention.forward, arbitrary": forward(
        lambda: ft.DotProductAttention(HEADS, D),
        qkv_layer=lambda: ramp(3, 2, 3 * HEADS * D),
        qkv_interleave_dim=-2,
        attn_mask_type="arbitrary",
        attention_mask=lambda: torch.zeros(1, 1, 3, 3, dtype=torch.bool),
        core_attention_bias_type="alibi",
        alibi_slopes=lambda: torch.ones(HEADS),
    ),
    "MultiheadAttention.forward": forward(
        lambda: ft.MultiheadAttention(H, HEADS, device="cpu", attention_dropout=0.0),
        hidden_states=X,
        encoder_output=None,
        attn_mask_type="padding",
        is_first_microbatch=None,
        rotary_pos_emb=FREQS,
        **ATTEND,
        **CORE,
    ),
    "TransformerLayer.forward": forward(
        lambda: ft.TransformerLayer(H, FFN, HEADS, device="cpu", layer_type="decoder").eval(),
        hidden_states=X,
        self_attn_mask_type="padding",
        encoder_output=lambda: ramp(3, 2, H),
        enc_dec_attn_mask=lambda: torch.zeros(2, 1, 1, 3, dtype=torch.bool),
        enc_dec_attn_mask_type="padding",
        enc_dec_window_size=None,
        enc_dec_bottom_right_diagonal=None,
        is_first_microbatch=None,
        rotary_pos_emb=FREQS,
        **ATTEND,
        **CORE,
    ),
    "DotProductAttention.forward, cache": call(cached, inference_params=params),
    "RotaryPositionEmbedding.forward": forward(
        lambda: ft.RotaryPositionEmbedding(D, device="cpu"), max_seq_len=4, offset=1
    ),
    "Fp8Padding.forward": forward(
        lambda: ft.Fp8Padding(2, 4), inp=lambda: ramp(5, H), m_splits=lambda: [2, 3]
    ),
    "Fp8Unpadding.forward": forward(
        lambda: ft.Fp8Unpadding(2, 4), inp=lambda: ramp(8, H), m_splits=lambda: [2, 3]
    ),
    "InferenceParams.pre_step": method("pre_step", params, step_dict=lambda: {0: 1, 1: 1}),
    "ops.Bias.forward": forward(lambda: fusible.Bias(H, device="cpu"), inp=X),
}
