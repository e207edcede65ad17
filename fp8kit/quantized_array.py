"""``QuantizedArray``: codes of a narrow format with their scales, as ``fk.quantize`` makes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8kit import arrays, codec, formats, packing, printing, quantized_product
from fp8kit.arguments import choice, flag, shown
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends import dispatch
from fp8kit.errors import FormatError, ShapeError, meant
from fp8kit.formats import E2M1, E4M3, E8M0, Format
from fp8kit.quantization import ROTATIONS, SCALE_RULES, SIGNS, TILES
from fp8kit.tiles import Rotation, along_of, tiling

_ONE = np.ones(1, np.float32)
_VALUES = "; dequantize() gives the values"
# what arrays have -> what there is here
_INSTEAD = {
    "numpy": _VALUES,
    "astype": f"{_VALUES}, in the dtype that it is given",
    "scale": "; scale_inv is what the codes are multiplied by, 1 / scale",
}


class QuantizedArray:
    """Codes, their format and their scaling: an array of ``decode(data) * scale_inv``.

    * ``data``: uint8 of ``shape``, an array of the library that it came from; native float8 arrays are taken
      as their codes.
    * ``scale_inv``: float32, one a tile: (1,) for "tensor", (rows, 1) for "row", (ceil(rows / r),
      ceil(columns / c)) for r x c blocks, with all leading dimensions flattened into rows. None: worked out
      from the next two.
    * ``format``, ``scaling``: see ``quantize``. ``along``: -1, rows and blocks lie along the last
      dimension; 0, tiles are transposed and lie along the first. The attribute is 1 or 0, and that of a
      transposed array is the other one.
    * ``scale_codes``: uint8, one a tile, of "mx" the scales as E8M0, of "nvfp4" as E4M3 without the tensor's
      scale ``tensor_scale_inv``, float32 (1,), of "nvfp4_row" one a row: ``scale_inv = decode(scale_codes) *
      tensor_scale_inv``. Of other scalings None.
    * ``scale_rule``: what ``quantize`` made the scales by, or None. ``rotation``: None, or a ``Rotation``.

    Nothing is copied. Comparison is by identity; compare ``data`` and ``scale_inv`` or dequantised values.
    Raises FormatError for data that are no codes of ``format`` and for scales that are not float32 (codes:
    uint8) or that the scaling does not have, ShapeError for scales of the wrong size, for strides, and for
    two devices.
    """

    __array_ufunc__ = None  # NumPy leaves mixed operators to this class
    __slots__ = (
        *("_along", "_codes", "_data", "_flipped", "_scale_codes", "_scale_inv", "_tensor_scale_inv"),
        *("_format", "_given_scale_inv", "_rotation", "_scale_rule", "_scaling"),
    )

    def __init__(
        self,
        data: Any,
        scale_inv: Any = None,
        format: Any = E4M3,
        scaling: str = "tensor",
        *,
        scale_codes: Any = None,
        tensor_scale_inv: Any = None,
        scale_rule: str | None = None,
        along: int = -1,
        rotation: Rotation | None = None,
    ) -> None:
        codes = arrays.as_view(data, "QuantizedArray", "data")
        self._format: Format = formats.number_format(format, "QuantizedArray")
        native = codes.dtype is not formats.uint8
        if native and codes.dtype.format != self._format:
            wanted = f"uint8, or the float8 dtype of {self._format}"
            raise FormatError("QuantizedArray", "data", codes.dtype.name, wanted)
        if not codes.contiguous:
            raise ShapeError("QuantizedArray", "data", f"strides {codes.strides}", "C-contiguous")
        self._codes = codes.view(formats.uint8)
        self._data = arrays.to_library(self._codes, data) if native else data
        self._flipped = False
        self._scaling = scaling
        self._along = along_of("QuantizedArray", along)
        grid = tiling(scaling, self._codes.rows().shape, self._along, "QuantizedArray")[1]
        if scale_rule is not None:
            choice("QuantizedArray", "scale_rule", scale_rule, SCALE_RULES, FormatError)
        self._scale_rule = scale_rule
        self._rotation = _rotation(rotation)
        kind = scaling.partition("_")[0]
        self._scale_codes = self._part("scale_codes", scale_codes, formats.uint8, grid)
        self._tensor_scale_inv = self._part(
            "tensor_scale_inv", tensor_scale_inv, formats.float32, (self._lines(),)
        )
        if scale_codes is not None and kind not in ("mx", "nvfp4"):
            raise FormatError("QuantizedArray", "scale_codes", shown(scale_codes), f"None for {scaling!r}")
        if tensor_scale_inv is not None and kind != "nvfp4":
            got = shown(tensor_scale_inv)
            raise FormatError("QuantizedArray", "tensor_scale_inv", got, f"None for {scaling!r}")
        if kind == "nvfp4" and scale_codes is None:
            raise FormatError("QuantizedArray", "scale_codes", "None", f"E4M3 codes for {scaling!r}")
        if scale_inv is None and scale_codes is not None:
            self._scale_inv = self._scales_of_codes(self._tensor_scale_inv)
            self._given_scale_inv = arrays.to_library(self._scale_inv, self._data)
            return
        found = self._part("scale_inv", scale_inv, formats.float32, grid)
        if found is None:
            raise FormatError("QuantizedArray", "scale_inv", "None", "float32, one a tile")
        self._scale_inv = found
        self._given_scale_inv = scale_inv

    @classmethod
    def from_packed(
        cls, packed: Any, scale_inv: Any = None, format: Any = E2M1, scaling: str = "tensor", **more: Any
    ) -> QuantizedArray:
        """Returns the array whose codes ``packed()`` gave: uint8 (..., N / 2), two codes a byte, the even
        index in the low four bits. The other arguments, and the errors, are the constructor's; FormatError
        also for bytes that are not uint8 and a format of more than 4 bits."""
        view = arrays.as_view(packed, "from_packed", "packed")
        format = formats.number_format(format, "from_packed")
        _want_4_bits("from_packed", format)
        if view.dtype is not formats.uint8:
            raise FormatError("from_packed", "packed", view.dtype.name, "uint8")
        codes = arrays.as_view(packing.unpack(arrays.native(view)))
        return cls(arrays.to_library(codes, packed), scale_inv, format, scaling, **more)

    @property
    def format(self) -> Format:
        """Of the codes."""
        return self._format

    @property
    def scaling(self) -> str:
        """Which elements share a scale."""
        return self._scaling

    @property
    def scale_inv(self) -> Any:
        """float32, one a tile: what decoded codes are multiplied by."""
        return self._given_scale_inv

    @property
    def scale_rule(self) -> str | None:
        """What ``quantize`` made the scales by."""
        return self._scale_rule

    @property
    def rotation(self) -> Rotation | None:
        """What was done before the cast."""
        return self._rotation

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
    def along(self) -> int:
        """1 where rows and blocks lie along the last dimension, 0 where they lie along the first."""
        return self._along ^ self._flipped

    @property
    def data(self) -> Any:
        """The codes, uint8; of a transposed array a strided view."""
        return arrays.to_library(self._view(), self._data) if self._flipped else self._data

    @property
    def scale_codes(self) -> Any:
        """The scales as they are stored elsewhere, uint8 like ``scale_inv``: E8M0 of "mx", E4M3 of "nvfp4";
        None for other scalings. FormatError for "mx" with scales that are no powers of two."""
        if self._scale_codes is None and self.scaling.startswith("mx"):
            self._scale_codes = self._codes_of_scales()
        codes = self._scale_codes
        return None if codes is None else arrays.to_library(codes, self._data)

    @property
    def tensor_scale_inv(self) -> Any:
        """The tensor's own scale of "nvfp4", float32 (1,), those of the rows of "nvfp4_row", float32 (rows,);
        None for other scalings."""
        scale = self._tensor_scale_inv
        return None if scale is None else arrays.to_library(scale, self._data)

    @property
    def T(self) -> QuantizedArray:
        """The transposed matrix over the same memory, as ``a @ b.T`` wants it. ShapeError unless
        2-dimensional."""
        if self.ndim != 2:
            raise ShapeError("QuantizedArray.T", "shape", self.shape, "2 dimensions")
        transposed = self._like(self._codes, self._scale_inv)
        transposed._flipped = not self._flipped
        return transposed

    def dequantize(self, dtype: Any = formats.float32, rotated: bool = False) -> Any:
        """``decode(data) * scale_inv`` in float32, rounded to ``dtype`` (float32, bfloat16 or float16), in
        the data's library. What was rotated before the cast is rotated back, in float32, or with ``rotated``
        left as it was cast."""
        kind = formats.dtype(dtype, "dequantize", "dtype", formats.HIGH_PRECISION)
        rotated = flag("dequantize", "rotated", rotated, FormatError)
        if self.rotation is None or rotated:
            out = self._wide(kind)
        else:
            out = quantized_product.rotated_back(self, kind)
        return arrays.to_library(out.transpose(1, 0) if self._flipped else out, self._data)

    def matmul(self, other: QuantizedArray, dtype: Any = None, fast_accumulate: bool = False) -> Any:
        """Returns the product of (..., K) and (K, N) as a high-precision array (..., N), accumulated in
        float32.

        Any formats and scalings multiply; ``explain`` says how:

        * E4M3 and E5M2, not both E5M2, with scales of tensors, or of rows of ``a`` and columns of ``b``: the
          FP8 product, on the codes. Tensor cores want both operands' rows along K, so ``a @ b.T`` takes the
          memory as it is, any other orientation costs a copy; so do sizes that are no multiples of 16.
        * The same formats with blocks of 128 along K, 1x128 or 128x128, not both 128x128: the block-scaled
          product, where the device has it.
        * All else: the codes are decoded to float32 (exactly, but for scales that are no powers of two,
          which round) and multiplied in float32: as exact, with float32's speed and memory. NVFP4's scales of
          tensors multiply the result.

        ``dtype``: float32, bfloat16 or float16; by default float32 on the CPU, bfloat16 elsewhere.
        ``fast_accumulate``: let the tensor cores accumulate in their own width (FP8 product only).

        Operands that were rotated must be so alike, along K: then the rotations cancel. Raises FormatError
        for others, ShapeError where the inner sizes differ.
        """
        return quantized_product.matmul(self, _array("matmul", other), dtype, fast_accumulate)

    def __matmul__(self, other: object) -> Any:
        if isinstance(other, QuantizedArray) or hasattr(other, "shape"):
            return self.matmul(other)  # type: ignore[arg-type]
        return NotImplemented

    def __rmatmul__(self, other: object) -> Any:
        if hasattr(other, "shape"):
            raise FormatError("matmul", "self", shown(other), quantized_product.BOTH)
        return NotImplemented

    def _no_arithmetic(self, other: object = None) -> Any:
        raise TypeError("QuantizedArray has no arithmetic but @; dequantize() gives the values as an array")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _no_arithmetic

    def explain(self, other: QuantizedArray | None = None, *, accumulate: Any = "fp32") -> str:
        """Returns how ``self @ other``, or ``fk.matmul`` with ``accumulate``, is computed and why, as a
        sentence for people; without ``other``, the product with the transpose of an array quantised as this
        one. Computes nothing. Raises what they would raise."""
        right = None if other is None else _array("explain", other)
        if isinstance(accumulate, str) and accumulate == "fp32":
            return quantized_product.explain(self, right)
        return quantized_product.explain_modelled(self, right, accumulate)

    def packed(self) -> Any:
        """Returns the codes of a format of at most 4 bits, two in a byte: uint8 (..., N / 2), the even index
        in the low four bits; ``from_packed`` is the inverse. FormatError for wider formats, ShapeError for an
        odd last dimension."""
        _want_4_bits("packed", self.format)
        native = arrays.native(self._view())
        return arrays.to_library(arrays.as_view(packing.pack(native)), self._data)

    def swizzled_scales(self) -> Any:
        """``scale_codes`` in the layout that cuBLAS's block-scaled products read, uint8 (n,): see
        ``fp8kit.packing.swizzle``. A row for each row of the operand whose contraction is the dimension that
        blocks lie along (so ``along=0`` is read transposed); a scale of a square block is repeated for each
        of its rows. Pads are written, 0. FormatError for scalings without codes of scales."""
        if self.scale_codes is None or self._scale_codes is None:
            wanted = '"mx_*" or "nvfp4_*"'
            raise FormatError("swizzled_scales", "scaling", repr(self.scaling), wanted)
        scales = arrays.native(self._scale_codes)
        (high, _), _ = tiling(self.scaling, self._lying(), 1)
        lying = (scales if self._along else scales.T).repeat(high, axis=0)[: self._lying()[0]]
        return arrays.to_library(arrays.as_view(packing.swizzle(lying)), self._data)

    def reshape(self, *shape: int) -> QuantizedArray:
        """Returns the same codes under another shape (one -1 is worked out). Only tensor scaling without a
        rotation may change the last dimension.

        ShapeError for another number of elements, a transposed array, or rows that would be cut or joined.
        """
        if self._flipped:
            raise ShapeError("QuantizedArray.reshape", "self", "a transposed array", "one in row-major order")
        codes = self._codes.reshape(*shape)
        if (self.scaling != "tensor" or self.rotation) and codes.shape[-1:] != self.shape[-1:]:
            wanted = f"last dimension {self.shape[-1:]} (scaling {self.scaling!r})"
            raise ShapeError("QuantizedArray.reshape", "shape", shape, wanted)
        return self._like(codes, self._scale_inv)

    def __getitem__(self, index: int | slice) -> QuantizedArray:
        """Part of the first dimension: an index, or a slice without a step. Blocks of scales are not cut:
        ShapeError for squares, and for blocks along the first dimension."""
        # which NumPy calls an integer
        whole = isinstance(index, int | np.integer) and not isinstance(index, np.timedelta64)
        if (
            self._flipped
            or not self.ndim
            or not (whole or isinstance(index, slice))
            or TILES[self.scaling][0] > 1
            or (TILES[self.scaling][1] and self.ndim == 1)
            or (not self._along and (self.scaling != "tensor" or self.rotation))
        ):
            transposed = ", transposed" if self._flipped else "" if self._along else ", along dim 0"
            got = f"{index!r} of shape {self.shape}{transposed}, scaling {self.scaling!r}"
            wanted = 'an index or slice of dim 0, scaling "tensor", "row" or blocks of one row'
            raise ShapeError("QuantizedArray[...]", "index", got, wanted)
        count = self.shape[0]
        if isinstance(index, slice):
            start, stop, step = index.indices(count)
            if step != 1:
                raise ShapeError("QuantizedArray[...]", "step", step, "1")
            part = self._codes.slice(0, start, max(stop - start, 0))
        else:
            start = int(index) + (count if index < 0 else 0)
            if not 0 <= start < count:
                raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")
            part = self._codes.slice(0, start, 1).reshape(*self.shape[1:])
        if self.scaling == "tensor" or self.ndim == 1:
            return self._like(part, self._scale_inv)
        rows = part.rows().shape[0]
        first = start * math.prod(self.shape[1:-1]) if rows else 0

        def own(scales: ArrayView) -> ArrayView:
            """Those of the part's rows; of no rows, as everywhere, one."""
            return scales.slice(0, first, max(rows, 1))

        columns = tiling(self.scaling, self._codes.rows().shape, self._along, "QuantizedArray")[1][1]
        made = self._like(part, own(self._scale_inv.reshape(-1, columns)))
        if self._scale_codes is not None:
            made._scale_codes = own(self._scale_codes)
        if self._tensor_scale_inv is not None and self._tensor_scale_inv.size > 1:
            made._tensor_scale_inv = own(self._tensor_scale_inv)
        return made

    def __getattr__(self, name: str) -> Any:
        more = _INSTEAD.get(name) or meant(name, [each for each in dir(type(self)) if each[0] != "_"])
        own = type(self).__name__
        raise AttributeError(f"{own!r} object has no attribute {name!r}{more}", name=name, obj=self)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-dimensional QuantizedArray")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # NumPy would make an array of Python objects, element by element
        said = f"a QuantizedArray of shape {self.shape}"
        raise FormatError("__array__", "self", said, "dequantize() for its values, data for its codes")

    def __dlpack__(self, **options: Any) -> object:
        kind = formats.dtype_of_format(self.format)
        native = kind is not None and kind.dlpack[1] == 8
        return (self._view().view(kind) if native and kind else self._view()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._codes.__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedArray:
        """Returns the same codes and scales in memory of their own."""
        copied = self._like(arrays.duplicate(self._codes), arrays.duplicate(self._scale_inv))
        if self._scale_codes is not None:
            copied._scale_codes = arrays.duplicate(self._scale_codes)
        if self._tensor_scale_inv is not None:
            copied._tensor_scale_inv = arrays.duplicate(self._tensor_scale_inv)
        copied._flipped = self._flipped
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "QuantizedArray cannot be pickled: it is memory by address; keep data and scale_inv with fk.save"
        )

    def __repr__(self) -> str:
        """Returns the values, as NumPy prints them (of a large array those that it prints are fetched and
        decoded), shape, format, scaling and scale_inv."""
        name = f"{type(self).__name__}("
        facts = [f"shape={self.shape}", f"{self.format}", f"scaling={self.scaling!r}"]
        facts += [f"scale_rule={self.scale_rule!r}"] if self.scale_rule else []
        facts += [] if self.along else ["along=0"]
        facts += [f"rotated: {self.rotation}"] if self.rotation else []
        scales = printing.view_text(self._scale_inv, " " * len(f"{name}scale_inv="))
        pad = " " * len(name)
        values = printing.text(self._shown_values(), self.shape, name, narrow=True)
        return f"{name}{values},\n{pad}{', '.join(facts)}, {self.device},\n{pad}scale_inv={scales})"

    # --- for the products, and ``quantize`` ---

    def _wide(self, kind: formats.DType, scale_inv: ArrayView | None = None) -> ArrayView:
        """Returns the values as they lie in memory, not transposed, by these scales or their own."""
        rows = self._codes.rows()
        out = arrays.empty(self._codes.shape, kind, self.device)
        tile = tiling(self.scaling, rows.shape, self._along)[0]
        scales = self._scale_inv if scale_inv is None else scale_inv
        how = scales, self.format, tile, arrays.current_stream(self.device)
        dispatch.kernels(self.device).dequantize(rows, out.reshape(*rows.shape), *how)
        return out

    def _scales_of_codes(self, tensor_scale_inv: ArrayView | None = None) -> ArrayView:
        """decode(scale_codes), times the tensor's scale where that is given: float32."""
        codes = self._scale_codes
        assert codes is not None
        one = arrays.to(_ONE, self.device) if tensor_scale_inv is None else tensor_scale_inv
        fmt = E4M3 if self.scaling.startswith("nvfp4") else E8M0
        out = arrays.empty(codes.shape, formats.float32, self.device)
        kernels, stream = dispatch.kernels(self.device), arrays.current_stream(self.device)
        tile = codes.shape
        if one.size > 1:
            tile = (1, codes.shape[1]) if self._along else (codes.shape[0], 1)
        kernels.dequantize(codes, out, one, fmt, tile, stream)
        return out

    def _lines(self) -> int:
        """Returns how many scales there are besides those of NVFP4's blocks."""
        return max(self._lying()[0], 1) if self.scaling.startswith("nvfp4_row") else 1

    def _view(self) -> ArrayView:
        return self._codes.transpose(1, 0) if self._flipped else self._codes

    def _matrix(self) -> ArrayView:
        """Returns the codes as a matrix, a view."""
        return self._view() if self._flipped else self._codes.rows()

    def _lying(self) -> tuple[int, int]:
        """(rows, columns) of the codes with the dimension that blocks lie along as columns."""
        rows, columns = self._codes.rows().shape
        return (rows, columns) if self._along else (columns, rows)

    def _shown_values(self) -> np.ndarray[Any, Any]:
        """Returns the values that ``repr`` prints, float32 on the host."""
        if not self.size:
            return np.empty(self.shape, np.float32)
        indices = printing.places(self.shape)
        codes = self._view()
        at = tuple(map(np.arange, self.shape)) if indices is None else indices
        found = codec.decode(printing.picked(codes, at), self.format).astype(np.float32)
        # the row and the column, among all rows, of each
        seen = at[::-1] if self._flipped else at
        shape = self._codes.shape
        column = seen[-1] if seen else np.zeros(1, np.int64)
        row = np.zeros(1, np.int64)
        for extent, index in zip(shape[:-1], seen[:-1], strict=True):
            row = (row[:, None] * extent + index).reshape(-1)
        tile, grid = tiling(self.scaling, self._codes.rows().shape, self._along)
        cells = (row // tile[0], column // tile[1])
        if self.scaling == "tensor":
            cells, grid = (np.zeros_like(row), np.zeros_like(column)), (1, 1)
        scales = printing.picked(self._scale_inv.reshape(*grid), cells)
        scales = scales.T if self._flipped else scales
        with np.errstate(all="ignore"):
            return np.asarray(found * scales.reshape(found.shape))

    def _part(self, name: str, value: Any, kind: formats.DType, grid: Shape) -> ArrayView | None:
        """Returns an argument of the constructor that has one element a tile, checked."""
        if value is None:
            return None
        view = arrays.as_view(value, "QuantizedArray", name)
        if view.dtype is not kind:
            raise FormatError("QuantizedArray", name, view.dtype.name, kind.name)
        if view.size != math.prod(grid) or not view.contiguous or view.device != self._codes.device:
            got = f"{view.shape}, strides {view.strides}, on {view.device}"
            wanted = f"{grid} for {self.scaling!r}, C-contiguous, on {self._codes.device}"
            raise ShapeError("QuantizedArray", name, got, wanted)
        return view if name == "scale_inv" else view.reshape(*grid)

    def _codes_of_scales(self) -> ArrayView:
        """scale_inv in E8M0. FormatError where that is not exact."""
        grid = tiling(self.scaling, self._codes.rows().shape, self._along)[1]
        scales = self._scale_inv.reshape(*grid)
        codes = arrays.empty(grid, formats.uint8, self.device)
        one = arrays.to(_ONE, self.device)
        kernels, stream = dispatch.kernels(self.device), arrays.current_stream(self.device)
        spare = arrays.empty((1,), formats.float32, self.device)
        kernels.quantize(scales, codes, one, spare, None, E8M0, grid, True, 0, 0, None, stream)
        back = arrays.empty(grid, formats.float32, self.device)
        kernels.dequantize(codes, back, one, E8M0, grid, stream)
        native = arrays.provider(self.device).native
        if not bool(((native(back) == native(scales)) | (native(scales) != native(scales))).all()):
            wanted = "scale_inv of powers of two from 2^-127 to 2^127"
            raise FormatError("scale_codes", "scale_inv", "others", wanted)
        return codes

    def _like(self, codes: ArrayView, scale_inv: ArrayView) -> QuantizedArray:
        """Another array of the same kind over these views, shared with this one's library."""
        made = object.__new__(QuantizedArray)
        made._codes, made._scale_inv, made._flipped = codes, scale_inv, False
        made._data, made._given_scale_inv = self._data, self._given_scale_inv
        if codes is not self._codes:
            made._data = arrays.to_library(codes, self._data)
        if scale_inv is not self._scale_inv:
            made._given_scale_inv = arrays.to_library(scale_inv, self._given_scale_inv)
        made._format, made._scaling, made._scale_rule = self._format, self._scaling, self._scale_rule
        made._along, made._rotation = self._along, self._rotation
        made._scale_codes, made._tensor_scale_inv = self._scale_codes, self._tensor_scale_inv
        return made


def of_views(
    codes: ArrayView,
    scale_inv: ArrayView,
    like: Any,
    format: Format,
    scaling: str,
    scale_rule: str | None,
    along: int,
    rotation: Rotation | None,
    scale_codes: ArrayView | None,
    tensor_scale_inv: ArrayView | None,
) -> QuantizedArray:
    """Returns a QuantizedArray of views that are known to fit, in the library of ``like``. Nothing is
    checked."""
    made = object.__new__(QuantizedArray)
    made._codes, made._scale_inv, made._flipped = codes, scale_inv, False
    made._data, made._given_scale_inv = arrays.to_library(codes, like), arrays.to_library(scale_inv, like)
    made._format, made._scaling, made._scale_rule = format, scaling, scale_rule
    made._along, made._rotation = along, rotation
    made._scale_codes, made._tensor_scale_inv = scale_codes, tensor_scale_inv
    return made


def _rotation(rotation: Any) -> Rotation | None:
    if rotation is None:
        return None
    wanted = "a Rotation, as an array has it that quantize rotated"
    if not isinstance(rotation, Rotation) or rotation.n not in ROTATIONS or rotation.signs not in SIGNS:
        raise FormatError("QuantizedArray", "rotation", shown(rotation), wanted)
    if (rotation.signs == "random") != isinstance(rotation.rng, ArrayView):
        raise FormatError("QuantizedArray", "rotation", shown(rotation), wanted)
    return rotation


def _array(operation: str, other: Any) -> QuantizedArray:
    if not isinstance(other, QuantizedArray):
        raise FormatError(operation, "other", shown(other), quantized_product.BOTH)
    return other


def _want_4_bits(operation: str, fmt: Format) -> None:
    if fmt.bits > 4:
        raise FormatError(operation, "format", fmt, "a format of at most 4 bits, as E2M1")
