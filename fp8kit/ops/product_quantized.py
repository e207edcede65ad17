"""Products of quantised operands: what all granularities of scales share.

An operand is two arrays, its codes and their scale_inv, in the orientation that a GEMM wants, its contraction
last. There are up to six: ``x_q`` and ``w_q`` of fprop, ``g_q`` and ``w_qt`` of dgrad, ``g_qt`` and ``x_qt``
of wgrad. A granularity is a subclass: how large the arrays are, how an operand is cast, which GEMM it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from fp8kit.accumulation import Accumulation
from fp8kit.arrays import ArrayView, Shape
from fp8kit.buffers import free
from fp8kit.errors import UnsupportedError
from fp8kit.formats import float16, float32, uint8
from fp8kit.ops.product import Product, ProductSpec, want
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import Meta, Metas, WorkingSet

Operand = tuple[Any, Any, Quantizer]  # codes and scale_inv, views, and how they were cast
Arrays = Mapping[str, Any]
Pair = tuple[Arrays, Arrays]
# GEMM -> its operands
GEMMS = {"fprop": ("x_q", "w_q"), "dgrad": ("g_q", "w_qt"), "wgrad": ("g_qt", "x_qt")}
ALIGN = 16  # FP8 products take dimensions that are multiples of 16 (cuBLASLt, "FP8 data types")
AMAX = Meta((1,), float32, zero=True)


def pad(n: int) -> int:
    """Returns the next multiple of 16."""
    return -(-n // ALIGN) * ALIGN


class QuantizedProduct(Product):
    """``Product`` on codes and scales.

    ``kernels``: of the contract, that it is made of, the cast first. ``capability``: the least compute
    capability of a CUDA device that has them; ``tensor_cores``: the least of one whose tensor cores multiply
    codes, where before a kernel of ours multiplies them as float16; ``described``: what a device is said to
    compute.
    """

    kernels: ClassVar[tuple[str, ...]]
    capability: ClassVar[tuple[int, int]] = (8, 0)
    tensor_cores: ClassVar[tuple[int, int]] = (8, 9)
    described: ClassVar[str] = "FP8"

    def __init__(self, spec: ProductSpec, *of_the_call: Any) -> None:
        super().__init__(spec, *of_the_call)
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
        self.quantizers = {"x": self.fp8.x, "w": self.fp8.w, "g": self.fp8.g}
        # GEMMs in high precision have no operands of their own; of those are ``decoded`` that multiply the
        # values of fprop's operand by g as it is
        of = {name: gemm.compute for name, gemm in self.fp8.gemms.items()}
        self.plain = {name for name, compute in of.items() if compute == "high_precision"}
        self.decoded = {name for name, compute in of.items() if compute == "dequantized"}
        for name, operands in GEMMS.items():
            for operand in operands if of[name] != "quantized" else ():
                del self.operands[operand]
        # what backward reads of x and w
        self.backward_operands = {
            "x": "x_q" if "wgrad" in self.decoded else "x_qt",
            "w": "w_q" if "dgrad" in self.decoded else "w_qt",
        }
        self.fprop_reads_x, self.wgrad_reads_x = "fprop" in self.plain, "wgrad" in self.plain
        self.reads_g = bool((self.plain | self.decoded) & {"dgrad", "wgrad"})
        self.casts_g = ("g_q" in self.operands and self.needs_x) or ("g_qt" in self.operands and self.needs_w)
        self.cached = ("x_q", "x_qt") * spec.input_cached + ("w_q", "w_qt") * spec.weight_cached
        # operand -> names of its codes and of their scale_inv
        self.names = {
            operand: (f"{spec.prefix}{operand}", f"{spec.prefix}{self._scale_name(operand)}")
            for pair in GEMMS.values()
            for operand in pair
        }
        # freed after an operand's GEMM; scales that both orientations share are not among them
        self.own_names = {operand: (name, f"{name}_inv") for operand, (name, _) in self.names.items()}
        self.in_saved = frozenset(self.saved())
        # x and w whose first orientation is saved, too
        self.kept_first = {operand for operand in "xw" if self.names[f"{operand}_q"][0] in self.in_saved}
        self.how = {name: gemm.how for name, gemm in self.fp8.gemms.items()}
        self.multipliers: dict[str, Any] = {
            name: self.multiply if isinstance(how, bool) else self.model_multiply
            for name, how in self.how.items()
        }
        # the scales of a part of g^T's rows are no array of their own
        self.whole_wgrad = len(self.weights) > 1 and "g_qt" in self.operands

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
        """Returns an operand's scale_inv, an array of any library, as a matrix of one scale a tile."""
        raise NotImplementedError

    @staticmethod
    def multiply(
        ws: WorkingSet,
        left: Operand,
        right: Operand,
        out: ArrayView,
        fast: bool,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        """out = left right^T (+ bias) (+ addend), of ``ws`` with kernels, workspace and stream, summed as the
        device does. Here: with scales of tensors or of rows."""
        (a, a_inv, p), (b, b_inv, q), space = left, right, ws.scratch["workspace"]
        how = p.format, q.format, a_inv, b_inv
        ws.kernels.fp8_gemm(a, b, out, *how, bias, addend, fast, space, ws.stream)

    @classmethod
    def model_multiply(
        cls,
        ws: WorkingSet,
        left: Operand,
        right: Operand,
        out: ArrayView,
        how: Accumulation,
        bias: ArrayView | None = None,
        addend: ArrayView | None = None,
    ) -> None:
        """``multiply`` with another chip's sums."""
        (a, a_inv, p), (b, b_inv, q) = left, right
        scales = cls.grid(a_inv, p), cls.grid(b_inv, q), p.tile, q.tile
        ws.kernels.model_gemm(a, b, out, p.format, q.format, *scales, how, bias, addend, ws.stream)

    def _scale_name(self, operand: str) -> str:
        """Name of the operand's scale_inv, the prefix aside."""
        return f"{operand}_inv"

    def _cast(self, ws: WorkingSet, operand: str, x: ArrayView, into: Pair, amax_known: bool = False) -> None:
        """Cast "x", "w" or "g" to its two orientations: to the first, where that is in ``into[0]``, and to
        the second, where it is in ``into[1]``."""
        raise NotImplementedError

    def _temporaries(self, operand: str) -> dict[str, Meta]:
        """Returns what a cast of "x", "w" or "g" finds in ``scratch``."""
        return self._weight_buffer() if operand == "w" else {}

    # --- what there is --------------------------------------------------------------------------------------

    def takes_amax(self, operand: str) -> bool:
        return self.quantizers[operand].takes_amax and (operand != "g" or self.casts_g)

    def check(self, operation: str, metas: Metas) -> None:
        super().check(operation, metas)
        for name, meta in self._metas(*self.cached).items():
            want(operation, name, metas, meta.shape, meta.dtype)

    def outputs(self) -> dict[str, Meta]:
        return {name: AMAX for name in map(self._amax, "xw") if name is not None}

    def weight_outputs(self) -> dict[str, Meta]:
        return self._metas("w_q", "w_qt")

    def input_metas(self) -> dict[str, Meta]:
        """Returns the input in FP8, in both orientations: what ``input_cached`` operations take."""
        return self._metas("x_q", "x_qt")

    def saved(self) -> dict[str, Meta]:
        return self._metas(*(operand for operand in self._backward() if operand not in self.cached))

    def kept(self) -> tuple[str, ...]:
        plain = super().kept() if "dgrad" in self.plain else ()
        return (*plain, *self._metas(*(operand for operand in self._backward() if operand in self.cached)))

    def weight_names(self) -> tuple[str, ...]:
        return tuple(self._metas("w_q")) if self.spec.weight_cached else super().weight_names()

    def grads(self) -> dict[str, Meta]:
        amax = self._amax("g")
        return super().grads() | ({} if amax is None else {amax: AMAX})

    def scratch(self) -> dict[str, Meta]:
        out = self._bias_buffer()
        for operand in "xw":
            if f"{operand}_q" not in self.cached:
                out |= self._metas(f"{operand}_q") | self._temporaries(operand)
        return {name: meta for name, meta in out.items() if name not in self.in_saved}

    def cast_scratch(self) -> dict[str, Meta]:
        return self._temporaries("w")

    def backward_scratch(self) -> dict[str, Meta]:
        wanted = ("g_q",) * self.needs_x + ("g_qt",) * self.needs_w
        own = self._metas(*wanted) | (self._temporaries("g") if self.casts_g else {}) | self._grad_buffers()
        own |= self._weight_buffer() if self.needs_x and "dgrad" in self.plain else {}
        return own | self._decode_buffers()

    def workspace(self, k: Any) -> int:
        shapes = ((self.m, self.n), (self.m, self.k), self._weight_shape(self.n))
        sums = int(k.column_sum_workspace(self.m, self.n))
        return max(*(int(k.fp8_gemm_workspace(*shape)) for shape in shapes), sums)

    # --- forward --------------------------------------------------------------------------------------------

    def cast_x(self, ws: WorkingSet, x: ArrayView, amax_known: bool = False) -> None:
        if self.spec.input_cached:
            return
        if self.operands.keys() & {"x_q", "x_qt"}:
            self._cast(ws, "x", x, self._into(ws, "x"), amax_known)
        elif not amax_known:  # no GEMM multiplies codes of it
            self._measure_x(ws, x)

    def cast_weight(self, ws: WorkingSet) -> None:
        self._cast_weight(ws, (ws.outputs, ws.outputs))

    def _cast_weight(self, ws: WorkingSet, into: Pair) -> None:
        self._cast(ws, "w", self._whole_weight(ws), into)

    def measure(self, ws: WorkingSet, x: ArrayView) -> None:
        self._measure_x(ws, x)
        self.measure_weight(ws)

    def _measure_x(self, ws: WorkingSet, x: ArrayView) -> None:
        name = self._amax("x")
        if name is not None:
            ws.kernels.amax(x, ws.outputs[name], x.shape, ws.stream)

    def measure_weight(self, ws: WorkingSet) -> None:
        name = self._amax("w")
        if name is not None:
            for part in (ws.inputs[weight] for weight in self.weights):
                ws.kernels.amax(part, ws.outputs[name], part.shape, ws.stream)

    def fprop(
        self,
        ws: WorkingSet,
        x: ArrayView | None,
        y: Any,
        addend: ArrayView | None = None,
        await_x: Callable[[], None] | None = None,
        by: Callable[..., None] | None = None,
    ) -> None:
        """As ``Product.fprop``. ``await_x`` is called before the codes of x are read; ``by`` multiplies the
        operands in the place of ``multipliers``, and gets ``y`` as it is."""
        if "fprop" in self.plain:
            self.save_weight(ws)
            super().fprop(ws, x, y, addend)
            return
        bias, spec, scratch = self._bias(ws), self.spec, ws.scratch
        if not spec.weight_cached:
            self._cast_weight(ws, self._into(ws, "w"))
        if await_x is not None:
            await_x()
        a = self._operand("x_q", ws.inputs if spec.input_cached else self._into(ws, "x")[0], ws.saved)
        b = self._operand("w_q", ws.inputs if spec.weight_cached else self._into(ws, "w")[0], ws.saved)
        (by or self.multipliers["fprop"])(ws, a, b, y, self.how["fprop"], bias, addend)
        del a, b
        free(scratch, *self.own_names["x_q"], *self.own_names["w_q"])

    def save_weight(self, ws: WorkingSet) -> None:
        if not self.operands.keys() & {"w_q", "w_qt"}:  # no GEMM multiplies codes of it
            self.measure_weight(ws)
        elif self.needs_x and not self.spec.weight_cached:
            self._cast_weight(ws, (ws.saved if "w" in self.kept_first else {}, ws.saved))

    # --- backward -------------------------------------------------------------------------------------------

    def cast_g(self, ws: WorkingSet, g: ArrayView, with_bias: bool = True, amax_known: bool = False) -> None:
        super().cast_g(ws, g, with_bias)
        if self.casts_g:
            self._cast(ws, "g", g, (ws.scratch, ws.scratch), amax_known)

    def dgrad(
        self, ws: WorkingSet, g: ArrayView | None, dx: Any, by: Callable[..., None] | None = None
    ) -> None:
        """``by``: as in ``fprop``."""
        if "dgrad" in self.plain:
            super().dgrad(ws, g, dx)
            return
        if "dgrad" in self.decoded:
            self._multiply_values(ws, "dgrad", g, self._values(ws, "w"), dx, "nn")
            free(ws.saved, *self.own_names["w_q"])
            return
        a = self._operand("g_q", ws.scratch, ws.saved)
        b = self._operand("w_qt", ws.inputs if self.spec.weight_cached else ws.saved, ws.saved)
        (by or self.multipliers["dgrad"])(ws, a, b, dx, self.how["dgrad"])
        del a, b
        free(ws.scratch, *self.own_names["g_q"])
        free(ws.saved, *self.own_names["w_qt"])

    def added(self, ws: WorkingSet, g: Operand, w: Operand, dx: Any, how: Any) -> None:
        """What ``dgrad`` is to multiply ``by`` where its product is added to what dx holds."""
        self.multipliers["dgrad"](ws, g, w, dx, how, None, dx)

    def wgrad(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> None:
        if "wgrad" in self.plain:
            super().wgrad(ws, g, x)
            return
        if "wgrad" in self.decoded:
            self._wgrads_of_values(ws, g)
            free(ws.saved, *self.own_names["x_q"])
            return
        self._wgrads(ws)
        free(ws.scratch, *self.own_names["g_qt"])
        free(ws.saved, *self.own_names["x_qt"])
        if self.whole_wgrad:
            name = f"{self.spec.prefix}dweight"
            self._part_weights(ws, ws.scratch[name])
            free(ws.scratch, name)

    def _wgrads(self, ws: WorkingSet) -> None:
        """The products of ``wgrad``: of the whole weight, or segment by segment."""
        g = self._operand("g_qt", ws.scratch, ws.saved)
        x = self._operand("x_qt", ws.inputs if self.spec.input_cached else ws.saved, ws.saved)
        single = len(self.weights) == 1
        for name, (start, n) in self.weights.items():
            if self.whole_wgrad:
                part, out, adds = g, ws.scratch[f"{self.spec.prefix}dweight"], False
            else:
                part = g if single else (g[0].slice(0, start, n), *g[1:])
                out, adds = ws.outputs[name], self.adds
            a, b = (part, x) if self.oi else (x, part)
            self.multipliers["wgrad"](ws, a, b, out, self.how["wgrad"], None, out if adds else None)
            if self.whole_wgrad:
                return

    # --- the values that fprop multiplied -------------------------------------------------------------------

    def _decode_buffers(self) -> dict[str, Meta]:
        """Returns where codes are decoded to. Values of float16 operands may be rounded up beyond its largest
        number: they are float32, and so is what they are multiplied by."""
        p, made, wide = self.spec.prefix, dict[str, Meta](), self.dtype is float16
        own: dict[str, Any] = {"w": ("dgrad", self.needs_x), "x": ("wgrad", self.needs_w)}
        for operand, (gemm, wanted) in own.items():
            if wanted and gemm in self.decoded:
                codes, scales = self.shapes(*self.operands[f"{operand}_q"])
                made[f"{p}{operand}_values"] = Meta(codes, float32 if wide else self.dtype)
                made[f"{p}{operand}_value_scales"] = Meta(scales, float32)
                if wide:
                    out = (self.m, self.k) if operand == "w" else self._weight_shape(max(self.spec.segments))
                    made[f"{p}{gemm}_sums"] = Meta(out, float32)
                    made[f"{p}g_wide"] = Meta((self.m, self.n), float32)
        return made

    def _values(self, ws: WorkingSet, operand: str) -> ArrayView:
        """Returns what the codes of fprop's "x" or "w" stand for, (rows, contraction), in the layer's
        dtype."""
        name, p = f"{operand}_q", self.spec.prefix
        rows, columns, own = self.operands[name]
        codes, scale_inv, _ = self._operand(name, ws.inputs if name in self.cached else ws.saved, ws.saved)
        grid, tile = (
            self.grid(scale_inv, own),
            tuple(t or n for t, n in zip(own.tile, codes.shape, strict=True)),
        )
        # of blocks there may be more scales than tiles, for the tensor cores
        tiles = -(-codes.shape[0] // tile[0]), -(-codes.shape[1] // tile[1])
        scales = ws.scratch[f"{p}{operand}_value_scales"].reshape(-1).slice(0, 0, tiles[0] * tiles[1])
        ws.kernels.copy(grid.slice(0, 0, tiles[0]).slice(1, 0, tiles[1]), scales.reshape(*tiles), ws.stream)
        values = ws.scratch[f"{p}{operand}_values"]
        ws.kernels.dequantize(codes, values, scales, own.format, tile, ws.stream)
        return values.slice(0, 0, rows).slice(1, 0, columns)

    def _multiply_values(
        self,
        ws: WorkingSet,
        gemm: str,
        a: Any,
        b: Any,
        out: ArrayView,
        layout: Any,
        addend: ArrayView | None = None,
    ) -> None:
        """out = a b (+ addend), as ``layout`` says, of g and values."""
        k, space = ws.kernels, ws.scratch["workspace"]
        if self.dtype is not float16:
            k.gemm(a, b, out, layout, None, addend, space, ws.stream)
            return
        wide = ws.scratch[f"{self.spec.prefix}g_wide"]
        pair = []
        for side in (a, b):
            if side.dtype is float16:
                side, narrow = wide.reshape(-1).first(side.shape), side
                k.copy(narrow, side, ws.stream)
            pair.append(side)
        sums = ws.scratch[f"{self.spec.prefix}{gemm}_sums"].reshape(-1)
        sums = sums.first(out.shape)
        k.gemm(*pair, sums, layout, None, None, space, ws.stream)
        k.scale_product(sums, out, None, None, None, addend, ws.stream)

    def _wgrads_of_values(self, ws: WorkingSet, g: Any) -> None:
        """dW = g^T x, segment by segment, with x as fprop multiplied it."""
        for a, b, out, addend in self._segments(ws, g, self._values(ws, "x")):
            self._multiply_values(ws, "wgrad", a, b, out, "tn", addend)

    # --- helpers --------------------------------------------------------------------------------------------

    def _backward(self) -> tuple[str, ...]:
        """Returns the operands of forward that backward reads."""
        own = self.backward_operands
        return (own["x"],) * self.needs_w + (own["w"],) * self.needs_x

    def _into(self, ws: WorkingSet, operand: str) -> Pair:
        """Returns where forward casts "x" or "w" to."""
        return ws.saved if operand in self.kept_first else ws.scratch, ws.saved

    def _metas(self, *operands: str) -> dict[str, Meta]:
        """Returns the arrays of these operands, by name."""
        made: dict[str, Meta] = {}
        for operand in filter(self.operands.__contains__, operands):
            (codes, scales), (name, scale_name) = self.shapes(*self.operands[operand]), self.names[operand]
            made |= {name: Meta(codes, uint8), scale_name: Meta(scales, float32)}
        return made

    def _amax(self, operand: str) -> str | None:
        """Name of the amax output of "x", "w" or "g", None where there is none."""
        used = self.casts_g if operand == "g" else f"{operand}_q" not in self.cached
        needs = used and self.quantizers[operand].needs_amax
        return f"{self.spec.prefix}{operand}_amax" if needs else None

    def _operand(self, operand: str, views: Arrays, saved: Arrays) -> Operand:
        """Returns an operand of a GEMM in ``views``; scales that both orientations share may be in
        ``saved``."""
        name, scale_name = self.names[operand]
        scales = saved if scale_name in self.in_saved else views
        return views[name], scales[scale_name], self.operands[operand][2]


def unsupported(argument: str, got: object, wanted: str) -> UnsupportedError:
    """Returns the refusal of a recipe that asks for something no kernel does."""
    return UnsupportedError("recipe", argument, got, wanted)
