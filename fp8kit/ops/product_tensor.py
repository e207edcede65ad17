"""FP8 products with one scale for each tensor: of delayed scaling, or from the tensor's amax."""

from __future__ import annotations

from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import Cast, Rule
from fp8kit.formats import float32, uint8
from fp8kit.ops.product import ProductSpec, want
from fp8kit.ops.product_quantized import ALIGN, Operand, Pair, QuantizedProduct, pad
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Metas, WorkingSet

SLOT = 4  # float32 numbers from one scale to the next: cuBLASLt takes scale pointers of 16-byte alignment
# source of a scale -> what the cast reads as an input, and what tells it to a second pass (``scalars``)
_INPUTS = {"delayed": "scale", "amax": "amax_in"}
_SCALARS = {"delayed": ("scale", "scale"), "current": ("amax_in", "amax"), "amax": ("amax_in", "amax_in")}
# GEMM -> the kernel that makes it with an activation, or an activation's gradient
FUSED = {"fprop": "fp8_gemm_act", "dgrad": "fp8_gemm_act_bwd"}
STATIC = "static_scale"  # scratch: the scale, and what it is made of


class TensorProduct(QuantizedProduct):
    """``Product`` on codes padded to multiples of 16, with a scale_inv that both orientations share."""

    kernels = ("quantize_transpose", "fp8_gemm")
    fuses_cast = True

    def __init__(self, spec: ProductSpec, *of_the_call: Any) -> None:
        super().__init__(spec, *of_the_call)
        # wgrad of a segment reads whole blocks of 16 rows of g^T: only aligned segments are multiplied one by
        # one
        self.whole_wgrad = len(self.weights) > 1 and any(n % ALIGN for n in spec.segments)
        # operand -> names of codes, transposed codes, scale_inv, scale, amax, and the amax that is an input
        names = ("q", "qt", "scale_inv", "scale", "amax", "amax_in")
        self.cast_names = {o: tuple(f"{spec.prefix}{o}_{name}" for name in names) for o in "xwg"}
        self.static = {operand for operand, own in self.quantizers.items() if own.static}
        # operand -> its format, whether its amax is taken, whether it is an input, and its rule for a scale
        self.cast_rules = {
            operand: (
                own.format,
                own.takes_amax,
                own.scale_source == "amax",
                None if own.needs_state or own.static else Rule(own.power_2, own.epsilon),
            )
            for operand, own in self.quantizers.items()
        }

    @staticmethod
    def shapes(rows: int, columns: int, quantizer: Quantizer) -> tuple[Shape, Shape]:
        return (pad(rows), pad(columns)), (1,)

    @staticmethod
    def grid(scale_inv: Any, quantizer: Quantizer) -> Any:
        return scale_inv.reshape(1, 1)

    def _scale_name(self, operand: str) -> str:
        return f"{operand[0]}_scale_inv"

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def scales_known(self) -> bool:
        return self.fp8.x.needs_state

    def own_amax(self, operand: str) -> str | None:
        # a state's slot may hold earlier maxima, and ranks may share one
        return self._amax(operand) if self.quantizers[operand].scale_source == "current" else None

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        self._check_scale(operation, "x", metas)

    def check_weights(self, operation: str, metas: Metas) -> None:
        super().check_weights(operation, metas)
        self._check_scale(operation, "w", metas)

    def _check_scale(self, operation: str, operand: str, metas: Metas) -> None:
        source = self.quantizers[operand].scale_source
        if f"{operand}_q" not in self.cached and source in _INPUTS:
            want(operation, f"{self.spec.prefix}{operand}_{_INPUTS[source]}", metas, (1,), float32)

    def weight_outputs(self) -> dict[str, Meta]:
        amax = {} if self.fp8.w.static else {f"{self.spec.prefix}w_amax": Meta((1,), float32, zero=True)}
        return super().weight_outputs() | amax

    def scalars(self) -> dict[str, str]:
        found = {}
        for operand in ("x", "w"):
            if f"{operand}_q" not in self.cached and not self.quantizers[operand].static:
                own, source = _SCALARS[self.quantizers[operand].scale_source]
                name = f"{self.spec.prefix}{operand}"
                found[f"{name}_{own}"] = f"{name}_{source}"
        return found

    def backward_inputs(self) -> dict[str, Meta]:
        source = self.quantizers["g"].scale_source
        if source not in _INPUTS or not self.casts_g:
            return {}
        return {f"{self.spec.prefix}g_{_INPUTS[source]}": Meta((1,), float32)}

    def _temporaries(self, operand: str) -> dict[str, Meta]:
        name = f"{self.spec.prefix}{STATIC}"
        return {name: Meta((2 * SLOT,), float32)} if self.quantizers[operand].static else {}

    def workspace(self, k: Any) -> int:
        return max(super().workspace(k), int(k.quantize_transpose_workspace(self.m, self.n)))

    _sums = "workspace"  # where a cast sums the bias's gradient

    def bias_workspace(self, k: Any) -> dict[str, Meta]:
        size = int(k.quantize_transpose_workspace(self.m, self.n)) if self.needs_b and self.casts_g else 0
        if not size:
            return {}
        self._sums = f"{self.spec.prefix}g_sums"
        return {self._sums: Meta((size,), uint8)}

    # --- with what follows ----------------------------------------------------------------------------------

    def fuses(self, gemm: str, kernels: Any) -> bool:
        policy = getattr(kernels, "policy", None)
        named = {} if policy is None else dict(policy.per_op)
        quantized = gemm not in self.plain | self.decoded and isinstance(self.how[gemm], bool)
        # a product that is watched, or a rank's part, is another class
        return type(self) is TensorProduct and quantized and FUSED[gemm] in named

    def fprop_act(
        self,
        ws: WorkingSet,
        h: ArrayView | None,
        y: ArrayView | None,
        bias: ArrayView | None,
        cast: Cast,
        activation: str,
        params: tuple[float, ...],
    ) -> None:
        """h = x W^T, where it is wanted, and activation(h + bias) into y, where it is, and ``cast``, by one
        kernel (``fuses``)."""
        result = bias, y, None, cast, activation, params

        def multiply(ws: WorkingSet, left: Operand, right: Operand, h: Any, fast: bool, *none: None) -> None:
            (a, a_inv, p), (b, b_inv, q), space = left, right, ws.scratch["workspace"]
            codes = (self.m, self.n), self.dtype, p.format, q.format, a_inv, b_inv
            ws.kernels.fp8_gemm_act(a, b, h, *codes, *result, fast, space, ws.stream)

        self.fprop(ws, None, h, by=multiply)

    def dgrad_act(
        self,
        ws: WorkingSet,
        x: ArrayView,
        bias: ArrayView | None,
        dbias: ArrayView | None,
        cast: Cast,
        activation: str,
        params: tuple[float, ...],
    ) -> None:
        """The gradient of the activation of x + bias, from that of its output, g W: into ``cast``, and its
        column sums into dbias, by one kernel (``fuses``)."""
        result = x, bias, None, dbias, None, cast, activation, params

        def multiply(ws: WorkingSet, left: Operand, right: Operand, dy: None, fast: bool) -> None:
            (a, a_inv, p), (b, b_inv, q), space = left, right, ws.scratch["workspace"]
            codes = p.format, q.format, a_inv, b_inv
            ws.kernels.fp8_gemm_act_bwd(a, b, *codes, *result, fast, space, ws.stream)

        self.dgrad(ws, None, None, multiply)

    # --- casts ----------------------------------------------------------------------------------------------

    def x_cast(self, ws: WorkingSet) -> Cast:
        return self._target(ws, "x", self._into(ws, "x"))

    def g_cast(self, ws: WorkingSet) -> Cast:
        return self._target(ws, "g", (ws.scratch, ws.scratch))

    def _cast(
        self,
        ws: WorkingSet,
        operand: str,
        x: ArrayView,
        into: Pair,
        amax_known: bool = False,
        dbias: ArrayView | None = None,
    ) -> None:
        cast = self._target(ws, operand, into)
        if self.cast_rules[operand][1] and not amax_known:
            ws.kernels.amax(x, cast.amax, x.shape, ws.stream)
            self.share(ws, operand, cast.amax)
        space = None if dbias is None else ws.scratch[self._sums]
        ws.kernels.quantize_transpose(x, cast, dbias, space, ws.stream)

    def cast_g(self, ws: WorkingSet, g: ArrayView, with_bias: bool = True, amax_known: bool = False) -> None:
        if not self.casts_g:
            super().cast_g(ws, g, with_bias)
            return
        dbias = self._bias_sums(ws) if with_bias else None
        self._cast(ws, "g", g, (ws.scratch, ws.scratch), amax_known, dbias)
        if dbias is not None:
            self._part_bias_sums(ws, dbias)

    def _cast_weight(self, ws: WorkingSet, into: Pair) -> None:
        whole = self._target(ws, "w", into)
        for name in self.weights if self.cast_rules["w"][1] else ():
            part = ws.inputs[name]
            ws.kernels.amax(part, whole.amax, part.shape, ws.stream)
        if self.cast_rules["w"][1]:
            self.share(ws, "w", whole.amax)
        for name, (start, n) in self.weights.items():
            q, q_t = whole.q, whole.q_t
            if len(self.weights) > 1:
                rows = n if start + n < self.n else pad(self.n) - start
                along = 0 if self.oi else 1
                q = None if q is None else q.slice(along, start, rows)
                q_t = None if q_t is None else q_t.slice(1 - along, start, rows)
            cast = Cast(whole.format, q, q_t, whole.scale, whole.scale_inv, whole.amax, whole.rule)
            ws.kernels.quantize_transpose(ws.inputs[name], cast, None, None, ws.stream)

    def _fixed(self, ws: WorkingSet, operand: str) -> ArrayView:
        """Returns the static scale: what the rule of scales gives for an amax of 1, here the least one, in a
        format whose largest value it is."""
        both = ws.scratch[f"{self.spec.prefix}{STATIC}"]
        amax, scale = both.slice(0, 0, 1), both.slice(0, SLOT, 1)
        arrays.fill_zero(amax, ws.stream)
        inverse = both.slice(0, SLOT + 1, 1)
        value = self.quantizers[operand].static_scale
        ws.kernels.scale_from_amax(amax, scale, inverse, value, False, 1.0, float32.max, ws.stream)
        return scale

    def _target(self, ws: WorkingSet, operand: str, into: Pair) -> Cast:
        """Returns where "x", "w" or "g" is cast to, and by which scale or amax."""
        q, q_t, inverse, scale, amax, amax_in = self.cast_names[operand]
        fmt, _, shared, rule = self.cast_rules[operand]
        first, second = into
        codes, codes_t = first.get(q), second.get(q_t)
        if operand == "w" and not self.oi:
            codes, codes_t = codes_t, codes
        scale_inv = (second if inverse in self.in_saved else first)[inverse]
        inputs, known = ws.inputs, None
        if rule is None:
            known = self._fixed(ws, operand) if operand in self.static else inputs[scale]
        found = inputs[amax_in] if shared else ws.outputs.get(amax)
        return Cast(fmt, codes, codes_t, known, scale_inv, found, rule)
