"""Functions of ``transformer_engine_torch`` on sequences that lie one after the other ("thd"): which tokens a
process has where sequences are divided, corrections of attention in parts, and other layouts.

``cu_seqlens``: int32 (b + 1,), where sequences start. Where sequences are divided among n processes, each has
of each sequence two of 2 n chunks: process r those of numbers r and 2 n - 1 - r, so that under a causal mask
all have the same work. Lengths are then multiples of 2 n. "The second half" is that of a process's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8kit.arguments import choice, integer
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit_torch.checks import tensor


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Which of ``total_tokens`` tokens process ``rank`` of ``world_size`` has, int32 (total_tokens /
    world_size,). ``cu_seqlens``: of the whole sequences. ArgumentError for a rank that there is not,
    ShapeError for tokens that cannot be divided."""
    op = "thd_get_partitioned_indices"
    tensor(op, "cu_seqlens", cu_seqlens)
    n, tokens = integer(op, "world_size", world_size), integer(op, "total_tokens", total_tokens)
    if not 0 <= integer(op, "rank", rank) < max(n, 1):
        raise ArgumentError(op, "rank", rank, f"0 to {n - 1}")
    if n < 1 or tokens % (2 * n):
        raise ShapeError(op, "total_tokens", tokens, f"a multiple of 2 x world_size = {2 * n}")
    starts = cu_seqlens.long() // n
    own = torch.arange(tokens // n, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts, own, right=True) - 1
    start = starts[sequence]
    chunk = (starts[sequence + 1] - start) // 2
    within = own - start
    number = torch.where(within < chunk, rank, 2 * n - 2 - rank)
    return (within + start * n + chunk * number).to(torch.int32)


def _half(cu_seqlens: Tensor, tokens: int, second: bool) -> Tensor:
    """Numbers of the tokens in each sequence's first, or second, half: (tokens / 2,)."""
    starts = cu_seqlens.long() // 2
    own = torch.arange(tokens // 2, device=cu_seqlens.device)
    sequence = (torch.searchsorted(starts, own, right=True) - 1).clamp_max(len(starts) - 2)
    start = starts[sequence]
    half = starts[sequence + 1] - start
    return own + start + (half if second else 0)


def _tokens_at(op: str, name: str, value: Tensor) -> int:
    """Along which dimension tokens lie: 0 of (t, h, d), 1 of (2, t, h, d)."""
    if tensor(op, name, value).ndim not in (3, 4):
        raise ShapeError(op, name, tuple(value.shape), "(t, h, d) or (2, t, h, d)")
    return value.ndim - 3


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """The tokens of each sequence's first half (``half_idx`` 0) or second half (1): (t / 2, h, d) of
    (t, h, d), or (2, t / 2, h, d)."""
    op = "thd_read_half_tensor"
    at = _tokens_at(op, "tensor", tensor)
    if half_idx not in (0, 1):
        raise ArgumentError(op, "half_idx", half_idx, "0 or 1")
    return tensor.index_select(at, _half(cu_seqlens, tensor.shape[at], bool(half_idx)))


def places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(sequence, place in it) of all tokens of sequences that have these ``lengths``, int64 (b,)."""
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths)[sequence]
    return sequence, torch.arange(len(sequence), device=lengths.device) - first


def _second_halves(cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, place in its second half, place in the sequence) of the tokens of all second halves."""
    lengths = cu_seqlens.long().diff() // 2
    sequence, place = places(lengths)
    return sequence, place, place + lengths[sequence]


def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> Tensor:
    """Softmax statistics of each sequence's second half: of ``lse`` (h, t) where ``lse_packed``, as
    (h, second_half_lse_seqlen), else of (b, h, s), as (b, h, second_half_lse_seqlen); 0 in what is over."""
    made = lse.new_zeros(*lse.shape[:-1], second_half_lse_seqlen)
    if lse_packed:
        at = _half(cu_seqlens, lse.shape[-1], True)
        made[:, : len(at)] = lse[:, at]
    else:
        sequence, place, from_ = _second_halves(cu_seqlens)
        made[sequence, :, place] = lse[sequence, :, from_]
    return made


def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool
) -> None:
    """``lse`` = log(exp(lse) + exp(lse_per_step)) in each sequence's second half, in place. Shapes as those
    of ``thd_read_second_half_lse``."""
    if lse_packed:
        at = _half(cu_seqlens, lse.shape[-1], True)
        lse[:, at] = torch.logaddexp(lse[:, at], lse_per_step[:, : len(at)].to(lse.dtype))
        return
    sequence, place, to = _second_halves(cu_seqlens)
    more = lse_per_step[sequence, :, place].to(lse.dtype)
    lse[sequence, :, to] = torch.logaddexp(lse[sequence, :, to], more)


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """``out`` (t, h, d) += out_per_step * exp(lse_per_step - lse), in place, in each sequence's second half
    alone, or everywhere. ``out_per_step``: of those tokens; ``lse``: (h, t) where ``lse_packed``, else
    (b, h, s); ``lse_per_step``: of ``out_per_step``'s tokens."""
    tokens = out.shape[0]
    at = _half(cu_seqlens, tokens, True) if only_second_half else torch.arange(tokens, device=out.device)
    if lse_packed:
        total, part = lse[:, at].t(), lse_per_step[:, : len(at)].t()
    else:
        if only_second_half:
            sequence, place, in_whole = _second_halves(cu_seqlens)
        else:
            sequence, place = places(cu_seqlens.long().diff())
            in_whole = place
        total, part, at = lse[sequence, :, in_whole], lse_per_step[sequence, :, place], at[: len(sequence)]
    scale = (part.float() - total.float()).exp()[..., None]
    out[at] = (out[at].float() + out_per_step[: len(at)].float() * scale).to(out.dtype)


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """What is done with a step's gradient in each half of a sequence: "add" it to ``grad``, "copy" it over
    it, or "none", in place. ``grad``: (t, h, d) or (2, t, h, d); ``grad_per_step``: as that, or of the other
    half's tokens alone where one is "none"."""
    op = "thd_grad_correction"
    at = _tokens_at(op, "grad", grad)
    asked = (first_half, second_half)
    for name, own in zip(("first_half", "second_half"), asked, strict=True):
        choice(op, name, own, ("add", "copy", "none"))
    if asked.count("none") == 2 or asked[0] == asked[1]:
        raise ArgumentError(op, "first_half, second_half", asked, "two different ones")
    half_only = "none" in asked
    for second, own in enumerate(asked):
        if own == "none":
            continue
        rows = _half(cu_seqlens, grad.shape[at], bool(second))
        step = grad_per_step if half_only else grad_per_step.index_select(at, rows)
        if own == "add":
            grad.index_add_(at, rows, step.to(grad.dtype))
        else:
            grad.index_copy_(at, rows, step.to(grad.dtype))


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """(b, max_seq_len, ...) of (t, ...): each of ``b`` sequences from the beginning of its row on, 0 after
    it."""
    sequence, place = places(cu_seqlens.long().diff()[:b])
    made = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    made[sequence, place] = tensor[cu_seqlens.long()[sequence] + place]
    return made


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """(t, ...) of (b, s, ...): the sequences at their ``cu_seqlens``, 0 in tokens that none has."""
    sequence, place = places(cu_seqlens.long().diff())
    made = tensor.new_zeros(t, *tensor.shape[2:])
    made[cu_seqlens.long()[sequence] + place] = tensor[sequence, place]
    return made


def _rows_copied(op: str, source: Tensor, to: Tensor, have: Sequence[int], want: Sequence[int]) -> None:
    """Copy groups of ``have`` rows to places of ``want`` rows, the shorter of both, 0 in what is over."""
    if sum(have) > len(source) or sum(want) > len(to):
        got = f"{len(source)} and {len(to)} rows"
        raise ShapeError(op, "input, output", got, f"{sum(have)} and {sum(want)}")
    start = at = 0
    for own, length in zip(have, want, strict=True):
        count = min(own, length)
        to[at : at + count] = source[start : start + count]
        to[at + count : at + length] = 0
        start, at = start + own, at + length


@torch.no_grad()
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Write groups of rows of ``input`` to ``output``, each filled up with zeros."""
    _rows_copied("fused_multi_row_padding", input, output, input_row_list, padded_input_row_list)


@torch.no_grad()
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Write the first rows of each group of ``input`` to ``output``."""
    _rows_copied("fused_multi_row_unpadding", input, output, input_row_list, unpadded_input_row_list)


def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    """Where each of n groups of rows starts, in elements, and where the last ends: int64 (n + 1,)."""
    ends = first_dims.long().cumsum(0) * integer("splits_to_offsets", "logical_last_dim", logical_last_dim)
    return torch.nn.functional.pad(ends, (1, 0))
