"""FP8 products with a scale for each block of 128 elements along the contraction; no state, no amax.

An operand is its codes and, under the same name with "_inv", its scales, both laid out for ``block_gemm``.
What is cast to two orientations is cast from high precision twice, since blocks run along the contraction,
which is another axis there (squares: the same codes turned).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import block_shapes
from fp8kit.buffers import free
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.product import Product, ProductSpec, WeightJob, given, side_by_side, want
from fp8kit.ops.quant import Fp8, Quant
from fp8kit.spec import Meta, Metas, Views


class BlockProduct(Product):
    """``Product`` on operands of ``block_gemm``."""

    def __init__(
        self, spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs_w: bool, needs_b: bool
    ) -> None:
        super().__init__(spec, rows, dtype, needs_x, needs_w, needs_b)
        assert spec.fp8 is not None
        self.fp8: Fp8 = spec.fp8
        # the scales of a part of g^T's rows are no array of their own
        self.whole_wgrad = len(self.weights) > 1

    # --- what there is --------------------------------------------------------------------------------------

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        cached = self.weight_outputs() if self.spec.weight_cached else {}
        if self.spec.input_cached:
            cached |= self._operand("x_q", self.m, self.k, self.fp8.x) | self._operand(
                "x_qt", self.k, self.m, self.fp8.x
            )
        for name, meta in cached.items():
            want(operation, name, metas, meta.shape, meta.dtype)

    def weight_outputs(self) -> dict[str, Meta]:
        return self._operand("w_q", self.n, self.k, self.fp8.w) | self._operand(
            "w_qt", self.k, self.n, self.fp8.w
        )

    def saved(self) -> dict[str, Meta]:
        out: dict[str, Meta] = {}
        if self.needs_w and not self.spec.input_cached:
            out |= self._operand("x_qt", self.k, self.m, self.fp8.x)
        if self.needs_x and not self.spec.weight_cached:
            out |= self._operand("w_qt", self.k, self.n, self.fp8.w)
        return out

    def kept(self) -> tuple[str, ...]:
        weight = (
            tuple(self._operand("w_qt", self.k, self.n, self.fp8.w))
            if self.spec.weight_cached and self.needs_x
            else ()
        )
        return weight + (
            tuple(self._operand("x_qt", self.k, self.m, self.fp8.x))
            if self.spec.input_cached and self.needs_w
            else ()
        )

    def read_again(self) -> tuple[str, ...]:
        return (
            tuple(self._operand("w_q", self.n, self.k, self.fp8.w))
            if self.spec.weight_cached
            else super().read_again()
        )

    def scratch(self) -> dict[str, Meta]:
        out = {} if self.spec.input_cached else self._operand("x_q", self.m, self.k, self.fp8.x)
        if not self.spec.weight_cached:
            out |= self._operand("w_q", self.n, self.k, self.fp8.w) | self.cast_scratch()
        return out | super().scratch()

    def cast_scratch(self) -> dict[str, Meta]:
        return self._weight_room()

    def backward_scratch(self) -> dict[str, Meta]:
        out: dict[str, Meta] = {}
        if self.needs_x:
            out |= self._operand("g_q", self.m, self.n, self.fp8.g)
        if self.needs_w:
            out |= self._operand("g_qt", self.n, self.m, self.fp8.g)
        return out | super().backward_scratch()

    def workspace(self, k: Any) -> int:
        shapes = ((self.m, self.n), (self.m, self.k), self._weight_shape(self.n))
        return max(
            *(int(k.fp8_gemm_workspace(*shape)) for shape in shapes),
            int(k.column_sum_workspace(self.m, self.n)),
        )

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
            self._cast(k, self.fp8.x, x, self._found(scratch, "x_q"), self._found(saved, "x_qt"), stream)

    def cast_weight(
        self, k: Any, inputs: Views, outputs: Views, made: Views, scratch: Views, stream: int
    ) -> None:
        weight = self._joined_weight(k, inputs, scratch, stream)
        sides = self._found(made, "w_q"), self._found(made, "w_qt")
        q, q_t = sides if self.oi else sides[::-1]
        self._cast(k, self.fp8.w, weight, q, q_t, stream)

    def casts_together(self, inputs: Views) -> bool:
        return side_by_side([given(inputs, name) for name in self.weights], 0 if self.oi else 1) is not None

    @classmethod
    def cast_weights(cls, k: Any, jobs: Sequence[WeightJob], numbers: ArrayView, stream: int) -> None:
        quant = jobs[0].product.fp8.w
        rows = []
        for product, inputs, made in jobs:
            sides = product._found(made, "w_q"), product._found(made, "w_qt")
            q, q_t = sides if product.oi else sides[::-1]
            rows.append(
                (product._joined(k, product.weights, inputs, None, 0 if product.oi else 1, stream), *q, *q_t)
            )
        k.block_quantize_many(
            *map(list, zip(*rows, strict=True)),
            quant.format,
            quant.tile,
            quant.power_2,
            quant.epsilon,
            stream,
        )

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
        weight: Views = inputs
        if not self.spec.weight_cached:
            sides = {name: scratch[name] for name in self._names("w_q")} | {
                name: saved.get(name) for name in self._names("w_qt")
            }
            self.cast_weight(k, inputs, outputs, sides, scratch, stream)
            weight = scratch
        self._multiply(
            k,
            "x_q",
            inputs if self.spec.input_cached else scratch,
            "w_q",
            weight,
            y,
            bias,
            scratch,
            stream,
            addend,
        )
        free(scratch, *self._names("x_q"), *self._names("w_q"))

    def save_weight(self, k: Any, inputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        if self.needs_x and not self.spec.weight_cached:
            self.cast_weight(k, inputs, {}, saved, scratch, stream)

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
            self._cast(k, self.fp8.g, g, self._found(scratch, "g_q"), self._found(scratch, "g_qt"), stream)

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
        self._multiply(
            k, "g_q", scratch, "w_qt", kept if self.spec.weight_cached else saved, dx, None, scratch, stream
        )
        free(scratch, *self._names("g_q"))
        free(saved, *self._names("w_qt"))

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
        whole = (
            given(scratch, f"{self.spec.prefix}dweight")
            if self.whole_wgrad
            else given(grads, self.weights[0])
        )
        adds = self.adds and not self.whole_wgrad
        if self.oi:
            self._multiply(
                k, "g_qt", scratch, "x_qt", saved, whole, None, scratch, stream, whole if adds else None
            )
        else:
            self._multiply(
                k, "x_qt", saved, "g_qt", scratch, whole, None, scratch, stream, whole if adds else None
            )
        free(scratch, *self._names("g_qt"), f"{self.spec.prefix}dweight")
        if not self.spec.input_cached:
            free(saved, *self._names("x_qt"))
        if self.whole_wgrad:
            self._part_weights(k, whole, grads, scratch, stream)

    # --- operands -------------------------------------------------------------------------------------------

    def _operand(self, name: str, rows: int, columns: int, quant: Quant) -> dict[str, Meta]:
        """Codes and scales of a (rows, columns) operand."""
        assert quant.tile is not None
        codes, scales = block_shapes(rows, columns, quant.tile)
        p = self.spec.prefix
        return {f"{p}{name}": Meta(codes, uint8), f"{p}{name}_inv": Meta(scales, float32)}

    def _names(self, name: str) -> tuple[str, str]:
        """Names of an operand's codes and scales."""
        p = self.spec.prefix
        return f"{p}{name}", f"{p}{name}_inv"

    def _found(self, views: Views, name: str) -> tuple[ArrayView | None, ArrayView | None]:
        """(codes, scales) of an operand, (None, None) where it is not wanted."""
        p = self.spec.prefix
        return views.get(f"{p}{name}"), views.get(f"{p}{name}_inv")

    @staticmethod
    def _cast(
        k: Any,
        quant: Quant,
        x: ArrayView,
        q: tuple[ArrayView | None, ArrayView | None],
        q_t: tuple[ArrayView | None, ArrayView | None],
        stream: int,
    ) -> None:
        k.block_quantize(x, *q, *q_t, quant.format, quant.tile, quant.power_2, quant.epsilon, stream)

    def _multiply(
        self,
        k: Any,
        a: str,
        a_in: Views,
        b: str,
        b_in: Views,
        out: ArrayView,
        bias: ArrayView | None,
        scratch: Views,
        stream: int,
        addend: ArrayView | None = None,
    ) -> None:
        """out = a b^T (+ bias) (+ addend); an operand's first letter says how it is quantised."""
        p, a_quant, b_quant = self.spec.prefix, getattr(self.fp8, a[0]), getattr(self.fp8, b[0])
        k.block_gemm(
            given(a_in, f"{p}{a}"),
            given(b_in, f"{p}{b}"),
            out,
            a_quant.format,
            b_quant.format,
            given(a_in, f"{p}{a}_inv"),
            given(b_in, f"{p}{b}_inv"),
            a_quant.tile,
            b_quant.tile,
            bias,
            addend,
            scratch["workspace"],
            stream,
        )
