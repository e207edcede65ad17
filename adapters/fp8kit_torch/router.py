"""The router of a mixture of experts under Transformer Engine's names: top-k with scores, and the auxiliary
loss. Arithmetic is in float32; of equal scores the lowest expert is chosen first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import integer, shown
from fp8kit.errors import ShapeError, UnsupportedError
from fp8kit.ops import router as ops
from fp8kit.ops.router import RoutingMapFormat, map_format
from fp8kit_torch.call import apply
from fp8kit_torch.checks import check, named, optional, refusals_of, tensor
from fp8kit_torch.specs import spec_for

_RULES = {
    **named(tensor, "logits probs tokens_per_expert"),
    **named(optional(tensor), "expert_bias topk_indices"),
}


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(probs, routing_map): each token's probabilities, 0 for experts that are not chosen, and its choice.

    * ``logits``: float32, bfloat16 or float16 (..., E), E at most 1024. ``topk``: experts of a token.
    * ``score_function``: "softmax", over the chosen logits, or with ``use_pre_softmax`` over all before top-k
      (not normalised again); "sigmoid" or "sqrtsoftplus", divided by their sum over the chosen + 1e-20 where
      ``topk`` is above 1.
    * ``num_groups``, ``group_topk``: experts lie in groups of equal size, by the sum of whose ``topk /
      group_topk`` largest scores ``group_topk`` groups are kept. None for no groups.
    * ``scaling_factor``: of the probabilities; None is 1.
    * ``expert_bias``: float32 (E,), added to the scores for the choice alone; with "sigmoid" and
      "sqrtsoftplus".
    * ``routing_map_format``: a ``RoutingMapFormat`` or its name.
    * ``topk_indices``: an integer buffer (..., topk) that is filled with the chosen experts, ascending, and
      returned instead of the map.
    * ``qb_histogram``, ``qb_bin_bounds``, ``qb_histogram_mode``: None only.

    probs: (..., E) of logits' dtype, differentiable in logits. Raises ShapeError, FormatError, ArgumentError.
    """
    op = "fused_topk_with_score_function"
    if not torch.compiler.is_compiling():
        check(op, _RULES, locals())
    if not (qb_histogram is None and qb_bin_bounds is None and qb_histogram_mode is None):
        raise UnsupportedError(op, "qb_histogram", "a histogram", "None: no histogram is kept")
    form = map_format(op, routing_map_format)
    given = topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function
    bias = None if expert_bias is None else expert_bias.detach().float()
    fields, out = _routed(op, logits, given, bias)
    if topk_indices is None:
        return out["probs"], _formatted(out["chosen"], form)
    wanted = (*logits.shape[:-1], fields[1])
    if topk_indices.shape != wanted or topk_indices.is_floating_point() or topk_indices.is_complex():
        raise ShapeError(op, "topk_indices", shown(topk_indices), f"integers of shape {wanted}")
    order = torch.sort(out["chosen"], dim=-1, descending=True, stable=True).indices
    return out["probs"], topk_indices.copy_(order[..., : fields[1]])


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str | int = RoutingMapFormat.BYTEMAP
) -> tuple[Tensor, Tensor]:
    """(routing_map, scores) for ``fused_moe_aux_loss``: a plain top-k, and float32 (..., E): softmax over all
    experts, or s / (sum of all s + 1e-20). Arguments as ``fused_topk_with_score_function``."""
    op = "fused_compute_score_for_moe_aux_loss"
    if not torch.compiler.is_compiling():
        check(op, _RULES, locals())
    form = map_format(op, routing_map_format)
    _, out = _routed(op, logits, (topk, False, None, None, None, score_function), dense=True)
    return _formatted(out["chosen"], form), out["probs"]


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """coeff E / (topk T^2) times the sum of probs[t, e] tokens_per_expert[e]: a scalar of probs' dtype.

    ``probs``: float32, bfloat16 or float16 (tokens, E), with E = ``num_experts``; ``tokens_per_expert``:
    int32, int64 or floating (E,); ``total_num_tokens``: T, an int, or an int64 tensor of one element, which
    is read on the device. Differentiable in probs. Raises ShapeError, FormatError and ArgumentError.
    """
    op = "fused_moe_aux_loss"
    if not torch.compiler.is_compiling():
        check(op, _RULES, locals())
    counts, inputs = tokens_per_expert.detach(), {"probs": probs}
    total = total_num_tokens if isinstance(total_num_tokens, Tensor) else None
    if total is None and torch.compiler.is_compiling():  # one graph for every number, with the same bits
        count = integer(op, "total_num_tokens", total_num_tokens, 1)
        total = probs.new_full((1,), count, dtype=torch.int64)
    if total is not None:
        if total.dtype is not torch.int64 or total.numel() != 1:
            raise ShapeError(
                op, "total_num_tokens", shown(total), "an int, or an int64 tensor of one element"
            )
        inputs["total"] = total.reshape(1)
    inputs["counts"] = counts.float() if counts.is_floating_point() else counts
    numbers = total_num_tokens, num_experts, topk, coeff
    factor = ops.aux_loss_factor(op, tuple(probs.shape), *numbers, total is not None)
    spec = spec_for("AuxLossSpec", factor)
    with refusals_of(op, counts="tokens_per_expert"):
        return apply(ops.moe_aux_loss, spec, inputs)["loss"].reshape(())


def _routed(
    op: str, logits: Tensor, given: tuple[Any, ...], bias: Tensor | None = None, dense: bool = False
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """The fields of the router's spec and its outputs."""
    inputs = {"logits": logits, "expert_bias": bias}
    with refusals_of(op):
        fields = ops.router_fields(logits, *given, dense=dense)
        return fields, apply(ops.router, spec_for("RouterSpec", *fields), inputs)


def _formatted(chosen: Tensor, form: RoutingMapFormat) -> Tensor:
    """The map uint8 (..., E) as that format has it."""
    if form is RoutingMapFormat.BYTEMAP:
        # compiled for a CPU, a view of another dtype is C++ that does not compile (torch 2.13)
        return chosen != 0 if torch.compiler.is_compiling() else chosen.view(torch.bool)
    missing = -chosen.shape[-1] % 8
    whole = torch.nn.functional.pad(chosen, (0, missing)).unflatten(-1, (-1, 8))
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=chosen.device)
    return (whole * bits).sum(-1, dtype=torch.uint8)
