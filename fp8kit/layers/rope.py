"""``RotaryPositionEmbedding`` and ``apply_rotary_pos_emb`` (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8kit.arguments import choice, integer, number, shown
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.layers.attention_base import AttentionBase
from fp8kit.layers.base import Layer
from fp8kit.layers.context_parallel import angles_of_rank, chunks_of_rank
from fp8kit.layers.unsupported import refuse_others
from fp8kit.ops.attention_spec import FORMATS
from fp8kit.ops.rope import rope

_FLOAT32 = np.finfo(np.float32)


class RotaryPositionEmbedding(Layer):
    """Angles of the rotary embedding: position times base^(-2 i / dim) for pair i.

    * ``dim``: features of a head; ``rotary_percent``: the part of them that is rotated. ``rotary_base``: the
      slowest pair's base.
    * ``interleaved``: pairs are neighbours, instead of the two halves; the same must be said to
      ``apply_rotary_pos_emb``.
    * ``seq_len_interpolation_factor`` f with ``pretrained_max_position_embeddings`` P: positions are divided
      by f, or by max_seq_len / P where max_seq_len exceeds P f (Chen et al., Position Interpolation, 2023).
      P alone changes nothing, as in Transformer Engine.
    * ``device``: where the angles are made; None as for parameters.
    """

    layer_name = "RotaryPositionEmbedding"
    seq_len_interpolation_factor: int | None
    pretrained_max_position_embeddings: int | None
    rotary_base: float
    interleaved: bool

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
        super().__init__()
        self.keep(
            self.checked(locals()),
            "seq_len_interpolation_factor pretrained_max_position_embeddings rotary_base interleaved",
        )
        op = self.layer_name
        number(op, "rotary_base", rotary_base, float(_FLOAT32.max), above=float(_FLOAT32.tiny))
        if pretrained_max_position_embeddings is None and seq_len_interpolation_factor is not None:
            wanted = "pretrained_max_position_embeddings with it"
            raise ArgumentError(
                op, "seq_len_interpolation_factor", shown(seq_len_interpolation_factor), wanted
            )
        self.rotated = int(dim * rotary_percent)
        if self.rotated % 2 or self.rotated == 0:
            raise ArgumentError(
                op, "dim", f"{dim}, of which {self.rotated} are rotated", "an even number of them"
            )
        self.place(device)

    def place(self, device: Any) -> None:
        """Keep the device, or what is on it."""
        raise NotImplementedError

    def angles(self, max_seq_len: int, offset: int, scale: float) -> Any:
        """``forward``, the positions times ``scale``."""
        raise NotImplementedError

    def forward(self, max_seq_len: int, offset: int = 0) -> Any:
        """Angles in radians of positions offset ... offset + max_seq_len - 1: float32 (max_seq_len, 1, 1,
        rotated features)."""
        integer(self.layer_name, "max_seq_len", max_seq_len, 1, 2**31 - 1)
        offset = integer(self.layer_name, "offset", offset, -(2**31), 2**31)
        factor, most = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        scale = 1.0
        if factor is not None and most is not None:
            scale = most / max_seq_len if max_seq_len > most * factor else 1 / factor
        return self.angles(max_seq_len, offset, scale)


def as_angles(operation: str, argument: str, freqs: Any) -> Any:
    """Angles as the operation takes them: (s, 1, 1, r) or (s, r) as (s, r). ShapeError otherwise."""
    shape = tuple(freqs.shape)
    if len(shape) not in (2, 4) or math.prod(shape) != shape[0] * shape[-1]:
        raise ShapeError(operation, argument, f"shape {shape}", "(positions, 1, 1, features)")
    return freqs.reshape(shape[0], shape[-1])


class ApplyRotary(AttentionBase):
    """What has ``apply_rotary_pos_emb`` of a frontend as its method."""

    layer_name = "apply_rotary_pos_emb"

    def _divided(self, inputs: dict[str, Any], tensor_format: str, size: Any, rank: Any) -> None:
        """Make the angles, or where the sequences start, those of the tokens that process ``rank`` of
        ``size`` has."""
        op = self.layer_name
        size, rank = integer(op, "cp_size", size), integer(op, "cp_rank", rank)
        if size < 1 or not 0 <= rank < size:
            raise ArgumentError(op, "cp_rank", f"{rank} of {size}", "a rank below cp_size")
        others = ("start_positions", "cu_seqlens_padded")
        refuse_others(op, {name: (inputs.get(name), None) for name in others})
        if tensor_format != "thd":
            tokens = inputs["x"].shape[tensor_format.index("s")]
            inputs["freqs"] = angles_of_rank(self, "freqs", inputs["freqs"], tokens, size, rank)
        elif "cu_seqlens" in inputs:
            inputs |= chunks_of_rank(self, inputs["cu_seqlens"], size, rank)

    def apply_rotary_pos_emb(
        self,
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
    ) -> Any:
        """``t`` with its heads rotated by their positions' angles; differentiable in t.

        * ``t``: h (s, b, h, d), (b, s, h, d) or (t, h, d), as ``tensor_format`` says: "sbhd", "bshd" or
          "thd".
        * ``freqs``: float32 (positions, 1, 1, r), from ``RotaryPositionEmbedding``; features beyond r stay as
          they are. PyTorch: bfloat16 and float16 too, whose values are taken as they are.
        * ``start_positions``: int32 (b,), the position of each sequence's first token. ``cu_seqlens``: int32
          (b + 1,), running sums of the lengths, with "thd"; ``cu_seqlens_padded``: where the sequences start,
          if there are gaps between them. Tokens of no sequence become 0, and so does their gradient.
        * ``fused``: accepted; there is one way.
        * ``cp_size``, ``cp_rank``: where sequences are divided among ``cp_size`` processes, of which each has
          chunks r and 2 n - 1 - r of 2 n; ``cu_seqlens`` is then of the whole sequences.

        Raises ShapeError for dimensions that do not fit, FormatError for a dtype, ArgumentError for another
        argument out of its range, BackendError for a device.
        """
        op = self.layer_name
        positions = {
            "start_positions": start_positions,
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_padded": cu_seqlens_padded,
        }
        flags = {"interleaved": interleaved, "fused": fused}
        self.check_arguments({"t": t, "freqs": freqs, **flags, **positions})
        choice(op, "tensor_format", tensor_format, FORMATS)
        x = self.as_input("t", t)
        if len(x.shape) != len(tensor_format):
            wanted = f"{len(tensor_format)} dimensions, {tensor_format}"
            raise ShapeError(op, "t", f"shape {tuple(x.shape)}", wanted)
        inputs = {"x": x, "freqs": as_angles(op, "freqs", self.widened(self.constant("freqs", freqs, x)))}
        for name, value in positions.items():
            if value is not None:
                inputs[name] = self.constant(name, value, x)
        if not (isinstance(cp_size, int) and isinstance(cp_rank, int) and (cp_size, cp_rank) == (1, 0)):
            self._divided(inputs, tensor_format, cp_size, cp_rank)
        heads, dim = x.shape[-2:]
        spec = self.spec_for("RopeSpec", ((heads, dim, "freqs"),), tensor_format, bool(interleaved))
        return self.call(rope, spec, inputs)["y"]
