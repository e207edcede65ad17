"""``scale_rows``: y[r] = probs[r] x[r], differentiable in both: the probabilities of experts' rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.formats import HIGH_PRECISION, int32
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet


@dataclass(frozen=True)
class ScaleRowsSpec:
    """``features``: N of x."""

    features: int


class ScaleRows(Operation):
    """y[r] = x[r] * probs[r] in float32, rounded once. Inputs: x h (..., N), probs h (rows,), of any type.
    Output: y like x. Gradients of both. The kernels are those of permutations, by the map of each row to
    itself."""

    name = "scale_rows"

    def infer(self, spec: ScaleRowsSpec, metas: Metas, needs: Needs) -> Signature:
        inputs = {"x": want_rows(self.name, "x", metas, spec.features)}
        inputs["probs"] = want(self.name, "probs", metas, (row_count(inputs["x"]),), *HIGH_PRECISION)
        grads = {name: meta for name, meta in inputs.items() if name in needs}
        kept: tuple[str, ...] = ("probs",) if "x" in grads else ()
        kept += ("x",) if "probs" in grads else ()
        return Signature({"y": inputs["x"]}, {}, kept, grads)

    def plan(self, spec: ScaleRowsSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        rows = row_count(want_rows(self.name, "x", metas, spec.features))
        space = {"routing": Meta((rows, 1), int32), "row_map": Meta((rows, 2), int32)}
        space |= {"sizes": Meta((1,), int32), "counts": Meta((1,), int32)}
        return Plan(spec, self.infer(spec, metas, needs), kernels, space, space)

    def _row_map(self, ws: WorkingSet) -> ArrayView:
        """Row r is (r, 0): every token goes to the one expert that there is."""
        s = ws.scratch
        arrays.provider(s["routing"].device).fill_zero(s["routing"], ws.stream)
        ws.kernels.expert_rows(s["routing"], s["row_map"], s["sizes"], s["counts"], 1, ws.stream)
        return s["row_map"]

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        probs, y = ws.inputs["probs"], ws.outputs["y"].rows()
        column = probs.reshape(probs.size, 1)
        ws.kernels.permute_rows(ws.inputs["x"].rows(), self._row_map(ws), column, y, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        row_map, dy = self._row_map(ws), cotangents["y"].rows()
        if "x" in ws.outputs:
            probs = ws.inputs["probs"]
            column, dx = probs.reshape(probs.size, 1), ws.outputs["x"].rows()
            ws.kernels.permute_rows(dy, row_map, column, dx, ws.stream)
        if "probs" in ws.outputs:
            x, ds = ws.inputs["x"].rows(), ws.outputs["probs"]
            ws.kernels.unpermute_probs(dy, x, row_map, ds.reshape(ds.size, 1), ws.stream)


scale_rows = ScaleRows()
