"""``line_scales`` and ``scale_lines``: sizes of rows or of columns, and products with them or with
constants, forward and backward apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8kit.arguments import number
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import float32
from fp8kit.ops import partition as split
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import Meta, Metas, Needs, Operation, Partitions, Plan, Shapes, Signature, Views, WorkingSet


@dataclass(frozen=True)
class LineScalesSpec:
    """``features`` of x; ``axis``: 0 for a scale of each row, 1 of each column; ``start``: the first column
    that counts; ``power_2``: the largest power of two that is not larger, instead of the magnitude itself."""

    features: int
    axis: int
    start: int = 0
    power_2: bool = True


class LineScales(Operation):
    """The largest magnitude of each line of x + bias0 from column ``start`` on, or the power of two below,
    see the kernel ``line_scales``.

    Inputs: x h (..., F), bias0 h (F,) or None. Output: scales float32, (rows,) or (F - start,). Not
    differentiable.
    """

    name = "line_scales"
    results = ("scales",)

    def infer(self, spec: LineScalesSpec, metas: Metas, needs: Needs) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        if not 0 <= spec.start <= spec.features or spec.axis not in (0, 1):
            got = f"column {spec.start}, axis {spec.axis}"
            raise ShapeError(self.name, "start", got, f"0 to {spec.features}, axis 0 or 1")
        if metas.get("bias0") is not None:
            want(self.name, "bias0", metas, (spec.features,), x.dtype)
        count = spec.features - spec.start if spec.axis else row_count(x)
        return Signature({"scales": Meta((count,), float32)})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        spec, bias = plan.spec, ws.inputs.get("bias0")
        count = spec.features - spec.start
        x = ws.inputs["x"].rows().slice(1, spec.start, count)
        shift = None if bias is None else bias.slice(0, spec.start, count)
        ws.kernels.line_scales(x, shift, ws.outputs["scales"], spec.axis, spec.power_2, ws.stream)


@dataclass(frozen=True)
class ScaleLinesSpec:
    """``forward``, ``backward``: finite numbers that x and y's gradient are multiplied by. ``axis``: what
    scales belong to, see ``LineScalesSpec``; ``divide``: by them, not multiplied."""

    forward: float = 1.0
    backward: float = 1.0
    axis: int = 0
    divide: bool = False

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            least = -float("inf")
            value = number("scale_lines", name, getattr(self, name), kind=FormatError, least=least)
            object.__setattr__(self, name, float(value))
        if self.axis not in (0, 1):
            raise FormatError("scale_lines", "axis", self.axis, "0 or 1")


class ScaleLines(Operation):
    """y = forward x scales, or forward x / scales; the gradient is dx = backward dy scales, or / scales.

    Inputs: x h (..., N), scales float32, (rows,) or (N,), or None. Output: y. Gradient of x alone; without
    scales a ``backward`` of 1 takes no pass: dx is dy.
    """

    name = "scale_lines"

    def partitions(self, spec: ScaleLinesSpec, metas: Metas, views: Shapes) -> Partitions:
        return () if metas.get("scales") is not None else split.rows(metas, views, "x")

    def _x(self, spec: ScaleLinesSpec, metas: Metas) -> Meta:
        x = want_rows(self.name, "x", metas, (want(self.name, "x", metas).shape or (1,))[-1])
        if metas.get("scales") is not None:
            count = x.shape[-1] if spec.axis else row_count(x)
            want(self.name, "scales", metas, (count,), float32)
        return x

    def infer(self, spec: ScaleLinesSpec, metas: Metas, needs: Needs) -> Signature:
        x, scaled, wanted = self._x(spec, metas), metas.get("scales") is not None, "x" in needs
        if wanted and not scaled and spec.backward == 1:
            return Signature({"y": x}, grad_passes={"x": "y"})
        return Signature({"y": x}, {}, ("scales",) if scaled and wanted else (), {"x": x} if wanted else {})

    def _run(self, ws: WorkingSet, x: Any, out: Any, factor: float, spec: ScaleLinesSpec) -> None:
        how = spec.axis, factor, spec.divide, ws.stream
        ws.kernels.scale_lines(x.rows(), ws.inputs.get("scales"), out.rows(), *how)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        self._run(ws, ws.inputs["x"], ws.outputs["y"], plan.spec.forward, plan.spec)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        if "x" in ws.outputs:
            self._run(ws, cotangents["y"], ws.outputs["x"], plan.spec.backward, plan.spec)


line_scales = LineScales()
scale_lines = ScaleLines()
