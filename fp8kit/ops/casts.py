"""``quantize``, ``dequantize``: casts to FP8 codes and back, any format, scales by tensor, rows or blocks; no
gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit import arrays, formats
from fp8kit.arrays import Shape
from fp8kit.errors import AutogradError, FormatError, ShapeError
from fp8kit.formats import Format, float32, uint8
from fp8kit.ops.product import want
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views

FLT_MAX = formats.float32.max


def no_gradient(operation: str, needs: frozenset[str]) -> None:
    """AutogradError where a gradient is wanted: rounding has none but by convention."""
    if needs:
        raise AutogradError(
            f"{operation}: no gradient rule for its input {min(needs)!r}, which is differentiated"
        )


def meta_of(operation: str, name: str, metas: Metas) -> Meta:
    """The meta of an input that must be there; ShapeError where it is not."""
    meta = metas.get(name)
    if meta is None:
        raise ShapeError(operation, name, "nothing", "an array")
    return meta


def grid(shape: Shape, tile: tuple[int, int]) -> Shape:
    """(tiles,) of an array of ``shape``, its leading dimensions flattened into rows."""
    rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
    return (-(-rows // tile[0]) * -(-columns // tile[1]),)


@dataclass(frozen=True)
class QuantizeSpec:
    """``format`` of the codes; ``tile`` (rows, columns) that share a scale; ``saturate``; ``power_2``:
    current scales are rounded down to a power of two; ``for_inf``: a current scale that overflows; ``given``:
    the scales are an input; ``stochastic``: rng is an input."""

    format: Format
    tile: tuple[int, int]
    saturate: bool = True
    power_2: bool = False
    for_inf: float = FLT_MAX
    given: bool = False
    stochastic: bool = False


class Quantize(Operation):
    """q = encode(x * scale). Inputs: x h (..., N); scale float32 (tiles,) where given; rng int64 (2,) where
    stochastic. Outputs: q uint8 like x, scale_inv float32 (tiles,)."""

    name: ClassVar[str] = "quantize"

    def _checked(self, spec: QuantizeSpec, metas: Metas) -> tuple[Meta, Shape]:
        x = meta_of(self.name, "x", metas)
        if x.dtype not in formats.HIGH_PRECISION:
            raise FormatError(self.name, "x", x.dtype.name, "float32, bfloat16 or float16")
        return x, grid(x.shape, spec.tile)

    def outputs(self, spec: Any) -> tuple[str, ...]:
        return ("q", "scale_inv")

    def infer(self, spec: QuantizeSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        no_gradient(self.name, needs)
        x, tiles = self._checked(spec, metas)
        if spec.given:
            want(self.name, "scale", metas, tiles, float32)
        if spec.stochastic:
            want(self.name, "rng", metas, (2,), formats.int64)
        return Signature({"q": Meta(x.shape, uint8), "scale_inv": Meta(tiles, float32)})

    def plan(self, spec: QuantizeSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        tiles = Meta(self._checked(spec, metas)[1], float32)
        return Plan(spec, self.infer(spec, metas, needs), kernels, {} if spec.given else {"scale": tiles})

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        s: QuantizeSpec = plan.spec
        x, q, inverse, k = inputs["x"], outputs["q"], outputs["scale_inv"], plan.kernels
        scale = inputs["scale"] if s.given else scratch["scale"]
        assert x is not None and q is not None
        if not s.given:  # scale_inv holds the amaxes until they are scales
            assert inverse is not None
            arrays.provider(inverse.device).fill_zero(inverse, stream)
            k.amax(x.rows(), inverse, s.tile, stream)
            k.scale_from_amax(inverse, scale, inverse, s.format.max, s.power_2, 0.0, s.for_inf, stream)
        k.quantize(
            x.rows(), q.rows(), scale, inverse, None, s.format, s.tile, s.saturate, inputs.get("rng"), stream
        )


@dataclass(frozen=True)
class DequantizeSpec:
    """``format`` of the codes, ``tile`` that shares a scale, name of the result's ``dtype``."""

    format: Format
    tile: tuple[int, int]
    dtype: str


class Dequantize(Operation):
    """x = decode(q) * scale_inv. Inputs: q uint8 (..., N), scale_inv float32 (tiles,). Output: x h like q."""

    name: ClassVar[str] = "dequantize"

    def outputs(self, spec: Any) -> tuple[str, ...]:
        return ("x",)

    def infer(self, spec: DequantizeSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        no_gradient(self.name, needs)
        q = meta_of(self.name, "q", metas)
        want(self.name, "q", metas, q.shape, uint8)
        want(self.name, "scale_inv", metas, grid(q.shape, spec.tile), float32)
        return Signature({"x": Meta(q.shape, formats.dtype(spec.dtype))})

    def plan(self, spec: DequantizeSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        return Plan(spec, self.infer(spec, metas, needs), kernels)

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        s: DequantizeSpec = plan.spec
        q, x = inputs["q"], outputs["x"]
        assert q is not None and x is not None
        plan.kernels.dequantize(q.rows(), x.rows(), inputs["scale_inv"], s.format, s.tile, stream)


quantize = Quantize()
dequantize = Dequantize()
