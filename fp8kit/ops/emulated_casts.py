"""How the operands of emulated products are made: casts whose values are kept instead of codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape
from fp8kit.blocks import tile_of
from fp8kit.formats import E4M3, E8M0, float32, uint8
from fp8kit.ops.product import Product
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, WorkingSet
from fp8kit.tiles import cast_rotated, whole_amax

# operand -> the tensor that it is made of, and whether its contraction is that matrix's last dimension; the
# weight's as PyTorch has it, (out, in)
OPERANDS = {
    "x_q": ("x", 1),
    "w_q": ("w", 1),
    "g_q": ("g", 1),
    "w_qt": ("w", 0),
    "g_qt": ("g", 0),
    "x_qt": ("x", 0),
}
# operands of backward's GEMMs with compute "dequantized": the values that fprop multiplied
FPROP = {"w_qt": "w_q", "x_qt": "x_q"}
# kind of blocks -> the format of their scales; float32 of others
SCALE_FORMATS = {"mx": E8M0, "moss": E8M0, "nvfp4": E4M3}
LINES = ("tensor", "row")  # granularities whose scales belong to whole lines, or to all
_DRAWS = tuple(OPERANDS)  # the number of an operand's random words; those of a further product follow


class Cast(NamedTuple):
    """How an operand is made: of matrix "x", "w" or "g", by a quantizer, along its last dimension (1) or its
    first."""

    source: str
    quantizer: Quantizer
    along: int

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Tiles of the matrix, of ``shape``, along its rows and its columns."""
        high, wide = (
            max(1, -(-n // (tile or max(n, 1))))
            for n, tile in zip(shape, tile_of(self.quantizer, self.along), strict=True)
        )
        return high, wide


class Target(NamedTuple):
    """Where a cast goes, each None where it is not needed: the operand's ``values``; ``inverse``, what
    multiplies products of them; ``codes`` and ``scales``, one a tile, of which they are made, float32 or,
    uint8, as codes; ``inside``, the mask of what was not clipped."""

    values: Any
    inverse: Any
    codes: Any
    scales: Any
    inside: Any


# what follows an array's name in those of its parts, in their order
PARTS = ("", "_inv", "_codes", "_scales", "_inside")


class EmulatedCasts(Product):
    """The casts of ``EmulatedProduct``. ``casts``, ``recasts``: array -> how it is made, of a matrix, or of
    the values that fprop multiplied; ``arrays``: operand -> its array; ``masks``: matrix -> the mask of what
    fprop's cast did not clip; ``widened``: whether matrices are float16, cast from float32; ``matrices``."""

    casts: dict[str, Cast]
    recasts: dict[str, Cast]
    arrays: dict[str, str]
    masks: dict[str, str]
    widened: bool
    matrices: dict[str, Meta]

    def _name(self, array: str) -> str:
        return f"{self.spec.prefix}{array}"

    def _made(self, source: str) -> list[str]:
        """Returns the arrays that are made of matrix "x", "w" or "g"."""
        return [name for name, cast in self.casts.items() if cast.source == source]

    def _how(self, array: str) -> Cast:
        """Returns how an array is made."""
        return self.casts[array] if array in self.casts else self.recasts[array]

    def _lines(self, cast: Cast) -> int:
        """Returns how many scales of two-level operands there are besides those of blocks."""
        return self.matrices[cast.source].shape[1 - cast.along] if cast.quantizer.row_scaled else 1

    def _part(self, ws: WorkingSet, array: str, part: str = "") -> Any:
        """Returns a part of an array, None where it has no such one."""
        name = f"{self._name(array)}{part}"
        held = (ws.saved, ws.scratch, ws.inputs)
        return next((views[name] for views in held if views.get(name) is not None), None)

    def _values(self, ws: WorkingSet, array: str) -> tuple[Any, Any]:
        """Returns an array's values, and what multiplies products of them, None for 1."""
        return self._part(ws, array), self._part(ws, array, "_inv")

    def _wide(self, ws: WorkingSet, matrix: ArrayView) -> ArrayView:
        """Returns a float16 matrix as float32, until the next one is."""
        wide = ws.scratch[self._name("wide")].first(matrix.shape)
        ws.kernels.copy(matrix, wide, ws.stream)
        return wide

    def _cast(self, ws: WorkingSet, source: str, matrix: ArrayView, into: tuple[Any, Any]) -> None:
        """Make those arrays of a matrix that are in ``into``."""
        made = self._made(source)
        if self.widened and made:
            matrix = self._wide(ws, matrix)
        for name in made:
            own = self._name(name)
            found = (
                next((views[own + part] for views in into if views.get(own + part) is not None), None)
                for part in PARTS
            )
            target = Target(*found)
            if any(part is not None for part in target):
                self._cast_one(ws, name, matrix, target)

    def _cast_again(self, ws: WorkingSet, operand: str) -> None:
        """Make an operand that is cast from fprop's values."""
        if operand not in self.recasts:
            return
        array, own = self.arrays[FPROP[operand]], self._name(operand)
        values, inverse = self._values(ws, array)
        if inverse is not None:
            values = self._by_line(ws, array, values, inverse)
        self._cast_one(ws, operand, values, Target(*(ws.scratch.get(own + part) for part in PARTS)))

    def _cast_lines(self, ws: WorkingSet, name: str, matrix: ArrayView, target: Target) -> None:
        """A cast with one scale for the tensor or for each line along the contraction."""
        k, stream, cast = ws.kernels, ws.stream, self._how(name)
        own, rng = cast.quantizer, ws.inputs.get("rng")
        tile = matrix.shape if own.granularity == "tensor" else (1, matrix.shape[1])
        if own.granularity != "tensor" and not cast.along:
            tile = (matrix.shape[0], 1)
        count = math.prod(cast.grid(matrix.shape))
        scales, codes = ws.scratch[self._name("line_scales")], target.codes
        amax, scale, inverse = (scales.slice(0, i * (scales.size // 3), count) for i in range(3))
        if target.scales is not None:
            inverse = target.scales.reshape(count)
        of = cast.source if own.granularity == "tensor" else name
        if rotates_in_cast(own):
            three = (amax, scale, inverse), own, cast.along, self._draw(name), rng, stream
            cast_rotated(k, matrix, codes, target.values, *three, lambda amax: self.share(ws, of, amax))
            return
        matrix = self._rotated(ws, name, matrix)
        if codes is None:
            codes = ws.scratch[self._name("line_codes")].first(matrix.shape)
        if own.needs_state:
            scale = self._recorded(ws, name, matrix, inverse, scale)
        else:
            scale_lines_of(
                k, matrix, own, tile, amax, scale, inverse, stream, lambda amax: self.share(ws, of, amax)
            )
        bits = own.stochastic_bits
        random = bits, self._draw(name), rng if bits else None
        k.quantize(matrix, codes, scale, inverse, None, own.format, tile, True, *random, stream)
        if target.values is not None:
            k.dequantize(codes, target.values, inverse, own.format, tile, stream)

    def _recorded(
        self, ws: WorkingSet, name: str, matrix: ArrayView, inverse: ArrayView, spare: ArrayView
    ) -> ArrayView:
        """Returns the scale that follows from earlier steps; its inverse is written, and the amax
        recorded."""
        source = self.casts[name].source
        scale, record = ws.inputs[self._name(f"{source}_scale")], ws.outputs.get(self._name(f"{source}_amax"))
        if record is not None:
            ws.kernels.amax(matrix, record, matrix.shape, ws.stream)
        ws.kernels.scale_from_amax(scale, inverse, spare, 1.0, False, 0.0, float32.max, ws.stream)
        return scale

    def _rotated(self, ws: WorkingSet, name: str, matrix: ArrayView) -> ArrayView:
        """Returns the matrix as a cast rotates it, float32; itself where it does not."""
        _, own, along = self._how(name)
        if not own.hadamard:
            return matrix
        rotated = ws.scratch[self._name("rotated")].first(matrix.shape)
        drawn = ws.inputs.get("rng") if own.signs == "random" else None
        ws.kernels.rotate(matrix, rotated, None, own.hadamard, own.signs, along, drawn, ws.stream)
        return rotated

    def _cast_one(self, ws: WorkingSet, name: str, matrix: ArrayView, target: Target) -> None:
        cast = self._how(name)
        _, quantizer, along = cast
        if quantizer.granularity in LINES:
            self._cast_lines(ws, name, matrix, target)
            return
        k, stream, rng, amax = ws.kernels, ws.stream, ws.inputs.get("rng"), None
        if quantizer.two_level:
            amax = ws.scratch[self._name("amax")].slice(0, 0, self._lines(cast))
            arrays.fill_zero(amax, stream)
            rotated = None
            if quantizer.row_scaled and quantizer.hadamard:
                rotated = ws.scratch[self._name("rotated")].first(matrix.shape)
            whole_amax(k, matrix, quantizer, along, amax, rotated, rng, stream)
            self.share(ws, name if quantizer.row_scaled else cast.source, amax)
        scales = tile_codes = None
        kind = SCALE_FORMATS.get(quantizer.granularity.partition("_")[0])
        if target.scales is not None and kind is None:
            scales = target.scales
        elif target.scales is not None and target.scales.dtype is uint8:
            tile_codes = target.scales
        elif target.scales is not None:
            tile_codes = ws.scratch[self._name("tile_codes")].slice(0, 0, target.scales.size)
            tile_codes = tile_codes.reshape(*target.scales.shape)
        draws = self._draw(name), rng if quantizer.needs_rng else None
        made = target.codes, scales, tile_codes, target.values, amax, target.inverse
        k.cast_blocks(matrix, *made, quantizer, along, *draws, target.inside, stream)
        if tile_codes is not None and tile_codes is not target.scales:
            self._decode_scales(ws, quantizer, tile_codes, target.scales)

    def _decode_scales(self, ws: WorkingSet, own: Quantizer, codes: ArrayView, scales: ArrayView) -> None:
        """The values, float32, of the codes of an operand's scales."""
        kind = SCALE_FORMATS[own.granularity.partition("_")[0]]
        ws.kernels.dequantize(codes, scales, self._one(ws), kind, scales.shape, ws.stream)

    def _one(self, ws: WorkingSet) -> ArrayView:
        """1, float32 [1]: the rule of scales for an amax of 1 in a format with that largest value."""
        three = ws.scratch[self._name("one")]
        amax, one, inverse = (three.slice(0, i, 1) for i in range(3))
        arrays.fill_zero(amax, ws.stream)
        ws.kernels.scale_from_amax(amax, one, inverse, 1.0, False, 1.0, float32.max, ws.stream)
        return one

    def _draw(self, name: str) -> int:
        """Returns the number of an operand's random words."""
        return _DRAWS.index(name) + len(_DRAWS) * _number(self.spec.prefix)

    def _by_line(self, ws: WorkingSet, array: str, values: ArrayView, inverse: Any) -> ArrayView:
        """Values times their lines' scales, rounded once."""
        k, lines = ws.kernels, [inverse, None]
        out, wide = (ws.scratch[self._name(name)] for name in ("crossed", "crossed_wide"))
        out, wide = (each.first(values.shape) for each in (out, wide))
        k.copy(values, wide, ws.stream)
        k.scale_product(
            wide, out, *(lines if self.casts[array].along else lines[::-1]), None, None, ws.stream
        )
        return out


def rotates_in_cast(own: Quantizer) -> bool:
    """Whether a cast with scales of lines, or of all, rotates by itself: with one scale, from the rotated
    values. Scales of lines need the amax of each whole rotated line."""
    return bool(own.hadamard) and own.granularity == "tensor" and not (own.needs_state or own.static)


def scale_lines_of(
    k: Any,
    x: ArrayView,
    own: Quantizer,
    tile: tuple[int, ...],
    amax: ArrayView,
    scale: ArrayView,
    inverse: ArrayView,
    stream: int,
    share: Callable[[ArrayView], None] | None = None,
) -> None:
    """Fill ``scale`` and ``inverse``, float32, with the scales of the tiles of x and 1 / these: by their
    amaxes, which ``amax`` is for and ``share`` makes those of all ranks, or static."""
    arrays.fill_zero(amax, stream)
    if own.static:  # as for an amax of 1 in a format with that largest value
        rule = own.static_scale, False, 1.0, float32.max
    else:
        k.amax(x, amax, tile, stream)
        if share is not None:
            share(amax)
        rule = own.scale_limits
    k.scale_from_amax(amax, scale, inverse, *rule, stream)


def _number(prefix: str) -> int:
    """Returns the number of an operation's product: that of a group, or of the second one of an MLP."""
    digits = prefix.removeprefix("fc").partition("_")[0]
    return int(digits) - prefix.startswith("fc") if digits.isdigit() else 0
