"""What the layers of every door have in common and no array is needed for: tables of Transformer Engine's
arguments, which layers attention is given in which form, the numbers of a formula, what a recomputed pass
finds of the first one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError, AutogradError, ShapeError

# --- arguments that have one supported value: Transformer Engine's default ----------------------------------

_GROUP = {"sequence_parallel": False, "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None}
_OVERLAP = {
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
}
_WEIGHT = _GROUP | _OVERLAP | {"delay_wgrad_compute": False, "symmetric_ar_type": None}
_WHOLE = _GROUP | {"set_parallel_mode": False}

# constructor -> its arguments
CONSTRUCTOR: dict[str, dict[str, Any]] = {
    "Linear": _WEIGHT
    | {"ub_name": None, "rng_tracker_name": None, "parallel_mode": None, "save_original_input": False},
    "LayerNorm": {"sequence_parallel": None, "dtype": None},
    "RMSNorm": {"sequence_parallel": None, "dtype": None},
    "LayerNormLinear": _WEIGHT
    | {"ub_name": None, "parallel_mode": None, "return_layernorm_output_gathered": False},
    "LayerNormMLP": _WEIGHT | {"set_parallel_mode": False, "return_layernorm_output_gathered": False},
    "DotProductAttention": _GROUP
    | {
        "return_max_logit": False,
        "cp_group": None,
        "cp_global_ranks": None,
        "cp_stream": None,
        "cp_comm_type": "p2p",
    },
    "MultiheadAttention": _WHOLE | _OVERLAP,
    "TransformerLayer": _WHOLE
    | {
        "ub_tp_comm_overlap": False,
        "ub_overlap_ag": True,
        "ub_overlap_rs": True,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": True,
        "ub_bulk_wgrad": True,
    },
}

# a ``forward`` that takes more than its own arguments -> these
FORWARD: dict[str, dict[str, Any]] = {
    "DotProductAttention": {
        "fp8_output": False,
        "bf16_backward": False,
        "num_splits": 1,
        "score_mod": None,
        "score_mod_bprop": None,
        "score_mod_tensors": None,
        "score_mod_bprop_tensors": None,
    }
}

# --- attention ----------------------------------------------------------------------------------------------

# what a layer's forward hands to the core attention as it is, beside its own arguments -> its default
CORE_OPTIONS: dict[str, Any] = {
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
}
# what an encoder's constructor takes of the attention across, where that is not None
ACROSS = {"enc_dec_attn_mask_type": "no_mask"}
_NOTHING: Mapping[str, Any] = {}
QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")
# layer -> what is in it
PARTS = {"qkv_layer": "qkv", "query_layer": "q", "kv_layer": "kv", "key_layer": "k", "value_layer": "v"}
LAYERS = {"q": "query_layer", "k": "key_layer", "v": "value_layer"}  # what is a layer of its own
_FORMS = {
    ("query_layer", "key_layer", "value_layer"): ("separate", ("q", "k", "v")),
    ("query_layer", "kv_layer"): ("q_kv", ("q", "kv")),
    ("qkv_layer",): ("qkv", ("qkv",)),
}


@dataclass(frozen=True, slots=True)
class Settled:
    """What a call of the core attention comes to, decided and checked before the layers are there: the
    ``operation`` and its ``spec``, as the door has them, and the inputs ``beside`` the layers by name, where
    the layers will be."""

    operation: Any
    spec: Any
    beside: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ahead:
    """A call of ``MultiheadAttention``, checked before its first projection runs: its ``core``, where keys
    and values come from (``source``, None for self attention), and for each layer that is turned ``RopeSpec``
    and its inputs but "x"."""

    core: Settled
    source: Any
    turns: Mapping[str, tuple[Any, Mapping[str, Any]]]


def projected(
    core: Any, queries: tuple[int, ...], keys: tuple[int, ...] | None, apart: bool, normed: bool
) -> dict[str, tuple[int, ...]]:
    """Shapes of the layers that ``MultiheadAttention`` will hand to its ``core``, by the core's arguments.
    ``queries``, ``keys``: leading dimensions of what is projected, keys None for self attention; ``apart``:
    each part a layer, its heads a dimension of their own, the queries of an attention across only where they
    are ``normed``."""
    heads, groups, dim = core.num_attention_heads, core.num_gqa_groups, core.kv_channels
    if not apart:
        if keys is None:
            return {"qkv_layer": (*queries, (heads + 2 * groups) * dim)}
        return {"query_layer": (*queries, heads * dim), "kv_layer": (*keys, 2 * groups * dim)}
    whole = keys is not None and not normed
    found = {"query_layer": (*queries, heads * dim) if whole else (*queries, heads, dim)}
    return found | dict.fromkeys(
        ("key_layer", "value_layer"), (*(queries if keys is None else keys), groups, dim)
    )


def sequence_starts(beside: Mapping[str, Any], cache: Any) -> Any:
    """Where the sequences of "thd" start, int32 (b + 1,): what the inputs ``beside`` the queries of an
    attention say, or its ``cache``."""
    for name in ("cu_seqlens_q_padded", "cu_seqlens_q"):
        if beside.get(name) is not None:
            return beside[name]
    return None if cache is None else cache.cu_seqlens_q


def want_no_encoder(operation: str, array: str, usual: Mapping[str, Any] = _NOTHING, **given: Any) -> None:
    """ArgumentError for what is about an encoder's output, in the constructor or the call of a layer that has
    no attention across: for all that is not ``usual``, None where that has no value. ``array``: what the door
    calls one."""
    for name, value in given.items():
        wanted = usual.get(name)
        if value is not wanted and not (isinstance(value, str) and value == wanted):
            got = array if hasattr(value, "shape") else shown(value)
            raise ArgumentError(operation, name, got, f"{wanted!r} with layer_type 'encoder'")


def known_options(operation: str, given: Iterable[str]) -> None:
    """TypeError for a name that is not in ``CORE_OPTIONS``."""
    for name in given:
        if name not in CORE_OPTIONS:
            raise TypeError(f"{operation}: unexpected argument {name!r}")


def layout_of(operation: str, given: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The layout of an attention whose layers are ``given`` by their arguments' names, None for those that
    are not, and its inputs: name -> argument. Fp8kitError for a mixture of forms."""
    there = tuple(
        [
            name
            for name in ("query_layer", "key_layer", "value_layer", "kv_layer", "qkv_layer")
            if given[name] is not None
        ]
    )
    if there not in _FORMS:
        wanted = "query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer"
        raise ArgumentError(operation, "layers", " and ".join(there) or None, wanted)
    layout, names = _FORMS[there]
    return layout, dict(zip(names, there, strict=True))


def turned_segments(
    parts: str, heads: int, groups: int, head_dim: Any, one_freqs: bool
) -> tuple[tuple[int, int, str], ...]:
    """``RopeSpec``'s segments of a layer: (heads, features, name of the angles' input, "" for values, which
    are not turned). ``one_freqs``: queries and keys are turned by the same angles."""
    turn = {
        "q": (heads, head_dim, "freqs"),
        "k": (groups, head_dim, "freqs" if one_freqs else "k_freqs"),
        "v": (groups, head_dim, ""),
    }
    return tuple([turn[part] for part in parts])


def normed_and_turned(
    value: Any, norm: Callable[[Any], Any] | None, turn: Callable[[Any], Any] | None, norm_first: bool
) -> Any:
    """Queries or keys, or a layer's projections, after their norm and their rotary embedding, in this or the
    other order.

    ``norm``, ``turn``: functions of one value, None for what there is not."""
    for step in (norm, turn) if norm_first else (turn, norm):
        value = value if step is None else step(value)
    return value


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slopes (Press et al. 2022, section 3): 2^(-8 i / n) for the largest power of two n up to the
    number of heads, and every second one of 2n heads' for the rest."""
    n = 1 << (heads.bit_length() - 1)
    return [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [
        2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)
    ]


def turning(
    operation: str,
    name: str,
    layer: Any,
    freqs: Sequence[Any],
    core: Any,
    options: Mapping[str, Any],
    placed: Callable[[str, Any], Any],
) -> tuple[tuple[tuple[int, int, str], ...], dict[str, Any]]:
    """``RopeSpec``'s segments and the inputs of a rotary embedding for ``layer``, which is the argument
    ``name`` of the attention ``core``.

    ``freqs``: angles of queries and of keys; ``options``: of the core's forward, of which lengths and the
    cache count. ``placed(argument, value)``: the door's array of an argument where the layer is; the angles',
    "rotary_pos_emb", as (positions, r). ShapeError where the angles end before the cache's longest sequence.
    """
    parts, same, cache = PARTS[name], freqs[0] is freqs[1], options.get("inference_params")
    inputs = {"x": layer}
    for part, own in zip("qk", freqs, strict=True):
        if part in parts:
            inputs["freqs" if part == "q" or same else "k_freqs"] = angles = placed("rotary_pos_emb", own)
            if cache is not None and angles.shape[0] < cache.max_seqlen_kv:
                wanted = f"at least the {cache.max_seqlen_kv} of the longest sequence in the cache"
                raise ShapeError(operation, "rotary_pos_emb", f"{angles.shape[0]} positions", wanted)
    if core.qkv_format == "thd":
        side = "q" if "q" in parts or cache is not None else "kv"
        for own_name, argument in (
            ("cu_seqlens", f"cu_seqlens_{side}"),
            ("cu_seqlens_padded", f"cu_seqlens_{side}_padded"),
        ):
            value = options.get(argument)
            if value is None and cache is not None and own_name == "cu_seqlens":
                value = cache.cu_seqlens_q
            if value is not None:
                inputs[own_name] = placed(argument, value)
    if cache is not None:
        sums = inputs.get("cu_seqlens")
        batch = layer.shape[core.qkv_format.index("b")] if sums is None else sums.shape[0] - 1
        inputs["start_positions"] = placed("rope_starts", cache.rope_starts(batch))
    return turned_segments(
        parts, core.num_attention_heads, core.num_gqa_groups, core.kv_channels, same
    ), inputs


def pair_of(operation: str, argument: str, value: Any) -> Sequence[Any]:
    """What an argument says of queries and of keys: a pair, or one for both. ShapeError for a sequence of
    another length."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ShapeError(operation, argument, f"{len(pair)} of them", "one, or a pair for queries and keys")
    return pair


# got, wanted of a padding mask
MISPLACED = ("padding before a true position", "padding after all true positions")


def want_padding(
    operation: str, shape: Sequence[int], lengths: tuple[int, int] | None, of_keys: bool
) -> None:
    """ShapeError for the shape of a padding mask that is not (b, 1, 1, s), s of ``lengths``, of queries and
    keys, where they are known."""
    if len(shape) != 4 or tuple(shape[1:3]) != (1, 1):
        raise ShapeError(operation, "attention_mask", f"shape {tuple(shape)}", "(batch, 1, 1, sequence)")
    if lengths is not None and shape[3] != lengths[of_keys]:
        wanted = (
            f"(batch, 1, 1, {lengths[of_keys]}) for {'keys' if of_keys else 'queries'}, "
            "a pair where the lengths differ"
        )
        raise ShapeError(operation, "attention_mask", f"shape {tuple(shape)}", wanted)


# --- recomputation ------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """What one call of an FP8 layer found in the first pass: the layer, copies of its forward scales (None
    where it has none), and cached weights, if it took any; arrays of a door."""

    owner: object
    scales: Any
    weights: Any


class Pass:
    """A pass over a checkpointed function: the ``first``, which fills ``calls``, or a later one, which reads
    them in the same order.

    A first pass may run within an outer checkpoint: ``above`` is that one's first pass, which remembers the
    calls too, or its later pass, which this one reads from.
    """

    def __init__(self, first: bool, calls: list[Kept], above: Pass | None = None) -> None:
        self.first, self.calls, self.above = first, calls, above
        self.position = 0

    def next(self, owner: object) -> Kept:
        """The next call, which must be of ``owner``; AutogradError otherwise."""
        kept = self.calls[self.position] if self.position < len(self.calls) else None
        if kept is None or kept.owner is not owner:
            got = f"{type(owner).__name__} as FP8 layer {self.position}"
            raise AutogradError(
                "checkpoint", "function", got, "the same layers in the same order as in the first pass"
            )
        self.position += 1
        return kept


class Passes(threading.local):
    """The pass that a door runs, thread by thread: ``running``, None outside of any."""

    def __init__(self) -> None:
        self.running: Any = None

    @contextmanager
    def within(self, running: Pass) -> Iterator[None]:
        """Around a pass."""
        before, self.running = self.running, running
        try:
            yield
        finally:
            self.running = before

    def first(self) -> bool:
        """Whether this is a checkpoint's first pass: perhaps unrecorded, but a training step all the same."""
        running = self.running
        return running is not None and running.first

    def recall(self, owner: object) -> Kept | None:
        """What this call of ``owner`` found in the first pass that is being recomputed; None where none
        is."""
        running = self.running
        if running is None:
            return None
        if not running.first:
            return running.next(owner)  # type: ignore[no-any-return]
        if running.above is None or running.above.first:
            return None
        running.calls.append(running.above.next(owner))
        return running.calls[-1]  # type: ignore[no-any-return]

    def keep(self, kept: Kept) -> None:
        """In a first pass: what a call found, for its later passes."""
        running = self.running
        while running is not None:
            running.calls.append(kept)
            running = running.above
