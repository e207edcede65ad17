"""What each argument may be, by its name: the rules that all frontends have. A frontend adds those of its own
tensors, dtypes and devices.

What an argument means beside others (sizes that must divide, shapes that must fit) is checked where it is
used.
"""

from __future__ import annotations

import math
from typing import Any

from fp8kit import formats
from fp8kit.arguments import Rule, flag, integer, named, number, one, optional, shown
from fp8kit.backends.activation import ALL
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.layers.attention_inputs import QK_NORMS
from fp8kit.ops.attention_spec import BIASES, FORMATS, LEAST_CAP, MASKS, SOFTMAX_TYPES
from fp8kit.ops.smooth import LINES

NORM_POSITIONS = ("before", "after")  # of a layer's branches
MASK_ALIASES = ("padding,causal", "causal,padding")


def parameter_dtype(operation: str, name: str, value: Any) -> formats.DType:
    """A dtype of parameters: float32, bfloat16 or float16. FormatError for another, and for what is none."""
    return formats.dtype(value, operation, name, formats.HIGH_PRECISION)


def size(operation: str, name: str, value: Any) -> int:
    """Returns a positive int that an extent can be."""
    return integer(operation, name, value, 1, 2**31 - 1)


def extent(operation: str, name: str, value: Any) -> int:
    """Returns an int that an extent can be."""
    return integer(operation, name, value, 0, 2**31 - 1)


def longest(operation: str, name: str, value: Any) -> int:
    """Returns the length that bounds those of sequences: an int that an extent can be, or an array of one,
    whose value is read on the host."""
    shape = getattr(value, "shape", None)
    one_element = isinstance(shape, tuple) and math.prod(shape) == 1 and not getattr(value, "is_meta", False)
    return extent(operation, name, value.item() if one_element and hasattr(value, "item") else value)


def whole(operation: str, name: str, value: Any) -> int:
    """Returns an int of 32 bits."""
    return integer(operation, name, value, -(2**31), 2**31 - 1)


def instance(kind: type, wanted: str, error: type[Fp8kitError] = ArgumentError) -> Rule:
    """An object of that class, called ``wanted`` in the message."""

    def rule(operation: str, name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise error(operation, name, shown(value), wanted)
        return value

    return rule


def window(operation: str, name: str, value: Any) -> tuple[int, int]:
    """(left, right), each -1 or more."""
    wanted = "(left, right), each -1 (unbounded) or more, or None"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ArgumentError(operation, name, shown(value), wanted)
    try:
        return integer(operation, name, value[0], -1, 2**31 - 1), integer(
            operation, name, value[1], -1, 2**31 - 1
        )
    except ArgumentError:
        raise ArgumentError(operation, name, shown(value), wanted) from None


def channels(operation: str, name: str, value: Any) -> int | tuple[int, int]:
    """Features of a head, or (of q and k, of v)."""
    if not isinstance(value, tuple):
        return size(operation, name, value)
    if len(value) != 2:
        raise ArgumentError(operation, name, shown(value), "an int, or two: of q and k, and of v")
    return size(operation, name, value[0]), size(operation, name, value[1])


def probability(operation: str, name: str, value: Any) -> float:
    """Returns a number in [0, 1)."""
    return number(operation, name, value, 1.0)


def share(operation: str, name: str, value: Any) -> float:
    """Returns a number in [0, 1]."""
    return number(operation, name, value, 1.0 + 2.0**-52)


def positive_number(operation: str, name: str, value: Any) -> float:
    """Returns a finite number above 0."""
    return number(operation, name, value, above=0.0)


def fraction(operation: str, name: str, value: Any) -> float:
    """Returns a number in (0, 1]."""
    return number(operation, name, value, 1.0 + 2.0**-52, above=0.0)


def text(operation: str, name: str, value: Any) -> str:
    """Returns a string."""
    if not isinstance(value, str):
        raise ArgumentError(operation, name, shown(value), "a string")
    return value


_CP_COMMUNICATION = one("p2p", "all_gather", "a2a", "a2a+p2p")


def cp_communication(operation: str, name: str, value: Any) -> None:
    """One of context parallelism's ways to communicate, or a list of them, for layers in turn."""
    for each in value if isinstance(value, list | tuple) else (value,):
        _CP_COMMUNICATION(operation, name, each)


def cap(operation: str, name: str, value: Any) -> float:
    """Returns a cap of scores: 0, or a number that float32 divides by."""
    found = number(operation, name, value, 1 / LEAST_CAP)
    return found if found == 0 else number(operation, name, value, 1 / LEAST_CAP, least=LEAST_CAP)


_MASK = one(*MASKS, *MASK_ALIASES)

# of constructors
CONSTRUCTED: dict[str, Rule] = {
    **named(
        flag,
        """bias return_bias fuse_wgrad_accumulation zero_centered_gamma return_layernorm_output checkpoint
        input_layernorm fuse_qkv_params qkv_weight_interleaved rotary_pos_interleaved qk_norm_before_rope
        apply_residual_connection_post_layernorm output_layernorm parallel_attention_mlp interleaved
        set_parallel_mode accumulate_into_main_grad is_paged learned qk_norm_learned ub_overlap_ag
        ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_tp_comm_overlap save_original_input
        return_layernorm_output_gathered""",
    ),
    **named(
        optional(flag),
        "bottom_right_diagonal enc_dec_bottom_right_diagonal sequence_parallel use_grouped_tensor",
    ),
    **named(optional(text), "name ub_name rng_tracker_name"),
    "parallel_mode": optional(one("row", "column")),
    "symmetric_ar_type": optional(one("multimem_all_reduce", "two_shot", "one_shot")),
    "sm_margin": extent,
    "cp_comm_type": cp_communication,
    **named(
        size,
        """in_features out_features hidden_size ffn_hidden_size num_attention_heads num_gemms dim size
        max_batch_size max_sequence_length tp_size""",
    ),
    **named(
        optional(size),
        """seq_length micro_batch_size num_gqa_groups align_size seq_len_interpolation_factor num_heads_kv
        head_dim_k head_dim_v total_num_pages page_size max_ctx_len pretrained_max_position_embeddings""",
    ),
    **named(number, "eps layernorm_epsilon qk_norm_eps"),
    **named(probability, "attention_dropout hidden_dropout"),
    "drop_path_rate": share,
    **named(optional(window), "window_size enc_dec_window_size"),
    **named(_MASK, "attn_mask_type self_attn_mask_type enc_dec_attn_mask_type"),
    **named(one(*FORMATS), "qkv_format attn_input_format"),
    "normalization": one("LayerNorm", "RMSNorm"),
    "activation": one(*ALL),
    "smooth_swiglu": optional(one(*LINES)),
    "qk_norm_type": optional(one(*QK_NORMS)),
    "softmax_type": one(*SOFTMAX_TYPES),
    "attention_type": one("self", "cross"),
    "layer_type": one("encoder", "decoder"),
    "softmax_scale": optional(positive_number),
    "softcap": cap,
    "norm_position": one(*NORM_POSITIONS),
    "gain": positive_number,
    "norm_gain": optional(positive_number),
    "rotary_base": positive_number,
    "rotary_percent": fraction,
    "kv_channels": optional(channels),
    "layer_number": optional(integer),
}

# of calls, and of functions
CALLED: dict[str, Rule] = {
    **named(
        flag,
        "fp8_output fp8_grad bf16_backward checkpoint_core_attention fast_zero_fill interleaved fused "
        "training reduce_loss defer_init",
    ),
    **named(
        optional(flag),
        "is_first_microbatch bottom_right_diagonal enc_dec_bottom_right_diagonal pad_between_seqs",
    ),
    **named(optional(window), "window_size enc_dec_window_size"),
    **named(optional(_MASK), "attn_mask_type self_attn_mask_type enc_dec_attn_mask_type"),
    # 0 where a batch has no tokens
    **named(optional(longest), "max_seqlen_q max_seqlen_kv"),
    **named(probability, "p label_smoothing"),
    **named(whole, "ignore_index ignore_idx qkv_interleave_dim num_out_tokens max_token_num num_splits"),
    "qkv_format": optional(one(*FORMATS)),
    "tensor_format": one(*FORMATS),
    "core_attention_bias_type": one(*BIASES),
    "softcap": optional(cap),
    "thd_attention_policy_dispatch": one("auto", "grouped"),
    "align_size": size,
    "map_type": one("mask", "index"),
    "reduction": one("mean", "none"),
}


def want_plain(
    operation: str, is_first_microbatch: Any, fp8_output: Any = False, fp8_grad: Any = False
) -> None:
    """ArgumentError for options of a layer's call that are no flags; nothing is called for those that are."""
    first = is_first_microbatch
    if fp8_output is fp8_grad is False and (first is None or first is True or first is False):
        return
    for name, value in (
        ("is_first_microbatch", is_first_microbatch),
        ("fp8_output", fp8_output),
        ("fp8_grad", fp8_grad),
    ):
        allowed = (True, False, None) if name == "is_first_microbatch" else (True, False)
        if not any(value is each for each in allowed):
            wanted = "True, False or None" if None in allowed else "True or False"
            raise ArgumentError(operation, name, shown(value), wanted)
