"""The shared layers (``fp8kit.layers``) on the native tape."""

from __future__ import annotations

from typing import ClassVar

from fp8kit import layers
from fp8kit.nn.attention_base import AttentionBase
from fp8kit.nn.fp8 import Fp8Module
from fp8kit.nn.layer import NativeLayer


class Linear(layers.Linear, Fp8Module):
    pass


class LayerNormLinear(layers.LayerNormLinear, Fp8Module):
    pass


class LayerNormMLP(layers.LayerNormMLP, Fp8Module):
    pass


class LayerNorm(layers.LayerNorm, NativeLayer):
    pass


class RMSNorm(layers.RMSNorm, NativeLayer):
    pass


class L2Normalization(layers.L2Normalization, NativeLayer):
    pass


class DotProductAttention(layers.DotProductAttention, AttentionBase):
    argument_names: ClassVar[dict[str, str]] = {
        "q": "query_layer",
        "k": "key_layer",
        "v": "value_layer",
        "kv": "kv_layer",
        "qkv": "qkv_layer",
        "bias": "core_attention_bias",
        "mask": "attention_mask",
    }


class MultiheadAttention(layers.MultiheadAttention, AttentionBase):
    argument_names: ClassVar[dict[str, str]] = {
        "x": "hidden_states",
        "freqs": "rotary_pos_emb",
        "k_freqs": "rotary_pos_emb",
    }


class TransformerLayer(layers.TransformerLayer, AttentionBase):
    pass
