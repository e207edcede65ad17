"""``drop_path``: y = residual + x, whole samples of x dropped (stochastic depth, Huang et al. 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import int32
from fp8kit.ops import partition as split
from fp8kit.ops.attention_spec import FORMATS, batch_of, check_starts
from fp8kit.ops.partition import Place
from fp8kit.ops.product import want, want_rng, want_rows
from fp8kit.ops.values import check_sequences
from fp8kit.spec import Meta, Metas, Needs, Operation, Partitions, Plan, Shapes, Signature, Views, WorkingSet


@dataclass(frozen=True)
class DropPathSpec:
    """``p``: probability of dropping a sample, in (0, 1], 1 drops them all. ``format``: where the samples
    lie: "sbhd" (s, b, N), "bshd" (b, s, N), or "thd" (t, N), where ``starts`` says it."""

    features: int
    p: float
    format: str = "sbhd"

    def __post_init__(self) -> None:
        if not 0.0 < self.p <= 1.0:
            raise FormatError("drop_path", "p", self.p, "a probability in (0, 1]")
        if self.format not in FORMATS:
            raise ShapeError("drop_path", "format", repr(self.format), f"one of {', '.join(FORMATS)}")


class DropPath(Operation):
    """y = residual + keep / (1 - p) * x, keep 0 or 1 for each sample: in the mean over the draws y = residual
    + x.

    Inputs: x h, its shape as ``spec.format`` says, of no rows too; residual h like x; rng int64 [2], or [3]
    with the number of the part (``place``); starts int32 (b + 1,) with "thd". Output y. The residual's
    gradient is y's own cotangent. ``forward`` raises ArgumentError for starts on the CPU that are no running
    sums.
    """

    name = "drop_path"

    def partitions(self, spec: DropPathSpec, metas: Metas, views: Shapes) -> Partitions:
        return split.rows(metas, views, "x", "residual") if spec.format == "bshd" else ()

    def place(self, spec: DropPathSpec, metas: Metas, parts: Mapping[str, tuple[Any, int]]) -> Place | None:
        return split.part_place(spec, parts)

    def _check(self, spec: DropPathSpec, metas: Metas) -> tuple[Meta, int, int]:
        """x, and rows from one sample to the next, and samples."""
        x = want_rows(self.name, "x", metas, spec.features)
        if len(x.shape) != len(spec.format) - 1:
            raise ShapeError(
                self.name, "x", f"shape {x.shape}", f"{', '.join(spec.format[:-2])} and the features"
            )
        want(self.name, "residual", metas, x.shape, x.dtype)
        want_rng(self.name, metas)
        starts = metas.get("starts")
        if (starts is None) == (spec.format == "thd"):
            got = None if starts is None else f"shape {starts.shape}"
            raise ShapeError(self.name, "starts", got, "int32 (batch + 1,) with 'thd', else None")
        if starts is not None:
            want(self.name, "starts", metas, starts.shape, int32)
            return x, 1, check_starts(self.name, "starts", starts.shape, x.shape[0])
        return x, x.shape[1] if spec.format == "bshd" else 1, batch_of(spec.format, x.shape)

    def infer(self, spec: DropPathSpec, metas: Metas, needs: Needs) -> Signature:
        x = self._check(spec, metas)[0]
        kept = ("rng", "starts") if spec.format == "thd" else ("rng",)
        passes = {"residual": "y"} if "residual" in needs else {}
        return Signature({"y": x}, {}, kept, {"x": x} if "x" in needs else {}, {}, passes)

    def plan(self, spec: DropPathSpec, metas: Metas, needs: Needs, kernels: object) -> Plan:
        _, inner, count = self._check(spec, metas)
        return Plan(spec, self.infer(spec, metas, needs), kernels, extra=(inner, count))

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        x = ws.inputs["x"]
        check_sequences(self.name, ws.inputs, "starts", x.shape[0])
        self._drop(plan, ws, x, ws.inputs["residual"].rows(), ws.outputs["y"])

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        if ws.outputs.get("x") is not None:
            self._drop(plan, ws, cotangents["y"], None, ws.outputs["x"])

    def _drop(self, plan: Plan, ws: WorkingSet, x: ArrayView, base: ArrayView | None, y: ArrayView) -> None:
        """y = base + keep / (1 - p) * x."""
        if x.size and plan.spec.p == 1.0:
            if base is None:
                arrays.fill_zero(y, ws.stream)
            else:
                ws.kernels.copy(base, y.rows(), ws.stream)
        elif x.size:
            starts_shape_and_draw = ws.inputs.get("starts"), *plan.extra, plan.spec.p, ws.inputs["rng"]
            ws.kernels.drop_path(x.rows(), base, y.rows(), *starts_shape_and_draw, ws.stream)


drop_path = DropPath()
