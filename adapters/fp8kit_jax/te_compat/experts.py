"""``transformer_engine.jax.permutation`` and ``transformer_engine.jax.router``: the functions of
``fp8kit_jax.moe`` with their signatures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jax

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit_jax import moe
from fp8kit_jax.moe import fused_moe_aux_loss as fused_moe_aux_loss
from fp8kit_jax.moe import sort_chunks_by_index as sort_chunks_by_index


class ScoreFunction(Enum):
    """What the router makes scores of logits by."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    SQRTSOFTPLUS = "sqrtsoftplus"


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
    score_function: ScoreFunction | str = ScoreFunction.SOFTMAX,
    expert_bias: Any = None,
    compute_aux_scores: bool = False,
) -> tuple[Any, Any]:
    """``fp8kit_jax.fused_topk_with_score_function``; ``score_function`` is its name or a ScoreFunction."""
    name = score_function.value if isinstance(score_function, ScoreFunction) else score_function
    groups = num_groups, group_topk, scaling_factor
    return moe.fused_topk_with_score_function(
        logits, topk, use_pre_softmax, *groups, name, expert_bias, compute_aux_scores
    )


def token_dispatch(
    inp: Any, routing_map: Any, num_out_tokens: int, probs: Any = None, align_size: int | None = None
) -> tuple[Any, Any, Any, Any, Any]:
    """``fp8kit_jax.token_dispatch``, with a RowIdMap; there are no offsets of padding, None."""
    y, row_probs, rows, offsets, sizes = moe.token_dispatch(
        inp, routing_map, num_out_tokens, probs, align_size
    )
    return y, row_probs, RowIdMap(rows, len(inp)), offsets, sizes


def token_combine(inp: Any, row_id_map: RowIdMap, merging_probs: Any = None, pad_offsets: Any = None) -> Any:
    """``fp8kit_jax.token_combine`` of a map of ``token_dispatch``, which knows the padding: ``pad_offsets``
    is None, as that function gave them."""
    op = "token_combine"
    if pad_offsets is not None:
        raise ArgumentError(op, "pad_offsets", shown(pad_offsets), "None, as token_dispatch gave them")
    if not isinstance(row_id_map, RowIdMap):
        raise ArgumentError(op, "row_id_map", shown(row_id_map), "the one that token_dispatch gave")
    tokens = row_id_map.tokens if merging_probs is None else None
    return moe.token_combine(inp, row_id_map.rows, merging_probs, tokens)
