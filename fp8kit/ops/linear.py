"""``linear``: y = x W^T + b (+ a residual), and ``weight_cast``: the FP8 weight alone, to be cached across
micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit.formats import float32
from fp8kit.ops import partition as split
from fp8kit.ops.partition import OneProduct, Partition
from fp8kit.ops.product import Product, ProductSpec, row_count, want, want_rows
from fp8kit.ops.products import product_of
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
class LinearSpec:
    """Static arguments of ``linear``: those of its product."""

    product: ProductSpec


class Linear(OneProduct):
    """y = x W^T + b, and + residual where there is one: the product adds it, and its gradient is y's own
    cotangent.

    Inputs: x h (..., in); weight0.. (out_i, in) or (in, out_i); bias0.. (out_i,); residual h like y or None;
    x_scale, w_scale float32 [1] (delayed scaling); with a cached weight ``weight_cast``'s outputs; with a
    cached input likewise, and x's own data are not read. Outputs: y h (..., out); x_amax, w_amax float32 [1].
    Gradients: x, weight*, bias*, residual, and g_amax; backward reads g_scale.
    """

    name = "linear"
    takes_codes = True
    arguments: ClassVar[Mapping[str, str]] = {"x": "inp", "weight0": "weight", "bias0": "bias"}

    def independent_rows(self, spec: LinearSpec, saved: Collection[str]) -> tuple[str, ...]:
        return ("x", "residual") if not saved and split.scaled_by_rows(spec.product) else ()

    def partitions(self, spec: LinearSpec, metas: Metas, views: Shapes) -> Partitions:
        p = spec.product
        if split.cached(p):
            return ()
        io = int(p.layout == "io")
        at = 0 if io else len(views.get("weight0", (0, 0))) - 1
        dims = ("x", -1, -1), ("weight0", at, 1 - io), ("w_qt", 0, 0), ("w_qt_inv", 0, 0)
        residual = "residual" if metas.get("residual") is not None else ""
        contraction = Partition("contraction", dims, ("y",), ("bias0",), residual)
        own_rows = split.rows(metas, views, "x", "residual")
        return (*own_rows, *split.features(p, metas, views), contraction)

    def _product(self, spec: LinearSpec, metas: Metas, needs: Needs) -> Product:
        x = want_rows(self.name, "x", metas, spec.product.in_features)
        return product_of(spec.product, row_count(x), x.dtype, "x" in needs, needs)

    def infer(self, spec: LinearSpec, metas: Metas, needs: Needs) -> Signature:
        p = self._product(spec, metas, needs)
        p.check(self.name, metas)
        x = want(self.name, "x", metas)
        y = Meta(p.y_shape(x.shape), x.dtype)
        if metas.get("residual") is not None:
            want(self.name, "residual", metas, y.shape, y.dtype)
        outputs = {"y": y} | p.outputs()
        kept = p.kept() + (("x",) if p.wgrad_reads_x and p.needs_w else ())
        grads = ({"x": x} if p.needs_x else {}) | p.grads()
        passed = {"residual": "y"} if "residual" in needs else {}
        return Signature(outputs, p.saved(), kept, grads, {}, passed, p.backward_inputs())

    def plan(self, spec: LinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        p = self._product(spec, metas, needs)
        space = workspace(p.workspace(kernels))
        passes = p.scratch() | space, p.backward_scratch() | p.bias_workspace(kernels) | space
        return Plan(spec, self.infer(spec, metas, needs), kernels, *passes, p)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        p: Product = plan.extra
        x, residual = ws.inputs["x"].rows(), ws.inputs.get("residual")
        p.cast_x(ws, x)
        p.fprop(ws, x, ws.outputs["y"].rows(), None if residual is None else residual.rows())

    def measure(self, plan: Plan, ws: WorkingSet) -> None:
        plan.extra.measure(ws, ws.inputs["x"].rows())

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        p: Product = plan.extra
        g, x = cotangents["y"].rows(), ws.inputs.get("x")
        p.cast_g(ws, g)
        if p.needs_x:
            p.dgrad(ws, g, ws.outputs["x"].rows())
        if p.needs_w:
            p.wgrad(ws, g, None if x is None else x.rows())
        if p.needs_x and p.begins_dx:
            p.finish(ws, ws.outputs["x"].rows())


class WeightCast(Operation):
    """The FP8 weight of a product, in both orientations: what ``weight_cached`` operations take.

    Inputs: weight0..; w_scale float32 [1] (delayed scaling). Outputs: w_q, w_qt uint8 and their scales (per
    tensor: w_scale_inv and w_amax, float32 [1]; by blocks: w_q_inv, w_qt_inv), see
    ``Product.weight_outputs``. Not differentiable: the gradient goes to the weight through the operation that
    uses it.
    """

    name = "weight_cast"

    def outputs(self, spec: LinearSpec) -> tuple[str, ...]:
        made = product_of(spec.product, 0, float32).weight_outputs()
        return tuple(name for name, meta in made.items() if not meta.zero)

    def _product(self, spec: LinearSpec, metas: Metas) -> Product:
        first = want(self.name, f"{spec.product.prefix}weight0", metas)
        return product_of(spec.product, 0, first.dtype)

    def infer(self, spec: LinearSpec, metas: Metas, needs: Needs) -> Signature:
        p = self._product(spec, metas)
        p.check_weights(self.name, metas)
        return Signature(p.weight_outputs())

    def plan(self, spec: LinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        p = self._product(spec, metas)
        return Plan(spec, self.infer(spec, metas, needs), kernels, p.cast_scratch(), {}, p)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        plan.extra.cast_weight(ws)


linear = Linear()
weight_cast = WeightCast()
