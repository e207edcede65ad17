"""``router``: which experts a token goes to, with what probability; ``moe_aux_loss``: the loss that keeps
experts evenly used. The rules are Transformer Engine's (``transformer_engine.pytorch.router``); of equal
scores the lowest expert is chosen first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from fp8kit.arguments import choice, flag, integer, is_integer, number, shown
from fp8kit.backends.protocol.router import MOST_EXPERTS, SCORES, Routing
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.formats import float32, int32, int64, uint8
from fp8kit.ops.partition import RowWise
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet, workspace


class RoutingMapFormat(IntEnum):
    """How a routing map is stored: BYTEMAP, bool (..., E); BITMAP_U8, uint8 (..., ceil(E / 8)), expert e the
    bit e % 8 of byte e // 8."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def map_format(operation: str, value: Any) -> RoutingMapFormat:
    """Returns a format by itself, its number or its name. FormatError otherwise."""
    names = {form.name: form for form in RoutingMapFormat}
    if isinstance(value, str) and value.upper() in names:
        return names[value.upper()]
    if is_integer(value) and value in (0, 1):
        return RoutingMapFormat(value)
    wanted = "RoutingMapFormat, or bytemap, bitmap_u8"
    raise FormatError(operation, "routing_map_format", shown(value), wanted)


@dataclass(frozen=True)
class RouterSpec:
    """``experts`` E, at most 1024; ``topk`` of them a token. ``score_function``: "softmax", "sigmoid" or
    "sqrtsoftplus"; ``use_pre_softmax``: softmax over all experts before top-k, not over the chosen ones.
    ``num_groups`` of equal size, of which ``group_topk`` are kept; 0 and 0 for none. ``scaling_factor``: of
    the probabilities. ``dense``: scores of all experts, for the auxiliary loss, beside a plain top-k."""

    experts: int
    topk: int
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 0
    scaling_factor: float = 1.0
    dense: bool = False

    def __post_init__(self) -> None:
        integer("router", "experts", self.experts, 1, MOST_EXPERTS, ShapeError)
        integer("router", "topk", self.topk, 1, self.experts)
        choice("router", "score_function", self.score_function, SCORES)
        flag("router", "use_pre_softmax", self.use_pre_softmax)
        number("router", "scaling_factor", self.scaling_factor, least=-float("inf"))
        groups = integer("router", "num_groups", self.num_groups, 0, self.experts)
        if not groups:
            integer("router", "group_topk", self.group_topk, 0, 0)
            return
        kept = integer("router", "group_topk", self.group_topk, 1, groups)
        size = self.experts // groups
        if self.experts % groups:
            raise ArgumentError("router", "num_groups", groups, f"a divisor of {self.experts} experts")
        if self.topk % kept or self.topk // kept > size:
            wanted = f"a multiple of group_topk {kept}, at most {kept} x {size}, the experts of those groups"
            raise ArgumentError("router", "topk", self.topk, wanted)

    @property
    def rule(self) -> Routing:
        """What the kernels take."""
        groups = self.num_groups, self.group_topk
        return Routing(
            self.score_function, self.topk, *groups, self.use_pre_softmax, self.scaling_factor, self.dense
        )


@dataclass(frozen=True)
class AuxLossSpec:
    """``factor``: loss = factor * sum over tokens and experts of probs * counts, divided by total^2 where
    there is a total."""

    factor: float

    def __post_init__(self) -> None:
        number("moe_aux_loss", "factor", self.factor, least=-float("inf"))


class Router(RowWise):
    """Probabilities and choice of experts, as ``protocol.Kernels.route`` says. Inputs: logits h (..., E);
    expert_bias float32 (E,) or None, not with softmax nor ``dense``; it has no gradient. Outputs: probs (...,
    E), like logits, of ``dense`` float32; chosen uint8 (..., E), 1 for the chosen experts. Gradient of
    logits, through the probabilities."""

    name = "router"
    results = ("probs", "chosen")
    by_rows = "logits"

    def infer(self, spec: RouterSpec, metas: Metas, needs: Needs) -> Signature:
        logits = want_rows(self.name, "logits", metas, spec.experts)
        if metas.get("expert_bias") is not None:
            if spec.score_function == "softmax" or spec.dense:
                how = "the scores of all experts" if spec.dense else "softmax"
                raise ArgumentError(self.name, "expert_bias", "an array", f"None with {how}")
            want(self.name, "expert_bias", metas, (spec.experts,), float32)
        if "expert_bias" in needs:
            raise ArgumentError(self.name, "expert_bias", "one that wants a gradient", "one without")
        probs = Meta(logits.shape, float32 if spec.dense else logits.dtype)
        grads = {"logits": logits} if "logits" in needs else {}
        kept = ("logits", "chosen") if grads else ()
        return Signature({"probs": probs, "chosen": Meta(logits.shape, uint8)}, {}, kept, grads)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        probs, chosen = ws.outputs["probs"].rows(), ws.outputs["chosen"].rows()
        logits, bias = ws.inputs["logits"].rows(), ws.inputs.get("expert_bias")
        ws.kernels.route(logits, bias, probs, chosen, plan.spec.rule, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        logits, chosen = ws.inputs["logits"].rows(), ws.inputs["chosen"].rows()
        dprobs, dlogits = cotangents["probs"].rows(), ws.outputs["logits"].rows()
        ws.kernels.route_bwd(logits, chosen, dprobs, dlogits, plan.spec.rule, ws.stream)


class AuxLoss(Operation):
    """loss = factor / total^2 * sum of probs[t, e] * counts[e] (Switch Transformer, Fedus et al. 2021, with
    factor = coefficient * E / topk). Inputs: probs h (..., E); counts int32, int64 or float32 (E,), the
    tokens of each expert; total int64 (1,) or None. Output: loss (1,), like probs. Gradient of probs."""

    name = "moe_aux_loss"
    results = ("loss",)
    arguments: ClassVar[dict[str, str]] = {"counts": "tokens_per_expert", "total": "total_num_tokens"}

    def infer(self, spec: AuxLossSpec, metas: Metas, needs: Needs) -> Signature:
        experts = (want(self.name, "probs", metas).shape or (0,))[-1]
        probs = want_rows(self.name, "probs", metas, experts)
        want(self.name, "counts", metas, (experts,), int32, int64, float32)
        if metas.get("total") is not None:
            want(self.name, "total", metas, (1,), int64)
        if "counts" in needs:
            raise ArgumentError(self.name, "counts", "one that wants a gradient", "one without")
        grads = {"probs": probs} if "probs" in needs else {}
        kept = tuple(n for n in ("counts", "total") if metas.get(n) is not None) if grads else ()
        return Signature({"loss": Meta((1,), probs.dtype)}, {}, kept, grads)

    def plan(self, spec: AuxLossSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature, probs = self.infer(spec, metas, needs), want(self.name, "probs", metas)
        scratch = workspace(kernels.aux_loss_workspace(row_count(probs), probs.shape[-1]))
        return Plan(spec, signature, kernels, scratch)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        i, factor, space = ws.inputs, plan.spec.factor, ws.scratch["workspace"]
        ws.kernels.aux_loss(
            i["probs"].rows(), i["counts"], i.get("total"), ws.outputs["loss"], factor, space, ws.stream
        )

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        i, dprobs = ws.inputs, ws.outputs["probs"].rows()
        ws.kernels.aux_loss_bwd(
            cotangents["loss"], i["counts"], i.get("total"), dprobs, plan.spec.factor, ws.stream
        )


def aux_loss_factor(
    operation: str,
    probs: tuple[int, ...],
    total: Any,
    num_experts: Any,
    topk: Any,
    coeff: Any,
    is_array: bool = False,
) -> float:
    """coeff * E / topk / total^2, without the total where that ``is_array``; ``probs``: their shape.
    ArgumentError for numbers out of their range, and an E that is not the last dimension of probs."""
    experts, k = integer(operation, "num_experts", num_experts, 1), integer(operation, "topk", topk, 1)
    if probs and experts != probs[-1]:
        raise ArgumentError(operation, "num_experts", experts, f"{probs[-1]}, the last dimension of probs")
    factor = number(operation, "coeff", coeff, least=-float("inf")) * experts / k
    return factor if is_array else factor / integer(operation, "total_num_tokens", total, 1) ** 2


def router_fields(
    logits: Any,
    topk: Any,
    use_pre_softmax: Any,
    num_groups: Any,
    group_topk: Any,
    scaling_factor: Any,
    score_function: Any,
    dense: bool = False,
) -> tuple[Any, ...]:
    """Returns the fields of a ``RouterSpec`` for Transformer Engine's arguments, where None, and -1, stand
    for no groups and None for a factor of 1. ShapeError or ArgumentError for values out of their range;
    ``RouterSpec`` refuses the rest."""
    shape = tuple(logits.shape)
    if not shape:
        raise ShapeError("router", "logits", "no dimension", "(..., experts)")
    groups, kept = (
        0 if value is None or (is_integer(value) and value == -1) else integer("router", name, value, 1)
        for name, value in (("num_groups", num_groups), ("group_topk", group_topk))
    )
    factor = (
        1.0
        if scaling_factor is None
        else number("router", "scaling_factor", scaling_factor, least=-float("inf"))
    )
    pre, k = flag("router", "use_pre_softmax", use_pre_softmax), integer("router", "topk", topk, 1)
    score = choice("router", "score_function", score_function, SCORES)
    if not groups and kept:
        raise ArgumentError("router", "num_groups", num_groups, f"a number of groups, with group_topk {kept}")
    if groups and not kept:
        wanted = f"how many groups are kept, with num_groups {groups}"
        raise ArgumentError("router", "group_topk", group_topk, wanted)
    return shape[-1], k, score, pre, groups, kept, factor, dense


router = Router()
moe_aux_loss = AuxLoss()
