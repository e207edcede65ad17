"""``norm_mlp``: y = act(norm(x) W1^T + b1) W2^T + b2, with the residual stream going through.

fc1's output is kept without its bias; the activation kernels add it on the way, write their result in FP8 for fc2, and in backward
give fc1's bias gradient and fc1's FP8 output gradient in the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fp8kit.errors import FormatError, ShapeError, expected
from fp8kit.formats import uint8
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormStage
from fp8kit.ops.product import Product, ProductSpec, row_count
from fp8kit.ops.products import product_of
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views

# activation -> columns of its input for one column of its output
ACTIVATIONS = {"gelu": 1, "relu": 1, "silu": 1, "swiglu": 2}


@dataclass(frozen=True)
class NormMLPSpec:
    """``fc1`` (prefix "fc1_", bias "deferred" or "none": the activation adds it) and ``fc2`` (prefix "fc2_"); see ``NormLinearSpec``."""

    norm: NormSpec
    fc1: ProductSpec
    fc2: ProductSpec
    activation: str = "gelu"
    residual: bool = False
    return_norm: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise FormatError(expected("norm_mlp", "activation", repr(self.activation), f"one of {', '.join(ACTIVATIONS)}"))
        if self.fc1.out_features != ACTIVATIONS[self.activation] * self.fc2.in_features:
            wanted = f"{ACTIVATIONS[self.activation]} * {self.fc2.in_features} for {self.activation}"
            raise ShapeError(expected("norm_mlp", "fc1", f"{self.fc1.out_features} output features", wanted))
        if self.fc1.bias == "add":
            object.__setattr__(self, "fc1", replace(self.fc1, bias="deferred"))


@dataclass(frozen=True)
class _Stages:
    norm: NormStage
    fc2: Product

    @property
    def fc1(self) -> Product:
        return self.norm.product

    @property
    def delayed(self) -> bool:
        """Whether the activation writes fc2's input, and its gradient fc1's output gradient, in FP8."""
        return self.fc2.delayed

    @property
    def reach(self) -> bool:
        """Whether a gradient is wanted beyond fc2."""
        return self.fc2.needs_x


class NormMLP(Operation):
    """y = act(norm(x) W1^T + b1) W2^T + b2.

    Inputs: x h (..., hidden), norm_weight, norm_bias, fc1_weight0, fc1_bias0, fc2_weight0, fc2_bias0, and per product (prefix "fc1_",
    "fc2_") x_scale, w_scale or the cached weight. Outputs: y; residual (x itself) and normed where asked for; amaxes. Gradients of all
    of them; backward reads fc1_g_scale and fc2_g_scale.
    """

    name = "norm_mlp"

    def _stages(self, spec: NormMLPSpec, metas: Metas, needs: frozenset[str]) -> _Stages:
        x = spec.norm.check(self.name, metas)
        rows = row_count(x)
        above = bool(needs & {"x", *spec.norm.inputs()})
        fc1 = product_of(spec.fc1, rows, x.dtype, above, "fc1_weight0" in needs, "fc1_bias0" in needs)
        reach = fc1.needs_x or fc1.needs_w or fc1.needs_b
        fc2 = product_of(spec.fc2, rows, x.dtype, reach, "fc2_weight0" in needs, "fc2_bias0" in needs)
        keep = spec.return_norm or (spec.fc1.fp8 is None and fc1.needs_w)
        return _Stages(NormStage(spec.norm, fc1, x, keep, spec.return_norm), fc2)

    def infer(self, spec: NormMLPSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        st = self._stages(spec, metas, needs)
        fc1, fc2, x = st.fc1, st.fc2, st.norm.x
        fc1.check(self.name, metas)
        fc2.check(self.name, metas)
        outputs = {"y": Meta((*x.shape[:-1], fc2.n), x.dtype)} | fc1.outputs() | fc2.outputs()
        if spec.return_norm:
            outputs["normed"] = Meta(x.shape, x.dtype)
        saved = st.norm.saved() | fc1.saved() | fc2.saved()
        if st.reach:
            saved["h"] = Meta((fc1.m, fc1.n), x.dtype)
        if fc2.needs_w and spec.fc2.fp8 is None:
            saved["act"] = Meta((fc2.m, fc2.k), x.dtype)
        kept = (
            "x",
            "norm_weight",
            *(fc1.biases if st.reach else ()),
            *fc1.kept(),
            *fc2.kept(),
            *(("normed",) if spec.return_norm and spec.fc1.fp8 is None else ()),
        )
        grads = (spec.norm.grads(x) if fc1.needs_x else {}) | fc1.grads() | fc2.grads()
        return Signature(outputs, saved, kept, grads, {"residual": "x"} if spec.residual else {})

    def plan(self, spec: NormMLPSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        st = self._stages(spec, metas, needs)
        fc1, fc2, x = st.fc1, st.fc2, st.norm.x
        signature = self.infer(spec, metas, needs)
        space = max(
            fc1.workspace(kernels),
            fc2.workspace(kernels),
            kernels.norm_bwd_workspace(fc1.m, fc1.k),
            kernels.act_bwd_workspace(fc1.m, fc1.n),
            1,
        )
        common = {"workspace": Meta((space,), uint8)}
        forward = st.norm.scratch() | fc1.scratch() | fc2.scratch() | common
        if "h" not in signature.saved:
            forward["h"] = Meta((fc1.m, fc1.n), x.dtype)
        if "act" not in signature.saved and not st.delayed:
            forward["act"] = Meta((fc2.m, fc2.k), x.dtype)
        backward = fc1.backward_scratch() | fc2.backward_scratch() | common
        if st.reach:
            backward["dact"] = Meta((fc2.m, fc2.k), x.dtype)
            if not st.delayed or not (fc1.needs_x or fc1.needs_w):
                backward["dh"] = Meta((fc1.m, fc1.n), x.dtype)
        if fc1.needs_x:
            backward["dnormed"] = st.norm.meta()
        return Plan(spec, signature, kernels, forward, backward, st, st.norm.measure_scratch())

    def measure(self, plan: Plan, inputs: Views, outputs: Views, scratch: Views, stream: int) -> None:
        st: _Stages = plan.extra
        st.norm.measure(plan.kernels, inputs, outputs, scratch, stream)
        st.fc2.measure_weight(plan.kernels, inputs, outputs, stream)

    def forward(self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        st: _Stages = plan.extra
        spec: NormMLPSpec = plan.spec
        k, fc1, fc2 = plan.kernels, st.fc1, st.fc2
        x, y = inputs["x"], outputs["y"]
        h = saved.get("h") or scratch.get("h")
        act = saved.get("act") or scratch.get("act")
        assert x is not None and y is not None and h is not None
        normed = st.norm.forward(k, inputs, outputs, saved, scratch, stream)
        fc1.fprop(k, normed if normed is not None else x.rows(), inputs, outputs, saved, scratch, h, stream)
        current = fc2.takes_amax("x")
        cast = fc2.x_cast(inputs, outputs, saved, scratch) if st.delayed else None
        k.act_fwd(h, inputs.get("fc1_bias0"), act, outputs["fc2_x_amax"] if current else None, cast, spec.activation, stream)
        if not st.delayed:
            assert act is not None
            fc2.cast_x(k, act, inputs, outputs, saved, scratch, stream, amax_known=current)
        fc2.fprop(k, act if act is not None else h, inputs, outputs, saved, scratch, y.rows(), stream)

    def backward(self, plan: Plan, kept: Views, saved: Views, cotangents: Views, grads: Views, scratch: Views, stream: int) -> None:
        st: _Stages = plan.extra
        spec: NormMLPSpec = plan.spec
        k, fc1, fc2 = plan.kernels, st.fc1, st.fc2
        g = cotangents["y"]
        assert g is not None
        g2 = g.rows()
        fc2.cast_g(k, g2, kept, grads, scratch, stream)
        if fc2.needs_w:
            fc2.wgrad(k, g2, saved.get("act"), saved, grads, scratch, stream)
        if not st.reach:
            return
        dact, h, dh = scratch["dact"], saved["h"], scratch.get("dh")
        assert dact is not None and h is not None
        fc2.dgrad(k, g2, kept, saved, scratch, dact, stream)
        products = fc1.needs_x or fc1.needs_w
        fused = st.delayed and products
        current = fc1.takes_amax("g") and products
        k.act_bwd(
            dact,
            h,
            kept.get("fc1_bias0"),
            dh,
            grads.get("fc1_bias0"),
            grads["fc1_g_amax"] if current else None,
            fc1.g_cast(kept, grads, scratch) if fused else None,
            spec.activation,
            scratch["workspace"],
            stream,
        )
        if products and not fused:
            assert dh is not None
            fc1.cast_g(k, dh, kept, grads, scratch, stream, with_bias=False, amax_known=current)
        dh_or_act = dh if dh is not None else dact  # read in high precision only
        if fc1.needs_w:
            normed = kept.get("normed") if st.norm.as_output else saved.get("normed")
            fc1.wgrad(k, dh_or_act, None if normed is None else normed.rows(), saved, grads, scratch, stream)
        if fc1.needs_x:
            dnormed = scratch["dnormed"]
            assert dnormed is not None
            fc1.dgrad(k, dh_or_act, kept, saved, scratch, dnormed, stream)
            extra = cotangents.get("normed")
            if extra is not None:
                k.add(dnormed, extra.rows(), dnormed, stream)
            st.norm.backward(k, dnormed, kept, saved, cotangents.get("residual"), grads, scratch, stream)


norm_mlp = NormMLP()
