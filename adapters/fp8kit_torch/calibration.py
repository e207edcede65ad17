"""What calibration looks at: amaxes of tensors, taken by fp8kit's kernels, as torch ops that
``torch.compile`` can follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fp8kit.backends import dispatch
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import as_view


@custom_op("fp8kit::amax", mutates_args=())
def amax_of(tensor: Tensor) -> Tensor:
    """max|tensor|, NaN ignored, on the device: float32 (1,). ``tensor``: h (..., N)."""
    matrix = as_view(tensor.detach().contiguous()).rows()
    amax = torch.zeros(1, dtype=torch.float32, device=tensor.device)
    dispatch.kernels(matrix.device).amax(matrix, as_view(amax), matrix.shape, stream_of(matrix.device))
    return amax


@amax_of.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.new_empty(1, dtype=torch.float32)


def row_of(looked_at: Sequence[tuple[int, Tensor]], slots: int) -> Tensor:
    """The largest amax of the tensors of each slot, 0 where there is none: float32 (slots,)."""
    parts: list[Tensor] = [looked_at[0][1].new_zeros(1, dtype=torch.float32)] * slots
    for slot, tensor in looked_at:
        parts[slot] = torch.fmax(parts[slot], amax_of(tensor))
    return torch.cat(parts)
