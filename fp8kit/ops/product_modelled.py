"""Emulated products whose sums are a chip's: operands in any format, with scales of blocks by any rule,
rotated or rounded stochastically, summed as a ``fp8kit.Accumulation`` says, with the same bits on every
device.

Where an emulated product multiplies the operands' values, this one multiplies their codes and their tiles'
scales, by the kernel ``model_gemm``. Scales of tensors below which blocks have their own (NVFP4, MOSS)
multiply the float32 sums, as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fp8kit import accumulation as models
from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView
from fp8kit.errors import FormatError
from fp8kit.formats import float32, uint8
from fp8kit.ops.emulated_casts import LINES, SCALE_FORMATS
from fp8kit.ops.product_coded import Coded, CodedProduct
from fp8kit.ops.product_quantized import unsupported
from fp8kit.quantization import Gemm, Quantizer
from fp8kit.spec import Meta, WorkingSet


class ModelledProduct(CodedProduct):
    """``CodedProduct`` whose GEMMs on codes have an ``Accumulation``."""

    kernels = (*CodedProduct.kernels, "model_gemm", "copy")

    @staticmethod
    def on_codes(gemm: Gemm) -> bool:
        return gemm.compute == "quantized" and isinstance(gemm.how, Accumulation)

    @classmethod
    def check_supported(cls, gemms: Iterable[tuple[str, Gemm]]) -> None:
        gemms = list(gemms)
        super().check_supported(gemms)
        for name, gemm in gemms:
            if gemm.compute != "quantized" or not isinstance(gemm.how, Accumulation):
                continue
            group, sides = gemm.how.group, {"a": gemm.a, "b": gemm.b}
            if gemm.plain:
                wanted = '"": a chip\'s sums are those of codes by codes'
                raise unsupported(f"{name}.plain", repr(gemm.plain), wanted)
            for place, own in sides.items():
                try:
                    models.check_formats(name, own.format, group=group)
                except FormatError as error:
                    raise unsupported(f"{name}.{place}.format", error.got, str(error.wanted)) from None
                if group and _kind(own) not in SCALE_FORMATS:
                    wanted = f"scales of blocks in E8M0 or E4M3, with {gemm.accumulation}"
                    raise unsupported(f"{name}.{place}.granularity", own.granularity, wanted)
                if group and own.tile[1] % group:
                    wanted = f"blocks of a multiple of {group}, with {gemm.accumulation}"
                    raise unsupported(f"{name}.{place}.granularity", own.granularity, wanted)
            if len({own.tile[1] for own in sides.values() if own.tile[1]}) > 1:
                wanted = f"blocks as long as those of {gemm.b.granularity}, with {gemm.accumulation}"
                raise unsupported(f"{name}.a.granularity", gemm.a.granularity, wanted)

    # --- what there is --------------------------------------------------------------------------------------

    def _amaxes(self) -> dict[str, Meta]:
        made = super()._amaxes()
        shapes = {self._how(array): self.matrices[self._how(array).source].shape for array in self.coded}
        blocks = [math.prod(c.grid(s)) for c, s in shapes.items() if _kind(c.quantizer) in SCALE_FORMATS]
        if blocks:
            made |= {self._name("tile_codes"): Meta((max(blocks),), uint8)}
            made |= {self._name("one"): Meta((3,), float32)}
        if shapes:
            lying = Meta((max(map(math.prod, shapes.values())),), uint8)
            made |= {self._name("lying_a"): lying, self._name("lying_b"): lying}
        return made

    # --- products -------------------------------------------------------------------------------------------

    def _operand(self, ws: WorkingSet, operand: str, matrix: ArrayView | None) -> tuple[Any, Any]:
        if operand not in self.sides:
            return super()._operand(ws, operand, matrix)
        array = self.arrays[operand]
        codes, scales = self._part(ws, array, "_codes"), self._part(ws, array, "_scales")
        if not self._along(operand):  # its contraction is the rows
            lying = ws.scratch[self._name("lying_a" if self.sides[operand] else "lying_b")]
            transposed = lying.first(codes.shape[::-1])
            ws.kernels.copy(codes.transpose(1, 0), transposed, ws.stream)
            codes, scales = transposed, scales.transpose(1, 0)
        return Coded(codes, scales, self._how(array).quantizer), self._part(ws, array, "_inv")

    def _gemm(
        self,
        ws: WorkingSet,
        gemm: str,
        a: Any,
        b: Any,
        out: ArrayView,
        layout: Any,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        if gemm not in self.coding:
            super()._gemm(ws, gemm, a, b, out, layout, bias, addend)
            return
        p, q = a.quantizer, b.quantizer
        how = *(a.scales, b.scales), p.tile, q.tile, self.coding[gemm].how
        ws.kernels.model_gemm(a.codes, b.codes, out, p.format, q.format, *how, bias, addend, ws.stream)


def _kind(quantizer: Quantizer) -> str:
    """Returns the kind of its blocks, "" of lines."""
    return "" if quantizer.granularity in LINES else quantizer.granularity.partition("_")[0]
