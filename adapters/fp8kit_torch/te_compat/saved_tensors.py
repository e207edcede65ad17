"""Quantised tensors taken apart and put together, their memory exchanged, and masters cast to weights:
what Transformer Engine's programs do to weights in FP8 beside calling them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError
from fp8kit.float8 import quantize
from fp8kit_torch.checks import is_group, shown
from fp8kit_torch.operand_tensor import OperandTensor
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.weight_scales import amax_of, scales_of


def prepare_for_saving(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[Any]]:
    """(plain tensors for ``ctx.save_for_backward``, an object for each argument): a QuantizedTensor is taken
    apart, others are as they are."""
    saved: list[Tensor | None] = []
    shells: list[Any] = []
    for each in tensors:
        if isinstance(each, QuantizedTensor):
            parts, shell = each.prepare_for_saving()
            saved += parts
            shells.append(shell)
        else:
            saved.append(each)
            shells.append(None)
    return saved, shells


def restore_from_saved(tensors: list[Any], saved_tensors: Any, return_saved_tensors: bool = False) -> Any:
    """The arguments of ``prepare_for_saving``, of its objects and ``ctx.saved_tensors``; with
    ``return_saved_tensors`` also what is left of these."""
    left, found = list(saved_tensors), []
    for shell in tensors:
        if shell is None:
            found.append(left.pop(0))
        else:
            left = shell.restore_from_saved(left)
            found.append(shell)
    return (found, left) if return_saved_tensors else found


def restore_from_func_ctx(ctx: Any) -> Any:
    """``restore_from_saved`` of ``ctx.tensor_objects`` and ``ctx.saved_tensors``, which are taken from
    ``ctx``. AttributeError where it has no such objects."""
    found = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return found


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: Tensor) -> None:
    """Let the codes of a tensor lie in ``new_raw_data``, contiguous uint8 of as many elements: they are moved
    there, and values stay. Layers copy codes whose sizes are no multiples of 16, or which do not begin at
    one.

    ArgumentError for a tensor without codes of rows, FormatError for other memory.
    """
    codes = tensor._rowwise_data if isinstance(tensor, OperandTensor) else None
    if codes is None:
        wanted = "a Float8Tensor or Float8BlockwiseQTensor with rowwise codes"
        raise ArgumentError("replace_raw_data", "tensor", shown(tensor), wanted)
    fits = new_raw_data.dtype is torch.uint8 and new_raw_data.numel() == codes.numel()
    if not fits or not new_raw_data.is_contiguous() or new_raw_data.device != codes.device:
        wanted = f"contiguous uint8 of {codes.numel()} elements on {codes.device}"
        raise FormatError("replace_raw_data", "new_raw_data", shown(new_raw_data), wanted)
    with torch.no_grad():
        new_raw_data.detach().view(codes.shape).copy_(codes)
        tensor._rowwise_data = new_raw_data.detach()  # type: ignore[misc]


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any = None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast masters, of which each process may have a part, to weights that are held in narrow formats.

    * ``model_weights``: whole weights, the same in each process. ``master_weights``: of each the part that
      this process has, as many elements of the flat weight from ``start_offsets`` on; None: it has none. A
      master is first rounded to the weight's dtype, as a weight in high precision would be.
    * ``group``: the processes that share amaxes, of which scales are made; None: this one alone.
    * ``fsdp_shard_model_weights``: uint8 memory of the part's codes, or None for an item; None: the weight's
      own memory.
    * ``manual_post_all_gather_processing``: the transposed codes are left to ``post_all_gather_processing``.

    Codes of other parts stay as they are: an all-gather of ``_rowwise_data`` fetches them. What the weights
    kept as ``get_high_precision_init_val`` is dropped. UnsupportedError for parts of weights in MXFP8 and
    NVFP4, ArgumentError and ShapeError for what does not fit.
    """
    op = "quantize_master_weights"
    shards = [None] * len(model_weights) if fsdp_shard_model_weights is None else fsdp_shard_model_weights
    lengths = {len(each) for each in (model_weights, master_weights, start_offsets, shards)}
    if len(lengths) != 1:
        raise ShapeError(op, "master_weights, start_offsets", sorted(lengths), "as many as model_weights")
    if group is not None and not is_group(group):
        raise ArgumentError(op, "group", shown(group), "a process group, or None")
    for weight, master, start, shard in zip(
        model_weights, master_weights, start_offsets, shards, strict=True
    ):
        if not isinstance(weight, QuantizedTensor):
            raise ArgumentError(op, "model_weights", shown(weight), "QuantizedTensors")
        weight.clear_high_precision_init_val()
        first = 0 if start is None else int(start)
        count = 0 if master is None else master.numel()
        if first < 0 or first + count > weight.numel():
            raise ShapeError(
                op, "start_offsets", f"{first} and {count} elements", f"{weight.numel()} at most"
            )
        values = None if master is None else master.detach().reshape(-1).to(weight.device, weight.dtype)
        if isinstance(weight, OperandTensor):
            _cast_part(weight, values, first, group, shard)
            if not manual_post_all_gather_processing:
                weight._transpose_again()
        elif values is not None and count == weight.numel():
            weight.quantize_(values.view(weight.shape))
        else:
            got, wanted = f"{count} of {weight.numel()} elements", "all: scales of such blocks are not shared"
            raise UnsupportedError(op, "master_weights", got, wanted)


cast_master_weights_to_fp8 = quantize_master_weights  # by its older name


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the transposed codes of weights whose codes were fetched."""
    for weight in model_weights if isinstance(model_weights, list | tuple) else [model_weights]:
        if isinstance(weight, OperandTensor):
            weight._transpose_again()


def _cast_part(weight: OperandTensor, values: Tensor | None, first: int, group: Any, shard: Any) -> None:
    """Write the codes of a part, and the scales of the whole, whose amaxes ``group`` shares."""
    rule, shape = weight._fp8.w, weight._size
    whole = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
    if values is not None:
        whole[first : first + values.numel()] = values
    quantizer = weight._quantizer
    given = getattr(quantizer, "scale", None) if rule.needs_state else None
    amax = amax_of(whole.view(shape), rule)
    if group is not None:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
    if given is not None:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
        scale = given.view_as(amax)
        inverse = 1 / scale
    else:
        scale, inverse = scales_of(amax, rule, weight.dtype)
    own = weight._rowwise_scale_inv
    assert own is not None
    held = weight.product.grid(own, rule)
    held[: inverse.shape[0], : inverse.shape[-1] if inverse.ndim > 1 else 1].copy_(inverse)
    if values is None:
        return
    codes = quantize(whole.view(shape), rule.format, scale, rule.granularity).data.reshape(-1)
    part = codes[first : first + values.numel()]
    target = getattr(shard, "_rowwise_data", shard)
    if target is not None:
        target.detach().view(-1).copy_(part)
        return
    rowwise = weight._rowwise_data
    assert rowwise is not None
    if not rowwise.is_contiguous():
        weight._rowwise_data = rowwise = rowwise.contiguous()
    rowwise.view(-1)[first : first + values.numel()] = part
