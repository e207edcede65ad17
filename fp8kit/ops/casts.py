"""``quantize``, ``dequantize``: casts to FP8 codes and back, any format, scales by tensor, rows or blocks; no
gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8kit import arrays, formats
from fp8kit.arrays import Shape, Tile
from fp8kit.errors import AutogradError
from fp8kit.formats import Format, float32, uint8
from fp8kit.ops import partition as split
from fp8kit.ops.partition import Partition, SharedAmaxes
from fp8kit.ops.product import want
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Metas, Needs, Operation, Partitions, Plan, Shapes, Signature, WorkingSet
from fp8kit.tiles import whole_amax

FLT_MAX = formats.float32.max


def no_gradient(operation: str, needs: Needs) -> None:
    """AutogradError where a gradient is wanted: rounding has none but by convention."""
    if needs:
        raise AutogradError(
            f"{operation}: no gradient rule for its input {min(needs)!r}, which is differentiated"
        )


def whole(shape: Shape, tile: Tile) -> tuple[int, int]:
    """Returns the tile (rows, columns) with its zeros replaced: 0 rows are all rows of an array of ``shape``,
    whose leading dimensions are flattened into rows, and 0 columns are its last dimension."""
    return tile[0] or math.prod(shape[:-1]) or 1, tile[1] or (shape[-1] if shape else 1) or 1


def grid(shape: Shape, tile: Tile) -> Shape:
    """(tiles,) of an array of ``shape``."""
    rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
    high, wide = whole(shape, tile)
    return (-(-rows // high) * -(-columns // wide),)


def by_rows(name: str, tile: Tile, metas: Metas, views: Mapping[str, Shape]) -> tuple[Partition, ...]:
    """Returns the rows of the codes, and of the scales where they belong to rows; not where a scale belongs
    to several rows, but for one that belongs to all."""
    if tile[0] > 1 or (not tile[0] and tile[1]):
        return ()
    return split.rows(metas, views, name, *(("scale", "scale_inv") if tile[0] else ()))


@dataclass(frozen=True)
class QuantizeSpec:
    """``format`` of the codes; ``tile`` (rows, columns) that share a scale, 0 is all of them; ``saturate``;
    ``power_2``: current scales are rounded down to a power of two; ``for_inf``: a current scale that
    overflows; ``source`` of the scales: "current", "scale", they are an input, or "amax", the one tile's amax
    is an input; ``stochastic_bits``: 0 rounds to nearest; n stochastically by n random bits, and rng is an
    input.

    ``blocks``: of any rule, in the place of all the others but ``format``, ``tile`` and ``stochastic_bits``,
    which say the same: ``tile`` as it lies on x, whose contraction is its last dimension, ``along`` 1, or its
    rows, 0."""

    format: Format
    tile: Tile
    saturate: bool = True
    power_2: bool = False
    for_inf: float = FLT_MAX
    source: str = "current"
    stochastic_bits: int = 0
    blocks: Quantizer | None = None
    along: int = 1


class Quantize(Operation):
    """q = encode(x * scale). Inputs: x h (..., N); scale float32 (tiles,) or amax_in float32 (1,), by
    ``spec.source``; rng int64 (2,) where stochastic. Outputs: q uint8 like x, scale_inv float32 (tiles,); of
    MX and NVFP4 blocks scale_codes uint8 (tiles,), of NVFP4 tensor_scale_inv float32 (1,) or (lines,)."""

    name = "quantize"
    results = ("q", "scale_inv")

    def partitions(self, spec: QuantizeSpec, metas: Metas, views: Shapes) -> Partitions:
        """Not where bits are drawn, which know their place in the array, nor for blocks of any rule."""
        return () if spec.stochastic_bits or spec.blocks else by_rows("x", spec.tile, metas, views)

    def shared_amaxes(self, spec: QuantizeSpec) -> SharedAmaxes | None:
        if spec.source != "current" or spec.tile != (0, 0) or spec.blocks:
            return None
        return SharedAmaxes(replace(spec, source="amax"), {"amax_in": "x"})

    def _checked(self, spec: QuantizeSpec, metas: Metas) -> tuple[Meta, Shape]:
        x = want(self.name, "x", metas, None, *formats.HIGH_PRECISION)
        return x, grid(x.shape, spec.tile)

    def infer(self, spec: QuantizeSpec, metas: Metas, needs: Needs) -> Signature:
        no_gradient(self.name, needs)
        x, tiles = self._checked(spec, metas)
        if spec.source != "current":
            want(self.name, "scale" if spec.source == "scale" else "amax_in", metas, tiles, float32)
        if spec.stochastic_bits or (spec.blocks is not None and spec.blocks.needs_rng):
            want(self.name, "rng", metas, (2,), formats.int64)
        made = {"q": Meta(x.shape, uint8), "scale_inv": Meta(tiles, float32)}
        kinds = self.outputs(spec)
        if "scale_codes" in kinds:
            made["scale_codes"] = Meta(tiles, uint8)
        if "tensor_scale_inv" in kinds:
            made["tensor_scale_inv"] = self._lines(spec, x)
        return Signature(made)

    def outputs(self, spec: QuantizeSpec) -> tuple[str, ...]:
        own = spec.blocks
        codes = own is not None and own.coded_scales
        two_level = own is not None and own.two_level
        return self.results + ("scale_codes",) * codes + ("tensor_scale_inv",) * two_level

    def _lines(self, spec: QuantizeSpec, x: Meta) -> Meta:
        """Returns the scales besides those of NVFP4's blocks."""
        assert spec.blocks is not None
        sizes = math.prod(x.shape[:-1]), x.shape[-1]
        return Meta((sizes[1 - spec.along] if spec.blocks.row_scaled else 1,), float32)

    def plan(self, spec: QuantizeSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        x, tiles = self._checked(spec, metas)
        scratch = {} if spec.source == "scale" or spec.blocks else {"scale": Meta(tiles, float32)}
        if "tensor_scale_inv" in self.outputs(spec):
            scratch["amax"] = self._lines(spec, x)
            if spec.blocks is not None and spec.blocks.hadamard and spec.blocks.row_scaled:
                scratch["rotated"] = Meta(x.shape, float32)
        tile = whole(x.shape, spec.tile)
        return Plan(spec, self.infer(spec, metas, needs), kernels, scratch, extra=tile)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s: QuantizeSpec = plan.spec
        x, q, inverse, k = ws.inputs["x"], ws.outputs["q"], ws.outputs["scale_inv"], ws.kernels
        if s.blocks is not None:
            self._by_blocks(s, s.blocks, ws)
            return
        tile, scale, amax = plan.extra, ws.inputs.get("scale"), ws.inputs.get("amax_in")
        if scale is None:
            scale = ws.scratch["scale"]
            if amax is None:  # scale_inv holds the amaxes until they are scales
                amax = inverse
                arrays.fill_zero(inverse, ws.stream)
                k.amax(x.rows(), inverse, tile, ws.stream)
            k.scale_from_amax(amax, scale, inverse, s.format.max, s.power_2, 0.0, s.for_inf, ws.stream)
        rng = ws.inputs.get("rng")
        how = s.format, tile, s.saturate, s.stochastic_bits, 0, rng
        k.quantize(x.rows(), q.rows(), scale, inverse, None, *how, ws.stream)

    def _by_blocks(self, s: QuantizeSpec, own: Quantizer, ws: WorkingSet) -> None:
        x, amax, rng = ws.inputs["x"].rows(), ws.scratch.get("amax"), ws.inputs.get("rng")
        if amax is not None:
            arrays.fill_zero(amax, ws.stream)
            rotated = ws.scratch["rotated"].rows() if "rotated" in ws.scratch else None
            whole_amax(ws.kernels, x, own, s.along, amax, rotated, rng, ws.stream)
        out = [ws.outputs.get(name) for name in ("q", "scale_inv", "scale_codes", "tensor_scale_inv")]
        codes, scale_inv, scale_codes, tensor_scale_inv = out
        assert codes is not None
        targets = codes.rows(), scale_inv, scale_codes, None, amax, tensor_scale_inv
        ws.kernels.cast_blocks(x, *targets, own, s.along, 0, rng, None, ws.stream)


@dataclass(frozen=True)
class RotateSpec:
    """``n`` neighbours along the last dimension of x (..., N), or along its rows with ``along`` 0, are
    rotated by a Hadamard matrix with ``signs``, "plus", "te" or "random"; ``back``: the other way round; name
    of the result's ``dtype``."""

    n: int
    signs: str = "plus"
    along: int = 1
    back: bool = False
    dtype: str = "float32"


class Rotate(Operation):
    """out = x rotated. Inputs: x h (..., N), rng int64 (2,) of random signs; out: like x, ``spec.dtype``."""

    name = "rotate"
    results = ("out",)

    def infer(self, spec: RotateSpec, metas: Metas, needs: Needs) -> Signature:
        no_gradient(self.name, needs)
        x = want(self.name, "x", metas, None, *formats.HIGH_PRECISION)
        if spec.signs == "random":
            want(self.name, "rng", metas, (2,), formats.int64)
        return Signature({"out": Meta(x.shape, formats.dtype(spec.dtype))})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s: RotateSpec = plan.spec
        x, out = ws.inputs["x"].rows(), ws.outputs["out"].rows()
        how = s.n, s.signs, s.along, ws.inputs.get("rng") if s.signs == "random" else None
        if s.back:
            ws.kernels.rotate_back(x, out, None, *how, ws.stream)
        else:
            ws.kernels.rotate(x, out, None, *how, ws.stream)


@dataclass(frozen=True)
class DequantizeSpec:
    """``format`` of the codes, ``tile`` that shares a scale, as in ``QuantizeSpec``, name of the result's
    ``dtype``."""

    format: Format
    tile: Tile
    dtype: str


class Dequantize(Operation):
    """x = decode(q) * scale_inv. Inputs: q uint8 (..., N), scale_inv float32 (tiles,). Output: x h like q."""

    name = "dequantize"
    results = ("x",)

    def partitions(self, spec: DequantizeSpec, metas: Metas, views: Shapes) -> Partitions:
        return by_rows("q", spec.tile, metas, views)

    def infer(self, spec: DequantizeSpec, metas: Metas, needs: Needs) -> Signature:
        no_gradient(self.name, needs)
        q = want(self.name, "q", metas)
        want(self.name, "q", metas, q.shape, uint8)
        want(self.name, "scale_inv", metas, grid(q.shape, spec.tile), float32)
        return Signature({"x": Meta(q.shape, formats.dtype(spec.dtype))})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s: DequantizeSpec = plan.spec
        q, x = ws.inputs["q"], ws.outputs["x"]
        tile = whole(q.shape, s.tile)
        ws.kernels.dequantize(q.rows(), x.rows(), ws.inputs["scale_inv"], s.format, tile, ws.stream)


quantize = Quantize()
rotate = Rotate()
dequantize = Dequantize()
