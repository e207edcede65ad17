"""``TransformerLayer``: attention and MLP, each with its norm, its residual and its dropout."""

from __future__ import annotations

from fp8kit import layers
from fp8kit.nn.attention_base import AttentionBase


class TransformerLayer(layers.TransformerLayer, AttentionBase):
    __doc__ = layers.TransformerLayer.__doc__
