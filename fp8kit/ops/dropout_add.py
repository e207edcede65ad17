"""``dropout_add``: y = residual + dropout(x + bias), the end of every residual branch, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8kit.arguments import number
from fp8kit.arrays import Shape
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import HIGH_PRECISION, uint8
from fp8kit.ops import partition as split
from fp8kit.ops.partition import Partition, Place
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views


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

    def partitions(
        self, spec: DropoutAddSpec, metas: Metas, views: Mapping[str, Shape]
    ) -> tuple[Partition, ...]:
        return split.rows(metas, views, "x", "residual")

    def place(self, spec: DropoutAddSpec, metas: Metas, parts: Mapping[str, tuple[Any, int]]) -> Place | None:
        return split.part_place(spec, parts) if spec.p > 0 else None

    def infer(self, spec: DropoutAddSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        if metas.get("bias") is not None:
            want(self.name, "bias", metas, (spec.features,), x.dtype)
        if metas.get("residual") is not None:
            want(self.name, "residual", metas, x.shape, x.dtype)
        if spec.p > 0:
            split.want_rng(self.name, metas)
        passes = {"residual": "y"} if "residual" in needs else {}
        grads = {}
        if "x" in needs and spec.p == 0:
            passes["x"] = "y"
        elif "x" in needs:
            grads["x"] = Meta(x.shape, x.dtype)
        if "bias" in needs and spec.bias_grad:
            grads["bias"] = Meta((spec.features,), x.dtype)
        return Signature({"y": Meta(x.shape, x.dtype)}, {}, ("rng",) if spec.p > 0 else (), grads, {}, passes)

    def plan(self, spec: DropoutAddSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        x = want_rows(self.name, "x", metas, spec.features)
        space = {
            "workspace": Meta((max(kernels.column_sum_workspace(row_count(x), spec.features), 1),), uint8)
        }
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        x, y, residual = inputs["x"], outputs["y"], inputs.get("residual")
        assert x is not None and y is not None
        plan.kernels.dropout_add(
            x.rows(),
            inputs.get("bias"),
            None if residual is None else residual.rows(),
            y.rows(),
            plan.spec.p,
            inputs.get("rng"),
            stream,
        )

    def backward(
        self,
        plan: Plan,
        kept: Views,
        saved: Views,
        cotangents: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        dy, dx, dbias = cotangents["y"], grads.get("x"), grads.get("bias")
        assert dy is not None
        if dx is not None or dbias is not None:
            plan.kernels.dropout_bwd(
                dy.rows(),
                None if dx is None else dx.rows(),
                dbias,
                plan.spec.p,
                kept.get("rng"),
                scratch["workspace"],
                stream,
            )


@dataclass(frozen=True)
class AddSpec:
    """``add`` has no static arguments."""


class Add(Operation):
    """y = a + b. Inputs: a h, any shape; b the same dtype, its shape the end of a's (it repeats over the
    leading dimensions)."""

    name = "add"

    def _check(self, metas: Metas) -> tuple[Meta, Meta]:
        a, b = metas.get("a"), metas.get("b")
        if a is not None and a.dtype not in HIGH_PRECISION:
            raise FormatError(self.name, "a", a.dtype.name, ", ".join(d.name for d in HIGH_PRECISION))
        if a is None or b is None or a.dtype is not b.dtype:
            raise FormatError(
                self.name,
                "b",
                None if b is None else b.dtype.name,
                f"the dtype of a ({None if a is None else a.dtype.name})",
            )
        if len(b.shape) > len(a.shape) or a.shape[len(a.shape) - len(b.shape) :] != b.shape:
            raise ShapeError(self.name, "b", f"shape {b.shape}", f"the end of a's shape {a.shape}")
        return a, b

    def infer(self, spec: AddSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        a, b = self._check(metas)
        passes = {"a": "y"} if "a" in needs else {}
        grads = {}
        if "b" in needs and a.shape == b.shape:
            passes["b"] = "y"
        elif "b" in needs:
            grads["b"] = Meta(b.shape, b.dtype)
        return Signature({"y": Meta(a.shape, a.dtype)}, {}, (), grads, {}, passes)

    def plan(self, spec: AddSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        a, b = self._check(metas)
        columns = Meta((1, *b.shape), b.dtype)
        size = row_count(Meta((*b.shape, 1), b.dtype))
        rows = row_count(Meta((*a.shape, 1), a.dtype)) // max(size, 1)
        space = {
            "workspace": Meta(
                (max(kernels.column_sum_workspace(rows, row_count(Meta((*columns.shape, 1), b.dtype))), 1),),
                uint8,
            )
        }
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        plan.kernels.add(inputs["a"], inputs["b"], outputs["y"], stream)

    def backward(
        self,
        plan: Plan,
        kept: Views,
        saved: Views,
        cotangents: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        dy, db = cotangents["y"], grads.get("b")
        if db is not None:
            assert dy is not None
            plan.kernels.sum_rows(dy.reshape(-1, db.size), db.reshape(db.size), scratch["workspace"], stream)


dropout_add = DropoutAdd()
add = Add()
