"""``transformer_engine.jax.permutation`` and ``transformer_engine.jax.router``: what differs from the
functions of ``fp8kit_jax.moe``, and the enumerations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.ops.router import RoutingMapFormat, map_format
from fp8kit_jax import moe


class ScoreFunction(IntEnum):
    """What makes scores of logits."""

    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowIdMap:
    """What ``token_combine`` takes: ``rows``, the map of ``fp8kit_jax.token_dispatch``, and the number of
    ``tokens``."""

    rows: Any
    tokens: int = field(metadata={"static": True})


def fused_topk_with_score_function(
    logits: Any,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: str | ScoreFunction = ScoreFunction.SOFTMAX,
    expert_bias: Any = None,
    compute_aux_scores: bool = False,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[Any, Any]:
    """``fp8kit_jax.fused_topk_with_score_function``. ``score_function``: a ``ScoreFunction``, or its name;
    ``routing_map_format``: a ``RoutingMapFormat``, its number or its name."""
    form = map_format("router", routing_map_format)
    name = score_function.name if isinstance(score_function, ScoreFunction) else score_function
    probs, routing_map = moe.fused_topk_with_score_function(
        logits,
        topk,
        use_pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        name.lower() if isinstance(name, str) else name,
        expert_bias,
        compute_aux_scores,
    )
    if form is RoutingMapFormat.BITMAP_U8:
        routing_map = jnp.packbits(routing_map, axis=-1, bitorder="little")
    return probs, routing_map


def token_dispatch(
    inp: Any,
    routing_map: Any,
    num_out_tokens: int,
    probs: Any = None,
    align_size: int | None = None,
    num_experts: int | None = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """``fp8kit_jax.token_dispatch``, with a RowIdMap; there are no offsets of padding, None. ``routing_map``:
    a bool array, or indices with ``num_experts``; a router's bitmap is to be unpacked first."""
    y, row_probs, rows, offsets, sizes = moe.token_dispatch(
        inp, routing_map, num_out_tokens, probs, align_size, num_experts
    )
    return y, row_probs, RowIdMap(rows, len(inp)), offsets, sizes


def token_combine(
    inp: Any,
    row_id_map: RowIdMap,
    merging_probs: Any = None,
    pad_offsets: Any = None,
    num_tokens: int | None = None,
) -> Any:
    """``fp8kit_jax.token_combine`` of a map of ``token_dispatch``, which knows the padding and the number of
    tokens: ``pad_offsets`` is None, as that function gave them, and ``num_tokens`` is not read."""
    op = "token_combine"
    if pad_offsets is not None:
        raise ArgumentError(op, "pad_offsets", shown(pad_offsets), "None, as token_dispatch gave them")
    if not isinstance(row_id_map, RowIdMap):
        raise ArgumentError(op, "row_id_map", shown(row_id_map), "the one that token_dispatch gave")
    tokens = row_id_map.tokens if merging_probs is None else None
    return moe.token_combine(inp, row_id_map.rows, merging_probs, tokens)


__all__ = [
    "RoutingMapFormat",
    "RowIdMap",
    "ScoreFunction",
    "fused_topk_with_score_function",
    "token_combine",
    "token_dispatch",
]
