"""FP8 products with one scale for each tensor: of delayed scaling, or from the tensor's amax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import Cast, Rule
from fp8kit.formats import DType, float32
from fp8kit.ops.product import ProductSpec, WeightJob, required, want
from fp8kit.ops.product_quantized import ALIGN, Operand, Pair, QuantizedProduct, pad
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Metas, Views

SLOT = 4  # float32 numbers from one scale to the next: cuBLASLt takes scale pointers of 16-byte alignment
# source of a scale -> what the cast reads as an input, and what tells it to a second pass (``scalars``)
_INPUTS = {"delayed": "scale", "amax": "amax_in"}
_SCALARS = {"delayed": ("scale", "scale"), "current": ("amax_in", "amax"), "amax": ("amax_in", "amax_in")}


class TensorProduct(QuantizedProduct):
    """``Product`` on codes padded to multiples of 16, with a scale_inv that both orientations share."""

    kernels = ("quantize_transpose", "fp8_gemm")
    fuses_cast = True

    def __init__(
        self, spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs_w: bool, needs_b: bool
    ) -> None:
        super().__init__(spec, rows, dtype, needs_x, needs_w, needs_b)
        # wgrad of a segment reads whole blocks of 16 rows of g^T: only aligned segments are multiplied one by
        # one
        self.whole_wgrad = len(self.weights) > 1 and any(n % ALIGN for n in spec.segments)
        # operand -> names of its scale, its amax, and the amax that is an input; rule of a scale that the
        # amax makes
        self.scalar_names = {
            operand: tuple(f"{spec.prefix}{operand}_{name}" for name in ("scale", "amax", "amax_in"))
            for operand in "xwg"
        }
        self.rules = {
            operand: None if own.needs_state else Rule(own.power_2, own.epsilon)
            for operand, own in self.quantizers.items()
        }

    @staticmethod
    def shapes(rows: int, columns: int, quantizer: Quantizer) -> tuple[Shape, Shape]:
        return (pad(rows), pad(columns)), (1,)

    @staticmethod
    def grid(scale_inv: Any, quantizer: Quantizer) -> Any:
        return scale_inv.reshape(1, 1)

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
        (a, a_inv, p), (b, b_inv, q) = left, right
        k.fp8_gemm(a, b, out, p.format, q.format, a_inv, b_inv, bias, addend, fast, workspace, stream)

    def _scale_name(self, operand: str) -> str:
        return f"{operand[0]}_scale_inv"

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def scales_known(self) -> bool:
        return self.fp8.x.needs_state

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        for operand in "xw":
            source = self.quantizers[operand].scale_source
            if f"{operand}_q" not in self.cached and source in _INPUTS:
                want(operation, f"{self.spec.prefix}{operand}_{_INPUTS[source]}", metas, (1,), float32)

    def weight_outputs(self) -> dict[str, Meta]:
        return super().weight_outputs() | {f"{self.spec.prefix}w_amax": Meta((1,), float32, zero=True)}

    def scalars(self) -> dict[str, str]:
        found = {}
        for operand in ("x", "w"):
            if f"{operand}_q" not in self.cached:
                own, source = _SCALARS[self.quantizers[operand].scale_source]
                name = f"{self.spec.prefix}{operand}"
                found[f"{name}_{own}"] = f"{name}_{source}"
        return found

    def cast_scratch(self) -> dict[str, Meta]:
        return {}

    def workspace(self, k: Any) -> int:
        return max(super().workspace(k), int(k.quantize_transpose_workspace(self.m, self.n)))

    # --- casts ----------------------------------------------------------------------------------------------

    def x_cast(self, inputs: Views, outputs: Views, saved: Views, scratch: Views) -> Cast:
        return self._target("x", (scratch, saved), inputs, outputs)

    def g_cast(self, kept: Views, grads: Views, scratch: Views) -> Cast:
        return self._target("g", (scratch, scratch), kept, grads)

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
        dbias: ArrayView | None = None,
        workspace: ArrayView | None = None,
    ) -> None:
        cast = self._target(operand, into, inputs, outputs)
        if self.takes_amax(operand) and not amax_known:
            k.amax(x, cast.amax, x.shape, stream)
        k.quantize_transpose(x, cast, dbias, workspace, stream)

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
        if not (self.needs_x or self.needs_w):
            super().cast_g(k, g, kept, grads, scratch, stream, with_bias)
            return
        dbias, space = self._bias_sums(grads, scratch) if with_bias else None, scratch["workspace"]
        self._cast(k, "g", g, (scratch, scratch), kept, grads, stream, amax_known, dbias, space)
        if dbias is not None and len(self.biases) > 1:
            self._part_bias_sums(k, grads, dbias, stream)

    def casts_together(self, inputs: Views) -> bool:
        return True

    def _cast_weight(
        self, k: Any, inputs: Views, outputs: Views, into: Pair, scratch: Views, stream: int
    ) -> None:
        whole = self._target("w", into, inputs, outputs)
        for name in self.weights if self.takes_amax("w") else ():
            part = required(inputs, name)
            k.amax(part, whole.amax, part.shape, stream)
        for part, cast in self._weight_casts(inputs, whole):
            k.quantize_transpose(part, cast, None, None, stream)

    @classmethod
    def cast_weights(cls, k: Any, jobs: Sequence[WeightJob], numbers: ArrayView, stream: int) -> None:
        quantizer, count = jobs[0].product.fp8.w, len(jobs)
        flat = numbers.reshape(numbers.size)
        amaxes = [flat.slice(0, i, 1) for i in range(count)]
        if quantizer.takes_amax:
            segments = [
                (required(job.inputs, name), amax)
                for job, amax in zip(jobs, amaxes, strict=True)
                for name in job.product.weights
            ]
            k.amax_many(*map(list, zip(*segments, strict=True)), stream)
            rule = quantizer.format.max, quantizer.power_2, quantizer.epsilon, float32.max
            k.scale_from_amax(*(flat.slice(0, row * count, count) for row in range(3)), *rule, stream)
        casts: list[tuple[ArrayView, Cast]] = []
        for i, (product, inputs, made) in enumerate(jobs):
            known, amax = (
                (flat.slice(0, count + i, 1), None)
                if quantizer.takes_amax
                else (required(inputs, f"{product.spec.prefix}w_scale"), amaxes[i])
            )
            (q, scale_inv), (q_t, _) = product._sides("w", (made, made))
            casts += product._weight_casts(inputs, Cast(quantizer.format, q, q_t, known, scale_inv, amax))
        k.quantize_transpose_many([part for part, _ in casts], [cast for _, cast in casts], stream)

    def _target(self, operand: str, into: Pair, inputs: Views, outputs: Views) -> Cast:
        """Where "x", "w" or "g" is cast to, and by which scale or amax."""
        (q, scale_inv), (q_t, other) = self._sides(operand, into)
        scale_name, amax_name, amax_in = self.scalar_names[operand]
        rule, quantizer = self.rules[operand], self.quantizers[operand]
        scale = required(inputs, scale_name) if rule is None else None
        amax = required(inputs, amax_in) if quantizer.scale_source == "amax" else outputs.get(amax_name)
        return Cast(quantizer.format, q, q_t, scale, scale_inv or other, amax, rule)  # type: ignore[arg-type]

    def _weight_casts(self, inputs: Views, whole: Cast) -> Iterator[tuple[ArrayView, Cast]]:
        """Each weight segment, and where in the cast of all of them it goes."""
        for i, (name, start) in enumerate(zip(self.weights, self.starts, strict=True)):
            q, q_t = whole.q, whole.q_t
            if len(self.weights) > 1:
                rows = (pad(self.n) if i + 1 == len(self.weights) else start + self.spec.segments[i]) - start
                along = 0 if self.oi else 1
                q = None if q is None else q.slice(along, start, rows)
                q_t = None if q_t is None else q_t.slice(1 - along, start, rows)
            cast = Cast(whole.format, q, q_t, whole.scale, whole.scale_inv, whole.amax, whole.rule)
            yield required(inputs, name), cast
