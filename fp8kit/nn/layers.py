"""The shared layers (``fp8kit.layers``) on the native tape."""

from __future__ import annotations

from typing import ClassVar

from fp8kit import layers
from fp8kit.nn.attention_base import AttentionBase
from fp8kit.nn.fp8 import Fp8Module
from fp8kit.nn.layer import NativeLayer


class Linear(layers.Linear, Fp8Module):
    __doc__ = layers.Linear.__doc__


class LayerNormLinear(layers.LayerNormLinear, Fp8Module):
    __doc__ = layers.LayerNormLinear.__doc__


class LayerNormMLP(layers.LayerNormMLP, Fp8Module):
    __doc__ = layers.LayerNormMLP.__doc__


class LayerNorm(layers.LayerNorm, NativeLayer):
    __doc__ = layers.LayerNorm.__doc__


class RMSNorm(layers.RMSNorm, NativeLayer):
    __doc__ = layers.RMSNorm.__doc__


class L2Normalization(layers.L2Normalization, NativeLayer):
    __doc__ = layers.L2Normalization.__doc__


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


class MultiheadAttention(layers.MultiheadAttention, AttentionBase):
    __doc__ = layers.MultiheadAttention.__doc__

    argument_names: ClassVar[dict[str, str]] = {
        "x": "hidden_states",
        "freqs": "rotary_pos_emb",
        "k_freqs": "rotary_pos_emb",
    }


class TransformerLayer(layers.TransformerLayer, AttentionBase):
    __doc__ = layers.TransformerLayer.__doc__
