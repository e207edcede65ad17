"""``expert_linear``: rows in groups whose sizes lie on the device, each group times a matrix of its own.

What ``grouped_linear`` does with sizes that the host knows, this does without a look at them: it can be
captured into a CUDA graph, and works inside ``jax.jit``. Weights of all groups lie in one array.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fp8kit import arrays
from fp8kit.arguments import choice, integer
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import BLOCK, Cast, Rule, block_shapes
from fp8kit.errors import ShapeError, UnsupportedError
from fp8kit.formats import E4M3, E5M2, DType, float32, int32, uint8
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.ops.product_quantized import pad
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet

# what functions that have arguments of their own call those of the operation, for ``errors.on_behalf_of``
EXPERT_ARGUMENTS = {"weight": "kernel", "inp": "x", "m_splits": "group_sizes"}
_TILES = ("tensor", "row", "block_1x128", "block_128x128")


@dataclass(frozen=True)
class ExpertLinearSpec:
    """``experts`` E, ``in_features`` K, ``out_features`` N; ``layout``: the weight is "oi", (E, N, K), or
    "io", (E, K, N). ``fp8``: None for high precision. ``slots``: 0, groups lie one after the other; else
    group e begins at row e * slots. ``wide_wgrad``: the weight's gradient is float32 where it is a product of
    codes, for a caller that adds it to what it has; in high precision it is of the weight's dtype."""

    experts: int
    in_features: int
    out_features: int
    layout: str = "oi"
    fp8: Quantization | None = None
    slots: int = 0
    wide_wgrad: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "in_features", "out_features"):
            integer("expert_linear", name, getattr(self, name), 1, 2**31 - 1, ShapeError)
        choice("expert_linear", "layout", self.layout, ("oi", "io"))
        integer("expert_linear", "slots", self.slots, 0, 2**31 - 1)
        for name, gemm in {} if self.fp8 is None else self.fp8.gemms.items():
            _check_supported(name, gemm)

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """(E, N, K) or (E, K, N)."""
        sides = self.out_features, self.in_features
        return (self.experts, *(sides if self.layout == "oi" else sides[::-1]))

    def wgrad_dtype(self, dtype: DType) -> DType:
        """The dtype of the gradient of a weight of ``dtype``."""
        coded = self.fp8 is not None and self.fp8.wgrad.compute == "quantized"
        return float32 if self.wide_wgrad and coded else dtype


def _check_supported(name: str, gemm: Gemm) -> None:
    """UnsupportedError for what the grouped kernel does not compute."""
    if gemm.compute == "high_precision":
        return
    if gemm.compute == "quantized" and not isinstance(gemm.how, bool):
        wanted = "'fast' or 'split', the device's own sums, with sizes of groups on the device (experts)"
        raise UnsupportedError("expert_linear", f"{name}.accumulation", gemm.accumulation, wanted)
    if gemm.compute != "quantized" or gemm.plain or gemm.recast:
        wanted = "codes by codes, or high precision, with sizes of groups on the device (experts)"
        raise UnsupportedError("expert_linear", f"{name}.compute", gemm.compute, wanted)
    for place, own in (("a", gemm.a), ("b", gemm.b)):
        plain = Quantizer(
            own.format, own.granularity, scale_rule=own.scale_rule, epsilon=own.epsilon, hadamard=0
        )
        known = own.granularity in _TILES and own.scale_rule in ("exact", "power_2")
        if own != plain or not known or own.format not in (E4M3, E5M2):
            wanted = (
                "E4M3 or E5M2 with scales of the data, per tensor, row or block of 128: grouped products "
                "with sizes on the device (experts) take no other (delayed scaling wants sizes on the host). "
                "Take Float8CurrentScaling or Float8BlockScaling, or give the experts one of them by PerLayer"
            )
            raise UnsupportedError("expert_linear", f"{name}.{place}", own, wanted)
    if gemm.a.format == gemm.b.format == E5M2:
        raise UnsupportedError("expert_linear", f"{name}.a, b", "E5M2 for both", "E4M3 for at least one")


class _Operand(NamedTuple):
    """An array that GEMMs multiply: the (``groups``) matrices (rows, columns) that it is, 0 for one that is
    no stack of them, the rule of its cast, and the ``sides`` that are wanted: "q", as it lies, and "qt", its
    transpose, so that rows run along the contraction."""

    name: str
    groups: int
    rows: int
    columns: int
    rule: Quantizer
    sides: tuple[str, ...]

    def metas(self, dtype: DType) -> dict[str, Meta]:
        """Codes and scale_inv of each side, and temporaries; ``dtype``: the array's."""
        made: dict[str, Meta] = {}
        stack, count, kind = (self.groups,) * bool(self.groups), max(self.groups, 1), self.rule.granularity
        if kind == "tensor":
            made |= {f"{self.name}_{part}": Meta((count,), float32) for part in ("amax", "scale", "inv")}
        for side in self.sides:
            size = (self.rows, self.columns) if side == "q" else (self.columns, self.rows)
            codes: Shape = (pad(size[0]), pad(size[1]))
            name = f"{self.name}_{side}"
            if kind == "row":
                scales = Meta((count * codes[0],), float32)
                made |= {f"{name}_{part}": scales for part in ("amax", "scale", "inv")}
                made[f"{name}_padded"] = Meta((count, *codes), dtype)
            elif kind != "tensor":
                codes, grid = block_shapes(*size, self.rule.tile)
                made[f"{name}_inv"] = Meta((*stack, *grid), float32)
            made[name] = Meta((*stack, *codes), uint8)
        return made

    def side(self, ws: WorkingSet, side: str) -> tuple[ArrayView, ArrayView]:
        """Codes and scale_inv of one side."""
        of = self.name if self.rule.granularity == "tensor" else f"{self.name}_{side}"
        return ws.scratch[f"{self.name}_{side}"], ws.scratch[f"{of}_inv"]

    def cast(self, ws: WorkingSet, x: ArrayView, slots: int) -> None:
        """Write the codes and scales of x, every side. Rows of no group change no scale of another row."""
        x = x.reshape(max(self.groups, 1), self.rows, self.columns)
        if self.rule.granularity == "row":
            for side in self.sides:
                self._cast_rows(ws, x, side, slots)
        elif self.rule.granularity == "tensor":
            self._cast_tensors(ws, x, slots)
        else:
            self._cast_blocks(ws, x, slots)

    def _cast_blocks(self, ws: WorkingSet, x: ArrayView, slots: int) -> None:
        own, views = self.rule, list[ArrayView | None]()
        for side in ("q", "qt"):
            views += self.side(ws, side) if side in self.sides else (None, None)
        how = own.format, own.tile, own.power_2, own.epsilon, ws.stream
        if self.groups and self.sides == ("q",) and own.tile == (BLOCK, BLOCK) and self.rows % BLOCK == 0:
            # all matrices as one, which they are where nothing is padded and no scale is of two
            whole = [None if view is None else view.rows() for view in views]
            ws.kernels.block_quantize(x.rows(), *whole, *how)
        elif self.groups:
            ws.kernels.block_quantize_stack(x, *views, *how)
        elif self.sides == ("q",) and own.tile[0] == 1:  # no scale is of two rows
            ws.kernels.block_quantize(x.rows(), *views, *how)
        else:
            ws.kernels.block_quantize_groups(x.rows(), *views, ws.inputs["group_sizes"], slots, *how)

    def _cast_tensors(self, ws: WorkingSet, x: ArrayView, slots: int) -> None:
        """Cast each matrix by a scale of its own, both sides at once. Backward takes the amaxes that forward
        has saved (``_amaxes``)."""
        own, k, stream = self.rule, ws.kernels, ws.stream
        amax, scale, inverse = (ws.scratch[f"{self.name}_{part}"] for part in ("amax", "scale", "inv"))
        q, q_t = (ws.scratch.get(f"{self.name}_{side}") for side in ("q", "qt"))
        kind, _, operand = self.name.rpartition("_")
        saved = ws.saved.get(f"{operand}_amax")
        whole, tile = x.reshape(-1, self.columns), (max(self.rows, 1), max(self.columns, 1))
        amax = amax if saved is None else saved
        if saved is None or kind == "fprop":
            arrays.provider(x.device).fill_zero(amax, stream)
            if self.groups:
                k.amax(whole, amax, tile, stream)
            else:
                k.group_amax(whole, amax, ws.inputs["group_sizes"], tile, slots, stream)
        dense = pad(self.rows) == self.rows and pad(self.columns) == self.columns
        if not self.groups:
            to = Cast(own.format, q, q_t, None, inverse, amax, Rule(own.power_2, own.epsilon))
            k.quantize_transpose(whole, to, None, None, stream)
        elif q is not None and q_t is None and dense:
            k.scale_from_amax(amax, scale, inverse, *own.scale_limits, stream)
            how = own.format, tile, True, 0, 0, None, stream
            k.quantize(whole, q.reshape(*whole.shape), scale, inverse, None, *how)
        else:
            k.quantize_stack(x, q, q_t, amax, inverse, own.format, own.power_2, own.epsilon, stream)

    def _cast_rows(self, ws: WorkingSet, x: ArrayView, side: str, slots: int) -> None:
        """Cast the rows of matrices, or of their transposes, each row by its own scale."""
        own, k, stream, name = self.rule, ws.kernels, ws.stream, f"{self.name}_{side}"
        padded, amax, scale, codes, inverse = (
            ws.scratch[f"{name}{part}"] for part in ("_padded", "_amax", "_scale", "", "_inv")
        )
        for zeros in (padded, amax):
            arrays.provider(x.device).fill_zero(zeros, stream)
        lying = x if side == "q" else x.transpose(0, 2, 1)
        (_, rows, columns), (count, height, width) = lying.shape, padded.shape
        k.copy(lying, padded.slice(1, 0, rows).slice(2, 0, columns), stream)
        matrix, q = (each.reshape(count * height, width) for each in (padded, codes))
        tile = 1, max(width, 1)
        if self.groups or side == "q":
            k.amax(matrix, amax, tile, stream)
        else:
            of_columns = (max(self.rows, 1), 1), slots
            k.group_amax(x.rows(), amax.slice(0, 0, rows), ws.inputs["group_sizes"], *of_columns, stream)
        k.scale_from_amax(amax, scale, inverse, *own.scale_limits, stream)
        k.quantize(matrix, q, scale, inverse, None, own.format, tile, True, 0, 0, None, stream)


def _amaxes(spec: ExpertLinearSpec, grads: Container[str]) -> dict[str, Meta]:
    """Returns the amaxes that forward saves: of x and of the matrices of w, where backward casts these by
    scales of tensors too."""
    gemms = {} if spec.fp8 is None else spec.fp8.gemms
    made: dict[str, Meta] = {}
    for operand, count, backward, wanted in (("x", 1, "wgrad", "weight"), ("w", spec.experts, "dgrad", "x")):
        if not gemms or wanted not in grads:
            continue
        first, second = gemms["fprop"], gemms[backward]
        rules = first.a if operand == "x" else first.b, second.b
        if first.compute == second.compute == "quantized" and {r.granularity for r in rules} == {"tensor"}:
            made[f"{operand}_amax"] = Meta((count,), float32)
    return made


class _Gemm(NamedTuple):
    """One of the three GEMMs: its operands and which side of each it multiplies; ``fast``: its
    accumulation."""

    a: tuple[str, str]
    b: tuple[str, str]
    fast: bool


class ExpertLinear(Operation):
    """y[r] = x[r] W_e^T + b_e for the rows r of group e; 0 for rows of no group, whose gradient is 0 too, and
    which count in no scale of x's and of y's gradient.

    Inputs: x h (..., K); group_sizes int32 (E,); weight h, see ``ExpertLinearSpec``; bias h (E, N) or None.
    Output: y h (..., N). Gradients of x, weight and bias. x and the weight are kept as they are, and backward
    casts them along its own contractions, by the amaxes that forward took.
    """

    name = "expert_linear"
    parameters = ("weight", "bias")
    arguments: ClassVar[Mapping[str, str]] = {"x": "inp", "group_sizes": "m_splits"}

    def infer(self, spec: ExpertLinearSpec, metas: Metas, needs: Needs) -> Signature:
        x = want_rows(self.name, "x", metas, spec.in_features)
        if spec.slots and row_count(x) != spec.slots * spec.experts:
            wanted = f"{spec.experts} groups of {spec.slots} rows"
            raise ShapeError(self.name, "x", f"{row_count(x)} rows", wanted)
        want(self.name, "group_sizes", metas, (spec.experts,), int32)
        weight = want(self.name, "weight", metas, spec.weight_shape, x.dtype)
        wgrad = Meta(weight.shape, spec.wgrad_dtype(weight.dtype))
        grads = {name: meta for name, meta in (("x", x), ("weight", wgrad)) if name in needs}
        if metas.get("bias") is not None:
            bias = want(self.name, "bias", metas, (spec.experts, spec.out_features), x.dtype)
            grads |= {"bias": bias} if "bias" in needs else {}
        kept: tuple[str, ...] = (
            ("group_sizes", "weight") if "x" in grads else ("group_sizes",) if grads else ()
        )
        kept += ("x",) if "weight" in grads else ()
        y = Meta((*x.shape[:-1], spec.out_features), x.dtype)
        return Signature({"y": y}, _amaxes(spec, grads), kept, grads)

    def plan(self, spec: ExpertLinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature, x = self.infer(spec, metas, needs), want(self.name, "x", metas)
        m, oi = row_count(x), spec.layout == "oi"
        shapes = {"x": (0, m, spec.in_features), "g": (0, m, spec.out_features), "w": spec.weight_shape}
        # GEMM -> its operands and their sides, in the order of its rules
        wanted = {"fprop": (("x", "q"), ("w", "q" if oi else "qt"))}
        if "x" in signature.grads:
            wanted["dgrad"] = ("g", "q"), ("w", "qt" if oi else "q")
        if "weight" in signature.grads:
            wanted["wgrad"] = ("g", "qt"), ("x", "qt")
        gemms: dict[str, _Gemm] = {}
        operands: dict[str, _Operand] = {}
        for name, sides in wanted.items():
            own = None if spec.fp8 is None else spec.fp8.gemms[name]
            if own is None or own.compute == "high_precision":
                continue
            names = []
            for (operand, side), rule in zip(sides, (own.a, own.b), strict=True):
                known = f"{'fprop' if name == 'fprop' else 'backward'}_{operand}"
                if known in operands and operands[known].rule != rule:
                    known = f"{name}_{operand}"
                before = operands[known].sides if known in operands else ()
                operands[known] = _Operand(known, *shapes[operand], rule, (*before, side))
                names.append((known, side))
            a, b = names if oi or name != "wgrad" else names[::-1]
            gemms[name] = _Gemm(a, b, own.how is True)
        buffers: dict[bool, dict[str, Meta]] = {True: {}, False: {}}
        for made in operands.values():
            buffers[made.name.startswith("fprop")] |= made.metas(x.dtype)
        if "bias" in signature.grads:
            numbers = Meta((m,), float32)
            buffers[False] |= {"zeros": numbers, "ones": numbers, "inverse": numbers}
            buffers[False] |= {"column": Meta((m, 1), x.dtype)}
        return Plan(spec, signature, kernels, buffers[True], buffers[False], (gemms, operands))

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        i, layout = ws.inputs, "nt" if plan.spec.layout == "oi" else "nn"
        x, weight, bias = i["x"].rows(), i["weight"], i.get("bias")
        self._cast(plan, ws, {"x": x, "w": weight}, True)
        self._multiply(plan, ws, "fprop", x, weight, ws.outputs["y"].rows(), layout, bias)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        g, oi, inputs, outputs = cotangents["y"].rows(), plan.spec.layout == "oi", ws.inputs, ws.outputs
        given = {"g": g}
        given |= {"w": inputs["weight"]} if "x" in outputs else {}
        given |= {"x": inputs["x"].rows()} if "weight" in outputs else {}
        self._cast(plan, ws, given, False)
        if "x" in outputs:
            self._multiply(plan, ws, "dgrad", g, given["w"], outputs["x"].rows(), "nn" if oi else "nt")
        if "weight" in outputs:
            pair = (g, given["x"]) if oi else (given["x"], g)
            self._multiply(plan, ws, "wgrad", *pair, outputs["weight"], "tn")
        if "bias" in outputs:
            self._bias_gradient(plan, ws, g, outputs["bias"])

    def _cast(self, plan: Plan, ws: WorkingSet, given: Mapping[str, ArrayView], forward: bool) -> None:
        """Cast what a pass multiplies, by operand."""
        for operand in plan.extra[1].values():
            if operand.name.startswith("fprop") is forward:
                operand.cast(ws, given[operand.name[-1]], plan.spec.slots)

    def _multiply(
        self,
        plan: Plan,
        ws: WorkingSet,
        name: str,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        layout: str,
        bias: ArrayView | None = None,
    ) -> None:
        """The GEMM ``name``; ``a`` and ``b`` are read in high precision only."""
        (gemms, operands), slots, sizes = plan.extra, plan.spec.slots, ws.inputs["group_sizes"]
        if name not in gemms:
            ws.kernels.grouped_gemm(a, b, out, sizes, layout, slots, bias, ws.stream)
            return
        left, right, fast = gemms[name]
        p, q = operands[left[0]], operands[right[0]]
        (a, a_inv), (b, b_inv) = p.side(ws, left[1]), q.side(ws, right[1])
        casts = p.rule.format, q.rule.format, a_inv, b_inv, p.rule.tile, q.rule.tile
        along = "terms" if name == "wgrad" else "rows"
        ws.kernels.grouped_fp8_gemm(a, b, out, sizes, along, slots, bias, *casts, fast, ws.stream)

    def _bias_gradient(self, plan: Plan, ws: WorkingSet, g: ArrayView, out: ArrayView) -> None:
        """The sums of each group's rows: a column of ones, transposed, times the rows. Ones are the scales of
        amaxes of 0."""
        k, s, experts = ws.kernels, ws.scratch, plan.spec.experts
        arrays.provider(g.device).fill_zero(s["zeros"], ws.stream)
        k.scale_from_amax(s["zeros"], s["ones"], s["inverse"], 1.0, False, 0.0, 1.0, ws.stream)
        k.copy(s["ones"].reshape(g.shape[0], 1), s["column"], ws.stream)
        sums = out.reshape(experts, 1, plan.spec.out_features)
        sizes = ws.inputs["group_sizes"]
        k.grouped_gemm(s["column"], g, sums, sizes, "tn", plan.spec.slots, None, ws.stream)


expert_linear = ExpertLinear()
