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
from typing import Any, NamedTuple

from fp8kit import accumulation as models
from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView
from fp8kit.errors import FormatError
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.emulated_casts import FPROP, LINES, OPERANDS, SCALE_FORMATS
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_quantized import GEMMS, unsupported
from fp8kit.quantization import Gemm, Quantizer
from fp8kit.spec import Meta, WorkingSet


class Coded(NamedTuple):
    """An operand of a modelled GEMM: codes (rows, contraction), the scales of its tiles, how it was cast."""

    codes: ArrayView
    scales: ArrayView
    quantizer: Quantizer

    @property
    def dtype(self) -> DType:
        """That of its codes."""
        return self.codes.dtype


class ModelledProduct(EmulatedProduct):
    """``EmulatedProduct`` of which some GEMMs have an ``Accumulation``. Their operands are arrays of codes,
    ``x_q_codes`` uint8, lying as the matrix does, and of one scale a tile, ``x_q_scales`` float32. One whose
    values another GEMM reads as well has these besides.
    """

    kernels = (*EmulatedProduct.kernels, "model_gemm", "copy")

    def __init__(self, spec: ProductSpec, *how: Any) -> None:
        super().__init__(spec, *how)
        # GEMM -> how it is summed
        self.modelled: dict[str, Accumulation] = {
            name: gemm.how
            for name, gemm in self.fp8.gemms.items()
            if gemm.compute == "quantized" and isinstance(gemm.how, Accumulation)
        }
        # operand of such a GEMM -> whether it is the first one
        self.sides = {operand: i == 0 for name in self.modelled for i, operand in enumerate(GEMMS[name])}
        self.coded = {self.arrays[operand] for operand in self.sides}
        valued = {array for operand, array in self.arrays.items() if operand not in self.sides}
        self.valued = valued | {self.arrays[FPROP[operand]] for operand in self.recasts}

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

    def _metas(self, names: Iterable[str]) -> dict[str, Meta]:
        made: dict[str, Meta] = {}
        for array in names:
            own, name, cast = super()._metas([array]), self._name(array), self._how(array)
            if array not in self.valued:
                del own[name]
            if array in self.coded:
                shape = self.matrices[cast.source].shape
                own[f"{name}_codes"] = Meta(shape, uint8)
                own[f"{name}_scales"] = Meta(cast.grid(shape), float32)
            made |= own
        return made

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
        source, along = OPERANDS[operand]
        if not (along if source != "w" or self.oi else 1 - along):  # its contraction is the rows
            lying = ws.scratch[self._name("lying_a" if self.sides[operand] else "lying_b")]
            transposed = lying.slice(0, 0, codes.size).reshape(*codes.shape[::-1])
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
        how = self.modelled.get(gemm)
        if how is None:
            super()._gemm(ws, gemm, a, b, out, layout, bias, addend)
            return
        p, q = a.quantizer, b.quantizer
        scales = a.scales, b.scales, p.tile, q.tile
        ws.kernels.model_gemm(
            a.codes, b.codes, out, p.format, q.format, *scales, how, bias, addend, ws.stream
        )


def _kind(quantizer: Quantizer) -> str:
    """The kind of its blocks, "" of lines."""
    return "" if quantizer.granularity in LINES else quantizer.granularity.partition("_")[0]
