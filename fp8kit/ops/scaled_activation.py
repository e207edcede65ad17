"""``scaled_activation``: y[r] = probs[r] activation(x[r]), differentiable in both: what stands between two
products of experts, whose rows have probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.activation import ALL
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.formats import HIGH_PRECISION, int32
from fp8kit.ops.activation import activate, activate_bwd, all_numbers, gradient_workspace
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet, workspace


@dataclass(frozen=True)
class ScaledActivationSpec:
    """``activation``, ``features``, ``params``: as ``ActivationSpec``'s, of one without learned numbers."""

    activation: str
    features: int
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        params = all_numbers("scaled_activation", "params", self.activation, self.params)
        object.__setattr__(self, "params", params)
        if ALL[self.activation].learned:
            wanted = "one without learned numbers"
            raise ArgumentError("scaled_activation", "activation", self.activation, wanted)
        if self.features % ALL[self.activation].parts:
            wanted = f"an even number of features for {self.activation}"
            raise ShapeError("scaled_activation", "x", f"{self.features} features", wanted)


def want_row_probs(operation: str, x: Shape, probs: Shape) -> int:
    """The features of x, an even number. ShapeError for others, and for probs that are not x's rows."""
    x, probs = tuple(x), tuple(probs)
    if not x or x[-1] % 2 or not x[-1]:
        raise ShapeError(operation, "inp", f"shape {x}", "(..., 2 F)")
    if probs != x[:-1]:
        raise ShapeError(operation, "probs", f"shape {probs}", f"{x[:-1]}, inp's without the last dimension")
    return x[-1]


class ScaledActivation(Operation):
    """y[r] = activation(x[r]) * probs[r]: the activation rounded to x's dtype, then the product, in float32,
    once more; such as ScaledSwiGLU. Inputs: x h (..., F), of a gated activation (..., 2 F), the gate first;
    probs h (rows,), of any type. Output: y h (..., F). Gradients of both; backward computes the activation
    anew. The kernels that multiply are those of permutations, by the map of each row to itself."""

    name = "scaled_activation"

    def _inputs(self, spec: Any, metas: Metas, needs: Needs) -> tuple[Meta, dict[str, Meta]]:
        """Returns the meta of x, and those of the gradients."""
        x = want_rows(self.name, "x", metas, spec.features)
        probs = want(self.name, "probs", metas, (row_count(x),), *HIGH_PRECISION)
        return x, {name: meta for name, meta in (("x", x), ("probs", probs)) if name in needs}

    def _row_map(self, ws: WorkingSet) -> ArrayView:
        """Row r is (r, 0): every token goes to the one expert that there is."""
        s = ws.scratch
        arrays.fill_zero(s["routing"], ws.stream)
        ws.kernels.expert_rows(s["routing"], s["row_map"], s["sizes"], s["counts"], 1, ws.stream)
        return s["row_map"]

    def infer(self, spec: Any, metas: Metas, needs: Needs) -> Signature:
        x, grads = self._inputs(spec, metas, needs)
        kept = ("x", *(("probs",) if "x" in grads else ())) if grads else ()
        y = Meta((*x.shape[:-1], spec.features // ALL[spec.activation].parts), x.dtype)
        return Signature({"y": y}, {}, kept, grads)

    def plan(self, spec: Any, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        x, signature = want(self.name, "x", metas), self.infer(spec, metas, needs)
        rows = row_count(x)
        hidden = Meta((rows, signature.outputs["y"].shape[-1]), x.dtype)
        space = {"routing": Meta((rows, 1), int32), "row_map": Meta((rows, 2), int32), "hidden": hidden}
        space |= {"sizes": Meta((1,), int32), "counts": Meta((1,), int32)}
        more = workspace(gradient_workspace(kernels, spec.activation, rows, spec.features))
        return Plan(spec, signature, kernels, space, space | more)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s, probs, hidden = plan.spec, ws.inputs["probs"], ws.scratch["hidden"]
        activate(ws, s.activation, s.params, ws.inputs["x"].rows(), None, hidden)
        column = probs.reshape(probs.size, 1)
        ws.kernels.permute_rows(hidden, self._row_map(ws), column, ws.outputs["y"].rows(), ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        s, hidden, x = plan.spec, ws.scratch["hidden"], ws.inputs["x"].rows()
        row_map, dy = self._row_map(ws), cotangents["y"].rows()
        if "probs" in ws.outputs:
            activate(ws, s.activation, s.params, x, None, hidden)
            ds = ws.outputs["probs"]
            ws.kernels.unpermute_probs(dy, hidden, row_map, ds.reshape(ds.size, 1), ws.stream)
        if "x" in ws.outputs:
            probs, out = ws.inputs["probs"], (ws.outputs["x"].rows(), None)
            ws.kernels.permute_rows(dy, row_map, probs.reshape(probs.size, 1), hidden, ws.stream)
            given = hidden, x, None
            activate_bwd(ws, s.activation, s.params, given, out, ws.scratch["workspace"])


scaled_activation = ScaledActivation()
