"""``DotProductAttention`` (Vaswani et al. 2017; grouped query heads: Ainslie et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from fp8kit import layers
from fp8kit.nn.attention_base import AttentionBase


class DotProductAttention(layers.DotProductAttention, AttentionBase):
    __doc__ = layers.DotProductAttention.__doc__

    argument_names: ClassVar[dict[str, str]] = {
        "q": "query_layer",
        "k": "key_layer",
        "v": "value_layer",
        "kv": "kv_layer",
        "qkv": "qkv_layer",
        "bias": "core_attention_bias",
        "mask": "attention_mask",
    }
