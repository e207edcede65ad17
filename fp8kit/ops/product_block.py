"""FP8 products with a scale for each block of 128 elements along the contraction.

What is cast to two orientations is cast from high precision twice, since blocks run along the contraction,
which is another axis there; squares have the same codes in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import Cast, Rule, block_shapes
from fp8kit.ops.product_quantized import Operand, Pair, QuantizedProduct, unsupported
from fp8kit.quantization import Gemm, Quantizer
from fp8kit.spec import WorkingSet


class BlockProduct(QuantizedProduct):
    """``Product`` on operands of ``block_gemm``."""

    kernels = ("block_quantize", "block_gemm")
    fuses_cast = scales_local = True
    described = "FP8 with scales of blocks"

    @classmethod
    def check_supported(cls, gemms: Iterable[tuple[str, Gemm]]) -> None:
        for name, gemm in gemms:
            if gemm.a.granularity == gemm.b.granularity == "block_128x128":
                raise unsupported(f"{name}.a, b", "block_128x128 for both", "block_1x128 for at least one")
            if gemm.fast and gemm.compute == "quantized":
                raise unsupported(f"{name}.accumulation", '"fast"', '"split", with scales of blocks')

    @staticmethod
    def shapes(rows: int, columns: int, quantizer: Quantizer) -> tuple[Shape, Shape]:
        return block_shapes(rows, columns, quantizer.tile)

    @staticmethod
    def grid(scale_inv: Any, quantizer: Quantizer) -> Any:
        return scale_inv.transpose(1, 0) if quantizer.tile[0] == 1 else scale_inv

    @staticmethod
    def multiply(
        ws: WorkingSet,
        left: Operand,
        right: Operand,
        out: ArrayView,
        fast: bool,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        (a, a_inv, p), (b, b_inv, q), space = left, right, ws.scratch["workspace"]
        formats_scales_and_tiles = p.format, q.format, a_inv, b_inv, p.tile, q.tile
        ws.kernels.block_gemm(a, b, out, *formats_scales_and_tiles, bias, addend, space, ws.stream)

    def _sides(self, operand: str, into: Pair) -> list[ArrayView | None]:
        """Codes and scale_inv of "x", "w" or "g" as it lies, and of its transpose, None where they are not in
        ``into``."""
        (q, inverse), (q_t, inverse_t) = self.names[f"{operand}_q"], self.names[f"{operand}_qt"]
        first, second = into
        sides = [first.get(q), first.get(inverse), second.get(q_t), second.get(inverse_t)]
        return sides[2:] + sides[:2] if operand == "w" and not self.oi else sides

    def x_cast(self, ws: WorkingSet) -> Cast:
        return self._target("x", self._into(ws, "x"))

    def g_cast(self, ws: WorkingSet) -> Cast:
        return self._target("g", (ws.scratch, ws.scratch))

    def _target(self, operand: str, into: Pair) -> Cast:
        """Returns where an activation's kernel casts "x" or "g" to."""
        (q, inverse, q_t, inverse_t), own = self._sides(operand, into), self.quantizers[operand]
        rule = Rule(own.power_2, own.epsilon)
        return Cast(own.format, q, q_t, None, inverse, None, rule, own.tile, inverse_t)

    def _cast(self, ws: WorkingSet, operand: str, x: ArrayView, into: Pair, amax_known: bool = False) -> None:
        rule = _rule(self.quantizers[operand])
        ws.kernels.block_quantize(x, *self._sides(operand, into), *rule, ws.stream)


def _rule(quantizer: Quantizer) -> tuple[Any, ...]:
    """Returns a cast's static arguments."""
    return quantizer.format, quantizer.tile, quantizer.power_2, quantizer.epsilon
