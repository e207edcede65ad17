"""What each argument of the torch frontend may be, by its name: ``check`` asks before anything is made, run
or changed. Not within ``torch.compile``, which need not follow it.

What an argument means beside others (sizes that must divide, shapes that must fit) is asked where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8kit.arguments import Rule, check, flag, function, integer, named, number, one, optional
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.errors import ArgumentError, FormatError, UnsupportedError
from fp8kit.layers.attention_inputs import QK_NORMS
from fp8kit.ops.attention_spec import BIASES, FORMATS, MASKS, SOFTMAX_TYPES

MASK_ALIASES = ("padding,causal", "causal,padding")


def shown(value: Any) -> str:
    """A value for a message, shortened; a tensor by its kind."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# --- rules --------------------------------------------------------------------------------------------------


_NESTED = " (nn.TransformerEncoder makes nested ones in inference: convert it, not its layers alone)"


def tensor(operation: str, name: str, value: Any) -> torch.Tensor:
    """A dense tensor of any shape and dtype. ArgumentError for what is none, FormatError for a sparse or
    nested one."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(operation, name, shown(value), "a torch.Tensor")
    if value.layout is not torch.strided:
        raise FormatError(operation, name, value.layout, "a dense tensor")
    if value.is_nested:
        raise FormatError(operation, name, "a nested tensor", f"a dense tensor{_NESTED}")
    return value


def of_one(operation: str, name: str, group: object) -> None:
    """None, or a process group of one. ArgumentError for what is no group, or one without this process,
    NotImplementedError for one of several."""
    if group is None:
        return
    known = torch.distributed.ProcessGroup if torch.distributed.is_available() else ()
    if not isinstance(group, known) or (count := torch.distributed.get_world_size(group)) < 1:
        raise ArgumentError(
            operation, name, shown(group), "None or a process group of torch.distributed with this process"
        )
    if count != 1:
        raise UnsupportedError(
            operation, name, f"a group of {count} processes", "one process: nothing else is supported yet"
        )


def size(operation: str, name: str, value: Any) -> int:
    """A positive int that an extent can be."""
    return integer(operation, name, value, 1, 2**31 - 1)


def whole(operation: str, name: str, value: Any) -> int:
    """An int of 32 bits."""
    return integer(operation, name, value, -(2**31), 2**31 - 1)


def device(operation: str, name: str, value: Any) -> torch.device:
    """What torch.device takes, or a device. ArgumentError for anything else."""
    try:
        if isinstance(value, str | int | torch.device) and not isinstance(value, bool):
            return torch.device(value)
    except (RuntimeError, ValueError):
        pass
    raise ArgumentError(operation, name, shown(value), 'a device of torch, such as "cpu" or "cuda:1"')


def instance(kind: type, wanted: str) -> Rule:
    """An object of that class, called ``wanted`` in the message."""

    def rule(operation: str, name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ArgumentError(operation, name, shown(value), wanted)
        return value

    return rule


dtype, module = instance(torch.dtype, "a torch.dtype"), instance(torch.nn.Module, "a torch.nn.Module")


def splits(operation: str, name: str, value: Any) -> None:
    """Ints of at least 0, in a sequence or an integer tensor (n,)."""
    if (
        isinstance(value, torch.Tensor)
        and value.ndim == 1
        and not (value.is_floating_point() or value.is_complex() or value.is_meta)
    ):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ArgumentError(operation, name, shown(value), "a list of numbers of rows")
    for rows in value:
        integer(operation, name, rows, 0, 2**31 - 1)


def window(operation: str, name: str, value: Any) -> None:
    """(left, right), each -1 or more."""
    whole = isinstance(value, tuple | list) and len(value) == 2
    if not whole or any(isinstance(n, bool) or not isinstance(n, int) or not -1 <= n < 2**31 for n in value):
        raise ArgumentError(
            operation, name, shown(value), "(left, right), each -1 (unbounded) or more, or None"
        )


def channels(operation: str, name: str, value: Any) -> None:
    """Features of a head, or (of q and k, of v)."""
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ArgumentError(operation, name, shown(value), "an int, or two: of q and k, and of v")
    for features in pair:
        size(operation, name, features)


def mask(operation: str, name: str, value: Any) -> None:
    """A tensor, or a pair of them."""
    for each in value if isinstance(value, tuple | list) and len(value) == 2 else (value,):
        tensor(operation, name, each)


def init(operation: str, name: str, value: Any) -> None:
    """What fills a tensor."""
    if isinstance(value, torch.nn.Module):
        raise ArgumentError(operation, name, type(value).__name__, "a function that fills a tensor, or None")
    function(operation, name, value)


def probability(operation: str, name: str, value: Any) -> None:
    """A number in [0, 1)."""
    number(operation, name, value, 1.0)


def positive_number(operation: str, name: str, value: Any) -> None:
    """A finite number above 0."""
    number(operation, name, value, above=0.0)


def fraction(operation: str, name: str, value: Any) -> None:
    """A number in (0, 1]."""
    number(operation, name, value, 1.0 + 2.0**-52, above=0.0)


def rate(operation: str, name: str, value: Any) -> None:
    """A finite number >= 0, or a floating tensor of one element."""
    if (
        isinstance(value, torch.Tensor)
        and value.numel() == 1
        and value.is_floating_point()
        and value.layout is torch.strided
    ):
        return
    number(operation, name, value)


def count(operation: str, name: str, value: Any) -> None:
    """A number of steps, an int of at least 0 or a tensor of one element."""
    if (
        not isinstance(value, torch.Tensor)
        or value.numel() != 1
        or value.is_complex()
        or value.layout is not torch.strided
    ):
        integer(operation, name, value, 0, 2**63 - 1)


def betas(operation: str, name: str, value: Any) -> None:
    """Two numbers in [0, 1)."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ArgumentError(operation, name, shown(value), "two numbers")
    for beta in value:
        probability(operation, name, beta)


_MASK = one(*MASKS, *MASK_ALIASES)

# of modules' constructors
CONSTRUCTED: dict[str, Rule] = {
    **named(
        flag,
        """bias return_bias fuse_wgrad_accumulation zero_centered_gamma return_layernorm_output checkpoint
        input_layernorm fuse_qkv_params qkv_weight_interleaved rotary_pos_interleaved qk_norm_before_rope
        apply_residual_connection_post_layernorm output_layernorm parallel_attention_mlp interleaved
        set_parallel_mode accumulate_into_main_grad is_paged""",
    ),
    **named(optional(flag), "bottom_right_diagonal enc_dec_bottom_right_diagonal"),
    **named(
        size,
        """in_features out_features hidden_size ffn_hidden_size num_attention_heads num_gemms dim size
        max_batch_size max_sequence_length""",
    ),
    **named(
        optional(size),
        """seq_length micro_batch_size num_gqa_groups align_size seq_len_interpolation_factor num_heads_kv
        head_dim_k head_dim_v total_num_pages page_size max_ctx_len pretrained_max_position_embeddings""",
    ),
    **named(number, "eps layernorm_epsilon qk_norm_eps"),
    **named(probability, "attention_dropout hidden_dropout drop_path_rate"),
    **named(optional(init), "init_method output_layer_init_method"),
    **named(optional(dtype), "params_dtype dtype"),
    **named(optional(window), "window_size enc_dec_window_size"),
    **named(_MASK, "attn_mask_type self_attn_mask_type enc_dec_attn_mask_type"),
    **named(one(*FORMATS), "qkv_format attn_input_format"),
    "normalization": one("LayerNorm", "RMSNorm"),
    "activation": one(*ACTIVATIONS),
    "qk_norm_type": optional(one(*QK_NORMS)),
    "softmax_type": one(*SOFTMAX_TYPES),
    "attention_type": one("self", "cross"),
    "layer_type": one("encoder", "decoder"),
    "softmax_scale": optional(positive_number),
    "rotary_base": positive_number,
    "rotary_percent": fraction,
    "kv_channels": optional(channels),
    "device": optional(device),
    "layer_number": optional(integer),
}

# of modules' calls, and of functions
CALLED: dict[str, Rule] = {
    **named(
        flag,
        "fp8_output fp8_grad checkpoint_core_attention fast_zero_fill interleaved fused training reduce_loss "
        "defer_init",
    ),
    **named(
        optional(flag),
        "is_first_microbatch bottom_right_diagonal enc_dec_bottom_right_diagonal pad_between_seqs",
    ),
    **named(
        tensor,
        "inp logits targets ids table x t freqs qkv q_freqs k_freqs probs routing_map row_id_map "
        "tokens_per_expert split_sizes sorted_index",
    ),
    **named(
        optional(tensor),
        """query_layer key_layer value_layer qkv_layer kv_layer cu_seqlens_q cu_seqlens_kv
        cu_seqlens_q_padded cu_seqlens_kv_padded core_attention_bias alibi_slopes encoder_output
        start_positions cu_seqlens cu_seqlens_padded residual bias merging_probs pad_offsets target""",
    ),
    **named(optional(mask), "attention_mask enc_dec_attn_mask rotary_pos_emb"),
    **named(optional(window), "window_size enc_dec_window_size"),
    **named(optional(_MASK), "attn_mask_type self_attn_mask_type enc_dec_attn_mask_type"),
    **named(optional(size), "max_seqlen_q max_seqlen_kv"),
    **named(probability, "p label_smoothing"),
    **named(whole, "ignore_index ignore_idx qkv_interleave_dim num_out_tokens max_token_num"),
    "qkv_format": optional(one(*FORMATS)),
    "tensor_format": one(*FORMATS),
    "core_attention_bias_type": one(*BIASES),
    "m_splits": splits,
    "qkv_split_arg_list": splits,
    "align_size": size,
    "map_type": one("mask", "index"),
    "reduction": one("mean", "none"),
}

# of optimisers, their parameters' groups among it
OPTIMISED: dict[str, Rule] = {
    **named(
        flag,
        """bias_correction adam_w_mode capturable master_weights use_decoupled_grad store_param_remainders
        amsgrad nesterov wd_after_momentum materialize_master_grads""",
    ),
    **named(optional(flag), "set_grad_none"),
    **named(number, "eps weight_decay momentum dampening"),
    **named(dtype, "master_weight_dtype exp_avg_dtype exp_avg_sq_dtype"),
    "lr": rate,
    "betas": betas,
    "step": optional(count),
}

__all__ = [
    "CALLED",
    "CONSTRUCTED",
    "OPTIMISED",
    "Rule",
    "channels",
    "check",
    "device",
    "function",
    "instance",
    "module",
    "named",
    "one",
    "optional",
    "probability",
    "shown",
    "tensor",
]
