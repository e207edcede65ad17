"""FP8 products with a scale for each row of an operand, along the whole contraction.

The rows of a transposed operand are other rows, with scales of their own: each orientation is cast from high
precision, out of a copy that is padded with zeros. What backward's GEMMs read may have the scale of the whole
tensor instead, the same one for each of its rows (torchao's rowwise_with_gw_hp).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape
from fp8kit.formats import float32
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_quantized import Pair, QuantizedProduct, pad
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, WorkingSet


class RowProduct(QuantizedProduct):
    """``Product`` on codes padded to multiples of 16, with a scale_inv for each of their rows."""

    kernels = ("quantize", "copy", "amax", "scale_from_amax", "fp8_gemm")

    def __init__(self, spec: ProductSpec, *of_the_call: Any) -> None:
        super().__init__(spec, *of_the_call)
        # operands whose rows all have the scale of the tensor
        self.alike = {name for name, (_, _, own) in self.operands.items() if own.granularity == "tensor"}
        for name in self.alike:
            rows, columns, own = self.operands[name]
            self.operands[name] = rows, columns, replace(own, granularity="row")

    @staticmethod
    def shapes(rows: int, columns: int, quantizer: Quantizer) -> tuple[Shape, Shape]:
        return (pad(rows), pad(columns)), (pad(rows),)

    @staticmethod
    def grid(scale_inv: Any, quantizer: Quantizer) -> Any:
        return scale_inv.reshape(-1, 1)

    def _temporaries(self, operand: str) -> dict[str, Meta]:
        size = {"x": (self.m, self.k), "w": (self.n, self.k), "g": (self.m, self.n)}[operand]
        rows, columns = map(pad, size)
        name = f"{self.spec.prefix}{operand}_rows"
        matrix, scales = Meta((rows * columns,), self.dtype), Meta((2 * max(rows, columns),), float32)
        return super()._temporaries(operand) | {name: matrix, f"{name}_scales": scales}

    def _cast(self, ws: WorkingSet, operand: str, x: Any, into: Pair, amax_known: bool = False) -> None:
        sides = [x, x.transpose(1, 0)]
        if operand == "w" and not self.oi:
            sides.reverse()
        for side, views, source in zip((f"{operand}_q", f"{operand}_qt"), into, sides, strict=True):
            codes, scale_inv = map(views.get, self.names[side])
            if codes is not None and scale_inv is not None:
                self._cast_rows(ws, side, source, codes, scale_inv)

    def _cast_rows(
        self, ws: WorkingSet, operand: str, x: ArrayView, codes: ArrayView, scale_inv: ArrayView
    ) -> None:
        """Cast the rows of x, a matrix of any strides, each by its own scale or all by one: ``operand`` of a
        GEMM."""
        source, own = operand[0], self.operands[operand][2]
        k, name = ws.kernels, f"{self.spec.prefix}{source}_rows"
        (rows, columns), (m, n) = codes.shape, x.shape
        padded = ws.scratch[name].first((rows, columns))
        amax, scale = (ws.scratch[f"{name}_scales"].slice(0, start, rows) for start in (0, rows))
        for zeros in (padded, amax, scale):
            arrays.fill_zero(zeros, ws.stream)
        k.copy(x, padded.slice(0, 0, m).slice(1, 0, n), ws.stream)
        if operand in self.alike:
            whole = scale.slice(0, 0, 1)
            k.amax(padded, whole, padded.shape, ws.stream)
            self.share(ws, source, whole)
            k.copy(whole.repeated(rows), amax, ws.stream)
        else:
            k.amax(padded, amax, (1, columns), ws.stream)
            self.share(ws, operand, amax)
        k.scale_from_amax(amax, scale, scale_inv, *own.scale_limits, ws.stream)
        k.quantize(
            padded, codes, scale, scale_inv, None, own.format, (1, columns), True, 0, 0, None, ws.stream
        )
