"""``fp8_gemm``: the product of two matrices of FP8 codes, as ``q @ q.T`` has it; no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8kit import formats
from fp8kit.arrays import Shape
from fp8kit.backends.dispatch import block_shapes
from fp8kit.errors import ShapeError
from fp8kit.formats import Format, float32, uint8
from fp8kit.ops.casts import no_gradient
from fp8kit.ops.product import want
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, WorkingSet, workspace


@dataclass(frozen=True)
class Fp8GemmSpec:
    """A product of codes: (rows, columns) of the result, its ``dtype`` by name, formats, the operands'
    ``tiles`` where they are scaled by blocks (None: by the tensor or by rows), ``fast_accumulate``."""

    rows: int
    columns: int
    dtype: str
    a_format: Format
    b_format: Format
    tiles: tuple[tuple[int, int], tuple[int, int]] | None = None
    fast_accumulate: bool = False


class Fp8Gemm(Operation):
    """out = a b^T, scaled. Inputs: a uint8 (Mp, Kp), b uint8 (Np, Kp), padded as ``fp8_gemm`` or
    ``block_gemm`` takes them, a_scale_inv and b_scale_inv float32 in their layout. Output: out h (rows,
    columns)."""

    name = "fp8_gemm"
    results = ("out",)

    def infer(self, spec: Fp8GemmSpec, metas: Metas, needs: Needs) -> Signature:
        no_gradient(self.name, needs)
        kinds = []  # contraction, and whether one scale is for all; sizes may be symbols, which have no hash
        for i, (name, extent) in enumerate((("a", spec.rows), ("b", spec.columns))):
            found = want(self.name, name, metas).shape
            depth = found[-1] if len(found) == 2 else 16
            codes: Shape = (-(-extent // 16) * 16, -(-depth // 16) * 16)
            scales: tuple[Shape, Shape] = ((1,), codes[:1])
            if spec.tiles is not None:
                codes, by_blocks = block_shapes(extent, depth, spec.tiles[i])
                scales = (by_blocks, by_blocks)
            want(self.name, name, metas, codes, uint8)
            shape = want(self.name, f"{name}_scale_inv", metas).shape
            want(self.name, f"{name}_scale_inv", metas, shape if shape in scales else scales[0], float32)
            kinds.append((depth, spec.tiles is None and shape == (1,)))
        if kinds[0] != kinds[1]:
            got = f"{metas['a']}, {metas['b']}"
            raise ShapeError(self.name, "b", got, "a's contraction, and scales of the same kind")
        return Signature({"out": Meta((spec.rows, spec.columns), formats.dtype(spec.dtype))})

    def plan(self, spec: Fp8GemmSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        space = workspace(kernels.fp8_gemm_workspace(spec.rows, spec.columns))
        return Plan(spec, self.infer(spec, metas, needs), kernels, space)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s: Fp8GemmSpec = plan.spec
        k, space, a, b = ws.kernels, ws.scratch["workspace"], ws.inputs["a"], ws.inputs["b"]
        formats_and_scales = s.a_format, s.b_format, ws.inputs["a_scale_inv"], ws.inputs["b_scale_inv"]
        operands = a, b, ws.outputs["out"], *formats_and_scales
        if s.tiles is None:
            k.fp8_gemm(*operands, None, None, s.fast_accumulate, space, ws.stream)
        else:
            k.block_gemm(*operands, *s.tiles, None, None, space, ws.stream)


fp8_gemm = Fp8Gemm()
