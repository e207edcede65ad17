"""Norms, rotations, softmax, dropout and products of ``transformer_engine_torch``, without autograd: each has
its backward pass as a function beside it. ``quantizer`` casts a result; None leaves it in high precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from fp8kit.backends import dispatch
from fp8kit.errors import ShapeError
from fp8kit_torch.checks import tensor
from fp8kit_torch.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from fp8kit_torch.state import stream_of
from fp8kit_torch.te_compat.dtypes import TE_DType_To_Torch
from fp8kit_torch.te_compat.gemms import general_gemm
from fp8kit_torch.views import as_view


class NVTE_Fused_Attn_Backend(IntEnum):
    """Transformer Engine's kernels of attention."""

    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


# --- norms --------------------------------------------------------------------------------------------------


def _alike(op: str, x: Tensor, *others: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """x as rows, and what is beside it in its dtype; all in float32 where the dtypes differ."""
    tensor(op, "input", x)
    same = all(other is None or other.dtype is x.dtype for other in others)
    dtype = x.dtype if same else torch.float32
    rows = x.detach().reshape(-1, x.shape[-1]).to(dtype)
    return rows, [None if each is None else each.detach().to(dtype).contiguous() for each in others]


@torch.no_grad()
def _norm(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None, *how: Any
) -> tuple[Any, Tensor | None, Tensor]:
    quantizer, otype, zero_centered = how
    rows, (w, b) = _alike(op, x, weight, bias)
    if w is None or w.shape != rows.shape[1:]:
        raise ShapeError(op, "weight", f"shape {tuple(weight.shape)}", tuple(rows.shape[1:]))
    y, rstd = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if bias is not None else None
    views = [None if each is None else as_view(each) for each in (rows, w, b, y, mean, rstd)]
    kind = "RMSNorm" if bias is None else "LayerNorm"
    device = views[3].device  # type: ignore[union-attr]
    settings = None, None, kind, float(eps), bool(zero_centered), stream_of(device)
    dispatch.kernels(device).norm_fwd(*views, *settings)
    dtype = TE_DType_To_Torch.get(otype, otype)
    made = y.view(x.shape).to(x.dtype if dtype is None else dtype)
    if quantizer is not None:
        made = quantizer(made) if out is None else quantizer.update_quantized(made, out)
    elif out is not None:
        made = out.copy_(made)
    return made, mean, rstd


@torch.no_grad()
def _norm_bwd(
    op: str,
    dz: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    zero_centered: bool,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, (g, w, base) = _alike(op, x, dz, weight, add)
    if g is None or w is None or g.numel() != rows.numel():
        raise ShapeError(op, "dz", f"shape {tuple(dz.shape)}", tuple(x.shape))
    dx, dw, db = torch.empty_like(rows), torch.empty_like(w), torch.empty_like(w)
    device = as_view(rows).device
    kernels = dispatch.kernels(device)
    size = int(kernels.norm_bwd_workspace(*rows.shape))
    space = as_view(torch.empty(max(size, 1), dtype=torch.uint8, device=x.device))
    read = [g.view(rows.shape), rows, w, mean, rstd, None if base is None else base.view(rows.shape)]
    made = [dx, dw, None if mean is None else db]
    views = [None if each is None else as_view(each) for each in (*read, *made)]
    kind = "RMSNorm" if mean is None else "LayerNorm"
    kernels.norm_bwd(*views, kind, bool(zero_centered), space, stream_of(device))
    return dx.view(x.shape).to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[LayerNorm of the rows of ``input``, their means, 1 / their standard deviations, both float32 (rows,)].
    ``ln_out``: where it is written, or None. ``otype``: a DType, or torch's dtype, or None for input's.
    ``sm_margin``: not looked at."""
    how = quantizer, otype, zero_centered_gamma
    return list(_norm("layernorm_fwd", input, weight, bias, eps, ln_out, *how))


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[x's gradient, the weight's, the bias's] of ``layernorm_fwd``."""
    return list(_norm_bwd("layernorm_bwd", dz, x, mu, rsigma, gamma, zero_centered_gamma))


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[RMSNorm of the rows of ``input``, None, 1 / their root mean square, float32 (rows,)]; arguments as
    those of ``layernorm_fwd``."""
    how = quantizer, otype, zero_centered_gamma
    return list(_norm("rmsnorm_fwd", input, weight, None, eps, ln_out, *how))


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[x's gradient, the weight's] of ``rmsnorm_fwd``."""
    return list(_norm_bwd("rmsnorm_bwd", dz, x, None, rsigma, gamma, zero_centered_gamma)[:2])


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[x's gradient + ``add``, the weight's] of ``rmsnorm_fwd``."""
    return list(_norm_bwd("rmsnorm_bwd_add", dz, x, None, rsigma, gamma, zero_centered_gamma, add)[:2])


# --- rotations ----------------------------------------------------------------------------------------------

_FORMATS = ("sbhd", "bshd", "thd")


def _transposed(function: Callable[[Tensor], Any], shape: Any, grads: Any) -> Tensor:
    """The gradient of a linear function's argument of that shape."""
    first = grads[0] if isinstance(grads, tuple) else grads
    with torch.enable_grad():
        x = torch.zeros(shape, dtype=first.dtype, device=first.device, requires_grad=True)
        (found,) = torch.autograd.grad(function(x), x, grads)
    return found


def _rotated(
    freqs: Tensor, starts: Tensor | None, qkv_format: int, interleaved: bool, *how: Any
) -> Callable[[Tensor], Tensor]:
    form = _FORMATS[int(qkv_format)]
    return lambda x: apply_rotary_pos_emb(x, freqs, form, starts, interleaved, True, *how)


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``apply_rotary_pos_emb``, without a gradient. ``qkv_format``: an NVTE_QKV_Format."""
    with torch.no_grad():
        return _rotated(freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)(input)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """The gradient of ``fused_rope_forward``'s input."""
    rotate = _rotated(freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)
    return _transposed(rotate, output_grads.shape, output_grads)


def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: int,
    interleaved: bool,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``apply_fused_qkv_rotary_pos_emb``, without a gradient."""
    how = _FORMATS[int(qkv_format)], start_positions, interleaved, None, cp_size, cp_rank
    with torch.no_grad():
        return apply_fused_qkv_rotary_pos_emb(qkv_input, q_freqs, k_freqs, qkv_split_arg_list, *how)


def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: int,
    interleaved: bool,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """The gradient of ``fused_qkv_rope_forward``'s input."""
    sizes = [int(n) for n in qkv_split_arg_list]
    how = _FORMATS[int(qkv_format)], start_positions, interleaved, None, cp_size, cp_rank
    shape = (*k_grad_out.shape[:-1], sum(sizes))

    def rotate(x: Tensor) -> Any:
        return apply_fused_qkv_rotary_pos_emb(x, q_freqs, k_freqs, sizes, *how)

    return _transposed(rotate, shape, (q_grad_out, k_grad_out, v_grad_out))


# --- softmax, dropout ---------------------------------------------------------------------------------------


@torch.no_grad()
def _softmax(input: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """softmax(scale x) over the last dimension, in float32; 0 where ``mask`` is true, also of whole rows."""
    scores = input.float() * float(scale)
    if mask is None:
        return scores.softmax(-1).to(input.dtype)
    hidden = mask.bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0).to(input.dtype)


@torch.no_grad()
def scaled_softmax_backward(output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Tensor:
    """The input's gradient, of the result and its gradient: that of all four."""
    y, grad = softmax_results_.float(), output_grad_.float()
    return ((grad - (y * grad).sum(-1, keepdim=True)) * y * float(scale_factor)).to(output_grad_.dtype)


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """softmax(scale_factor x) along the last dimension."""
    return _softmax(input, scale_factor)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """The same of (b, h, sq, sk), 0 where ``mask`` (b or 1, 1, sq, sk) is not 0."""
    return _softmax(input, scale_factor, mask)


def _behind(input: Tensor) -> Tensor:
    """True behind the diagonal that ends in the last row and column."""
    sq, sk = input.shape[-2:]
    return torch.ones(sq, sk, dtype=torch.bool, device=input.device).triu(sk - sq + 1)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """The same of (batches, s, s), 0 above the diagonal."""
    if input.shape[-1] != input.shape[-2]:
        wanted = "as many rows as columns"
        raise ShapeError("scaled_upper_triang_masked_softmax_forward", "input", tuple(input.shape), wanted)
    return _softmax(input, scale_factor, _behind(input))


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """The same of (b, h, sq, sk), 0 behind the diagonal that ends in the last row and column."""
    return _softmax(input, scale_factor, _behind(input))


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


@torch.no_grad()
def dropout_fwd(input: Tensor, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """[dropped input, mask]: each element is 0 with that probability, drawn from torch's generator, and
    divided by its complement otherwise. ``mask``: bits of what is left, uint8 (elements / 8,)."""
    keep = torch.rand(input.numel(), device=input.device) >= dropout_probability
    bits = torch.nn.functional.pad(keep, (0, -keep.numel() % 8)).view(-1, 8)
    mask = (bits * _BITS.to(input.device)).sum(1, dtype=torch.uint8)
    made = dropout_bwd(input, mask, dropout_probability)
    return [made if out is None else out.copy_(made), mask]


@torch.no_grad()
def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """The gradient of ``dropout_fwd``'s input, of its mask."""
    keep = (mask[:, None] & _BITS.to(mask.device)).bool().view(-1)[: grad_output.numel()]
    scale = 1 / (1 - dropout_probability) if dropout_probability < 1 else 0.0
    made = grad_output * scale * keep.view(grad_output.shape)
    return made if grad_input is None else grad_input.copy_(made)


_BITS = 2 ** torch.arange(8, dtype=torch.uint8)

# --- products and versions ----------------------------------------------------------------------------------


def generic_gemm(
    A: Tensor,
    transA: bool,
    B: Tensor,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor | None,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """``cpp_extensions.general_gemm`` of the layout that ``transA`` and ``transB`` say. ``bias_type``,
    ``workspace``, ``workspaceSize``: not looked at."""
    layout = "NT"[bool(transA)] + "NT"[bool(transB)]
    dtype = TE_DType_To_Torch.get(output_dtype, output_dtype)
    gelus, how = (bool(gelu), gelu_in, alpha, beta), (bias, bool(use_split_accumulator), bool(grad))
    shared = comm_overlap, comm_type, extra_output, bool(bulk_overlap)
    return list(general_gemm(A, B, dtype, quantizer, *gelus, bool(accumulate), layout, D, *how, *shared))


def get_cudnn_version() -> int:
    """The version of torch's cuDNN as one number; 0 where there is none."""
    return int(torch.backends.cudnn.version() or 0) if torch.cuda.is_available() else 0


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """(least, greatest) priority of a CUDA stream."""
    least, greatest = torch.cuda.Stream.priority_range()
    return int(least), int(greatest)
