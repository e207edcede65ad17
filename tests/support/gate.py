"""An operation as a user writes it, registered once for every frontend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import fp8kit as fk
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import float32
from fp8kit.spec import Operation, Signature


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

    def forward(self, plan, ws):
        x = ws.inputs["x"].numpy()
        gate = 1 / (1 + np.exp(-ws.inputs["slope"].numpy() * x))
        ws.outputs["y"].numpy()[...] = x * gate
        if plan.signature.saved:
            ws.saved["gate"].numpy()[...] = gate

    def backward(self, plan, ws, cotangents):
        x, slope, gate = ws.inputs["x"].numpy(), ws.inputs["slope"].numpy(), ws.saved["gate"].numpy()
        grads = ws.outputs
        dy = cotangents["y"].numpy()
        inner = dy * x * gate * (1 - gate)
        if "x" in grads:
            grads["x"].numpy()[...] = dy * gate + inner * slope
        if "slope" in grads:
            grads["slope"].numpy()[...] = (inner * x).reshape(-1, x.shape[-1]).sum(0)


gate = fk.register_operation(Gate(), GateSpec)
