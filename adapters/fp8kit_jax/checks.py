"""What the fields of Flax modules and the arguments of NNX modules may be, by their name: asked before
parameters are made."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from fp8kit.arguments import Rule, flag, integer, named, number, one, optional, shown
from fp8kit.errors import ArgumentError, FormatError
from fp8kit.layers.arguments import CONSTRUCTED, parameter_dtype, probability, size
from fp8kit.ops.attention_spec import BIASES, MASKS, SOFTMAX_TYPES
from fp8kit_jax.activations import ACTIVATION_TYPES, FUNCTIONS, words_of

ALIASES = {"causal_padding": "padding_causal"}  # of masks; Transformer Engine's


def within(least: int, most: int) -> Rule:
    """Returns an int in [least, most]."""
    return lambda operation, name, value: integer(operation, name, value, least, most)


def several(rule: Rule) -> Rule:
    """``rule`` of a value, or of each of several."""

    def every(operation: str, name: str, value: Any) -> None:
        for part in value if isinstance(value, tuple | list) and value else (value,):
            rule(operation, name, part)

    return every


def factor(operation: str, name: str, value: Any) -> None:
    """A finite number that is not 0."""
    if number(operation, name, value, least=-float("inf")) == 0:
        raise ArgumentError(operation, name, shown(value), "a finite number that is not 0")


def dtype(operation: str, name: str, value: Any) -> None:
    """float32, bfloat16 or float16, in a way that JAX takes. FormatError for others, and for no dtype."""
    array = hasattr(value, "__array__") and not isinstance(value, type)
    known: Any = None
    if not array and not isinstance(value, tuple | list | dict | None):
        with suppress(TypeError, ValueError):
            known = np.dtype(value)
    if known is None:
        raise FormatError(operation, name, shown(value), "a dtype of JAX, such as jnp.bfloat16")
    parameter_dtype(operation, name, known)


def activations(others: tuple[str, ...]) -> Rule:
    """Returns a key of ``ACTIVATION_TYPES``, or a list of its words, or any number of ``others``."""

    def words(operation: str, name: str, value: Any) -> None:
        found = words_of(value)
        if not found or (found not in ACTIVATION_TYPES and not set(found) <= set(others)):
            known = f"one of {', '.join(map(str, ACTIVATION_TYPES))}"
            more = f", or several of {', '.join(others)}" if others else ""
            raise ArgumentError(operation, name, shown(value), known + more)

    return words


_SHARED = """attention_dropout bottom_right_diagonal hidden_dropout hidden_size in_features input_layernorm
layernorm_epsilon smooth_swiglu norm_position norm_gain gain num_attention_heads num_gqa_groups
qk_norm_before_rope qk_norm_eps qkv_format return_bias return_layernorm_output softcap window_size
zero_centered_gamma"""
RULES: dict[str, Rule] = {
    # the same in all frontends
    **{name: CONSTRUCTED[name] for name in _SHARED.split()},
    **named(
        flag,
        """use_bias enable_low_rank_adaptation return_residual enable_layernorm enable_rotary_pos_emb
        fuse_qkv_params scale_attn_logits scaled_query_init float32_logits float32_attention_logits
        enable_relative_embedding cross rotary join_residual join_layernorm_output qk_norm_learned""",
    ),
    **named(
        size,
        """low_rank_adaptation_dim intermediate_dim head_dim mlp_hidden_size num_features num_buckets
        max_distance max_segments_per_seq""",
    ),
    **named(within(0, 2**31 - 1), "max_seqlen_q max_seqlen_kv"),
    **named(probability, "intermediate_dropout_rate intermediate_dropout drop_path rate"),
    **named(activations(FUNCTIONS), "activations mlp_activations"),
    **named(one(*MASKS, *ALIASES), "attn_mask_type self_attn_mask_type"),
    **named(optional(one(*BIASES)), "attn_bias_type self_attn_bias_type"),
    **named(optional(factor), "low_rank_adaptation_alpha depth_scaling scale_factor"),
    "transpose_batch_sequence": optional(flag),
    "context_parallel_causal_load_balanced": flag,
    "context_parallel_strategy": one("DEFAULT", "ALL_GATHER", "RING"),
    "stripe_size": optional(within(1, 2**31 - 1)),
    "epsilon": number,
    "features": several(size),
    "axis": several(within(-64, 63)),
    "dtype": dtype,
    "layernorm_type": one("layernorm", "rmsnorm"),
    "softmax_type": one(*SOFTMAX_TYPES, "off_by_one"),
}
# of experts, whose features are one number, and whose activations one kernel makes
GROUPED = RULES | {"experts": size, "features": size, "activations": activations(())}
UNTYPED = RULES | {"dtype": optional(dtype)}  # of the core attention, which has no parameters in a dtype
