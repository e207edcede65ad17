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
from typing import Any, ClassVar, NamedTuple

from fp8kit import slowness
from fp8kit.arrays import CPU, ArrayView, Shape
from fp8kit.buffers import free
from fp8kit.devices import NOWHERE
from fp8kit.formats import float16, float32, uint8
from fp8kit.ops.emulated_casts import FPROP, LINES, OPERANDS, PARTS, Cast, EmulatedCasts, rotates_in_cast
from fp8kit.ops.product import ProductSpec, want, want_rng
from fp8kit.ops.product_quantized import GEMMS, unsupported
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import Meta, Metas, WorkingSet

ONE = Meta((1,), float32)
AMAX = Meta((1,), float32, zero=True)
_PAIRS = [set(pair) for pair in GEMMS.values()]


class Back(NamedTuple):
    """How a gradient gets back to the tensor as it is: the rotation of fprop's operand; ``rotated``: whether
    the product is the rotated operand's gradient already; the name of the mask of what was not clipped, ""
    for none."""

    rotation: tuple[int, str]
    rotated: bool
    mask: str


class EmulatedProduct(EmulatedCasts):
    """``Product`` on values: operand ``x_q`` of fprop, ``x_qt`` of wgrad and so on, each like the matrix that
    it is made of, and for NVFP4 ``x_q_inv``, the tensor's scale_inv, float32 [1], or those of its rows.

    An operand of a GEMM in high precision is the matrix itself. One that fprop's operand can stand for, since
    its tiles are squares or backward is to have fprop's values, is made once. One that is cast from fprop's
    values (``Gemm.recast``) is made in backward. Where these are of a rotated tensor, or elements that were
    clipped have no gradient, the product is brought ``Back``.
    """

    kernels: ClassVar[tuple[str, ...]] = (
        *("cast_blocks", "gemm", "rotate", "rotate_back", "amax", "scale_from_amax", "quantize"),
        *("dequantize", "scale_product"),
    )
    capability = tensor_cores = (0, 0)
    described = "emulated products"

    def __init__(self, spec: ProductSpec, *how: Any) -> None:
        super().__init__(spec, *how)
        assert spec.fp8 is not None
        self.fp8: Quantization = spec.fp8
        gemms = self.fp8.gemms
        # operand -> the array that holds it; operands in high precision are not there
        self.arrays: dict[str, str] = {}
        self.casts: dict[str, Cast] = {}
        self.recasts: dict[str, Cast] = {}
        for name, operands in GEMMS.items():
            sides = ("a", gemms[name].a), ("b", gemms[name].b)
            for operand, (place, quantizer) in zip(operands, sides, strict=True):
                source, along = OPERANDS[operand]
                again = FPROP.get(operand) in self.arrays  # not where fprop multiplies it as it is
                if gemms[name].compute == "dequantized" and operand in FPROP:
                    self.arrays |= {operand: FPROP[operand]} if again else {}
                elif gemms[name].compute == "quantized" and gemms[name].plain != place:
                    cast = Cast(source, quantizer, along if source != "w" or self.oi else 1 - along)
                    if gemms[name].recast and again:
                        self.recasts[operand], self.arrays[operand] = cast, operand
                        continue
                    self.arrays[operand] = next(
                        (other for other, made in self.casts.items() if _alike(made, cast)), operand
                    )
                    self.casts.setdefault(self.arrays[operand], cast)
        # matrix -> the mask of fprop's operand
        self.masks = {
            source: f"{spec.prefix}{source}_q_inside"
            for source in "xw"
            if f"{source}_q" in self.casts and self.casts[f"{source}_q"].quantizer.clip_gradient
        }
        self.backs = {
            gemm: back
            for gemm, source in (("dgrad", "x"), ("wgrad", "w"))
            if (back := self._back(gemm, source))
        }
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
        for name, gemm in gemms:
            for place, own in (("a", gemm.a), ("b", gemm.b)):
                if place == gemm.plain or gemm.compute != "quantized":
                    continue
                if own.needs_state and gemm.recast and place == "b":
                    wanted = "a scale of this step, for what is cast from fprop's values"
                    raise unsupported(f"{name}.b.scale_source", own.scale_source, wanted)
                if own.static and own.granularity not in LINES:
                    wanted = "tensor, with a static scale: all blocks would have the same"
                    raise unsupported(f"{name}.{place}.granularity", own.granularity, wanted)

    # --- what there is --------------------------------------------------------------------------------------

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        if self.needs_rng:
            want_rng(operation, metas)
        if self.spec.weight_cached:
            for name, meta in self._kept_weight().items():
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
        made = (*self.casts.values(), *self.recasts.values())
        return any(cast.quantizer.needs_rng for cast in made)

    def weight_outputs(self) -> dict[str, Meta]:
        own = {self._name("w_amax"): AMAX} if self._delayed("w") else {}
        return self._kept_weight() | own

    def _kept_weight(self) -> dict[str, Meta]:
        """Returns what is made of the weight, and kept from micro-batch to micro-batch."""
        return self._metas(self._made("w")) | self._mask("w")

    def saved(self) -> dict[str, Meta]:
        own = self._metas(name for name in self._backward() if not self._is_cached(name))
        own |= self._mask("x") if self.needs_x else {}
        return own | (self._mask("w") if self.needs_w and not self.spec.weight_cached else {})

    def kept(self) -> tuple[str, ...]:
        cached = self._metas(name for name in self._backward() if self._is_cached(name))
        cached |= self._mask("w") if self.needs_w and self.spec.weight_cached else {}
        drawn = any(self.casts[name].quantizer.needs_rng for name in self._made("g") if self._wanted(name))
        drawn |= any(self.recasts[name].quantizer.needs_rng for name in self._recast())
        wanted = ("dgrad",) * self.needs_x + ("wgrad",) * self.needs_w
        drawn |= any(self.backs[gemm].rotation[1] == "random" for gemm in wanted if gemm in self.backs)
        return (*(self.weights if self.needs_x and self.reads_w else ()), *cached, *(("rng",) * drawn))

    def weight_names(self) -> tuple[str, ...]:
        return tuple(self._kept_weight()) if self.spec.weight_cached else super().weight_names()

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
        wanted = [*(name for name in self._made("g") if self._wanted(name)), *self._recast()]
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
        if (self.needs_x or (self.needs_w and "w" in self.masks)) and not self.spec.weight_cached:
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
        self._cast_again(ws, "w_qt")
        left = self._operand(ws, "g_q", g)
        right = self._operand(ws, "w_qt", self._whole_weight(ws) if self.reads_w else None)
        self._multiply(ws, "dgrad", left, right, dx, "nn" if self.oi else "nt")
        del left, right
        self._free_read(ws, "dgrad", "wgrad")

    def wgrad(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> None:
        self._cast_again(ws, "x_qt")
        left, right = self._operand(ws, "g_qt", g), self._operand(ws, "x_qt", x)
        (first,) = list(self.weights)[:1]
        whole = f"{self.spec.prefix}dweight"
        out = ws.scratch[whole] if self.whole_wgrad else ws.outputs[first]
        a, b = (left, right) if self.oi else (right, left)
        addend = out if self.adds and not self.whole_wgrad else None
        self._multiply(ws, "wgrad", a, b, out, "tn", None, addend)
        del left, right, a, b
        self._free_read(ws, "wgrad", "dgrad")
        if self.whole_wgrad:
            self._part_weights(ws, out)
            del out
            free(ws.scratch, whole)

    # --- helpers --------------------------------------------------------------------------------------------

    def _backward(self) -> list[str]:
        """Returns the arrays of forward that backward reads."""
        wanted = ("w_qt",) * self.needs_x + ("x_qt",) * self.needs_w
        read = (FPROP[operand] if operand in self.recasts else operand for operand in wanted)
        return [self.arrays[operand] for operand in read if operand in self.arrays]

    def _recast(self) -> list[str]:
        """Returns the operands of backward that are cast from fprop's values."""
        wanted = ("w_qt",) * self.needs_x + ("x_qt",) * self.needs_w
        return [operand for operand in wanted if operand in self.recasts]

    def _mask(self, source: str) -> dict[str, Meta]:
        """Returns the mask of fprop's operand "x" or "w", where there is one."""
        return {self.masks[source]: Meta(self.matrices[source].shape, uint8)} if source in self.masks else {}

    def _back(self, gemm: str, source: str) -> Back | None:
        """Returns how the gradient of a matrix gets back, None where it is one already."""
        fprop, own, mask = self.fp8.fprop, self.fp8.gemms[gemm], self.masks.get(source, "")
        of_values = own.recast or own.compute == "dequantized"
        if fprop.compute != "quantized" or not (mask or (of_values and fprop.a.hadamard)):
            return None
        return Back(fprop.a.rotation, of_values, mask)

    def _wanted(self, name: str) -> bool:
        """Whether a GEMM that is wanted reads the array of g."""
        wanted = ("g_q",) * self.needs_x + ("g_qt",) * self.needs_w
        return any(self.arrays.get(operand) == name for operand in wanted)

    def _is_cached(self, name: str) -> bool:
        return self.spec.weight_cached and self.casts[name].source == "w"

    def _metas(self, names: Iterable[str]) -> dict[str, Meta]:
        """Arrays by the operation's names."""
        made: dict[str, Meta] = {}
        for name in names:
            cast = self._how(name)
            made[self._name(name)] = self.matrices[cast.source]
            if cast.quantizer.scaled_after:
                made[f"{self._name(name)}_inv"] = Meta((self._lines(cast),), float32)
        return made

    def _amaxes(self) -> dict[str, Meta]:
        """Returns where amaxes are taken before a cast, and what one with scales of lines leaves in
        between."""
        made: dict[str, Meta] = {}
        casts = [*self.casts.values(), *self.recasts.values()]
        if self.fp8.two_level:
            most = max(1, *map(self._lines, casts))
            made[self._name("amax")] = Meta((most,), float32)
        if self.widened:
            most = max(math.prod(matrix.shape) for matrix in self.matrices.values())
            made[self._name("wide")] = Meta((most,), float32)
        sizes = [self.matrices[cast.source].shape for cast in casts if cast.quantizer.granularity in LINES]
        rotated = [self.matrices[cast.source].shape for cast in casts if _is_rotated(cast.quantizer)]
        if rotated:
            made[self._name("rotated")] = Meta((max(m * n for m, n in rotated),), float32)
        scaled = {o for o in self.recasts if self.casts[self.arrays[FPROP[o]]].quantizer.scaled_after}
        crossed = [
            self.matrices[self.casts[FPROP[o]].source] for o in FPROP if self._is_crossed(o) or o in scaled
        ]
        if crossed:
            most = max(math.prod(matrix.shape) for matrix in crossed)
            made[self._name("crossed")] = Meta((most,), crossed[0].dtype)
            made[self._name("crossed_wide")] = Meta((most,), float32)
        if sizes:
            made[self._name("line_codes")] = Meta((max(m * n for m, n in sizes),), uint8)
            made[self._name("line_scales")] = Meta((3 * max(1, *(max(size) for size in sizes)),), float32)
        return made

    def _sums(self, gemm: str, shape: Shape) -> dict[str, Meta]:
        """Returns where a GEMM's float32 sums lie that are multiplied by scales, or are to become float16."""
        casts = [self._how(self.arrays[operand]) for operand in GEMMS[gemm] if operand in self.arrays]
        apart = any(self.widened or cast.quantizer.scaled_after for cast in casts)
        back = {self._name(f"{gemm}_back"): Meta(shape, float32)} if gemm in self.backs else {}
        return {self._name(f"{gemm}_sums"): Meta(shape, float32)} | back if apart or back else {}

    def _operand(self, ws: WorkingSet, operand: str, matrix: ArrayView | None) -> tuple[Any, Any]:
        """Returns the values of a GEMM's operand and the tensor's scale_inv, None for 1. ``matrix``: what is
        read in high precision."""
        array = self.arrays.get(operand)
        if array is None:
            # the other operand of a widened product is wide, too
            both = self.widened and any(operand in pair and pair & self.arrays.keys() for pair in _PAIRS)
            return self._wide(ws, matrix) if both and matrix is not None else matrix, None
        values, inverse = self._values(ws, array)
        return (
            (self._by_line(ws, array, values, inverse), None)
            if self._is_crossed(operand)
            else (values, inverse)
        )

    def _is_crossed(self, operand: str) -> bool:
        """Whether a GEMM multiplies fprop's values along another dimension than fprop, and each line has a
        scale: this one changes along the GEMM's contraction."""
        array = self.arrays.get(operand)
        return array is not None and array == FPROP.get(operand) and self.casts[array].quantizer.row_scaled

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
        (a, a_inv), (b, b_inv) = left, right
        if gemm in self.backs:
            sums = ws.scratch[self._name(f"{gemm}_sums")]
            self._gemm(ws, gemm, a, b, sums, layout)
            self._bring_back(ws, gemm, a_inv, b_inv, sums, out, addend)
            return
        if a_inv is None and b_inv is None and not (self.widened and a.dtype is float32):
            self._gemm(ws, gemm, a, b, out, layout, bias, addend)
            return
        sums = ws.scratch[self._name(f"{gemm}_sums")]
        self._gemm(ws, gemm, a, b, sums, layout)
        ws.kernels.scale_product(sums, out, a_inv, b_inv, bias, addend, ws.stream)

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
        """out = a b (+ bias) (+ addend), as ``layout`` says, of what ``_operand`` gives."""
        if out.device not in (CPU, NOWHERE):
            _say_slow(out.device.kind)
        ws.kernels.gemm(a, b, out, layout, bias, addend, ws.scratch["workspace"], ws.stream)

    def _bring_back(
        self,
        ws: WorkingSet,
        gemm: str,
        a_inv: Any,
        b_inv: Any,
        sums: ArrayView,
        out: ArrayView,
        addend: ArrayView | None,
    ) -> None:
        """out = the sums times their scales, masked and rotated back (+ addend)."""
        k, stream, back = ws.kernels, ws.stream, self.backs[gemm]
        other, (n, signs) = ws.scratch[self._name(f"{gemm}_back")], back.rotation
        along = 1 if gemm == "dgrad" or self.oi else 0
        rng = ws.inputs.get("rng") if n and signs == "random" else None
        if a_inv is not None or b_inv is not None:
            k.scale_product(sums, other, a_inv, b_inv, None, None, stream)
            sums, other = other, sums
        if n and not back.rotated:
            k.rotate(sums, other, None, n, signs, along, rng, stream)
            sums, other = other, sums
        mask = None
        if back.mask:
            mask = next(
                views[back.mask] for views in (ws.saved, ws.inputs) if views.get(back.mask) is not None
            )
        k.rotate_back(sums, other, mask, n, signs, along, rng, stream)
        k.scale_product(other, out, None, None, None, addend, stream)

    def _free_read(self, ws: WorkingSet, gemm: str, other: str) -> None:
        """Give up what a GEMM of backward has read and the ``other`` one, which may come later, does not."""
        kept = {self.arrays.get(operand) for operand in GEMMS[other]}
        own = [operand for operand in GEMMS[gemm] if self.arrays.get(operand) not in kept]
        self._free(ws.scratch, *own)
        if gemm == "wgrad":
            self._free(ws.saved, *own)

    def _free(self, views: Any, *operands: str) -> None:
        for operand in operands:
            array = self.arrays.get(operand)
            if array is not None:
                free(views, *(f"{self._name(array)}{part}" for part in PARTS[:-1]))


def _is_rotated(quantizer: Quantizer) -> bool:
    """Whether a rotated copy of the matrix is made before the cast."""
    lines = quantizer.granularity in LINES and not rotates_in_cast(quantizer)
    return bool(quantizer.hadamard) and (lines or quantizer.row_scaled)


def _say_slow(kind: str) -> None:
    """Log that products are emulated here; not on a CPU, where every product is in high precision and nothing
    is slower for it."""
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
