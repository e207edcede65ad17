"""``transformer_engine.pytorch.attention.dot_product_attention.utils``: what programs make of masks and
lengths before they call attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.arguments import choice
from fp8kit.layers.arguments import MASK_ALIASES
from fp8kit.ops.attention_spec import MASKS
from fp8kit_torch.checks import tensor


def get_cu_seqlens(mask: Tensor) -> Tensor:
    """Where the sequences would start without their padding, int32 (b + 1,). ``mask``: bool (b, 1, 1, s),
    True where padded."""
    rows = tensor("get_cu_seqlens", "mask", mask).flatten(1)
    lengths = rows.logical_not().sum(1, dtype=torch.int32)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device | str) -> Tensor:
    """The same of ``batch_size`` sequences of full length: 0, s, 2 s and so on."""
    end = (batch_size + 1) * max_seqlen
    return torch.arange(0, end, step=max_seqlen, dtype=torch.int32, device=device)


def get_padding_mask(
    batch_size: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int, max_seqlen_kv: int
) -> tuple[Tensor, Tensor]:
    """The masks of queries and of keys, bool (b, 1, 1, s) each, True behind the true lengths that the two
    ``cu_seqlens`` say: ``attention_mask`` of the padding masks."""
    found = []
    for sums, most in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_kv, max_seqlen_kv)):
        lengths = sums.diff()[:batch_size]
        found.append((torch.arange(most, device=sums.device) >= lengths[:, None])[:, None, None])
    return found[0], found[1]


def check_set_window_size(attn_mask_type: str, window_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """The window that a mask has: a causal one ends at the diagonal, (-1, 0) or (left, 0). ArgumentError for
    another mask, or a window that is none."""
    op = "check_set_window_size"
    choice(op, "attn_mask_type", attn_mask_type, MASKS + MASK_ALIASES)
    left, right = (-1, -1) if window_size is None else (int(window_size[0]), int(window_size[1]))
    return (left, 0) if "causal" in attn_mask_type else (left, right)
