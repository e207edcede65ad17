"""``return_max_logit``: the largest score of each head, by products of their own beside attention's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from fp8kit.execution.codec import decode
from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit_torch.packed_views import separate

_ELEMENTS = 2**24  # scores that are there at a time


def max_logits(spec: AttentionSpec, inputs: Mapping[str, Tensor]) -> Tensor:
    """max over batches, rows and the columns that they see of softmax_scale * q k^T, capped, with its bias:
    (h,), float32; -Inf for a head without any. ``inputs``: an attention's, by name.

    The products are rounded to the inputs' dtype; of attention in FP8 they are those before its casts. Blocks
    of rows are multiplied by all columns once more. No gradient goes through it.
    """
    with torch.no_grad():
        q, k = _heads(spec, inputs)
        batches, groups, share, rows, _ = q.shape
        columns = k.shape[-2]
        own, other = (_places(spec, inputs, part, n) for part, n in (("q", rows), ("kv", columns)))
        found = torch.full((groups * share,), -torch.inf, dtype=torch.float32, device=q.device)
        step = max(1, _ELEMENTS // max(1, batches * groups * share * columns))
        for start in range(0, rows, step):
            block = slice(start, start + step)
            scores = (q[..., block, :] @ k.mT).float().flatten(1, 2)  # (b, h, block, columns)
            scores = _biased(spec, inputs, scores * spec.softmax_scale, own, other, block)
            scores = scores.masked_fill(~_seen(spec, inputs, own, other, block), -torch.inf)
            if scores.numel():
                found = torch.maximum(found, scores.amax((0, 2, 3)))
        return found


def _heads(spec: AttentionSpec, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """q: (b, g, h / g, s, d) and k: (b, g, 1, s, d), views; b is 1 where sequences are packed."""

    def ordered(x: Tensor) -> Tensor:
        if spec.packed:
            return x.transpose(0, 1)[None]
        return x.permute(1, 2, 0, 3) if spec.qkv_format == "sbhd" else x.transpose(1, 2)

    q, k, _ = separate(spec, inputs)
    groups = spec.num_gqa_groups
    return ordered(q).unflatten(1, (groups, spec.num_heads // groups)), ordered(k)[:, :, None]


class _Places(NamedTuple):
    """Of the tokens along one side: their ``position`` in the sequence, whether they are true (``there``),
    and true lengths, each (b | 1, n) or (b | 1, 1); of packed sequences also the number of each token's
    (``sequence``, (n,)), and ``lengths`` of all."""

    position: Tensor
    length: Tensor
    there: Tensor | None = None
    sequence: Tensor | None = None
    lengths: Tensor | None = None


def _places(spec: AttentionSpec, inputs: Mapping[str, Tensor], part: str, count: int) -> _Places:
    device = next(iter(inputs.values())).device
    tokens = torch.arange(count, device=device)[None]
    sums = inputs.get(f"cu_seqlens_{part}")
    if sums is None or not (spec.packed or spec.padded):
        return _Places(tokens, torch.full((1, 1), count, device=device))
    lengths = sums.diff().long()
    if not spec.packed:
        return _Places(tokens, lengths[:, None], tokens < lengths[:, None])
    starts = inputs.get(f"cu_seqlens_{part}_padded", sums).long()
    number = (torch.searchsorted(starts, tokens[0], right=True) - 1).clamp(0, len(lengths) - 1)
    position, length = tokens - starts[number], lengths[number][None]
    return _Places(position, length, (position >= 0) & (position < length), number, lengths)


def _distance(spec: AttentionSpec, own: _Places, other: _Places, block: slice) -> Tensor:
    """How far right of the diagonal columns lie: (b | 1, 1, block, columns)."""
    rows = own.position[:, block, None]
    shift = torch.zeros_like(rows)
    if spec.bottom_right and own.sequence is not None and other.lengths is not None:
        shift = (other.lengths[own.sequence] - own.length)[:, block, None]
    elif spec.bottom_right:
        shift = (other.length - own.length)[..., None]
    return (other.position[:, None] - rows - shift)[:, None]


def _seen(
    spec: AttentionSpec, inputs: Mapping[str, Tensor], own: _Places, other: _Places, block: slice
) -> Tensor:
    """Which columns rows see: broadcasts to (b, h, block, columns)."""
    left, right = spec.window
    distance = _distance(spec, own, other, block)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    if own.there is not None:
        seen = seen & own.there[:, None, block, None]
    if other.there is not None:
        seen = seen & other.there[:, None, None]
    if own.sequence is not None and other.sequence is not None:
        seen = seen & (own.sequence[block, None] == other.sequence)
    if spec.masked:
        seen = seen & (_of_rows(inputs["mask"], block) == 0)
    return seen


def _of_rows(array: Tensor, block: slice) -> Tensor:
    return array if array.shape[-2] == 1 else array[..., block, :]


def _of_packed(bias: Tensor, own: _Places, other: _Places, block: slice) -> Tensor:
    """(1, h | 1, block, columns) of a bias (b | 1, h | 1, s | 1, s_kv), whose places are those in the tokens'
    sequences; of tokens of other sequences or of none it is any."""
    places = own.sequence, own.position[0], other.position[0]
    most = (bias.shape[0], *bias.shape[2:])
    rows = [place[block, None].clamp(0, n - 1) for place, n in zip(places[:2], most[:2], strict=True)]
    return bias[rows[0], :, rows[1], places[2].clamp(0, most[2] - 1)].permute(2, 0, 1)[None]


def _biased(
    spec: AttentionSpec,
    inputs: Mapping[str, Tensor],
    scores: Tensor,
    own: _Places,
    other: _Places,
    block: slice,
) -> Tensor:
    """Scaled scores, capped, and with their bias."""
    added: Tensor | float = 0.0
    if spec.biased:
        factor = spec.softmax_scale if spec.bias == "pre_scale_bias" else 1.0
        bias = inputs["bias"]
        own_part = _of_rows(bias, block) if own.sequence is None else _of_packed(bias, own, other, block)
        added = factor * own_part.float()
    if spec.bias == "alibi":
        slopes = inputs["alibi_slopes"].float()
        slopes = slopes[None] if slopes.ndim == 1 else slopes
        added = -slopes[..., None, None] * _distance(spec, own, other, block).abs()
    if spec.bias == "pre_scale_bias":
        scores, added = scores + added, 0.0
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores + added


@custom_op("fp8kit::max_logits", mutates_args=())
def traced_max_logits(inputs: Sequence[Tensor], names: str, spec: str, heads: int) -> Tensor:
    """``max_logits`` within ``torch.compile``: ``spec`` as a text, inputs apart from their names."""
    return max_logits(decode(spec), dict(zip(names.split(), inputs, strict=True)))


@traced_max_logits.register_fake
def _(inputs: Sequence[Tensor], names: str, spec: str, heads: int) -> Tensor:
    return inputs[0].new_empty(heads, dtype=torch.float32)
