"""``softmax`` over the last dimension, and ``mse``, the mean squared error: what unit scaling has besides the
layers' own operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit.errors import ShapeError
from fp8kit.formats import HIGH_PRECISION, float32
from fp8kit.ops.partition import RowWise
from fp8kit.ops.product import want, want_rows
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet, workspace


@dataclass(frozen=True)
class SoftmaxSpec:
    """``features``: of the last dimension."""

    features: int


class Softmax(RowWise):
    """y = softmax(x) over the last dimension. Inputs: x h (..., N). Output: y."""

    name = "softmax"

    def infer(self, spec: SoftmaxSpec, metas: Metas, needs: Needs) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        return Signature({"y": x}, {}, ("y",) if "x" in needs else (), {"x": x} if "x" in needs else {})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        ws.kernels.softmax_fwd(ws.inputs["x"].rows(), ws.outputs["y"].rows(), ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        y, dy = ws.inputs["y"].rows(), cotangents["y"].rows()
        ws.kernels.softmax_bwd(y, dy, ws.outputs["x"].rows(), ws.stream)


@dataclass(frozen=True)
class MseSpec:
    """``mse`` has no static arguments."""


class Mse(Operation):
    """mean((x - target)^2). Inputs: x h, any shape; target like x. Output: loss float32 (1,). The
    differences are rounded to h once; their squares are summed in float32."""

    name = "mse"
    results = ("loss",)
    arguments: ClassVar[dict[str, str]] = {"x": "input"}

    def infer(self, spec: MseSpec, metas: Metas, needs: Needs) -> Signature:
        x = want(self.name, "x", metas, None, *HIGH_PRECISION)
        want(self.name, "target", metas, x.shape, x.dtype)
        if not math.prod(x.shape):
            raise ShapeError(self.name, "x", f"shape {x.shape}", "at least one element")
        grads: dict[str, Meta] = {name: x for name in ("x", "target") if name in needs}
        return Signature({"loss": Meta((1,), float32)}, {"difference": x}, (), grads)

    def plan(self, spec: MseSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature = self.infer(spec, metas, needs)
        size = math.prod(signature.saved["difference"].shape)
        scratch = workspace(kernels.l2norm_workspace([size])) | {"norm": Meta((1,), float32)}
        scratch["negative"] = signature.saved["difference"]
        return Plan(spec, signature, kernels, scratch)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        k, difference, norm = ws.kernels, ws.saved["difference"], ws.scratch["norm"]
        size, loss, negative = difference.size, ws.outputs["loss"], ws.scratch["negative"]
        lines = ws.inputs["target"].reshape(1, size), None, negative.reshape(1, size)
        k.scale_lines(*lines, 0, -1.0, False, ws.stream)
        k.add(ws.inputs["x"], negative, difference, ws.stream)
        k.l2norm([difference], norm, ws.scratch["workspace"], ws.stream)
        k.scale_lines(norm.reshape(1, 1), norm, loss.reshape(1, 1), 0, 1 / size, False, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        difference, dloss = ws.saved["difference"], cotangents["loss"]
        flat = difference.reshape(1, difference.size)
        for name, sign in (("x", 2.0), ("target", -2.0)):
            out = ws.outputs.get(name)
            if out is not None:
                lines = flat, dloss, out.reshape(1, flat.size)
                ws.kernels.scale_lines(*lines, 0, sign / flat.size, False, ws.stream)


softmax = Softmax()
mse = Mse()
