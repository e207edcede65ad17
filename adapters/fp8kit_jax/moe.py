"""Mixture of experts: the router, tokens to rows by expert and back, under Transformer Engine's names in JAX.
Nothing waits for the device, and every function works inside ``jax.jit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit.arguments import flag, integer, shown
from fp8kit.backends.activation import ALL
from fp8kit.errors import ArgumentError, FormatError, ShapeError, on_behalf_of
from fp8kit.ops import router as ops
from fp8kit.ops.activation import ActivationSpec
from fp8kit.ops.activation import activation as activation_operation
from fp8kit.ops.permute import (
    MAP_ARGUMENTS,
    ExpertRowsSpec,
    PermuteSpec,
    UnpermuteSpec,
    check_map,
    dispatch_rows,
    expert_rows,
    permute,
    want_chunks,
)
from fp8kit.ops.permute import unpermute as unpermute_operation
from fp8kit.ops.scaled_activation import ScaledActivationSpec, scaled_activation, want_row_probs
from fp8kit_jax.activations import activation_of
from fp8kit_jax.arguments import as_array, as_number, as_rows, on_host
from fp8kit_jax.rules import apply


@on_behalf_of("fused_topk_with_score_function")
def fused_topk_with_score_function(
    logits: Any,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
    expert_bias: Any = None,
    compute_aux_scores: bool = False,
) -> tuple[Any, Any]:
    """(probs, routing_map): each token's probabilities, 0 for experts that are not chosen, and its choice,
    bool (..., E).

    * ``logits``: h (..., E), E at most 1024. ``topk``: experts of a token.
    * ``score_function``: "softmax", over the chosen logits, or with ``use_pre_softmax`` over all before top-k
      (not normalised again); "sigmoid" or "sqrtsoftplus", divided by their sum over the chosen + 1e-20 where
      ``topk`` is above 1.
    * ``num_groups``, ``group_topk``: experts lie in groups of equal size, by the sum of whose ``topk /
      group_topk`` largest scores ``group_topk`` groups are kept. -1 for no groups.
    * ``scaling_factor``: of the probabilities.
    * ``expert_bias``: float32 (E,), added to the scores for the choice alone; with "sigmoid" and
      "sqrtsoftplus". It has no gradient.
    * ``compute_aux_scores``: the scores of all experts instead, float32, and a plain top-k: what
      ``fused_moe_aux_loss`` takes; the options above but topk and score_function are not read.

    probs: h (..., E) like logits, differentiable in logits. Of equal scores the lowest expert is chosen
    first. Raises ShapeError, FormatError and ArgumentError when it is traced.
    """
    logits = as_rows("router", "logits", logits, "experts")
    if flag("router", "compute_aux_scores", compute_aux_scores):
        fields = ops.router_fields(logits, topk, False, None, None, None, score_function, dense=True)
        bias = None
    else:
        fields = ops.router_fields(
            logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function
        )
        bias = None if expert_bias is None else as_array("router", "expert_bias", expert_bias)
    out = apply(ops.router, ops.RouterSpec(*fields), {"logits": logits, "expert_bias": bias})
    return out["probs"], out["chosen"] != 0


@on_behalf_of("fused_moe_aux_loss", counts="tokens_per_expert")
def fused_moe_aux_loss(probs: Any, tokens_per_expert: Any, topk: int, coeff: float) -> Any:
    """coeff E / (topk T^2) times the sum of probs[t, e] tokens_per_expert[e]: a scalar of probs' dtype.

    ``probs``: h (T, E); ``tokens_per_expert``: int32 or float32 (E,). Differentiable in probs. Raises
    ShapeError, FormatError and ArgumentError when it is traced.
    """
    op = "fused_moe_aux_loss"
    probs = as_rows(op, "probs", probs, "experts")
    if probs.ndim != 2:
        raise ShapeError(op, "probs", f"shape {probs.shape}", "(tokens, experts)")
    tokens, experts = probs.shape
    factor = ops.aux_loss_factor(
        op, probs.shape, max(tokens, 1), experts, topk, as_number(op, "coeff", coeff, least=-float("inf"))
    )
    inputs = {"probs": probs, "counts": as_array(op, "tokens_per_expert", tokens_per_expert)}
    return apply(ops.moe_aux_loss, ops.AuxLossSpec(factor), inputs)["loss"].reshape(())


def token_dispatch(
    inp: Any,
    routing_map: Any,
    num_out_tokens: int,
    probs: Any = None,
    align_size: int | None = None,
    num_experts: int | None = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """(rows by expert, their probabilities or None, row_id_map, None, tokens_per_expert).

    * ``inp``: h (tokens, hidden).
    * ``routing_map``: a mask, bool or integer (tokens, E), not 0 where the token goes to the expert; with
      ``num_experts`` E indices, integer (tokens, k), those out of [0, E) none; bool and uint8 are masks then
      too. Rows of an expert keep the order of their tokens.
    * ``num_out_tokens``: number of rows; those behind the last expert's are 0, more are dropped. With
      ``align_size`` each expert's rows are filled up with zeros to a multiple of it, and there are as many
      rows as that can need: num_out_tokens + E (align_size - 1), rounded down to a multiple.
    * ``probs``: h (tokens, E), or (tokens, k) for indices; they go along.

    row_id_map: int32 (rows, 2), what ``token_combine`` takes, padding with it, so that there are no offsets
    of padding; tokens_per_expert: int32 (E,), padding with them: the ``group_sizes`` of ``grouped_dense``.
    Differentiable in inp and probs. Raises ShapeError, FormatError and ArgumentError when it is traced.
    """
    op = "token_dispatch"
    inp, routing = as_array(op, "inp", inp), as_array(op, "routing_map", routing_map)
    if jnp.issubdtype(routing.dtype, jnp.inexact):
        raise FormatError(op, "routing_map", routing.dtype.name, "bool or integers")
    mask = num_experts is None or routing.dtype in (jnp.bool_, jnp.uint8)
    routing = (routing != 0).astype(jnp.uint8) if mask else routing.astype(jnp.int32)
    weights = None if probs is None else as_array(op, "probs", probs)
    spec = ExpertRowsSpec(*dispatch_rows(inp, routing, num_out_tokens, align_size, num_experts))
    if weights is not None and weights.shape != routing.shape:
        raise ShapeError(op, "probs", f"shape {weights.shape}", f"{routing.shape}, as routing_map")
    with on_behalf_of(op, **MAP_ARGUMENTS):
        made = apply(expert_rows, spec, {"routing": routing})
        inputs = {"x": inp, "row_map": made["row_map"], "probs": weights}
        out = apply(permute, PermuteSpec(probs is not None), inputs)
    return out["y"], out.get("row_probs"), made["row_map"], None, made["sizes"]


def scaled_swiglu(inp: Any, probs: Any) -> Any:
    """SwiGLU whose rows are multiplied by probabilities (Transformer Engine's ScaledSwiGLU): silu(gate) up of
    ``inp`` h (..., 2 F), the gate's half first, rounded to its dtype, times ``probs``, h of any type, of
    inp's shape without the last dimension. Returns h (..., F). Differentiable in both. Raises ShapeError and
    FormatError when it is traced."""
    op = "scaled_swiglu"
    inp, probs = as_array(op, "inp", inp), as_array(op, "probs", probs)
    spec = ScaledActivationSpec("swiglu", want_row_probs(op, inp.shape, probs.shape))
    with on_behalf_of(op, x="inp"):
        return apply(scaled_activation, spec, {"x": inp, "probs": probs.reshape(-1)})["y"]


def expert_activation(
    operation: str,
    x: Any,
    activations: Sequence[str],
    params: Mapping[str, float] | None,
    group_sizes: Any,
    probs: Any,
    tokens_per_expert: Any,
) -> Any:
    """What lies between the products of a layer of experts, ``operation``: the activation of x h (rows, a F),
    its a parts one after the other, rounded, times the rows' ``probs``, (rows,); without, times 1 in rows of
    tokens and 0 in those of padding, where ``tokens_per_expert`` says which these are. Returns h (rows, F).
    ShapeError, FormatError, ArgumentError for what does not fit."""
    name, numbers = expert_kind(operation, activations, params)
    if tokens_per_expert is not None:
        if probs is not None:
            wanted = "None with probs, which are 0 in rows of padding"
            raise ArgumentError(operation, "tokens_per_expert", shown(tokens_per_expert), wanted)
        probs = _token_rows(operation, x, group_sizes, tokens_per_expert)
    if probs is None:
        return apply(activation_operation, ActivationSpec(name, x.shape[-1], numbers), {"x": x})["y"]
    probs, spec = as_array(operation, "probs", probs), ScaledActivationSpec(name, x.shape[-1], numbers)
    with on_behalf_of(operation):
        return apply(scaled_activation, spec, {"x": x, "probs": probs})["y"]


def expert_kind(
    operation: str, activations: Sequence[str], params: Mapping[str, float] | None
) -> tuple[str, tuple[float, ...]]:
    """fp8kit's name of an activation of experts, and its numbers. FormatError for one that there is not,
    ArgumentError for one whose numbers are learned."""
    name, numbers = activation_of(operation, activations, params)
    if ALL[name].learned:
        raise ArgumentError(operation, "activations", shown(activations), "those without learned numbers")
    return name, numbers


def _token_rows(operation: str, x: Any, group_sizes: Any, tokens_per_expert: Any) -> Any:
    """(rows of x,), of x's dtype: 1 for the first rows of each group, as many as are tokens, else 0."""
    sizes = as_array(operation, "group_sizes", group_sizes)
    counts = as_array(operation, "tokens_per_expert", tokens_per_expert)
    if counts.shape != sizes.shape:
        raise ShapeError(operation, "tokens_per_expert", f"shape {counts.shape}", f"{sizes.shape}")
    sizes, counts = sizes.astype(jnp.int32), counts.astype(jnp.int32)  # sums of small integers overflow
    ends, rows = jnp.cumsum(sizes), jnp.arange(x.shape[0])
    group = jnp.clip(jnp.searchsorted(ends, rows, side="right"), 0, sizes.size - 1)
    return (rows - (ends - sizes)[group] < counts[group]).astype(x.dtype)


def token_combine(inp: Any, row_id_map: Any, merging_probs: Any = None, num_tokens: int | None = None) -> Any:
    """The sum of each token's rows, times ``merging_probs`` where they are there: h (tokens, hidden), in
    float32, rounded once.

    ``inp``: h (rows, hidden); ``row_id_map``: as ``token_dispatch`` gave it; ``merging_probs``: h (tokens, E
    or k), or None with ``num_tokens``. Raises ShapeError, FormatError and ArgumentError when it is traced.
    """
    op = "token_combine"
    if merging_probs is None and num_tokens is None:
        raise ShapeError(op, "num_tokens", None, "the number of tokens, without merging_probs")
    tokens = -1 if num_tokens is None else integer(op, "num_tokens", num_tokens, 0, 2**31 - 1)
    x, row_map = as_array(op, "inp", inp), as_array(op, "row_id_map", row_id_map)
    weights = None if merging_probs is None else as_array(op, "merging_probs", merging_probs)
    if weights is not None and weights.ndim == 2:
        count, slots = weights.shape
        check_map(op, "row_id_map", on_host(row_map), count, slots)
    elif weights is None:
        check_map(op, "row_id_map", on_host(row_map), tokens, None)
    inputs = {"x": x, "row_map": row_map, "probs": weights}
    with on_behalf_of(op, probs="merging_probs", **MAP_ARGUMENTS):
        return apply(unpermute_operation, UnpermuteSpec(tokens), inputs)["y"]


def sort_chunks_by_index(inp: Any, split_sizes: Any, sorted_indices: Any) -> tuple[Any, Any]:
    """(``inp`` cut into chunks of ``split_sizes`` rows and put together again in the order
    ``sorted_indices``, the row map of that).

    ``inp``: h (rows, hidden); ``split_sizes``: integers (chunks,) that sum to rows; ``sorted_indices``:
    integers (chunks,), a permutation. Both may be on the device. Differentiable in inp. Raises ShapeError
    when it is traced, of values where they are known: lists and arrays on the CPU.
    """
    op = "sort_chunks_by_index"
    inp = as_array(op, "inp", inp)
    sizes, order = as_array(op, "split_sizes", split_sizes), as_array(op, "sorted_indices", sorted_indices)
    for name, array in (("split_sizes", sizes), ("sorted_indices", order)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise FormatError(op, name, array.dtype.name, "integers")
    if inp.ndim != 2 or sizes.ndim != 1 or sizes.shape != order.shape:
        got = f"{inp.shape}, {sizes.shape} and {order.shape}"
        raise ShapeError(
            op, "inp, split_sizes, sorted_indices", got, "(rows, hidden), (chunks,) and (chunks,)"
        )
    if _is_known(split_sizes) and _is_known(sorted_indices):
        want_chunks(op, ("split_sizes", "sorted_indices"), split_sizes, sorted_indices, inp.shape[0])
    sizes = sizes.astype(jnp.int32)
    starts, moved = (jnp.cumsum(sizes) - sizes)[order], sizes[order]
    shifts = jnp.repeat(starts - (jnp.cumsum(moved) - moved), moved, total_repeat_length=inp.shape[0])
    rows = jnp.arange(inp.shape[0]) + shifts
    row_map = jnp.stack((rows, jnp.zeros_like(rows)), 1).astype(jnp.int32)
    return apply(permute, PermuteSpec(), {"x": inp, "row_map": row_map})["y"], row_map


def _is_known(value: Any) -> bool:
    """Whether an array's values are there, without waiting for a device."""
    if isinstance(value, jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or all(each.platform == "cpu" for each in value.devices())
