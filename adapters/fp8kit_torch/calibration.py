"""What calibration looks at: amaxes of tensors, taken by fp8kit's kernels on torch's stream."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.ops.norm_mlp import NormMLPSpec
from fp8kit_torch.views import as_view


def stream_of(device: Device) -> int:
    """Handle of torch's current stream of a device."""
    return 0 if device.kind == "cpu" else int(torch.cuda.current_stream(device.index).cuda_stream)


def amax_of(tensor: Tensor, amax: ArrayView) -> None:
    """amax = max(amax, max|tensor|), on the device."""
    matrix = as_view(tensor.detach().contiguous()).rows()
    dispatch.kernels(matrix.device).amax(matrix, amax, matrix.shape, stream_of(matrix.device))


def activated(normed: Tensor, weight: Tensor, bias: Tensor | None, spec: NormMLPSpec, amax: ArrayView) -> None:
    """The amax of act(normed weight^T + bias), the input of ``spec``'s second product."""
    x, w = as_view(normed.detach().contiguous()).rows(), as_view(weight.detach().contiguous())
    kernels, stream, rows = dispatch.kernels(x.device), stream_of(x.device), x.shape[0]
    h = torch.empty(rows, weight.shape[0], dtype=normed.dtype, device=normed.device)
    act = torch.empty(rows, spec.fc2.in_features, dtype=normed.dtype, device=normed.device)
    workspace = torch.empty(max(kernels.gemm_workspace(), 1), dtype=torch.uint8, device=normed.device)
    kernels.gemm(x, w, as_view(h), "nt", None, False, as_view(workspace), stream)
    added = None if bias is None else as_view(bias.detach())
    kernels.act_fwd(as_view(h), added, as_view(act), amax, None, spec.activation, spec.activation_params, stream)
