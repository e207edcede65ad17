"""Scales of a weight of which several processes have parts: those of the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.backends import dispatch
from fp8kit.formats import float32
from fp8kit.quantization import Quantizer
from fp8kit.tiles import tiling
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import as_view, kind_of


def amax_of(values: Tensor, rule: Quantizer) -> Tensor:
    """float32: the largest magnitude of each tile of a matrix h (rows, columns), as ``rule`` divides it."""
    (tile, grid), rows = tiling(rule.granularity, tuple(values.shape)), as_view(values)
    amax = torch.zeros(grid, dtype=torch.float32, device=values.device)
    dispatch.kernels(rows.device).amax(rows, as_view(amax), tile, stream_of(rows.device))
    return amax


def limits_of(rule: Quantizer, dtype: torch.dtype) -> tuple[float, bool, float, float]:
    """What the scales of a weight of ``dtype`` are made by, as ``scale_from_amax`` takes it."""
    least = float32.max if rule.granularity == "tensor" else kind_of(dtype).max
    return rule.format.max, rule.power_2, rule.epsilon, least


def scales_of(amax: Tensor, rule: Quantizer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scales, their inverses) of the amaxes of a weight of ``dtype``."""
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    how = limits_of(rule, dtype)
    views = [as_view(each) for each in (amax, scale, inverse)]
    device = views[0].device
    dispatch.kernels(device).scale_from_amax(*views, *how, stream_of(device))
    return scale, inverse
