"""Products in high precision: the operands as they are."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.ops.product import Product
from fp8kit.spec import Meta, WorkingSet


class PlainProduct(Product):
    """``Product`` on float32, bfloat16 or float16 operands."""

    def kept(self) -> tuple[str, ...]:
        return tuple(self.weights) if self.needs_x else ()

    def scratch(self) -> dict[str, Meta]:
        return self._weight_buffer() | super().scratch()

    def backward_scratch(self) -> dict[str, Meta]:
        return (self._weight_buffer() if self.needs_x else {}) | super().backward_scratch()

    def workspace(self, k: Any) -> int:
        return max(int(k.gemm_workspace()), int(k.column_sum_workspace(self.m, self.n)))

    def fprop(
        self, ws: WorkingSet, x: ArrayView | None, y: ArrayView, addend: ArrayView | None = None
    ) -> None:
        bias, weight = self._bias(ws), self._whole_weight(ws)
        self._gemm(ws, x, weight, y, "nt" if self.oi else "nn", bias, addend)

    def dgrad(self, ws: WorkingSet, g: ArrayView | None, dx: ArrayView) -> None:
        self._gemm(ws, g, self._whole_weight(ws), dx, "nn" if self.oi else "nt")

    def wgrad(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> None:
        assert g is not None
        for name, start, n in zip(self.weights, self.starts, self.spec.segments, strict=True):
            part, out = g if len(self.weights) == 1 else g.slice(1, start, n), ws.outputs[name]
            a, b = (part, x) if self.oi else (x, part)
            self._gemm(ws, a, b, out, "tn", None, out if self.adds else None)

    @staticmethod
    def _gemm(
        ws: WorkingSet,
        a: ArrayView | None,
        b: ArrayView | None,
        out: ArrayView,
        layout: str,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        ws.kernels.gemm(a, b, out, layout, bias, addend, ws.scratch["workspace"], ws.stream)
