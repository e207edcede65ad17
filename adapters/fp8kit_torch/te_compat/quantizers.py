"""Transformer Engine's quantizers of FP8 on the library's own casts: ``quantizer(tensor)`` is a
``QuantizedTensor``, which layers under a recipe of the same format and tiling multiply as it is.

``rowwise``, ``columnwise``: which orientations are wanted; both are there in any case.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arguments import flag, number
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit.formats import E4M3, E5M2
from fp8kit.quantization import Quantization
from fp8kit.quantization import Quantizer as Rule
from fp8kit_torch.checks import of_one, shown, tensor
from fp8kit_torch.quantized import QuantizedTensor
from fp8kit_torch.state import NO_STATE, StateBinding, slot_addresses
from fp8kit_torch.te_compat.dtypes import DType, TE_DType

_FORMATS = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
_SPLIT = dict.fromkeys(("fprop", "dgrad", "wgrad"), "split")


def _format(operation: str, dtype: Any) -> DType:
    found = TE_DType.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    try:
        return {member: member for member in _FORMATS}[found]
    except (KeyError, TypeError):
        wanted = "DType.kFloat8E4M3 or DType.kFloat8E5M2"
        raise ArgumentError(operation, "fp8_dtype", shown(dtype), wanted) from None


class Quantizer:
    """Base of the quantizers. ``rowwise_usage``, ``columnwise_usage``: what was asked for."""

    dtype: DType

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        name = type(self).__name__
        if type(self) is Quantizer:
            raise UnsupportedError("Quantizer: this is the base of Float8Quantizer and others")
        self.rowwise_usage = bool(flag(name, "rowwise", rowwise))
        self.columnwise_usage = bool(flag(name, "columnwise", columnwise))
        self.internal = False

    def __call__(self, tensor: Tensor) -> QuantizedTensor:
        """``quantize``."""
        return self.quantize(tensor)

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """h (..., K), cast; over what ``out`` holds, where that is given. ``dtype``: of the values, None the
        tensor's. The gradient passes through."""
        if out is not None:
            return self.update_quantized(tensor, out)
        _want(type(self).__name__, tensor)
        made: QuantizedTensor = _Quantize.apply(tensor if dtype is None else tensor.to(dtype), self)
        return made

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensor:
        """``quantize`` without a gradient."""
        rule, binding = self.rule(), self.binding()
        fp8 = Quantization.of(x=self.partner(), w=rule, g=self.partner(), **_SPLIT)
        with torch.no_grad():
            made = QuantizedTensor.cast(_want(type(self).__name__, tensor).detach(), fp8, binding)
        made._quantizer = self
        return made

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
        if _want(operation, src).shape != dst.shape:
            raise ShapeError(operation, "src", f"shape {tuple(src.shape)}", tuple(dst.shape))
        dst.take_parts(self.quantize_impl(src), noop_flag)
        return dst

    def make_empty(
        self,
        shape: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """Zeros of that shape, cast. ``pin_memory``: False only."""
        if pin_memory:
            raise UnsupportedError(type(self).__name__, "pin_memory", True, "False")
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
        made = self.quantize_impl(torch.zeros(tuple(shape), dtype=dtype, device=where))
        return made.requires_grad_(requires_grad)  # type: ignore[return-value]

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
        """Whether ``inp`` can be cast: any matrix can."""
        return inp.ndim >= 1

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether ranks gather codes of rows alone: nothing is gathered."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether casting once more gives the same codes: for scales that follow from the values."""
        return True

    def rule(self) -> Rule:
        """How it casts."""
        raise NotImplementedError

    def partner(self) -> Rule:
        """How the other operand of a product is cast."""
        return Rule(E4M3)

    def binding(self) -> StateBinding:
        """Where scales and amaxes lie that the cast reads and writes."""
        return NO_STATE


class Float8CurrentScalingQuantizer(Quantizer):
    """One scale, from the tensor's own amax. ``fp8_dtype``: DType.kFloat8E4M3 or kFloat8E5M2. ``device``:
    accepted. ``force_pow_2_scales``: scales rounded down to powers of two. ``amax_epsilon``: the least amax.
    ``with_amax_reduction`` over a group of one process changes nothing; ``use_existing_amax``: False only."""

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
        of_one(name, "amax_reduction_group", amax_reduction_group)
        if use_existing_amax:
            raise UnsupportedError(name, "use_existing_amax", True, "False: the cast takes the amax itself")
        self.dtype, self.force_pow_2_scales = _format(name, fp8_dtype), bool(force_pow_2_scales)
        self.amax_epsilon = number(name, "amax_epsilon", amax_epsilon)
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group

    def rule(self) -> Rule:
        rounded = "power_2" if self.force_pow_2_scales else "exact"
        return Rule(_FORMATS[self.dtype], scale_rule=rounded, epsilon=self.amax_epsilon)


class Float8Quantizer(Quantizer):
    """One scale that is given: ``scale`` float32 (1,); ``amax`` float32 (1,) takes the largest magnitude that
    was cast, if that is larger."""

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        name = type(self).__name__
        self.dtype = _format(name, fp8_dtype)
        for argument, value in (("scale", scale), ("amax", amax)):
            if tensor(name, argument, value).dtype != torch.float32 or value.numel() != 1:
                raise ArgumentError(name, argument, shown(value), "a float32 tensor (1,)")
        self.scale, self.amax = scale, amax

    def rule(self) -> Rule:
        return Rule(_FORMATS[self.dtype], scale_source="delayed")

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


class Float8BlockQuantizer(Quantizer):
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
        self.dtype, self.block_scaling_dim = _format(name, fp8_dtype), block_scaling_dim
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = number(name, "amax_epsilon", amax_epsilon)

    def _rule(self, granularity: str, dtype: DType) -> Rule:
        rounded = "power_2" if self.force_pow_2_scales else "exact"
        return Rule(_FORMATS[dtype], granularity, scale_rule=rounded, epsilon=self.amax_epsilon)

    def rule(self) -> Rule:
        tiling = "block_1x128" if self.block_scaling_dim == 1 else "block_128x128"
        return self._rule(tiling, self.dtype)

    def partner(self) -> Rule:
        return self._rule("block_1x128", DType.kFloat8E4M3)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer.quantize_impl(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def _want(operation: str, value: Any) -> Tensor:
    if tensor(operation, "tensor", value).ndim < 1:
        raise ShapeError(operation, "tensor", "no dimension", "at least one")
    return value  # type: ignore[no-any-return]


class _Shell(NamedTuple):
    """What a QuantizedTensor is beside its parts."""

    names: tuple[str, ...]
    fp8: Quantization
    shape: tuple[int, ...]
    dtype: torch.dtype


def prepare_for_saving(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[Any]]:
    """(plain tensors for ``ctx.save_for_backward``, an object for each argument): a QuantizedTensor is taken
    apart, others are as they are."""
    saved: list[Tensor | None] = []
    shells: list[Any] = []
    for each in tensors:
        if isinstance(each, QuantizedTensor):
            saved += each._parts.values()
            shells.append(_Shell(tuple(each._parts), each._fp8, tuple(each.shape), each.dtype))
        else:
            saved.append(each)
            shells.append(None)
    return saved, shells


def restore_from_saved(tensors: list[Any], saved_tensors: Any, return_saved_tensors: bool = False) -> Any:
    """The arguments of ``prepare_for_saving``, of its objects and ``ctx.saved_tensors``; with
    ``return_saved_tensors`` also what is left of these."""
    left, found = list(saved_tensors), []
    for shell in tensors:
        count = 1 if shell is None else len(shell.names)
        parts, left = left[:count], left[count:]
        if shell is None:
            found.append(parts[0])
        else:
            named = dict(zip(shell.names, parts, strict=True))
            found.append(QuantizedTensor(named, shell.fp8, shell.shape, shell.dtype))
    return (found, left) if return_saved_tensors else found


__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_saved",
]
