"""Products in high precision: the operands as they are."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.ops.product import Product, required
from fp8kit.spec import Meta, Views


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
        self,
        k: Any,
        x: ArrayView | None,
        inputs: Views,
        outputs: Views,
        saved: Views,
        scratch: Views,
        y: ArrayView,
        stream: int,
        addend: ArrayView | None = None,
    ) -> None:
        assert x is not None
        bias = self._bias(k, inputs, scratch, stream)
        weight = self._whole_weight(k, inputs, scratch, stream)
        k.gemm(x, weight, y, "nt" if self.oi else "nn", bias, addend, scratch["workspace"], stream)

    def dgrad(
        self,
        k: Any,
        g: ArrayView | None,
        kept: Views,
        saved: Views,
        scratch: Views,
        dx: ArrayView,
        stream: int,
    ) -> None:
        assert g is not None
        weight = self._whole_weight(k, kept, scratch, stream)
        k.gemm(g, weight, dx, "nn" if self.oi else "nt", None, None, scratch["workspace"], stream)

    def wgrad(
        self,
        k: Any,
        g: ArrayView | None,
        x: ArrayView | None,
        saved: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        assert g is not None and x is not None
        for name, start, n in zip(self.weights, self.starts, self.spec.segments, strict=True):
            part = g if len(self.weights) == 1 else g.slice(1, start, n)
            a, b = (part, x) if self.oi else (x, part)
            out = required(grads, name)
            k.gemm(a, b, out, "tn", None, out if self.adds else None, scratch["workspace"], stream)
