"""Products of MX's and NVFP4's codes in tensor cores that take the scales of their blocks
(``fp8kit.scaled_products``): the casts of emulated products, their codes laid out for ``block_gemm``.

Scales of tensors and of rows, and 1 / ``factor``, multiply float32 sums, as there. Any size is padded with
zeros to what such products take. A GEMM that the engine does not take all the same is emulated: the codes are
decoded, and their values multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fp8kit import scaled_products, slowness
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import block_shapes
from fp8kit.blocks import tile_of
from fp8kit.formats import DType, float32, uint8
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
                _say_refused(f"{name}, ({rows}, {contraction}) by ({contraction}, {columns})", gemm)
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
        """Where the operands of GEMMs are laid out, or decoded."""
        made: dict[str, Meta] = {}

        def want(name: str, count: int, dtype: DType) -> None:
            found = made.get(self._name(name), Meta((0,), dtype))
            made[self._name(name)] = Meta((max(count, *found.shape),), dtype)

        for name in filter(self.coding.__contains__, gemms):
            (*rows, contraction), width = self._sizes(name), self.coding[name].a.tile[1]
            for side, count in zip("ab", rows, strict=True):
                if name in self.refused:
                    want(f"decoded_{side}", count * contraction, float32 if self.widened else self.dtype)
                    want("tile_values", count * contraction, float32)
                    want("one", 3, float32)
                    continue
                for part, shape in zip(PARTS, block_shapes(count, contraction, (1, width)), strict=True):
                    want(f"laid_{part}_{side}", math.prod(shape), uint8)
        return made

    # --- products -------------------------------------------------------------------------------------------

    def _operand(self, ws: WorkingSet, operand: str, matrix: ArrayView | None) -> tuple[Any, Any]:
        if operand not in self.sides:
            return super()._operand(ws, operand, matrix)
        array, side = self.arrays[operand], "a" if self.sides[operand] else "b"
        inverse, own = self._part(ws, array, "_inv"), self._how(array)
        codes, scales = self._part(ws, array, "_codes"), self._part(ws, array, "_scales")
        if any(operand in GEMMS[gemm] for gemm in self.refused):
            values = self._scratch(ws, f"decoded_{side}", codes.shape)
            grid = self._scratch(ws, "tile_values", scales.shape)
            self._decode_scales(ws, own.quantizer, scales, grid)
            how = own.quantizer.format, tile_of(own.quantizer, own.along)
            ws.kernels.dequantize(codes, values, grid, *how, ws.stream)
            return values, inverse
        along = self._along(operand)
        rows, contraction = codes.shape if along else codes.shape[::-1]
        tile = own.quantizer.tile
        shapes = block_shapes(rows, contraction, (1, tile[1]))
        q, q_scales = (
            self._scratch(ws, f"laid_{part}_{side}", shape) for part, shape in zip(PARTS, shapes, strict=True)
        )
        ws.kernels.block_operand(codes, scales, q, q_scales, tile, along, ws.stream)
        return Coded(q, q_scales, own.quantizer), inverse

    def _scratch(self, ws: WorkingSet, name: str, shape: tuple[int, ...]) -> ArrayView:
        """The first elements of a temporary, in this shape."""
        return ws.scratch[self._name(name)].slice(0, 0, math.prod(shape)).reshape(*shape)

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
            return
        p, q = a.quantizer, b.quantizer
        tiles, space = ((1, p.tile[1]), (1, q.tile[1])), ws.scratch["workspace"]
        how = p.format, q.format, a.scales, b.scales, *tiles
        ws.kernels.block_gemm(a.codes, b.codes, out, *how, bias, addend, space, ws.stream)


def _say_refused(what: str, gemm: Gemm) -> None:
    slowness.say(
        f"the device takes no {gemm.a.format} by {gemm.b.format} with scales of blocks for {what}",
        "the operands' codes are decoded, and the values multiplied in high precision",
        "`fp8kit recipes list` shows how each recipe runs here",
    )
