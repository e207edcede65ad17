"""``MultiheadAttention``: attention with its projections (Vaswani et al. 2017)."""

from __future__ import annotations

from typing import ClassVar

from fp8kit import layers
from fp8kit.nn.attention_base import AttentionBase


class MultiheadAttention(layers.MultiheadAttention, AttentionBase):
    __doc__ = layers.MultiheadAttention.__doc__

    argument_names: ClassVar[dict[str, str]] = {
        "x": "hidden_states",
        "freqs": "rotary_pos_emb",
        "k_freqs": "rotary_pos_emb",
    }
