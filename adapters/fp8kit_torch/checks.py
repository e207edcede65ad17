"""What each argument of the torch frontend may be, by its name: ``check`` asks before anything is made, run
or changed. Not within ``torch.compile``, which need not follow it.

What an argument means beside others (sizes that must divide, shapes that must fit) is asked where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from fp8kit.arguments import Rule, check, flag, function, integer, named, number, one, optional, shown
from fp8kit.errors import ArgumentError, FormatError, UnsupportedError, on_behalf_of
from fp8kit.layers import arguments
from fp8kit.layers.arguments import instance, probability
from fp8kit.ops.expert_linear import want_sizes
from fp8kit_torch.collectives import is_group, ranks_of

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


def is_integer(value: torch.Tensor) -> bool:
    """Whether a tensor is of integers or bools that can be read."""
    return not (value.is_floating_point() or value.is_complex() or value.is_meta)


def refusals_of(operation: str, **names: str) -> AbstractContextManager[None]:
    """``on_behalf_of``, nothing within ``torch.compile``."""
    return nullcontext() if torch.compiler.is_compiling() else on_behalf_of(operation, **names)


def of_one(operation: str, name: str, group: object) -> None:
    """None, a process group of one, or a list of such. ArgumentError for what is no group, or one without
    this process, NotImplementedError for one of several."""
    if group is None:
        return
    if isinstance(group, list) and group:  # several, for hierarchical context parallelism
        for each in group:
            of_one(operation, name, each)
        return
    if not is_group(group) or (count := torch.distributed.get_world_size(group)) < 1:
        raise ArgumentError(
            operation, name, shown(group), "None or a process group of torch.distributed with this process"
        )
    if count != 1:
        raise UnsupportedError(
            operation, name, f"a group of {count} processes", "one process: nothing else is supported yet"
        )


def ranks_group(operation: str, name: str, value: object) -> None:
    """None, a process group with this process, or a ``Collectives``. ArgumentError for anything else."""
    ranks_of(operation, name, value)


def cp_group(operation: str, name: str, value: object) -> None:
    """``ranks_group``, or a list of two, for hierarchical context parallelism."""
    for each in value if isinstance(value, list | tuple) else [value]:
        ranks_of(operation, name, each)


def device(operation: str, name: str, value: Any) -> torch.device:
    """What torch.device takes, or a device. ArgumentError for anything else."""
    try:
        if isinstance(value, str | int | torch.device) and not isinstance(value, bool):
            return torch.device(value)
    except (RuntimeError, ValueError):
        pass
    raise ArgumentError(operation, name, shown(value), 'a device of torch, such as "cpu" or "cuda:1"')


dtype, module = (
    instance(torch.dtype, "a torch.dtype, such as torch.bfloat16", FormatError),
    instance(torch.nn.Module, "a torch.nn.Module"),
)


def parameter_dtype(operation: str, name: str, value: Any) -> torch.dtype:
    """torch.float32, torch.bfloat16 or torch.float16. FormatError for others, and for no dtype."""
    found: torch.dtype = dtype(operation, name, value)
    arguments.parameter_dtype(operation, name, found)
    return found


def _is_count(value: torch.Tensor) -> bool:
    return is_integer(value) and value.dtype is not torch.bool


def want_groups(operation: str, name: str, value: torch.Tensor, groups: int) -> None:
    """A tensor of integers (groups,). FormatError for others, ShapeError for another shape."""
    if value.dtype is torch.int32 and value.shape == (groups,) and not value.is_meta:
        return  # as in most calls
    want_sizes(operation, name, value, _is_count(value), value.shape, groups)


def splits(operation: str, name: str, value: Any) -> None:
    """Ints of at least 0, in a sequence, an integer array (n,) or tensor; one on a GPU is not looked at.
    FormatError for an array of others."""
    if isinstance(value, torch.Tensor | np.ndarray):
        of_torch = isinstance(value, torch.Tensor)
        if not (_is_count(value) if of_torch else value.dtype.kind in "iu"):
            raise FormatError(operation, name, shown(value), "integers")
        if of_torch and value.is_cuda and value.ndim == 1:
            return
        if value.ndim == 1:
            value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ArgumentError(operation, name, shown(value), "a list of numbers of rows")
    for rows in value:
        integer(operation, name, rows, 0, 2**31 - 1)


def mask(operation: str, name: str, value: Any) -> None:
    """A tensor, or a pair of them."""
    for each in value if isinstance(value, tuple | list) and len(value) == 2 else (value,):
        tensor(operation, name, each)


def init(operation: str, name: str, value: Any) -> None:
    """What fills a tensor."""
    if isinstance(value, torch.nn.Module):
        raise ArgumentError(operation, name, type(value).__name__, "a function that fills a tensor, or None")
    function(operation, name, value)


def is_scalar(value: Any) -> bool:
    """Whether it is a dense tensor of one real number."""
    whole = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return whole and value.numel() == 1 and not value.is_complex()


def rate(operation: str, name: str, value: Any) -> None:
    """A finite number >= 0, or a floating tensor of one element."""
    if not is_scalar(value) or not value.is_floating_point():
        number(operation, name, value)


def count(operation: str, name: str, value: Any) -> None:
    """A number of steps, an int of at least 0 or a tensor of one element."""
    if not is_scalar(value):
        integer(operation, name, value, 0, 2**63 - 1)


def betas(operation: str, name: str, value: Any) -> None:
    """Two numbers in [0, 1)."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ArgumentError(operation, name, shown(value), "two numbers")
    for beta in value:
        probability(operation, name, beta)


def layer_number(operation: str, name: str, value: Any) -> None:
    """None or an int, a positive one but for the core attention alone: Transformer Engine's rule."""
    if operation == "DotProductAttention":
        optional(integer)(operation, name, value)
    elif value is not None:
        integer(operation, name, value, 1)


# of modules' constructors
CONSTRUCTED: dict[str, Rule] = {
    **arguments.CONSTRUCTED,
    **named(optional(init), "init_method output_layer_init_method"),
    **named(optional(parameter_dtype), "params_dtype dtype"),
    "device": optional(device),
    "tp_group": ranks_group,
    "cp_group": cp_group,
    "get_rng_state_tracker": optional(function),
    "delay_wgrad_compute": flag,
    "return_max_logit": flag,
    "layer_number": layer_number,
}

# of modules' calls, and of functions
CALLED: dict[str, Rule] = {
    **arguments.CALLED,
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
    "m_splits": splits,
    "qkv_split_arg_list": splits,
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

__all__ = ["Rule", "check", "named", "one", "optional", "probability", "shown"]
