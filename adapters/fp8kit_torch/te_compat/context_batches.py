"""``transformer_engine.pytorch.attention.dot_product_attention.context_parallel``: batches of ranks that
divide the sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8kit.arguments import choice, integer
from fp8kit.errors import ShapeError
from fp8kit.ops.attention_spec import FORMATS
from fp8kit_torch.checks import tensor
from fp8kit_torch.collectives import ranks_of
from fp8kit_torch.te_compat.extension_sequences import places, thd_get_partitioned_indices


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor | None,
    input_ids_padded: Tensor,
    labels_padded: Tensor,
    position_ids_padded: Tensor | None = None,
    cp_group: Any = None,
    qvk_format: str = "thd",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """This rank's chunks r and 2 P - 1 - r of 2 P of each sequence of the three arrays.

    ``qvk_format``: "thd", (t,), (1, t) or (t, b), with ``cu_seqlens_padded`` int32 (b + 1,), where the
    sequences start; "bshd", (b, s, ...), or "sbhd", (s, b, ...). ``cp_group``: None is torch's default group,
    or one rank where there is none. ShapeError where 2 P does not divide the tokens."""
    op = "get_batch_on_this_cp_rank"
    choice(op, "qvk_format", qvk_format, FORMATS)
    if cp_group is None and dist.is_initialized():
        cp_group = dist.group.WORLD
    ranks = ranks_of(op, "cp_group", cp_group)

    def own(name: str, x: Tensor | None) -> Tensor | None:
        if x is None or ranks is None or ranks.size == 1:
            return x
        dim = {"sbhd": 0, "bshd": 1}.get(qvk_format, tensor(op, name, x).ndim - 1)
        if qvk_format == "thd" and x.ndim > 1 and x.shape[0] > 1 and cu_seqlens_padded is not None:
            dim = 0 if int(cu_seqlens_padded[-1]) == x.shape[0] else dim
        elif qvk_format != "thd" and x.ndim < 2:
            raise ShapeError(op, name, tuple(x.shape), f"at least 2 dimensions, {qvk_format}")
        tokens, count = x.shape[dim], 2 * ranks.size
        if tokens % count:
            raise ShapeError(op, name, f"{tokens} tokens", f"a multiple of {count}")
        starts = cu_seqlens_padded
        if qvk_format != "thd":
            starts = torch.tensor([0, tokens], device=x.device)
        indices = thd_get_partitioned_indices(
            tensor(op, "cu_seqlens_padded", starts), tokens, ranks.size, ranks.rank
        )
        return x.index_select(dim, indices.to(x.device))

    input_ids, labels = own("input_ids_padded", input_ids_padded), own("labels_padded", labels_padded)
    assert input_ids is not None and labels is not None
    return input_ids, labels, own("position_ids_padded", position_ids_padded)


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """(input_ids, labels, cu_seqlens_padded): (t,) or (1, t) packed sequences, each padded at its end to a
    multiple of ``divisibility_factor`` (2 P), and where they start then. ``cu_seqlens``: int32 (b + 1,)."""
    starts = _padded_starts("pad_thd_sequences_for_cp", cu_seqlens, divisibility_factor)
    sequence, place = places(cu_seqlens.diff())
    at = starts[sequence] + place

    def padded(x: Tensor, value: int) -> Tensor:
        out = x.new_full((int(starts[-1]),), value)
        out[at] = x.reshape(-1)[: len(at)]
        return out

    return padded(input_ids, padding_token_id), padded(labels, padding_label_id), starts


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Of each token of the sequences that ``pad_thd_sequences_for_cp`` pads, its place in its sequence, the
    padding's counted on: (t padded,)."""
    starts = _padded_starts("generate_positional_ids_for_cp", cu_seqlens, divisibility_factor)
    return places(starts.diff())[1].to(dtype)


def _padded_starts(op: str, cu_seqlens: Tensor, factor: int) -> Tensor:
    tensor(op, "cu_seqlens", cu_seqlens)
    count = integer(op, "divisibility_factor", factor, 1, 2**31 - 1)
    lengths = -(-cu_seqlens.diff() // count) * count
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
