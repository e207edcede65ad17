"""FP8 products with one scale for each tensor: delayed and current scaling, and amaxes reduced by the door."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Cast
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.product import Product, ProductSpec, given, want
from fp8kit.ops.quant import FLT_MAX, Fp8, pad, quantize_operand
from fp8kit.spec import Meta, Metas, Views

SLOT = 4  # float32 numbers from one scale to the next: cuBLASLt takes scale pointers of 16-byte alignment


class TensorProduct(Product):
    """``Product`` on codes (Mp, Kp), (Np, Kp) and their transposes, padded to multiples of 16."""

    def __init__(self, spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs_w: bool, needs_b: bool) -> None:
        super().__init__(spec, rows, dtype, needs_x, needs_w, needs_b)
        self.mp, self.kp, self.np = pad(self.m), pad(self.k), pad(self.n)
        assert spec.fp8 is not None
        self.fp8: Fp8 = spec.fp8

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def whole_wgrad(self) -> bool:
        # wgrad of a segment reads whole blocks of 16 rows of g^T: only aligned segments can be multiplied one by one
        return len(self.weights) > 1 and any(n % 16 for n in self.spec.segments)

    @property
    def delayed(self) -> bool:
        return self.fp8.x.source == "scale"

    def takes_amax(self, operand: str) -> bool:
        return bool(getattr(self.fp8, operand).source == "current")

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        p = self.spec.prefix
        inputs = {"scale": "scale", "amax": "amax_in"}
        if self.spec.input_cached:
            want(operation, f"{p}x_q", metas, (self.mp, self.kp), uint8)
            want(operation, f"{p}x_qt", metas, (self.kp, self.mp), uint8)
            want(operation, f"{p}x_scale_inv", metas, (1,), float32)
        elif self.fp8.x.source in inputs:
            want(operation, f"{p}x_{inputs[self.fp8.x.source]}", metas, (1,), float32)
        if self.spec.weight_cached:
            want(operation, f"{p}w_q", metas, (self.np, self.kp), uint8)
            want(operation, f"{p}w_qt", metas, (self.kp, self.np), uint8)
            want(operation, f"{p}w_scale_inv", metas, (1,), float32)
        elif self.fp8.w.source in inputs:
            want(operation, f"{p}w_{inputs[self.fp8.w.source]}", metas, (1,), float32)

    def outputs(self) -> dict[str, Meta]:
        p = self.spec.prefix
        cached = {"x": self.spec.input_cached, "w": self.spec.weight_cached}
        return {f"{p}{operand}_amax": Meta((1,), float32, zero=True) for operand, given_cast in cached.items() if not given_cast}

    def weight_outputs(self) -> dict[str, Meta]:
        p = self.spec.prefix
        return {
            f"{p}w_q": Meta((self.np, self.kp), uint8),
            f"{p}w_qt": Meta((self.kp, self.np), uint8),
            f"{p}w_scale_inv": Meta((1,), float32),
            f"{p}w_amax": Meta((1,), float32, zero=True),
        }

    def saved(self) -> dict[str, Meta]:
        p = self.spec.prefix
        out: dict[str, Meta] = {}
        if self.needs_w and not self.spec.input_cached:
            out[f"{p}x_qt"] = Meta((self.kp, self.mp), uint8)
        if self.needs_x and not self.spec.weight_cached:
            out[f"{p}w_qt"] = Meta((self.kp, self.np), uint8)
        if self.needs_w or self.needs_x:
            out[f"{p}scale_inv"] = Meta((2 * SLOT,), float32)
        return out

    def kept(self) -> tuple[str, ...]:
        p = self.spec.prefix
        weight = (f"{p}w_qt", f"{p}w_scale_inv") if self.spec.weight_cached and self.needs_x else ()
        return weight + ((f"{p}x_qt", f"{p}x_scale_inv") if self.spec.input_cached and self.needs_w else ())

    def read_again(self) -> tuple[str, ...]:
        p = self.spec.prefix
        return (f"{p}w_q", f"{p}w_scale_inv") if self.spec.weight_cached else super().read_again()

    def grads(self) -> dict[str, Meta]:
        amax = {f"{self.spec.prefix}g_amax": Meta((1,), float32, zero=True)} if self.needs_x or self.needs_w else {}
        return super().grads() | amax

    def scratch(self) -> dict[str, Meta]:
        p = self.spec.prefix
        out = {} if self.spec.input_cached else {f"{p}x_q": Meta((self.mp, self.kp), uint8)}
        if not self.spec.weight_cached:
            out[f"{p}w_q"] = Meta((self.np, self.kp), uint8)
        return out | self.cast_scratch() | super().scratch()

    def cast_scratch(self) -> dict[str, Meta]:
        return {f"{self.spec.prefix}scales": Meta((4 * SLOT,), float32)}

    def backward_scratch(self) -> dict[str, Meta]:
        p = self.spec.prefix
        out = {f"{p}g_scales": Meta((2 * SLOT,), float32)}
        if self.needs_x:
            out[f"{p}g_q"] = Meta((self.mp, self.np), uint8)
        if self.needs_w:
            out[f"{p}g_qt"] = Meta((self.np, self.mp), uint8)
        return out | super().backward_scratch()

    def workspace(self, k: Any) -> int:
        shapes = ((self.m, self.n), (self.m, self.k), (self.n, self.k), (self.k, self.n))
        return max(*(int(k.fp8_gemm_workspace(*shape)) for shape in shapes), int(k.quantize_transpose_workspace(self.m, self.n)))

    # --- forward ------------------------------------------------------------------------------------------------------

    def x_cast(self, inputs: Views, outputs: Views, saved: Views, scratch: Views) -> Cast:
        p = self.spec.prefix
        return Cast(
            self.fp8.x.format,
            scratch.get(f"{p}x_q"),
            saved.get(f"{p}x_qt"),
            given(inputs, f"{p}x_scale"),
            self._scale_inv(saved, scratch, 0),
            outputs.get(f"{p}x_amax"),
        )

    def cast_x(
        self, k: Any, x: ArrayView, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int, amax_known: bool = False
    ) -> None:
        p = self.spec.prefix
        if self.spec.input_cached:
            return
        scale, amax = self._source(self.fp8.x.source, "x", inputs, outputs, scratch)
        q, q_t, inv = scratch.get(f"{p}x_q"), saved.get(f"{p}x_qt"), self._scale_inv(saved, scratch, 0)
        quantize_operand(k, self.fp8.x, x, q, q_t, scale, inv, amax, None, None, stream, amax_known)

    def cast_weight(self, k: Any, inputs: Views, outputs: Views, made: Views, scratch: Views, stream: int) -> None:
        s, quant, p = self.spec, self.fp8.w, self.spec.prefix
        w_q, w_qt, scale_inv = made.get(f"{p}w_q"), made.get(f"{p}w_qt"), given(made, f"{p}w_scale_inv")
        scale, amax = self._source(quant.source, "w", inputs, outputs, scratch)
        assert scale is not None
        parts = [given(inputs, name) for name in self.weights]
        if quant.source == "current":
            for part in parts:
                k.amax(part, amax, part.shape, stream)
        if quant.source != "scale":
            k.scale_from_amax(amax, scale, scale_inv, quant.format.max, quant.power_2, quant.epsilon, FLT_MAX, stream)
        for i, (part, start) in enumerate(zip(parts, self.starts, strict=True)):
            rows = (self.np if i + 1 == len(parts) else start + s.segments[i]) - start
            q = None if w_q is None else w_q.slice(0, start, rows)
            q_t = None if w_qt is None else w_qt.slice(1, start, rows)
            if not self.oi:
                q, q_t = q_t, q
            recorded = amax if quant.source == "scale" else None
            k.quantize_transpose(part, Cast(quant.format, q, q_t, scale, scale_inv, recorded), None, None, stream)

    def measure(self, k: Any, x: ArrayView, inputs: Views, outputs: Views, stream: int) -> None:
        if not self.spec.input_cached:
            k.amax(x, outputs[f"{self.spec.prefix}x_amax"], x.shape, stream)
        self.measure_weight(k, inputs, outputs, stream)

    def measure_weight(self, k: Any, inputs: Views, outputs: Views, stream: int) -> None:
        for name in () if self.spec.weight_cached else self.weights:
            part = given(inputs, name)
            k.amax(part, outputs[f"{self.spec.prefix}w_amax"], part.shape, stream)

    def fprop(self, k: Any, x: ArrayView, inputs: Views, outputs: Views, saved: Views, scratch: Views, y: ArrayView, stream: int) -> None:
        p, f = self.spec.prefix, self.fp8
        bias = self._bias(k, inputs, scratch, stream)
        weight: Views = inputs
        if not self.spec.weight_cached:
            inv = self._scale_inv(saved, scratch, 1)
            weight = {f"{p}w_q": scratch[f"{p}w_q"], f"{p}w_qt": saved.get(f"{p}w_qt"), f"{p}w_scale_inv": inv}
            self.cast_weight(k, inputs, outputs, weight, scratch, stream)
        w_q, w_inv = given(weight, f"{p}w_q"), given(weight, f"{p}w_scale_inv")
        x_q, x_inv, space = scratch.get(f"{p}x_q"), self._scale_inv(saved, scratch, 0), scratch["workspace"]
        if self.spec.input_cached:
            x_q, x_inv = given(inputs, f"{p}x_q"), given(inputs, f"{p}x_scale_inv")
        k.fp8_gemm(x_q, w_q, y, f.x.format, f.w.format, x_inv, w_inv, bias, False, f.fprop_fast, space, stream)

    def save_weight(self, k: Any, inputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        p = self.spec.prefix
        if self.needs_x and not self.spec.weight_cached:
            made = {f"{p}w_qt": saved[f"{p}w_qt"], f"{p}w_scale_inv": self._scale_inv(saved, scratch, 1)}
            self.cast_weight(k, inputs, {}, made, scratch, stream)

    # --- backward -----------------------------------------------------------------------------------------------------

    def g_cast(self, kept: Views, grads: Views, scratch: Views) -> Cast:
        p = self.spec.prefix
        q, q_t, inv = scratch.get(f"{p}g_q"), scratch.get(f"{p}g_qt"), _slot(scratch, f"{p}g_scales", 0)
        return Cast(self.fp8.g.format, q, q_t, given(kept, f"{p}g_scale"), inv, grads.get(f"{p}g_amax"))

    def cast_g(
        self, k: Any, g: ArrayView, kept: Views, grads: Views, scratch: Views, stream: int, with_bias: bool = True, amax_known: bool = False
    ) -> None:
        p, quant = self.spec.prefix, self.fp8.g
        if not (self.needs_x or self.needs_w):
            super().cast_g(k, g, kept, grads, scratch, stream, with_bias)
            return
        dbias = self._bias_sums(grads, scratch) if with_bias else None
        scale = given(kept, f"{p}g_scale") if quant.source == "scale" else _slot(scratch, f"{p}g_scales", 1)
        amax = given(kept, f"{p}g_amax_in") if quant.source == "amax" else grads.get(f"{p}g_amax")
        q, q_t, inv = scratch.get(f"{p}g_q"), scratch.get(f"{p}g_qt"), _slot(scratch, f"{p}g_scales", 0)
        quantize_operand(k, quant, g, q, q_t, scale, inv, amax, dbias, scratch["workspace"], stream, amax_known)
        if dbias is not None:
            self._part_bias_sums(k, grads, dbias, stream)

    def dgrad(self, k: Any, g: ArrayView, kept: Views, saved: Views, scratch: Views, dx: ArrayView, stream: int) -> None:
        p, f, cached = self.spec.prefix, self.fp8, self.spec.weight_cached
        w_qt = kept[f"{p}w_qt"] if cached else saved[f"{p}w_qt"]
        w_inv = kept[f"{p}w_scale_inv"] if cached else _slot(saved, f"{p}scale_inv", 1)
        g_q, g_inv, space = scratch[f"{p}g_q"], _slot(scratch, f"{p}g_scales", 0), scratch["workspace"]
        k.fp8_gemm(g_q, w_qt, dx, f.g.format, f.w.format, g_inv, w_inv, None, False, f.dgrad_fast, space, stream)

    def wgrad(self, k: Any, g: ArrayView, x: ArrayView | None, saved: Views, grads: Views, scratch: Views, stream: int) -> None:
        g_qt = given(scratch, f"{self.spec.prefix}g_qt")
        if self.whole_wgrad:
            whole = given(scratch, f"{self.spec.prefix}dweight")
            self._wgrad(k, g_qt, saved, scratch, whole, False, stream)
            self._part_weights(k, whole, grads, scratch, stream)
            return
        for name, start, n in zip(self.weights, self.starts, self.spec.segments, strict=True):
            part = g_qt if len(self.weights) == 1 else g_qt.slice(0, start, n)
            self._wgrad(k, part, saved, scratch, given(grads, name), self.adds, stream)

    def _wgrad(self, k: Any, g_qt: ArrayView, saved: Views, scratch: Views, out: ArrayView, adds: bool, stream: int) -> None:
        p, f = self.spec.prefix, self.fp8
        x_inv = given(saved, f"{p}x_scale_inv") if self.spec.input_cached else _slot(saved, f"{p}scale_inv", 0)
        g, x = (g_qt, f.g.format, _slot(scratch, f"{p}g_scales", 0)), (saved[f"{p}x_qt"], f.x.format, x_inv)
        (a, a_format, a_inv), (b, b_format, b_inv) = (g, x) if self.oi else (x, g)
        k.fp8_gemm(a, b, out, a_format, b_format, a_inv, b_inv, None, adds, f.wgrad_fast, scratch["workspace"], stream)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _scale_inv(self, saved: Views, scratch: Views, slot: int) -> ArrayView:
        """float32 [1] where 1 / scale of x (slot 0) or W (slot 1) is written: kept for backward where it is needed there."""
        p = self.spec.prefix
        return _slot(saved, f"{p}scale_inv", slot) if f"{p}scale_inv" in saved else _slot(scratch, f"{p}scales", slot)

    def _source(
        self, source: str, operand: str, inputs: Views, outputs: Views, scratch: Views
    ) -> tuple[ArrayView | None, ArrayView | None]:
        """(scale, amax) buffers of operand "x" or "w" by where its scale comes from."""
        p = self.spec.prefix
        own = _slot(scratch, f"{p}scales", 2 if operand == "x" else 3)
        if source == "scale":
            return given(inputs, f"{p}{operand}_scale"), outputs.get(f"{p}{operand}_amax")
        return own, given(inputs, f"{p}{operand}_amax_in") if source == "amax" else outputs.get(f"{p}{operand}_amax")


def _slot(views: Views, name: str, slot: int) -> ArrayView:
    """float32 [1]: a number of a small buffer whose numbers lie SLOT apart."""
    view = given(views, name)
    return ArrayView(view.ptr + 4 * SLOT * slot, (1,), float32, view.device, view.owner)
