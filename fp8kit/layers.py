"""What the layers of every door have in common and no array is needed for: tables of Transformer Engine's arguments, which layers attention
is given in which form, the numbers of a formula, the order of recomputed layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8kit.errors import ArgumentError, AutogradError, expected

# --- arguments that have one supported value: Transformer Engine's default ------------------------------------------------

_GROUP = {"sequence_parallel": False, "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None}
_OVERLAP = {"ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": False, "ub_bulk_wgrad": False}
_WEIGHT = _GROUP | _OVERLAP | {"ub_name": None, "delay_wgrad_compute": False, "symmetric_ar_type": None}
_WHOLE = _GROUP | {"set_parallel_mode": False}

# constructor -> its arguments
CONSTRUCTOR: dict[str, dict[str, Any]] = {
    "Linear": _WEIGHT | {"rng_tracker_name": None, "parallel_mode": None, "save_original_input": False},
    "LayerNorm": {"sequence_parallel": None, "dtype": None},
    "RMSNorm": {"sequence_parallel": None, "dtype": None},
    "LayerNormLinear": _WEIGHT | {"parallel_mode": None, "return_layernorm_output_gathered": False},
    "LayerNormMLP": _WEIGHT | {"set_parallel_mode": False, "return_layernorm_output_gathered": False},
    "DotProductAttention": _GROUP | {
        "return_max_logit": False, "cp_group": None, "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p",
    },
    "MultiheadAttention": _WHOLE | _OVERLAP,
    "TransformerLayer": _WHOLE | {
        "ub_tp_comm_overlap": False, "ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": True,
        "ub_bulk_wgrad": True,
    },
}  # fmt: skip

# a ``forward`` that takes more than its own arguments -> these
FORWARD: dict[str, dict[str, Any]] = {
    "DotProductAttention": {
        "fp8_output": False, "bf16_backward": False, "num_splits": 1, "score_mod": None, "score_mod_bprop": None,
        "score_mod_tensors": None, "score_mod_bprop_tensors": None,
    },
}  # fmt: skip

# --- attention --------------------------------------------------------------------------------------------------------

# what a layer's forward hands to the core attention as it is, beside its own arguments
CORE_OPTIONS = (
    "core_attention_bias_type", "core_attention_bias", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "fast_zero_fill", "pad_between_seqs",
)  # fmt: skip
QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")
PARTS = {"qkv_layer": "qkv", "query_layer": "q", "kv_layer": "kv", "key_layer": "k", "value_layer": "v"}  # layer -> what is in it
LAYERS = {"q": "query_layer", "k": "key_layer", "v": "value_layer"}  # what is a layer of its own
_FORMS = {
    ("query_layer", "key_layer", "value_layer"): ("separate", ("q", "k", "v")),
    ("query_layer", "kv_layer"): ("q_kv", ("q", "kv")),
    ("qkv_layer",): ("qkv", ("qkv",)),
}


def known_options(operation: str, given: Iterable[str]) -> None:
    """TypeError for a name that is not in ``CORE_OPTIONS``."""
    for name in given:
        if name not in CORE_OPTIONS:
            raise TypeError(f"{operation}: unexpected argument {name!r}")


def layout_of(operation: str, given: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The layout of an attention whose layers are ``given`` by their arguments' names, None for those that are not, and its inputs: name ->
    argument. Fp8kitError for a mixture of forms."""
    there = tuple([name for name in ("query_layer", "key_layer", "value_layer", "kv_layer", "qkv_layer") if given[name] is not None])
    if there not in _FORMS:
        wanted = "query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer"
        raise ArgumentError(expected(operation, "layers", " and ".join(there) or None, wanted))
    layout, names = _FORMS[there]
    return layout, dict(zip(names, there, strict=True))


def turned_segments(parts: str, heads: int, groups: int, head_dim: Any, one_freqs: bool) -> tuple[tuple[int, int, str], ...]:
    """``RopeSpec``'s segments of a layer: (heads, features, name of the angles' input, "" for values, which are not turned).
    ``one_freqs``: queries and keys are turned by the same angles."""
    turn = {"q": (heads, head_dim, "freqs"), "k": (groups, head_dim, "freqs" if one_freqs else "k_freqs"), "v": (groups, head_dim, "")}
    return tuple([turn[part] for part in parts])


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slopes (Press et al. 2022, section 3): 2^(-8 i / n) for the largest power of two n up to the number of heads, and every
    second one of 2n heads' for the rest."""
    n = 1 << (heads.bit_length() - 1)
    return [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]


# --- recomputation ----------------------------------------------------------------------------------------------------


def recomputed(calls: Sequence[Any], position: int, owner: object) -> Any:
    """What call ``position`` of an FP8 layer, by ``owner``, found in the first pass over a checkpointed function: the element of ``calls``,
    which have an ``owner`` each. AutogradError where it was another layer's."""
    kept = calls[position] if position < len(calls) else None
    if kept is None or kept.owner is not owner:
        got = f"{type(owner).__name__} as FP8 layer {position}"
        raise AutogradError(expected("checkpoint", "function", got, "the same layers in the same order as in the first pass"))
    return kept
