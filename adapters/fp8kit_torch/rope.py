"""``RotaryPositionEmbedding`` and ``apply_rotary_pos_emb`` in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.layers import rope
from fp8kit_torch.arguments import only
from fp8kit_torch.attention_base import AttentionBase
from fp8kit_torch.checks import CALLED, check
from fp8kit_torch.layer import TorchLayer
from fp8kit_torch.parameters import placed, usual_device

_LENGTHS = (torch.int32, torch.int64)


class RotaryPositionEmbedding(rope.RotaryPositionEmbedding, TorchLayer):
    def place(self, device: Any) -> None:
        where = placed(self.layer_name, device)
        if device is None and where.type == "meta":  # nobody gives it values later
            where = usual_device()
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=where) / self.rotated
        self.register_buffer("inv_freq", 1.0 / self.rotary_base**exponents)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        _, _, missing_keys, _, _ = rest
        if (key := f"{prefix}inv_freq") in missing_keys:  # the constructor says it
            missing_keys.remove(key)
        given = state_dict.get(key)
        if isinstance(given, Tensor) and given.dtype.itemsize < 4:  # of a model that was cast: too coarse
            self.place(self.inv_freq.device)

    def forward(self, max_seq_len: int | Tensor, offset: int = 0) -> Tensor:
        if isinstance(max_seq_len, Tensor) and max_seq_len.ndim == 0 and max_seq_len.dtype in _LENGTHS:
            max_seq_len = int(max_seq_len)  # such as the end of cu_seqlens
        return super().forward(max_seq_len, offset)  # type: ignore[no-any-return]

    def angles(self, max_seq_len: int, offset: int, scale: float) -> Tensor:
        speeds = self.inv_freq.to(torch.float32)  # .half() on a model must not coarsen the angles further
        positions = torch.arange(max_seq_len, device=speeds.device, dtype=torch.float32) + offset
        angles = torch.outer(positions * scale, speeds)
        doubled = angles.repeat_interleave(2, 1) if self.interleaved else torch.cat([angles, angles], 1)
        return doubled.reshape(max_seq_len, 1, 1, self.rotated)


class _ApplyRotary(rope.ApplyRotary, AttentionBase):
    pass


apply_rotary_pos_emb = _ApplyRotary().apply_rotary_pos_emb


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
    """(queries, keys, values) of a packed projection, queries and keys rotated; differentiable in ``qkv``.

    * ``qkv``: h (s, b, g, n) or (b, s, g, n): for each of g groups its queries', its key's and its value's
      features, as many as ``qkv_split_arg_list`` (h / g d, d, d) says. ``q_freqs``, ``k_freqs``: angles, as
      ``freqs`` of ``apply_rotary_pos_emb``.
    * Others as there; "thd", and so ``cu_seqlens``, is refused.

    Returns h (s, b, h, d), (s, b, g, d), (s, b, g, d), or b first. ArgumentError,
    ShapeError, FormatError and BackendError are as there.
    """
    op = "apply_fused_qkv_rotary_pos_emb"
    if not torch.compiler.is_compiling():
        check(op, CALLED, locals())
    sizes = [int(n) for n in qkv_split_arg_list]
    only(op, {"cu_seqlens": (cu_seqlens, None)})
    if tensor_format not in ("sbhd", "bshd"):
        raise ArgumentError(op, "tensor_format", repr(tensor_format), "sbhd or bshd")
    fits = qkv.ndim == 4 and len(sizes) == 3 and sum(sizes) == qkv.shape[-1]
    if not fits or sizes[1] != sizes[2] or not sizes[1] or sizes[0] % sizes[1]:
        wanted = "(s, b, groups, features) whose features are those of some queries, of a key and of a value"
        raise ShapeError(op, "qkv", f"shape {tuple(qkv.shape)} of {sizes}", wanted)
    q, k, v = (part.reshape(*qkv.shape[:2], -1, sizes[1]) for part in qkv.split(sizes, -1))
    how = tensor_format, start_positions, interleaved, True, None, cp_size, cp_rank
    return apply_rotary_pos_emb(q, q_freqs, *how), apply_rotary_pos_emb(k, k_freqs, *how), v
