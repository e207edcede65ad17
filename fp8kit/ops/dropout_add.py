"""``dropout_add``: y = residual + dropout(x + bias), the end of every residual branch, in one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8kit.arguments import number
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import HIGH_PRECISION
from fp8kit.ops import partition as split
from fp8kit.ops.partition import Place
from fp8kit.ops.product import row_count, want, want_rng, want_rows
from fp8kit.spec import (
    Meta,
    Metas,
    Needs,
    Operation,
    Partitions,
    Plan,
    Shapes,
    Signature,
    Views,
    WorkingSet,
    workspace,
)


@dataclass(frozen=True)
class DropoutAddSpec:
    """``p``: probability of dropping an element, in [0, 1). ``bias_grad``: whether the bias gradient is made
    here (False where the product before makes it, see ProductSpec.bias "deferred")."""

    features: int
    p: float = 0.0
    bias_grad: bool = True

    def __post_init__(self) -> None:
        number("dropout_add", "p", self.p, 1.0, FormatError)


class DropoutAdd(Operation):
    """y = residual + dropout(x + bias).

    Inputs: x h (..., N); bias h (N,) or None; residual h like x or None; where p > 0 rng int64 [2], or [3]
    with the number of the part (``place``). Output: y. The residual's gradient is y's own cotangent, and x's
    too where nothing is dropped: they take no pass and no memory.
    """

    name = "dropout_add"

    def partitions(self, spec: DropoutAddSpec, metas: Metas, views: Shapes) -> Partitions:
        return split.rows(metas, views, "x", "residual")

    def place(self, spec: DropoutAddSpec, metas: Metas, parts: Mapping[str, tuple[Any, int]]) -> Place | None:
        return split.part_place(spec, parts) if spec.p > 0 else None

    def infer(self, spec: DropoutAddSpec, metas: Metas, needs: Needs) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        if metas.get("bias") is not None:
            want(self.name, "bias", metas, (spec.features,), x.dtype)
        if metas.get("residual") is not None:
            want(self.name, "residual", metas, x.shape, x.dtype)
        if spec.p > 0:
            want_rng(self.name, metas)
        passes = {"residual": "y"} if "residual" in needs else {}
        grads = {}
        if "x" in needs and spec.p == 0:
            passes["x"] = "y"
        elif "x" in needs:
            grads["x"] = x
        if "bias" in needs and spec.bias_grad:
            grads["bias"] = Meta((spec.features,), x.dtype)
        return Signature({"y": x}, {}, ("rng",) if spec.p > 0 else (), grads, {}, passes)

    def plan(self, spec: DropoutAddSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        x = want_rows(self.name, "x", metas, spec.features)
        space = workspace(kernels.column_sum_workspace(row_count(x), spec.features))
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        x, residual = ws.inputs["x"].rows(), ws.inputs.get("residual")
        residual = None if residual is None else residual.rows()
        p, rng = plan.spec.p, ws.inputs.get("rng")
        ws.kernels.dropout_add(x, ws.inputs.get("bias"), residual, ws.outputs["y"].rows(), p, rng, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        dx, dbias = ws.outputs.get("x"), ws.outputs.get("bias")
        if dx is not None or dbias is not None:
            dx_and_dbias = None if dx is None else dx.rows(), dbias
            p, rng = plan.spec.p, ws.inputs.get("rng")
            space = ws.scratch["workspace"]
            ws.kernels.dropout_bwd(cotangents["y"].rows(), *dx_and_dbias, p, rng, space, ws.stream)


@dataclass(frozen=True)
class AddSpec:
    """``add`` has no static arguments."""


class Add(Operation):
    """y = a + b. Inputs: a h, any shape; b the same dtype, its shape the end of a's (it repeats over the
    leading dimensions)."""

    name = "add"

    def _check(self, metas: Metas) -> tuple[Meta, Meta]:
        a = want(self.name, "a", metas, None, *HIGH_PRECISION)
        b = want(self.name, "b", metas, None, a.dtype)
        if len(b.shape) > len(a.shape) or a.shape[len(a.shape) - len(b.shape) :] != b.shape:
            raise ShapeError(self.name, "b", f"shape {b.shape}", f"the end of a's shape {a.shape}")
        return a, b

    def infer(self, spec: AddSpec, metas: Metas, needs: Needs) -> Signature:
        a, b = self._check(metas)
        passes = {"a": "y"} if "a" in needs else {}
        grads = {}
        if "b" in needs and a.shape == b.shape:
            passes["b"] = "y"
        elif "b" in needs:
            grads["b"] = b
        return Signature({"y": a}, {}, (), grads, {}, passes)

    def plan(self, spec: AddSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        a, b = self._check(metas)
        size = math.prod(b.shape)
        space = workspace(kernels.column_sum_workspace(math.prod(a.shape) // max(size, 1), size))
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        ws.kernels.add(ws.inputs["a"], ws.inputs["b"], ws.outputs["y"], ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        db = ws.outputs.get("b")
        if db is not None:
            rows = cotangents["y"].reshape(-1, db.size)
            ws.kernels.sum_rows(rows, db.reshape(db.size), ws.scratch["workspace"], ws.stream)


dropout_add = DropoutAdd()
add = Add()
