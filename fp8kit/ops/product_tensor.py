"""FP8 products with one scale for each tensor: delayed and current scaling, and amaxes reduced by the
door."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Cast, Rule
from fp8kit.buffers import free
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.product import Product, ProductSpec, WeightJob, given, want
from fp8kit.ops.quant import Fp8, pad, quantize_operand
from fp8kit.spec import Meta, Metas, Views

SLOT = 4  # float32 numbers from one scale to the next: cuBLASLt takes scale pointers of 16-byte alignment
NUMBER = Meta((1,), float32)  # a buffer of its own: doors align those to 16 bytes and more


class TensorProduct(Product):
    """``Product`` on codes (Mp, Kp), (Np, Kp) and their transposes, padded to multiples of 16."""

    def __init__(
        self, spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs_w: bool, needs_b: bool
    ) -> None:
        super().__init__(spec, rows, dtype, needs_x, needs_w, needs_b)
        self.mp, self.kp, self.np = pad(self.m), pad(self.k), pad(self.n)
        assert spec.fp8 is not None
        self.fp8: Fp8 = spec.fp8
        p = spec.prefix
        self.x_q, self.x_qt, self.w_q, self.w_qt, self.g_q, self.g_qt = (
            f"{p}{o}_{side}" for o in "xwg" for side in ("q", "qt")
        )
        self.x_inv, self.w_inv, self.g_inv = (f"{p}{o}_inv" for o in "xwg")
        self.x_scale, self.w_scale, self.g_scale = (f"{p}{o}_scale" for o in "xwg")
        self.x_amax, self.w_amax, self.g_amax = (f"{p}{o}_amax" for o in "xwg")
        # wgrad of a segment reads whole blocks of 16 rows of g^T: only aligned segments can be multiplied one
        # by one
        self.whole_wgrad = len(self.weights) > 1 and any(n % 16 for n in spec.segments)
        self.keeps = needs_w or needs_x  # backward multiplies: what it needs of forward's casts is saved
        self.x_given_inv, self.w_given_inv = f"{p}x_scale_inv", f"{p}w_scale_inv"  # of casts that are inputs

    # --- what there is --------------------------------------------------------------------------------------

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
            want(operation, self.x_q, metas, (self.mp, self.kp), uint8)
            want(operation, self.x_qt, metas, (self.kp, self.mp), uint8)
            want(operation, self.x_given_inv, metas, (1,), float32)
        elif self.fp8.x.source in inputs:
            want(operation, f"{p}x_{inputs[self.fp8.x.source]}", metas, (1,), float32)
        if self.spec.weight_cached:
            want(operation, f"{p}w_q", metas, (self.np, self.kp), uint8)
            want(operation, f"{p}w_qt", metas, (self.kp, self.np), uint8)
            want(operation, f"{p}w_scale_inv", metas, (1,), float32)
        elif self.fp8.w.source in inputs:
            want(operation, f"{p}w_{inputs[self.fp8.w.source]}", metas, (1,), float32)

    def outputs(self) -> dict[str, Meta]:
        cached = {self.x_amax: self.spec.input_cached, self.w_amax: self.spec.weight_cached}
        return {name: Meta((1,), float32, zero=True) for name, is_given in cached.items() if not is_given}

    def weight_outputs(self) -> dict[str, Meta]:
        p = self.spec.prefix
        return {
            f"{p}w_q": Meta((self.np, self.kp), uint8),
            f"{p}w_qt": Meta((self.kp, self.np), uint8),
            f"{p}w_scale_inv": Meta((1,), float32),
            f"{p}w_amax": Meta((1,), float32, zero=True),
        }

    def saved(self) -> dict[str, Meta]:
        out: dict[str, Meta] = {}
        if self.needs_w and not self.spec.input_cached:
            out[self.x_qt] = Meta((self.kp, self.mp), uint8)
        if self.needs_x and not self.spec.weight_cached:
            out[self.w_qt] = Meta((self.kp, self.np), uint8)
        return out | (self._inverses() if self.keeps else {})

    def kept(self) -> tuple[str, ...]:
        weight = (self.w_qt, self.w_given_inv) if self.spec.weight_cached and self.needs_x else ()
        return weight + ((self.x_qt, self.x_given_inv) if self.spec.input_cached and self.needs_w else ())

    def read_again(self) -> tuple[str, ...]:
        return (self.w_q, self.w_given_inv) if self.spec.weight_cached else super().read_again()

    def grads(self) -> dict[str, Meta]:
        amax = {self.g_amax: Meta((1,), float32, zero=True)} if self.keeps else {}
        return super().grads() | amax

    def backward_inputs(self) -> dict[str, Meta]:
        names = {"scale": self.g_scale, "amax": f"{self.g_amax}_in"}
        source = self.fp8.g.source
        return {names[source]: NUMBER} if self.keeps and source in names else {}

    def scratch(self) -> dict[str, Meta]:
        out = {} if self.spec.input_cached else {self.x_q: Meta((self.mp, self.kp), uint8)}
        if not self.spec.weight_cached:
            out[self.w_q] = Meta((self.np, self.kp), uint8)
        if not self.keeps:
            out |= self._inverses()
        return out | super().scratch()

    def backward_scratch(self) -> dict[str, Meta]:
        out: dict[str, Meta] = {}
        if self.keeps:
            out[self.g_inv] = NUMBER
        if self.needs_x:
            out[self.g_q] = Meta((self.mp, self.np), uint8)
        if self.needs_w:
            out[self.g_qt] = Meta((self.np, self.mp), uint8)
        return out | super().backward_scratch()

    def workspace(self, k: Any) -> int:
        shapes = ((self.m, self.n), (self.m, self.k), (self.n, self.k), (self.k, self.n))
        sums = max(
            int(k.quantize_transpose_workspace(self.m, self.n)), int(k.column_sum_workspace(self.m, self.n))
        )
        return max(*(int(k.fp8_gemm_workspace(*shape)) for shape in shapes), sums)

    # --- forward --------------------------------------------------------------------------------------------

    def x_cast(self, inputs: Views, outputs: Views, saved: Views, scratch: Views) -> Cast:
        inv = given(saved if self.keeps else scratch, self.x_inv)
        scale, amax = self._source(self.fp8.x.source, "x", inputs, outputs)
        q, q_t = scratch.get(self.x_q), saved.get(self.x_qt)
        return Cast(self.fp8.x.format, q, q_t, scale, inv, amax, self.fp8.x.rule)

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
        if self.spec.input_cached:
            return
        scale, amax = self._source(self.fp8.x.source, "x", inputs, outputs)
        inv: Any = (saved if self.keeps else scratch)[self.x_inv]
        q, q_t = scratch.get(self.x_q), saved.get(self.x_qt)
        quantize_operand(k, self.fp8.x, x, q, q_t, scale, inv, amax, None, None, stream, amax_known)

    def cast_weight(
        self, k: Any, inputs: Views, outputs: Views, made: Views, scratch: Views, stream: int
    ) -> None:
        self._cast_weight(
            k,
            inputs,
            outputs,
            made.get(self.w_q),
            made.get(self.w_qt),
            given(made, self.w_given_inv),
            scratch,
            stream,
        )

    def _cast_weight(
        self,
        k: Any,
        inputs: Views,
        outputs: Views,
        w_q: ArrayView | None,
        w_qt: ArrayView | None,
        scale_inv: ArrayView | None,
        scratch: Views,
        stream: int,
    ) -> None:
        quant = self.fp8.w
        scale, amax = self._source(quant.source, "w", inputs, outputs)
        if quant.source == "current":
            for name in self.weights:
                part = given(inputs, name)
                k.amax(part, amax, part.shape, stream)
        for part, cast in self._weight_casts(inputs, w_q, w_qt, scale, scale_inv, amax, quant.rule):
            k.quantize_transpose(part, cast, None, None, stream)

    def _weight_casts(
        self,
        inputs: Views,
        w_q: ArrayView | None,
        w_qt: ArrayView | None,
        scale: ArrayView | None,
        scale_inv: ArrayView | None,
        amax: ArrayView | None,
        rule: Rule | None = None,
    ) -> Iterator[tuple[ArrayView, Cast]]:
        """Each weight segment, and where it goes."""
        for i, (name, start) in enumerate(zip(self.weights, self.starts, strict=True)):
            q, q_t = w_q, w_qt
            if len(self.weights) > 1:
                rows = (self.np if i + 1 == len(self.weights) else start + self.spec.segments[i]) - start
                q = None if w_q is None else w_q.slice(0, start, rows)
                q_t = None if w_qt is None else w_qt.slice(1, start, rows)
            if not self.oi:
                q, q_t = q_t, q
            weight = given(inputs, name)
            cast = Cast(self.fp8.w.format, q, q_t, scale, scale_inv, amax, rule)  # type: ignore[arg-type]
            yield weight, cast

    @classmethod
    def cast_weights(cls, k: Any, jobs: Sequence[WeightJob], numbers: ArrayView, stream: int) -> None:
        quant, count = jobs[0].product.fp8.w, len(jobs)
        flat = numbers.reshape(numbers.size)
        amaxes = [flat.slice(0, i, 1) for i in range(count)]
        scales = [job.inputs.get(job.product.w_scale) for job in jobs]
        if quant.source == "current":
            segments = [
                (given(job.inputs, name), amax)
                for job, amax in zip(jobs, amaxes, strict=True)
                for name in job.product.weights
            ]
            k.amax_many(*map(list, zip(*segments, strict=True)), stream)
            rule = quant.format.max, quant.power_2, quant.epsilon, float32.max
            k.scale_from_amax(*(flat.slice(0, row * count, count) for row in range(3)), *rule, stream)
            scales = [flat.slice(0, count + i, 1) for i in range(count)]
        casts: list[tuple[ArrayView, Cast]] = []
        for (product, inputs, made), scale, amax in zip(jobs, scales, amaxes, strict=True):
            sides = (
                given(made, product.w_q),
                given(made, product.w_qt),
                scale,
                given(made, product.w_given_inv),
            )
            casts += product._weight_casts(inputs, *sides, amax if quant.source == "scale" else None)
        k.quantize_transpose_many([part for part, _ in casts], [cast for _, cast in casts], stream)

    def measure(self, k: Any, x: ArrayView, inputs: Views, outputs: Views, stream: int) -> None:
        if not self.spec.input_cached:
            k.amax(x, outputs[self.x_amax], x.shape, stream)
        self.measure_weight(k, inputs, outputs, stream)

    def measure_weight(self, k: Any, inputs: Views, outputs: Views, stream: int) -> None:
        for name in () if self.spec.weight_cached else self.weights:
            part = given(inputs, name)
            k.amax(part, outputs[self.w_amax], part.shape, stream)

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
        f = self.fp8
        bias = self._bias(k, inputs, scratch, stream)
        invs = saved if self.keeps else scratch
        if self.spec.weight_cached:
            w_q, w_inv = inputs[self.w_q], inputs[self.w_given_inv]
        else:
            w_q, w_inv = scratch[self.w_q], invs[self.w_inv]
            self._cast_weight(k, inputs, outputs, w_q, saved.get(self.w_qt), w_inv, scratch, stream)
        x_q, x_inv = (
            (inputs[self.x_q], inputs[self.x_given_inv])
            if self.spec.input_cached
            else (scratch[self.x_q], invs[self.x_inv])
        )
        k.fp8_gemm(
            x_q,
            w_q,
            y,
            f.x.format,
            f.w.format,
            x_inv,
            w_inv,
            bias,
            addend,
            f.fprop_fast,
            scratch["workspace"],
            stream,
        )
        free(scratch, self.x_q, self.w_q)

    def save_weight(self, k: Any, inputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        if self.needs_x and not self.spec.weight_cached:
            self._cast_weight(k, inputs, {}, None, saved[self.w_qt], saved[self.w_inv], scratch, stream)

    # --- backward -------------------------------------------------------------------------------------------

    def g_cast(self, kept: Views, grads: Views, scratch: Views) -> Cast:
        q, q_t, inv = scratch.get(self.g_q), scratch.get(self.g_qt), given(scratch, self.g_inv)
        return Cast(self.fp8.g.format, q, q_t, given(kept, self.g_scale), inv, grads.get(self.g_amax))

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
        quant = self.fp8.g
        if not self.keeps:
            super().cast_g(k, g, kept, grads, scratch, stream, with_bias)
            return
        dbias = self._bias_sums(grads, scratch) if with_bias else None
        scale = given(kept, self.g_scale) if quant.source == "scale" else None
        amax = given(kept, f"{self.g_amax}_in") if quant.source == "amax" else grads.get(self.g_amax)
        q, q_t, inv = scratch.get(self.g_q), scratch.get(self.g_qt), given(scratch, self.g_inv)
        quantize_operand(
            k, quant, g, q, q_t, scale, inv, amax, dbias, scratch["workspace"], stream, amax_known
        )
        if dbias is not None and len(self.biases) > 1:
            self._part_bias_sums(k, grads, dbias, stream)

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
        f = self.fp8
        w_qt, w_inv = (
            (kept[self.w_qt], kept[self.w_given_inv])
            if self.spec.weight_cached
            else (saved[self.w_qt], saved[self.w_inv])
        )
        g_q, g_inv, space = scratch[self.g_q], scratch[self.g_inv], scratch["workspace"]
        k.fp8_gemm(
            g_q, w_qt, dx, f.g.format, f.w.format, g_inv, w_inv, None, None, f.dgrad_fast, space, stream
        )
        free(scratch, self.g_q)
        free(saved, self.w_qt)

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
        free(scratch, self.g_qt, f"{self.spec.prefix}dweight")
        if not self.spec.input_cached:
            free(saved, self.x_qt)

    def _wgrads(self, k: Any, saved: Views, grads: Views, scratch: Views, stream: int) -> None:
        g_qt = given(scratch, self.g_qt)
        if self.whole_wgrad:
            whole = given(scratch, f"{self.spec.prefix}dweight")
            self._wgrad(k, g_qt, saved, scratch, whole, False, stream)
            self._part_weights(k, whole, grads, scratch, stream)
            return
        for name, start, n in zip(self.weights, self.starts, self.spec.segments, strict=True):
            part = g_qt if len(self.weights) == 1 else g_qt.slice(0, start, n)
            self._wgrad(k, part, saved, scratch, given(grads, name), self.adds, stream)

    def _wgrad(
        self, k: Any, g_qt: ArrayView, saved: Views, scratch: Views, out: ArrayView, adds: bool, stream: int
    ) -> None:
        f = self.fp8
        a, a_format, a_inv = g_qt, f.g.format, scratch[self.g_inv]
        b, b_format, b_inv = (
            saved[self.x_qt],
            f.x.format,
            saved[self.x_given_inv if self.spec.input_cached else self.x_inv],
        )
        if not self.oi:
            a, b = b, a  # type: ignore[assignment]
            a_format, b_format = b_format, a_format
            a_inv, b_inv = b_inv, a_inv
        k.fp8_gemm(
            a,
            b,
            out,
            a_format,
            b_format,
            a_inv,
            b_inv,
            None,
            out if adds else None,
            f.wgrad_fast,
            scratch["workspace"],
            stream,
        )

    # --- helpers --------------------------------------------------------------------------------------------

    def _inverses(self) -> dict[str, Meta]:
        """Where 1 / scale of x and W is written: kept for backward where it is needed there."""
        cached = {self.x_inv: self.spec.input_cached, self.w_inv: self.spec.weight_cached}
        return {name: NUMBER for name, is_given in cached.items() if not is_given}

    def _source(
        self, source: str, operand: str, inputs: Views, outputs: Views
    ) -> tuple[ArrayView | None, ArrayView | None]:
        """(scale, amax) buffers of operand "x" or "w" by where its scale comes from."""
        scale, amax = (self.x_scale, self.x_amax) if operand == "x" else (self.w_scale, self.w_amax)
        if source == "scale":
            return given(inputs, scale), outputs.get(amax)
        return None, given(inputs, f"{amax}_in") if source == "amax" else outputs.get(amax)
