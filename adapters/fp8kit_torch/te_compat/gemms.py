"""``general_gemm``: one product by fp8kit's kernels, without autograd, under the name and with the arguments
of Transformer Engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import choice, number
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.ops.activation import activation
from fp8kit.spec import WorkingSet
from fp8kit_torch.arguments import defaults, refuse
from fp8kit_torch.call import apply
from fp8kit_torch.checks import shown, tensor
from fp8kit_torch.held_values import HeldTensor
from fp8kit_torch.operand_tensor import OperandTensor
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.specs import spec_for
from fp8kit_torch.state import stream_of
from fp8kit_torch.te_compat.block_tensors import BlockTensor
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
) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    """(product, bias gradient, input of GELU, None); what is not asked for is None, and so is a
    communication's output.

    * ``layout``: "TN", B A^T, as y = x W^T of A = W (N, K) and B = x (..., K); "NN", B A, as dx = g W; "NT",
      B^T A, as dW = g^T x.
    * ``A``, ``B``: h, the same dtype, or both ``QuantizedTensor`` of one kind, whose codes are multiplied;
      where one is, its values are.
    * ``out``: where it is written, or, with ``accumulate``, added to ``beta`` (None: 1) times what is there;
      h or float32. None makes one of ``out_dtype``, None as B. ``alpha`` multiplies the product.
    * ``bias``: added, (N,) of out's dtype. With ``grad`` it is not: the second result is then the sum of B's
      rows, in bias' dtype.
    * ``gelu``: the product goes through the tanh form of GELU, and the third result is what went in; with
      ``grad`` it is multiplied by GELU's derivative at ``gelu_in`` instead.
    * ``quantization_params``: a quantizer, which casts the result. ``use_split_accumulator``: False lets FP8
      products accumulate in the tensor cores' own width.
    * ``ub``, ``ub_type``, ``extra_output``, ``bulk_overlap``: at their defaults, NotImplementedError
      otherwise.

    Raises ArgumentError for what is no tensor and for another layout, ShapeError or FormatError for what does
    not fit.
    """
    if isinstance(out, HeldTensor):  # it takes values, and casts them
        y, *beside = general_gemm(**locals() | {"out": out._values().clone()})
        return out.copy_(y), *beside  # type: ignore[return-value]
    op = "general_gemm"
    refuse(op, _NEUTRAL, locals())
    choice(op, "layout", layout, _LAYOUTS)
    for name, given in (("A", A), ("B", B), ("out", out), ("bias", bias), ("gelu_in", gelu_in)):
        if given is not None or name in "AB":
            tensor(op, name, given)
    alpha = number(op, "alpha", alpha, least=-math.inf)
    times = 1.0 if beta is None else number(op, "beta", beta, least=-math.inf)
    if times not in (0.0, 1.0) and not accumulate:
        raise ArgumentError(op, "beta", times, "None, 0 or 1 without accumulate")
    if gelu and grad and gelu_in is None:
        raise ArgumentError(op, "gelu_in", "None", "the input of GELU, with gelu and grad")
    bias_grad = gelu_input = None
    if grad and bias is not None:
        rows = B.dequantize() if isinstance(B, QuantizedTensor) else B
        bias_grad, bias = rows.reshape(-1, rows.shape[-1]).float().sum(0).to(bias.dtype), None
    blocks = isinstance(A, BlockTensor) or isinstance(B, BlockTensor)
    if alpha == times == 1.0 and not (gelu or blocks or quantization_params is not None):
        y = _product(A, B, layout, out_dtype, out, accumulate, bias, use_split_accumulator)
        return y, bias_grad, None, None
    if accumulate and out is None:
        raise FormatError(op, "out", "None", "a tensor to accumulate in")
    dtype = out.dtype if out is not None else B.dtype if out_dtype is None else out_dtype
    multiply = _block_product if blocks else _product
    y = multiply(A, B, layout, torch.float32, None, False, None, use_split_accumulator)
    y = y if alpha == 1.0 else y * alpha
    y = y if bias is None else y + bias
    if gelu and grad:
        with torch.enable_grad():
            inner = gelu_in.detach().float().requires_grad_()
            (y,) = torch.autograd.grad(_gelu(inner), inner, y.view(inner.shape))
    elif gelu:
        gelu_input = y.to(dtype)
        y = _gelu(gelu_input)
    if accumulate and out is not None:
        y = out.float() * times + y
    if out is not None:
        if out.shape != y.shape:
            raise ShapeError(op, "out", f"shape {tuple(out.shape)}", tuple(y.shape))
        y = out.copy_(y)
    y = y.to(dtype)
    return y if quantization_params is None else quantization_params(y), bias_grad, gelu_input, None


@torch.no_grad()
def general_grouped_gemm(
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    out: Sequence[Tensor],
    quantization_params: Sequence[Any] | None,
    out_dtype: torch.dtype | None,
    layout: str = "TN",
    m_splits: Sequence[int] | Tensor | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[Sequence[Tensor], list[Any], list[Any]]:
    """(``out``, bias gradients, inputs of GELU) of ``general_gemm`` for each pair of ``A`` and ``B``; None in
    the lists where nothing was asked for.

    * ``out``: a tensor for each pair, or with ``single_output`` one, whose ``m_splits`` rows are the results
      one after the other. ``bias``: one for each, added with ``use_bias``; with ``grad`` its gradient is made
      instead. ``quantization_params``: a quantizer or None for each, or None. Others as there; ``D_dtype``:
      accepted, ``out`` says it.

    ShapeError where the lists are not as long. A pair without rows writes nothing, and with ``grad`` and
    "NT" zeros.
    """
    op, count = "general_grouped_gemm", len(A)
    targets = list(out)
    if single_output:
        if len(targets) != 1 or m_splits is None:
            got = f"{len(targets)} tensors, m_splits {shown(m_splits)}"
            raise ShapeError(op, "out", got, "one, and m_splits, with single_output")
        targets = list(targets[0].split([int(n) for n in m_splits]))
    casts = [None] * count if quantization_params is None else list(quantization_params)
    biases = list(bias) if bias is not None and use_bias else [None] * count
    lengths = [len(each) for each in (B, targets, casts, biases)]
    if lengths != [count] * 4:
        raise ShapeError(op, "A, B, out, quantization_params, bias", [count, *lengths], "as many of each")
    found: list[tuple[Any, ...]] = []
    for a, b, y, quantizer, own in zip(A, B, targets, casts, biases, strict=True):
        if not b.numel():
            if layout == "NT" and not accumulate:
                y.zero_()
            found.append((y, None if own is None or not grad else torch.zeros_like(own), None))
            continue
        how = {"layout": layout, "gelu": gelu, "grad": grad, "accumulate": accumulate, "out": y}
        made = general_gemm(
            a, b, out_dtype, quantizer, bias=own, use_split_accumulator=use_split_accumulator, **how
        )
        found.append(made[:3])
    if quantization_params is not None and any(each is not None for each in casts):
        out = [each[0] for each in found]
    return out, [each[1] for each in found], [each[2] for each in found]


def _gelu(inner: Tensor) -> Tensor:
    return apply(activation, spec_for("ActivationSpec", "gelu", inner.shape[-1], ()), {"x": inner})["y"]


def _block_product(A: Tensor, B: Tensor, layout: str, *how: Any) -> Tensor:
    """The product of tensors by blocks, float32; of their values where one is not so."""
    if not isinstance(A, BlockTensor) or not isinstance(B, BlockTensor):
        if isinstance(A, QuantizedTensor) and isinstance(B, QuantizedTensor):
            got = f"{type(A).__name__} and {type(B).__name__}"
            raise FormatError("general_gemm", "A, B", got, "the same kind of scales")
        A, B = (t.dequantize() if isinstance(t, BlockTensor) else t for t in (A, B))
        return _product(A, B, layout, *how)
    _, b_dim, a_dim = _LAYOUTS[layout]
    left, right = B.array(not b_dim), A.array(not a_dim)
    left, right = left if b_dim else left.T, right.T if a_dim else right
    if left.shape[1] != right.shape[0]:
        got = f"{tuple(A.shape)}, {tuple(B.shape)}"
        raise ShapeError("general_gemm", "A, B", got, f"one contraction with layout {layout}")
    y: Tensor = left.matmul(right, "float32")
    return y.view(*B.shape[:-1], y.shape[-1]) if b_dim else y


def _product(
    A: Tensor,
    B: Tensor,
    layout: str,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: bool,
    bias: Tensor | None,
    use_split_accumulator: bool,
) -> Tensor:
    """The product by the kernels, (+ bias) (+ out)."""
    op = "general_gemm"
    own, b_dim, a_dim = _LAYOUTS[layout]
    if not isinstance(A, OperandTensor) or not isinstance(B, OperandTensor):
        A, B = (t.dequantize() if isinstance(t, OperandTensor) else t for t in (A, B))
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
    onto, fp8 = result if accumulate else None, isinstance(A, OperandTensor)
    size = int(kernels.fp8_gemm_workspace(*result.shape) if fp8 else kernels.gemm_workspace())
    # where cuBLASLt cannot write: by way of float32
    size += 4 * result.size if fp8 and result.ptr % 16 else 0
    space = as_view(torch.empty(max(size, 1), dtype=torch.uint8, device=B.device))
    if not isinstance(A, OperandTensor) or not isinstance(B, OperandTensor):  # neither is
        if A.dtype is not B.dtype:
            raise FormatError(op, "A", A.dtype, f"{B.dtype}, as B")
        left, right = (as_view(t.contiguous()).rows() for t in (B, A))
        kernels.gemm(left, right, result, own, added, onto, space, stream)
        return y
    b, a = B.operand(b_dim == 0), A.operand(a_dim == 0)
    if A.product is not B.product:
        got = f"scales by {a[2].granularity} and by {b[2].granularity}"
        raise FormatError(op, "A, B", got, "the same kind of scales")
    ws = WorkingSet(kernels, {}, {}, {}, {"workspace": space}, stream)
    A.product.multiply(ws, b, a, result, not use_split_accumulator, added, onto)
    return y


_NEUTRAL = defaults(general_gemm, "ub ub_type extra_output bulk_overlap")
