"""``transformer_engine.jax.router``, with its enumerations, and the way back of ``permutation``."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

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


def token_combine(
    inp: Any,
    row_id_map: Any,
    merging_probs: Any = None,
    pad_offsets: Any = None,
    num_tokens: int | None = None,
) -> Any:
    """``fp8kit_jax.token_combine``. ``pad_offsets``: None, as ``token_dispatch`` gives it."""
    if pad_offsets is not None:
        wanted = "None, as token_dispatch gives it: row_id_map has the padding"
        raise ArgumentError("token_combine", "pad_offsets", shown(pad_offsets), wanted)
    return moe.token_combine(inp, row_id_map, merging_probs, num_tokens)


__all__ = ["RoutingMapFormat", "ScoreFunction", "fused_topk_with_score_function", "token_combine"]
