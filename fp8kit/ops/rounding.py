"""``Rounding``: values of a tensor rounded to those that a format and its scales have, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.emulated_casts import LINES
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, WorkingSet


class Rounding:
    """The values of a matrix in ``parts``, each of at most ``most`` elements of ``dtype``, rounded by
    ``quantizer``: one scale for all parts, or blocks ``along`` the last dimension (1) or the first. ``name``:
    what its temporaries begin with."""

    def __init__(self, name: str, quantizer: Quantizer, along: int, most: int, dtype: DType) -> None:
        self._name, self._quantizer, self._along = name, quantizer, along
        self._by_tensor = quantizer.granularity in LINES
        self._made = Meta((most,), uint8 if self._by_tensor else dtype)

    def scratch(self) -> dict[str, Meta]:
        """Codes and the three numbers of a scale, or the values of blocks."""
        scale = {f"{self._name}_scale": Meta((3,), float32)} if self._by_tensor else {}
        return {self._name: self._made} | scale

    def run(self, ws: WorkingSet, parts: Sequence[ArrayView], share: Callable[[ArrayView], None]) -> None:
        """Round the parts. ``share``: makes an amax that of all ranks which have parts of the matrix."""
        k, own, stream, made = ws.kernels, self._quantizer, ws.stream, ws.scratch[self._name]
        if not self._by_tensor:
            for part in parts:
                values = made.first(part.shape)
                how = own, self._along, 0, None, None
                k.cast_blocks(part, None, None, None, values, None, None, *how, stream)
                k.copy(values, part, stream)
            return
        amax, scale, inverse = (ws.scratch[f"{self._name}_scale"].slice(0, i, 1) for i in range(3))
        arrays.fill_zero(amax, stream)
        for part in parts:
            k.amax(part, amax, part.shape, stream)
        share(amax)
        k.scale_from_amax(amax, scale, inverse, *own.scale_limits, stream)
        for part in parts:
            codes = made.first(part.shape)
            k.quantize(part, codes, scale, inverse, None, own.format, part.shape, True, 0, 0, None, stream)
            k.dequantize(codes, part, inverse, own.format, part.shape, stream)
