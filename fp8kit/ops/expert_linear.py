"""``expert_linear``: rows in groups whose sizes lie on the device, each group times a matrix of its own.

What ``grouped_linear`` does with sizes that the host knows, this does without a look at them: it can be
captured into a CUDA graph, and works inside ``jax.jit``. Weights of all groups lie in one array.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from fp8kit import arrays
from fp8kit.arguments import choice, integer, shown
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import BLOCK, Cast, Rule, block_shapes
from fp8kit.errors import FormatError, ShapeError, UnsupportedError
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, DType, float32, int32, uint8
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.ops.product_quantized import pad
from fp8kit.ops.values import check_groups
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet, workspace

# what functions that have arguments of their own call those of the operation, for ``errors.on_behalf_of``
EXPERT_ARGUMENTS = {"weight": "kernel", "inp": "x", "m_splits": "group_sizes"}


def want_sizes(operation: str, name: str, values: Any, integers: bool, shape: Shape, groups: int) -> None:
    """FormatError for an array of numbers of rows, ``values``, that are no ``integers``, ShapeError where it
    is not of ``shape`` (groups,)."""
    if not integers:
        raise FormatError(operation, name, shown(values), "integers")
    if tuple(shape) != (groups,):
        raise ShapeError(operation, name, f"shape {tuple(shape)}", f"({groups},)")


_TILES = ("tensor", "row", "block_1x128", "block_128x128")


@dataclass(frozen=True)
class ExpertLinearSpec:
    """``experts`` E, ``in_features`` K, ``out_features`` N; ``layout``: the weight is "oi", (E, N, K), or
    "io", (E, K, N). ``fp8``: None for high precision. ``slots``: 0, groups lie one after the other; else
    group e begins at row e * slots. ``weight_cached``: the FP8 weight is an input (``expert_weight_cast``'s
    outputs). ``wide_wgrad``: the weight's gradient is float32 where it is a product of codes, for a caller
    that adds it to what it has; in high precision it is of the weight's dtype."""

    experts: int
    in_features: int
    out_features: int
    layout: str = "oi"
    fp8: Quantization | None = None
    slots: int = 0
    weight_cached: bool = False
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
    transpose, so that rows run along the contraction. ``of``: "x", "w" or "g". ``for_backward``: the
    sides that backward multiplies."""

    name: str
    of: str
    groups: int
    rows: int
    columns: int
    rule: Quantizer
    sides: tuple[str, ...]
    for_backward: tuple[str, ...]

    @property
    def per_tensor(self) -> bool:
        """Whether each matrix has one scale."""
        return self.rule.granularity == "tensor"

    def names(self, side: str) -> tuple[str, str]:
        """Names of one side's codes and scale_inv. Scales of tensors are both sides'."""
        codes = f"{self.name}_{side}"
        return codes, f"{self.name if self.per_tensor else codes}_inv"

    def codes(self, sides: Sequence[str]) -> dict[str, Meta]:
        """Codes and scale_inv of some of its sides."""
        made: dict[str, Meta] = {}
        stack, count, kind = (self.groups,) * bool(self.groups), max(self.groups, 1), self.rule.granularity
        for side in sides:
            size = (self.rows, self.columns) if side == "q" else (self.columns, self.rows)
            codes: Shape = (pad(size[0]), pad(size[1]))
            scales: Shape = (count,)
            if kind == "row":
                scales = (count * codes[0],)
            elif kind != "tensor":
                codes, grid = block_shapes(*size, self.rule.tile)
                scales = (*stack, *grid)
            name, inverse = self.names(side)
            made |= {name: Meta((*stack, *codes), uint8), inverse: Meta(scales, float32)}
        return made

    def temporaries(self, dtype: DType) -> dict[str, Meta]:
        """What a cast finds in scratch; ``dtype``: the array's."""
        made: dict[str, Meta] = {}
        if self.per_tensor:
            made[f"{self.name}_scale"] = Meta((max(self.groups, 1),), float32)
        for side in self.sides if self.rule.granularity == "row" else ():
            name, inverse = self.names(side)
            codes, scales = self.codes((side,))[name].shape, self.codes((side,))[inverse]
            made |= {f"{name}_amax": scales, f"{name}_scale": scales}
            made[f"{name}_padded"] = Meta((max(self.groups, 1), *codes[-2:]), dtype)
        return made

    def side(self, ws: WorkingSet, side: str) -> tuple[ArrayView, ArrayView]:
        """Codes and scale_inv of one side, wherever they are."""
        codes, inverse = self.names(side)
        return _found(ws, codes), _found(ws, inverse)

    def cast(self, ws: WorkingSet, x: ArrayView, amax: ArrayView | None, slots: int) -> None:
        """Write the codes and scales of x, every side. Rows of no group change no scale of another row.
        ``amax``: of each matrix, where each has one scale."""
        x = x.reshape(max(self.groups, 1), self.rows, self.columns)
        if self.rule.granularity == "row":
            for side in self.sides:
                self._cast_rows(ws, x, side, slots)
        elif amax is not None:
            self._cast_tensors(ws, x, amax)
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

    def measure(self, ws: WorkingSet, x: ArrayView, amax: ArrayView, slots: int) -> None:
        """Max-accumulate the amax of each matrix."""
        whole, tile = x.reshape(-1, self.columns), (max(self.rows, 1), max(self.columns, 1))
        if self.groups:
            ws.kernels.amax(whole, amax, tile, ws.stream)
        else:
            ws.kernels.group_amax(whole, amax, ws.inputs["group_sizes"], tile, slots, ws.stream)

    def _cast_tensors(self, ws: WorkingSet, x: ArrayView, amax: ArrayView) -> None:
        """Cast each matrix by a scale of its own, both sides at once."""
        own, k, stream = self.rule, ws.kernels, ws.stream
        q, q_t = (_found(ws, self.names(side)[0]) if side in self.sides else None for side in ("q", "qt"))
        inverse, whole = _found(ws, f"{self.name}_inv"), x.reshape(-1, self.columns)
        dense = pad(self.rows) == self.rows and pad(self.columns) == self.columns
        if not self.groups:
            to = Cast(own.format, q, q_t, None, inverse, amax, Rule(own.power_2, own.epsilon))
            k.quantize_transpose(whole, to, None, None, stream)
        elif q is not None and q_t is None and dense:
            scale, tile = ws.scratch[f"{self.name}_scale"], (max(self.rows, 1), max(self.columns, 1))
            k.scale_from_amax(amax, scale, inverse, *own.scale_limits, stream)
            how = own.format, tile, True, 0, 0, None, stream
            k.quantize(whole, q.reshape(*whole.shape), scale, inverse, None, *how)
        else:
            k.quantize_stack(x, q, q_t, amax, inverse, own.format, own.power_2, own.epsilon, stream)

    def _cast_rows(self, ws: WorkingSet, x: ArrayView, side: str, slots: int) -> None:
        """Cast the rows of matrices, or of their transposes, each row by its own scale."""
        own, k, stream, name = self.rule, ws.kernels, ws.stream, f"{self.name}_{side}"
        padded, amax, scale = (ws.scratch[f"{name}_{part}"] for part in ("padded", "amax", "scale"))
        codes, inverse = self.side(ws, side)
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


def _found(ws: WorkingSet, name: str) -> ArrayView:
    """Returns an operand's codes or scales: what forward saves, a temporary, a cached weight's, or a weight's
    cast."""
    for views in (ws.saved, ws.scratch, ws.inputs):
        if name in views:
            return views[name]
    return ws.outputs[name]


class _Gemm(NamedTuple):
    """One of the three GEMMs: its operands and which side of each it multiplies; ``fast``: its
    accumulation."""

    a: tuple[str, str]
    b: tuple[str, str]
    fast: bool


class _Casts(NamedTuple):
    """What a call casts: ``gemms`` on codes, and their ``operands`` by name."""

    gemms: dict[str, _Gemm]
    operands: dict[str, _Operand]

    def of(self, forward: bool, weight: bool = True) -> list[_Operand]:
        """Returns the operands that a pass casts: forward x and the ``weight``, backward the gradient."""
        return [
            own for own in self.operands.values() if (own.of != "g") is forward and (weight or own.of != "w")
        ]

    def saved(self, weight: bool = True) -> dict[str, Meta]:
        """Returns what backward reads of x, and of the ``weight``."""
        made: dict[str, Meta] = {}
        for own in self.of(True, weight):
            made |= own.codes(own.for_backward)
        return made

    def weight(self, for_backward: bool = False) -> dict[str, Meta]:
        """Returns the codes and scales of the weight; ``for_backward``: those that backward reads."""
        made: dict[str, Meta] = {}
        for own in self.operands.values():
            made |= own.codes(own.for_backward if for_backward else own.sides) if own.of == "w" else {}
        return made

    def run(
        self, ws: WorkingSet, given: Mapping[str, ArrayView], operands: list[_Operand], slots: int
    ) -> None:
        """Cast ``operands``, each matrix's amax taken once."""
        amaxes = _amaxes(operands)
        if amaxes:
            arrays.provider(ws.scratch["amaxes"].device).fill_zero(ws.scratch["amaxes"], ws.stream)
        measured: set[str] = set()
        for own in operands:
            amax = ws.scratch["amaxes"].slice(0, *amaxes[own.of]) if own.per_tensor else None
            if amax is not None and own.of not in measured:
                own.measure(ws, given[own.of], amax, slots)
                measured.add(own.of)
            own.cast(ws, given[own.of], amax, slots)


def _amaxes(operands: list[_Operand]) -> dict[str, tuple[int, int]]:
    """Returns where in a pass's row of amaxes those of x, of the weight's matrices and of the gradient lie,
    where these have one scale each: (start, count)."""
    counts = {own.of: max(own.groups, 1) for own in operands if own.per_tensor}
    starts = accumulate(counts.values(), initial=0)
    return {of: (start, count) for (of, count), start in zip(counts.items(), starts, strict=False)}


def _scratch(operands: list[_Operand], dtype: DType, elsewhere: Container[str] = ()) -> dict[str, Meta]:
    """Returns a pass's temporaries: codes and scales that are not ``elsewhere``, and what casts need."""
    made: dict[str, Meta] = {}
    for own in operands:
        made |= own.codes(own.sides) | own.temporaries(dtype)
    count = sum(count for _, count in _amaxes(operands).values())
    made |= {"amaxes": Meta((count,), float32)} if count else {}
    return {name: meta for name, meta in made.items() if name not in elsewhere}


def _casts(spec: ExpertLinearSpec, rows: int, grads: Container[str]) -> _Casts:
    """Returns what a call of ``rows`` rows casts, where ``grads`` are wanted."""
    oi = spec.layout == "oi"
    shapes = {"x": (0, rows, spec.in_features), "g": (0, rows, spec.out_features), "w": spec.weight_shape}
    # GEMM -> its operands and their sides, in the order of its rules
    wanted = {"fprop": (("x", "q"), ("w", "q" if oi else "qt"))}
    if "x" in grads:
        wanted["dgrad"] = ("g", "q"), ("w", "qt" if oi else "q")
    if "weight" in grads:
        wanted["wgrad"] = ("g", "qt"), ("x", "qt")
    found = _Casts({}, {})
    for gemm, sides in wanted.items():
        own = None if spec.fp8 is None else spec.fp8.gemms[gemm]
        if own is None or own.compute == "high_precision":
            continue
        names = []
        for (of, side), rule in zip(sides, (own.a, own.b), strict=True):
            known = found.operands.get(of)
            name = of if known is None or known.rule == rule else f"{gemm}_{of}"
            before = found.operands.get(name) or _Operand(name, of, *shapes[of], rule, (), ())
            for_backward = before.for_backward if gemm == "fprop" else (*before.for_backward, side)
            found.operands[name] = before._replace(sides=(*before.sides, side), for_backward=for_backward)
            names.append((name, side))
        a, b = names if oi or gemm != "wgrad" else names[::-1]
        found.gemms[gemm] = _Gemm(a, b, own.how is True)
    return found


class ExpertLinear(Operation):
    """y[r] = x[r] W_e^T + b_e for the rows r of group e; 0 for rows of no group, whose gradient is 0 too, and
    which count in no scale of x's and of y's gradient. Sizes that are negative or claim more rows than there
    are are an ArgumentError on the CPU; on a GPU, where nobody looks, such a size counts as 0, and what they
    claim beyond the rows does not count.

    Inputs: x h (..., K); group_sizes int32 (E,); weight h, see ``ExpertLinearSpec``; bias h (E, N) or None;
    with a cached weight ``expert_weight_cast``'s outputs. Output: y h (..., N). Gradients of x, weight and
    bias. x and the weight are cast for backward too, in the same pass, and are kept as they are only where
    its GEMM is in high precision.
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
        casts, cached = _casts(spec, row_count(x), grads), spec.weight_cached
        if cached:
            for name, meta in _casts(spec, 0, ("x",)).weight().items():  # both sides are given
                want(self.name, name, metas, meta.shape, meta.dtype)
        kept: tuple[str, ...] = ("group_sizes",) if grads else ()
        kept += ("weight",) if "x" in grads and "dgrad" not in casts.gemms else ()
        kept += ("x",) if "weight" in grads and "wgrad" not in casts.gemms else ()
        kept += tuple(casts.weight(for_backward=True)) if cached else ()
        y = Meta((*x.shape[:-1], spec.out_features), x.dtype)
        return Signature({"y": y}, casts.saved(not cached), kept, grads)

    def plan(self, spec: ExpertLinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature, x = self.infer(spec, metas, needs), want(self.name, "x", metas)
        m = row_count(x)
        casts = _casts(spec, m, signature.grads)
        space = workspace(kernels.grouped_gemm_workspace(spec.experts))
        forward = space | _scratch(casts.of(True, not spec.weight_cached), x.dtype, signature.saved)
        backward = space | _scratch(casts.of(False), x.dtype)
        if "bias" in signature.grads:
            numbers = Meta((m,), float32)
            backward |= {"zeros": numbers, "ones": numbers, "inverse": numbers}
            backward |= {"column": Meta((m, 1), x.dtype)}
        return Plan(spec, signature, kernels, forward, backward, casts)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        i, spec, casts = ws.inputs, plan.spec, plan.extra
        x, weight, layout = i["x"].rows(), i["weight"], "nt" if spec.layout == "oi" else "nn"
        check_groups(self.name, "m_splits", i["group_sizes"], x.shape[0], spec.slots)
        casts.run(ws, {"x": x, "w": weight}, casts.of(True, not spec.weight_cached), spec.slots)
        self._multiply(plan, ws, "fprop", x, weight, ws.outputs["y"].rows(), layout, i.get("bias"))

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        g, oi, inputs, outputs = cotangents["y"].rows(), plan.spec.layout == "oi", ws.inputs, ws.outputs
        plan.extra.run(ws, {"g": g}, plan.extra.of(False), plan.spec.slots)
        if "x" in outputs:
            weight, layout = inputs.get("weight"), "nn" if oi else "nt"
            self._multiply(plan, ws, "dgrad", g, weight, outputs["x"].rows(), layout)
        if "weight" in outputs:
            x = inputs["x"].rows() if "x" in inputs else None
            a, b = (g, x) if oi else (x, g)
            self._multiply(plan, ws, "wgrad", a, b, outputs["weight"], "tn")
        if "bias" in outputs:
            self._bias_gradient(plan, ws, g, outputs["bias"])

    def _multiply(
        self,
        plan: Plan,
        ws: WorkingSet,
        name: str,
        a: Any,
        b: Any,
        out: ArrayView,
        layout: str,
        bias: ArrayView | None = None,
    ) -> None:
        """The GEMM ``name``; ``a`` and ``b`` are read in high precision only, and may be None in FP8."""
        (gemms, operands), slots, sizes = plan.extra, plan.spec.slots, ws.inputs["group_sizes"]
        space = ws.scratch["workspace"]
        if name not in gemms:
            ws.kernels.grouped_gemm(a, b, out, sizes, layout, slots, bias, space, ws.stream)
            return
        left, right, fast = gemms[name]
        p, q = operands[left[0]], operands[right[0]]
        (a, a_inv), (b, b_inv) = p.side(ws, left[1]), q.side(ws, right[1])
        casts = p.rule.format, q.rule.format, a_inv, b_inv, p.rule.tile, q.rule.tile
        along = "terms" if name == "wgrad" else "rows"
        ws.kernels.grouped_fp8_gemm(a, b, out, sizes, along, slots, bias, *casts, fast, space, ws.stream)

    def _bias_gradient(self, plan: Plan, ws: WorkingSet, g: ArrayView, out: ArrayView) -> None:
        """The sums of each group's rows: a column of ones, transposed, times the rows. Ones are the scales of
        amaxes of 0."""
        k, s, experts = ws.kernels, ws.scratch, plan.spec.experts
        arrays.provider(g.device).fill_zero(s["zeros"], ws.stream)
        k.scale_from_amax(s["zeros"], s["ones"], s["inverse"], 1.0, False, 0.0, 1.0, ws.stream)
        k.copy(s["ones"].reshape(g.shape[0], 1), s["column"], ws.stream)
        sums = out.reshape(experts, 1, plan.spec.out_features)
        sizes = ws.inputs["group_sizes"]
        slots, space = plan.spec.slots, s["workspace"]
        k.grouped_gemm(s["column"], g, sums, sizes, "tn", slots, None, space, ws.stream)


class ExpertWeightCast(Operation):
    """The FP8 weight of ``expert_linear``, as it lies and transposed: what calls with ``weight_cached`` take.

    Input: weight, see ``ExpertLinearSpec``. Outputs: w_q, w_qt uint8 and their scales, float32 (w_inv per
    tensor, else w_q_inv and w_qt_inv); "dgrad_w" ... where the gradient of x has a rule of its own. Not
    differentiable.
    """

    name = "expert_weight_cast"
    parameters = ("weight",)

    def operands(self, spec: ExpertLinearSpec) -> dict[str, Meta]:
        """Returns the outputs."""
        return _casts(spec, 0, ("x",)).weight()

    def outputs(self, spec: ExpertLinearSpec) -> tuple[str, ...]:
        return tuple(self.operands(spec))

    def infer(self, spec: ExpertLinearSpec, metas: Metas, needs: Needs) -> Signature:
        want(self.name, "weight", metas, spec.weight_shape, *HIGH_PRECISION)
        return Signature(self.operands(spec))

    def plan(self, spec: ExpertLinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature, dtype = self.infer(spec, metas, needs), want(self.name, "weight", metas).dtype
        casts = _casts(spec, 0, ("x",))
        own = [operand for operand in casts.of(True) if operand.of == "w"]
        return Plan(spec, signature, kernels, _scratch(own, dtype, signature.outputs), {}, (casts, own))

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        casts, own = plan.extra
        casts.run(ws, {"w": ws.inputs["weight"]}, own, 0)


expert_linear = ExpertLinear()
expert_weight_cast = ExpertWeightCast()
