"""``TransformerLayer`` as a Flax module with Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.errors import ShapeError, expected
from fp8kit_jax.flax.attention import MultiHeadAttention, RelativePositionBiases
from fp8kit_jax.flax.common import MLP_AXES, check_fixed
from fp8kit_jax.flax.dense import LayerNorm, LayerNormMLP, joined


class TransformerLayerType(Enum):
    """ENCODER: self attention and MLP. DECODER: cross attention between them."""

    ENCODER = "encoder"
    DECODER = "decoder"


class TransformerLayer(nn.Module):
    """One layer, norms before the branches: x + dropout(attention(norm(x))), of a decoder + dropout(cross attention), + dropout(mlp(norm)).

    Children ``attention`` (a decoder's: ``self_attention``, ``encoder_decoder_attention``), ``mlp``, ``relpos_bias`` with
    ``enable_relative_embedding`` (32 buckets, distances up to 128) and, with ``output_layernorm``, ``LayerNorm_0`` at the end, the input's
    norm left out. ``apply_residual_connection_post_layernorm``: residuals start after the norms. ``drop_path``: probability of dropping a
    whole sample from the first attention's and the MLP's branch. The rest: as the children; fields of ``common.FIXED`` have one value.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Any = None
    mlp_kernel_init: Any = None
    mlp_activations: Sequence[str] = ("gelu",)
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: Any = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    drop_path: float = 0.0
    mlp_activation_params: Any = None
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    logical_partitioning: bool = False
    float32_attention_logits: bool = False
    hidden_dropout_dims: Sequence[int] = ()
    intermediate_dropout_dims: Sequence[int] = ()
    low_rank_adaptation_scope: str = "none"
    enable_sequence_parallel: bool = False
    score_mod: Any = None
    score_mod_bprop: Any = None

    @nn.compact
    def __call__(self, inputs: Any, encoded: Any = None, attention_mask: Any = None, encoder_decoder_mask: Any = None,
                 deterministic: bool = False, sequence_descriptor: Any = None) -> Any:
        """``inputs``: h (b, s, H), (s, b, H) with ``transpose_batch_sequence``; ``encoded``: a decoder's, likewise. Masks: True masks
        out."""
        check_fixed(self)
        op, decoder = "TransformerLayer", self.layer_type is TransformerLayerType.DECODER
        if inputs.shape[-1] != self.hidden_size or self.hidden_size % self.num_attention_heads:
            wanted = f"a last dimension of {self.hidden_size}, a multiple of {self.num_attention_heads} heads"
            raise ShapeError(expected(op, "inputs", f"shape {inputs.shape}", wanted))
        if decoder and encoded is None:
            raise ShapeError(expected(op, "encoded", None, "an array, for a decoder"))
        s = inputs.shape[0 if self.transpose_batch_sequence else 1]
        bias = None
        if self.enable_relative_embedding:
            heads = self.num_attention_heads
            found = self.relative_embedding or RelativePositionBiases(32, 128, heads, dtype=self.dtype, name="relpos_bias")
            bias = jnp.asarray(found(s, s, self.self_attn_mask_type == "no_mask" or not decoder), inputs.dtype)
        post = self.apply_residual_connection_post_layernorm
        norm = {"layernorm_type": self.layernorm_type, "zero_centered_gamma": self.zero_centered_gamma}
        shared = {"use_bias": self.use_bias, "bias_init": self.bias_init, "dtype": self.dtype, "return_layernorm_output": post}

        def attend(name: str, x: Any, kv: Any, kind: str, mask: Any, bias: Any, first: bool) -> Any:
            layer = MultiHeadAttention(
                self.hidden_size // self.num_attention_heads, self.num_attention_heads, self.num_gqa_groups, self.attention_dropout,
                self.dropout_rng_name, input_layernorm=not (first and self.output_layernorm), layernorm_epsilon=self.layernorm_epsilon,
                kernel_init=self.mha_kernel_init, attn_mask_type=kind, attn_bias_type=self.self_attn_bias_type if first else None,
                enable_rotary_pos_emb=self.enable_rotary_pos_emb, rotary_pos_emb_windows=self.rotary_pos_emb_windows,
                rotary_pos_emb_group_method=self.rotary_pos_emb_group_method, fuse_qkv_params=self.fuse_qkv_params,
                transpose_batch_sequence=self.transpose_batch_sequence, scale_attn_logits=self.scale_attn_logits,
                scaled_query_init=self.scaled_query_init, window_size=self.window_size if first else None, softmax_type=self.softmax_type,
                qk_norm_type=self.qk_norm_type, qk_norm_eps=self.qk_norm_eps, qk_norm_before_rope=self.qk_norm_before_rope,
                logical_partitioning=self.logical_partitioning, float32_logits=self.float32_attention_logits, name=name, **norm, **shared,
            )  # fmt: skip
            lengths = sequence_descriptor if first else None
            y, normed = layer(x, kv, mask, bias, deterministic=deterministic, sequence_descriptor=lengths)
            return self._join(y, normed if post else x, deterministic, self.drop_path if first else 0.0)

        mine = "self_attention" if decoder else "attention"
        x = attend(mine, inputs, inputs, self.self_attn_mask_type, attention_mask, bias, True)
        if decoder:
            x = attend("encoder_decoder_attention", x, encoded, "no_mask", encoder_decoder_mask, None, False)
        mlp = LayerNormMLP(
            self.mlp_hidden_size, epsilon=self.layernorm_epsilon, kernel_init=self.mlp_kernel_init, activations=self.mlp_activations,
            intermediate_dropout_rng_name=self.dropout_rng_name, intermediate_dropout_rate=self.intermediate_dropout, name="mlp",
            activation_params=self.mlp_activation_params, **(MLP_AXES if self.logical_partitioning else {}), **norm, **shared,
        )  # fmt: skip
        y, normed = mlp(x, deterministic)
        y = self._join(y, normed if post else x, deterministic, self.drop_path)
        return LayerNorm(self.layernorm_epsilon, dtype=self.dtype, **norm)(y) if self.output_layernorm else y

    def _join(self, branch: Any, residual: Any, deterministic: bool, path: float) -> Any:
        form = "sbhd" if self.transpose_batch_sequence else "bshd"
        return joined(self, branch, residual, self.hidden_dropout, self.dropout_rng_name, deterministic, path, form)
