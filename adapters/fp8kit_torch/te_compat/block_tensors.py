"""Tensors in MXFP8 and NVFP4 and their quantizers, with Transformer Engine's names and memory layouts, on
``fk.quantize`` and ``fk.QuantizedArray``.

Products of them are emulated, as those of MXFP8BlockScaling and NVFP4BlockScaling are, and ``general_gemm``
multiplies their codes. A layer that is given one takes its values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arguments import choice, flag
from fp8kit.arrays import Shape
from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError
from fp8kit.float8 import quantize
from fp8kit.formats import E2M1, FORMATS
from fp8kit.quantized_array import QuantizedArray
from fp8kit.tiles import Rotation
from fp8kit_torch import torch_compat
from fp8kit_torch.checks import of_one, shown
from fp8kit_torch.layer import next_rng
from fp8kit_torch.quantized_tensor import QuantizedTensor, rebuilt, taken
from fp8kit_torch.te_compat.dtypes import DType, format_of, of_format
from fp8kit_torch.te_compat.quantizers import Quantizer

_NVFP4_MAX = 6.0  # of E2M1; that of E4M3 is the quantizer's
_PAD = (128, 4)  # scales are padded to multiples, of rows and of blocks along the contraction


class Blocks(NamedTuple):
    """How a tensor is cast by blocks: ``fk.quantize``'s words. ``signs``: of the rotation of the columns, ""
    for none. ``most``: E4M3's largest scale of a block."""

    format: str
    block: int
    square: bool = False
    rule: str = "te"
    stochastic: bool = False
    signs: str = ""
    row_scaled: bool = False
    most: float = 448.0

    @property
    def mx(self) -> bool:
        """Whether scales are E8M0."""
        return self.block == 32

    def scaling(self, square: bool, row_scaled: bool = False) -> str:
        """``fk.quantize``'s word."""
        kind = "mx" if self.mx else "nvfp4_row" if row_scaled else "nvfp4"
        return f"{kind}_{self.block if square else 1}x{self.block}"


def _padded(scales: Tensor, columns: bool, mx: bool) -> Tensor:
    """Scales as cuBLAS's copies want them, with zeros around: of MXFP8's columns blocks come first."""
    down, across = _PAD[::-1] if columns and mx else _PAD
    rows, blocks = scales.shape
    return torch.nn.functional.pad(scales, (0, -blocks % across, 0, -rows % down))


class BlockTensor(QuantizedTensor):
    """Codes with a scale for each block along the contraction, cast twice: with the columns as the
    contraction, and with the rows."""

    _how: Blocks

    @classmethod
    def cast(cls, values: Tensor, how: Blocks, rows: bool = True, columns: bool = True) -> Any:
        """h (..., K), cast in these orientations. ShapeError unless K and, with columns or square blocks, the
        product of the other sizes are multiples of the block."""
        shape = tuple(values.shape)
        count, k = math.prod(shape[:-1]), shape[-1] if shape else 0
        if len(shape) < 2 or k % how.block or (count % how.block and (columns or how.square)):
            wanted = f"(..., K), K and the number of rows multiples of {how.block}"
            raise ShapeError(cls.__name__, "tensor", f"shape {shape}", wanted)
        parts: dict[str, Tensor] = {}
        for name, along in (("rowwise", 1), ("columnwise", 0)):
            if (rows, columns)[1 - along]:
                parts |= cls._side(name, values.detach().reshape(count, k), how, along, shape)
        return cls._made(parts, how, shape, values.dtype)

    @classmethod
    def rows_cast(cls, values: Tensor, how: Blocks) -> dict[str, Tensor]:
        """The parts of h (rows, K) with the columns as the contraction. Any number of rows, but with square
        blocks a multiple of one."""
        return cls._side("rowwise", values.detach(), how, 1, tuple(values.shape))

    @staticmethod
    def _side(name: str, x: Tensor, how: Blocks, along: int, shape: Shape) -> dict[str, Tensor]:
        rotated = 16 if how.signs and not along else 0
        found = quantize(
            x,
            FORMATS[how.format],
            scaling=how.scaling(how.square, how.row_scaled and bool(along)),
            rounding="stochastic" if how.stochastic else "nearest",
            rng=next_rng(x.device) if how.stochastic else None,
            scale_rule=how.rule,
            along=-1 if along else 0,
            hadamard=rotated,
            signs=how.signs if rotated else "plus",
            **({"stochastic_bits": 8} if how.stochastic else {}),
        )
        scales = found.scale_codes
        if how.square:  # one for each row of a product's operand
            scales = scales.repeat_interleave(how.block, 1 - along)
        if how.mx:
            data = found.data.view(shape)
        else:
            packed = found.packed() if along else found.T.packed()
            data = packed.view(*shape[:-1], shape[-1] // 2) if along else packed
            scales = scales if along else scales.t()
        parts = {f"{name}_data": data, f"{name}_scale_inv": _padded(scales, not along, how.mx).contiguous()}
        return parts if how.mx else parts | {f"{name}_tensor_scale_inv": found.tensor_scale_inv}

    def array(self, columns: bool = False) -> QuantizedArray:
        """The matrix (rows, K) as it was cast with K as the contraction, or, ``columns``, with the rows.
        UnsupportedError where that was dropped."""
        how, name = self._how, "columnwise" if columns else "rowwise"
        if f"{name}_data" not in self._parts:
            raise UnsupportedError(type(self).__name__, f"{name}_data", "none", f"a cast with {name}=True")
        k = self.shape[-1]
        count, blocks = self.numel() // k, how.block
        data, scales = self._parts[f"{name}_data"], self._parts[f"{name}_scale_inv"]
        rotation = Rotation(16, how.signs) if columns and how.signs else None
        if how.mx:
            grid = (count // blocks, k) if columns else (count, k // blocks)
            codes = scales[: grid[0], : grid[1]].contiguous()
            along = 0 if columns else -1
            more: dict[str, Any] = {"scaling": how.scaling(False), "scale_codes": codes, "along": along}
            return QuantizedArray(data.view(count, k), None, FORMATS[how.format], **more)
        lines, contracted = (k, count) if columns else (count, k)
        codes = scales[:lines, : contracted // blocks].contiguous()
        made = QuantizedArray.from_packed(
            data.view(lines, contracted // 2).contiguous(),
            None,
            E2M1,
            how.scaling(False, how.row_scaled and not columns),
            scale_codes=codes,
            tensor_scale_inv=self._parts[f"{name}_tensor_scale_inv"],
            rotation=rotation,
        )
        return made.T if columns else made

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        kind = str(dtype or self.dtype).removeprefix("torch.")
        found: Tensor = self.array("rowwise_data" not in self._parts).dequantize(kind)
        return found.reshape(self.shape)

    def _fresh(self, values: Tensor) -> dict[str, Tensor]:
        usages = self.get_usages()
        made = type(self).cast(values, self._how, usages["rowwise"], usages["columnwise"])
        return made._parts  # type: ignore[no-any-return]

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the codes of an orientation (False). UnsupportedError for one that is not there (True): values
        are rounded, and another cast of them would be another tensor. ArgumentError where none is left."""
        for name, use in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage)):
            if use and f"{name}_data" not in self._parts:
                wanted = f"a cast with {name}=True"
                raise UnsupportedError(type(self).__name__, f"{name}_usage", "True of none", wanted)
        dropped = tuple(
            name
            for name, use in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage))
            if use is not None and not use
        )
        left = {name: part for name, part in self._parts.items() if not name.startswith(dropped or ("-",))}
        if not left:
            raise ArgumentError("update_usage", "rowwise_usage, columnwise_usage", "False", "one of them")
        self._parts = left

    def shared_view(self, shape: Shape) -> QuantizedTensor | None:
        """Those whose rows stay."""
        if len(shape) < 2 or shape[-1] != self.shape[-1] or math.prod(shape) != self.numel():
            return None
        made = self._like(lambda part: part, shape=shape)
        for name in ("rowwise_data", "columnwise_data") if self._how.mx else ("rowwise_data",):
            if name in made._parts:
                part = made._parts[name]
                made._parts[name] = part.view(*shape[:-1], part.shape[-1])
        return made  # type: ignore[no-any-return]

    def taken_rows(self, places: Tensor) -> QuantizedTensor | None:
        """Of a matrix whose rows are there."""
        rows, (count, *_) = places.shape[0], self.shape
        if "rowwise_data" not in self._parts or self.ndim != 2:
            return None
        sizes = {"rowwise_data": rows, "rowwise_scale_inv": -(-rows // _PAD[0]) * _PAD[0]}
        if self._how.row_scaled:
            sizes["rowwise_tensor_scale_inv"] = rows
        parts = {
            name: taken(part[:count], places, sizes[name]) if name in sizes else part.clone()
            for name, part in self._parts.items()
            if name.startswith("rowwise")
        }
        made = self._made(parts, self._how, (rows, self.shape[1]), self.dtype)
        made._quantizer = self._quantizer
        return made  # type: ignore[no-any-return]

    @property
    def _rowwise_data(self) -> Tensor | None:
        """The codes: MXFP8's uint8 of this shape, NVFP4's (..., K / 2), two in a byte."""
        return self._parts.get("rowwise_data")

    @property
    def _columnwise_data(self) -> Tensor | None:
        """The codes cast along the rows: MXFP8's uint8 of this shape, NVFP4's (K, rows / 2)."""
        return self._parts.get("columnwise_data")

    @property
    def _rowwise_scale_inv(self) -> Tensor | None:
        """E8M0 or E4M3, uint8: (rows, K / block) with zeros to multiples of (128, 4)."""
        return self._parts.get("rowwise_scale_inv")

    @property
    def _columnwise_scale_inv(self) -> Tensor | None:
        """uint8: MXFP8's (rows / block, K) to multiples of (4, 128), NVFP4's (K, rows / block)."""
        return self._parts.get("columnwise_scale_inv")

    def refill(self, parts: dict[str, Tensor]) -> None:
        """Take over the values of ``parts``, unseen by autograd: backward reads what forward did."""
        with torch.no_grad(), torch_compat.unseen_writes(tuple(self._parts.values())):
            for name, part in self._parts.items():
                if part is not parts[name]:
                    part.copy_(parts[name])

    def _get_quantizer(self) -> Any:
        return _quantizer_of(self) if self._quantizer is None else self._quantizer

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        return False

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _rebuilt, (type(self).__name__, self._parts, tuple(self._how))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self._how.format}, {self._values()!r})"


def _given(name: str, tensors: dict[str, Tensor | None], shape: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a constructor that are there, and the shape. FormatError where there are none."""
    parts = {key: value.detach() for key, value in tensors.items() if value is not None}
    if not parts or shape is None or any(value.dtype is not torch.uint8 for value in parts.values()):
        got = ", ".join(f"{key} {shown(value)}" for key, value in tensors.items())
        raise FormatError(name, "rowwise_data, columnwise_data", got, "uint8 codes with scales, and a shape")
    return parts, tuple(shape)


class MXFP8Tensor(BlockTensor):
    """E4M3 or E5M2 with E8M0 scales of blocks of 32. Made by ``MXFP8Quantizer``, or of Transformer Engine's
    arguments, whose memory it is: ``rowwise_data``, ``rowwise_scale_inv``, ``columnwise_data``,
    ``columnwise_scale_inv``, ``fp8_dtype``, ``shape``, ``dtype`` of the values, ``quantizer``."""

    def __new__(
        cls,
        *,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        fp8_dtype: Any,
        quantizer: Any = None,
        shape: Any = None,
        dtype: torch.dtype = torch.float32,
        with_gemm_swizzled_scales: bool = False,
        requires_grad: bool = False,
    ) -> Any:
        """See the class. FormatError for codes that do not fit, UnsupportedError for swizzled scales."""
        if with_gemm_swizzled_scales:
            raise UnsupportedError("MXFP8Tensor", "with_gemm_swizzled_scales", True, "False")
        data = rowwise_data if rowwise_data is not None else columnwise_data
        shape = shape if shape is not None or data is None else data.shape
        sides = {"rowwise_data": rowwise_data, "rowwise_scale_inv": rowwise_scale_inv}
        sides |= {"columnwise_data": columnwise_data, "columnwise_scale_inv": columnwise_scale_inv}
        parts, shape = _given("MXFP8Tensor", sides, shape)
        how = Blocks(format_of("MXFP8Tensor", fp8_dtype).name, 32)
        made = cls._made(parts, how, shape, dtype, requires_grad)
        made._quantizer = quantizer
        return made

    @property
    def _fp8_dtype(self) -> DType:
        """The format of the codes."""
        return of_format(FORMATS[self._how.format])

    def get_metadata(self) -> dict[str, Any]:
        return super().get_metadata() | {"fp8_dtype": self._fp8_dtype}


class NVFP4Tensor(BlockTensor):
    """E2M1 with E4M3 scales of blocks of 16, and one of the tensor. Made by ``NVFP4Quantizer``."""

    _fp4_dtype = DType.kFloat4E2M1

    @property
    def _row_scaled_nvfp4(self) -> bool:
        """Whether each row has a scale of its own for the tensor's."""
        return self._how.row_scaled

    @property
    def _nvfp4_use_4over6(self) -> bool:
        """Whether each block has the better of two scales."""
        return self._how.rule.startswith("4over6")

    def _amax(self, name: str) -> Tensor | None:
        scale = self._parts.get(f"{name}_tensor_scale_inv")
        return None if scale is None else scale * (self._how.most * _NVFP4_MAX)

    @property
    def _amax_rowwise(self) -> Tensor | None:
        """The amax that the tensor's scale is made of, float32 (1,) or one a row, to a rounding."""
        return self._amax("rowwise")

    @property
    def _amax_columnwise(self) -> Tensor | None:
        """That of the columns' cast, after a rotation."""
        return self._amax("columnwise")


class _BlockQuantizer(Quantizer):
    kind: type[BlockTensor]
    block: int

    def how(self) -> Blocks:
        """How it casts."""
        raise NotImplementedError

    def cast(self, values: Tensor) -> Any:
        return self.kind.cast(values, self.how(), self.rowwise_usage, self.columnwise_usage)

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether both sizes are multiples of the block."""
        return inp.ndim >= 2 and not inp.shape[-1] % self.block and not inp.shape[:-1].numel() % self.block

    def get_scale_shape(self, shape: Any, columnwise: bool) -> Shape:
        """Shape of ``_rowwise_scale_inv``, or of ``_columnwise_scale_inv``, of a tensor of that shape."""
        *leading, k = shape
        count = math.prod(leading)
        if not columnwise:
            grid = (count, k // self.block)
        else:
            grid = (count // self.block, k) if self.block == 32 else (k, count // self.block)
        return tuple(_padded(torch.empty(grid, device="meta"), columnwise, self.block == 32).shape)


class MXFP8Quantizer(_BlockQuantizer):
    """E4M3 or E5M2 with a power of two for each 32 elements (MXFP8BlockScaling), or, with
    ``with_2d_quantization``, for each 32 x 32."""

    kind, block = MXFP8Tensor, 32

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = of_format(format_of("MXFP8Quantizer", fp8_dtype))
        self.with_2d_quantization = flag("MXFP8Quantizer", "with_2d_quantization", with_2d_quantization)

    def how(self) -> Blocks:
        return Blocks(format_of("MXFP8Quantizer", self.dtype).name, 32, bool(self.with_2d_quantization))

    def get_columnwise_shape(self, rowwise_data_shape: Any) -> Shape:
        """The same shape: scales alone lie along the rows."""
        return tuple(rowwise_data_shape)

    def create_tensor_from_data(
        self, data: Tensor, scale_inv: Tensor, fake_dtype: torch.dtype, fp8_dtype: Any = DType.kFloat8E4M3
    ) -> MXFP8Tensor:
        """The tensor of these codes and scales of rows, by their memory."""
        return MXFP8Tensor(
            rowwise_data=data,
            rowwise_scale_inv=scale_inv,
            fp8_dtype=fp8_dtype,
            dtype=fake_dtype,
            quantizer=self,
        )


class NVFP4Quantizer(_BlockQuantizer):
    """E2M1 with E4M3 scales of blocks of 16 and one of the tensor (NVFP4BlockScaling).

    ``with_rht``: the cast of the columns is of the tensor rotated by Hadamard matrices of 16, whose columns
    have Transformer Engine's signs, or "plus" without ``with_random_sign_mask``; with
    ``with_post_rht_amax`` alone. ``with_2d_quantization``: blocks of 16 x 16. ``stochastic_rounding``: by 8
    bits from torch's generator. ``row_scaled_nvfp4``: a scale of each row for the tensor's.
    ``nvfp4_use_4over6``: the better of two scales for each block, by ``nvfp4_4over6_err_mode`` "MAE" or
    "MSE"; ``nvfp4_e4m3_max`` is 256 or 448 with it, 448 without. ``with_amax_reduction`` over a group of one
    process changes nothing. UnsupportedError for what does not go together.
    """

    kind, block = NVFP4Tensor, 16

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        name = "NVFP4Quantizer"
        if fp4_dtype != DType.kFloat4E2M1:
            raise ArgumentError(name, "fp4_dtype", shown(fp4_dtype), "DType.kFloat4E2M1")
        of_one(name, "amax_reduction_group", amax_reduction_group)
        choice(name, "nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, ("MAE", "MSE"))
        if nvfp4_e4m3_max not in (448, 256):
            raise ArgumentError(name, "nvfp4_e4m3_max", shown(nvfp4_e4m3_max), "448 or 256")
        clashes = {
            "with_post_rht_amax": with_rht and not with_post_rht_amax,
            "nvfp4_e4m3_max": nvfp4_e4m3_max == 256 and not nvfp4_use_4over6,
            "nvfp4_use_4over6": nvfp4_use_4over6 and (with_rht or stochastic_rounding),
            "row_scaled_nvfp4": row_scaled_nvfp4 and with_2d_quantization,
        }
        for argument, wrong in clashes.items():
            if wrong:
                wanted = "another: it does not go with the other arguments"
                raise UnsupportedError(name, argument, locals()[argument], wanted)
        self.dtype = DType.kFloat4E2M1
        self.with_rht, self.with_post_rht_amax = bool(with_rht), bool(with_post_rht_amax)
        self.with_random_sign_mask = bool(with_random_sign_mask)
        self.with_2d_quantization = bool(with_2d_quantization)
        self.stochastic_rounding, self.row_scaled_nvfp4 = bool(stochastic_rounding), bool(row_scaled_nvfp4)
        self.nvfp4_use_4over6, self.nvfp4_e4m3_max = bool(nvfp4_use_4over6), nvfp4_e4m3_max
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group

    def how(self) -> Blocks:
        rule = "exact"
        if self.nvfp4_use_4over6:
            last = "_256" if self.nvfp4_e4m3_max == 256 else ""
            rule = f"4over6_{self.nvfp4_4over6_err_mode.lower()}{last}"
        signs = ("te" if self.with_random_sign_mask else "plus") if self.with_rht else ""
        first = E2M1.name, 16, self.with_2d_quantization, rule, self.stochastic_rounding, signs
        return Blocks(*first, self.row_scaled_nvfp4, float(self.nvfp4_e4m3_max))

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    def convert_shape_for_fp4(self, shape: Any) -> Shape:
        """Shape of the bytes of a tensor of that shape: two codes in one."""
        return (*shape[:-1], shape[-1] // 2)

    def get_columnwise_shape(self, shape: Any) -> Shape:
        """(K, ...), which ``convert_shape_for_fp4`` halves: that of ``_columnwise_data`` for a matrix."""
        return super().get_columnwise_shape(shape)


def _quantizer_of(held: BlockTensor) -> Quantizer:
    """One that casts as a tensor was cast."""
    how, usages = held._how, held.get_usages()
    if how.mx:
        dtype = of_format(FORMATS[how.format])
        return MXFP8Quantizer(dtype, with_2d_quantization=how.square, **usages)
    return NVFP4Quantizer(
        **usages,
        with_rht=bool(how.signs),
        with_post_rht_amax=bool(how.signs),
        with_2d_quantization=how.square,
        stochastic_rounding=how.stochastic,
        row_scaled_nvfp4=how.row_scaled,
        nvfp4_use_4over6=how.rule.startswith("4over6"),
        nvfp4_e4m3_max=int(how.most),
        nvfp4_4over6_err_mode="MSE" if "mse" in how.rule else "MAE",
        with_random_sign_mask=how.signs != "plus",
    )


def _rebuilt(
    name: str,
    parts: dict[str, Tensor],
    how: tuple[Any, ...],
    shape: Shape,
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
    high: Tensor | None,
) -> Any:
    """What was copied or loaded."""
    kind = {each.__name__: each for each in (MXFP8Tensor, NVFP4Tensor)}[name]
    made = kind._made(parts, Blocks(*how), tuple(shape), dtype)
    return rebuilt(made, requires_grad, parameter, high)


torch.serialization.add_safe_globals([_rebuilt])
