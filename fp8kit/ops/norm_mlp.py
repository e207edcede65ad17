"""``norm_mlp``: y = act(norm(x) W1^T + b1) W2^T + b2, with the residual stream going through, or joining y.

fc1's output is kept without its bias; the activation kernels add it on the way, write their result in FP8 for
fc2, and in backward give fc1's bias gradient and fc1's FP8 output gradient in the same pass.

With ``recompute`` forward runs as in inference, and keeps beside its inputs only the numbers that its casts
were made with (scales, or amaxes). Backward begins with norm, fc1 and activation once more, and the cast of
fc2's weight, but not fc2's product: the same kernels on the same values, so the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from fp8kit.arrays import ArrayView
from fp8kit.backends.activation import ALL, rows_in_dy
from fp8kit.buffers import beside, free, free_contents, nbytes_of, take
from fp8kit.errors import FormatError, ShapeError, UnsupportedError
from fp8kit.formats import float32, uint8
from fp8kit.ops import partition as split
from fp8kit.ops.activation import (
    ActivationSpec,
    activate,
    activate_bwd,
    activation,
    all_numbers,
    gradient_scratch,
    gradient_workspace,
    want_learned,
)
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec, NormStage, further_outputs, norm_linear
from fp8kit.ops.partition import Component, Partition, Products, SharedAmaxes
from fp8kit.ops.product import Product, ProductSpec
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_row import RowProduct
from fp8kit.ops.product_tensor import SLOT, TensorProduct
from fp8kit.ops.products import product_class, product_of
from fp8kit.ops.smooth import LINES, Smoothing, inner_product
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Metas, Needs, Partitions, Plan, Shapes, Signature, Views, WorkingSet, workspace

IN_PLACE = 128 << 20  # bytes of an activation's gradient from which on its codes take part of its memory


@dataclass(frozen=True)
class NormMLPSpec:
    """``fc1`` (prefix "fc1_", bias "deferred" or "none": the activation adds it) and ``fc2`` (prefix "fc2_");
    see ``NormLinearSpec``.

    ``activation``: a name of ``backends.activation``. ``activation_params``: its numbers, see
    ``activation_numbers``; () is the defaults. ``recompute``: no activation is kept for backward.
    ``fused_residual``: x is added to y, within fc2's product (not with ``residual``). ``smooth``: "channel",
    "token" or "", see ``ops.smooth``; of activations whose second half multiplies as it is, and not by
    channel with a cached weight.
    """

    norm: NormSpec
    fc1: ProductSpec
    fc2: ProductSpec
    activation: str = "gelu"
    residual: bool = False
    return_norm: bool = False
    activation_params: tuple[float, ...] = ()
    recompute: bool = False
    fused_residual: bool = False
    smooth: str = ""

    def __post_init__(self) -> None:
        params = all_numbers("norm_mlp", "activation_params", self.activation, self.activation_params)
        object.__setattr__(self, "activation_params", params)
        parts = ALL[self.activation].parts
        if self.fc1.out_features != parts * self.fc2.in_features:
            wanted = f"{parts} * {self.fc2.in_features} for {self.activation}"
            raise ShapeError("norm_mlp", "fc1", f"{self.fc1.out_features} output features", wanted)
        if self.fused_residual and self.residual:
            raise FormatError("norm_mlp", "fused_residual", True, "False with residual")
        if self.fused_residual and self.norm.features != self.fc2.out_features:
            got = f"{self.fc2.out_features} output features"
            raise ShapeError("norm_mlp", "fc2", got, f"{self.norm.features}, as x, to join")
        if self.smooth and (self.smooth not in LINES or not ALL[self.activation].linear):
            wanted = f"{' or '.join(LINES)}, with a gated activation without limits"
            raise FormatError("norm_mlp", "smooth", f"{self.smooth!r} with {self.activation}", wanted)
        if self.smooth == "channel" and self.fc2.weight_cached:
            raise FormatError("norm_mlp", "fc2", "a cached weight", "none: smoothing by channel scales it")
        if self.fc1.bias == "add":
            object.__setattr__(self, "fc1", replace(self.fc1, bias="deferred"))

    @property
    def learned(self) -> tuple[str, ...]:
        """Names of the activation's learned numbers."""
        return tuple(ALL[self.activation].learned)

    @property
    def smoothing(self) -> str:
        """How this call is smoothed: not in high precision, where it would change nothing."""
        return self.smooth if self.fc2.fp8 is not None else ""


@dataclass(frozen=True)
class _Stages:
    """Norm, fc1 and fc2 as one pass sees them. ``fuses``: the activation's kernel writes casts and amaxes;
    ``smoothing``: what is done to its result in front of fc2's cast."""

    norm: NormStage
    fc2: Product
    fuses: bool = True
    smoothing: Smoothing | None = None

    @property
    def fc1(self) -> Product:
        return self.norm.product

    @property
    def casts(self) -> bool:
        """Whether the activation's kernel writes fc2's input in FP8 and never in high precision. Where the
        amax is not known before, a first pass over the activation takes it."""
        return self.fuses and self.smoothing is None and self.fc2.fuses_cast and not self.fc2.fprop_reads_x

    @property
    def reach(self) -> bool:
        """Whether a gradient is wanted beyond fc2."""
        return self.fc2.needs_x

    @property
    def fused(self) -> bool:
        """Whether the activation's gradient writes fc1's output gradient in FP8. By blocks, only of layers
        that are not large: codes beside that gradient and fc1's output would be the peak of memory."""
        fc1 = self.fc1
        local = fc1.scales_local and nbytes_of(self.between["act"]) < IN_PLACE
        return self.fuses and (fc1.scales_known or local) and fc1.casts_g

    @cached_property
    def beyond(self) -> int:
        """Rows that the buffer of the gradient of the activation's output has beside its own, for fc1's
        output gradient in FP8, most of which lies where that was; 0 where it lies apart."""
        act, codes = self.between["act"], self.fc1.backward_scratch().get("fc1_g_q")
        if not self.fused or self.fc1.reads_g or nbytes_of(act) < IN_PLACE:
            return 0
        if codes is None or codes.shape != self.between["h"].shape:  # padded
            return 0
        rows, width = act.shape
        row, own = width * act.dtype.itemsize, codes.shape[1]
        inside = rows_in_dy(rows, row, own)
        return -(-(rows - inside) * own // row) if inside else 0

    def dact(self, scratch: Views) -> ArrayView:
        """Returns where the gradient of the activation's output goes."""
        return scratch["dact"].slice(0, 0, self.fc2.m) if self.beyond else scratch["dact"]

    def with_codes(self, scratch: Views) -> Views:
        """Returns the temporaries with fc1's output gradient in FP8 where ``beyond`` says."""
        dact, (rows, columns) = self.dact(scratch), self.between["h"].shape
        inside = rows_in_dy(rows, dact.nbytes // rows, columns) * columns
        at = dact.ptr + dact.nbytes - inside
        return beside(scratch, fc1_g_q=ArrayView(at, (rows, columns), uint8, dact.device, dact.owner))

    @property
    def dh(self) -> str:
        """The temporary for the gradient of fc1's output in high precision: that of the activation's output,
        in place, where an element of one follows from the same element of the other."""
        return "dact" if self.fuses and self.fc1.n == self.fc2.k else "dh"

    @property
    def between(self) -> dict[str, Meta]:
        """fc1's output without its bias, and the activation's, as matrices."""
        fc1, fc2 = self.fc1, self.fc2
        return {"h": Meta((fc1.y_rows, fc1.n), fc1.dtype), "act": Meta((fc2.m, fc2.k), fc2.dtype)}

    def saved(self) -> dict[str, Meta]:
        """Returns what forward fills for backward."""
        fc2 = self.fc2
        wanted = {"h": self.reach, "act": fc2.needs_w and fc2.wgrad_reads_x}
        own = {name: meta for name, meta in self.between.items() if wanted[name]}
        if self.smoothing is not None and (self.reach or fc2.needs_w):
            own |= self.smoothing.scales()
        return self.norm.saved() | self.fc1.saved() | fc2.saved() | own

    def scratch(self) -> dict[str, Meta]:
        """Forward's temporaries, the workspace aside."""
        written = self.between if not self.casts else {"h": self.between["h"]}
        if self.smoothing is not None:
            written = written | self.smoothing.scales() | self.smoothing.scratch()
        own = {name: meta for name, meta in written.items() if name not in self.saved()}
        return self.norm.scratch() | self.fc1.scratch() | self.fc2.scratch() | own


@dataclass(frozen=True)
class _Passes:
    """The stages of forward and of backward. ``numbers``: where backward recomputes, float32 [1] input of its
    pass -> the input or output of forward that holds it; None where nothing is recomputed. ``fused``: the
    GEMMs, fc1's "fprop" and fc2's "dgrad", that make the activation or its gradient on the way."""

    forward: _Stages
    backward: _Stages
    numbers: dict[str, str] | None = None
    fused: tuple[str, ...] = ()

    def fusing(self, kernels: Any) -> tuple[str, ...]:
        """``fused`` under the policy of ``kernels``: of casts by scales that are known."""
        fc1, fc2, st = self.forward.fc1, self.backward.fc2, self.backward
        if self.numbers is not None or st.smoothing is not None:
            return ()
        if self.forward.fc2.scales_local or st.fc1.scales_local:  # such products cast by one scale
            return ()
        forward = self.forward.casts and not self.forward.fc2.takes_amax("x")
        backward = st.reach and st.fused and not (st.fc1.reads_g or st.fc1.takes_amax("g"))
        able = (("fprop", fc1, forward), ("dgrad", fc2, backward))
        return tuple(gemm for gemm, product, can in able if can and product.fuses(gemm, kernels))

    def recomputed(self) -> dict[str, Meta]:
        """Returns the buffers of the pass that backward recomputes: what forward would have kept, and its
        temporaries but for fc2's product."""
        left_out = {f"fc2_{name}" for name in ("x_q", "x_q_inv", "w_q", "w_q_inv")}
        saved = self.backward.saved()
        metas = saved | self.backward.scratch()
        return {name: meta for name, meta in metas.items() if name not in left_out or name in saved}


def _known(spec: ProductSpec) -> ProductSpec:
    """Returns the product with amaxes as inputs where it takes those of tensors itself."""
    if spec.fp8 is None or issubclass(product_class(spec.fp8), EmulatedProduct | RowProduct):
        return spec
    return replace(spec, fp8=spec.fp8.map(Quantizer.with_amax, "xw"))


class NormMLP(Products):
    """y = act(norm(x) W1^T + b1) W2^T + b2, with ``fused_residual`` + x.

    Inputs: x h (..., hidden), norm_weight, norm_bias, fc1_weight0, fc1_bias0, fc2_weight0, fc2_bias0, the
    activation's learned numbers, and per product (prefix "fc1_", "fc2_") x_scale, w_scale or the cached
    weight. Outputs: y; residual (x itself) and normed where asked for; amaxes. Gradients of all of them;
    backward reads fc1_g_scale and fc2_g_scale.
    """

    name = "norm_mlp"
    parameters = (*Products.parameters, *activation.parameters)
    arguments: ClassVar[Mapping[str, str]] = {
        "x": "inp",
        "norm_weight": "layer_norm_weight",
        "norm_bias": "layer_norm_bias",
        "fc1_weight0": "fc1_weight",
        "fc1_bias0": "fc1_bias",
        "fc2_weight0": "fc2_weight",
        "fc2_bias0": "fc2_bias",
    }

    def products(self, spec: NormMLPSpec) -> tuple[ProductSpec, ...]:
        return spec.fc1, spec.fc2

    def independent_rows(self, spec: NormMLPSpec, saved: Collection[str]) -> tuple[str, ...]:
        shared = spec.smoothing == "channel"  # rows share the scales of channels
        return ("x",) if not (saved or shared) and split.scaled_by_rows(spec.fc1, spec.fc2) else ()

    def partitions(self, spec: NormMLPSpec, metas: Metas, views: Shapes) -> Partitions:
        if spec.recompute or spec.smoothing or split.cached(spec.fc1, spec.fc2):
            return ()
        io = int(spec.fc1.layout == "io")
        dims = (
            ("fc1_weight0", 1 + io, io),
            ("fc1_bias0", 1, 0),
            ("h", 2, 1),
            ("fc1_w_qt", 2, 1),
            ("fc1_w_qt_inv", 2, 1),
            ("fc2_weight0", 1 - io, 1 - io),
        )
        addend = ("x", "residual") if spec.fused_residual else ("", "")
        return (*split.rows(metas, views, "x"), Partition("inner", dims, ("y",), ("fc2_bias0",), *addend))

    def part(self, spec: NormMLPSpec, partition: Partition, count: int) -> Any:
        fc1, fc2 = split.narrowed(spec.fc1, count), split.narrowed(spec.fc2, count, contraction=True)
        if fc1 is None or fc2 is None:
            return None
        return replace(
            spec, fc1=fc1, fc2=fc2, fused_residual=False, residual=spec.residual or spec.fused_residual
        )

    def shared_amaxes(self, spec: NormMLPSpec) -> SharedAmaxes | None:
        if split.with_amaxes(spec.fc1) is None:
            return None
        if spec.smoothing:
            wanted = "none, or a recipe with scales of blocks or of earlier steps, in a shard_map of your own"
            raise UnsupportedError(self.name, "smooth", spec.smooth, wanted)
        return SharedAmaxes(None, {})

    def decompose(self, spec: NormMLPSpec) -> tuple[Component, ...]:
        """``norm_linear``, ``activation`` and ``linear``, with the residual stream as the last one's residual
        where it is added to y."""
        stream = spec.residual or spec.fused_residual
        first = NormLinearSpec(spec.norm, replace(spec.fc1, bias="none"), stream, spec.return_norm)
        act = ActivationSpec(spec.activation, spec.fc1.out_features, spec.activation_params, amax=True)
        second = ("x", "fc2_weight0", "fc2_bias0", *(("residual",) if spec.fused_residual else ()))
        return (
            Component(
                norm_linear, first, {n: n for n in ("x", *spec.norm.inputs(), "fc1_weight0")}, {"y": "h"}
            ),
            Component(
                activation,
                act,
                {"x": "h", "bias0": "fc1_bias0"} | {name: name for name in spec.learned},
                {"y": "act", "amax": "fc2_x_amax"},
                {"amax": "fc1_g_amax"},
            ),
            Component(linear, LinearSpec(spec.fc2), {n: n for n in second} | {"x": "act"}),
        )

    def _stages(self, spec: NormMLPSpec, metas: Metas, needs: Needs) -> _Stages:
        first = NormStage.of(self.name, spec.norm, spec.fc1, spec.return_norm, metas, needs)
        fc1 = first.product
        reach = fc1.needs_x or fc1.needs_w or fc1.needs_b
        reach = reach or bool(needs & set(spec.learned))
        by, own = spec.smoothing, spec.fc2
        fc2 = product_of(inner_product(by, own), fc1.y_rows, fc1.dtype, reach, needs)
        fc2.wgrad_first = True
        return _Stages(first, fc2, not spec.learned, Smoothing(by, own, fc2) if by else None)

    def _passes(self, spec: NormMLPSpec, metas: Metas, needs: Needs) -> _Passes:
        whole = self._stages(spec, metas, needs)
        if not (spec.recompute and (whole.reach or whole.fc2.needs_w)):
            return _Passes(whole, whole)
        second = replace(spec, fc1=_known(spec.fc1), fc2=_known(spec.fc2), return_norm=False)
        numbers = whole.fc1.scalars() | whole.fc2.scalars()
        return _Passes(self._stages(spec, metas, frozenset()), self._stages(second, metas, needs), numbers)

    def outputs(self, spec: NormMLPSpec) -> tuple[str, ...]:
        return further_outputs(spec)

    def infer(self, spec: NormMLPSpec, metas: Metas, needs: Needs) -> Signature:
        passes = self._passes(spec, metas, needs)
        first, st = passes.forward, passes.backward
        fc1, fc2, x = st.fc1, st.fc2, st.norm.x
        first.fc1.check(self.name, metas)
        first.fc2.check(self.name, metas)
        learned = want_learned(self.name, spec.activation, metas, x.dtype)
        outputs = {"y": Meta(fc2.y_shape(fc1.y_shape(x.shape)), x.dtype)}
        outputs |= first.fc1.outputs() | first.fc2.outputs() | first.norm.outputs()
        kept: tuple[str, ...] = (*st.norm.kept(), *fc1.kept(), *fc2.kept())
        if passes.numbers is None:
            saved = st.saved()
            kept += (*fc1.biases, *learned) if st.reach else ()
        else:
            saved = {"numbers": Meta((SLOT * len(passes.numbers),), float32)} if passes.numbers else {}
            read = fc2.weight_names() if st.reach else ()
            kept += ("x", *spec.norm.inputs(), *fc1.biases, *fc1.weight_names(), *read, *learned)
        grads = (spec.norm.grads(x) if fc1.needs_x else {}) | fc1.grads()
        grads |= fc2.grads() if st.smoothing is None else st.smoothing.grads()
        grads |= {name: meta for name, meta in learned.items() if name in needs}
        kept, through = tuple(dict.fromkeys(kept)), {"residual": "x"} if spec.residual else {}
        scales = fc1.backward_inputs() | fc2.backward_inputs()
        return Signature(outputs, saved, kept, grads, through, backward_inputs=scales)

    def plan(self, spec: NormMLPSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        passes = self._passes(spec, metas, needs)
        passes = replace(passes, fused=passes.fusing(kernels))
        first, st = passes.forward, passes.backward
        fc1, fc2 = st.fc1, st.fc2
        products = {first.fc1, first.fc2, fc1, fc2}
        sizes = [own.workspace(kernels) for own in products]
        itemsize = fc1.dtype.itemsize
        for gemm, product in (("fprop", (fc1.m, fc1.n)), ("dgrad", (fc2.m, fc2.k))):
            sizes += [int(kernels.fused_workspace(*product, itemsize))] * (gemm in passes.fused)
        space = workspace(max(kernels.norm_bwd_workspace(fc1.m, fc1.k), *sizes))
        forward = first.scratch() | space
        if "fprop" in passes.fused:
            forward.pop("h", None)
        backward = st.norm.backward_scratch() | fc2.backward_scratch() | fc2.bias_workspace(kernels) | space
        if passes.numbers is not None:
            forward |= first.saved()
            backward |= passes.recomputed()
        if st.reach and "dgrad" not in passes.fused:
            sums = gradient_workspace(kernels, spec.activation, fc1.y_rows, fc1.n)
            (backward["sums"],) = workspace(sums).values()
            backward |= gradient_scratch(spec.activation, fc1.dtype)
            act = st.between["act"]
            backward["dact"] = act._replace(shape=(fc2.m + st.beyond, fc2.k))
            if st.beyond:
                del backward["fc1_g_q"]
            if (not st.fused or fc1.reads_g) and st.dh == "dh":
                backward["dh"] = st.between["h"]
        if st.smoothing is not None and (st.reach or fc2.needs_w):
            backward |= st.smoothing.backward_scratch()
        signature = self.infer(spec, metas, needs)
        return Plan(spec, signature, kernels, forward, backward, passes, first.norm.measure_scratch())

    def measure(self, plan: Plan, ws: WorkingSet) -> None:
        st: _Stages = plan.extra.forward
        st.norm.measure(ws)
        st.fc2.measure_weight(ws)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        passes: _Passes = plan.extra
        st, saved = passes.forward, ws.saved
        if passes.numbers is not None:
            ws = ws._replace(saved=take(ws.scratch, st.saved()))
        act = None
        if "fprop" in passes.fused:
            self._fc1_and_activate(plan.spec, st, ws)
        else:
            self._fc1(st, ws)
            act = self._activate(plan.spec, st, ws)
        y, addend = ws.outputs["y"].rows(), ws.inputs["x"].rows() if plan.spec.fused_residual else None
        (st.smoothing or st.fc2).fprop(ws, act, y, addend)
        for i, source in enumerate((passes.numbers or {}).values()):
            number = ws.inputs.get(source) or ws.outputs[source]
            ws.kernels.copy(number, saved["numbers"].slice(0, SLOT * i, 1), ws.stream)

    def _fc1(self, st: _Stages, ws: WorkingSet) -> None:
        """h = norm(x) W1^T, kept for backward where it is wanted there."""
        normed = st.norm.forward(ws)
        st.fc1.fprop(ws, normed, ws.saved.get("h") or ws.scratch["h"])
        free(ws.scratch, "normed")

    def _fc1_and_activate(self, s: NormMLPSpec, st: _Stages, ws: WorkingSet) -> None:
        """``_fc1`` and ``_activate`` by one kernel: h is written where it is kept, and the cast for fc2."""
        st.norm.forward(ws)
        assert isinstance(st.fc1, TensorProduct)
        h_and_act, bias = (ws.saved.get("h"), ws.saved.get("act")), ws.inputs.get("fc1_bias0")
        st.fc1.fprop_act(ws, *h_and_act, bias, st.fc2.x_cast(ws), s.activation, s.activation_params)
        free(ws.scratch, "normed")

    def _activate(self, s: NormMLPSpec, st: _Stages, ws: WorkingSet) -> ArrayView | None:
        """act(h + b1), cast for fc2; None where fc2 multiplies the cast."""
        casts, fc2, act = st.casts, st.fc2, ws.saved.get("act") or ws.scratch.get("act")
        summands = ws.saved.get("h") or ws.scratch["h"], ws.inputs.get("fc1_bias0")
        function = s.activation, s.activation_params
        if casts and fc2.takes_amax("x"):
            activate(ws, *function, *summands, None, ws.outputs["fc2_x_amax"])
        if st.smoothing is not None:
            st.smoothing.measure(ws, *summands)
        cast = fc2.x_cast(ws) if casts else None
        if cast is not None and cast.q is None and cast.q_t is None:  # neither orientation is wanted
            cast = None
        if act is not None or cast is not None:
            activate(ws, *function, *summands, act, None, cast)
        if not casts:
            assert act is not None
            if st.smoothing is not None:
                st.smoothing.divide(ws, act)
            fc2.cast_x(ws, act)
        del summands
        free(ws.scratch, "h")
        if fc2.fprop_reads_x:
            return act
        free(ws.scratch, "act")
        return None

    def _recompute(self, plan: Plan, ws: WorkingSet) -> Views:
        """Run forward once more and return what backward reads of it, by the names under which forward would
        have saved it."""
        st: _Stages = plan.extra.backward
        inputs = dict(ws.inputs)
        for i, name in enumerate(plan.extra.numbers):
            inputs[name] = ws.saved["numbers"].slice(0, SLOT * i, 1)
        ws = ws._replace(inputs=inputs, outputs={}, saved=take(ws.scratch, st.saved()))
        self._fc1(st, ws)
        if st.fc2.needs_w:
            self._activate(plan.spec, st, ws)
        elif st.smoothing is not None:  # dgrad reads its scales
            st.smoothing.measure(ws, ws.saved["h"], ws.inputs.get("fc1_bias0"))
        (st.smoothing or st.fc2).save_weight(ws)
        return ws.saved

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        passes: _Passes = plan.extra
        if passes.numbers is not None:
            ws = ws._replace(saved=self._recompute(plan, ws))
        kept, grads, saved, scratch = ws.inputs, ws.outputs, ws.saved, ws.scratch
        st, spec, g = passes.backward, plan.spec, cotangents["y"]
        fc1, fc2 = st.fc1, st.fc2
        second, rows = st.smoothing or fc2, g.rows()
        if st.smoothing is None:
            fc2.cast_g(ws, rows)
        else:
            rows = st.smoothing.cast_g(ws, rows)
        if fc2.needs_w:
            second.wgrad(ws, rows, saved.get("act"))
            free(saved, "act")
        if not st.reach:
            return
        if "dgrad" in passes.fused:
            assert isinstance(fc2, TensorProduct)
            h_and_bias = saved["h"], kept.get("fc1_bias0"), grads.get("fc1_bias0")
            fc2.dgrad_act(ws, *h_and_bias, fc1.g_cast(ws), spec.activation, spec.activation_params)
            del rows, h_and_bias
            free(saved, "h")
            st.norm.backward(ws, None, cotangents, g if spec.fused_residual else cotangents.get("residual"))
            return
        second.dgrad(ws, rows, st.dact(scratch))
        del rows
        # most is held now: the gradient of the activation in high precision and its casts
        free_contents(scratch, "workspace")
        products = fc1.needs_x or fc1.needs_w
        # the activation's gradient writes fc1's output gradient in FP8
        fused = st.fused
        if st.beyond:
            scratch = st.with_codes(scratch)
            ws = ws._replace(scratch=scratch)
        taken_now = fc1.takes_amax("g") and products and st.fuses
        amax, cast = grads["fc1_g_amax"] if taken_now else None, fc1.g_cast(ws) if fused else None
        dact_h_and_bias = st.dact(scratch), saved["h"], kept.get("fc1_bias0")
        # written only where it is read
        dh = None if fused and not fc1.reads_g else scratch[st.dh]
        dh_and_dbias = dh, grads.get("fc1_bias0")
        how = spec.activation, spec.activation_params
        activate_bwd(ws, *how, dact_h_and_bias, dh_and_dbias, scratch["sums"], amax, cast)
        del dact_h_and_bias, dh_and_dbias, cast
        free(scratch, "sums", *(("dact",) if dh is None or st.dh != "dact" else ()))
        free(saved, "h")
        if products and not fused:
            fc1.cast_g(ws, scratch[st.dh], with_bias=False, amax_known=taken_now)
        del dh
        # FP8 products have the casts
        plain = fc1.reads_g and products
        residual = g if spec.fused_residual else cotangents.get("residual")
        st.norm.backward(ws, scratch[st.dh] if plain else None, cotangents, residual)


norm_mlp = NormMLP()
