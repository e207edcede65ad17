"""``expert_linear``: rows in groups whose sizes lie on the device, each group times a matrix of its own.

What ``grouped_linear`` does with sizes that the host knows, this does without a look at them: it can be
captured into a CUDA graph, and works inside ``jax.jit``. Weights of all groups lie in one array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fp8kit import arrays
from fp8kit.arguments import choice, integer
from fp8kit.arrays import ArrayView
from fp8kit.errors import ShapeError, UnsupportedError
from fp8kit.formats import E4M3, E5M2, float32, int32, uint8
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet

_TILES = ("tensor", "row", "block_1x128", "block_128x128")


@dataclass(frozen=True)
class ExpertLinearSpec:
    """``experts`` E, ``in_features`` K, ``out_features`` N; ``layout``: the weight is "oi", (E, N, K), or
    "io", (E, K, N). ``fp8``: None for high precision. ``slots``: 0, groups lie one after the other; else
    group e begins at row e * slots."""

    experts: int
    in_features: int
    out_features: int
    layout: str = "oi"
    fp8: Quantization | None = None
    slots: int = 0

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


def _check_supported(name: str, gemm: Gemm) -> None:
    """UnsupportedError for what the grouped kernel does not compute."""
    if gemm.compute == "high_precision":
        return
    if gemm.compute != "quantized" or gemm.plain or gemm.recast or not isinstance(gemm.how, bool):
        wanted = "codes by codes, or high precision, with sizes of groups on the device"
        raise UnsupportedError("expert_linear", f"{name}.compute", gemm.compute, wanted)
    for place, own in (("a", gemm.a), ("b", gemm.b)):
        plain = Quantizer(
            own.format, own.granularity, scale_rule=own.scale_rule, epsilon=own.epsilon, hadamard=0
        )
        known = own.granularity in _TILES and own.scale_rule in ("exact", "power_2")
        if own != plain or not known or own.format not in (E4M3, E5M2):
            wanted = (
                "E4M3 or E5M2 with scales of the data, per tensor, row or block of 128: "
                "sizes of groups on the device go with no other (delayed scaling wants them on the host)"
            )
            raise UnsupportedError("expert_linear", f"{name}.{place}", own, wanted)
    if gemm.a.format == gemm.b.format == E5M2:
        raise UnsupportedError("expert_linear", f"{name}.a, b", "E5M2 for both", "E4M3 for at least one")


class _Operand(NamedTuple):
    """One operand of one GEMM: the (``groups``) matrices (rows, columns) that it is, the rule and the tile of
    its cast, None in high precision, and the names of its buffers."""

    name: str
    groups: int
    rows: int
    columns: int
    rule: Quantizer | None
    tile: tuple[int, int] = (0, 0)

    def metas(self) -> dict[str, Meta]:
        """Codes, amaxes, scales and their inverses."""
        if self.rule is None:
            return {}
        scales = Meta((self.groups * self.scales,), float32)
        found = {f"{self.name}_{part}": scales for part in ("amax", "scale", "inv")}
        return found | {f"{self.name}_q": Meta((self.groups * self.rows, self.columns), uint8)}

    @property
    def scales(self) -> int:
        """Scales of a matrix."""
        height, width = self.tile
        return math.ceil(self.rows / max(height, 1)) * math.ceil(self.columns / max(width, 1)) or 1

    def cast(self, ws: WorkingSet, x: ArrayView) -> tuple[ArrayView, ArrayView | None]:
        """(codes, scale_inv) of x, or (x, None)."""
        if self.rule is None:
            return x, None
        k, stream, rule = ws.kernels, ws.stream, self.rule
        q, amax, scale, inv = (ws.scratch[f"{self.name}_{part}"] for part in ("q", "amax", "scale", "inv"))
        arrays.provider(x.device).fill_zero(amax, stream)
        matrix = x.reshape(self.groups * self.rows, self.columns)
        # tiles do not cross from one matrix to the next
        whole = self.groups == 1 or self.rows % max(self.tile[0], 1) == 0
        parts = 1 if whole else self.groups
        height, count = matrix.shape[0] // parts, amax.size // parts
        for i in range(parts):
            part, codes = (each.slice(0, i * height, height) for each in (matrix, q))
            own = [each.slice(0, i * count, count) for each in (amax, scale, inv)]
            k.amax(part, own[0], self.tile, stream)
            k.scale_from_amax(*own, *rule.scale_limits, stream)
            k.quantize(part, codes, own[1], own[2], None, rule.format, self.tile, True, 0, 0, None, stream)
        return q.reshape(*x.shape), inv


def _natural(rule: Quantizer, rows: int, columns: int, by_rows: bool) -> tuple[int, int]:
    """The tile of a matrix as it lies, whose contraction is its rows (``by_rows``) or its columns."""
    height, width = rule.tile
    if not height:
        return max(rows, 1), max(columns, 1)
    width = width or max(rows if by_rows else columns, 1)
    return (width, height) if by_rows else (height, width)


class ExpertLinear(Operation):
    """y[r] = x[r] W_e^T + b_e for the rows r of group e; 0 for rows of no group, whose gradient is 0 too.

    Inputs: x h (..., K); group_sizes int32 (E,); weight h, see ``ExpertLinearSpec``; bias h (E, N) or None.
    Output: y h (..., N). Gradients of x, weight and bias. x and the weight are kept as they are, and backward
    casts them along its own contractions.
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
        grads = {name: meta for name, meta in (("x", x), ("weight", weight)) if name in needs}
        if metas.get("bias") is not None:
            bias = want(self.name, "bias", metas, (spec.experts, spec.out_features), x.dtype)
            grads |= {"bias": bias} if "bias" in needs else {}
        kept: tuple[str, ...] = (
            ("group_sizes", "weight") if "x" in grads else ("group_sizes",) if grads else ()
        )
        kept += ("x",) if "weight" in grads else ()
        return Signature({"y": Meta((*x.shape[:-1], spec.out_features), x.dtype)}, {}, kept, grads)

    def plan(self, spec: ExpertLinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature, x = self.infer(spec, metas, needs), want(self.name, "x", metas)
        m, sides = row_count(x), spec.weight_shape[1:]
        shapes = {"x": (1, m, spec.in_features), "g": (1, m, spec.out_features), "w": (spec.experts, *sides)}
        by_rows = {"fprop": (False, spec.layout == "io"), "dgrad": (False, spec.layout == "oi")}
        operands, metas_of = {}, {"fprop": dict[str, Meta](), "backward": dict[str, Meta]()}
        for gemm, pair in (("fprop", "xw"), ("dgrad", "gw"), ("wgrad", "gx")):
            own = None if spec.fp8 is None else spec.fp8.gemms[gemm]
            if own is not None and own.compute == "high_precision":
                own = None
            for operand, rows_first, rule in zip(
                pair,
                by_rows.get(gemm, (True, True)),
                (None, None) if own is None else (own.a, own.b),
                strict=True,
            ):
                groups, rows, columns = shapes[operand]
                tile = (0, 0) if rule is None else _natural(rule, rows, columns, rows_first)
                made = _Operand(f"{gemm}_{operand}", groups, rows, columns, rule, tile)
                operands[f"{gemm}_{operand}"] = made
                wanted = gemm == "fprop" or ("x" if gemm == "dgrad" else "weight") in signature.grads
                if wanted:
                    metas_of["fprop" if gemm == "fprop" else "backward"] |= made.metas()
        if "bias" in signature.grads:
            numbers = Meta((m,), float32)
            metas_of["backward"] |= {"zeros": numbers, "ones": numbers, "inverse": numbers}
            metas_of["backward"] |= {"column": Meta((m, 1), x.dtype)}
        return Plan(spec, signature, kernels, metas_of["fprop"], metas_of["backward"], operands)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        i = ws.inputs
        x, y, layout = i["x"].rows(), ws.outputs["y"].rows(), "nt" if plan.spec.layout == "oi" else "nn"
        self._multiply(plan, ws, "fprop_x", x, "fprop_w", i["weight"], y, layout, i.get("bias"))

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        g, oi = cotangents["y"].rows(), plan.spec.layout == "oi"
        if "x" in ws.outputs:
            dx, layout = ws.outputs["x"].rows(), "nn" if oi else "nt"
            self._multiply(plan, ws, "dgrad_g", g, "dgrad_w", ws.inputs["weight"], dx, layout)
        if "weight" in ws.outputs:
            pair = ("wgrad_g", g), ("wgrad_x", ws.inputs["x"].rows())
            (left, a), (right, b) = pair if oi else pair[::-1]
            self._multiply(plan, ws, left, a, right, b, ws.outputs["weight"], "tn")
        if "bias" in ws.outputs:
            self._bias_gradient(plan, ws, g, ws.outputs["bias"])

    def _multiply(
        self,
        plan: Plan,
        ws: WorkingSet,
        left: str,
        a: ArrayView,
        right: str,
        b: ArrayView,
        out: ArrayView,
        layout: str,
        bias: ArrayView | None = None,
    ) -> None:
        p, q = plan.extra[left], plan.extra[right]
        (a, a_inv), (b, b_inv) = p.cast(ws, a), q.cast(ws, b)
        of = [None if own.rule is None else own.rule.format for own in (p, q)]
        tiles, slots, sizes = (p.tile, q.tile), plan.spec.slots, ws.inputs["group_sizes"]
        ws.kernels.grouped_gemm(a, b, out, sizes, layout, slots, bias, *of, a_inv, b_inv, *tiles, ws.stream)

    def _bias_gradient(self, plan: Plan, ws: WorkingSet, g: ArrayView, out: ArrayView) -> None:
        """The sums of each group's rows: a column of ones, transposed, times the rows. Ones are the scales of
        amaxes of 0."""
        k, s, experts = ws.kernels, ws.scratch, plan.spec.experts
        arrays.provider(g.device).fill_zero(s["zeros"], ws.stream)
        k.scale_from_amax(s["zeros"], s["ones"], s["inverse"], 1.0, False, 0.0, 1.0, ws.stream)
        k.copy(s["ones"].reshape(g.shape[0], 1), s["column"], ws.stream)
        sums = out.reshape(experts, 1, plan.spec.out_features)
        none = None, None, None, None, None, (0, 0), (0, 0)
        sizes = ws.inputs["group_sizes"]
        k.grouped_gemm(s["column"], g, sums, sizes, "tn", plan.spec.slots, *none, ws.stream)


expert_linear = ExpertLinear()
