"""``RotaryPositionEmbedding`` and ``apply_rotary_pos_emb`` (Su et al., RoFormer, 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import integer
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.ops.attention_spec import FORMATS
from fp8kit.ops.rope import check_tokens, rope
from fp8kit_torch.arguments import only, positive
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CALLED, CONSTRUCTED, check
from fp8kit_torch.parameters import placed
from fp8kit_torch.specs import spec_for
from fp8kit_torch.views import as_view


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of the rotary embedding: position times base^(-2 i / dim) for pair i.

    * ``dim``: features of a head; ``rotary_percent``: the part of them that is turned. ``rotary_base``: the
      slowest pair's base.
    * ``interleaved``: pairs are neighbours, instead of the two halves; the same must be said to
      ``apply_rotary_pos_emb``.
    * ``seq_len_interpolation_factor`` f with ``pretrained_max_position_embeddings`` P: positions are divided
      by f, or by max_seq_len / P where max_seq_len exceeds P f (Chen et al., Position Interpolation, 2023).
      Both or neither.
    * ``device``: where the angles are made; None as for parameters.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: Any = None,
    ) -> None:
        op = "RotaryPositionEmbedding"
        check(op, CONSTRUCTED, locals())
        super().__init__()
        if (seq_len_interpolation_factor is None) != (pretrained_max_position_embeddings is None):
            wanted = "both or neither of it and pretrained_max_position_embeddings"
            raise ArgumentError(op, "seq_len_interpolation_factor", seq_len_interpolation_factor, wanted)
        self.rotated = int(dim * rotary_percent)
        if self.rotated % 2 or self.rotated == 0:
            raise ArgumentError(
                op, "dim", f"{dim}, of which {self.rotated} are turned", "an even number of them"
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = float(rotary_base), bool(interleaved)
        where = placed(op, device)
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=where) / self.rotated
        self.register_buffer("inv_freq", 1.0 / self.rotary_base**exponents, persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles in radians of positions offset ... offset + max_seq_len - 1: float32 (max_seq_len, 1, 1,
        turned features)."""
        positive("RotaryPositionEmbedding", max_seq_len=max_seq_len)
        offset = integer("RotaryPositionEmbedding", "offset", offset, -(2**31), 2**31)
        speeds = self.inv_freq.to(torch.float32)  # .half() on a model must not coarsen the angles further
        positions = torch.arange(max_seq_len, device=speeds.device, dtype=torch.float32) + offset
        factor, most = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and most is not None:
            positions = positions * (most / max_seq_len if max_seq_len > most * factor else 1 / factor)
        angles = torch.outer(positions, speeds)
        doubled = angles.repeat_interleave(2, 1) if self.interleaved else torch.cat([angles, angles], 1)
        return doubled.reshape(max_seq_len, 1, 1, self.rotated)


def angles(operation: str, argument: str, freqs: Tensor, device: torch.device) -> Tensor:
    """Angles as the operation takes them: float32 (s, 1, 1, r) or (s, r) as (s, r), on ``device``. ShapeError
    otherwise."""
    if freqs.ndim not in (2, 4) or freqs.numel() != freqs.shape[0] * freqs.shape[-1]:
        raise ShapeError(operation, argument, f"shape {tuple(freqs.shape)}", "(positions, 1, 1, features)")
    return freqs.detach().to(device).reshape(freqs.shape[0], freqs.shape[-1])


def check_turns(operation: str, spec: Any, inputs: Mapping[str, Any], tokens: int) -> None:
    """``ops.rope.check_tokens`` of tensors that are on the CPU and have values; within ``torch.compile``
    nobody looks."""
    if not torch.compiler.is_compiling():
        there = {
            name: value
            for name, value in inputs.items()
            if type(value) is Tensor and value.device.type == "cpu"
        }
        if all(name in there for name in spec.angles):
            check_tokens(operation, spec, {name: as_view(value) for name, value in there.items()}, tokens)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    *,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """``t`` with its heads turned by their positions' angles; differentiable in t.

    * ``t``: h (s, b, h, d), (b, s, h, d) or (t, h, d), as ``tensor_format`` says: "sbhd", "bshd" or "thd".
    * ``freqs``: float32 (positions, 1, 1, r), from ``RotaryPositionEmbedding``; features beyond r stay as
      they are.
    * ``start_positions``: int32 (b,), the position of each sequence's first token. ``cu_seqlens``: int32 (b +
      1,), running sums of the lengths, with "thd"; ``cu_seqlens_padded``: where the sequences start, if there
      are gaps between them. Tokens of no sequence become 0, and so does their gradient.
    * ``fused``: accepted; there is one way. ``cp_size``, ``cp_rank``: 1 and 0 only.

    Raises Fp8kitError kinds for what does not fit.
    """
    op = "apply_rotary_pos_emb"
    if not torch.compiler.is_compiling():
        check(op, CALLED, locals())
    only(op, {"cp_size": (cp_size, 1), "cp_rank": (cp_rank, 0)})
    if tensor_format not in FORMATS:
        raise ArgumentError(op, "tensor_format", repr(tensor_format), f"one of {', '.join(FORMATS)}")
    if t.ndim != len(tensor_format):
        raise ShapeError(
            op, "t", f"shape {tuple(t.shape)}", f"{len(tensor_format)} dimensions, {tensor_format}"
        )
    inputs = {"x": t, "freqs": angles(op, "freqs", freqs, t.device)}
    for name, value in (
        ("start_positions", start_positions),
        ("cu_seqlens", cu_seqlens),
        ("cu_seqlens_padded", cu_seqlens_padded),
    ):
        if value is not None:
            inputs[name] = value.to(t.device)
    heads, dim = t.shape[-2:]
    return apply(
        rope, spec_for("RopeSpec", ((heads, dim, "freqs"),), tensor_format, bool(interleaved)), inputs
    )["y"]


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, values) of a packed projection, queries and keys turned; differentiable in ``qkv``.

    * ``qkv``: h (s, b, g, n) or (b, s, g, n): for each of g groups its queries', its key's and its value's
      features, as many as ``qkv_split_arg_list`` (h / g d, d, d) says. ``q_freqs``, ``k_freqs``: angles, as
      ``freqs`` of ``apply_rotary_pos_emb``.
    * Others as there; "thd", and so ``cu_seqlens``, is refused.

    Returns h (s, b, h, d), (s, b, g, d), (s, b, g, d), or b first. Raises Fp8kitError kinds for what does not
    fit.
    """
    op = "apply_fused_qkv_rotary_pos_emb"
    if not torch.compiler.is_compiling():
        check(op, CALLED, locals())
    sizes = [int(n) for n in qkv_split_arg_list]
    only(op, {"cp_size": (cp_size, 1), "cp_rank": (cp_rank, 0), "cu_seqlens": (cu_seqlens, None)})
    if tensor_format not in ("sbhd", "bshd"):
        raise ArgumentError(op, "tensor_format", repr(tensor_format), "sbhd or bshd")
    if (
        qkv.ndim != 4
        or len(sizes) != 3
        or not sizes[1]
        or sum(sizes) != qkv.shape[-1]
        or sizes[0] % sizes[1]
        or sizes[1] != sizes[2]
    ):
        wanted = "(s, b, groups, features) whose features are those of some queries, of a key and of a value"
        raise ShapeError(op, "qkv", f"shape {tuple(qkv.shape)} of {sizes}", wanted)
    q, k, v = (part.reshape(*qkv.shape[:2], -1, sizes[1]) for part in qkv.split(sizes, -1))
    turned = [
        apply_rotary_pos_emb(t, freqs, tensor_format, start_positions, interleaved)
        for t, freqs in ((q, q_freqs), (k, k_freqs))
    ]
    return turned[0], turned[1], v
