"""``ContextGroup``: the ranks that divide sequences among them, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8kit.arguments import shown
from fp8kit.arrays import Shape
from fp8kit.collectives import Collectives, share
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit.ops.attention_spec import AttentionSpec

_PLACES = "its draws belong to places in the whole, of which a part of the rows knows nothing"
_SCORES = "scores (s_q, s_kv) are not divided"
_CORNER = "the chunks' diagonal starts at the first row"
_VANILLA = "'vanilla': each step of the ring would count the further score"


@dataclass(frozen=True)
class ContextGroup:
    """Which ranks divide the sequences. ``kind``: one of the ways of ``fp8kit.layers.context_parallel``;
    ``heads``: those that exchange heads for sequence; ``rows``: those among which rows stay divided. One of
    both may be None."""

    kind: str
    heads: Collectives | None
    rows: Collectives | None

    @property
    def size(self) -> int:
        """How many ranks divide a sequence."""
        return math.prod(ranks.size for ranks in (self.heads, self.rows) if ranks is not None)

    @property
    def rank(self) -> int:
        """This rank's place in the sequence."""
        inner = (0, 1) if self.heads is None else (self.heads.rank, self.heads.size)
        return inner[0] + (0 if self.rows is None else self.rows.rank * inner[1])


def context_group(
    operation: str, ranks: Sequence[Collectives | None], kind: Any, layer_number: int | None
) -> ContextGroup | None:
    """Returns the group of ``cp_group``, whose groups ``ranks`` are: one, or two with "a2a+p2p", that of the
    exchange first; None for one rank. ``kind``: ``cp_comm_type``, perhaps a list, for layers in turn.
    ArgumentError for another number of groups."""
    if isinstance(kind, list | tuple):
        at = (layer_number or 1) - 1
        if not 0 <= at < len(kind):
            wanted = f"one for layer {layer_number}"
            raise ArgumentError(operation, "cp_comm_type", shown(kind), wanted)
        kind = kind[at]
    both = kind == "a2a+p2p"
    found = [each for each in ranks if each is not None and each.size > 1]
    if len(ranks) != (2 if both else 1) and found:
        wanted = "two groups with 'a2a+p2p', of the exchange and of the ring, else one"
        raise ArgumentError(operation, "cp_group", f"{len(ranks)} groups with {kind!r}", wanted)
    if not found:
        return None
    if not both:
        return ContextGroup(kind, *((found[0], None) if kind == "a2a" else (None, found[0])))
    heads, rows = (each if each is not None and each.size > 1 else None for each in ranks)
    return ContextGroup(kind, heads, rows)


def whole_shape(form: str, shape: Shape, size: int) -> Shape:
    """Returns the shape of a layer whose sequences ``size`` ranks divide, undivided."""
    at = max(form.find("s"), 0)
    return (*shape[:at], size * shape[at], *shape[at + 1 :])


def check(operation: str, group: ContextGroup, spec: AttentionSpec, options: Mapping[str, Any]) -> None:
    """UnsupportedError for a call, of whole sequences, that ranks cannot share in this way; ArgumentError for
    heads that they do not divide."""
    rows, ring = group.rows is not None, group.rows is not None and group.kind != "all_gather"
    window = spec.window_size not in ((-1, -1), (-1, 0) if spec.causal else (-1, -1))
    masks = options.get("attention_mask") is not None and options.get("cu_seqlens_q") is None and spec.padded
    for refused, argument, got, wanted in (
        (spec.bias != "no_bias", "core_attention_bias_type", repr(spec.bias), f"'no_bias': {_SCORES}"),
        (spec.masked, "attn_mask_type", repr(spec.mask), f"another mask: {_SCORES}"),
        (masks, "attention_mask", "a mask", "cu_seqlens_q and cu_seqlens_kv, of the whole sequences"),
        (rows and spec.dropout > 0, "attention_dropout", spec.dropout, f"0: {_PLACES}"),
        (rows and spec.mask.endswith("right"), "attn_mask_type", repr(spec.mask), f"another mask: {_CORNER}"),
        (
            ring and window,
            "window_size",
            spec.window_size,
            "None: a step of the ring has no part of a window",
        ),
        (rows and window and not spec.causal, "window_size", spec.window_size, "a causal mask beside it"),
        (ring and spec.softmax_type != "vanilla", "softmax_type", repr(spec.softmax_type), _VANILLA),
    ):
        if refused:
            raise UnsupportedError(operation, argument, got, f"{wanted} (cp_comm_type {group.kind!r})")
    if group.heads is not None:
        for name, heads in (("num_attention_heads", spec.num_heads), ("num_gqa_groups", spec.num_gqa_groups)):
            share(heads, group.heads.size, operation, name)


def check_tokens(
    operation: str,
    group: ContextGroup,
    spec: AttentionSpec,
    layers: Mapping[str, Shape],
    sums: Mapping[str, np.ndarray[Any, Any]],
) -> None:
    """ShapeError for sequences that do not fall into chunks. ``layers``: shapes of the whole layers by side,
    "q" and "kv"; ``sums``: those running sums of the call that can be looked at."""
    count, form = 2 * group.size, spec.qkv_format
    lengths = {side: shape[max(form.find("s"), 0)] for side, shape in layers.items()}
    whole = spec.mask == "no_mask" and group.heads is None
    for side, length in lengths.items():
        if length % count and not whole:
            got, wanted = f"{length // group.size} tokens a rank", "an even number: two chunks"
            raise ShapeError(operation, f"tokens of {side}", got, wanted)
        starts = sums.get(f"cu_seqlens_{side}_padded", sums.get(f"cu_seqlens_{side}"))
        if spec.packed and starts is not None and (np.diff(starts) % count).any():
            wanted = f"lengths, gaps included, that are multiples of {count}, two chunks a rank"
            raise ShapeError(operation, f"cu_seqlens_{side}", np.diff(starts).tolist(), wanted)
    if group.rows is not None and spec.causal:
        same = [lengths["q"] == lengths["kv"]]
        for suffix in ("", "_padded"):
            own, other = (sums.get(f"cu_seqlens_{side}{suffix}") for side in ("q", "kv"))
            same.append(own is None or other is None or np.array_equal(own, other))
        if not all(same):
            got = f"{lengths['q']} and {lengths['kv']} tokens"
            wanted = f"sequences of one length for both, with a causal mask and {group.kind!r}"
            raise ShapeError(operation, "queries and keys", got, wanted)
