"""FP8 arrays: codes with their scaling, made by ``quantize`` and multiplied by ``@``.

``value = decode(code) * scale_inv``, one scale a tensor, a row or a block (Micikevicius et al. 2022, FP8
Formats for Deep Learning, for the scale of a tensor; DeepSeek-V3 technical report, 2024, 3.3.2, for 1x128 and
128x128 blocks; OCP Microscaling Formats 1.0 for mx_1x32).
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arguments import choice, flag, integer, shown
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends import dispatch
from fp8kit.backends.dispatch import CannotTake, block_shapes
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import E4M3, E5M2, Format
from fp8kit.quantization import TILES

_FLOAT32_MAX = formats.float32.max
_FLOATS = ("float32", "bfloat16", "float16", "float64")  # dtypes that are quantised
_QUANTISED = f"one of {', '.join(_FLOATS)}"
_WANTED = "a number format: fp8kit.E4M3 or another fp8kit.Format (fp8kit.recipe.Format is for recipes)"
_BOTH = "a Float8Tensor on both sides: quantize the other one first, or multiply with what dequantize() gives"


def quantize(
    x: Any,
    format: Format = E4M3,
    scale: Any = None,
    scaling: str = "tensor",
    rounding: str = "nearest",
    saturate: bool = True,
    rng: Any = None,
) -> Float8Tensor:
    """``encode(x * scale)`` as a Float8Tensor of x's library and device.

    * ``x``: array of float32, bfloat16, float16 or float64; its last dimension is a row, the leading ones are
      the rows. A float64 array is first rounded to float32.
    * ``scale``: float32, one for each tile: a number or 1 element ("tensor"), one a row ("row"), or the grid
      of blocks; positive and finite, and so must 1 / scale be in float32 (above 2^-128; of an array on a GPU
      nobody looks at the values). None: current scaling, ``format.max / amax`` (1 where amax is 0, Inf or
      NaN), rounded down to a power of two for the blocks and mx, whose scales are thus E8M0 values.
    * ``scaling``: "tensor", "row", "block_1x128", "block_128x128" or "mx_1x32" (rows x columns of a tile;
      tiles at the edges are smaller).
    * ``rounding``: "nearest" (ties to even), or "stochastic" with ``rng``, int64 (seed, offset) of
      Philox4x32-10, neither negative.
    * ``saturate``: beyond the largest finite value, and Inf, become it; else Inf, or NaN where the format has
      no Inf. NaN stays NaN.

    Raises FormatError for a dtype, scaling, rounding, scale or format that does not fit, ShapeError for a
    scale of another shape.
    """
    try:
        view = arrays.as_view(x, "quantize", "x")
    except FormatError:
        if not hasattr(x, "dtype") or str(x.dtype).removeprefix("torch.") in _FLOATS:
            raise
        raise FormatError("quantize", "x", x.dtype, _QUANTISED) from None
    if view.dtype.name not in _FLOATS:  # of the dtypes that arrays may have this takes few
        raise FormatError("quantize", "x", view.dtype.name, _QUANTISED)
    if not isinstance(format, Format):
        raise FormatError("quantize", "format", shown(format), _WANTED)
    saturate = flag("quantize", "saturate", saturate, FormatError)
    if not saturate and format.nan_code is None:
        raise FormatError("quantize", "saturate", f"False for {format}, which has no Inf and no NaN", "True")
    where = view.device
    state = _rng(rounding, rng, where)
    rows = arrays.contiguous(view).rows()
    tile, grid = _tiling(scaling, rows.shape)
    kernels, stream = dispatch.kernels(where), arrays.current_stream(where)
    scale_inv = arrays.empty(grid, formats.float32, where)
    if scale is None:
        factors = arrays.empty(grid, formats.float32, where)
        amax = arrays.zeros(grid, formats.float32, where)
        kernels.amax(rows, amax, tile, stream)
        blocks = scaling not in ("tensor", "row")
        # what a block's scale is where format.max / amax overflows: the largest value of x's dtype, as
        # Transformer Engine has it
        for_inf = min(view.dtype.max, _FLOAT32_MAX) if scaling.startswith("block") else _FLOAT32_MAX
        kernels.scale_from_amax(amax, factors, scale_inv, format.max, blocks, 0.0, for_inf, stream)
    else:
        factors = _scale(scale, grid, where)
    codes = arrays.empty(view.shape, formats.uint8, where)
    results = codes.reshape(*rows.shape), factors, scale_inv, None
    bits = 0 if state is None else 32
    kernels.quantize(rows, *results, format, tile, saturate, bits, state, stream)
    return Float8Tensor(arrays.to_library(codes, x), arrays.to_library(scale_inv, x), format, scaling)


class Float8Tensor:
    """Codes, their format and their scaling: an array of ``decode(data) * scale_inv``.

    * ``data``: uint8 of ``shape``, an array of the library that it came from; native float8 arrays are taken
      as their codes.
    * ``scale_inv``: float32, one a tile: (1,) for "tensor", (rows, 1) for "row", (ceil(rows / r),
      ceil(columns / c)) for r x c blocks, with all leading dimensions flattened into rows.
    * ``format``, ``scaling``: see ``quantize``.

    Nothing is copied. Comparison is by identity; compare ``data`` and ``scale_inv`` or dequantised values.
    Raises FormatError for data that are no codes of ``format`` and a ``scale_inv`` that is not float32,
    ShapeError for a ``scale_inv`` of the wrong size, for strides, and for two devices.
    """

    __array_ufunc__ = None  # NumPy leaves mixed operators to this class
    __slots__ = ("_codes", "_data", "_flipped", "_scale_inv", "format", "scale_inv", "scaling")

    def __init__(self, data: Any, scale_inv: Any, format: Format = E4M3, scaling: str = "tensor") -> None:
        codes = arrays.as_view(data, "Float8Tensor", "data")
        if not isinstance(format, Format):
            raise FormatError("Float8Tensor", "format", shown(format), _WANTED)
        native = codes.dtype is not formats.uint8
        if native and codes.dtype.format != format:
            wanted = f"uint8, or the float8 dtype of {format}"
            raise FormatError("Float8Tensor", "data", codes.dtype.name, wanted)
        if not codes.contiguous:
            raise ShapeError("Float8Tensor", "data", f"strides {codes.strides}", "C-contiguous")
        self._codes = codes.view(formats.uint8)
        self._data = arrays.to_library(self._codes, data) if native else data
        self._flipped = False
        self.format = format
        self.scaling = scaling
        grid = _tiling(scaling, self._codes.rows().shape, "Float8Tensor")[1]
        self._scale_inv = inverse = arrays.as_view(scale_inv, "Float8Tensor", "scale_inv")
        self.scale_inv = scale_inv
        if inverse.dtype is not formats.float32:
            raise FormatError("Float8Tensor", "scale_inv", inverse.dtype.name, "float32")
        if inverse.size != math.prod(grid) or not inverse.contiguous or inverse.device != codes.device:
            got = f"{inverse.shape}, strides {inverse.strides}, on {inverse.device}"
            wanted = f"{grid} for {scaling!r}, C-contiguous, on {codes.device}"
            raise ShapeError("Float8Tensor", "scale_inv", got, wanted)

    @property
    def shape(self) -> Shape:
        """Extent in elements."""
        return self._codes.shape[::-1] if self._flipped else self._codes.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._codes.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._codes.size

    @property
    def device(self) -> arrays.Device:
        """Where the codes live."""
        return self._codes.device

    @property
    def data(self) -> Any:
        """The codes, uint8; of a transposed tensor a strided view."""
        return arrays.to_library(self._view(), self._data) if self._flipped else self._data

    @property
    def T(self) -> Float8Tensor:
        """The transposed matrix over the same memory, as ``a @ b.T`` wants it. ShapeError unless
        2-dimensional."""
        if self.ndim != 2:
            raise ShapeError("Float8Tensor.T", "shape", self.shape, "2 dimensions")
        transposed = self._like(self._codes, self._scale_inv)
        transposed._flipped = not self._flipped
        return transposed

    def dequantize(self, dtype: Any = formats.float32) -> Any:
        """``decode(data) * scale_inv`` in float32, rounded to ``dtype`` (float32, bfloat16 or float16), in
        the data's library."""
        out = self._wide(formats.dtype(dtype, "dequantize", "dtype", formats.HIGH_PRECISION))
        return arrays.to_library(out.transpose(1, 0) if self._flipped else out, self._data)

    def matmul(self, other: Float8Tensor, dtype: Any = None, fast_accumulate: bool = False) -> Any:
        """The product of (..., K) and (K, N) as a high-precision array (..., N), accumulated in float32.

        Tensor cores want both operands' rows along K, so ``a @ b.T`` takes the memory as it is, any other
        orientation costs a copy; so do sizes that are no multiples of 16. ``dtype``: float32, bfloat16 or
        float16; by default float32 on the CPU, bfloat16 elsewhere. ``fast_accumulate``: let the tensor cores
        accumulate in their own width (with scales of tensors or rows).

        Scales of blocks: the block-scaled product (``block_gemm``) where the blocks of both run along K, not
        both are 128x128 and the device has it; else a product of the dequantised float32 operands, as exact,
        but with float32's speed and memory.

        Raises FormatError for formats other than E4M3 and E5M2, for E5M2 times E5M2, and for one operand
        scaled by rows and one by the tensor, or along K; ShapeError where the inner sizes differ.
        """
        if not isinstance(other, Float8Tensor):
            raise FormatError("matmul", "other", shown(other), _BOTH)
        fast_accumulate = flag("matmul", "fast_accumulate", fast_accumulate, FormatError)
        if other.ndim != 2 or self.ndim < 1 or self.shape[-1] != other.shape[0]:
            raise ShapeError("matmul", "shapes", f"{self.shape} @ {other.shape}", "(..., K) @ (K, N)")
        pair = (self.format, other.format)
        if any(f not in (E4M3, E5M2) for f in pair) or pair == (E5M2, E5M2):
            wanted = "E4M3 or E5M2 on each side, at most one E5M2"
            raise FormatError("matmul", "formats", f"{self.format} @ {other.format}", wanted)
        blocks = any(t.scaling not in ("tensor", "row") for t in (self, other))
        if self.scaling != other.scaling and not blocks:
            got = f"{self.scaling!r} @ {other.scaling!r}"
            raise FormatError("matmul", "scaling", got, "the same for both, or blocks")
        if self.scaling == "row" and not blocks and (self._flipped or not other._flipped):
            wanted = "a @ b.T with a and b scaled by rows"
            raise FormatError("matmul", "scaling", '"row" along the contraction', wanted)
        if self.device != other.device:
            raise FormatError("matmul", "other", other.device, f"an array on {self.device}")
        where = self.device
        default = formats.float32 if where.kind == "cpu" else formats.bfloat16
        kind = default if dtype is None else formats.dtype(dtype, "matmul", "dtype", formats.HIGH_PRECISION)
        kernels, stream = dispatch.kernels(where), arrays.current_stream(where)
        out = arrays.empty((*self.shape[:-1], other.shape[1]), kind, where)
        if not (out.size and self.shape[-1]):
            arrays.zero_(out)
        elif blocks:
            _block_product(self, other, out.rows(), kernels, stream)
        else:
            (a, scale_a), (b, scale_b) = (t._operand(kernels, stream) for t in (self, other.T))
            rows, how = out.rows(), (self.format, other.format, scale_a, scale_b)
            workspace = arrays.empty((kernels.fp8_gemm_workspace(*rows.shape),), formats.uint8, where)
            kernels.fp8_gemm(a, b, rows, *how, None, None, fast_accumulate, workspace, stream)
        return arrays.to_library(out, self._data)

    def __matmul__(self, other: object) -> Any:
        if isinstance(other, Float8Tensor) or hasattr(other, "shape"):
            return self.matmul(other)  # type: ignore[arg-type]
        return NotImplemented

    def __rmatmul__(self, other: object) -> Any:
        if hasattr(other, "shape"):
            raise FormatError("matmul", "self", shown(other), _BOTH)
        return NotImplemented

    def reshape(self, *shape: int) -> Float8Tensor:
        """The same codes under another shape (one -1 is worked out). Only tensor scaling may change the last
        dimension.

        ShapeError for another number of elements, a transposed tensor, or rows that would be cut or joined.
        """
        if self._flipped:
            raise ShapeError("Float8Tensor.reshape", "self", "a transposed tensor", "one in row-major order")
        codes = self._codes.reshape(*shape)
        if self.scaling != "tensor" and codes.shape[-1:] != self.shape[-1:]:
            wanted = f"last dimension {self.shape[-1:]} (scaling {self.scaling!r})"
            raise ShapeError("Float8Tensor.reshape", "shape", shape, wanted)
        return self._like(codes, self._scale_inv)

    def __getitem__(self, index: int | slice) -> Float8Tensor:
        """Part of the first dimension: an index, or a slice without a step. Blocks of scales are not cut:
        ShapeError."""
        # which NumPy calls an integer
        whole = isinstance(index, int | np.integer) and not isinstance(index, np.timedelta64)
        if (
            self._flipped
            or not self.ndim
            or not (whole or isinstance(index, slice))
            or self.scaling not in ("tensor", "row")
        ):
            transposed = ", transposed" if self._flipped else ""
            got = f"{index!r} of shape {self.shape}{transposed}, scaling {self.scaling!r}"
            wanted = 'an index or slice of dim 0, scaling "tensor" or "row"'
            raise ShapeError("Float8Tensor[...]", "index", got, wanted)
        count = self.shape[0]
        if isinstance(index, slice):
            start, stop, step = index.indices(count)
            if step != 1:
                raise ShapeError("Float8Tensor[...]", "step", step, "1")
            part = self._codes.slice(0, start, max(stop - start, 0))
        else:
            start = int(index) + (count if index < 0 else 0)
            if not 0 <= start < count:
                raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")
            part = self._codes.slice(0, start, 1).reshape(*self.shape[1:])
        scales = self._scale_inv
        if self.scaling == "row" and self.ndim > 1:
            each = math.prod(self.shape[1:-1])
            scales = scales.reshape(-1, 1).slice(0, start * each, part.rows().shape[0])
        return self._like(part, scales)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-dimensional Float8Tensor")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # NumPy would make an array of Python objects, element by element
        raise FormatError("__array__", "self", repr(self), "dequantize() for its values, data for its codes")

    def __dlpack__(self, **options: Any) -> object:
        kind = formats.dtype_of_format(self.format)
        native = kind is not None and kind.dlpack[1] == 8
        return (self._view().view(kind) if native and kind else self._view()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._codes.__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        """The same codes and scales in memory of their own."""
        copied = self._like(arrays.duplicate(self._codes), arrays.duplicate(self._scale_inv))
        copied._flipped = self._flipped
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "Float8Tensor cannot be pickled: it is memory by address; keep data and scale_inv with fk.save"
        )

    def __repr__(self) -> str:
        return f"Float8Tensor({self.shape}, {self.format}, scaling={self.scaling!r}, {self.device})"

    def _wide(self, kind: formats.DType) -> ArrayView:
        """The values as they lie in memory, not transposed."""
        rows = self._codes.rows()
        out = arrays.empty(self._codes.shape, kind, self.device)
        tile = _tiling(self.scaling, rows.shape)[0]
        how = self._scale_inv, self.format, tile, arrays.current_stream(self.device)
        dispatch.kernels(self.device).dequantize(rows, out.reshape(*rows.shape), *how)
        return out

    def _view(self) -> ArrayView:
        return self._codes.transpose(1, 0) if self._flipped else self._codes

    def _matrix(self) -> ArrayView:
        """The codes as a matrix, a view."""
        return self._view() if self._flipped else self._codes.rows()

    def _operand(self, kernels: Any, stream: int) -> tuple[ArrayView, ArrayView]:
        """Codes and scale_inv as ``fp8_gemm`` takes them, scaled by the tensor or by rows: padded copies
        where need be."""
        matrix = self._matrix()
        rows, columns = (-(-n // 16) * 16 for n in matrix.shape)
        codes, scales = _within(matrix, (rows, columns), kernels, stream), self._scale_inv
        if self.scaling == "row":
            scales = _within(scales.reshape(scales.size, 1), (rows, 1), kernels, stream).reshape(rows)
        return codes, scales

    def _like(self, codes: ArrayView, scale_inv: ArrayView) -> Float8Tensor:
        """Another tensor of the same kind over these views, shared with this one's library."""
        made = object.__new__(Float8Tensor)
        made._codes, made._scale_inv, made._flipped = codes, scale_inv, False
        made._data, made.scale_inv = self._data, self.scale_inv
        if codes is not self._codes:
            made._data = arrays.to_library(codes, self._data)
        if scale_inv is not self._scale_inv:
            made.scale_inv = arrays.to_library(scale_inv, self.scale_inv)
        made.format, made.scaling = self.format, self.scaling
        return made


def _tiling(scaling: str, shape: Shape, operation: str = "quantize") -> tuple[tuple[int, int], Shape]:
    """Tile size, and the shape of one value a tile."""
    choice(operation, "scaling", scaling, TILES, FormatError)
    rows, columns = (tile or max(whole, 1) for tile, whole in zip(TILES[scaling], shape, strict=True))
    grid = max(1, -(-shape[0] // rows)), max(1, -(-shape[1] // columns))
    return (rows, columns), (1,) if scaling == "tensor" else grid


def _rng(rounding: str, rng: Any, where: arrays.Device) -> ArrayView | None:
    choice("quantize", "rounding", rounding, ("nearest", "stochastic"), FormatError)
    if (rng is None) != (rounding == "nearest"):
        wanted = 'int64 (seed, offset) with "stochastic", None with "nearest"'
        raise FormatError("quantize", "rng", shown(rng), wanted)
    if rng is None:
        return None
    if isinstance(rng, tuple | list):
        numbers = [integer("quantize", "rng", value, 0, 2**63 - 1, FormatError) for value in rng]
        rng = np.array(numbers, np.int64)
    state = arrays.as_view(rng, "quantize", "rng")
    if state.dtype is not formats.int64 or state.size != 2:
        raise FormatError("quantize", "rng", f"{state.dtype.name} {state.shape}", "int64 (seed, offset)")
    if state.device.kind == "cpu" and (state.numpy() < 0).any():
        raise FormatError("quantize", "rng", state.numpy().tolist(), "no negative seed or offset")
    return arrays.to(arrays.contiguous(state), where)


def _scale(scale: Any, grid: Shape, where: arrays.Device) -> ArrayView:
    own = isinstance(scale, int | float | np.generic | list | tuple)
    view = arrays.as_view(_numbers(scale) if own else scale, "quantize", "scale")
    # one a row may also come with the rows' own leading dimensions; blocks must come as their grid
    fits = view.size == math.prod(grid) and (view.shape == grid or 1 in grid[-1:])
    if view.dtype is not formats.float32:
        raise FormatError("quantize", "scale", view.dtype.name, "float32")
    if not fits:
        raise ShapeError("quantize", "scale", f"shape {view.shape}", f"shape {grid}")
    if view.device.kind == "cpu":
        with np.errstate(all="ignore"):
            fit = np.isfinite(view.numpy()) & (view.numpy() > 0) & np.isfinite(1 / view.numpy())
        if not fit.all():
            wanted = "finite positive float32 numbers whose inverse is finite too (above 2^-128 = 2.94e-39)"
            raise FormatError("quantize", "scale", shown(scale), wanted)
    return arrays.to(arrays.contiguous(view), where).reshape(*grid)


def _numbers(scale: Any) -> np.ndarray[Any, Any]:
    """Numbers of Python or NumPy as float32; FormatError for others, a bool among them."""
    try:
        given = np.asarray(scale)
        if given.dtype.kind in "iuf" and not isinstance(scale, bool):
            with np.errstate(all="ignore"):
                return given.astype(np.float32)
    except (TypeError, ValueError, OverflowError):  # nested unevenly
        pass
    raise FormatError("quantize", "scale", shown(scale), "numbers, or an array of float32")


def _block_product(a: Float8Tensor, b: Float8Tensor, out: ArrayView, kernels: Any, stream: int) -> None:
    """out = a @ b where at least one is scaled by blocks; see ``Float8Tensor.matmul``."""
    if all(_along_rows(t) for t in (a, b.T)) and (a.scaling, b.scaling) != ("block_128x128",) * 2:
        codes, scales, tiles = zip(*(_block_operand(t, kernels, stream) for t in (a, b.T)), strict=True)
        workspace = arrays.empty((kernels.fp8_gemm_workspace(*out.shape),), formats.uint8, out.device)
        pair = a.format, b.format
        try:  # a device without this product says so, and gets the other
            kernels.block_gemm(*codes, out, *pair, *scales, *tiles, None, None, workspace, stream)
            return
        except CannotTake as reason:
            if kernels.policy.strict:
                raise
            said = "Float8Tensor: %s; the product of the decoded operands is taken"
            dispatch.say_once(logging.WARNING, said, reason)
    wide_a, wide_b = a._wide(formats.float32), b._wide(formats.float32)
    wide_a = wide_a if a._flipped else wide_a.rows()
    if a._flipped and b._flipped:  # no layout of gemm transposes both
        wide_b = arrays.contiguous(wide_b.transpose(1, 0))
    layout = "tn" if a._flipped else "nt" if b._flipped else "nn"
    exact = out if out.dtype is formats.float32 else arrays.empty(out.shape, formats.float32, out.device)
    workspace = arrays.empty((kernels.gemm_workspace(),), formats.uint8, out.device)
    kernels.gemm(wide_a, wide_b, exact, layout, None, None, workspace, stream)
    if exact is not out:
        kernels.copy(exact, out, stream)


def _along_rows(tensor: Float8Tensor) -> bool:
    """Whether blocks of 128 run along the tensor's rows."""
    return tensor.scaling == "block_128x128" or (tensor.scaling == "block_1x128" and not tensor._flipped)


def _block_operand(
    tensor: Float8Tensor, kernels: Any, stream: int
) -> tuple[ArrayView, ArrayView, tuple[int, int]]:
    """(codes, scale_inv, tile) of a tensor as ``block_gemm`` takes them: padded copies where need be."""
    codes = tensor._matrix()
    tile, grid = _tiling(tensor.scaling, tensor._codes.rows().shape)
    scales = tensor._scale_inv.reshape(*grid)
    if tensor._flipped or tile[0] == 1:  # 1x128: blocks of K first; a transposed grid of squares
        scales = scales.transpose(1, 0)
    shapes = block_shapes(codes.shape[0], codes.shape[1], tile)
    return _within(codes, shapes[0], kernels, stream), _within(scales, shapes[1], kernels, stream), tile


def _within(view: ArrayView, sizes: Shape, kernels: Any, stream: int) -> ArrayView:
    """A matrix in the first corner of a C-contiguous one of these sizes, zeros around: itself where it is
    that and aligned, or a copy."""
    if sizes == view.shape and view.contiguous and view.ptr % 16 == 0:
        return view
    padded = arrays.zeros(sizes, view.dtype, view.device)
    kernels.copy(view, padded.slice(0, 0, view.shape[0]).slice(1, 0, view.shape[1]), stream)
    return padded
