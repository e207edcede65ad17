"""``Collector``: the operation ``statistics`` within another operation, on a tensor that is there for a
moment only."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView, Shape
from fp8kit.buffers import nbytes_of
from fp8kit.formats import DType, float32
from fp8kit.ops.statistics import StatisticsSpec, statistics
from fp8kit.spec import Meta, Plan, WorkingSet

_ALIGNMENT = 256  # bytes


class Collector:
    """The statistics ``spec`` of a matrix (rows, columns) of ``dtype``. ``knows_amax``: whether its amax is
    known. ``meta``: of their array. Their temporaries lie in the other operation's workspace, which holds
    nothing between two of its kernels."""

    def __init__(self, spec: StatisticsSpec, shape: Shape, dtype: DType, knows_amax: bool = False) -> None:
        self.spec = spec
        x = Meta(shape, dtype)
        self.metas = {"x": x, "twin": x} if spec.twin else {"x": x}
        if knows_amax and any(cast.brief for cast in spec.casts):
            self.metas["amax"] = Meta((1,), float32)
        # casts by the scale that the layer has from earlier steps
        for cast in spec.casts:
            if cast.given and cast.quantizer.needs_state:
                self.metas[f"scale_{cast.given}"] = Meta((1,), float32)
        self.meta = statistics.infer(spec, self.metas, frozenset()).outputs["record"]
        self._plan: Plan | None = None

    def _planned(self, kernels: Any) -> Plan:
        if self._plan is None or self._plan.kernels is not kernels:
            self._plan = statistics.plan(self.spec, self.metas, frozenset(), kernels)
        return self._plan

    def workspace(self, kernels: Any) -> int:
        """Bytes of workspace."""
        return sum(map(_nbytes, self._planned(kernels).scratch.values()))

    def run(
        self,
        ws: WorkingSet,
        x: ArrayView,
        out: ArrayView,
        twin: ArrayView | None = None,
        scale: ArrayView | None = None,
        amax: ArrayView | None = None,
    ) -> None:
        """Fill ``out`` from x, and from its ``twin``. ``scale``: the layer's own of x. ``amax``: x's."""
        plan = self._planned(ws.kernels)
        inputs = {"x": x}
        if twin is not None:
            inputs["twin"] = twin
        if "amax" in self.metas:
            assert amax is not None
            inputs["amax"] = amax
        for name in self.metas:
            if name.startswith("scale_"):
                assert scale is not None
                inputs[name] = scale
        space, at, scratch = ws.scratch["workspace"], 0, {}
        for name, meta in plan.scratch.items():
            scratch[name] = ArrayView(space.ptr + at, meta.shape, meta.dtype, space.device, space.owner)
            at += _nbytes(meta)
        outputs = {"record": out}
        statistics.forward(plan, WorkingSet(ws.kernels, inputs, outputs, {}, scratch, ws.stream))


def _nbytes(meta: Meta) -> int:
    return -(-nbytes_of(meta) // _ALIGNMENT) * _ALIGNMENT
