"""What calibration looks at: amaxes of tensors, taken by fp8kit's kernels, as torch ops that
``torch.compile`` can follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.execution.codec import decode
from fp8kit_torch.views import as_view


def stream_of(device: Device) -> int:
    """Handle of torch's current stream of a device."""
    return 0 if device.kind == "cpu" else int(torch.cuda.current_stream(device.index).cuda_stream)


@custom_op("fp8kit::amax", mutates_args=())
def amax_of(tensor: Tensor) -> Tensor:
    """max|tensor|, NaN ignored, on the device: float32 (1,). ``tensor``: h (..., N)."""
    matrix = as_view(tensor.detach().contiguous()).rows()
    amax = torch.zeros(1, dtype=torch.float32, device=tensor.device)
    dispatch.kernels(matrix.device).amax(matrix, as_view(amax), matrix.shape, stream_of(matrix.device))
    return amax


@custom_op("fp8kit::activated_amax", mutates_args=())
def activated(normed: Tensor, weight: Tensor, bias: Tensor | None, spec: str) -> Tensor:
    """The amax, float32 (1,), of act(normed weight^T + bias), the input of the second product of a
    ``NormMLPSpec`` by its text."""
    own = decode(spec)
    x, w = as_view(normed.detach().contiguous()).rows(), as_view(weight.detach().contiguous())
    kernels, stream, rows = dispatch.kernels(x.device), stream_of(x.device), x.shape[0]
    amax = torch.zeros(1, dtype=torch.float32, device=normed.device)
    h = torch.empty(rows, weight.shape[0], dtype=normed.dtype, device=normed.device)
    act = torch.empty(rows, own.fc2.in_features, dtype=normed.dtype, device=normed.device)
    workspace = torch.empty(max(kernels.gemm_workspace(), 1), dtype=torch.uint8, device=normed.device)
    kernels.gemm(x, w, as_view(h), "nt", None, None, as_view(workspace), stream)
    added = None if bias is None else as_view(bias.detach())
    kernels.act_fwd(
        as_view(h), added, as_view(act), as_view(amax), None, own.activation, own.activation_params, stream
    )
    return amax


@amax_of.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.new_empty(1, dtype=torch.float32)


@activated.register_fake
def _(normed: Tensor, weight: Tensor, bias: Tensor | None, spec: str) -> Tensor:
    return normed.new_empty(1, dtype=torch.float32)


def row_of(looked_at: Sequence[tuple[int, Tensor]], slots: int) -> Tensor:
    """The largest amax of the tensors of each slot, 0 where there is none: float32 (slots,)."""
    parts: list[Tensor] = [looked_at[0][1].new_zeros(1, dtype=torch.float32)] * slots
    for slot, tensor in looked_at:
        parts[slot] = torch.fmax(parts[slot], amax_of(tensor))
    return torch.cat(parts)
