"""Calls of ``fp8kit.nn``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fp8kit import nn
from tests.support.calls.call import Call, X, always, method, module, plain, positional, view

IDS = np.array([0, 2, 1])

LINEAR = {
    "in_features": always(4),
    "out_features": always(6),
    "init_method": always(None),
    "bias": always(True),
    "return_bias": always(False),
    "params_dtype": always("float32"),
    "parameters_split": always(("a", "b")),
    "device": always("cpu"),
    "name": always("n"),
}

NORM = {
    "eps": always(1e-5),
    "params_dtype": always("float32"),
    "zero_centered_gamma": always(False),
    "device": always("cpu"),
}

INP = lambda: (X,)  # noqa: E731

TOKENS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 2, 4)  # (s, b, H)

HINTS = {"seq_length": always(3), "micro_batch_size": always(None)}

ATTENTION = HINTS | {
    "hidden_size": always(4),
    "num_attention_heads": always(2),
    "num_gqa_groups": always(1),
    "kv_channels": always(2),
    "attention_dropout": always(0.0),
    "layernorm_epsilon": always(1e-5),
    "init_method": always(None),
    "output_layer_init_method": always(None),
    "layer_number": always(1),
    "window_size": always((1, 0)),
    "params_dtype": always("float32"),
    "fuse_qkv_params": always(True),
    "zero_centered_gamma": always(False),
    "qkv_weight_interleaved": always(True),
    "bias": always(True),
    "normalization": always("RMSNorm"),
    "device": always("cpu"),
    "name": always("n"),
    "rotary_pos_interleaved": always(False),
    "softmax_type": always("learnable"),
    "softcap": always(2.0),
    "qk_norm_type": always("L2Normalization"),
    "qk_norm_eps": always(1e-6),
    "qk_norm_before_rope": always(True),
    "qk_norm_learned": always(True),
    "softmax_scale": always(0.125),
    "bottom_right_diagonal": always(None),
}

SEEN = {
    "hidden_states": lambda: view(TOKENS),
    "attention_mask": always(None),
    "window_size": always((1, 0)),
    "bottom_right_diagonal": always(None),
    "is_first_microbatch": always(None),
    "checkpoint_core_attention": always(False),
    "inference_params": always(None),
    "rotary_pos_emb": lambda: nn.RotaryPositionEmbedding(2, device="cpu")(3),
    "core_attention_bias_type": always("no_bias"),
    "core_attention_bias": always(None),
    "alibi_slopes": always(None),
    "cu_seqlens_q": always(None),
    "cu_seqlens_kv": always(None),
    "max_seqlen_q": always(None),
    "fast_zero_fill": always(True),
    "pad_between_seqs": always(None),
    "softcap": always(2.0),
    "thd_attention_policies": always(None),
    "thd_attention_policy_dispatch": always("auto"),
}

CACHED = {
    "max_batch_size": always(2),
    "max_sequence_length": always(8),
    "num_heads_kv": always(1),
    "head_dim_k": always(4),
    "dtype": always("float32"),
    "head_dim_v": always(3),
    "is_paged": always(True),
    "total_num_pages": always(5),
    "page_size": always(4),
    "max_ctx_len": always(6),
    "qkv_format": always("thd"),
    "custom_cache_manager": always(None),
    "device": always("cpu"),
}


@functools.cache
def layer(kind: str) -> nn.Module:
    """Returns a layer whose calls change nothing in it."""
    if kind == "decoder":
        return nn.TransformerLayer(4, 6, 2, layer_type="decoder", device="cpu")
    return nn.MultiheadAttention(4, 2, device="cpu")


def cached(**given: Any) -> nn.InferenceParams:
    made = nn.InferenceParams(**(given or {name: value() for name, value in CACHED.items()}))
    made.pre_step({"a": 3, "b": 1})
    made.allocate_memory(1)
    return made


CALLS: dict[str, Call] = {
    "nn.Linear": module(nn.Linear, INP, **LINEAR),
    "nn.Linear.forward": positional(
        lambda inp, first: nn.Linear(4, 2, device="cpu")(inp, first), inp=view, first=always(None)
    ),
    "nn.LayerNorm": module(
        nn.LayerNorm, INP, normalized_shape=always(4), gain=always(0.5), learned=always(True), **NORM
    ),
    "nn.RMSNorm": module(
        nn.RMSNorm, INP, hidden_size=always(4), gain=always(0.5), learned=always(True), **NORM
    ),
    "nn.LayerNorm.forward": positional(lambda inp: nn.LayerNorm(4, device="cpu")(inp), inp=view),
    "nn.LayerNormLinear": module(
        nn.LayerNormLinear,
        INP,
        **LINEAR,
        **{k: v for k, v in NORM.items() if k not in LINEAR},
        normalization=always("LayerNorm"),
        return_layernorm_output=always(False),
    ),
    "nn.LayerNormMLP": module(
        nn.LayerNormMLP,
        INP,
        hidden_size=always(4),
        ffn_hidden_size=always(6),
        return_bias=always(False),
        init_method=always(None),
        bias=always(True),
        normalization=always("LayerNorm"),
        activation=always("clamped_swiglu"),
        activation_params=lambda: {"limit": 2.0},
        output_layer_init_method=always(None),
        return_layernorm_output=always(False),
        name=always("n"),
        checkpoint=always(False),
        smooth_swiglu=always(None),
        input_layernorm=always(True),
        **NORM,
        **HINTS,
    ),
    "nn.L2Normalization": module(nn.L2Normalization, INP, eps=always(1e-6), **HINTS),
    "nn.L2Normalization.forward": positional(lambda inp: nn.L2Normalization()(inp), inp=view),
    "nn.DotProductAttention": module(
        nn.DotProductAttention,
        lambda: (TOKENS[..., None], TOKENS[:, :, :2, None], TOKENS[:, :, 2:, None]),
        num_attention_heads=always(4),
        kv_channels=always((1, 1)),
        num_gqa_groups=always(2),
        attention_dropout=always(0.1),
        qkv_format=always("sbhd"),
        attn_mask_type=always("causal"),
        window_size=always((1, 0)),
        bottom_right_diagonal=always(False),
        layer_number=always(2),
        attention_type=always("cross"),
        softmax_scale=always(0.5),
        softmax_type=always("learnable"),
        softcap=always(2.0),
        name=always("n"),
        device=always("cpu"),
    ),
    "nn.DotProductAttention.forward": plain(
        lambda **given: nn.DotProductAttention(4, 1, 2, device="cpu")(**given),
        query_layer=lambda: view(TOKENS[..., None]),
        key_layer=lambda: view(TOKENS[:, :, :2, None]),
        value_layer=lambda: view(TOKENS[:, :, 2:, None]),
        attention_mask=always(None),
        qkv_format=always("sbhd"),
        cu_seqlens_q=lambda: np.array([0, 2, 3], np.int32),
        cu_seqlens_kv=lambda: np.array([0, 2, 3], np.int32),
        attn_mask_type=always("padding_causal"),
        window_size=always((1, 0)),
        bottom_right_diagonal=always(None),
        checkpoint_core_attention=always(True),
        core_attention_bias_type=always("no_bias"),
        core_attention_bias=always(None),
        alibi_slopes=always(None),
        fast_zero_fill=always(True),
        inference_params=always(None),
        pad_between_seqs=always(False),
        softcap=always(2.0),
        thd_attention_policies=always(None),
        thd_attention_policy_dispatch=always("auto"),
        qkv_layer=always(None),
        kv_layer=always(None),
        qkv_interleave_dim=always(-3),
    ),
    "nn.DotProductAttention.forward.mask": plain(
        lambda attention_mask: nn.DotProductAttention(4, 1, attn_mask_type="padding", device="cpu")(
            *[TOKENS[..., None]] * 3, attention_mask
        ),
        attention_mask=lambda: np.zeros((2, 1, 1, 3), bool),
    ),
    "nn.MultiheadAttention": module(
        nn.MultiheadAttention,
        lambda: (TOKENS,),
        attn_mask_type=always("causal"),
        input_layernorm=always(True),
        attention_type=always("self"),
        return_bias=always(True),
        return_layernorm_output=always(True),
        qkv_format=always("sbhd"),
        **ATTENTION,
    ),
    "nn.MultiheadAttention.forward": plain(
        lambda **given: layer("attention")(**given),
        attn_mask_type=always("causal"),
        encoder_output=always(None),
        **SEEN,
    ),
    "nn.TransformerLayer": module(
        nn.TransformerLayer,
        lambda: (TOKENS,),
        ffn_hidden_size=always(6),
        hidden_dropout=always(0.1),
        self_attn_mask_type=always("causal"),
        enc_dec_attn_mask_type=always("no_mask"),
        enc_dec_window_size=always(None),
        enc_dec_bottom_right_diagonal=always(None),
        output_layernorm=always(True),
        apply_residual_connection_post_layernorm=always(False),
        parallel_attention_mlp=always(False),
        layer_type=always("encoder"),
        drop_path_rate=always(0.1),
        activation=always("gelu"),
        activation_params=always(None),
        attn_input_format=always("sbhd"),
        norm_position=always("before"),
        norm_gain=always(None),
        smooth_swiglu=always(None),
        **ATTENTION,
    ),
    "nn.TransformerLayer.forward": plain(
        lambda **given: layer("decoder")(**given),
        self_attn_mask_type=always("causal"),
        encoder_output=lambda: view(TOKENS[:1]),
        enc_dec_attn_mask=always(None),
        enc_dec_attn_mask_type=always("no_mask"),
        enc_dec_window_size=always(None),
        enc_dec_bottom_right_diagonal=always(None),
        **SEEN,
    ),
    "nn.InferenceParams": plain(cached, **CACHED),
    "nn.InferenceParams.pre_step": method("pre_step", cached, step_dict=lambda: {"a": 1, "c": 2}),
    "nn.InferenceParams.rope_starts": method("rope_starts", cached, batch=always(2)),
    "nn.InferenceParams.allocate_memory": method("allocate_memory", cached, layer_number=always(2)),
    "nn.InferenceParams.convert_paged_to_nonpaged": method(
        "convert_paged_to_nonpaged", cached, layer_number=always(1)
    ),
    "nn.Embedding": module(
        nn.Embedding,
        lambda: (IDS,),
        num_embeddings=always(5),
        embedding_dim=always(4),
        init_method=always(None),
        params_dtype=always("float32"),
        device=always("cpu"),
    ),
    "nn.Embedding.forward": positional(
        lambda ids: nn.Embedding(5, 4, device="cpu")(ids), ids=lambda: IDS.copy()
    ),
    "nn.Dropout": module(nn.Dropout, INP, p=always(0.5)),
    "nn.Dropout.forward": positional(lambda inp: nn.Dropout(0.5)(inp), inp=view),
    "nn.cross_entropy": plain(
        nn.cross_entropy,
        logits=view,
        targets=lambda: IDS.copy(),
        reduction=always("mean"),
        label_smoothing=always(0.1),
        ignore_index=always(-100),
    ),
    "nn.RotaryPositionEmbedding": module(
        nn.RotaryPositionEmbedding,
        lambda: (3,),
        dim=always(4),
        rotary_percent=always(0.5),
        seq_len_interpolation_factor=always(2),
        pretrained_max_position_embeddings=always(2),
        rotary_base=always(100.0),
        interleaved=always(False),
        device=always("cpu"),
    ),
    "nn.RotaryPositionEmbedding.forward": plain(
        lambda **given: nn.RotaryPositionEmbedding(4, device="cpu")(**given),
        max_seq_len=always(3),
        offset=always(1),
    ),
    "nn.apply_rotary_pos_emb": plain(
        nn.apply_rotary_pos_emb,
        t=lambda: view(np.ones((3, 2, 1, 4), np.float32)),
        freqs=lambda: nn.RotaryPositionEmbedding(4, device="cpu")(3),
        tensor_format=always("sbhd"),
        start_positions=lambda: np.zeros(2, np.int32),
        interleaved=always(False),
        cu_seqlens=always(None),
        cu_seqlens_padded=always(None),
    ),
    "nn.ModuleList": plain(nn.ModuleList, modules=lambda: [nn.Dropout(0.1)]),
    "nn.Sequential": positional(lambda first: nn.Sequential(first)(X), first=lambda: nn.Dropout(0.1)),
    "nn.Parameter": plain(nn.Parameter, view=view),
    "nn.Module.load_state_dict": method(
        "load_state_dict",
        lambda: nn.LayerNorm(4, device="cpu"),
        strict=always(True),
        state=lambda: {"weight": X[0].copy(), "bias": X[1].copy()},
    ),
    "nn.Module.apply": method(
        "apply", lambda: nn.LayerNorm(4, device="cpu"), function=always(lambda m: None)
    ),
    "nn.Module.train": method("train", lambda: nn.LayerNorm(4, device="cpu"), mode=always(True)),
    "nn.get_rng_state": plain(nn.get_rng_state),
    "nn.set_rng_state": plain(nn.set_rng_state, state=nn.get_rng_state),
    "nn.RandomState": plain(lambda state: nn.RandomState().load_state_dict(state), state=nn.get_rng_state),
    "nn.normal_init": plain(
        lambda **given: nn.normal_init(**given)(np.zeros(3, np.float32)), mean=always(0.0), std=always(0.1)
    ),
    "nn.name_layers": plain(nn.name_layers, model=lambda: nn.Linear(3, 4)),
}
