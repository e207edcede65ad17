"""``MultiheadAttention``: attention with its projections (Vaswani et al. 2017)."""

from __future__ import annotations

from fp8kit import layers
from fp8kit_torch.attention_base import AttentionBase


class MultiheadAttention(layers.MultiheadAttention, AttentionBase):
    pass
