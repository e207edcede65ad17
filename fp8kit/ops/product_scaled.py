"""Products of MX's and NVFP4's codes in tensor cores that take the scales of their blocks
(``fp8kit.scaled_products``): the casts of emulated products, their codes laid out for ``block_gemm``.

Scales of tensors and of rows, and 1 / ``factor``, multiply float32 sums, as there. Any size is padded with
zeros to what such products take. A GEMM that the engine does not take all the same is emulated: the codes are
decoded, and their values multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fp8kit import scaled_products, slowness
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import block_shapes
from fp8kit.blocks import tile_of
from fp8kit.buffers import free
from fp8kit.formats import float32, uint8
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_coded import Coded, CodedProduct
from fp8kit.ops.product_quantized import GEMMS, unsupported
from fp8kit.quantization import Gemm
from fp8kit.spec import Meta, WorkingSet

PARTS = ("codes", "scales")  # of an operand


class ScaledProduct(CodedProduct):
    """``CodedProduct`` whose GEMMs on codes are those that are ``scaled``; scales are codes, too.
    ``refused``: those among them that the engine does not take, known once ``workspace`` was asked."""

    kernels = (*CodedProduct.kernels, "block_operand", "block_gemm")
    scale_dtype = uint8

    def __init__(self, spec: ProductSpec, *how: Any) -> None:
        super().__init__(spec, *how)
        self.refused: set[str] = set()
        self.readers = {operand: name for name in self.coding for operand in GEMMS[name]}

    @staticmethod
    def on_codes(gemm: Gemm) -> bool:
        return gemm.scaled

    @classmethod
    def check_supported(cls, gemms: Iterable[tuple[str, Gemm]]) -> None:
        gemms = list(gemms)
        super().check_supported(gemms)
        for name, gemm in gemms:
            if gemm.scaled and (why := scaled_products.gemm_refusal(gemm)):
                raise unsupported(f"{name}.scaled", True, f"False: {why}")
            if not isinstance(gemm.how, bool):
                wanted = '"split" or "fast" beside a GEMM that is scaled'
                raise unsupported(f"{name}.accumulation", gemm.accumulation, wanted)

    # --- what there is --------------------------------------------------------------------------------------

    def workspace(self, k: Any) -> int:
        needed = [super().workspace(k)]
        for name in filter(self.coding.__contains__, self._wanted_gemms()):
            gemm, (rows, columns, contraction) = self.coding[name], self._sizes(name)
            pair = gemm.a.format, gemm.b.format
            if name == "wgrad" and not self.oi:
                rows, columns, pair = columns, rows, pair[::-1]
            casts = [self._how(self.arrays[operand]) for operand in GEMMS[name]]
            apart = name in self.backs or any(cast.quantizer.scaled_after for cast in casts)
            out = float32 if apart else self.grad_dtype if name == "wgrad" else self.dtype
            size = k.scaled_gemm_workspace(rows, columns, contraction, *pair, gemm.a.tile[1], out)
            needed.append(int(size))
            if not size:
                self.refused.add(name)
                _say_refused(f"{name} of a weight {self.n} x {self.k}", gemm)
        return max(needed)

    def _sizes(self, gemm: str) -> tuple[int, int, int]:
        """Rows of a GEMM's two operands, and its contraction."""
        m, n, k = self.m, self.n, self.k
        return {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[gemm]

    def scratch(self) -> dict[str, Meta]:
        return super().scratch() | self._laid("fprop")

    def backward_scratch(self) -> dict[str, Meta]:
        return super().backward_scratch() | self._laid(*self._wanted_gemms()[1:])

    def _wanted_gemms(self) -> tuple[str, ...]:
        return ("fprop", *("dgrad",) * self.needs_x, *("wgrad",) * self.needs_w)

    def _laid(self, *gemms: str) -> dict[str, Meta]:
        """Returns where the operands of GEMMs are laid out, or decoded."""
        made: dict[str, Meta] = {}
        for name in filter(self.coding.__contains__, gemms):
            (*rows, contraction), width = self._sizes(name), self.coding[name].a.tile[1]
            if name in self.refused:
                made |= {
                    f"{name}_tiles": Meta((max(rows) * -(-contraction // width),), float32),
                    "one": Meta((3,), float32),
                }
            for side, count in zip("ab", rows, strict=True):
                if name in self.refused:
                    values = float32 if self.widened else self.dtype
                    made[f"{name}_values_{side}"] = Meta((count * contraction,), values)
                    continue
                for part, shape in zip(PARTS, block_shapes(count, contraction, (1, width)), strict=True):
                    made[f"{name}_{part}_{side}"] = Meta(shape, uint8)
        return {self._name(name): meta for name, meta in made.items()}

    # --- products -------------------------------------------------------------------------------------------

    def _operand(self, ws: WorkingSet, operand: str, matrix: ArrayView | None) -> tuple[Any, Any]:
        if operand not in self.sides:
            return super()._operand(ws, operand, matrix)
        array, side = self.arrays[operand], "a" if self.sides[operand] else "b"
        gemm = self.readers[operand]
        inverse, own = self._part(ws, array, "_inv"), self._how(array)
        codes, scales = self._part(ws, array, "_codes"), self._part(ws, array, "_scales")
        if gemm in self.refused:
            values = ws.scratch[self._name(f"{gemm}_values_{side}")].reshape(*codes.shape)
            grid = ws.scratch[self._name(f"{gemm}_tiles")].first(scales.shape)
            self._decode_scales(ws, own.quantizer, scales, grid)
            how = own.quantizer.format, tile_of(own.quantizer, own.along)
            ws.kernels.dequantize(codes, values, grid, *how, ws.stream)
            return values, inverse
        q, q_scales = (ws.scratch[self._name(f"{gemm}_{part}_{side}")] for part in PARTS)
        lies = own.quantizer.tile, self._along(operand)
        ws.kernels.block_operand(codes, scales, q, q_scales, *lies, ws.stream)
        return Coded(q, q_scales, own.quantizer), inverse

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
        if gemm not in self.coding or gemm in self.refused:
            super()._gemm(ws, gemm, a, b, out, layout, bias, addend)
            free(ws.scratch, *(self._name(f"{gemm}_{part}") for part in ("values_a", "values_b", "tiles")))
            return
        p, q = a.quantizer, b.quantizer
        tiles, space = ((1, p.tile[1]), (1, q.tile[1])), ws.scratch["workspace"]
        how = p.format, q.format, a.scales, b.scales, *tiles
        ws.kernels.block_gemm(a.codes, b.codes, out, *how, bias, addend, space, ws.stream)
        free(ws.scratch, *(self._name(f"{gemm}_{part}_{side}") for part in PARTS for side in "ab"))


def _say_refused(what: str, gemm: Gemm) -> None:
    slowness.say(
        f"the device takes no {gemm.a.format} by {gemm.b.format} with scales of blocks for {what}",
        "the operands' codes are decoded, and the values multiplied in high precision",
        "`fp8kit recipes list` shows how each recipe runs here",
    )
