"""Products of quantised operands: what all granularities of scales share.

An operand is two arrays, its codes and their scale_inv, in the orientation that a GEMM wants, its contraction
last. There are up to six: ``x_q`` and ``w_q`` of fprop, ``g_q`` and ``w_qt`` of dgrad, ``g_qt`` and ``x_qt``
of wgrad. A granularity is a subclass: how large the arrays are, how an operand is cast, which GEMM it takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from fp8kit.arrays import ArrayView, Shape
from fp8kit.errors import UnsupportedError
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.product import Product, ProductSpec, required, want
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.scratch import done
from fp8kit.spec import Meta, Metas, Views

Operand = tuple[ArrayView, ArrayView, Quantizer]  # codes, scale_inv, how they were cast
Pair = tuple[Views, Views]
Side = tuple[ArrayView | None, ArrayView | None]
ALIGN = 16  # FP8 products take dimensions that are multiples of 16 (cuBLASLt, "FP8 data types")
AMAX = Meta((1,), float32, zero=True)
_NONE: Views = {}


def pad(n: int) -> int:
    """The next multiple of 16."""
    return -(-n // ALIGN) * ALIGN


class QuantizedProduct(Product):
    """``Product`` on codes and scales.

    ``kernels``: of the contract, that it is made of, the cast first. ``capability``: the least compute
    capability of a CUDA device that has them; ``described``: what such a device is said to compute.
    """

    kernels: ClassVar[tuple[str, ...]]
    capability: ClassVar[tuple[int, int]] = (8, 9)
    described: ClassVar[str] = "FP8"

    def __init__(
        self, spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs_w: bool, needs_b: bool
    ) -> None:
        super().__init__(spec, rows, dtype, needs_x, needs_w, needs_b)
        assert spec.fp8 is not None
        self.fp8: Quantization = spec.fp8
        m, n, k, (fprop, dgrad, wgrad) = self.m, self.n, self.k, self.fp8.gemms.values()
        # operand -> rows, contraction, how it is cast
        self.operands: dict[str, tuple[int, int, Quantizer]] = {
            "x_q": (m, k, fprop.a),
            "w_q": (n, k, fprop.b),
            "g_q": (m, n, dgrad.a),
            "w_qt": (k, n, dgrad.b),
            "g_qt": (n, m, wgrad.a),
            "x_qt": (k, m, wgrad.b),
        }
        self.quantizers = {"x": fprop.a, "w": fprop.b, "g": dgrad.a}
        self.amaxes_taken = {each: quantizer.takes_amax for each, quantizer in self.quantizers.items()}
        self.cached = ("x_q", "x_qt") * spec.input_cached + ("w_q", "w_qt") * spec.weight_cached
        # operand -> names of its codes and of their scale_inv
        self.names = {
            operand: (f"{spec.prefix}{operand}", f"{spec.prefix}{self._scale_name(operand)}")
            for operand in self.operands
        }
        # those of both orientations; and of what is no longer needed after an operand's GEMM, which are not
        # scales that both orientations share
        self.side_names = {each: (*self.names[f"{each}_q"], *self.names[f"{each}_qt"]) for each in "xwg"}
        self.own_names = {operand: (name, f"{name}_inv") for operand, (name, _) in self.names.items()}
        # the scales of a part of g^T's rows are no array of their own
        self.whole_wgrad = len(self.weights) > 1

    # --- what a granularity says ----------------------------------------------------------------------------

    @classmethod
    def check_supported(cls, gemms: Iterable[tuple[str, Gemm]]) -> None:
        """UnsupportedError for named GEMMs that the kernels do not compute."""

    @staticmethod
    def shapes(rows: int, columns: int, quantizer: Quantizer) -> tuple[Shape, Shape]:
        """Shapes of an operand's codes, uint8, and of its scale_inv, float32."""
        raise NotImplementedError

    @staticmethod
    def grid(scale_inv: Any, quantizer: Quantizer) -> Any:
        """An operand's scale_inv, an array of any library, as a matrix of one scale a tile."""
        raise NotImplementedError

    @staticmethod
    def multiply(
        k: Any,
        left: Operand,
        right: Operand,
        out: ArrayView,
        bias: ArrayView | None,
        addend: ArrayView | None,
        fast: bool,
        workspace: ArrayView,
        stream: int,
    ) -> None:
        """out = left right^T (+ bias) (+ addend)."""
        raise NotImplementedError

    def _scale_name(self, operand: str) -> str:
        """Name of the operand's scale_inv, the prefix aside."""
        return f"{operand}_inv"

    def _cast(
        self,
        k: Any,
        operand: str,
        x: ArrayView,
        into: Pair,
        inputs: Views,
        outputs: Views,
        stream: int,
        amax_known: bool = False,
    ) -> None:
        """Cast "x", "w" or "g" to its two orientations: to the first, where that is in ``into[0]``, and to
        the second, where it is in ``into[1]``. ``inputs``, ``outputs``: where its scale or its amax is."""
        raise NotImplementedError

    # --- what there is --------------------------------------------------------------------------------------

    def takes_amax(self, operand: str) -> bool:
        return self.amaxes_taken[operand]

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        for name, meta in self._metas(*self.cached).items():
            want(operation, name, metas, meta.shape, meta.dtype)

    def outputs(self) -> dict[str, Meta]:
        return {name: AMAX for name in map(self._amax, "xw") if name is not None}

    def weight_outputs(self) -> dict[str, Meta]:
        return self._metas("w_q", "w_qt")

    def saved(self) -> dict[str, Meta]:
        wanted = ("x_qt",) * self.needs_w + ("w_qt",) * self.needs_x
        return self._metas(*(operand for operand in wanted if operand not in self.cached))

    def kept(self) -> tuple[str, ...]:
        wanted = ("w_qt",) * self.needs_x + ("x_qt",) * self.needs_w
        return tuple(self._metas(*(operand for operand in wanted if operand in self.cached)))

    def weight_names(self) -> tuple[str, ...]:
        return tuple(self._metas("w_q")) if self.spec.weight_cached else super().weight_names()

    def grads(self) -> dict[str, Meta]:
        amax = self._amax("g")
        return super().grads() | ({} if amax is None else {amax: AMAX})

    def scratch(self) -> dict[str, Meta]:
        saved, made = self.saved(), [operand for operand in ("x_q", "w_q") if operand not in self.cached]
        own = {name: meta for name, meta in self._metas(*made).items() if name not in saved}
        return own | ({} if self.spec.weight_cached else self.cast_scratch()) | super().scratch()

    def cast_scratch(self) -> dict[str, Meta]:
        return self._weight_buffer()

    def backward_scratch(self) -> dict[str, Meta]:
        return self._metas(*("g_q",) * self.needs_x, *("g_qt",) * self.needs_w) | super().backward_scratch()

    def workspace(self, k: Any) -> int:
        shapes = ((self.m, self.n), (self.m, self.k), self._weight_shape(self.n))
        sums = int(k.column_sum_workspace(self.m, self.n))
        return max(*(int(k.fp8_gemm_workspace(*shape)) for shape in shapes), sums)

    # --- forward --------------------------------------------------------------------------------------------

    def cast_x(
        self,
        k: Any,
        x: ArrayView,
        inputs: Views,
        outputs: Views,
        saved: Views,
        scratch: Views,
        stream: int,
        amax_known: bool = False,
    ) -> None:
        if not self.spec.input_cached:
            self._cast(k, "x", x, (scratch, saved), inputs, outputs, stream, amax_known)

    def cast_weight(
        self, k: Any, inputs: Views, outputs: Views, made: Views, scratch: Views, stream: int
    ) -> None:
        self._cast_weight(k, inputs, outputs, (made, made), scratch, stream)

    def _cast_weight(
        self, k: Any, inputs: Views, outputs: Views, into: Pair, scratch: Views, stream: int
    ) -> None:
        weight = self._whole_weight(k, inputs, scratch, stream)
        self._cast(k, "w", weight, into, inputs, outputs, stream)

    def measure(self, k: Any, x: ArrayView, inputs: Views, outputs: Views, stream: int) -> None:
        name = self._amax("x")
        if name is not None:
            k.amax(x, outputs[name], x.shape, stream)
        self.measure_weight(k, inputs, outputs, stream)

    def measure_weight(self, k: Any, inputs: Views, outputs: Views, stream: int) -> None:
        name = self._amax("w")
        for weight in () if name is None else self.weights:
            part = required(inputs, weight)
            k.amax(part, required(outputs, name), part.shape, stream)  # type: ignore[arg-type]

    def fprop(
        self,
        k: Any,
        x: ArrayView | None,
        inputs: Views,
        outputs: Views,
        saved: Views,
        scratch: Views,
        y: ArrayView,
        stream: int,
        addend: ArrayView | None = None,
    ) -> None:
        bias = self._bias(k, inputs, scratch, stream)
        if not self.spec.weight_cached:
            self._cast_weight(k, inputs, outputs, (scratch, saved), scratch, stream)
        a = self._operand("x_q", inputs if self.spec.input_cached else scratch, saved)
        b = self._operand("w_q", inputs if self.spec.weight_cached else scratch, saved)
        self.multiply(k, a, b, y, bias, addend, self.fp8.fprop.fast, required(scratch, "workspace"), stream)
        del a, b
        done(scratch, *self.own_names["x_q"], *self.own_names["w_q"])

    def save_weight(self, k: Any, inputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        if self.needs_x and not self.spec.weight_cached:
            self._cast_weight(k, inputs, {}, ({}, saved), scratch, stream)

    # --- backward -------------------------------------------------------------------------------------------

    def cast_g(
        self,
        k: Any,
        g: ArrayView,
        kept: Views,
        grads: Views,
        scratch: Views,
        stream: int,
        with_bias: bool = True,
        amax_known: bool = False,
    ) -> None:
        super().cast_g(k, g, kept, grads, scratch, stream, with_bias)
        if self.needs_x or self.needs_w:
            self._cast(k, "g", g, (scratch, scratch), kept, grads, stream, amax_known)

    def dgrad(
        self,
        k: Any,
        g: ArrayView | None,
        kept: Views,
        saved: Views,
        scratch: Views,
        dx: ArrayView,
        stream: int,
    ) -> None:
        a = self._operand("g_q", scratch)
        b = self._operand("w_qt", kept if self.spec.weight_cached else saved)
        self.multiply(k, a, b, dx, None, None, self.fp8.dgrad.fast, required(scratch, "workspace"), stream)
        del a, b
        done(scratch, *self.own_names["g_q"])
        done(saved, *self.own_names["w_qt"])

    def wgrad(
        self,
        k: Any,
        g: ArrayView | None,
        x: ArrayView | None,
        saved: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        self._wgrads(k, saved, grads, scratch, stream)
        done(scratch, *self.own_names["g_qt"])
        if not self.spec.input_cached:
            done(saved, *self.own_names["x_qt"])
        if self.whole_wgrad:
            name = f"{self.spec.prefix}dweight"
            self._part_weights(k, required(scratch, name), grads, scratch, stream)
            done(scratch, name)

    def _wgrads(self, k: Any, saved: Views, grads: Views, scratch: Views, stream: int) -> None:
        """The products of ``wgrad``: of the whole weight, or segment by segment."""
        g, x = self._operand("g_qt", scratch), self._operand("x_qt", saved)
        for name, start, n in zip(self.weights, self.starts, self.spec.segments, strict=True):
            if self.whole_wgrad:
                part, out, adds = g, required(scratch, f"{self.spec.prefix}dweight"), False
            else:
                single = len(self.weights) == 1
                part = g if single else (g[0].slice(0, start, n), *g[1:])
                out, adds = required(grads, name), self.adds
            a, b = (part, x) if self.oi else (x, part)
            addend, space = out if adds else None, required(scratch, "workspace")
            self.multiply(k, a, b, out, None, addend, self.fp8.wgrad.fast, space, stream)
            if self.whole_wgrad:
                return

    # --- helpers --------------------------------------------------------------------------------------------

    def _metas(self, *operands: str) -> dict[str, Meta]:
        """The arrays of these operands, by name."""
        made: dict[str, Meta] = {}
        for operand in operands:
            (codes, scales), (name, scale_name) = self.shapes(*self.operands[operand]), self.names[operand]
            made |= {name: Meta(codes, uint8), scale_name: Meta(scales, float32)}
        return made

    def _amax(self, operand: str) -> str | None:
        """Name of the amax output of "x", "w" or "g", None where there is none."""
        used = self.needs_x or self.needs_w if operand == "g" else f"{operand}_q" not in self.cached
        needs = used and self.quantizers[operand].needs_amax
        return f"{self.spec.prefix}{operand}_amax" if needs else None

    def _operand(self, operand: str, views: Views, others: Views = _NONE) -> Operand:
        """An operand of a GEMM in ``views``; scales that both orientations share may be in ``others``.
        ShapeError where there is none."""
        name, scale_name = self.names[operand]
        scale_inv = views.get(scale_name) or required(others, scale_name)
        return required(views, name), scale_inv, self.operands[operand][2]

    def _sides(self, operand: str, into: Pair) -> tuple[Side, Side]:
        """Codes and scale_inv of both orientations of "x", "w" or "g", None where they are not in ``into``;
        the orientation of what is cast first."""
        q, q_inv, q_t, q_t_inv = self.side_names[operand]
        first, second = into
        sides = (first.get(q), first.get(q_inv)), (second.get(q_t), second.get(q_t_inv))
        return sides[::-1] if operand == "w" and not self.oi else sides


def unsupported(argument: str, got: object, wanted: str) -> UnsupportedError:
    """The refusal of a recipe that asks for something no kernel does."""
    return UnsupportedError("recipe", argument, got, wanted)
