"""``RotaryPositionEmbedding`` and ``apply_rotary_pos_emb`` (Su et al., RoFormer, 2021)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arguments import choice, flag, integer, number, shown
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, apply
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.nn.later import not_yet
from fp8kit.nn.module import Module, as_tensor, positive, resolve
from fp8kit.ops.attention_spec import FORMATS
from fp8kit.ops.rope import RopeSpec, rope


class RotaryPositionEmbedding(Module):
    """Angles of the rotary embedding: position times base^(-2 i / dim) for pair i.

    * ``dim``: features of a head; ``rotary_percent``: the part of them that is turned. ``rotary_base``: the
      slowest pair's base.
    * ``interleaved``: pairs are neighbours, instead of the two halves; the same must be said to
      ``apply_rotary_pos_emb``.
    * ``seq_len_interpolation_factor`` f with ``pretrained_max_position_embeddings`` P: positions are divided
      by f, or by max_seq_len / P where max_seq_len exceeds P f (Chen et al., Position Interpolation, 2023).
      Both or neither.
    * ``device``: where the angles are made; None is the default device.
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
        positive(op, dim=dim)
        if number(op, "rotary_percent", rotary_percent, above=0.0) > 1:
            raise ArgumentError(op, "rotary_percent", rotary_percent, "a number in (0, 1]")
        number(
            op,
            "rotary_base",
            rotary_base,
            float(np.finfo(np.float32).max),
            above=float(np.finfo(np.float32).tiny),
        )
        if (seq_len_interpolation_factor is None) != (pretrained_max_position_embeddings is None):
            wanted = "both or neither of it and pretrained_max_position_embeddings"
            raise ArgumentError(
                op, "seq_len_interpolation_factor", shown(seq_len_interpolation_factor), wanted
            )
        for name, value in (
            ("seq_len_interpolation_factor", seq_len_interpolation_factor),
            ("pretrained_max_position_embeddings", pretrained_max_position_embeddings),
        ):
            if value is not None:
                number(op, name, value, 2.0**31, above=0.0)
        self.rotated = int(dim * rotary_percent)
        if self.rotated % 2 or self.rotated == 0:
            raise ArgumentError(
                op, "dim", f"{dim}, of which {self.rotated} are turned", "an even number of them"
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = float(rotary_base), flag(op, "interleaved", interleaved)
        self._device = resolve(op, None, device)[1]
        self._made: dict[tuple[int, int], Tensor] = {}

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles in radians of positions offset ... offset + max_seq_len - 1: float32 (max_seq_len, 1, 1,
        turned features). The same Tensor for the same arguments as last time."""
        positive("RotaryPositionEmbedding", max_seq_len=max_seq_len)
        offset = integer("RotaryPositionEmbedding", "offset", offset, -(2**31), 2**31)
        if (max_seq_len, offset) not in self._made:
            self._made = {
                (max_seq_len, offset): Tensor(
                    arrays.to(arrays.as_view(self._angles(max_seq_len, offset)), self._device)
                )
            }
        return self._made[max_seq_len, offset]

    def _angles(self, max_seq_len: int, offset: int) -> np.ndarray[Any, Any]:
        positions = (np.arange(max_seq_len) + offset).astype(np.float32)
        factor, most = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and most is not None:
            positions *= np.float32(most / max_seq_len if max_seq_len > most * factor else 1 / factor)
        speeds = 1 / np.float32(self.rotary_base) ** (
            np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        )
        angles = np.outer(positions, speeds)
        doubled = (
            np.repeat(angles, 2, axis=1) if self.interleaved else np.concatenate([angles, angles], axis=1)
        )
        return doubled.astype(np.float32).reshape(max_seq_len, 1, 1, self.rotated)


@lru_cache(maxsize=1024)
def rope_spec(
    segments: tuple[tuple[int, int, str], ...], qkv_format: str, interleaved: bool, alternating: bool = False
) -> RopeSpec:
    """The same object for the same arguments: plans are found by a spec's identity."""
    return RopeSpec(segments, qkv_format, interleaved, alternating)


def angles(operation: str, argument: str, freqs: Any) -> ArrayView:
    """Angles as the operation takes them: (s, 1, 1, r) or (s, r) as (s, r). ShapeError otherwise."""
    view = as_tensor(operation, argument, freqs).view
    if view.ndim not in (2, 4) or view.size != view.shape[0] * view.shape[-1]:
        raise ShapeError(operation, argument, f"shape {view.shape}", "(positions, 1, 1, features)")
    return arrays.contiguous(view).reshape(view.shape[0], view.shape[-1])


def apply_rotary_pos_emb(
    t: Any,
    freqs: Any,
    tensor_format: str = "sbhd",
    start_positions: Any = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    *,
    cu_seqlens_padded: Any = None,
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
    not_yet(op, {"cp_size": (cp_size, 1), "cp_rank": (cp_rank, 0)})
    choice(op, "tensor_format", tensor_format, FORMATS)
    interleaved = flag(op, "interleaved", interleaved)
    x = as_tensor(op, "t", t)
    if len(x.shape) != len(tensor_format):
        raise ShapeError(op, "t", f"shape {x.shape}", f"{len(tensor_format)} dimensions, {tensor_format}")
    inputs: dict[str, Any] = {"x": x, "freqs": angles(op, "freqs", freqs)}
    for name, value in (
        ("start_positions", start_positions),
        ("cu_seqlens", cu_seqlens),
        ("cu_seqlens_padded", cu_seqlens_padded),
    ):
        if value is not None:
            inputs[name] = arrays.to(as_tensor(op, name, value).view, x.device)
    return apply(rope, rope_spec(((*x.shape[-2:], "freqs"),), tensor_format, interleaved), inputs)["y"]
