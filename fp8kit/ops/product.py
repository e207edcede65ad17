"""The three products of one weight: fprop y = x W^T, dgrad dx = g W, wgrad dW = g^T x.

Every layer with a weight is made of this: ``linear`` is one of them, ``norm_linear`` puts a normalisation
before it, ``norm_mlp`` holds two. ``Product`` is what they see of it, and multiplies the operands as they
are, in high precision; how quantised ones are stored and multiplied is said in ``product_quantized``, of
which there is a class for each granularity of scales. ``ops.products`` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8kit import formats
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import Cast
from fp8kit.collectives import Collectives
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import DType, int64
from fp8kit.inspection import Watch
from fp8kit.quantization import Quantization
from fp8kit.spec import Meta, Metas, WorkingSet

# what an operand, or a GEMM's result, extends over, of m rows, n output and k input features, or the lines of
# an operand
_DIMENSIONS = {"x": "mk", "w": "nk", "g": "mn", "output": "mn", "dgrad": "mk", "wgrad": "nk"}
_DIMENSIONS |= {"x_q": "k", "w_q": "k", "g_q": "n", "w_qt": "n", "g_qt": "m", "x_qt": "m"}


@dataclass(frozen=True)
class ProductSpec:
    """Static facts of one weight.

    ``segments``: output features of each weight segment, in order; their concatenation along the output
    dimension is W. ``layout``: "oi", segments are (out, in) as in PyTorch and Transformer Engine, or "io",
    (in, out) as in JAX. ``bias``: "none"; "add"; or "deferred": the bias is not added here (a later operation
    does), but its gradient, the column sums of g, is made here. ``fp8``: None for high precision.
    ``weight_cached``: the FP8 weight is an input (``weight_cast``'s outputs). ``prefix`` of names.
    ``input_cached``: so is the FP8 input, under the names and in the shapes that the weight would have, x for
    w: ``linear`` alone takes it. ``watch``: what the inspector wants to see of it (``product_watched``).

    ``parallel``: None; or "column" or "row": this is one rank's part of the weight, of its output features or
    of its input features, and ``group`` the ``collectives`` of all ranks. ``sequence``: the rows of x
    ("column") or of y ("row") are split over the ranks too. ``sums``: False leaves y ("row") and dx
    ("column") as each rank's term of the sum, which the caller makes; not with ``sequence``. ``label``: what
    errors of communication call the layer. See ``product_parallel``.

    ``main_grad``: None, the weights' gradients are of the weights' dtype and made anew; or the name of a
    dtype, "float32" or the weights' own: that of the buffers which the frontend hands to ``backward`` under
    the weights' names, and to which wgrad is added (``overwrite_grad``: put there instead). A float32 buffer
    gets the product's float32 sums unrounded, with one float32 addition; where wgrad of several segments is
    made at once (``Product.whole_wgrad``), or the buffer is of 16 bits, the product is rounded to the
    buffer's dtype before.
    """

    in_features: int
    segments: tuple[int, ...]
    layout: str = "oi"
    bias: str = "add"
    fp8: Quantization | None = None
    weight_cached: bool = False
    prefix: str = ""
    main_grad: str | None = None
    overwrite_grad: bool = False
    input_cached: bool = False
    watch: Watch | None = None
    parallel: str | None = None
    group: str = ""
    sequence: bool = False
    sums: bool = True
    label: str = ""

    @property
    def out_features(self) -> int:
        """Output features of all segments."""
        return sum(self.segments)


class Product:
    """The products of one weight for one number of rows; made by a plan, holds no data.

    ``needs_x``, ``needs_w``, ``needs_b``: whether the gradient of the input, of the weight, of the bias is
    wanted; of the latter two a segment's name is among ``needs``. In FP8 an operand is cast once to each
    orientation that a product wants, the contraction last (the tensor cores' "TN" form); what backward needs
    is kept so.

    ``fuses_cast``: whether the activation that computes the input can write it in FP8 (``x_cast``), once its
    scale or its amax is there. ``scales_local``: whether scales are those of blocks, which the kernels of
    activations find themselves, also of the output gradient (``g_cast``). ``fprop_reads_x``,
    ``wgrad_reads_x``, ``reads_g``: what is read in high precision: the input, by either product, and the
    output gradient. ``casts_g``: whether the latter is cast besides, to codes.
    """

    fuses_cast: bool = False
    scales_local: bool = False
    # the ranks that share what is multiplied, and which of "m", "n", "k" they have a part of each
    collectives: Collectives | None = None
    split = ""
    wgrad_first = False  # whether backward calls ``wgrad`` before ``dgrad``
    begins_dx = False  # whether ``dgrad`` leaves dx to ``finish``
    fprop_reads_x = wgrad_reads_x = reads_g = True
    casts_g = False

    def __init__(
        self, spec: ProductSpec, rows: int, dtype: DType, needs_x: bool, needs: Collection[str]
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.m, self.k, self.n = rows, spec.in_features, spec.out_features
        self.oi = spec.layout == "oi"
        # input -> where its segment begins, and its output features
        parts = [(sum(spec.segments[:i]), n) for i, n in enumerate(spec.segments)]
        self.weights = {f"{spec.prefix}weight{i}": part for i, part in enumerate(parts)}
        self.biases = {f"{spec.prefix}bias{i}": part for i, part in enumerate(parts) if spec.bias != "none"}
        self.needs_x, self.needs_w = needs_x, any(name in needs for name in self.weights)
        self.needs_b = any(name in needs for name in self.biases)
        self.grad_dtype = dtype if spec.main_grad is None else formats.dtype(spec.main_grad)
        self.adds = spec.main_grad is not None and not spec.overwrite_grad  # wgrad is added to what is there
        # whether wgrad makes the gradients of all segments in one array, from which they are copied
        self.whole_wgrad = False

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def scales_known(self) -> bool:
        """Whether the scales of x and g are inputs, so that a fused kernel can write them in one pass
        (``x_cast``, ``g_cast``)."""
        return False

    def takes_amax(self, operand: str) -> bool:
        """Whether the amax of operand "x" or "g" is taken before its cast, so that a fused kernel can do
        it."""
        return False

    def own_amax(self, operand: str) -> str | None:
        """Returns the output that has the amax of "x", "w" or "g" alone once that is cast; None where there
        is none."""
        return None

    def check(self, operation: str, metas: Metas) -> None:
        """ShapeError or FormatError where weights, biases, FP8 inputs or ``main_grad`` do not fit."""
        if self.grad_dtype not in (self.dtype, formats.float32):
            raise FormatError(operation, "main_grad", self.grad_dtype.name, f"{self.dtype.name} or float32")
        self.check_weights(operation, metas)
        for name, (_, n) in self.biases.items():
            want(operation, name, metas, (n,), self.dtype)

    @property
    def y_rows(self) -> int:
        """Rows of the output: those of the input, but where ranks have parts of one of them."""
        return self.m

    def y_shape(self, x: Shape) -> Shape:
        """Shape of the output for an input of the shape ``x``; ShapeError where ranks cannot split it."""
        return *x[:-1], self.n

    def share(self, ws: WorkingSet, operand: str, amax: ArrayView | None) -> None:
        """Make amaxes those of all ranks, where these have parts of what they are of: "x", "w", "g" or a
        GEMM's result as a whole, or the lines of a GEMM's operand, "x_q" or another, along its
        contraction."""
        if self.split and self.split in _DIMENSIONS[operand]:
            assert self.collectives is not None and amax is not None
            self.collectives.all_reduce(amax, "max", ws.stream, self.spec.label)

    def fuses(self, gemm: str, kernels: Any) -> bool:
        """Whether this product's "fprop" is to be made with the activation behind it (``fprop_act``), or its
        "dgrad" with an activation's gradient (``dgrad_act``): where the policy of ``kernels`` names the
        kernel of the contract that does it."""
        return False

    @property
    def needs_rng(self) -> bool:
        """Whether casts draw random bits: by the input ``rng``, int64 (2,)."""
        return False

    def check_weights(self, operation: str, metas: Metas) -> None:
        """ShapeError or FormatError where weights, or what casts them, do not fit."""
        for name, (_, n) in self.weights.items():
            want(operation, name, metas, self._weight_shape(n), self.dtype)

    def outputs(self) -> dict[str, Meta]:
        """Returns the amax outputs."""
        return {}

    def scalars(self) -> dict[str, str]:
        """Returns what the casts of x and w need to give the same codes in a second pass: float32 [1] input
        of that pass -> the input or output of the first that holds it."""
        return {}

    def weight_outputs(self) -> dict[str, Meta]:
        """Returns what ``weight_cast`` makes: the FP8 weight in both orientations, its scales, and its amax
        where there is one."""
        raise NotImplementedError

    def saved(self) -> dict[str, Meta]:
        """FP8 operands that backward needs."""
        return {}

    def kept(self) -> tuple[str, ...]:
        """Inputs that backward reads."""
        return tuple(self.weights) if self.needs_x else ()

    def weight_names(self) -> tuple[str, ...]:
        """Returns the inputs that hold the weight: what a second ``fprop`` or ``save_weight`` reads."""
        return tuple(self.weights)

    def grads(self) -> dict[str, Meta]:
        """Gradients of weights and biases, and the amax of g where there is one."""
        made: dict[str, Meta] = {}
        for name, (_, n) in self.weights.items() if self.needs_w else ():
            made[name] = Meta(self._weight_shape(n), self.grad_dtype, self.adds)
        for name, (_, n) in self.biases.items() if self.needs_b else ():
            made[name] = Meta((n,), self.dtype)
        return made

    def backward_inputs(self) -> dict[str, Meta]:
        """Returns what backward reads of the output gradient's scaling: its scale, or its amax, where that is
        given."""
        return {}

    def scratch(self) -> dict[str, Meta]:
        """Forward's temporaries, the workspace aside."""
        return self._weight_buffer() | self._bias_buffer()

    def cast_scratch(self) -> dict[str, Meta]:
        """Temporaries of ``cast_weight``."""
        return {}

    def backward_scratch(self) -> dict[str, Meta]:
        """Backward's temporaries, the workspace aside."""
        return (self._weight_buffer() if self.needs_x else {}) | self._grad_buffers()

    def _grad_buffers(self) -> dict[str, Meta]:
        """Returns where the segments' gradients are made together."""
        p = self.spec.prefix
        out: dict[str, Meta] = {}
        if self.needs_w and self.whole_wgrad:
            out[f"{p}dweight"] = Meta(self._weight_shape(self.n), self.grad_dtype)
            if self.adds and not self.oi:
                out[f"{p}dpart"] = Meta(self._weight_shape(max(self.spec.segments)), self.grad_dtype)
        if self.needs_b and len(self.spec.segments) > 1:
            out[f"{p}dbias"] = Meta((self.n,), self.dtype)
        return out

    def workspace(self, k: Any) -> int:
        """Bytes of workspace for any of the three products and the casts around them. A plan asks before it
        asks for ``scratch`` and ``backward_scratch``: a product may learn here what the engine takes."""
        return max(int(k.gemm_workspace()), int(k.column_sum_workspace(self.m, self.n)))

    def bias_workspace(self, k: Any) -> dict[str, Meta]:
        """Returns where a cast of g sums the bias's gradient, apart from the products' workspace, which is
        larger and not needed then."""
        return {}

    # --- forward --------------------------------------------------------------------------------------------

    def x_cast(self, ws: WorkingSet) -> Cast:
        """Returns where a fused kernel writes this product's input (``fuses_cast``)."""
        raise NotImplementedError

    def cast_x(self, ws: WorkingSet, x: ArrayView, amax_known: bool = False) -> None:
        """Cast the input, h (M, K); nothing in high precision. ``amax_known``: ``{prefix}x_amax`` already
        holds it (a fused kernel)."""

    def cast_weight(self, ws: WorkingSet) -> None:
        """Cast all weight segments into one buffer, one of ``ws.outputs``: ``weight_outputs`` by name; the
        transpose may be left out."""
        raise NotImplementedError

    def measure(self, ws: WorkingSet, x: ArrayView) -> None:
        """Max-accumulate the amaxes of the input, h (M, K), and of the weight into their outputs, where there
        are such."""

    def measure_weight(self, ws: WorkingSet) -> None:
        """Max-accumulate the weight's amax into its output, where there is one and the weight is not
        cached."""

    def fprop(
        self, ws: WorkingSet, x: ArrayView | None, y: ArrayView, addend: ArrayView | None = None
    ) -> None:
        """y = x W^T (+ bias) (+ ``addend``, like y). ``x``, h (M, K), is read in high precision only; in FP8
        it has been cast by ``cast_x`` or a fused kernel, and may be None."""
        bias, weight, space = self._bias(ws), self._whole_weight(ws), ws.scratch["workspace"]
        ws.kernels.gemm(x, weight, y, "nt" if self.oi else "nn", bias, addend, space, ws.stream)

    def save_weight(self, ws: WorkingSet) -> None:
        """Do only the part of ``fprop`` that backward reads of the weight: its cast for dgrad; nothing in
        high precision."""

    # --- backward -------------------------------------------------------------------------------------------

    def g_cast(self, ws: WorkingSet) -> Cast:
        """Returns where a fused kernel writes this product's output gradient (``scales_known``,
        ``scales_local``)."""
        raise NotImplementedError

    def cast_g(self, ws: WorkingSet, g: ArrayView, with_bias: bool = True, amax_known: bool = False) -> None:
        """Cast the output gradient, h (M, N), and take the bias gradient (column sums) on the way. In high
        precision: the sums alone."""
        dbias = self._bias_sums(ws) if with_bias else None
        if dbias is not None:
            ws.kernels.sum_rows(g, dbias, ws.scratch["workspace"], ws.stream)
            self._part_bias_sums(ws, dbias)

    def dgrad(self, ws: WorkingSet, g: ArrayView | None, dx: ArrayView) -> None:
        """dx = g W. ``g`` is read in high precision only, and may be None in FP8."""
        weight, space = self._whole_weight(ws), ws.scratch["workspace"]
        ws.kernels.gemm(g, weight, dx, "nn" if self.oi else "nt", None, None, space, ws.stream)

    def finish(self, ws: WorkingSet, dx: ArrayView) -> None:
        """Wait for what ``dgrad`` began of ``dx``: before anything reads it, and after ``wgrad``; where
        ``begins_dx`` says so."""

    def wgrad(self, ws: WorkingSet, g: ArrayView | None, x: ArrayView | None) -> None:
        """dW = g^T x, segment by segment; added to what is there where the spec says so. ``g``, ``x`` are
        read in high precision only, and may be None in FP8, where nothing reads x's cast any more."""
        for a, b, out, addend in self._segments(ws, g, x):
            ws.kernels.gemm(a, b, out, "tn", None, addend, ws.scratch["workspace"], ws.stream)

    # --- helpers --------------------------------------------------------------------------------------------

    def _segments(self, ws: WorkingSet, g: Any, x: Any) -> Iterator[tuple[Any, Any, ArrayView, Any]]:
        """Yields the operands of each segment's dW, where it goes, and what is added to it."""
        for name, (start, n) in self.weights.items():
            part, out = g if len(self.weights) == 1 else g.slice(1, start, n), ws.outputs[name]
            yield *((part, x) if self.oi else (x, part)), out, out if self.adds else None

    def _weight_shape(self, n: int) -> tuple[int, int]:
        """Shape of a weight of n output features."""
        return (n, self.k) if self.oi else (self.k, n)

    def _bias(self, ws: WorkingSet) -> ArrayView | None:
        """Returns the bias that fprop adds, of all segments."""
        return self._whole(ws, self.biases, "bias", 0) if self.spec.bias == "add" else None

    def _bias_sums(self, ws: WorkingSet) -> ArrayView | None:
        """Returns where the bias gradient of all segments goes, None where none is wanted."""
        if not self.needs_b:
            return None
        if len(self.biases) > 1:
            return ws.scratch[f"{self.spec.prefix}dbias"]
        (name,) = self.biases
        return ws.outputs[name]

    def _part_bias_sums(self, ws: WorkingSet, dbias: ArrayView) -> None:
        """Copy the segments' bias gradients from where they were made together."""
        if len(self.biases) > 1:
            for name, (start, n) in self.biases.items():
                ws.kernels.copy(dbias.slice(0, start, n), ws.outputs[name], ws.stream)

    def _part_weights(self, ws: WorkingSet, whole: ArrayView) -> None:
        """Bring the segments' weight gradients from where they were made together (``whole_wgrad``)."""
        k, stream = ws.kernels, ws.stream
        for name, (start, n) in self.weights.items():
            part, out = whole.slice(0 if self.oi else 1, start, n), ws.outputs[name]
            if not self.adds:
                k.copy(part, out, stream)
                continue
            if not self.oi:  # columns of a matrix; sums take what lies together
                dense = ws.scratch[f"{self.spec.prefix}dpart"]
                part, strided = ArrayView(dense.ptr, out.shape, out.dtype, dense.device, dense.owner), part
                k.copy(strided, part, stream)
            k.add(out, part, out, stream)

    def _whole_weight(self, ws: WorkingSet) -> ArrayView:
        """Returns the whole weight, (N, K) or (K, N) by layout; scratch: ``_weight_buffer``."""
        return self._whole(ws, self.weights, "weight", 0 if self.oi else 1)

    def _weight_buffer(self) -> dict[str, Meta]:
        """Returns where the weight's segments are copied to lie side by side."""
        several = len(self.spec.segments) > 1
        return {f"{self.spec.prefix}weight": Meta(self._weight_shape(self.n), self.dtype)} if several else {}

    def _bias_buffer(self) -> dict[str, Meta]:
        """Likewise the bias'."""
        several = self.spec.bias == "add" and len(self.spec.segments) > 1
        return {f"{self.spec.prefix}bias": Meta((self.n,), self.dtype)} if several else {}

    def _whole(
        self, ws: WorkingSet, segments: Mapping[str, tuple[int, int]], buffer: str, dim: int
    ) -> ArrayView:
        """Returns the segments as one array: as they are when they lie side by side in memory, else copied
        into the scratch ``buffer``."""
        if len(segments) == 1:
            (name,) = segments
            return ws.inputs[name]
        parts = [ws.inputs[name] for name in segments]
        whole = side_by_side(parts, dim)
        if whole is None:
            whole = ws.scratch[f"{self.spec.prefix}{buffer}"]
            for part, (start, n) in zip(parts, segments.values(), strict=True):
                ws.kernels.copy(part, whole.slice(dim, start, n), ws.stream)
        return whole


def side_by_side(parts: Sequence[ArrayView], dim: int) -> ArrayView | None:
    """Returns the parts along ``dim`` as one array over their own memory, None where they do not lie so."""
    first = parts[0]
    ptr = first.ptr
    for part in parts:
        if part.ptr != ptr or part.owner is not first.owner or dim:
            return None
        ptr += part.nbytes
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return ArrayView(first.ptr, shape, first.dtype, first.device, first.owner)


def want(
    operation: str, name: str, metas: Metas, shape: tuple[int | None, ...] | None = None, *dtypes: DType
) -> Meta:
    """Returns the meta of an input that must be there: of this shape (None: any; None in it: any extent) and
    of one of these dtypes, if some are named; ShapeError or FormatError otherwise."""
    meta, kinds = metas.get(name), " or ".join(kind.name for kind in dtypes)
    wanted = "an array"
    if shape is not None:
        extents = ", ".join("any" if n is None else str(n) for n in shape)
        wanted = f"shape ({extents}{',' if len(shape) == 1 else ''})"
    if meta is None:
        raise ShapeError(operation, name, None, f"{wanted}, {kinds}" if kinds else wanted)
    fits = shape is None or len(meta.shape) == len(shape)
    if not fits or any(w is not None and w != n for n, w in zip(meta.shape, shape or (), strict=False)):
        raise ShapeError(operation, name, f"shape {meta.shape}", wanted)
    if dtypes and meta.dtype not in dtypes:
        raise FormatError(operation, name, meta.dtype.name, kinds)
    return meta


def want_rows(operation: str, name: str, metas: Metas, columns: int) -> Meta:
    """Returns the meta of a high-precision input with this last dimension; ShapeError or FormatError
    otherwise."""
    meta = metas.get(name)
    if meta is None or len(meta.shape) < 1 or meta.shape[-1] != columns:
        got = None if meta is None else f"shape {meta.shape}"
        raise ShapeError(operation, name, got, f"a last dimension of {columns}")
    return want(operation, name, metas, None, *formats.HIGH_PRECISION)


def row_count(meta: Meta) -> int:
    """Rows of an array seen as a matrix: the product of its leading dimensions."""
    return math.prod(meta.shape[:-1])


def want_rng(operation: str, metas: Metas) -> None:
    """Refuse an input ``rng`` that is neither int64 (2,), seed and offset, nor (3,), with the number of the
    part besides."""
    meta = metas.get("rng")
    want(operation, "rng", metas, (2,) if meta is None or meta.shape != (3,) else (3,), int64)
