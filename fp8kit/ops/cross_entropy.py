"""``cross_entropy``: softmax cross entropy of logits in one pass, and its gradient from the kept
log-sum-exp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fp8kit.arguments import choice, integer, number
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import float32, int32, int64
from fp8kit.ops import partition as split
from fp8kit.ops.partition import Mean
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.ops.values import check_indices
from fp8kit.spec import Meta, Metas, Needs, Operation, Partitions, Plan, Shapes, Signature, Views, WorkingSet


@dataclass(frozen=True)
class CrossEntropySpec:
    """``reduction``: "mean" over the targets that are not ``ignore_index``, or "none". ``label_smoothing`` in
    [0, 1)."""

    classes: int
    reduction: str = "mean"
    label_smoothing: float = 0.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        integer("cross_entropy", "classes", self.classes, 1, None, ShapeError)
        choice("cross_entropy", "reduction", self.reduction, ("mean", "none"), FormatError)
        number("cross_entropy", "label_smoothing", self.label_smoothing, 1.0, FormatError)
        integer("cross_entropy", "ignore_index", self.ignore_index, -(2**63), 2**63 - 1, FormatError)


class CrossEntropy(Operation):
    """Loss in nats. Inputs: logits h (..., V); targets int32 or int64 (...,). Output: loss float32, (1,) for
    "mean", targets' shape for "none". A target that is neither in [0, V) nor ``ignore_index`` is an
    ArgumentError of ``forward`` on the CPU; on a GPU, where targets are not checked, its row's loss is
    NaN."""

    name = "cross_entropy"
    results = ("loss",)
    arguments: ClassVar[Mapping[str, str]] = {"logits": "inp", "targets": "target"}

    def partitions(self, spec: CrossEntropySpec, metas: Metas, views: Shapes) -> Partitions:
        mean = Mean("loss", replace(spec, reduction="none"), "targets", spec.ignore_index, "total")
        return split.rows(metas, views, "logits", "targets", mean=mean if spec.reduction == "mean" else None)

    def infer(self, spec: CrossEntropySpec, metas: Metas, needs: Needs) -> Signature:
        logits = want_rows(self.name, "logits", metas, spec.classes)
        targets = want(self.name, "targets", metas, logits.shape[:-1], int32, int64)
        rows = row_count(logits)
        mean = spec.reduction == "mean"
        saved = {"lse": Meta((rows,), float32)} | ({"total": Meta((2,), float32)} if mean else {})
        loss = Meta((1,) if mean else targets.shape, float32)
        grads = {"logits": logits} if "logits" in needs else {}
        return Signature({"loss": loss}, saved, ("logits", "targets"), grads)

    def plan(self, spec: CrossEntropySpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature = self.infer(spec, metas, needs)
        scratch = {"rows": signature.saved["lse"]} if spec.reduction == "mean" else {}
        return Plan(spec, signature, kernels, scratch)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s: CrossEntropySpec = plan.spec
        logits, targets, loss = ws.inputs["logits"], ws.inputs["targets"], ws.outputs["loss"]
        total = ws.saved.get("total")
        check_indices(self.name, "targets", targets, s.classes, s.ignore_index)
        logits_and_targets = logits.rows(), targets.reshape(targets.size)
        losses = loss.reshape(loss.size) if total is None else ws.scratch["rows"]
        settings = s.label_smoothing, s.ignore_index, ws.stream
        ws.kernels.cross_entropy_fwd(*logits_and_targets, losses, ws.saved["lse"], total, *settings)
        if total is not None:
            ws.kernels.copy(total.slice(0, 0, 1), loss, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        s: CrossEntropySpec = plan.spec
        targets, dloss = ws.inputs["targets"], cotangents["loss"]
        logits_targets_and_lse = ws.inputs["logits"].rows(), targets.reshape(targets.size), ws.saved["lse"]
        sums = dloss.reshape(dloss.size), ws.saved.get("total")
        settings = s.label_smoothing, s.ignore_index, ws.stream
        ws.kernels.cross_entropy_bwd(*logits_targets_and_lse, *sums, ws.outputs["logits"].rows(), *settings)


cross_entropy = CrossEntropy()
