"""Emulated products of which some GEMMs multiply codes and their tiles' scales instead of values: with a
chip's sums (``product_modelled``), or in tensor cores that take both (``product_scaled``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.emulated_casts import FPROP, OPERANDS
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_quantized import GEMMS
from fp8kit.quantization import Gemm, Quantizer
from fp8kit.spec import Meta


class Coded(NamedTuple):
    """An operand of a GEMM on codes: these, (rows, contraction), the scales of its tiles, how it was cast."""

    codes: ArrayView
    scales: ArrayView
    quantizer: Quantizer

    @property
    def dtype(self) -> DType:
        """The dtype of its codes."""
        return self.codes.dtype


class CodedProduct(EmulatedProduct):
    """``EmulatedProduct`` of which some GEMMs are ``on_codes``. Their operands are arrays of codes,
    ``x_q_codes`` uint8, lying as the matrix does, and of one scale a tile, ``x_q_scales``, of
    ``scale_dtype``. One whose values another GEMM reads as well has these besides.
    """

    scale_dtype: ClassVar[DType] = float32

    def __init__(self, spec: ProductSpec, *how: Any) -> None:
        super().__init__(spec, *how)
        self.coding = {name: gemm for name, gemm in self.fp8.gemms.items() if self.on_codes(gemm)}
        # operand of such a GEMM -> whether it is the first one
        self.sides = {operand: i == 0 for name in self.coding for i, operand in enumerate(GEMMS[name])}
        self.coded = {self.arrays[operand] for operand in self.sides}
        valued = {array for operand, array in self.arrays.items() if operand not in self.sides}
        self.valued = valued | {self.arrays[FPROP[operand]] for operand in self.recasts}

    @staticmethod
    def on_codes(gemm: Gemm) -> bool:
        """Whether a GEMM multiplies codes."""
        raise NotImplementedError

    def _metas(self, names: Iterable[str]) -> dict[str, Meta]:
        made: dict[str, Meta] = {}
        for array in names:
            own, name, cast = super()._metas([array]), self._name(array), self._how(array)
            if array not in self.valued:
                del own[name]
            if array in self.coded:
                shape = self.matrices[cast.source].shape
                own[f"{name}_codes"] = Meta(shape, uint8)
                own[f"{name}_scales"] = Meta(cast.grid(shape), self.scale_dtype)
            made |= own
        return made

    def _along(self, operand: str) -> int:
        """Returns which dimension of the matrix is the operand's contraction."""
        source, along = OPERANDS[operand]
        return along if source != "w" or self.oi else 1 - along
