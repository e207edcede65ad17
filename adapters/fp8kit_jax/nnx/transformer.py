"""``TransformerLayer`` as an NNX module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fp8kit.arguments import NamedWell, check
from fp8kit.errors import on_behalf_of
from fp8kit.layers.residual import want_arrangement
from fp8kit_jax import attention as functions
from fp8kit_jax.activations import learned_of
from fp8kit_jax.checks import RULES
from fp8kit_jax.modules import joined, residual_sum
from fp8kit_jax.nnx.attention import Dropout, MultiHeadAttention
from fp8kit_jax.nnx.dense import LayerNorm, LayerNormMLP, norm_options, want_rngs

# arguments of the attention that a layer does not set itself
_ATTENTION = (
    "num_gqa_groups",
    "head_dim",
    "input_layernorm",
    "rotary",
    "qk_norm_type",
    "qk_norm_eps",
    "qk_norm_before_rope",
    "qk_norm_learned",
)


class TransformerLayer(NamedWell, nnx.Module):
    """x + dropout(attention(norm(x))), then + dropout(mlp(norm(x))); children ``attention`` and ``mlp``,
    which hold the norms.

    * ``hidden_size`` H, ``mlp_hidden_size``, ``num_attention_heads``, ``mlp_activations``,
      ``mlp_activation_params``: as the children.
    * ``hidden_dropout``, ``attention_dropout``: probabilities; ``drop_path``: of dropping a whole sample from
      a branch.
    * ``options``: of ``MultiHeadAttention``: ``num_gqa_groups``, ``rotary``, ``qk_norm_type``,
      ``attn_mask_type``, ``window_size``, ``scale_factor``...
    * ``norm_position``: "after" puts the norms behind the branches, children ``attention_norm`` and
      ``mlp_norm``, their factors at ``norm_gain`` (1) first, as ``fp8kit.nn.TransformerLayer`` has it.
      ``smooth_swiglu``: as ``LayerNormMLP``.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_hidden_size: int,
        num_attention_heads: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        mlp_activations: Sequence[str] = ("gelu",),
        mlp_activation_params: Mapping[str, float] | None = None,
        layernorm_type: str = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        norm_position: str = "before",
        norm_gain: float | None = None,
        smooth_swiglu: str | None = None,
        dtype: Any = jnp.float32,
        **options: Any,
    ) -> None:
        functions.known("TransformerLayer", options, _ATTENTION, locals())
        check("TransformerLayer", RULES, locals() | options)
        with on_behalf_of("TransformerLayer", activation_params="mlp_activation_params"):
            learned_of("LayerNormMLP", mlp_activations, mlp_activation_params)
        want_rngs("TransformerLayer", rngs)
        shared: dict[str, Any] = norm_options(locals()) | {"rngs": rngs, "use_bias": use_bias}
        after = norm_position == "after"
        if after:
            options.setdefault("input_layernorm", False)
        want_arrangement("TransformerLayer", locals() | options)
        self.attention = MultiHeadAttention(
            hidden_size, num_attention_heads, attention_dropout=attention_dropout, **shared, **options
        )
        shared |= {"activations": mlp_activations, "activation_params": mlp_activation_params}
        shared |= {"smooth_swiglu": smooth_swiglu, "input_layernorm": not after}
        self.mlp = LayerNormMLP(hidden_size, mlp_hidden_size, **shared)
        gain = 1.0 if norm_gain is None else norm_gain
        kinds = norm_options(locals()) | {"gain": gain}
        self.attention_norm = LayerNorm(hidden_size, **kinds) if after else None
        self.mlp_norm = LayerNorm(hidden_size, **kinds) if after else None
        self.dropout, self.path = Dropout(hidden_dropout, rngs), Dropout(drop_path, rngs)

    def __call__(self, x: Any, **options: Any) -> Any:
        """``x``: h (b, s, H); ``options``: ``mask``, ``bias``, ``cu_seqlens_q`` and so on, of the attention.
        Returns h like x."""
        functions.known("TransformerLayer", options)

        def add(*summands: Any) -> Any:
            return residual_sum(*summands, self.dropout._drawn(), self.path._drawn())

        idle = self.dropout.idle and self.path.idle
        branches = (self.attention, self.attention_norm, options), (self.mlp, self.mlp_norm, {})
        for branch, norm, own in branches:
            x = joined(partial(branch, x, **own), x, norm, idle, add)
        return x
