"""``norm_linear``: y = norm(x) W^T + b, with the residual stream going through.

The normalisation writes its result straight in FP8 (delayed scaling), in both orientations; in backward the
residual stream's gradient is added inside the normalisation's gradient, which saves a pass over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit.arrays import ArrayView, Shape
from fp8kit.buffers import free
from fp8kit.formats import uint8
from fp8kit.ops import partition as split
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.partition import OneProduct, Partition
from fp8kit.ops.product import Product, ProductSpec, row_count
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
    def delayed(self) -> bool:
        """Whether the normalisation writes the product's input in FP8."""
        return self.product.delayed

    def meta(self) -> Meta:
        """norm(x) as a matrix."""
        return Meta((self.product.m, self.product.k), self.x.dtype)

    def saved(self) -> dict[str, Meta]:
        """Statistics, and norm(x) where high-precision wgrad reads it."""
        own = self.norm.saved(self.product.m)
        return own | {"normed": self.meta()} if self.keep and not self.as_output else own

    def scratch(self) -> dict[str, Meta]:
        """norm(x) where it is only passing through."""
        return {} if self.keep or self.delayed else {"normed": self.meta()}

    def forward(
        self, k: Any, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> ArrayView | None:
        """Normalise, and cast for the product; returns norm(x) in high precision, None where it was written
        in FP8 only."""
        s, p = self.norm, self.product
        x = inputs["x"]
        assert x is not None
        normed = (
            outputs.get("normed")
            if self.as_output
            else saved.get("normed")
            if self.keep
            else scratch.get("normed")
        )
        if normed is not None:
            normed = normed.rows()
        cast = p.x_cast(inputs, outputs, saved, scratch) if self.delayed else None
        current = p.takes_amax("x")
        amax = outputs[f"{p.spec.prefix}x_amax"] if current else None
        k.norm_fwd(
            x.rows(),
            inputs["norm_weight"],
            inputs.get("norm_bias"),
            normed,
            saved.get("mean"),
            saved["rstd"],
            amax,
            cast,
            s.normalization,
            s.epsilon,
            s.zero_centered_gamma,
            stream,
        )
        if not self.delayed:
            assert normed is not None
            p.cast_x(k, normed, inputs, outputs, saved, scratch, stream, amax_known=current)
        return normed

    def measure(self, k: Any, inputs: Views, outputs: Views, scratch: Views, stream: int) -> None:
        """Max-accumulate the amaxes of norm(x) and of the weight. Scratch: the plan's ``measure_scratch``."""
        s, x, amax = self.norm, inputs["x"], outputs.get(f"{self.product.spec.prefix}x_amax")
        assert x is not None
        if amax is None:  # no operand has one scale for the whole tensor
            return
        k.norm_fwd(
            x.rows(),
            inputs["norm_weight"],
            inputs.get("norm_bias"),
            scratch["normed"],
            scratch.get("mean"),
            scratch["rstd"],
            amax,
            None,
            s.normalization,
            s.epsilon,
            s.zero_centered_gamma,
            stream,
        )
        self.product.measure_weight(k, inputs, outputs, stream)

    def measure_scratch(self) -> dict[str, Meta]:
        """Temporaries of ``measure``."""
        return {"normed": self.meta()} | self.norm.saved(self.product.m)

    def backward(
        self,
        k: Any,
        dnormed: ArrayView,
        kept: Views,
        saved: Views,
        residual: ArrayView | None,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        """Gradients of x and of the norm's parameters, the residual stream's gradient added."""
        x, dx = kept["x"], grads["x"]
        assert x is not None and dx is not None
        k.norm_bwd(
            dnormed,
            x.rows(),
            kept["norm_weight"],
            saved.get("mean"),
            saved["rstd"],
            None if residual is None else residual.rows(),
            dx.rows(),
            grads["norm_weight"],
            grads.get("norm_bias"),
            self.norm.normalization,
            self.norm.zero_centered_gamma,
            scratch["workspace"],
            stream,
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
        plan.extra.measure(plan.kernels, inputs, outputs, scratch, stream)

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        stage: NormStage = plan.extra
        y = outputs["y"]
        assert y is not None
        normed = stage.forward(plan.kernels, inputs, outputs, saved, scratch, stream)
        stage.product.fprop(plan.kernels, normed, inputs, outputs, saved, scratch, y.rows(), stream)

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
        p, k = stage.product, plan.kernels
        g = cotangents["y"]
        assert g is not None
        g2 = g.rows()
        p.cast_g(k, g2, kept, grads, scratch, stream)
        if p.needs_w:
            normed = kept.get("normed") if stage.as_output else saved.get("normed")
            p.wgrad(k, g2, None if normed is None else normed.rows(), saved, grads, scratch, stream)
            del normed
            free(saved, "normed")
        if p.needs_x:
            dnormed = scratch["dnormed"]
            assert dnormed is not None
            p.dgrad(k, g2, kept, saved, scratch, dnormed, stream)
            extra = cotangents.get("normed")
            if extra is not None:
                k.add(dnormed, extra.rows(), dnormed, stream)
            stage.backward(k, dnormed, kept, saved, cotangents.get("residual"), grads, scratch, stream)


norm_linear = NormLinear()
