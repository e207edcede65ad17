"""``norm_linear``: y = norm(x) W^T + b, with the residual stream going through.

The normalisation writes its result straight in FP8 (delayed scaling), in both orientations; in backward the
residual stream's gradient is added inside the normalisation's gradient, which saves a pass over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit.arrays import ArrayView
from fp8kit.buffers import free
from fp8kit.errors import FormatError
from fp8kit.ops import partition as split
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.partition import OneProduct
from fp8kit.ops.product import Product, ProductSpec, row_count
from fp8kit.ops.products import product_of
from fp8kit.spec import Meta, Metas, Needs, Partitions, Plan, Shapes, Signature, Views, WorkingSet, workspace


@dataclass(frozen=True)
class NormLinearSpec:
    """``residual``: x is also returned, as output "residual". ``return_norm``: norm(x) is also returned, as
    "normed"."""

    norm: NormSpec
    product: ProductSpec
    residual: bool = False
    return_norm: bool = False


@dataclass(frozen=True)
class NormStage:
    """A normalisation that feeds a product: the half that ``norm_linear`` and ``norm_mlp`` share. Where there
    is none (``NormSpec.identity``), x itself does."""

    norm: NormSpec
    product: Product
    x: Meta
    keep: bool  # norm(x) in high precision is an output or is saved
    as_output: bool

    @classmethod
    def of(
        cls, operation: str, norm: NormSpec, product: ProductSpec, as_output: bool, metas: Metas, needs: Needs
    ) -> NormStage:
        """Returns the half that ``operation`` runs. ShapeError or FormatError for x and the norm's
        parameters."""
        x = norm.check(operation, metas)
        if norm.identity and as_output:
            raise FormatError(operation, "return_norm", True, "False without a norm")
        above = bool(needs & {"x", *norm.inputs()})
        p = product_of(product, row_count(x), x.dtype, above, needs)
        keep = as_output or (p.wgrad_reads_x and p.needs_w and not norm.identity)
        return cls(norm, p, x, keep, as_output)

    @property
    def fused(self) -> bool:
        """Whether the normalisation writes the product's input in FP8."""
        return self.product.scales_known and not self.product.fprop_reads_x and not self.norm.identity

    def meta(self) -> Meta:
        """norm(x) as a matrix."""
        return Meta((self.product.m, self.product.k), self.x.dtype)

    def outputs(self) -> dict[str, Meta]:
        """norm(x) where it is asked for."""
        return {"normed": self.x} if self.as_output else {}

    def kept(self) -> tuple[str, ...]:
        """Returns what backward reads of the norm: its input and weight, and the output that high-precision
        wgrad reads, which is the input where there is no norm."""
        if self.norm.identity:
            return ("x",) if self.product.wgrad_reads_x and self.product.needs_w else ()
        return ("x", "norm_weight", *(("normed",) if self.as_output and self.product.wgrad_reads_x else ()))

    def saved(self) -> dict[str, Meta]:
        """Statistics, and norm(x) where high-precision wgrad reads it."""
        own = self.norm.saved(self.product.m)
        return own | {"normed": self.meta()} if self.keep and not self.as_output else own

    def scratch(self) -> dict[str, Meta]:
        """norm(x) where it is only passing through."""
        return {} if self.keep or self.fused or self.norm.identity else {"normed": self.meta()}

    def backward_scratch(self) -> dict[str, Meta]:
        """Backward's temporaries, the workspace aside."""
        own = {"dnormed": self.meta()} if self.product.needs_x and not self.norm.identity else {}
        return self.product.backward_scratch() | own

    def forward(self, ws: WorkingSet) -> ArrayView | None:
        """Normalise, and cast for the product; returns norm(x) in high precision, None where it was written
        in FP8 only."""
        if self.norm.identity:
            x = ws.inputs["x"].rows()
            self.product.cast_x(ws, x)
            return x
        p, views = self.product, ws.outputs if self.as_output else ws.saved if self.keep else ws.scratch
        normed = views.get("normed")
        if normed is not None:
            normed = normed.rows()
        taken = p.takes_amax("x")
        amax = ws.outputs[f"{p.spec.prefix}x_amax"] if taken else None
        self.norm.forward(ws, normed, amax, p.x_cast(ws) if self.fused else None)
        if not self.fused:
            assert normed is not None
            p.cast_x(ws, normed, amax_known=taken)
        return normed

    def measure(self, ws: WorkingSet) -> None:
        """Max-accumulate the amaxes of norm(x) and of the weight. Scratch: the plan's ``measure_scratch``."""
        amax = ws.outputs.get(f"{self.product.spec.prefix}x_amax")
        if amax is None:  # no operand has one scale for the whole tensor
            return
        if self.norm.identity:
            self.product.measure(ws, ws.inputs["x"].rows())
            return
        self.norm.forward(ws._replace(saved=ws.scratch), ws.scratch["normed"], amax)
        self.product.measure_weight(ws)

    def measure_scratch(self) -> dict[str, Meta]:
        """Temporaries of ``measure``."""
        return {"normed": self.meta()} | self.norm.saved(self.product.m)

    def backward(
        self, ws: WorkingSet, g: ArrayView | None, cotangents: Views, residual: ArrayView | None
    ) -> None:
        """Run the rest of backward from the product's output gradient ``g``, which is cast already, and whose
        sums have given the bias' gradient: write the gradients of the weight, of x and of the norm's
        parameters. Gradients of norm(x) and of the ``residual`` stream are added to that of x."""
        free(ws.scratch, "dh", "dact")  # of which ``g`` may be the last holder
        p, held = self.product, ws.inputs if self.as_output else ws.saved
        if self.norm.identity:
            self._backward_alone(ws, g, residual)
            return
        # the codes that dgrad reads may lie where wgrad writes
        if p.needs_x:
            p.dgrad(ws, g, ws.scratch["dnormed"])
        if p.needs_w:
            normed = held.get("normed")
            p.wgrad(ws, g, None if normed is None else normed.rows())
            del normed
            free(ws.saved, "normed")
        del g
        if p.needs_x:
            dnormed, extra = ws.scratch["dnormed"], cotangents.get("normed")
            if p.begins_dx:
                p.finish(ws, dnormed)
            if extra is not None:
                ws.kernels.add(dnormed, extra.rows(), dnormed, ws.stream)
            self.norm.backward(ws, dnormed, residual)

    def _backward_alone(self, ws: WorkingSet, g: ArrayView | None, residual: ArrayView | None) -> None:
        """``backward`` without a norm."""
        p = self.product
        if p.needs_x:
            p.dgrad(ws, g, ws.outputs["x"].rows())
        if p.needs_w:
            p.wgrad(ws, g, ws.inputs["x"].rows() if p.wgrad_reads_x else None)
        if p.needs_x:
            dx = ws.outputs["x"].rows()
            if p.begins_dx:
                p.finish(ws, dx)
            if residual is not None:
                ws.kernels.add(dx, residual.rows(), dx, ws.stream)


def further_outputs(spec: Any) -> tuple[str, ...]:
    """y, and what a spec of this half returns besides."""
    normed = ("normed",) if spec.return_norm else ()
    return ("y", *normed, "residual") if spec.residual else ("y", *normed)


class NormLinear(OneProduct):
    """y = norm(x) W^T + b.

    Inputs: those of ``norm`` and ``linear``. Outputs: y h (..., out); residual (x itself) and normed where
    asked for; x_amax, w_amax. Gradients: x (the residual stream's included), norm_weight, norm_bias, weight*,
    bias*, g_amax. Backward reads g_scale.
    """

    name = "norm_linear"
    arguments: ClassVar[Mapping[str, str]] = {
        "x": "inp",
        "norm_weight": "layer_norm_weight",
        "norm_bias": "layer_norm_bias",
        "weight0": "weight",
        "bias0": "bias",
    }

    def independent_rows(self, spec: NormLinearSpec, saved: Collection[str]) -> tuple[str, ...]:
        return ("x",) if not saved and split.scaled_by_rows(spec.product) else ()

    def partitions(self, spec: NormLinearSpec, metas: Metas, views: Shapes) -> Partitions:
        if split.cached(spec.product):
            return ()
        return (*split.rows(metas, views, "x"), *split.features(spec.product, metas, views))

    def _stage(self, spec: NormLinearSpec, metas: Metas, needs: Needs) -> NormStage:
        return NormStage.of(self.name, spec.norm, spec.product, spec.return_norm, metas, needs)

    def outputs(self, spec: NormLinearSpec) -> tuple[str, ...]:
        return further_outputs(spec)

    def infer(self, spec: NormLinearSpec, metas: Metas, needs: Needs) -> Signature:
        stage = self._stage(spec, metas, needs)
        p, x = stage.product, stage.x
        p.check(self.name, metas)
        outputs = {"y": Meta(p.y_shape(x.shape), x.dtype)} | p.outputs() | stage.outputs()
        kept = (*stage.kept(), *p.kept())
        grads = (spec.norm.grads(x) if p.needs_x else {}) | p.grads()
        passes = {"residual": "x"} if spec.residual else {}
        saved, scales = stage.saved() | p.saved(), p.backward_inputs()
        return Signature(outputs, saved, kept, grads, passes, backward_inputs=scales)

    def plan(self, spec: NormLinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        stage = self._stage(spec, metas, needs)
        p = stage.product
        space = workspace(max(p.workspace(kernels), kernels.norm_bwd_workspace(p.m, p.k)))
        backward = stage.backward_scratch() | p.bias_workspace(kernels) | space
        passes = p.scratch() | stage.scratch() | space, backward
        return Plan(spec, self.infer(spec, metas, needs), kernels, *passes, stage, stage.measure_scratch())

    def measure(self, plan: Plan, ws: WorkingSet) -> None:
        plan.extra.measure(ws)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        stage: NormStage = plan.extra
        stage.product.fprop(ws, stage.forward(ws), ws.outputs["y"].rows())

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        g = cotangents["y"].rows()
        plan.extra.product.cast_g(ws, g)
        plan.extra.backward(ws, g, cotangents, cotangents.get("residual"))


norm_linear = NormLinear()
