"""FP8 products with a scale for each block of 128 elements along the contraction.

What is cast to two orientations is cast from high precision twice, since blocks run along the contraction,
which is another axis there; squares have the same codes in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import block_shapes
from fp8kit.ops.product import WeightJob
from fp8kit.ops.product_quantized import Operand, Pair, QuantizedProduct, unsupported
from fp8kit.quantization import Gemm, Quantizer
from fp8kit.spec import Views


class BlockProduct(QuantizedProduct):
    """``Product`` on operands of ``block_gemm``."""

    kernels = ("block_quantize", "block_gemm")
    capability = (9, 0)
    described = "FP8 with scales of blocks"

    @classmethod
    def check_supported(cls, gemms: Iterable[tuple[str, Gemm]]) -> None:
        for name, gemm in gemms:
            if gemm.a.granularity == gemm.b.granularity == "block_128x128":
                raise unsupported(f"{name}.a, b", "block_128x128 for both", "block_1x128 for at least one")
            if gemm.fast:
                raise unsupported(f"{name}.accumulation", '"fast"', '"split", with scales of blocks')

    @staticmethod
    def shapes(rows: int, columns: int, quantizer: Quantizer) -> tuple[Shape, Shape]:
        return block_shapes(rows, columns, quantizer.tile)

    @staticmethod
    def grid(scale_inv: Any, quantizer: Quantizer) -> Any:
        return scale_inv.T if quantizer.tile[0] == 1 else scale_inv

    @staticmethod
    def multiply(
        k: Any,
        left: Operand,
        right: Operand,
        out: ArrayView,
        bias: ArrayView | None,
        addend: ArrayView | None,
        fast: bool,
        workspace: ArrayView,
        stream: int,
    ) -> None:
        (a, a_inv, p), (b, b_inv, q) = left, right
        tiles = p.tile, q.tile
        k.block_gemm(a, b, out, p.format, q.format, a_inv, b_inv, *tiles, bias, addend, workspace, stream)

    def _cast(
        self,
        k: Any,
        operand: str,
        x: ArrayView,
        into: Pair,
        inputs: Views,
        outputs: Views,
        stream: int,
        amax_known: bool = False,
    ) -> None:
        q, q_t = self._sides(operand, into)
        k.block_quantize(x, *q, *q_t, *_rule(self.quantizers[operand]), stream)

    @classmethod
    def cast_weights(cls, k: Any, jobs: Sequence[WeightJob], numbers: ArrayView, stream: int) -> None:
        rows = []
        for product, inputs, made in jobs:
            q, q_t = product._sides("w", (made, made))
            rows.append((product._whole_weight(k, inputs, {}, stream), *q, *q_t))
        k.block_quantize_many(*map(list, zip(*rows, strict=True)), *_rule(jobs[0].product.fp8.w), stream)


def _rule(quantizer: Quantizer) -> tuple[Any, ...]:
    """A cast's static arguments."""
    return quantizer.format, quantizer.tile, quantizer.power_2, quantizer.epsilon
