"""How attention is called: the form of its inputs, what a call resolves to, rotary embeddings, padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError, ShapeError

# what a layer's forward hands to the core attention as it is -> its default
CORE_OPTIONS: dict[str, Any] = {
    "attention_mask": None,
    "attn_mask_type": None,
    "window_size": None,
    "bottom_right_diagonal": None,
    "softcap": None,
    "inference_params": None,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias": None,
    "alibi_slopes": None,
    "cu_seqlens_q": None,
    "cu_seqlens_kv": None,
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "fast_zero_fill": True,
    "pad_between_seqs": None,
    "thd_attention_policies": None,
    "thd_attention_policy_dispatch": "auto",
}
# cross-attention's arguments whose default is not None, which a layer without cross-attention must leave
CROSS_DEFAULTS = {"enc_dec_attn_mask_type": "no_mask"}
_NOTHING: Mapping[str, Any] = {}
QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")
# argument -> the projections that it holds
PARTS = {"query_layer": "q", "key_layer": "k", "value_layer": "v", "kv_layer": "kv", "qkv_layer": "qkv"}
LAYERS = {"q": "query_layer", "k": "key_layer", "v": "value_layer"}  # where it holds one alone
_LAYOUTS = {
    ("query_layer", "key_layer", "value_layer"): "separate",
    ("query_layer", "kv_layer"): "q_kv",
    ("qkv_layer",): "qkv",
}


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """A call of the core attention, checked before its layers are there: the ``operation`` and its ``spec``,
    and the inputs ``beside`` the layers by name, on the layers' device; ``draws``: whether it draws random
    numbers."""

    operation: Any
    spec: Any
    beside: Mapping[str, Any]
    draws: bool = False


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call of ``MultiheadAttention``, checked before its first projection runs: its ``core``, where keys
    and values come from (``source``, None for self attention), and for each layer that is rotated
    ``RopeSpec`` and its inputs but "x". Within ``torch.compile`` core and rotations are None: they are
    resolved with the layers."""

    core: ResolvedCall | None
    source: Any
    rotations: Mapping[str, tuple[Any, Mapping[str, Any]]] | None


def sequence_starts(beside: Mapping[str, Any], cache: Any) -> Any:
    """Returns where the sequences of "thd" start, int32 (b + 1,): what the inputs ``beside`` the queries of
    an attention say, or its ``cache``."""
    for name in ("cu_seqlens_q_padded", "cu_seqlens_q"):
        if beside.get(name) is not None:
            return beside[name]
    return None if cache is None else cache.cu_seqlens_q


def want_no_encoder(operation: str, array: str, usual: Mapping[str, Any] = _NOTHING, **given: Any) -> None:
    """ArgumentError for an argument about an encoder's output, in the constructor or the call of a layer
    without cross-attention: each must have its ``usual`` value, None where that has no value. ``array``: what
    the frontend calls one."""
    for name, value in given.items():
        wanted = usual.get(name)
        if value is not wanted and not (isinstance(value, str) and value == wanted):
            got = array if hasattr(value, "shape") else shown(value)
            raise ArgumentError(operation, name, got, f"{wanted!r} with layer_type 'encoder'")


def core_options(*values: Any) -> dict[str, Any]:
    """Those of the core attention's options, in the order of ``CORE_OPTIONS``, that are not at their
    defaults."""
    if all(map(is_, values, CORE_OPTIONS.values())):
        return {}
    return {
        name: value
        for (name, usual), value in zip(CORE_OPTIONS.items(), values, strict=True)
        if value is not usual
    }


def layout_of(operation: str, given: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the layout of an attention whose layers are ``given`` by their arguments' names, perhaps None,
    and its inputs: name -> argument. Fp8kitError for a mixture of forms."""
    there = tuple([name for name in PARTS if given.get(name) is not None])
    if there not in _LAYOUTS:
        wanted = "query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer"
        raise ArgumentError(operation, "layers", " and ".join(there) or None, wanted)
    return _LAYOUTS[there], {PARTS[name]: name for name in there}


def normed_and_rotated(
    value: Any, norm: Callable[[Any], Any] | None, rotate: Callable[[Any], Any] | None, norm_first: bool
) -> Any:
    """Queries or keys, or a layer's projections, after their norm and their rotary embedding, in this or the
    other order.

    ``norm``, ``rotate``: functions of one value, None for a step that the layer does not have."""
    for step in (norm, rotate) if norm_first else (rotate, norm):
        value = value if step is None else step(value)
    return value


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slopes (Press et al. 2022, section 3): 2^(-8 i / n) for the largest power of two n up to the
    number of heads, and every second one of 2n heads' for the rest."""
    n = 1 << (heads.bit_length() - 1)
    return [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [
        2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)
    ]


def pair_of(operation: str, argument: str, value: Any) -> Sequence[Any]:
    """Returns what an argument says of queries and of keys: a pair, or one for both. ShapeError for a
    sequence of another length."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ShapeError(operation, argument, f"{len(pair)} of them", "one, or a pair for queries and keys")
    return pair


# got, wanted of a padding mask
MISPLACED = ("padding before a true position", "padding after all true positions")
