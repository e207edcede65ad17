"""``RotaryPositionEmbedding`` and ``apply_rotary_pos_emb`` (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import math
from typing import Any

from fp8kit.errors import ShapeError


def as_angles(operation: str, argument: str, freqs: Any) -> Any:
    """Angles as the operation takes them: (s, 1, 1, r) or (s, r) as (s, r). ShapeError otherwise."""
    shape = tuple(freqs.shape)
    if len(shape) not in (2, 4) or math.prod(shape) != shape[0] * shape[-1]:
        raise ShapeError(operation, argument, f"shape {shape}", "(positions, 1, 1, features)")
    return freqs.reshape(shape[0], shape[-1])
