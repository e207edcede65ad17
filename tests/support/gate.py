"""An operation as a user writes it, registered once for every frontend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import fp8kit as fk
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import float32
from fp8kit.spec import Operation, Plan, Signature


@dataclass(frozen=True)
class GateSpec:
    """``features``: length of the last dimension."""

    features: int


class Gate(Operation):
    """y = x sigmoid(a x), with a parameter a (features,). Inputs: x, slope. sigmoid(a x) is saved."""

    name = "user_gate"
    parameters = ("slope",)
    arguments = {"slope": "a"}  # noqa: RUF012

    def infer(self, spec, metas, needs):
        x, slope = metas["x"], metas["slope"]
        if x.dtype != float32:
            raise FormatError(self.name, "x", x.dtype.name, "float32")
        if slope.dtype != x.dtype:
            raise FormatError(self.name, "slope", slope.dtype.name, x.dtype.name)
        if slope.shape != (spec.features,):
            raise ShapeError(self.name, "slope", f"shape {slope.shape}", f"({spec.features},)")
        grads = {name: metas[name] for name in ("x", "slope") if name in needs}
        return Signature({"y": x}, {"gate": x} if grads else {}, ("x", "slope") if grads else (), grads)

    def plan(self, spec, metas, needs, kernels):
        return Plan(spec, self.infer(spec, metas, needs), kernels)

    def forward(self, plan, inputs, outputs, saved, scratch, stream):
        x = inputs["x"].numpy()
        gate = 1 / (1 + np.exp(-inputs["slope"].numpy() * x))
        outputs["y"].numpy()[...] = x * gate
        if plan.signature.saved:
            saved["gate"].numpy()[...] = gate

    def backward(self, plan, kept, saved, cotangents, grads, scratch, stream):
        x, slope, gate = kept["x"].numpy(), kept["slope"].numpy(), saved["gate"].numpy()
        dy = cotangents["y"].numpy()
        inner = dy * x * gate * (1 - gate)
        if "x" in grads:
            grads["x"].numpy()[...] = dy * gate + inner * slope
        if "slope" in grads:
            grads["slope"].numpy()[...] = (inner * x).reshape(-1, x.shape[-1]).sum(0)


gate = fk.register_operation(Gate(), GateSpec)
