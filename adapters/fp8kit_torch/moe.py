"""Mixture of experts: tokens sorted by expert, and back.

A permuted row comes from one token, for one expert: ``row_id_map`` says which. It is an int32 (rows, 2) of
(token, slot), where slot is the column of the routing map (an expert for a mask, the k-th choice for
indices), and (-1, -1) for a row that no token fills. Sums over a token's rows are made in float32, in the
order of the rows, and rounded once, in both directions. Nothing waits for the device unless it says so. Names
and arguments are Transformer Engine's.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, BackendError, FormatError, ShapeError
from fp8kit.layers.arguments import extent, text
from fp8kit.ops.expert_linear import EXPERT_ARGUMENTS
from fp8kit.ops.permute import MAP_ARGUMENTS, dispatch_rows, expert_rows, permute, unpermute, want_chunks
from fp8kit.spec import Operation
from fp8kit_torch.call import apply
from fp8kit_torch.checks import (
    CALLED,
    check,
    is_integer,
    named,
    one,
    optional,
    refusals_of,
    shown,
    tensor,
    want_groups,
)
from fp8kit_torch.experts import expert_numbers, expert_product
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.specs import any_rows, spec_for
from fp8kit_torch.views import FLOATS

_DISPATCHED = CALLED | {"probs": optional(tensor), "align_size": optional(CALLED["align_size"])}
_GROUPED = {
    **named(tensor, "x kernel group_sizes"),
    "bias": optional(tensor),
    "layout": one("io", "oi"),
    "slots": extent,
    "name": optional(text),
}
_UNPERMUTED = CALLED | {"probs": CALLED["merging_probs"]}


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """(rows sorted by expert, row_id_map). Within an expert, rows keep the order of their tokens.

    * ``inp``: float32, bfloat16 or float16 (tokens, hidden). Of a tensor in FP8, MXFP8 or NVFP4 the rows are
      one of its kind, the same codes, without those of the columns; with scales of 128 x 128 they are values.
    * ``routing_map``: "mask": bool or integer (tokens, experts), not 0 where the token goes to the expert;
      "index": integer (tokens, topk), numbers of experts, -1 for none.
    * ``num_out_tokens``: number of rows of the result; rows beyond what is routed are 0, routed ones beyond
      it are dropped. Needed for a mask; 0 or less means tokens * topk for indices.
    * ``max_token_num``: a hint for a workspace that is not needed here.

    Raises ShapeError and FormatError.
    """
    if not torch.compiler.is_compiling():
        check("moe_permute", CALLED, locals())
    _check("moe_permute", inp, routing_map)
    if map_type == "mask":
        row_id_map = _map_of_mask("moe_permute", routing_map, num_out_tokens)
    elif map_type == "index":
        row_id_map = _map_of_index(routing_map, num_out_tokens)
    else:
        raise FormatError("moe_permute", "map_type", repr(map_type), '"mask" or "index"')
    return _permute("moe_permute", inp, row_id_map)[0], row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows sorted by expert, each row's probability, row_id_map), as ``moe_permute`` with a mask.

    ``probs``: floating (tokens, experts); the second result is of its dtype, (num_out_tokens,), 0 in rows
    that no token fills.
    """
    if not torch.compiler.is_compiling():
        check("moe_permute_with_probs", CALLED, locals())
    _check("moe_permute_with_probs", inp, routing_map, probs)
    row_id_map = _map_of_mask("moe_permute_with_probs", routing_map, num_out_tokens)
    rows, row_probs = _permute("moe_permute_with_probs", inp, row_id_map, probs)
    return rows, row_probs, row_id_map  # type: ignore[return-value]


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, probabilities, row_id_map, pad_offsets, padded_tokens_per_expert): each expert's rows are filled
    up with zeros to a multiple of ``align_size``.

    ``tokens_per_expert``: integer (experts,), the mask's column sums; it is read on the host, for which
    ``token_dispatch`` has no need. ``row_id_map`` does not know of the padding: ``moe_unpermute`` takes it
    together with ``pad_offsets``, int64 (experts,), the rows of padding before each expert.

    Raises ShapeError, FormatError, and on the CPU ArgumentError for other numbers of tokens than the mask's.
    """
    op = "moe_permute_and_pad_with_probs"
    if not torch.compiler.is_compiling():
        check(op, CALLED, locals())
    _check(op, inp, routing_map, probs)
    if tokens_per_expert.shape != routing_map.shape[1:]:
        raise ShapeError(op, "tokens_per_expert", tuple(tokens_per_expert.shape), f"({routing_map.size(1)},)")
    if align_size < 1:
        raise ShapeError(op, "align_size", align_size, "at least 1")
    counts = tokens_per_expert.to(inp.device, torch.int64)
    if _looked_at(inp) and not torch.equal(counts, own := (routing_map != 0).sum(0)):
        raise ArgumentError(op, "tokens_per_expert", counts.tolist(), f"the mask's {own.tolist()}")
    padded = (counts + align_size - 1) // align_size * align_size
    fill = padded - counts
    pad_offsets = fill.cumsum(0) - fill
    filled, rows = torch.stack((counts.sum(), padded.sum())).tolist()
    row_id_map = _map_of_mask(op, routing_map, filled)
    whole = _padded(row_id_map, pad_offsets, rows)
    permuted, row_probs = _permute(op, inp, whole, probs)
    return permuted, row_probs, row_id_map, pad_offsets, padded  # type: ignore[return-value]


def token_dispatch(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int,
    probs: Tensor | None = None,
    align_size: int | None = None,
    num_experts: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, None, Tensor]:
    """(rows by expert, their probabilities or None, row_id_map, None, tokens_per_expert), with as many rows
    as can be needed: nothing is read on the host, so that a CUDA graph can hold the call. The same as in JAX.

    * ``inp``: float32, bfloat16 or float16 (tokens, hidden).
    * ``routing_map``: a mask, bool or integer (tokens, experts), not 0 where the token goes to the expert;
      with ``num_experts`` indices, integer (tokens, topk), those out of [0, num_experts) none; bool and uint8
      are masks then too. Rows of an expert keep the order of their tokens.
    * ``num_out_tokens``: number of rows; those behind the last expert's are 0, more are dropped. With
      ``align_size`` each expert's rows are filled up with zeros to a multiple of it, and there are as many
      rows as that can need: num_out_tokens + experts (align_size - 1), rounded down to a multiple.
    * ``probs``: floating (tokens, experts), or (tokens, topk) for indices; they go along.

    row_id_map: int32 (rows, 2), what ``moe_unpermute`` takes, padding with it, so that there are no
    ``pad_offsets``; tokens_per_expert: int32 (experts,), padding with them: the ``m_splits`` of
    ``GroupedLinear(use_grouped_tensor=True)``. Differentiable in inp and probs. Raises ShapeError,
    FormatError and ArgumentError.
    """
    op = "token_dispatch"
    if not torch.compiler.is_compiling():
        check(op, _DISPATCHED, locals())
    _check(op, inp, routing_map, probs)
    mask = num_experts is None or routing_map.dtype in (torch.bool, torch.uint8)
    routing = (routing_map != 0).to(torch.uint8) if mask else expert_numbers(routing_map)
    experts, rows, align = dispatch_rows(inp, routing, num_out_tokens, align_size, num_experts)
    rows, like = any_rows(rows, inp)
    spec = spec_for("ExpertRowsSpec", experts, rows, align)
    made = _named(op, expert_rows, spec, {"routing": routing, "like": like})
    return *_permute(op, inp, made["row_map"], probs), made["row_map"], None, made["sizes"]


def grouped_dense(
    x: Tensor,
    kernel: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    layout: str = "io",
    slots: int = 0,
    *,
    name: str | None = None,
) -> Tensor:
    """y[r] = x[r] kernel[e] + bias[e] for the rows r of group e; rows of no group, behind the last one's, are
    0, and what lies there in x, and in y's gradient, counts in no scale. The product of ``GroupedLinear``
    with sizes on the device, of one parameter.

    * ``x``: float32, bfloat16 or float16 (M, K), rows of group 0 first; ``kernel``: (E, K, N), or with
      ``layout`` "oi" (E, N, K); ``bias``: (E, N) or None; all of one dtype.
    * ``group_sizes``: integer (E,). On a GPU they are not looked at, and what they claim beyond M does not
      count; on the CPU that is an ArgumentError, and so is a negative one.
    * ``slots``: not 0 where group e has rows e * slots ... of x, of which its first ``group_sizes[e]`` count,
      as in decoding; M is then E * slots.
    * ``name``: what ``recipe.CustomRecipe`` and ``recipe.PerLayer`` call the layer, a "GroupedLinear".

    FP8 under ``autocast``, with recipes whose scales follow from the data. Differentiable in x, kernel and
    bias. Returns (M, N). Raises ShapeError, FormatError, ArgumentError and UnsupportedError.
    """
    op = "grouped_dense"
    if not torch.compiler.is_compiling():
        check(op, _GROUPED, locals())
    if kernel.ndim != 3:
        raise ShapeError(op, "kernel", shown(kernel), "(experts, in, out), or as layout says")
    want_groups(op, "group_sizes", group_sizes, kernel.shape[0])
    sizes, layer = expert_numbers(group_sizes).to(x.device), ("GroupedLinear", name or "")
    with refusals_of(op, **EXPERT_ARGUMENTS):
        return expert_product(x, sizes, kernel, bias, layer, layout, op, slots)


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """The sum of each token's rows, times their probabilities where there are such: (tokens, hidden) of
    ``inp``'s dtype.

    * ``inp``: float32, bfloat16 or float16 (rows, hidden), rows as ``moe_permute`` gave them; of a tensor in
      FP8 its values, so that the sums are plain.
    * ``row_id_map``: what it returned.
    * ``merging_probs``: floating (tokens, experts) for a mask, (tokens, topk) for indices. ``probs`` is its
      deprecated name.
    * ``restore_shape``: (tokens, hidden); needed unless there are as many rows as tokens or ``merging_probs``
      tells.
    * ``pad_offsets``: as ``moe_permute_and_pad_with_probs`` gave them, for rows that it padded.

    Raises ShapeError and FormatError.
    """
    op = "moe_unpermute"
    if not torch.compiler.is_compiling():
        check(op, _UNPERMUTED, locals())
    if map_type not in ("mask", "index"):
        raise FormatError(op, "map_type", repr(map_type), '"mask" or "index"')
    if probs is not None:
        if merging_probs is not None:
            raise FormatError(op, "probs", "probs and merging_probs", "one of them")
        warnings.warn(
            "moe_unpermute: probs is deprecated, use merging_probs", DeprecationWarning, stacklevel=2
        )
        merging_probs = probs
    if inp.ndim != 2 or not inp.is_floating_point():
        raise ShapeError(op, "inp", shown(inp), "floating (rows, hidden)")
    tensors = {"row_id_map": row_id_map, "merging_probs": merging_probs, "pad_offsets": pad_offsets}
    for name, t in tensors.items():
        if t is not None and t.device != inp.device:
            raise BackendError(op, name, f"device {t.device}", f"device {inp.device}, as inp")
    if row_id_map.ndim != 2 or row_id_map.size(1) != 2 or row_id_map.dtype != torch.int32:
        raise ShapeError(op, "row_id_map", shown(row_id_map), "what moe_permute returned, int32 (rows, 2)")
    rows = inp.size(0)
    if merging_probs is not None and (merging_probs.ndim != 2 or not merging_probs.is_floating_point()):
        raise ShapeError(op, "merging_probs", shown(merging_probs), "floating (tokens, experts or topk)")
    if pad_offsets is not None:
        experts = pad_offsets.numel()
        if merging_probs is not None and map_type == "mask":
            experts = merging_probs.size(1)
        if pad_offsets.shape != (experts,) or pad_offsets.dtype is not torch.int64:
            returned = "what moe_permute_and_pad_with_probs returned, int64 (experts,)"
            raise ShapeError(op, "pad_offsets", shown(pad_offsets), returned)
        most = int(pad_offsets.max()) if experts and _looked_at(inp) else 0
        # compiled, neither number need be known
        if not torch.compiler.is_compiling() and rows < row_id_map.size(0) + most:
            wanted = f"{row_id_map.size(0)}, as in row_id_map, and their padding"
            raise ShapeError(op, "inp", f"{rows} rows", wanted)
        row_id_map = _padded(row_id_map, pad_offsets, rows)
    elif rows != row_id_map.size(0):
        raise ShapeError(op, "inp", f"{rows} rows", f"{row_id_map.size(0)}, as in row_id_map")
    tokens = rows if merging_probs is None else merging_probs.size(0)
    if restore_shape is not None:
        wanted = f"(tokens, {inp.size(1)})"
        if not isinstance(restore_shape, tuple | list) or not all(
            type(n) is int and n >= 0 for n in restore_shape
        ):
            raise ArgumentError(op, "restore_shape", shown(restore_shape), wanted)
        count = restore_shape[0] if restore_shape and merging_probs is None else tokens
        if tuple(restore_shape) != (count, inp.size(1)):
            raise ShapeError(
                op, "restore_shape", tuple(restore_shape), f"{wanted}, tokens as in merging_probs"
            )
        tokens = count
    tokens, like = any_rows(tokens, inp) if merging_probs is None else (-1, None)
    inputs = {"x": inp, "row_map": row_id_map, "probs": merging_probs, "like": like}
    return _named(op, unpermute, spec_for("UnpermuteSpec", tokens), inputs)["y"]


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """``inp`` cut into chunks of ``split_sizes`` rows, put together again in the order ``sorted_index``.

    ``inp``: (rows, hidden); ``split_sizes``: integer (chunks,), adding up to rows; ``sorted_index``: integer
    (chunks,), a permutation. Raises ShapeError and FormatError, of values where both lie on the CPU.
    """
    if not torch.compiler.is_compiling():
        check("moe_sort_chunks_by_index", CALLED, locals())
    return _sorted(inp, _chunk_rows("moe_sort_chunks_by_index", inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """``moe_sort_chunks_by_index`` of ``inp`` and of ``probs``, floating (rows,)."""
    op = "moe_sort_chunks_by_index_with_probs"
    if not torch.compiler.is_compiling():
        check(op, CALLED, locals())
    rows = _chunk_rows(op, inp, split_sizes, sorted_index)
    if probs.shape[:1] != inp.shape[:1]:
        raise ShapeError(op, "probs", tuple(probs.shape), f"({inp.size(0)},)")
    return _sorted(inp, rows), _sorted(probs, rows)


# --- maps ---------------------------------------------------------------------------------------------------


def _looked_at(tensor: Tensor) -> bool:
    """Whether values are there without waiting for a device."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _check(op: str, inp: Tensor, routing_map: Tensor, probs: Tensor | None = None) -> None:
    if inp.ndim != 2 or not inp.is_floating_point():
        raise ShapeError(op, "inp", shown(inp), "floating (tokens, hidden)")
    numbers = routing_map.is_floating_point() or routing_map.is_complex()
    if numbers or routing_map.ndim != 2 or routing_map.size(0) != inp.size(0):
        wanted = f"bool or integer ({inp.size(0)}, experts or topk)"
        raise ShapeError(op, "routing_map", shown(routing_map), wanted)
    if probs is not None and (probs.shape != routing_map.shape or not probs.is_floating_point()):
        raise ShapeError(op, "probs", shown(probs), f"floating {tuple(routing_map.shape)}")


def _map_of_mask(op: str, mask: Tensor, rows: int) -> Tensor:
    """The map of a mask (tokens, experts), expert after expert."""
    # one that compiled code reads from a tensor has no sign yet; ``new_full`` looks at it then
    traced = torch.compiler.is_compiling()
    if not isinstance(rows, int) or (not traced and rows < 0):
        raise ShapeError(op, "num_out_tokens", rows, "an int >= 0: the number of rows")
    tokens, experts = mask.shape
    taken = (mask != 0).t().reshape(-1)
    place = taken.cumsum(0) - 1
    place = torch.where(taken & (place < rows), place, rows)  # what has no row goes to one beyond the last
    numbers = torch.arange(experts * tokens, device=mask.device)
    source = numbers.new_full((rows + 1,), -1).scatter_(0, place, numbers)[:rows]
    return _pair(source % max(tokens, 1), source // max(tokens, 1), source >= 0)


def _map_of_index(index: Tensor, rows: int) -> Tensor:
    """The map of indices (tokens, topk), expert after expert."""
    flat = index.reshape(-1).to(torch.int64)
    key = torch.where(flat < 0, torch.iinfo(torch.int64).max, flat)
    order = torch.sort(key, stable=True).indices
    if 0 < rows < order.numel():
        order = order[:rows]
    topk = max(index.size(1), 1)
    found = _pair(order // topk, order % topk, flat[order] >= 0)
    missing = max(rows - order.numel(), 0)
    return torch.cat((found, found.new_full((missing, 2), -1))) if missing else found


def _pair(token: Tensor, slot: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid[:, None], torch.stack((token, slot), 1), -1).to(torch.int32)


def _padded(row_id_map: Tensor, pad_offsets: Tensor, rows: int) -> Tensor:
    """The map of ``rows`` padded rows: an expert's rows move down by the padding before it."""
    token, expert = row_id_map.to(torch.int64).unbind(1)
    place = torch.arange(token.numel(), device=token.device) + pad_offsets[expert.clamp(min=0)]
    place = torch.where(token >= 0, place, rows)
    return row_id_map.new_full((rows + 1, 2), -1).index_copy_(0, place, row_id_map)[:rows]


def _chunk_rows(op: str, inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The row of ``inp`` that each row of the result is."""
    if inp.ndim != 2:
        raise ShapeError(op, "inp", shown(inp), "(rows, features)")
    for name, t in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        if not is_integer(t) or t.dtype is torch.bool:
            raise FormatError(op, name, f"{t.dtype} on {t.device}", "integers with values")
    if split_sizes.ndim != 1 or sorted_index.shape != split_sizes.shape:
        wanted = f"(chunks,), as split_sizes' {tuple(split_sizes.shape)}"
        raise ShapeError(op, "sorted_index", tuple(sorted_index.shape), wanted)
    rows = inp.size(0)
    if _looked_at(split_sizes) and _looked_at(sorted_index):
        want_chunks(op, ("split_sizes", "sorted_index"), split_sizes.tolist(), sorted_index.tolist(), rows)
    sizes, order = (t.to(inp.device, torch.int64) for t in (split_sizes, sorted_index))
    starts, sorted_sizes = (sizes.cumsum(0) - sizes)[order], sizes[order]
    moved = starts - (sorted_sizes.cumsum(0) - sorted_sizes)
    shifts = torch.repeat_interleave(moved, sorted_sizes, output_size=rows)
    return torch.arange(rows, device=inp.device) + shifts


# --- data ---------------------------------------------------------------------------------------------------


def _named(op: str, operation: Operation, spec: Any, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """``apply``, whose refusals are ``op``'s where the call is eager."""
    with refusals_of(op, **MAP_ARGUMENTS):
        return apply(operation, spec, inputs)


class _Taken(torch.autograd.Function):
    """Rows of codes, those of each row's token."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, row_map: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(row_map)
        ctx.tokens = inp.shape[0]
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        inputs = {"x": grad, "row_map": ctx.saved_tensors[0]}
        return apply(unpermute, spec_for("UnpermuteSpec", ctx.tokens), inputs)["y"], None, None


def _permute(
    op: str, inp: Tensor, row_map: Tensor, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Each row's token and probability, 0 where there is none. A token's codes, where it has such."""
    held = None
    if isinstance(inp, QuantizedTensor):
        with torch.no_grad():
            held = inp.taken_rows(row_map[:, 0])
    x, more = inp, {"row_map": row_map, "probs": probs}
    if held is not None:
        rows = _Taken.apply(inp, row_map, held)
        if probs is None:
            return rows, None
        x = torch.empty(inp.shape[0], 0, dtype=inp.dtype, device=inp.device)
    found = _named(op, permute, spec_for("PermuteSpec", probs is not None), {"x": x} | more)
    return found["y"] if held is None else rows, found.get("row_probs")


def _sorted(inp: Tensor, rows: Tensor) -> Tensor:
    """``inp``'s rows in the order of ``rows``."""
    if inp.dtype not in FLOATS:
        return inp.index_select(0, rows)
    row_map = torch.stack((rows, torch.zeros_like(rows)), 1).to(torch.int32)
    whole = inp.reshape(inp.size(0), inp.shape[1:].numel())
    return _permute("moe_sort_chunks_by_index", whole, row_map)[0].view(inp.shape)
