"""``general_gemm``: one product by fp8kit's kernels, without autograd, under the name and with the arguments
of Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import choice
from fp8kit.backends import dispatch
from fp8kit.errors import FormatError, ShapeError
from fp8kit.spec import WorkingSet
from fp8kit_torch.arguments import defaults, only, refuse
from fp8kit_torch.calibration import stream_of
from fp8kit_torch.checks import tensor
from fp8kit_torch.quantized import QuantizedTensor
from fp8kit_torch.views import FLOATS, as_view

# layout, which says of A, then of B, whether it is transposed -> the contract's, of B and A; which dimension
# of B, and of A, is contracted
_LAYOUTS: dict[str, tuple[Any, int, int]] = {"TN": ("nt", 1, 1), "NN": ("nn", 1, 0), "NT": ("tn", 0, 0)}


@torch.no_grad()
def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Any = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor, None, None, None]:
    """(product, None, None, None); the latter are what is refused: a bias gradient, an input of GELU, a
    communication's output.

    * ``layout``: "TN", B A^T, as y = x W^T of A = W (N, K) and B = x (..., K); "NN", B A, as dx = g W; "NT",
      B^T A, as dW = g^T x.
    * ``A``, ``B``: h, the same dtype, or both ``QuantizedTensor``, whose codes are multiplied; where one is,
      its values are.
    * ``out``: where it is written, or, with ``accumulate``, added; h or float32. None makes one of
      ``out_dtype``, None as B.
    * ``bias``: added, (N,) of out's dtype. ``use_split_accumulator``: False lets FP8 products accumulate in
      the tensor cores' own width.
    * ``grad``: accepted with no bias. Others at their defaults, NotImplementedError otherwise.

    Raises ArgumentError for what is no tensor and for another layout, ShapeError or FormatError for what does
    not fit.
    """
    op = "general_gemm"
    refuse(op, _NEUTRAL, locals())
    neutral_beta = 1.0 if accumulate and beta is not None else None
    only(op, {"beta": (beta, neutral_beta), "grad": (grad and bias is not None, False)})
    choice(op, "layout", layout, _LAYOUTS)
    for name, given in (("A", A), ("B", B), ("out", out), ("bias", bias)):
        if given is not None or name in "AB":
            tensor(op, name, given)
    own, b_dim, a_dim = _LAYOUTS[layout]
    if not isinstance(A, QuantizedTensor) or not isinstance(B, QuantizedTensor):
        A, B = (t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (A, B))
    a_sizes, b_sizes = ((t.numel() // max(t.shape[-1], 1), t.shape[-1]) for t in (A, B))
    if a_sizes[a_dim] != b_sizes[b_dim] or A.device != B.device:
        got = f"{tuple(A.shape)} on {A.device}, {tuple(B.shape)} on {B.device}"
        raise ShapeError(op, "A, B", got, f"one contraction, and one device, with layout {layout}")
    rows = B.shape[:-1] if b_dim else (b_sizes[1],)
    shape = (*rows, a_sizes[1 - a_dim])
    dtype = out.dtype if out is not None else B.dtype if out_dtype is None else out_dtype
    if dtype not in FLOATS or (accumulate and out is None):
        got = f"{dtype}, {'none' if out is None else 'given'}"
        raise FormatError(op, "out", got, "h or float32, and given to accumulate")
    y = torch.empty(shape, dtype=dtype, device=B.device) if out is None else out
    if tuple(y.shape) != shape or not y.is_contiguous():
        got = f"shape {tuple(y.shape)}, strides {y.stride()}"
        raise ShapeError(op, "out", got, f"contiguous {shape}")
    result, added = as_view(y).rows(), None if bias is None else as_view(bias.contiguous())
    kernels, stream = dispatch.kernels(result.device), stream_of(result.device)
    onto, fp8 = result if accumulate else None, isinstance(A, QuantizedTensor)
    size = int(kernels.fp8_gemm_workspace(*result.shape) if fp8 else kernels.gemm_workspace())
    # where cuBLASLt cannot write: by way of float32
    size += 4 * result.size if fp8 and result.ptr % 16 else 0
    space = as_view(torch.empty(max(size, 1), dtype=torch.uint8, device=B.device))
    if not isinstance(A, QuantizedTensor) or not isinstance(B, QuantizedTensor):  # neither is
        if A.dtype is not B.dtype:
            raise FormatError(op, "A", A.dtype, f"{B.dtype}, as B")
        left, right = (as_view(t.contiguous()).rows() for t in (B, A))
        kernels.gemm(left, right, result, own, added, onto, space, stream)
        return y, None, None, None
    b, a = B.operand(b_dim == 0), A.operand(a_dim == 0)
    if A.product is not B.product:
        got = f"scales by {a[2].granularity} and by {b[2].granularity}"
        raise FormatError(op, "A, B", got, "the same kind of scales")
    ws = WorkingSet(kernels, {}, {}, {}, {"workspace": space}, stream)
    A.product.multiply(ws, b, a, result, not use_split_accumulator, added, onto)
    return y, None, None, None


_NEUTRAL = defaults(
    general_gemm, "quantization_params gelu gelu_in alpha ub ub_type extra_output bulk_overlap"
)
