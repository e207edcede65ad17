"""How an optimiser's float32 states are kept in fewer bits between steps: bfloat16, float16 and FP8 with a
factor, remainders."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit import formats
from fp8kit_torch.quantized import QuantizedTensor

PACKED = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
# what a tensor's largest value becomes: float16 keeps a factor of 2 to spare (a square root's rounding, say)
_TOP = {torch.float16: formats.float16.max / 2, torch.uint8: formats.E4M3.max}


def local(tensor: Tensor) -> Tensor:
    """This process's part of a distributed tensor, the values of one that is held in FP8, the tensor itself
    otherwise."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.dequantize()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def unpack(state: Tensor, factor: Tensor | None) -> Tensor:
    """The float32 values of a state: the state itself where it is float32, else a new tensor. ``factor``:
    what ``pack`` returned."""
    if state.dtype is torch.float32:
        return state
    values = state.view(torch.float8_e4m3fn).float() if state.dtype is torch.uint8 else state.float()
    return values if factor is None else values.mul_(factor)


def pack(state: Tensor, values: Tensor) -> Tensor | None:
    """Write float32 ``values`` over ``state`` in its dtype; returns the float32 [1] factor that ``unpack``
    needs, None where there is none.

    float16 and uint8 (E4M3 codes): values / factor, with factor = max|values| / the largest value used of the
    dtype.
    """
    top = _TOP.get(state.dtype)
    if top is None:
        state.copy_(values)
        return None
    largest = values.abs().max().reshape(1) if values.numel() else values.new_zeros(1)
    factor = largest / top
    scaled = values * torch.where(factor > 0, 1 / factor, 0.0)
    if state.dtype is torch.uint8:
        state.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-top, top))
    else:
        state.copy_(scaled)
    return factor


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """float32 masters from bfloat16 parameters (their upper 16 bits, rounded) and int16 remainders (what is
    lacking, signed)."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def split(master: Tensor, param: Tensor, remainder: Tensor) -> None:
    """Write float32 masters as bfloat16 parameters, rounded half away from zero, and int16 remainders:
    ``join`` gives their bits back."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    param.view(torch.int16).copy_(upper)
    remainder.copy_(bits - (upper << 16))
