"""``RotaryPositionEmbedding`` and ``apply_rotary_pos_emb`` on the native tape."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from fp8kit import arrays
from fp8kit.autograd import Tensor
from fp8kit.layers import rope
from fp8kit.nn.attention_base import AttentionBase
from fp8kit.nn.layer import NativeLayer
from fp8kit.nn.module import resolve


class RotaryPositionEmbedding(rope.RotaryPositionEmbedding, NativeLayer):
    def place(self, device: Any) -> None:
        self._device = resolve(self.layer_name, None, device)[1]
        self._made: dict[tuple[int, int], Tensor] = {}  # those of the last call

    def angles(self, max_seq_len: int, offset: int, scale: float) -> Tensor:
        found = self._made.get((max_seq_len, offset))
        if found is not None:
            return found
        positions = (np.arange(max_seq_len) + offset).astype(np.float32) * np.float32(scale)
        speeds = 1 / np.float32(self.rotary_base) ** (
            np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        )
        angles = np.outer(positions, speeds)
        doubled = (
            np.repeat(angles, 2, axis=1) if self.interleaved else np.concatenate([angles, angles], axis=1)
        )
        host = doubled.astype(np.float32).reshape(max_seq_len, 1, 1, self.rotated)
        made = Tensor(arrays.to(host, self._device))
        self._made = {(max_seq_len, offset): made}
        return made


class _ApplyRotary(rope.ApplyRotary, AttentionBase):
    argument_names: ClassVar[dict[str, str]] = {"x": "t"}


apply_rotary_pos_emb = _ApplyRotary().apply_rotary_pos_emb
