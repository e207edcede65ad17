"""Transformer Engine's quantizers of FP8 on the library's own casts: ``quantizer(tensor)`` is a
``Float8Tensor`` or ``Float8BlockwiseQTensor``, which layers under a recipe of the same format and tiling
multiply as it is.

``rowwise``, ``columnwise``: which orientations are held. A layer makes one that it lacks, for the call.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8kit.arguments import flag, number
from fp8kit.arrays import Shape
from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError
from fp8kit.formats import E4M3
from fp8kit.ops.product_block import BlockProduct
from fp8kit.quantization import Quantizer as Rule
from fp8kit_torch.checks import device as checked_device
from fp8kit_torch.checks import shown
from fp8kit_torch.checks import tensor as checked
from fp8kit_torch.collectives import ranks_of
from fp8kit_torch.operand_tensor import MADE_BY, Float8Tensor, OperandTensor, scaled_as
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.state import NO_STATE, StateBinding, slot_addresses, stream_of
from fp8kit_torch.te_compat.dtypes import DType, format_of, of_format
from fp8kit_torch.te_compat.unsupported import METHODS
from fp8kit_torch.views import FLOATS, as_view
from fp8kit_torch.weight_scales import scales_of


class Quantizer:
    """Base of the quantizers. ``rowwise_usage``, ``columnwise_usage``: what was asked for."""

    dtype: DType

    optimize_for_gemm = False  # scales lie as cuBLAS's block-scaled products read them: never

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        name = type(self).__name__
        if type(self) is Quantizer:
            raise UnsupportedError("Quantizer: this is the base of Float8Quantizer and others")
        self.rowwise_usage = flag(name, "rowwise", rowwise)
        self.columnwise_usage = flag(name, "columnwise", columnwise)
        self.internal = False

    def __getattr__(self, name: str) -> Any:
        why = f", which is not supported: {METHODS[name]}" if name in METHODS else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{why}", name=name, obj=self)

    def __call__(self, tensor: Tensor) -> QuantizedTensor:
        """``quantize``."""
        return self.quantize(tensor)

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """h (..., K), or of no dimension, cast; over what ``out`` holds, where that is given. ``dtype``: of
        the values, None the tensor's. The gradient passes through."""
        if out is not None:
            return self.update_quantized(tensor, out)
        checked(type(self).__name__, "tensor", tensor)
        return _Quantize.apply(  # type: ignore[no-any-return]
            tensor if dtype is None else tensor.to(dtype), self
        )

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensor:
        """``quantize`` without a gradient. A subclass may change what is cast and call this one."""
        values = checked(type(self).__name__, "tensor", tensor).detach()
        if isinstance(values, QuantizedTensor):
            values = values.dequantize()
        if values.dtype not in FLOATS:
            raise FormatError(type(self).__name__, "tensor", values.dtype, "float32, bfloat16 or float16")
        with torch.no_grad():
            made = self.cast(values)
        made._quantizer = self
        if not (self.rowwise_usage and self.columnwise_usage):
            made.update_usage(self.rowwise_usage, self.columnwise_usage)
        return made

    def cast(self, values: Tensor) -> Any:
        """The tensor of plain values, with both orientations."""
        raise NotImplementedError

    def multi_quantize(self, list_of_tensors: list[Tensor]) -> list[QuantizedTensor]:
        """``quantize`` of each."""
        return [self.quantize(each) for each in list_of_tensors]

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensor, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
        """Cast ``src`` over what ``dst`` holds; returns ``dst``. ``noop_flag``: (1,), on the device; where it
        is not 0 nothing changes. ArgumentError for what is no QuantizedTensor, ShapeError for another
        shape."""
        operation = type(self).__name__
        if not isinstance(dst, QuantizedTensor):
            raise ArgumentError(operation, "dst", shown(dst), "a QuantizedTensor")
        if checked(operation, "src", src).shape != dst.shape:
            raise ShapeError(operation, "src", f"shape {tuple(src.shape)}", tuple(dst.shape))
        with torch.no_grad():
            dst.take_parts(self.parts_like(dst, src), noop_flag)
        return dst

    def parts_like(self, dst: QuantizedTensor, src: Tensor) -> dict[str, Tensor]:
        """The parts of ``src``, cast, that ``dst`` has."""
        own: Any = self.copy()
        own.set_usage(**dst.get_usages())
        return own.quantize_impl(src)._parts  # type: ignore[no-any-return]

    def make_empty(
        self,
        shape: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """Zeros of that shape, cast by this process alone. ``pin_memory``: False only."""
        if pin_memory:
            raise UnsupportedError(type(self).__name__, "pin_memory", True, "False")
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
        alone: Any = self.copy()
        alone.with_amax_reduction = False
        made = alone.quantize_impl(torch.zeros(tuple(shape), dtype=dtype, device=where))
        made._quantizer = self
        return made.requires_grad_(requires_grad)  # type: ignore[no-any-return]

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change what is asked for; None leaves it."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """What is asked for."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Quantizer:
        """Another one with the same arguments; tensors are shared."""
        return copy.copy(self)

    def calibrate(self, tensor: Tensor) -> None:
        """Nothing: the scale follows from each tensor itself."""

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether ``inp`` can be cast: any tensor can."""
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether ranks gather codes of rows alone: nothing is gathered."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether casting once more gives the same codes: for scales that follow from the values."""
        return True

    def get_columnwise_shape(self, rowwise_data_shape: Any) -> Shape:
        """Shape of ``_columnwise_data`` of a tensor of that shape: (K, ...)."""
        shape = tuple(rowwise_data_shape)
        return shape[-1:] + shape[:-1]

    def onnx_quantize(self, tensor: Tensor) -> QuantizedTensor:
        """``quantize``."""
        return self.quantize(tensor)

    def onnx_dequantize(self, tensor: QuantizedTensor) -> Tensor:
        """Its values."""
        return tensor.dequantize()


class OperandQuantizer(Quantizer):
    """Base of those that make operands of FP8 products."""

    def cast(self, values: Tensor) -> OperandTensor:
        return OperandTensor.cast(values, scaled_as(self.rule(), self.partner()), self.binding())

    def rule(self) -> Rule:
        """How it casts."""
        raise NotImplementedError

    def partner(self) -> Rule:
        """How the other operand of a product is cast."""
        return Rule(E4M3)

    def binding(self) -> StateBinding:
        """Where scales and amaxes lie that the cast reads and writes."""
        return NO_STATE


class _OneScale(OperandQuantizer):
    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Float8Tensor:
        """The tensor whose codes ``data`` are, uint8 (..., K), by its memory, with the scale of the quantizer
        (1 where that takes it from each tensor) and values of ``fake_dtype``."""
        scale = getattr(self, "scale", None)
        inverse = torch.ones(1, device=data.device) if scale is None else 1 / scale.detach().view(1)
        return Float8Tensor(
            data=data,
            fp8_scale_inv=inverse,
            fp8_dtype=self.dtype,
            dtype=fake_dtype,
            quantizer=self,
            requires_grad=requires_grad,
        )


class Float8CurrentScalingQuantizer(_OneScale):
    """One scale, from the tensor's own amax. ``fp8_dtype``: DType.kFloat8E4M3 or kFloat8E5M2. ``device``:
    accepted. ``force_pow_2_scales``: scales rounded down to powers of two. ``amax_epsilon``: the least amax.
    ``with_amax_reduction``: that of the largest amax of the processes of ``amax_reduction_group``, None for
    torch's default group. ``use_existing_amax``: the scale is that of ``amax``, float32 (1,), as it is when a
    tensor is cast, and not of the tensor's own. ``scale``: accepted."""

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        name = type(self).__name__
        self.use_existing_amax = flag(name, "use_existing_amax", use_existing_amax)
        self.dtype, self.force_pow_2_scales = of_format(format_of(name, fp8_dtype)), bool(force_pow_2_scales)
        self.amax_epsilon = number(name, "amax_epsilon", amax_epsilon)
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self._reducing()
        where = torch.device("cpu") if device is None else checked_device(name, "device", device)
        self.amax = torch.zeros(1, device=where) if amax is None and use_existing_amax else amax
        if self.amax is not None:
            _want_one(name, "amax", self.amax)
        self.scale = scale

    def _reducing(self) -> Any:
        """The ranks whose largest amax counts, None for this one's; a program may change both attributes."""
        group = self.amax_reduction_group
        if group is None and self.with_amax_reduction and dist.is_initialized():
            group = dist.group.WORLD
        ranks = ranks_of(type(self).__name__, "amax_reduction_group", group)
        return ranks if self.with_amax_reduction and ranks is not None and ranks.size > 1 else None

    def cast(self, values: Tensor) -> OperandTensor:
        if self.use_existing_amax:
            amax = self.amax.detach().to(values.device).view(1)
        elif (ranks := self._reducing()) is not None:
            most = values.detach().abs().amax() if values.numel() else values.new_zeros(())
            amax = most.float().view(1)
            view = as_view(amax)
            ranks.all_reduce(view, "max", stream_of(view.device), type(self).__name__)
        else:
            return super().cast(values)
        scale, _ = scales_of(amax, self.rule(), values.dtype)
        made = Float8Quantizer(scale, torch.zeros_like(amax), self.dtype).cast(values)
        made._how = scaled_as(self.rule(), self.partner())  # multiplied as one with a scale of its own
        return made

    def rule(self) -> Rule:
        rounded = "power_2" if self.force_pow_2_scales else "exact"
        return Rule(format_of("Quantizer", self.dtype), scale_rule=rounded, epsilon=self.amax_epsilon)


class Float8Quantizer(_OneScale):
    """One scale that is given: ``scale`` float32 (1,); ``amax`` float32 (1,) takes the largest magnitude that
    was cast, if that is larger."""

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        name = type(self).__name__
        self.dtype = of_format(format_of(name, fp8_dtype))
        for argument, value in (("scale", scale), ("amax", amax)):
            _want_one(name, argument, value)
        self.scale, self.amax = scale, amax

    def rule(self) -> Rule:
        return Rule(format_of("Quantizer", self.dtype), scale_source="delayed")

    def partner(self) -> Rule:
        return Rule(E4M3, scale_source="delayed")

    def binding(self) -> StateBinding:
        slots = {"w": 0}
        scales, amaxes = slot_addresses(slots, self.scale, "scale"), slot_addresses(slots, self.amax, "amax")
        return StateBinding(scales, amaxes, held=(self.scale, self.amax))

    def calibrate(self, tensor: Tensor) -> None:
        """Let ``amax`` take the tensor's."""
        with torch.no_grad():
            most = tensor.detach().abs().amax() if tensor.numel() else self.amax
            self.amax.copy_(torch.maximum(self.amax, most.to(self.amax).view_as(self.amax)))

    def is_requantization_safe(self) -> bool:
        return False


class Float8BlockQuantizer(OperandQuantizer):
    """A scale for each 128 elements of a row (``block_scaling_dim`` 1), or for each 128 x 128 (2)."""

    block_len = 128

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        name = type(self).__name__
        if block_scaling_dim not in (1, 2):
            raise ArgumentError(name, "block_scaling_dim", shown(block_scaling_dim), "1 or 2")
        self.dtype, self.block_scaling_dim = of_format(format_of(name, fp8_dtype)), block_scaling_dim
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = number(name, "amax_epsilon", amax_epsilon)

    def _rule(self, granularity: str, dtype: DType) -> Rule:
        rounded = "power_2" if self.force_pow_2_scales else "exact"
        return Rule(format_of("Quantizer", dtype), granularity, scale_rule=rounded, epsilon=self.amax_epsilon)

    def rule(self) -> Rule:
        tiling = "block_1x128" if self.block_scaling_dim == 1 else "block_128x128"
        return self._rule(tiling, self.dtype)

    def partner(self) -> Rule:
        return self._rule("block_1x128", DType.kFloat8E4M3)

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether the sizes are multiples of 128, which Transformer Engine wants; any tensor can be cast."""
        return inp.ndim >= 2 and not inp.shape[-1] % 128 and not inp.shape[:-1].numel() % 128

    def get_columnwise_shape(self, shape: Any) -> Shape:
        """Shape of ``_columnwise_data`` of a tensor of that shape: (K, ...)."""
        return super().get_columnwise_shape(shape)

    def get_scale_shape(self, shape: Any, columnwise: bool) -> tuple[int, int]:
        """Shape of the scales of the rows, or of the columns, of a tensor of that shape."""
        rows, k = math.prod(shape[:-1]), math.prod(shape[-1:])
        rows, k = (k, rows) if columnwise else (rows, k)
        return BlockProduct.shapes(rows, k, self.rule())[1]  # type: ignore[return-value]


def quantizer_of(held: OperandTensor) -> Quantizer | None:
    """One that casts as a tensor was cast that a layer made; None where there is none, for scales of rows."""
    own, dtype = held._fp8.w, held._fp8_dtype
    how: dict[str, Any] = {"amax_epsilon": own.epsilon, "force_pow_2_scales": own.power_2}
    if own.granularity == "row":
        return None
    if own.granularity == "tensor":
        return Float8CurrentScalingQuantizer(dtype, **how, **held.get_usages())
    return Float8BlockQuantizer(
        dtype, **how, **held.get_usages(), block_scaling_dim=1 if own.tile[0] == 1 else 2
    )


MADE_BY.append(quantizer_of)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer.quantize_impl(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def _want_one(operation: str, argument: str, value: Any) -> None:
    if checked(operation, argument, value).dtype != torch.float32 or value.numel() != 1:
        raise ArgumentError(operation, argument, shown(value), "a float32 tensor (1,)")
