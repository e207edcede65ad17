"""Tensors that are held in FP8 as layers multiply it: codes and scales in both of the orientations that
products want."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8kit.arrays import Shape
from fp8kit.errors import ArgumentError, FormatError, RecipeError, UnsupportedError
from fp8kit.execution.codec import decode, encode
from fp8kit.formats import E4M3
from fp8kit.lru import memoized
from fp8kit.ops.linear import LinearSpec, weight_cast
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_quantized import Operand, QuantizedProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Quantization, Quantizer
from fp8kit_torch import torch_compat
from fp8kit_torch.call import prepare, run
from fp8kit_torch.checks import shown
from fp8kit_torch.quantized_tensor import QuantizedTensor, rebuilt, taken
from fp8kit_torch.state import NO_STATE, StateBinding
from fp8kit_torch.te_compat.dtypes import DType, format_of, of_format
from fp8kit_torch.views import as_view

# makes a quantizer that casts as a tensor was cast; ``te_compat.quantizers``, which needs this file, puts its
# function here
MADE_BY: list[Callable[[Any], Any]] = []
_FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


class OperandTensor(QuantizedTensor):
    """A matrix (N, K), or (..., K), as FP8 codes and scales, in both of the orientations that products want:
    2 bytes an element. ``Float8Tensor`` has one scale, ``Float8BlockwiseQTensor`` one for each block.

    A weight's scale comes from the values themselves (current scaling, also under a recipe of delayed
    scaling, since a weight's largest value is known when it is cast), or from each block with
    ``Float8BlockScaling``; an output's or a gradient's (``fp8_output``, ``fp8_grad``) is the recipe's.

    ``update_usage`` drops one of the orientations; a layer that wants it makes it for the call. What is
    written into ``_rowwise_data`` itself is noticed: the other orientation is made again.
    """

    _lag: int | None  # by how much the memory of the codes was written more often than that of the transposed
    _padded: tuple[Any, Any] = (None, None)  # a way to hold it, and the shape of codes that its products read

    @classmethod
    def _made(cls, *arguments: Any, **options: Any) -> Any:
        made = super()._made(*arguments, **options)
        made._lag = lag_of(made._parts)
        return made

    @classmethod
    def of(cls, values: Tensor, fp8: Quantization) -> OperandTensor:
        """h (N, K), a weight, cast for products as ``fp8`` says."""
        return of_parts(_cast(values, fp8), fp8, tuple(values.shape), values.dtype)

    @classmethod
    def cast(cls, values: Tensor, fp8: Quantization, state: StateBinding = NO_STATE) -> OperandTensor:
        """h (..., K), cast as ``fp8`` says of w, with the scale and the amax of ``state``, by the names
        w_scale and w_amax."""
        parts = _cast(_as_matrix(values), fp8, state)
        return of_parts(parts, fp8, tuple(values.shape), values.dtype)

    @property
    def _fp8(self) -> Quantization:
        """How it is held: as its ``w``."""
        return self._how  # type: ignore[no-any-return]

    @property
    def _fp8_dtype(self) -> DType:
        """The format of the codes."""
        return of_format(self._fp8.w.format)

    @property
    def _size(self) -> tuple[int, int]:
        """(N, K)."""
        k = self.shape[-1:].numel()
        return self.numel() // max(k, 1), k

    # --- codes and scales -----------------------------------------------------------------------------------

    @property
    def _rowwise_data(self) -> Tensor | None:
        """The codes, uint8 of this shape; None where they were dropped."""
        n, k = self._size
        held = self._parts.get("w_q")
        return None if held is None else held[:n, :k].reshape(self.shape)

    @_rowwise_data.setter
    def _rowwise_data(self, codes: Tensor) -> None:
        n, k = self._size
        if codes.dtype is not torch.uint8 or codes.numel() != n * k or not codes.is_contiguous():
            wanted = f"contiguous uint8 of {n * k} elements"
            raise FormatError("QuantizedTensor", "_rowwise_data", shown(codes), wanted)
        self._parts["w_q"] = codes.detach().view(n, k)
        self._transpose_again()

    @property
    def _rowwise_scale_inv(self) -> Tensor | None:
        """float32: of the tensor (1,), or as blocks lie in memory; None where the codes were dropped."""
        return self._parts.get("w_q_inv", self._parts.get("w_scale_inv")) if "w_q" in self._parts else None

    @property
    def _columnwise_data(self) -> Tensor | None:
        """The codes of the transposed matrix, uint8 (K, ...): the last dimension first; None where they were
        dropped."""
        n, k = self._size
        self._notice()
        held = self._parts.get("w_qt")
        return None if held is None else held[:k, :n].reshape(self.shape[-1:] + self.shape[:-1])

    @property
    def _columnwise_scale_inv(self) -> Tensor | None:
        """``_rowwise_scale_inv`` of the transposed matrix."""
        self._notice()
        return self._parts.get("w_qt_inv", self._parts.get("w_scale_inv")) if "w_qt" in self._parts else None

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Hold the codes of an orientation (True), which are made of the other's where they are not there, or
        drop them (False); None leaves it. ArgumentError where nothing would be left."""
        whole = self._operands() | self._parts  # memory that is held stays
        asked = {"w_q": rowwise_usage, "w_qt": columnwise_usage}
        held = {name for name, use in asked.items() if use or (use is None and name in self._parts)}
        if not held:
            got, wanted = "False for both", "one of them"
            raise ArgumentError("update_usage", "rowwise_usage, columnwise_usage", got, wanted)
        shared = {"w_scale_inv"} if "w_scale_inv" in whole else set()
        wanted_names = held | {f"{name}_inv" for name in held} | shared
        self._parts = {name: part for name, part in whole.items() if name in wanted_names}
        self._lag = lag_of(self._parts)

    def _get_quantizer(self) -> Any:
        return MADE_BY[0](self) if self._quantizer is None else self._quantizer

    def _notice(self) -> None:
        """Make the transposed codes again where the codes were written to since."""
        if self._lag != lag_of(self._parts):
            self._transpose_again()

    def _transpose_again(self) -> None:
        """Make them again."""
        if {"w_q", "w_qt"} <= self._parts.keys():
            with torch.no_grad():
                fresh = self._transposed()
                for name in fresh.keys() & self._parts.keys():
                    self._parts[name].copy_(fresh[name])
            self._lag = lag_of(self._parts)

    def _transposed(self, back: bool = False) -> dict[str, Tensor]:
        """The parts of the transposed matrix, of the codes: the same codes where tiles are squares, else
        their values cast along the other axis. ``back``: the other way round."""
        n, k = self._size
        own, other = ("w_qt", "w_q") if back else ("w_q", "w_qt")
        rows, columns = (k, n) if back else (n, k)
        tile = self._fp8.w.tile
        if tile[0] != tile[1]:
            values = self._values(torch.float32).reshape(n, k)
            return {name: part for name, part in _cast(values, self._fp8).items() if name.startswith(other)}
        shapes = self.product.shapes(columns, rows, self._fp8.w)
        codes = self._parts[own].new_zeros(shapes[0])
        codes[:columns, :rows] = self._parts[own][:rows, :columns].t()
        if "w_scale_inv" in self._parts:
            return {other: codes}
        scales, tiles = self._parts[f"{own}_inv"], (-(-rows // tile[0]), -(-columns // tile[1]))
        transposed = scales.new_zeros(shapes[1])
        transposed[: tiles[1], : tiles[0]] = scales[: tiles[0], : tiles[1]].t()
        return {other: codes, f"{other}_inv": transposed}

    def _operands(self) -> dict[str, Tensor]:
        """Both orientations as products read them: what is held, and copies of what is not so."""
        self._notice()
        parts = dict(self._parts)
        if "w_q" not in parts:
            parts |= self._transposed(back=True)
        known, wanted = self._padded
        if known is not self._how:
            wanted = self.product.shapes(*self._size, self._fp8.w)[0]
            self._padded = self._how, wanted
        codes = parts["w_q"]
        if tuple(codes.shape) != wanted or codes.data_ptr() % 16:
            n, k = self._size
            parts["w_q"] = codes.new_zeros(wanted)
            parts["w_q"][:n, :k] = codes[:n, :k]
        if "w_qt" not in parts:
            parts |= self._transposed()
        return parts

    def _parts_of(self, values: Tensor) -> Any:
        alike = type(values) is type(self) and values._how == self._how  # type: ignore[attr-defined]
        if alike and values.shape == self.shape:
            return values._operands()  # type: ignore[attr-defined]
        return super()._parts_of(values)

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        left = super().restore_from_saved(tensors)
        self._lag = lag_of(self._parts)
        return left

    def take_parts(self, fresh: Any, noop_flag: Tensor | None = None) -> None:
        n, k = self._size
        held = self._parts.get("w_q")
        if held is not None and tuple(held.shape) == (n, k):  # codes without padding
            fresh = {**fresh, "w_q": fresh["w_q"][:n, :k]}
        super().take_parts(fresh, noop_flag)
        self._lag = lag_of(self._parts)

    def refill(self, parts: dict[str, Tensor]) -> None:
        """Take over the values of ``parts``, unseen by autograd: backward reads what forward did."""
        fresh = [(part, parts[name]) for name, part in self._parts.items() if part is not parts[name]]
        if fresh:
            with torch.no_grad(), torch_compat.unseen_writes(tuple(self._parts.values())):
                for part, values in fresh:
                    part.copy_(values)
        self._lag = lag_of(self._parts)

    def shared_view(self, shape: Shape) -> QuantizedTensor | None:
        """Of one scale any shape, without the transposed codes unless rows stay; of blocks those whose rows
        stay."""
        (n, k), last = self._size, math.prod(shape[-1:])
        if math.prod(shape) != self.numel() or not self.numel():
            return None
        if last == k:
            self._notice()
            return self._like(lambda part: part, shape=shape)  # type: ignore[no-any-return]
        codes = self._parts.get("w_q")
        if "w_scale_inv" not in self._parts or codes is None or not codes[:n, :k].is_contiguous():
            return None
        parts = {"w_q": codes[:n, :k].view(-1, last), "w_scale_inv": self._parts["w_scale_inv"]}
        made = self._made(parts, self._how, shape, self.dtype)
        made._quantizer = self._quantizer
        return made  # type: ignore[no-any-return]

    def taken_rows(self, places: Tensor) -> QuantizedTensor | None:
        """Of one scale, or of scales within rows."""
        parts, (granularity, tile) = self._parts, (self._fp8.w.granularity, self._fp8.w.tile)
        if "w_q" not in parts or self.ndim != 2 or (granularity != "tensor" and tile[0] != 1):
            return None
        rows, k = places.shape[0], self.shape[1]
        codes, scales = self.product.shapes(rows, k, self._fp8.w)
        made = {"w_q": taken(parts["w_q"][: self.shape[0]], places, codes[0])}
        if granularity == "tensor":
            made["w_scale_inv"] = parts["w_scale_inv"].clone()
        else:
            along = len(scales) - 1  # rows come last
            made["w_q_inv"] = taken(parts["w_q_inv"], places, scales[along], along, empty=1)
        found = self._made(made, self._how, (rows, k), self.dtype)
        found._quantizer = self._quantizer
        return found  # type: ignore[no-any-return]

    # --- for products ---------------------------------------------------------------------------------------

    def inputs(self, operation: str, prefix: str, fp8: Quantization) -> dict[str, Tensor]:
        """Its parts by the names of an operation's cached weight. RecipeError where ``fp8`` wants another
        format or tiling, UnsupportedError where it wants the weight in high precision."""
        want_fit(operation, self._fp8, fp8)
        transposed = ("w_qt", "w_qt_inv") if fp8.dgrad.compute == "dequantized" else ()
        return {f"{prefix}{name}": part for name, part in self._operands().items() if name not in transposed}

    def fits(self, quantizer: Quantizer) -> bool:
        """Whether an operand of that format and granularity can be this tensor as it is."""
        return _alike(self._fp8.w, quantizer)

    def input_parts(self) -> dict[str, Tensor]:
        """Its parts by the names of a product's cached input."""
        return {f"x{name.removeprefix('w')}": part for name, part in self._operands().items()}

    def side(self, transposed: bool) -> tuple[Tensor, Tensor]:
        """(codes, scale_inv) with the last dimension, or, ``transposed``, the rows as the contraction of a
        product."""
        return _side(self._operands(), transposed)

    def operand(self, transposed: bool) -> Operand:
        """``side`` as the operand of a product."""
        codes, scale_inv = map(as_view, self.side(transposed))
        return codes, scale_inv, self._fp8.w

    @property
    def product(self) -> type[QuantizedProduct]:
        """The products that take it as an operand."""
        return product_class(self._fp8)  # type: ignore[return-value]

    # --- values ---------------------------------------------------------------------------------------------

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        (n, k), quantizer = self._size, self._fp8.w
        transposed = "w_q" not in self._parts
        rows, columns = (k, n) if transposed else (n, k)
        codes, scale_inv = _side(self._parts, transposed)
        values = codes[:rows, :columns].view(_FLOAT8[quantizer.format.name]).to(torch.float32)
        scales = self.product.grid(scale_inv, quantizer)
        for dim, size in enumerate(quantizer.tile):
            scales = scales.repeat_interleave(size, dim) if size > 1 else scales
        found = (values * scales[:rows, :columns]).to(dtype)
        return (found.t() if transposed else found).reshape(self.shape)

    def _fresh(self, values: Tensor) -> dict[str, Tensor]:
        return _cast(_as_matrix(values), self._fp8)

    def _like(self, *arguments: Any, **options: Any) -> Any:
        self._notice()
        return super()._like(*arguments, **options)

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        self._notice()
        return _rebuilt, (self._parts, encode(self._fp8))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        name, own = type(self).__name__, self._fp8.w
        return f"{name}({own.format.name}, {own.granularity}, {self._values()!r})"


class Float8Tensor(OperandTensor):
    """FP8 codes with one scale. Made by quantizers, or of Transformer Engine's arguments: ``data``, uint8 of
    ``shape`` (None: its own), whose memory it is; ``fp8_scale_inv``, float32 (1,); ``fp8_dtype``; ``dtype``
    of the values; ``data_transpose``, uint8 (K, ...); ``quantizer``, ``requires_grad``."""

    def __new__(
        cls,
        *,
        data: Tensor,
        fp8_scale_inv: Tensor,
        fp8_dtype: Any,
        shape: Any = None,
        dtype: torch.dtype = torch.float32,
        data_transpose: Tensor | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
        device: Any = None,
    ) -> Any:
        """See the class. FormatError for codes or a scale of another dtype or size."""
        fmt = format_of("Float8Tensor", fp8_dtype)
        shape = tuple(data.shape if shape is None else shape)
        count, k = math.prod(shape), math.prod(shape[-1:])
        if data.dtype is not torch.uint8 or data.numel() != count or not data.is_contiguous():
            raise FormatError("Float8Tensor", "data", shown(data), f"contiguous uint8 of shape {shape}")
        if fp8_scale_inv.dtype is not torch.float32 or fp8_scale_inv.numel() != 1:
            raise FormatError("Float8Tensor", "fp8_scale_inv", shown(fp8_scale_inv), "float32 (1,)")
        codes = data.detach().view(count // max(k, 1), k)
        parts = {"w_q": codes, "w_scale_inv": fp8_scale_inv.detach().view(1)}
        made = cls._made(parts, scaled_as(Quantizer(fmt)), shape, dtype, requires_grad)
        made._quantizer = quantizer
        if data_transpose is not None or quantizer is None or quantizer.columnwise_usage:
            made.update_usage(columnwise_usage=True)
        return made

    @property
    def _data(self) -> Tensor | None:
        """``_rowwise_data``."""
        return self._rowwise_data

    @_data.setter
    def _data(self, codes: Tensor) -> None:
        self._rowwise_data = codes

    @property
    def _scale_inv(self) -> Tensor:
        """float32 (1,)."""
        return self._parts["w_scale_inv"]

    @property
    def _transpose(self) -> Tensor | None:
        """``_columnwise_data``."""
        return self._columnwise_data

    @property
    def _transpose_invalid(self) -> bool:
        """Whether there are no transposed codes. Assigning True makes them again."""
        return "w_qt" not in self._parts

    @_transpose_invalid.setter
    def _transpose_invalid(self, invalid: bool) -> None:
        if invalid:
            self._transpose_again()

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's arguments but ``shape`` and ``dtype``."""
        names = {"data": "_data", "fp8_scale_inv": "_scale_inv", "data_transpose": "_transpose"}
        found = {name: getattr(self, attribute) for name, attribute in names.items()}
        return found | {"fp8_dtype": self._fp8_dtype, "quantizer": self._get_quantizer()}

    def _create_transpose(self) -> None:
        self.update_usage(columnwise_usage=True)

    def _reset_caches(self) -> None:
        self._transpose_again()

    def remove_caches(self) -> None:
        """Drop the transposed codes."""
        self.update_usage(columnwise_usage=False)


class Float8BlockwiseQTensor(OperandTensor):
    """FP8 codes with a scale for each 128 elements along a product's contraction, or for each 128 x 128. Made
    by quantizers, or of Transformer Engine's arguments, whose memory it is: ``rowwise_data``, uint8 of
    ``shape`` (None: its own), ``rowwise_scale_inv``, float32 as ``Float8BlockQuantizer.get_scale_shape``
    says, ``columnwise_data`` (K, ...) and ``columnwise_scale_inv``, one side at least; ``fp8_dtype``;
    ``is_2D_scaled``: 128 x 128; ``dtype`` of the values, ``quantizer``, ``requires_grad``."""

    def __new__(
        cls,
        *,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        fp8_dtype: Any,
        quantizer: Any = None,
        is_2D_scaled: bool,
        shape: Any = None,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
    ) -> Any:
        """See the class. FormatError for codes or scales of another dtype or size."""
        op, fmt = "Float8BlockwiseQTensor", format_of("Float8BlockwiseQTensor", fp8_dtype)
        power_2 = True if quantizer is None else quantizer.force_pow_2_scales
        rounded = "power_2" if power_2 else "exact"
        rules = [Quantizer(fmt, tile, scale_rule=rounded) for tile in ("block_1x128", "block_128x128")]
        how = scaled_as(rules[bool(is_2D_scaled)], rules[0])
        if shape is None and rowwise_data is not None:
            shape = rowwise_data.shape
        elif shape is None and columnwise_data is not None:
            shape = columnwise_data.shape[1:] + columnwise_data.shape[:1]
        shape = () if shape is None else tuple(shape)
        rows, k = math.prod(shape[:-1]), math.prod(shape[-1:])
        sides = (
            ("w_q", rowwise_data, rowwise_scale_inv, (rows, k)),
            ("w_qt", columnwise_data, columnwise_scale_inv, (k, rows)),
        )
        parts: dict[str, Tensor] = {}
        for name, codes, scales, size in sides:
            if codes is None:
                continue
            wanted = product_class(how).shapes(*size, how.w)[1]
            right = codes.dtype is torch.uint8 and codes.numel() == rows * k
            if not right or scales is None or scales.dtype != torch.float32 or tuple(scales.shape) != wanted:
                got = f"{shown(codes)}, {shown(scales)}"
                raise FormatError(op, name, got, f"uint8 {size} and float32 {wanted}")
            parts |= {name: codes.detach().reshape(size), f"{name}_inv": scales.detach()}
        if not parts:
            raise FormatError(op, "rowwise_data, columnwise_data", None, "codes of one side at least")
        made = cls._made(parts, how, shape, dtype, requires_grad)
        made._quantizer = quantizer
        return made

    def get_metadata(self) -> dict[str, Any]:
        more = {"fp8_dtype": self._fp8_dtype, "is_2D_scaled": self._is_2D_scaled}
        return super().get_metadata() | more

    @property
    def _is_2D_scaled(self) -> bool:
        """Whether a scale is that of 128 x 128."""
        return self._fp8.w.tile[0] != 1


_CLASSES: dict[str, type[OperandTensor]] = {
    "tensor": Float8Tensor,
    "block_1x128": Float8BlockwiseQTensor,
    "block_128x128": Float8BlockwiseQTensor,
}


def of_parts(parts: dict[str, Tensor], fp8: Quantization, shape: Shape, dtype: torch.dtype) -> OperandTensor:
    """The tensor of these parts, of the class that its scales have."""
    kind = _CLASSES.get(fp8.w.granularity, OperandTensor)
    return kind._made(parts, fp8, shape, dtype)  # type: ignore[no-any-return]


def of_cached(key: Any, parts: dict[str, Tensor], weights: Sequence[Tensor]) -> Tensor:
    """What a layer has cast of ``weights``, one after the other, as ``key`` says: codes and scales; of a
    format that is emulated, or of experts in one tensor, the first of its ``parts``."""
    first = next(iter(parts.values()))
    if first.dtype is not torch.uint8 or not isinstance(key, str):
        return first
    shape = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return of_parts(parts, decode(key), shape, weights[0].dtype)


def _alike(own: Quantizer, other: Quantizer) -> bool:
    same = own is other or own.format == other.format
    return same and own.granularity == other.granularity


def want_fit(operation: str, how: Quantization, fp8: Quantization) -> None:
    """RecipeError where ``fp8`` wants another format or tiling of a weight than that it is held in, as
    ``how`` says; UnsupportedError where it wants the weight in high precision."""
    if fp8.dgrad.compute == "high_precision":
        wanted = "one that multiplies codes or their values: the weight is held in FP8 alone"
        raise UnsupportedError(operation, "recipe", "dgrad in high precision", wanted)
    if not _alike(how.w, fp8.w):
        got, wanted = ((each.format.name, each.granularity) for each in (how.w, fp8.w))
        raise RecipeError(operation, "weight", f"FP8 as {got}", f"{wanted}, as the recipe of this autocast")


def scaled_as(rule: Quantizer, partner: Quantizer | None = None) -> Quantization:
    """How a tensor is held that is cast by ``rule``; ``partner``: how what it is multiplied by is cast."""
    other = Quantizer(E4M3, scale_source=rule.scale_source) if partner is None else partner
    return Quantization.of(x=other, w=rule, g=other, fprop="split")


def _as_matrix(values: Tensor) -> Tensor:
    """h (..., K) as (N, K); of no dimension as (1, 1)."""
    return values.reshape(-1, values.shape[-1:].numel())


def lag_of(parts: dict[str, Tensor]) -> int | None:
    """By how much the memory of the codes was written more often than that of the transposed ones; None where
    nobody counts."""
    try:
        return torch_compat.version(parts["w_q"]) - torch_compat.version(parts["w_qt"])
    except (KeyError, RuntimeError):  # of tensors of inference mode
        return None


def _side(parts: dict[str, Tensor], transposed: bool) -> tuple[Tensor, Tensor]:
    name = "w_qt" if transposed else "w_q"
    return parts[name], parts[f"{name}_inv"] if f"{name}_inv" in parts else parts["w_scale_inv"]


def _rebuilt(
    parts: dict[str, Tensor],
    fp8: str,
    shape: Shape,
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
    high: Tensor | None,
) -> Tensor:
    """What was copied or loaded."""
    made = of_parts(parts, decode(fp8), tuple(shape), dtype)
    return rebuilt(made, requires_grad, parameter, high)  # type: ignore[no-any-return]


_rebuilt.__module__ = "fp8kit_torch.quantized"  # where files of earlier versions have it
torch.serialization.add_safe_globals([_rebuilt, QuantizedTensor, OperandTensor, *set(_CLASSES.values())])


@lru_cache(maxsize=256)
def _of_values(fp8: Quantization) -> Quantization:
    """``fp8`` with scales from the values themselves."""
    return fp8.map(lambda own: replace(own, scale_source="current"))


@memoized("torch: casts of weights")
def _cast_spec(rows: int, columns: int, fp8: Quantization) -> LinearSpec:
    return LinearSpec(ProductSpec(columns, (rows,), bias="none", fp8=fp8))


def _cast(values: Tensor, fp8: Quantization, state: StateBinding = NO_STATE) -> dict[str, Tensor]:
    spec = _cast_spec(*values.shape, _of_values(fp8) if state is NO_STATE else fp8)
    with torch.inference_mode(False), torch.no_grad():
        return run(*prepare(weight_cast, spec, {"weight0": values.detach()}, tuple(state.scales)), state)
