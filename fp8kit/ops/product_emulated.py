"""Products of operands in any format, with scales of blocks by any rule, rotated or rounded stochastically:
the codes' values are multiplied in high precision.

What a chip without such tensor cores computes so is what those that have them compute, but for the order of
the sums: every value of a code with a scale of E8M0 or E4M3 is exact in float32 and bfloat16, the products of
two are exact in float32, and sums are float32's. (The values of blocks with float32 scales are rounded to the
operands' dtype.) NVFP4's two scales of whole tensors are multiplied into the float32 sums. float16 has too
small a range for values that are rounded up: such operands are cast from float32, to it, and multiplied in
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from fp8kit import arrays, slowness
from fp8kit.arrays import ArrayView
from fp8kit.buffers import free
from fp8kit.formats import float16, float32, uint8
from fp8kit.ops.product import Product, ProductSpec, want, want_rng
from fp8kit.ops.product_quantized import GEMMS, unsupported
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import Meta, Metas, WorkingSet

ONE = Meta((1,), float32)
AMAX = Meta((1,), float32, zero=True)
# operand -> the tensor that it is made of, and whether its contraction is that matrix's last dimension; the
# weight's as PyTorch has it, (out, in)
_OPERANDS = {
    "x_q": ("x", 1),
    "w_q": ("w", 1),
    "g_q": ("g", 1),
    "w_qt": ("w", 0),
    "g_qt": ("g", 0),
    "x_qt": ("x", 0),
}
# operands of backward's GEMMs with compute "dequantized": the values that fprop multiplied
_FPROP = {"w_qt": "w_q", "x_qt": "x_q"}
_LINES = ("tensor", "row")  # granularities whose scales belong to whole lines, or to all
_DRAWS = tuple(_OPERANDS)  # the number of an operand's random words; those of a further product follow
_PAIRS = [set(pair) for pair in GEMMS.values()]


class Cast(NamedTuple):
    """How an operand is made: of matrix "x", "w" or "g", by a quantizer, along its last dimension (1) or its
    first."""

    source: str
    quantizer: Quantizer
    along: int


class EmulatedProduct(Product):
    """``Product`` on values: operand ``x_q`` of fprop, ``x_qt`` of wgrad and so on, each like the matrix that
    it is made of, and for NVFP4 ``x_q_inv``, the tensor's scale_inv, float32 [1], or those of its rows.

    An operand of a GEMM in high precision is the matrix itself. One that fprop's operand can stand for, since
    its tiles are squares or backward is to have fprop's values, is made once.
    """

    kernels = ("cast_blocks", "gemm", "rotate", "amax", "scale_from_amax", "quantize", "dequantize")
    capability = (0, 0)
    described = "emulated products"

    def __init__(self, spec: ProductSpec, *how: Any) -> None:
        super().__init__(spec, *how)
        assert spec.fp8 is not None
        self.fp8: Quantization = spec.fp8
        gemms = self.fp8.gemms
        # operand -> the array that holds it; operands in high precision are not there
        self.arrays: dict[str, str] = {}
        self.casts: dict[str, Cast] = {}
        for name, operands in GEMMS.items():
            sides = ("a", gemms[name].a), ("b", gemms[name].b)
            for operand, (place, quantizer) in zip(operands, sides, strict=True):
                source, along = _OPERANDS[operand]
                if gemms[name].compute == "dequantized" and operand in _FPROP:
                    self.arrays[operand] = _FPROP[operand]
                elif gemms[name].compute == "quantized" and gemms[name].plain != place:
                    cast = Cast(source, quantizer, along if source != "w" or self.oi else 1 - along)
                    self.arrays[operand] = next(
                        (other for other, made in self.casts.items() if _alike(made, cast)), operand
                    )
                    self.casts.setdefault(self.arrays[operand], cast)
        self.widened = self.dtype is float16
        values = float32 if self.widened else self.dtype
        self.matrices = {
            "x": Meta((self.m, self.k), values),
            "w": Meta(self._weight_shape(self.n), values),
            "g": Meta((self.m, self.n), values),
        }
        self.whole_wgrad = len(self.weights) > 1
        self.fprop_reads_x, self.wgrad_reads_x = ("x_q" not in self.arrays), ("x_qt" not in self.arrays)
        self.reads_g = not {"g_q", "g_qt"} <= self.arrays.keys()
        self.reads_w = "w_qt" not in self.arrays  # by dgrad

    @classmethod
    def check_supported(cls, gemms: Iterable[tuple[str, Gemm]]) -> None:
        """UnsupportedError for named GEMMs that are not emulated."""
        known = dict(gemms)
        for name, gemm in known.items():
            # the values that fprop multiplied are those of a rotated tensor
            turned = known["fprop"].a.hadamard
            if gemm.compute == "dequantized" and turned:
                raise unsupported("fprop.hadamard", turned, f"0 with {name} dequantized")
            for place, own in (("a", gemm.a), ("b", gemm.b)):
                if place == gemm.plain or gemm.compute != "quantized":
                    continue
                if own.needs_state and own.granularity != "tensor":
                    raise unsupported(f"{name}.{place}.granularity", own.granularity, "tensor, delayed")
                if own.static and own.granularity not in _LINES:
                    wanted = "tensor or row, with a static scale"
                    raise unsupported(f"{name}.{place}.granularity", own.granularity, wanted)

    # --- what there is --------------------------------------------------------------------------------------

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        if self.needs_rng:
            want_rng(operation, metas)
        if self.spec.weight_cached:
            for name, meta in self.weight_outputs().items():
                want(operation, name, metas, meta.shape, meta.dtype)
        for operand in "xw":
            if self._delayed(operand):
                want(operation, self._name(f"{operand}_scale"), metas, (1,), float32)

    def _delayed(self, operand: str) -> bool:
        """Whether an array of "x", "w" or "g" has the scale that follows from earlier steps."""
        return any(self.casts[name].quantizer.needs_state for name in self._made(operand))

    def outputs(self) -> dict[str, Meta]:
        kept = "w" * self.spec.weight_cached
        return {self._name(f"{o}_amax"): AMAX for o in "xw" if self._delayed(o) and o not in kept}

    def scalars(self) -> dict[str, str]:
        names = [self._name(f"{operand}_scale") for operand in "xw" if self._delayed(operand)]
        return {name: name for name in names}

    def grads(self) -> dict[str, Meta]:
        own = {self._name("g_amax"): AMAX} if self._delayed("g") else {}
        return super().grads() | own

    def backward_inputs(self) -> dict[str, Meta]:
        return {self._name("g_scale"): ONE} if self._delayed("g") else {}

    @property
    def needs_rng(self) -> bool:
        return any(cast.quantizer.needs_rng for cast in self.casts.values())

    def weight_outputs(self) -> dict[str, Meta]:
        own = {self._name("w_amax"): AMAX} if self._delayed("w") else {}
        return self._metas(self._made("w")) | own

    def saved(self) -> dict[str, Meta]:
        return self._metas(name for name in self._backward() if not self._is_cached(name))

    def kept(self) -> tuple[str, ...]:
        cached = self._metas(name for name in self._backward() if self._is_cached(name))
        drawn = any(self.casts[name].quantizer.needs_rng for name in self._made("g") if self._wanted(name))
        return (*(self.weights if self.needs_x and self.reads_w else ()), *cached, *(("rng",) * drawn))

    def weight_names(self) -> tuple[str, ...]:
        return tuple(self.weight_outputs()) if self.spec.weight_cached else super().weight_names()

    def scratch(self) -> dict[str, Meta]:
        own = [name for name in (*self._made("x"), *self._made("w")) if not self._is_cached(name)]
        kept = self._backward()
        forward = {self.arrays[operand] for operand in GEMMS["fprop"] if operand in self.arrays}
        out = self._metas(name for name in own if name not in kept and name in forward)
        return (
            out
            | self._bias_buffer()
            | self._weight_buffer()
            | self._sums("fprop", (self.m, self.n))
            | self._amaxes()
        )

    def cast_scratch(self) -> dict[str, Meta]:
        return self._weight_buffer() | self._amaxes()

    def backward_scratch(self) -> dict[str, Meta]:
        wanted = [name for name in self._made("g") if self._wanted(name)]
        out = self._metas(wanted) | self._grad_buffers() | self._amaxes()
        if self.needs_x:
            out |= self._sums("dgrad", (self.m, self.k))
            out |= self._weight_buffer() if self.reads_w else {}
        return out | (self._sums("wgrad", self._weight_shape(self.n)) if self.needs_w else {})

    # --- casts ----------------------------------------------------------------------------------------------

    def cast_x(self, ws: WorkingSet, x: ArrayView, amax_known: bool = False) -> None:
        self._cast(ws, "x", x, (ws.scratch, ws.saved))

    def cast_weight(self, ws: WorkingSet) -> None:
        self._cast(ws, "w", self._whole_weight(ws), (ws.outputs, ws.outputs))

    def cast_g(self, ws: WorkingSet, g: ArrayView, with_bias: bool = True, amax_known: bool = False) -> None:
        super().cast_g(ws, g, with_bias)
        self._cast(ws, "g", g, (ws.scratch, ws.scratch))

    def save_weight(self, ws: WorkingSet) -> None:
        if self.needs_x and not self.spec.weight_cached:
            self._cast(ws, "w", self._whole_weight(ws), ({}, ws.saved))

    # --- products -------------------------------------------------------------------------------------------

    def fprop(
        self, ws: WorkingSet, x: ArrayView | None, y: ArrayView, addend: ArrayView | None = None
    ) -> None:
        if self._made("w") and not self.spec.weight_cached:
            self._cast(ws, "w", self._whole_weight(ws), (ws.scratch, ws.saved))
        left = self._operand(ws, "x_q", x)
        right = self._operand(ws, "w_q", None if "w_q" in self.arrays else self._whole_weight(ws))
        layout = "nt" if self.oi else "nn"
        self._multiply(ws, "fprop", left, right, y, layout, self._bias(ws), addend)
        del left, right
        self._free(ws.scratch, "x_q", "w_q")

    def dgrad(self, ws: WorkingSet, g: ArrayView | None, dx: ArrayView) -> None:
        left = self._operand(ws, "g_q", g)
        right = self._operand(ws, "w_qt", self._whole_weight(ws) if self.reads_w else None)
        self._multiply(ws, "dgrad", left, right, dx, "nn" if self.oi else "nt")
        del left, right
        self._free(ws.scratch, "g_q")

    def wgrad(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> None:
        left, right = self._operand(ws, "g_qt", g), self._operand(ws, "x_qt", x)
        (first,) = list(self.weights)[:1]
        whole = f"{self.spec.prefix}dweight"
        out = ws.scratch[whole] if self.whole_wgrad else ws.outputs[first]
        a, b = (left, right) if self.oi else (right, left)
        addend = out if self.adds and not self.whole_wgrad else None
        self._multiply(ws, "wgrad", a, b, out, "tn", None, addend)
        del left, right, a, b
        self._free(ws.scratch, "g_qt")
        self._free(ws.saved, "x_qt")
        if self.whole_wgrad:
            self._part_weights(ws, out)
            del out
            free(ws.scratch, whole)

    # --- helpers --------------------------------------------------------------------------------------------

    def _made(self, source: str) -> list[str]:
        """The arrays that are made of matrix "x", "w" or "g"."""
        return [name for name, cast in self.casts.items() if cast.source == source]

    def _backward(self) -> list[str]:
        """The arrays of forward that backward reads."""
        wanted = ("w_qt",) * self.needs_x + ("x_qt",) * self.needs_w
        return [self.arrays[operand] for operand in wanted if operand in self.arrays]

    def _wanted(self, name: str) -> bool:
        """Whether a GEMM that is wanted reads the array of g."""
        wanted = ("g_q",) * self.needs_x + ("g_qt",) * self.needs_w
        return any(self.arrays.get(operand) == name for operand in wanted)

    def _is_cached(self, name: str) -> bool:
        return self.spec.weight_cached and self.casts[name].source == "w"

    def _name(self, array: str) -> str:
        return f"{self.spec.prefix}{array}"

    def _metas(self, names: Iterable[str]) -> dict[str, Meta]:
        """Arrays by the operation's names."""
        made: dict[str, Meta] = {}
        for name in names:
            cast = self.casts[name]
            made[self._name(name)] = self.matrices[cast.source]
            if cast.quantizer.two_level:
                made[f"{self._name(name)}_inv"] = Meta((self._lines(cast),), float32)
        return made

    def _lines(self, cast: Cast) -> int:
        """How many scales of two-level operands there are besides those of blocks."""
        return self.matrices[cast.source].shape[1 - cast.along] if cast.quantizer.row_scaled else 1

    def _amaxes(self) -> dict[str, Meta]:
        """Where amaxes are taken before a cast, and what one with scales of lines leaves in between."""
        made: dict[str, Meta] = {}
        if self.fp8.two_level:
            most = max(1, *(self._lines(cast) for cast in self.casts.values()))
            made[self._name("amax")] = Meta((most,), float32)
        if self.widened:
            most = max(math.prod(matrix.shape) for matrix in self.matrices.values())
            made[self._name("wide")] = Meta((most,), float32)
        sizes = [
            self.matrices[cast.source].shape
            for cast in self.casts.values()
            if cast.quantizer.granularity in _LINES
        ]
        turned = [self.matrices[cast.source].shape for cast in self.casts.values() if _turned(cast.quantizer)]
        if turned:
            made[self._name("turned")] = Meta((max(m * n for m, n in turned),), float32)
        crossed = [self.matrices[self.casts[_FPROP[o]].source] for o in _FPROP if self._is_crossed(o)]
        if crossed:
            most = max(math.prod(matrix.shape) for matrix in crossed)
            made[self._name("crossed")] = Meta((most,), crossed[0].dtype)
            made[self._name("crossed_wide")] = Meta((most,), float32)
        if sizes:
            made[self._name("codes")] = Meta((max(m * n for m, n in sizes),), uint8)
            made[self._name("scales")] = Meta((3 * max(1, *(max(size) for size in sizes)),), float32)
        return made

    def _sums(self, gemm: str, shape: tuple[int, ...]) -> dict[str, Meta]:
        """Where a GEMM's float32 sums lie that are multiplied by scales, or are to become float16."""
        casts = [self.casts[self.arrays[operand]] for operand in GEMMS[gemm] if operand in self.arrays]
        apart = any(self.widened or cast.quantizer.two_level for cast in casts)
        return {self._name(f"{gemm}_sums"): Meta(shape, float32)} if apart else {}

    def _wide(self, ws: WorkingSet, matrix: ArrayView) -> ArrayView:
        """A float16 matrix as float32, until the next one is."""
        wide = ws.scratch[self._name("wide")].slice(0, 0, matrix.size).reshape(*matrix.shape)
        ws.kernels.copy(matrix, wide, ws.stream)
        return wide

    def _cast(self, ws: WorkingSet, source: str, matrix: ArrayView, into: tuple[Any, Any]) -> None:
        """Make those arrays of a matrix that are in ``into``."""
        made = self._made(source)
        if self.widened and made:
            matrix = self._wide(ws, matrix)
        for name in made:
            own = self._name(name)
            views = next((views for views in into if views.get(own) is not None), None)
            if views is not None:
                self._cast_one(ws, name, matrix, views[own], views.get(f"{own}_inv"))

    def _cast_lines(self, ws: WorkingSet, name: str, matrix: ArrayView, values: ArrayView) -> None:
        """``values`` of a cast with one scale for the tensor or for each line along the contraction."""
        k, stream, (_, own, along) = ws.kernels, ws.stream, self.casts[name]
        rng, matrix = ws.inputs.get("rng"), self._rotated(ws, name, matrix)
        tile = matrix.shape if own.granularity == "tensor" else (1, matrix.shape[1])
        if own.granularity != "tensor" and not along:
            tile = (matrix.shape[0], 1)
        count = max(1, -(-matrix.shape[0] // max(tile[0], 1)) * -(-matrix.shape[1] // max(tile[1], 1)))
        scales = ws.scratch[self._name("scales")]
        amax, scale, inverse = (scales.slice(0, i * (scales.size // 3), count) for i in range(3))
        codes = ws.scratch[self._name("codes")].slice(0, 0, matrix.size).reshape(*matrix.shape)
        arrays.provider(amax.device).fill_zero(amax, stream)
        if own.needs_state:
            scale = self._recorded(ws, name, matrix, inverse, scale)
        else:
            if own.static:  # as for an amax of 1 in a format with that largest value
                rule = own.static_scale, False, 1.0, float32.max
            else:
                k.amax(matrix, amax, tile, stream)
                rule = own.format.max, own.power_2, own.epsilon, float32.max
            k.scale_from_amax(amax, scale, inverse, *rule, stream)
        bits = own.stochastic_bits
        random = bits, self._draw(name), rng if bits else None
        k.quantize(matrix, codes, scale, inverse, None, own.format, tile, True, *random, stream)
        k.dequantize(codes, values, inverse, own.format, tile, stream)

    def _recorded(
        self, ws: WorkingSet, name: str, matrix: ArrayView, inverse: ArrayView, spare: ArrayView
    ) -> ArrayView:
        """The scale that follows from earlier steps; its inverse is written, and the amax recorded."""
        source = self.casts[name].source
        scale, record = ws.inputs[self._name(f"{source}_scale")], ws.outputs.get(self._name(f"{source}_amax"))
        if record is not None:
            ws.kernels.amax(matrix, record, matrix.shape, ws.stream)
        ws.kernels.scale_from_amax(scale, inverse, spare, 1.0, False, 0.0, float32.max, ws.stream)
        return scale

    def _rotated(self, ws: WorkingSet, name: str, matrix: ArrayView) -> ArrayView:
        """The matrix as a cast rotates it, float32; itself where it does not."""
        _, own, along = self.casts[name]
        if not own.hadamard:
            return matrix
        turned = ws.scratch[self._name("turned")].slice(0, 0, matrix.size).reshape(*matrix.shape)
        drawn = ws.inputs.get("rng") if own.signs == "random" else None
        ws.kernels.rotate(matrix, turned, None, own.hadamard, own.signs, along, drawn, ws.stream)
        return turned

    def _cast_one(
        self, ws: WorkingSet, name: str, matrix: ArrayView, values: ArrayView, inverse: ArrayView | None
    ) -> None:
        _, quantizer, along = self.casts[name]
        if quantizer.granularity in _LINES:
            self._cast_lines(ws, name, matrix, values)
            return
        k, stream, rng, amax = ws.kernels, ws.stream, ws.inputs.get("rng"), None
        if quantizer.two_level:
            amax = ws.scratch[self._name("amax")].slice(0, 0, self._lines(self.casts[name]))
            arrays.provider(amax.device).fill_zero(amax, stream)
            if quantizer.row_scaled:
                lying = (1, matrix.shape[1]) if along else (matrix.shape[0], 1)
                k.amax(self._rotated(ws, name, matrix), amax, lying, stream)
            elif quantizer.hadamard:
                k.rotate(matrix, None, amax, quantizer.hadamard, quantizer.signs, along, rng, stream)
            else:
                k.amax(matrix, amax, matrix.shape, stream)
        how = quantizer, along, self._draw(name), rng if quantizer.needs_rng else None
        k.cast_blocks(matrix, None, None, None, values, amax, inverse, *how, stream)

    def _draw(self, name: str) -> int:
        """The number of an operand's random words."""
        return _DRAWS.index(name) + len(_DRAWS) * _number(self.spec.prefix)

    def _operand(self, ws: WorkingSet, operand: str, matrix: ArrayView | None) -> tuple[Any, Any]:
        """The values of a GEMM's operand and the tensor's scale_inv, None for 1. ``matrix``: what is read in
        high precision."""
        array = self.arrays.get(operand)
        if array is None:
            # the other operand of a widened product is wide, too
            both = self.widened and any(operand in pair and pair & self.arrays.keys() for pair in _PAIRS)
            return self._wide(ws, matrix) if both and matrix is not None else matrix, None
        name = self._name(array)
        views = next(views for views in (ws.saved, ws.scratch, ws.inputs) if views.get(name) is not None)
        values, inverse = views[name], views.get(f"{name}_inv")
        return (
            (self._by_line(ws, array, values, inverse), None)
            if self._is_crossed(operand)
            else (values, inverse)
        )

    def _is_crossed(self, operand: str) -> bool:
        """Whether a GEMM multiplies fprop's values along another dimension than fprop, and each line has a
        scale: this one changes along the GEMM's contraction."""
        array = self.arrays.get(operand)
        return array is not None and array == _FPROP.get(operand) and self.casts[array].quantizer.row_scaled

    def _by_line(self, ws: WorkingSet, array: str, values: ArrayView, inverse: Any) -> ArrayView:
        """Values times their lines' scales, rounded once."""
        k, lines = ws.kernels, [inverse, None]
        out, wide = (ws.scratch[self._name(name)] for name in ("crossed", "crossed_wide"))
        out, wide = (each.slice(0, 0, values.size).reshape(*values.shape) for each in (out, wide))
        k.copy(values, wide, ws.stream)
        k.scale_product(
            wide, out, *(lines if self.casts[array].along else lines[::-1]), None, None, ws.stream
        )
        return out

    def _multiply(
        self,
        ws: WorkingSet,
        gemm: str,
        left: tuple[Any, Any],
        right: tuple[Any, Any],
        out: ArrayView,
        layout: Any,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        """out = left right (+ bias) (+ addend), as ``layout`` says, times both tensors' scales."""
        (a, a_inv), (b, b_inv), space = left, right, ws.scratch["workspace"]
        if out.device.kind != "cpu":
            _say_slow(out.device.kind)
        if a_inv is None and b_inv is None and not (self.widened and a.dtype is float32):
            ws.kernels.gemm(a, b, out, layout, bias, addend, space, ws.stream)
            return
        sums = ws.scratch[self._name(f"{gemm}_sums")]
        ws.kernels.gemm(a, b, sums, layout, None, None, space, ws.stream)
        ws.kernels.scale_product(sums, out, a_inv, b_inv, bias, addend, ws.stream)

    def _free(self, views: Any, *operands: str) -> None:
        for operand in operands:
            array = self.arrays.get(operand)
            if array is not None:
                free(views, self._name(array), f"{self._name(array)}_inv")


def _turned(quantizer: Quantizer) -> bool:
    """Whether a rotated copy of the matrix is made before the cast."""
    return bool(quantizer.hadamard) and (quantizer.granularity in _LINES or quantizer.row_scaled)


def _say_slow(kind: str) -> None:
    """On a CPU every product is one in high precision, and nothing is slower for it."""
    slowness.say(
        "no tensor core here multiplies what the recipe's casts make",
        f"products on {kind} are emulated, in high precision: several times slower than FP8",
        "`fp8kit recipes list` shows how each recipe runs here",
    )


def _alike(made: Cast, cast: Cast) -> bool:
    """Whether the array that is made so can stand for the other: the same, or squares, whose values do not
    depend on where the contraction lies, unless they are rotated or random."""
    if made.source != cast.source or made.quantizer != cast.quantizer:
        return False
    high, wide = cast.quantizer.tile
    return made.along == cast.along or (
        high == wide and not cast.quantizer.needs_rng and not cast.quantizer.hadamard
    )


def _number(prefix: str) -> int:
    """The number of an operation's product: that of a group, or of the second one of an MLP."""
    digits = prefix.removeprefix("fc").partition("_")[0]
    return int(digits) - prefix.startswith("fc") if digits.isdigit() else 0
