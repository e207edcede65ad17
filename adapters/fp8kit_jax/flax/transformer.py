"""``TransformerLayer`` as a Flax module with Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.arguments import NamedWell, optional
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.layers.residual import want_arrangement
from fp8kit_jax.checks import RULES
from fp8kit_jax.flax import lora
from fp8kit_jax.flax.attention import MultiHeadAttention, RelativePositionBiases, want_lengths
from fp8kit_jax.flax.common import (
    MLP_AXES,
    NORM_AXES,
    EitherCase,
    add_residual,
    check_fields,
    shared_fields,
    want_array,
)
from fp8kit_jax.flax.dense import LayerNorm, LayerNormMLP
from fp8kit_jax.modules import joined

_AXES = {"scale_axes": NORM_AXES["scale_axes"], "bias_axes": NORM_AXES["ln_bias_axes"]}  # of norms alone
_RULES = RULES | {"head_dim": optional(RULES["head_dim"])}


class TransformerLayerType(Enum):
    """ENCODER: self attention and MLP. DECODER: cross attention between them."""

    ENCODER = "encoder"
    DECODER = "decoder"


class TransformerLayer(NamedWell, EitherCase):
    """One layer, norms before the branches: x + dropout(attention(norm(x))), of a decoder + dropout(cross
    attention), + dropout(mlp(norm)).

    Children ``attention`` (a decoder's: ``self_attention``, ``encoder_decoder_attention``), ``mlp``,
    ``relpos_bias`` with ``enable_relative_embedding`` (32 buckets, distances up to 128) and, with
    ``output_layernorm``, a child of that name at the end, the input's norm left out.
    ``apply_residual_connection_post_layernorm``: residuals start after the norms. ``drop_path``: probability
    of dropping a whole sample from the first attention's and the MLP's branch. ``hidden_dropout_dims``,
    ``intermediate_dropout_dims``: dimensions along which one draw serves all. ``norm_position``: "after" puts
    the norms behind the branches, children ``attention_norm`` (a decoder's: ``self_attention_norm``,
    ``encoder_decoder_attention_norm``) and ``mlp_norm``, their factors at ``norm_gain`` (1) first, as
    ``fp8kit.nn.TransformerLayer`` has it. ``float32_attention_logits``: scores are float32 either way.
    ``head_dim``: features of a head, None: hidden_size / num_attention_heads, which is all that
    ``hidden_size`` says: inputs may have another width. Parameters carry Transformer
    Engine's logical axes, in Flax's boxes. The rest: as the children; fields of ``common.FIXED`` have one
    value.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Any = None
    mlp_kernel_init: Any = None
    mlp_activations: Sequence[str] = ("gelu",)
    mlp_activation_params: Any = None
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: Any = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    qk_norm_learned: bool = True
    scale_factor: float | None = None
    norm_position: str = "before"
    norm_gain: float | None = None
    smooth_swiglu: str | None = None
    head_dim: int | None = None
    softcap: float = 0.0

    @nn.compact
    def __call__(
        self,
        inputs: Any,
        encoded: Any = None,
        attention_mask: Any = None,
        encoder_decoder_mask: Any = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
        *,
        sequence_descriptor: Any = None,
        **fixed: Any,
    ) -> Any:
        """``inputs``: h (b, s, ...), (s, b, ...) with ``transpose_batch_sequence``. ``encoded``,
        ``encoder_decoder_mask``: a decoder's alone, likewise. Masks: True masks out, see
        ``DotProductAttention``. ``decode``: the self attention keeps a cache, see ``cache``;
        ``max_decode_length``: its length, None as it was made."""
        check_fields(self, fixed, rules=_RULES)
        op, decoder = "TransformerLayer", self.layer_type is TransformerLayerType.DECODER
        inputs = want_array(self, "inputs", inputs)
        for name, value in (("encoded", encoded), ("encoder_decoder_mask", encoder_decoder_mask)):
            if not decoder and value is not None:
                raise ArgumentError(op, name, "an array", "None, for an encoder")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            wanted = f"a multiple of {self.num_attention_heads} heads, or a head_dim"
            raise ShapeError(op, "hidden_size", self.hidden_size, wanted)
        if decoder and encoded is None:
            raise ShapeError(op, "encoded", None, "an array, for a decoder")
        encoded = want_array(self, "encoded", encoded) if decoder else None
        if not decode:  # which refuses them all
            want_lengths(op, self.self_attn_mask_type, "attention_mask", attention_mask, sequence_descriptor)
        mine = "self_attention" if decoder else "attention"
        bias = (
            self._biases(inputs, mine, decoder, max_decode_length) if self.enable_relative_embedding else None
        )
        want_arrangement(op, vars(self))
        post, after = self.apply_residual_connection_post_layernorm, self.norm_position == "after"

        def norm(**more: Any) -> LayerNorm:
            options = {"bias_init": nn.initializers.zeros, **_AXES, **more}
            return LayerNorm(self.layernorm_epsilon, **shared_fields(self, LayerNorm, options))

        def after_branch(
            kind: Any, name: str, path: float, options: dict[str, Any], x: Any, *args: Any, **more: Any
        ) -> Any:
            """Returns x after the branch ``name``, a module of class ``kind``."""

            def branch(**asked: bool) -> Any:
                if post and "join_residual" in asked:
                    asked = {"join_layernorm_output": True}
                elif "return_residual" in asked:
                    asked["return_layernorm_output"] = post
                layer = kind(**shared_fields(self, kind, options | asked | {"name": name}))
                y, normed, *rest = layer(x, *args, deterministic=deterministic, **more)
                return (y, normed if post else rest[0], rest[1]) if rest else y

            undropped = deterministic or not (self.hidden_dropout > 0 or path > 0)
            fused = undropped and not (post and kind is LayerNormMLP)
            gain = (1.0 if self.norm_gain is None else self.norm_gain) - self.zero_centered_gamma
            last = norm(scale_init=nn.initializers.constant(gain), name=f"{name}_norm") if after else None
            add = partial(add_residual, self, deterministic=deterministic, path=path)
            return joined(branch, x, last, fused, add)

        of_attention = {
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "kernel_init": self.mha_kernel_init,
            "input_layernorm": not after,
        }
        own = {
            "attn_mask_type": self.self_attn_mask_type,
            "attn_bias_type": self.self_attn_bias_type,
            "input_layernorm": not (after or self.output_layernorm),
        }
        x = after_branch(
            MultiHeadAttention,
            mine,
            self.drop_path,
            of_attention | own,
            inputs,
            inputs,
            attention_mask,
            bias,
            decode=decode,
            sequence_descriptor=sequence_descriptor,
        )
        if decoder:
            cross = of_attention | {"attn_mask_type": "no_mask", "window_size": None}
            name, args = "encoder_decoder_attention", (x, encoded, encoder_decoder_mask)
            x = after_branch(MultiHeadAttention, name, 0.0, cross, *args)
        options = {
            "intermediate_dim": self.mlp_hidden_size,
            "epsilon": self.layernorm_epsilon,
            "kernel_init": self.mlp_kernel_init,
            "activations": self.mlp_activations,
            "activation_params": self.mlp_activation_params,
            "intermediate_dropout_rng_name": self.dropout_rng_name,
            "intermediate_dropout_rate": self.intermediate_dropout,
            "intermediate_hidden_dropout_dims": self.intermediate_dropout_dims,
            "enable_layernorm": not after,
            "enable_low_rank_adaptation": lora.adapts(self, "mlp"),
            **MLP_AXES,
        }
        y = after_branch(LayerNormMLP, "mlp", self.drop_path, options, x)
        return norm(name="output_layernorm")(y) if self.output_layernorm else y

    def _biases(self, inputs: Any, name: str, decoder: bool, length: int | None) -> Any:
        """Relative position biases, of as many rows and columns as there are tokens, or as the cache of the
        attention ``name`` is long."""
        at = 0 if self.transpose_batch_sequence else 1
        if self.has_variable("cache", name):
            length = self.get_variable("cache", name)["cached_key"].shape[at]
        count = length or inputs.shape[at]
        found = self.relative_embedding or RelativePositionBiases(
            32, 128, self.num_attention_heads, dtype=self.dtype, name="relpos_bias"
        )
        return jnp.asarray(
            found(count, count, self.self_attn_mask_type == "no_mask" or not decoder), inputs.dtype
        )
