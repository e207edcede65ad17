"""``gated_mlp``: y = (act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd, with three weights that are each quantised
by itself: three ``linear`` and what stands between them, in fewer passes.

x is cast once for both of its products. Their outputs lie side by side as the activation's kernels read them,
which write the cast for the third product, and in backward those of both output gradients, each by its own
scale. Under delayed scaling alone: what is cast on the way has a scale that is known before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.buffers import free, free_contents
from fp8kit.errors import FormatError, ShapeError, UnsupportedError
from fp8kit.formats import float32
from fp8kit.ops.partition import Products
from fp8kit.ops.product import ProductSpec, row_count, want, want_rows
from fp8kit.ops.product_quantized import AMAX
from fp8kit.ops.product_tensor import TensorProduct
from fp8kit.ops.products import product_class, product_of
from fp8kit.quantization import Quantization
from fp8kit.spec import Meta, Metas, Needs, Plan, Signature, Views, WorkingSet, workspace


def is_fused(fp8: Quantization | None) -> bool:
    """Whether ``gated_mlp`` computes products that are quantised so: with scales of whole tensors that are
    known before, in all three GEMMs."""
    if fp8 is None or not all(own.needs_state for own in (fp8.x, fp8.w, fp8.g)):
        return False
    if fp8.needs_rng or any(gemm.compute != "quantized" for gemm in fp8.gemms.values()):
        return False
    return product_class(fp8) is TensorProduct


def gated_activations() -> tuple[str, ...]:
    """Names of the activations that ``gated_mlp`` has: gated ones without numbers."""
    return tuple(name for name, row in ACTIVATIONS.items() if row.gated and not row.params)


@dataclass(frozen=True)
class GatedMLPSpec:
    """``gate`` (prefix "gate_"), ``up`` ("up_"), ``down`` ("down_"): one segment each, quantised as
    ``is_fused`` says. ``activation``: one of ``gated_activations``."""

    gate: ProductSpec
    up: ProductSpec
    down: ProductSpec
    activation: str = "swiglu"

    def __post_init__(self) -> None:
        if self.activation not in gated_activations():
            wanted = f"one of {', '.join(gated_activations())}"
            raise FormatError("gated_mlp", "activation", repr(self.activation), wanted)
        for name in ("gate", "up", "down"):
            own: ProductSpec = getattr(self, name)
            plain = not (own.weight_cached or own.input_cached or own.watch or own.parallel)
            if not (plain and len(own.segments) == 1 and own.bias != "deferred" and is_fused(own.fp8)):
                wanted = "one weight in high precision, with delayed scaling of whole tensors in all GEMMs"
                raise FormatError("gated_mlp", name, own, wanted)
        found = self.up.in_features, self.up.out_features, self.down.in_features
        sizes = self.gate.in_features, self.gate.out_features, self.gate.out_features
        if found != sizes:
            got = f"up from {found[0]} to {found[1]} features, down from {found[2]}"
            wanted = f"up from {sizes[0]} to {sizes[1]}, as gate, down from {sizes[2]}"
            raise ShapeError("gated_mlp", "up, down", got, wanted)


class _Stages(NamedTuple):
    """The products of a pass; ``up`` takes the codes of x from ``gate``."""

    gate: TensorProduct
    up: TensorProduct
    down: TensorProduct

    @property
    def reach(self) -> bool:
        """Whether a gradient is wanted beyond down."""
        return self.down.needs_x

    @property
    def has_bias_gradient(self) -> bool:
        """Whether that of a bias of gate or up is wanted."""
        return self.gate.needs_b or self.up.needs_b

    @property
    def h(self) -> Meta:
        """gate's output, and up's beside it."""
        return Meta((self.gate.m, 2 * self.gate.n), self.gate.dtype)

    def for_up(self, ws: WorkingSet, operand: str, views: Views) -> WorkingSet:
        """Returns the working set with x's codes as an input of ``up``: ``gate``'s operand "x_q" or "x_qt" in
        ``views``."""
        codes, scale = self.gate.names[operand]
        found = views[codes], (ws.saved if scale in self.gate.in_saved else views)[scale]
        named = zip(self.up.names[operand], found, strict=True)
        return ws._replace(inputs={**ws.inputs, **dict(named)})


class GatedMLP(Products):
    """y = (act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd.

    Inputs: x h (..., hidden); gate_weight0, up_weight0, down_weight0, and their biases where the products
    have some; for each product x_scale and w_scale, float32 [1], gate's x_scale for up too. Outputs: y h
    (..., out); for each product x_amax, w_amax. Gradients of all inputs, and for each product g_amax;
    backward reads its g_scale. Those of gate's and up's weights only together, and those of their biases only
    with those of the weights or of x. Rounded as separate layers round, but for act(...), which is multiplied
    as it is, and for x's gradient, whose two terms are rounded as one addend and a sum.
    """

    name = "gated_mlp"
    arguments: ClassVar[Mapping[str, str]] = {
        "x": "inp",
        **{
            f"{layer}_{name}0": f"{layer}_proj.{name}"
            for layer in ("gate", "up", "down")
            for name in ("weight", "bias")
        },
    }

    def products(self, spec: GatedMLPSpec) -> tuple[ProductSpec, ...]:
        return spec.gate, spec.up, spec.down

    def _stages(self, spec: GatedMLPSpec, metas: Metas, needs: Needs) -> _Stages:
        x = want_rows(self.name, "x", metas, spec.gate.in_features)
        beyond = {"x", "gate_weight0", "up_weight0"} & needs
        biases = {"gate_bias0", "up_bias0"} & needs
        if len(beyond - {"x"}) == 1 or (biases and not beyond):
            got = f"those of {', '.join(sorted(beyond | biases))}"
            wanted = "those of both weights or of neither, and with a bias' that of x or of the weights"
            raise UnsupportedError(self.name, "gradients", got, wanted)

        def made(own: ProductSpec, needs_x: bool) -> Any:
            return product_of(own, row_count(x), x.dtype, needs_x, needs)

        up = replace(spec.up, input_cached=True)
        return _Stages(made(spec.gate, "x" in needs), made(up, "x" in needs), made(spec.down, bool(beyond)))

    def infer(self, spec: GatedMLPSpec, metas: Metas, needs: Needs) -> Signature:
        st = self._stages(spec, metas, needs)
        x = want(self.name, "x", metas)
        codes = st.up.input_metas()
        for own in st:
            own.check(self.name, {**metas, **codes})
        want(self.name, "up_x_scale", metas, (1,), float32)
        outputs = {"y": Meta((*x.shape[:-1], st.down.n), x.dtype), "up_x_amax": AMAX}
        saved = {"h": st.h} if st.reach else {}
        grads = {"x": x} if st.gate.needs_x else {}
        kept: list[str] = []
        scales: dict[str, Meta] = {}
        for own in st:
            outputs |= own.outputs()
            saved |= own.saved()
            grads |= own.grads()
            kept += [name for name in own.kept() if name not in codes]
            scales |= own.backward_inputs()
        return Signature(outputs, saved, tuple(kept), grads, backward_inputs=scales)

    def plan(self, spec: GatedMLPSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        st = self._stages(spec, metas, needs)
        space = workspace(max(own.workspace(kernels) for own in st))
        forward, backward = dict(space), space | st.down.bias_workspace(kernels)
        for own in st:
            forward |= own.scratch()
            backward |= own.backward_scratch()
        if st.reach:
            backward["dact"] = Meta((st.down.m, st.down.k), st.down.dtype)
            if st.has_bias_gradient:
                backward["dbias"] = Meta((st.h.shape[1],), st.h.dtype)
                (backward["sums"],) = workspace(kernels.act_bwd_workspace(*st.h.shape)).values()
        else:
            forward["h"] = st.h
        return Plan(spec, self.infer(spec, metas, needs), kernels, forward, backward, st)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        st: _Stages = plan.extra
        k, stream, n = ws.kernels, ws.stream, st.gate.n
        x, h = ws.inputs["x"].rows(), ws.saved.get("h") or ws.scratch["h"]
        st.gate.cast_x(ws, x)
        amax = ws.outputs["gate_x_amax"]  # of the same array
        k.amax(amax.reshape(1, 1), ws.outputs["up_x_amax"], (1, 1), stream)
        second = st.for_up(ws, "x_q", ws.scratch)
        st.gate.fprop(ws, x, h.slice(1, 0, n))
        st.up.fprop(second, x, h.slice(1, n, n))
        del second
        k.act_fwd(h, None, None, None, st.down.x_cast(ws), plan.spec.activation, (), stream)
        del h
        free(ws.scratch, "h")
        st.down.fprop(ws, None, ws.outputs["y"].rows())

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        st: _Stages = plan.extra
        g, scratch, grads = cotangents["y"].rows(), ws.scratch, ws.outputs
        st.down.cast_g(ws, g)
        if st.down.needs_w:
            st.down.wgrad(ws, g, None)
        if not st.reach:
            return
        st.down.dgrad(ws, g, scratch["dact"])
        free_contents(scratch, "workspace")  # most is held now
        dbias, space = (scratch["dbias"], scratch["sums"]) if st.has_bias_gradient else (None, None)
        casts = st.gate.g_cast(ws), st.up.g_cast(ws)
        how = plan.spec.activation, (), space, ws.stream
        ws.kernels.act_bwd(scratch["dact"], ws.saved["h"], None, None, dbias, None, *casts, *how)
        del casts
        free(scratch, "dact", "sums")
        free(ws.saved, "h")
        for i, name in enumerate(("gate_bias0", "up_bias0")):
            if name in grads:
                assert dbias is not None
                ws.kernels.copy(dbias.slice(0, i * st.gate.n, st.gate.n), grads[name], ws.stream)
        if st.gate.needs_x:
            dx = grads["x"].rows()
            st.gate.dgrad(ws, None, dx)
            st.up.dgrad(ws, None, dx, st.up.added)
        if st.gate.needs_w:
            second = st.for_up(ws, "x_qt", ws.saved)
            st.gate.wgrad(ws, None, None)
            st.up.wgrad(second, None, None)


gated_mlp = GatedMLP()
