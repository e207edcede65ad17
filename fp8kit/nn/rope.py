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
    __doc__ = rope.RotaryPositionEmbedding.__doc__

    def place(self, device: Any) -> None:
        self._device = resolve(self.layer_name, None, device)[1]
        self._made: dict[tuple[int, int], Tensor] = {}  # those of the last call

    def angles(self, max_seq_len: int, offset: int, scale: float | None) -> Tensor:
        found = self._made.get((max_seq_len, offset))
        if found is None:
            found = Tensor(arrays.to(arrays.as_view(self._angles(max_seq_len, offset, scale)), self._device))
            self._made = {(max_seq_len, offset): found}
        return found

    def _angles(self, max_seq_len: int, offset: int, scale: float | None) -> np.ndarray[Any, Any]:
        positions = (np.arange(max_seq_len) + offset).astype(np.float32)
        if scale is not None:
            positions *= np.float32(scale)
        speeds = 1 / np.float32(self.rotary_base) ** (
            np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        )
        angles = np.outer(positions, speeds)
        doubled = (
            np.repeat(angles, 2, axis=1) if self.interleaved else np.concatenate([angles, angles], axis=1)
        )
        return doubled.astype(np.float32).reshape(max_seq_len, 1, 1, self.rotated)


class _ApplyRotary(rope.ApplyRotary, AttentionBase):
    argument_names: ClassVar[dict[str, str]] = {"x": "t"}


_rotary = _ApplyRotary()


@rope.documented_as(rope.ApplyRotary.rotate)
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
    return _rotary.rotate(  # type: ignore[no-any-return]
        t,
        freqs,
        tensor_format,
        start_positions,
        interleaved,
        fused,
        cu_seqlens,
        cp_size,
        cp_rank,
        cu_seqlens_padded,
    )
