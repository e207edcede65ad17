"""The three products of one weight: fprop y = x W^T, dgrad dx = g W, wgrad dW = g^T x.

Every layer with a weight is made of this: ``linear`` is one of them, ``norm_linear`` puts a normalisation before it, ``norm_mlp`` holds
two. In FP8 each product takes both operands with the contraction last (the tensor cores' "TN" form), so x, W and g are cast
to up to two orientations; what backward needs is kept in FP8 once, in the orientation that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import Cast
from fp8kit.errors import FormatError, ShapeError, expected
from fp8kit.formats import DType, float32, uint8
from fp8kit.ops.quant import Fp8, pad, quantize_operand
from fp8kit.spec import Meta, Metas, Views

SLOT = 4  # float32 numbers from one scale to the next: cuBLASLt takes scale pointers of 16-byte alignment


@dataclass(frozen=True)
class ProductSpec:
    """Static facts of one weight.

    ``segments``: output features of each weight segment, in order; their concatenation along the output dimension is W. ``layout``:
    "oi", segments are (out, in) as in PyTorch and Transformer Engine, or "io", (in, out) as in JAX. ``bias``: "none"; "add";
    or "deferred": the bias is not added here (a later operation does), but its gradient, the column sums of g, is made here.
    ``fp8``: None for high precision. ``weight_cached``: the FP8 weight is an input (``weight_cast``'s outputs). ``prefix`` of names.
    """

    in_features: int
    segments: tuple[int, ...]
    layout: str = "oi"
    bias: str = "add"
    fp8: Fp8 | None = None
    weight_cached: bool = False
    prefix: str = ""

    @property
    def out_features(self) -> int:
        """Output features of all segments."""
        return sum(self.segments)


class Product:
    """The products of one weight for one number of rows; made by a plan, holds no data.

    ``needs_x``, ``needs_w``, ``needs_b``: whether the gradient of the input, of the weight, of the bias is wanted.
    """

    def __init__(self, spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs_w: bool, needs_b: bool) -> None:
        self.spec = spec
        self.dtype = dtype
        self.m, self.k, self.n = rows, spec.in_features, spec.out_features
        self.mp, self.kp, self.np = pad(self.m), pad(self.k), pad(self.n)
        self.needs_x, self.needs_w, self.needs_b = needs_x, needs_w, needs_b and spec.bias != "none"
        self.starts = [sum(spec.segments[:i]) for i in range(len(spec.segments))]
        p, count = spec.prefix, len(spec.segments)
        self.weights = [f"{p}weight{i}" for i in range(count)]
        self.biases = [f"{p}bias{i}" for i in range(count)] if spec.bias != "none" else []
        # FP8 wgrad of a segment reads whole blocks of 16 rows of g^T: only aligned segments can be multiplied one by one
        self.whole_wgrad = spec.fp8 is not None and count > 1 and any(n % 16 for n in spec.segments)

    # --- what there is ------------------------------------------------------------------------------------------------

    def check(self, operation: str, metas: Metas) -> None:
        """ShapeError or FormatError where weights, biases or FP8 inputs do not fit."""
        s, p = self.spec, self.spec.prefix
        for name, n in zip(self.weights, s.segments, strict=True):
            want(operation, name, metas, (n, self.k) if s.layout == "oi" else (self.k, n), self.dtype)
        for name, n in zip(self.biases, s.segments, strict=s.bias != "none"):
            want(operation, name, metas, (n,), self.dtype)
        if s.fp8 is None:
            return
        if s.fp8.x.source == "scale":
            want(operation, f"{p}x_scale", metas, (1,), float32)
        if s.fp8.x.source == "amax":
            want(operation, f"{p}x_amax_in", metas, (1,), float32)
        if s.weight_cached:
            want(operation, f"{p}w_q", metas, (self.np, self.kp), uint8)
            want(operation, f"{p}w_qt", metas, (self.kp, self.np), uint8)
            want(operation, f"{p}w_scale_inv", metas, (1,), float32)
        elif s.fp8.w.source == "scale":
            want(operation, f"{p}w_scale", metas, (1,), float32)
        elif s.fp8.w.source == "amax":
            want(operation, f"{p}w_amax_in", metas, (1,), float32)

    def outputs(self) -> dict[str, Meta]:
        """The amax outputs."""
        p, f = self.spec.prefix, self.spec.fp8
        if f is None:
            return {}
        out = {f"{p}x_amax": Meta((1,), float32, zero=True)}
        if not self.spec.weight_cached:
            out[f"{p}w_amax"] = Meta((1,), float32, zero=True)
        return out

    def saved(self) -> dict[str, Meta]:
        """FP8 operands that backward needs."""
        p = self.spec.prefix
        out: dict[str, Meta] = {}
        if self.spec.fp8 is not None:
            if self.needs_w:
                out[f"{p}x_qt"] = Meta((self.kp, self.mp), uint8)
            if self.needs_x and not self.spec.weight_cached:
                out[f"{p}w_qt"] = Meta((self.kp, self.np), uint8)
            if self.needs_w or self.needs_x:
                out[f"{p}scale_inv"] = Meta((2 * SLOT,), float32)
        return out

    def kept(self) -> tuple[str, ...]:
        """Inputs that backward reads."""
        p = self.spec.prefix
        if self.spec.fp8 is None:
            return tuple(self.weights) if self.needs_x else ()
        return (f"{p}w_qt", f"{p}w_scale_inv") if self.spec.weight_cached and self.needs_x else ()

    def grads(self) -> dict[str, Meta]:
        """Gradients of weights and biases, and the amax of g."""
        s = self.spec
        out: dict[str, Meta] = {}
        if self.needs_w:
            out |= {
                name: Meta((n, self.k) if s.layout == "oi" else (self.k, n), self.dtype)
                for name, n in zip(self.weights, s.segments, strict=True)
            }
        if self.needs_b:
            out |= {name: Meta((n,), self.dtype) for name, n in zip(self.biases, s.segments, strict=True)}
        if s.fp8 is not None and (self.needs_x or self.needs_w):
            out[f"{s.prefix}g_amax"] = Meta((1,), float32, zero=True)
        return out

    def scratch(self) -> dict[str, Meta]:
        """Forward's temporaries, the workspace aside."""
        p, s = self.spec.prefix, self.spec
        out: dict[str, Meta] = {}
        if s.fp8 is not None:
            out[f"{p}x_q"] = Meta((self.mp, self.kp), uint8)
            if not s.weight_cached:
                out[f"{p}w_q"] = Meta((self.np, self.kp), uint8)
            out[f"{p}scales"] = Meta((4 * SLOT,), float32)
        elif len(s.segments) > 1:
            out[f"{p}weight"] = Meta((self.n, self.k) if s.layout == "oi" else (self.k, self.n), self.dtype)
        if s.bias == "add" and len(s.segments) > 1:
            out[f"{p}bias"] = Meta((self.n,), self.dtype)
        return out

    def backward_scratch(self) -> dict[str, Meta]:
        """Backward's temporaries, the workspace aside."""
        p, s = self.spec.prefix, self.spec
        out: dict[str, Meta] = {}
        if s.fp8 is not None:
            if self.needs_x:
                out[f"{p}g_q"] = Meta((self.mp, self.np), uint8)
            if self.needs_w:
                out[f"{p}g_qt"] = Meta((self.np, self.mp), uint8)
            out[f"{p}g_scales"] = Meta((2 * SLOT,), float32)
        elif len(s.segments) > 1 and self.needs_x:
            out[f"{p}weight"] = Meta((self.n, self.k) if s.layout == "oi" else (self.k, self.n), self.dtype)
        if self.needs_w and self.whole_wgrad:
            out[f"{p}dweight"] = Meta((self.n, self.k) if s.layout == "oi" else (self.k, self.n), self.dtype)
        if self.needs_b and len(s.segments) > 1:
            out[f"{p}dbias"] = Meta((self.n,), self.dtype)
        return out

    def workspace(self, k: Any) -> int:
        """Bytes of workspace for any of the three products and the casts around them."""
        if self.spec.fp8 is None:
            return max(int(k.gemm_workspace()), int(k.column_sum_workspace(self.m, self.n)))
        shapes = ((self.m, self.n), (self.m, self.k), (self.n, self.k), (self.k, self.n))
        return max(*(int(k.fp8_gemm_workspace(*shape)) for shape in shapes), int(k.quantize_transpose_workspace(self.m, self.n)))

    # --- forward ------------------------------------------------------------------------------------------------------

    def x_cast(self, inputs: Views, outputs: Views, saved: Views, scratch: Views) -> Cast:
        """Where a fused kernel writes this product's input under delayed scaling."""
        p, f = self.spec.prefix, self.spec.fp8
        assert f is not None
        return Cast(
            f.x.format,
            scratch[f"{p}x_q"],
            saved.get(f"{p}x_qt"),
            _given(inputs, f"{p}x_scale"),
            self._scale_inv(saved, scratch, 0),
            outputs.get(f"{p}x_amax"),
        )

    def cast_x(
        self, k: Any, x: ArrayView, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int, amax_known: bool = False
    ) -> None:
        """Cast the input, h (M, K). ``amax_known``: ``{prefix}x_amax`` already holds it (taken by a fused kernel)."""
        p, f = self.spec.prefix, self.spec.fp8
        assert f is not None
        scale, amax = self._source(f.x.source, "x", inputs, outputs, scratch)
        quantize_operand(
            k,
            f.x,
            x,
            scratch[f"{p}x_q"],
            saved.get(f"{p}x_qt"),
            scale,
            self._scale_inv(saved, scratch, 0),
            amax,
            None,
            None,
            stream,
            amax_known,
        )

    def cast_weight(
        self,
        k: Any,
        inputs: Views,
        outputs: Views,
        w_q: ArrayView,
        w_qt: ArrayView | None,
        scale_inv: ArrayView,
        scratch: Views,
        stream: int,
    ) -> None:
        """Cast all weight segments into one buffer: w_q (Np, Kp), and its transpose w_qt (Kp, Np)."""
        s, f = self.spec, self.spec.fp8
        assert f is not None
        scale, amax = self._source(f.w.source, "w", inputs, outputs, scratch)
        assert scale is not None
        parts = [_given(inputs, name) for name in self.weights]
        if f.w.source == "current":
            for part in parts:
                k.amax(part, amax, part.shape, stream)
        if f.w.source != "scale":
            k.scale_from_amax(amax, scale, scale_inv, f.w.format.max, f.w.power_2, f.w.epsilon, 3.4028234663852886e38, stream)
        for i, (part, start) in enumerate(zip(parts, self.starts, strict=True)):
            rows = (self.np if i + 1 == len(parts) else start + s.segments[i]) - start
            q = w_q.slice(0, start, rows)
            q_t = None if w_qt is None else w_qt.slice(1, start, rows)
            if s.layout == "io":
                q, q_t = q_t, q  # type: ignore[assignment]
            k.quantize_transpose(
                part, Cast(f.w.format, q, q_t, scale, scale_inv, amax if f.w.source == "scale" else None), None, None, stream
            )

    def measure(self, k: Any, x: ArrayView, inputs: Views, outputs: Views, stream: int) -> None:
        """Max-accumulate the amaxes of the input, h (M, K), and of the weight into their outputs."""
        p = self.spec.prefix
        k.amax(x, outputs[f"{p}x_amax"], x.shape, stream)
        self.measure_weight(k, inputs, outputs, stream)

    def measure_weight(self, k: Any, inputs: Views, outputs: Views, stream: int) -> None:
        """Max-accumulate the weight's amax into its output, where the weight is not cached."""
        for name in () if self.spec.weight_cached else self.weights:
            part = _given(inputs, name)
            k.amax(part, outputs[f"{self.spec.prefix}w_amax"], part.shape, stream)

    def fprop(self, k: Any, x: ArrayView, inputs: Views, outputs: Views, saved: Views, scratch: Views, y: ArrayView, stream: int) -> None:
        """y = x W^T (+ bias). ``x``, h (M, K), is read in high precision only; in FP8 it has been cast by ``cast_x`` or a fused kernel."""
        p, s, f = self.spec.prefix, self.spec, self.spec.fp8
        bias = self._joined(k, self.biases, inputs, scratch.get(f"{p}bias"), 0, stream) if s.bias == "add" else None
        if f is None:
            oi = s.layout == "oi"
            weight = self._joined(k, self.weights, inputs, scratch.get(f"{p}weight"), 0 if oi else 1, stream)
            k.gemm(x, weight, y, "nt" if oi else "nn", bias, False, scratch["workspace"], stream)
            return
        if s.weight_cached:
            w_q, w_inv = _given(inputs, f"{p}w_q"), _given(inputs, f"{p}w_scale_inv")
        else:
            w_q, w_inv = _given(scratch, f"{p}w_q"), self._scale_inv(saved, scratch, 1)
            self.cast_weight(k, inputs, outputs, w_q, saved.get(f"{p}w_qt"), w_inv, scratch, stream)
        k.fp8_gemm(
            scratch[f"{p}x_q"],
            w_q,
            y,
            f.x.format,
            f.w.format,
            self._scale_inv(saved, scratch, 0),
            w_inv,
            bias,
            False,
            f.fprop_fast,
            scratch["workspace"],
            stream,
        )

    # --- backward -----------------------------------------------------------------------------------------------------

    def g_cast(self, kept: Views, grads: Views, scratch: Views) -> Cast:
        """Where a fused kernel writes this product's output gradient under delayed scaling."""
        p, f = self.spec.prefix, self.spec.fp8
        assert f is not None
        inv = _slot(scratch, f"{p}g_scales", 0)
        return Cast(f.g.format, scratch.get(f"{p}g_q"), scratch.get(f"{p}g_qt"), _given(kept, f"{p}g_scale"), inv, grads.get(f"{p}g_amax"))

    def cast_g(
        self, k: Any, g: ArrayView, kept: Views, grads: Views, scratch: Views, stream: int, with_bias: bool = True, amax_known: bool = False
    ) -> None:
        """Cast the output gradient, h (M, N), and take the bias gradient (column sums) on the way. In high precision: the sums alone."""
        p, f = self.spec.prefix, self.spec.fp8
        one = len(self.spec.segments) == 1
        with_bias = with_bias and self.needs_b
        dbias = (grads[self.biases[0]] if one else scratch[f"{p}dbias"]) if with_bias else None
        if f is not None and (self.needs_x or self.needs_w):
            inv, own = _slot(scratch, f"{p}g_scales", 0), _slot(scratch, f"{p}g_scales", 1)
            scale = _given(kept, f"{p}g_scale") if f.g.source == "scale" else own
            amax = _given(kept, f"{p}g_amax_in") if f.g.source == "amax" else grads.get(f"{p}g_amax")
            quantize_operand(
                k,
                f.g,
                g,
                scratch.get(f"{p}g_q"),
                scratch.get(f"{p}g_qt"),
                scale,
                inv,
                amax,
                dbias,
                scratch["workspace"],
                stream,
                amax_known,
            )
        elif dbias is not None:
            k.sum_rows(g, dbias, scratch["workspace"], stream)
        if with_bias and not one:
            for name, start, n in zip(self.biases, self.starts, self.spec.segments, strict=True):
                k.copy(_given(scratch, f"{p}dbias").slice(0, start, n), grads[name], stream)

    def dgrad(self, k: Any, g: ArrayView, kept: Views, saved: Views, scratch: Views, dx: ArrayView, stream: int) -> None:
        """dx = g W. ``g`` is read in high precision only."""
        p, s, f = self.spec.prefix, self.spec, self.spec.fp8
        if f is None:
            oi = s.layout == "oi"
            weight = self._joined(k, self.weights, kept, scratch.get(f"{p}weight"), 0 if oi else 1, stream)
            k.gemm(g, weight, dx, "nn" if oi else "nt", None, False, scratch["workspace"], stream)
            return
        w_qt = kept[f"{p}w_qt"] if s.weight_cached else saved[f"{p}w_qt"]
        w_inv = kept[f"{p}w_scale_inv"] if s.weight_cached else _slot(saved, f"{p}scale_inv", 1)
        k.fp8_gemm(
            scratch[f"{p}g_q"],
            w_qt,
            dx,
            f.g.format,
            f.w.format,
            _slot(scratch, f"{p}g_scales", 0),
            w_inv,
            None,
            False,
            f.dgrad_fast,
            scratch["workspace"],
            stream,
        )

    def wgrad(self, k: Any, g: ArrayView, x: ArrayView | None, saved: Views, grads: Views, scratch: Views, stream: int) -> None:
        """dW = g^T x, segment by segment. ``g`` and ``x`` are read in high precision only."""
        p, s, f = self.spec.prefix, self.spec, self.spec.fp8
        oi = s.layout == "oi"
        if self.whole_wgrad:
            whole = _given(scratch, f"{p}dweight")
            self._wgrad_fp8(k, _given(scratch, f"{p}g_qt"), saved, scratch, whole, stream)
            for name, start, n in zip(self.weights, self.starts, s.segments, strict=True):
                k.copy(whole.slice(0 if oi else 1, start, n), grads[name], stream)
            return
        for name, start, n in zip(self.weights, self.starts, s.segments, strict=True):
            out = _given(grads, name)
            if f is None:
                part = g if len(s.segments) == 1 else g.slice(1, start, n)
                assert x is not None
                a, b = (part, x) if oi else (x, part)
                k.gemm(a, b, out, "tn", None, False, scratch["workspace"], stream)
            else:
                g_qt = _given(scratch, f"{p}g_qt")
                part = g_qt if len(s.segments) == 1 else g_qt.slice(0, start, n)
                self._wgrad_fp8(k, part, saved, scratch, out, stream)

    def _wgrad_fp8(self, k: Any, g_qt: ArrayView, saved: Views, scratch: Views, out: ArrayView, stream: int) -> None:
        p, f = self.spec.prefix, self.spec.fp8
        assert f is not None
        x_qt, x_inv = saved[f"{p}x_qt"], _slot(saved, f"{p}scale_inv", 0)
        g_inv, space = _slot(scratch, f"{p}g_scales", 0), scratch["workspace"]
        if self.spec.layout == "oi":
            k.fp8_gemm(g_qt, x_qt, out, f.g.format, f.x.format, g_inv, x_inv, None, False, f.wgrad_fast, space, stream)
        else:
            k.fp8_gemm(x_qt, g_qt, out, f.x.format, f.g.format, x_inv, g_inv, None, False, f.wgrad_fast, space, stream)

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
            return _given(inputs, f"{p}{operand}_scale"), outputs.get(f"{p}{operand}_amax")
        return own, _given(inputs, f"{p}{operand}_amax_in") if source == "amax" else outputs.get(f"{p}{operand}_amax")

    def _joined(self, k: Any, names: Iterable[str], views: Views, buffer: ArrayView | None, dim: int, stream: int) -> ArrayView:
        """The segments as one array: as they are when they lie side by side in memory, else copied into ``buffer``."""
        parts = [_given(views, name) for name in names]
        first = parts[0]
        if len(parts) == 1:
            return first
        assert buffer is not None
        if dim == 0:
            ptr = first.ptr
            for part in parts:
                if part.ptr != ptr or part.owner is not first.owner:
                    break
                ptr += part.nbytes
            else:
                return ArrayView(first.ptr, buffer.shape, first.dtype, first.device, first.owner)
        for part, start in zip(parts, self.starts, strict=True):
            k.copy(part, buffer.slice(dim, start, part.shape[dim]), stream)
        return buffer


def _given(views: Views, name: str) -> ArrayView:
    view = views.get(name)
    if view is None:
        raise ShapeError(expected("product", name, None, "an array"))
    return view


def _slot(views: Views, name: str, slot: int) -> ArrayView:
    """float32 [1]: a number of a small buffer whose numbers lie SLOT apart."""
    view = _given(views, name)
    return ArrayView(view.ptr + 4 * SLOT * slot, (1,), float32, view.device, view.owner)


def want(operation: str, name: str, metas: Metas, shape: tuple[int | None, ...], dtype: DType) -> Meta:
    """The meta of an input that must have this shape (None: any extent) and dtype; ShapeError or FormatError otherwise."""
    meta = metas.get(name)
    wanted = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
    if meta is None:
        raise ShapeError(expected(operation, name, "nothing", f"shape {wanted}, {dtype.name}"))
    if len(meta.shape) != len(shape) or any(w is not None and w != n for n, w in zip(meta.shape, shape, strict=True)):
        raise ShapeError(expected(operation, name, f"shape {meta.shape}", f"shape {wanted}"))
    if meta.dtype is not dtype:
        raise FormatError(expected(operation, name, meta.dtype.name, dtype.name))
    return meta


def want_rows(operation: str, name: str, metas: Metas, columns: int) -> Meta:
    """The meta of a high-precision input with this last dimension; ShapeError or FormatError otherwise."""
    meta = metas.get(name)
    if meta is None or len(meta.shape) < 1 or meta.shape[-1] != columns:
        raise ShapeError(expected(operation, name, "nothing" if meta is None else f"shape {meta.shape}", f"a last dimension of {columns}"))
    if meta.dtype not in formats.HIGH_PRECISION:
        raise FormatError(expected(operation, name, meta.dtype.name, ", ".join(d.name for d in formats.HIGH_PRECISION)))
    return meta


def row_count(meta: Meta) -> int:
    """Rows of an array seen as a matrix: the product of its leading dimensions."""
    rows = 1
    for n in meta.shape[:-1]:
        rows *= n
    return rows
