"""``norm_linear``: y = norm(x) W^T + b, with the residual stream going through.

The normalisation writes its result straight in FP8 (delayed scaling), in both orientations; in backward the
residual stream's gradient is added inside the normalisation's gradient, which saves a pass over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import Cast
from fp8kit.buffers import free
from fp8kit.formats import uint8
from fp8kit.ops import partition as split
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.partition import OneProduct, Partition
from fp8kit.ops.product import Product, ProductSpec, WorkingSet, row_count
from fp8kit.ops.products import product_of
from fp8kit.spec import Meta, Metas, Plan, Signature, Views


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
    """A normalisation that feeds a product: the half that ``norm_linear`` and ``norm_mlp`` share."""

    norm: NormSpec
    product: Product
    x: Meta
    keep: bool  # norm(x) in high precision is an output or is saved
    as_output: bool

    @property
    def fused(self) -> bool:
        """Whether the normalisation writes the product's input in FP8."""
        return self.product.scales_known

    def meta(self) -> Meta:
        """norm(x) as a matrix."""
        return Meta((self.product.m, self.product.k), self.x.dtype)

    def saved(self) -> dict[str, Meta]:
        """Statistics, and norm(x) where high-precision wgrad reads it."""
        own = self.norm.saved(self.product.m)
        return own | {"normed": self.meta()} if self.keep and not self.as_output else own

    def scratch(self) -> dict[str, Meta]:
        """norm(x) where it is only passing through."""
        return {} if self.keep or self.fused else {"normed": self.meta()}

    def forward(self, ws: WorkingSet) -> ArrayView | None:
        """Normalise, and cast for the product; returns norm(x) in high precision, None where it was written
        in FP8 only."""
        p, views = self.product, ws.outputs if self.as_output else ws.saved if self.keep else ws.scratch
        normed = views.get("normed")
        if normed is not None:
            normed = normed.rows()
        cast = p.x_cast(ws) if self.fused else None
        taken = p.takes_amax("x")
        amax = ws.outputs[f"{p.spec.prefix}x_amax"] if taken else None
        self._normalise(ws, normed, ws.saved, amax, cast)
        if not self.fused:
            assert normed is not None
            p.cast_x(ws, normed, amax_known=taken)
        return normed

    def measure(self, ws: WorkingSet) -> None:
        """Max-accumulate the amaxes of norm(x) and of the weight. Scratch: the plan's ``measure_scratch``."""
        amax = ws.outputs.get(f"{self.product.spec.prefix}x_amax")
        if amax is None:  # no operand has one scale for the whole tensor
            return
        self._normalise(ws, ws.scratch["normed"], ws.scratch, amax, None)
        self.product.measure_weight(ws)

    def _normalise(self, ws: WorkingSet, normed: Any, statistics: Any, amax: Any, cast: Cast | None) -> None:
        s, inputs = self.norm, ws.inputs
        parameters = inputs["norm_weight"], inputs.get("norm_bias")
        results = normed, statistics.get("mean"), statistics["rstd"], amax, cast
        how = s.normalization, s.epsilon, s.zero_centered_gamma
        ws.kernels.norm_fwd(inputs["x"].rows(), *parameters, *results, *how, ws.stream)

    def measure_scratch(self) -> dict[str, Meta]:
        """Temporaries of ``measure``."""
        return {"normed": self.meta()} | self.norm.saved(self.product.m)

    def backward(self, ws: WorkingSet, dnormed: ArrayView, residual: ArrayView | None) -> None:
        """Gradients of x and of the norm's parameters, the residual stream's gradient added."""
        kept, saved, grads = ws.inputs, ws.saved, ws.outputs
        ws.kernels.norm_bwd(
            dnormed,
            kept["x"].rows(),
            kept["norm_weight"],
            saved.get("mean"),
            saved["rstd"],
            None if residual is None else residual.rows(),
            grads["x"].rows(),
            grads["norm_weight"],
            grads.get("norm_bias"),
            self.norm.normalization,
            self.norm.zero_centered_gamma,
            ws.scratch["workspace"],
            ws.stream,
        )


class NormLinear(OneProduct):
    """y = norm(x) W^T + b.

    Inputs: those of ``norm`` and ``linear``. Outputs: y h (..., out); residual (x itself) and normed where
    asked for; x_amax, w_amax. Gradients: x (the residual stream's included), norm_weight, norm_bias, weight*,
    bias*, g_amax. Backward reads g_scale.
    """

    name = "norm_linear"
    streams = True
    parameters = ("weight", "bias")
    arguments: ClassVar[Mapping[str, str]] = {
        "x": "inp",
        "norm_weight": "layer_norm_weight",
        "norm_bias": "layer_norm_bias",
        "weight0": "weight",
        "bias0": "bias",
    }

    def independent_rows(self, spec: NormLinearSpec, saved: Collection[str]) -> tuple[str, ...]:
        return ("x",) if not saved and split.scaled_by_rows(spec.product) else ()

    def partitions(
        self, spec: NormLinearSpec, metas: Metas, views: Mapping[str, Shape]
    ) -> tuple[Partition, ...]:
        if split.cached(spec.product):
            return ()
        return (*split.rows(metas, views, "x"), *split.features(spec.product, metas, views))

    def _stage(self, spec: NormLinearSpec, metas: Metas, needs: frozenset[str]) -> NormStage:
        x = spec.norm.check(self.name, metas)
        above = bool(needs & {"x", *spec.norm.inputs()})
        weight, bias = (f"{spec.product.prefix}{name}" in needs for name in ("weight0", "bias0"))
        product = product_of(spec.product, row_count(x), x.dtype, above, weight, bias)
        keep = spec.return_norm or (spec.product.fp8 is None and product.needs_w)
        return NormStage(spec.norm, product, x, keep, spec.return_norm)

    def outputs(self, spec: NormLinearSpec) -> tuple[str, ...]:
        further = {"normed": spec.return_norm, "residual": spec.residual}
        return ("y", *(name for name, asked in further.items() if asked))

    def infer(self, spec: NormLinearSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        stage = self._stage(spec, metas, needs)
        p, x = stage.product, stage.x
        p.check(self.name, metas)
        outputs = {"y": Meta((*x.shape[:-1], p.n), x.dtype)} | p.outputs()
        if spec.return_norm:
            outputs["normed"] = Meta(x.shape, x.dtype)
        kept = (
            "x",
            "norm_weight",
            *p.kept(),
            *(("normed",) if spec.return_norm and spec.product.fp8 is None else ()),
        )
        grads = (spec.norm.grads(x) if p.needs_x else {}) | p.grads()
        passes = {"residual": "x"} if spec.residual else {}
        saved, scales = stage.saved() | p.saved(), p.backward_inputs()
        return Signature(outputs, saved, kept, grads, passes, backward_inputs=scales)

    def plan(self, spec: NormLinearSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        stage = self._stage(spec, metas, needs)
        p = stage.product
        space = max(p.workspace(kernels), kernels.norm_bwd_workspace(p.m, p.k), 1)
        common = {"workspace": Meta((space,), uint8)}
        backward = p.backward_scratch() | ({"dnormed": stage.meta()} if p.needs_x else {}) | common
        forward = p.scratch() | stage.scratch() | common
        return Plan(
            spec, self.infer(spec, metas, needs), kernels, forward, backward, stage, stage.measure_scratch()
        )

    def measure(self, plan: Plan, inputs: Views, outputs: Views, scratch: Views, stream: int) -> None:
        plan.extra.measure(WorkingSet(plan.kernels, inputs, outputs, {}, scratch, stream))

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        stage: NormStage = plan.extra
        ws = WorkingSet(plan.kernels, inputs, outputs, saved, scratch, stream)
        stage.product.fprop(ws, stage.forward(ws), ws.outputs["y"].rows())

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
        stage: NormStage = plan.extra
        p, ws = stage.product, WorkingSet(plan.kernels, kept, grads, saved, scratch, stream)
        g = cotangents["y"]
        assert g is not None
        g2 = g.rows()
        p.cast_g(ws, g2)
        if p.needs_w:
            normed = kept.get("normed") if stage.as_output else saved.get("normed")
            p.wgrad(ws, g2, None if normed is None else normed.rows())
            del normed
            free(saved, "normed")
        if p.needs_x:
            dnormed = ws.scratch["dnormed"]
            p.dgrad(ws, g2, dnormed)
            extra = cotangents.get("normed")
            if extra is not None:
                ws.kernels.add(dnormed, extra.rows(), dnormed, stream)
            stage.backward(ws, dnormed, cotangents.get("residual"))


norm_linear = NormLinear()
