"""Operations that the door has beside ``fp8kit.ops``: single kernels of the contract as functions of JAX arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit import arrays, formats
from fp8kit.arrays import Shape
from fp8kit.backends.dispatch import block_shapes
from fp8kit.errors import FormatError, expected
from fp8kit.formats import Format, float32, uint8
from fp8kit.ops.norm_mlp import ACTIVATIONS
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views

FLT_MAX = formats.float32.max


@dataclass(frozen=True)
class ActivationSpec:
    """``activation``: "gelu", "relu", "silu" or "swiglu"; ``features`` of the input, for "swiglu" twice the output's."""

    activation: str
    features: int

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise FormatError(expected("activation", "activation", repr(self.activation), f"one of {', '.join(ACTIVATIONS)}"))


class Activation(Operation):
    """y = activation(x). Input x h (..., F or 2 F), output y h (..., F). Gradient of x. See ``protocol.Kernels.act_fwd``."""

    name: ClassVar[str] = "activation"

    def infer(self, spec: ActivationSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        y = Meta((*x.shape[:-1], spec.features // ACTIVATIONS[spec.activation]), x.dtype)
        return Signature({"y": y}, {}, ("x",), {"x": Meta(x.shape, x.dtype)}) if "x" in needs else Signature({"y": y})

    def plan(self, spec: ActivationSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        signature = self.infer(spec, metas, needs)
        x = want_rows(self.name, "x", metas, spec.features)
        space = {"workspace": Meta((max(kernels.act_bwd_workspace(row_count(x), spec.features), 1),), uint8)}
        return Plan(spec, signature, kernels, {}, space)

    def forward(self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        x, y = inputs["x"], outputs["y"]
        assert x is not None and y is not None
        plan.kernels.act_fwd(x.rows(), None, y.rows(), None, None, plan.spec.activation, stream)

    def backward(self, plan: Plan, kept: Views, saved: Views, cotangents: Views, grads: Views, scratch: Views, stream: int) -> None:
        dy, x, dx = cotangents["y"], kept["x"], grads["x"]
        assert dy is not None and x is not None and dx is not None
        plan.kernels.act_bwd(
            dy.rows(), x.rows(), None, dx.rows(), None, None, None, plan.spec.activation, scratch["workspace"], stream
        )


@dataclass(frozen=True)
class QuantizeSpec:
    """``format`` of the codes; ``tile`` (rows, columns) that share a scale; ``saturate``; ``power_2``: current scales are rounded down to a
    power of two; ``for_inf``: a current scale that overflows; ``given``: the scales are an input; ``stochastic``: rng is an input."""

    format: Format
    tile: tuple[int, int]
    saturate: bool = True
    power_2: bool = False
    for_inf: float = FLT_MAX
    given: bool = False
    stochastic: bool = False


class Quantize(Operation):
    """q = encode(x * scale). Inputs: x h (..., N); scale float32 (tiles,) where given; rng int64 (2,) where stochastic. Outputs: q uint8
    like x, scale_inv float32 (tiles,)."""

    name: ClassVar[str] = "quantize"

    def _grid(self, spec: QuantizeSpec, metas: Metas) -> tuple[Meta, Shape]:
        x = metas["x"]
        assert x is not None
        if x.dtype not in formats.HIGH_PRECISION:
            raise FormatError(expected(self.name, "x", x.dtype.name, "float32, bfloat16 or float16"))
        rows, columns = row_count(x) if x.shape else 1, x.shape[-1] if x.shape else 1
        return x, (-(-rows // spec.tile[0]) * -(-columns // spec.tile[1]),)

    def infer(self, spec: QuantizeSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        x, tiles = self._grid(spec, metas)
        if spec.given:
            want(self.name, "scale", metas, tiles, float32)
        if spec.stochastic:
            want(self.name, "rng", metas, (2,), formats.int64)
        return Signature({"q": Meta(x.shape, uint8), "scale_inv": Meta(tiles, float32)})

    def plan(self, spec: QuantizeSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        tiles = Meta(self._grid(spec, metas)[1], float32)
        return Plan(spec, self.infer(spec, metas, needs), kernels, {} if spec.given else {"scale": tiles})

    def forward(self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        s: QuantizeSpec = plan.spec
        x, q, inverse, k = inputs["x"], outputs["q"], outputs["scale_inv"], plan.kernels
        scale = inputs["scale"] if s.given else scratch["scale"]
        assert x is not None and q is not None
        if not s.given:  # scale_inv holds the amaxes until they are scales
            assert inverse is not None
            arrays.provider(inverse.device).fill_zero(inverse, stream)
            k.amax(x.rows(), inverse, s.tile, stream)
            k.scale_from_amax(inverse, scale, inverse, s.format.max, s.power_2, 0.0, s.for_inf, stream)
        k.quantize(x.rows(), q.rows(), scale, inverse, None, s.format, s.tile, s.saturate, inputs.get("rng"), stream)


@dataclass(frozen=True)
class DequantizeSpec:
    """``format`` of the codes, ``tile`` that shares a scale, name of the result's ``dtype``."""

    format: Format
    tile: tuple[int, int]
    dtype: str


class Dequantize(Operation):
    """x = decode(q) * scale_inv. Inputs: q uint8 (..., N), scale_inv float32 (tiles,). Output: x h like q."""

    name: ClassVar[str] = "dequantize"

    def infer(self, spec: DequantizeSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        q = metas["q"]
        assert q is not None
        return Signature({"x": Meta(q.shape, formats.dtype(spec.dtype))})

    def plan(self, spec: DequantizeSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        return Plan(spec, self.infer(spec, metas, needs), kernels)

    def forward(self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        s: DequantizeSpec = plan.spec
        q, x = inputs["q"], outputs["x"]
        assert q is not None and x is not None
        plan.kernels.dequantize(q.rows(), x.rows(), inputs["scale_inv"], s.format, s.tile, stream)


@dataclass(frozen=True)
class Fp8GemmSpec:
    """A product of codes: (rows, columns) of the result, its ``dtype`` by name, formats, the operands' ``tiles`` where they are scaled by
    blocks (None: by the tensor or by rows), ``fast_accumulate``."""

    rows: int
    columns: int
    dtype: str
    a_format: Format
    b_format: Format
    tiles: tuple[tuple[int, int], tuple[int, int]] | None = None
    fast_accumulate: bool = False


class Fp8Gemm(Operation):
    """out = a b^T, scaled. Inputs: a uint8 (Mp, Kp), b uint8 (Np, Kp), padded as ``fp8_gemm`` or ``block_gemm`` takes them, a_scale_inv and
    b_scale_inv float32 in their layout. Output: out h (rows, columns)."""

    name: ClassVar[str] = "fp8_gemm"

    def infer(self, spec: Fp8GemmSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        for name, extent, tile in (("a", spec.rows, 0), ("b", spec.columns, 1)):
            meta = metas[name]
            assert meta is not None
            if spec.tiles is not None:
                codes, scales = block_shapes(extent, meta.shape[1], spec.tiles[tile])
                want(self.name, name, metas, codes, uint8)
                want(self.name, f"{name}_scale_inv", metas, scales, float32)
        return Signature({"out": Meta((spec.rows, spec.columns), formats.dtype(spec.dtype))})

    def plan(self, spec: Fp8GemmSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        space = max(kernels.fp8_gemm_workspace(spec.rows, spec.columns), 1)
        return Plan(spec, self.infer(spec, metas, needs), kernels, {"workspace": Meta((space,), uint8)})

    def forward(self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        s: Fp8GemmSpec = plan.spec
        k, space = plan.kernels, scratch["workspace"]
        operands = inputs["a"], inputs["b"], outputs["out"], s.a_format, s.b_format, inputs["a_scale_inv"], inputs["b_scale_inv"]
        if s.tiles is None:
            k.fp8_gemm(*operands, None, False, s.fast_accumulate, space, stream)
        else:
            k.block_gemm(*operands, *s.tiles, None, False, space, stream)


activation = Activation()
quantize = Quantize()
dequantize = Dequantize()
fp8_gemm = Fp8Gemm()
