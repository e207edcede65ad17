"""``LayerNormLinear`` in torch."""

from __future__ import annotations

from fp8kit import layers
from fp8kit_torch.module import TransformerEngineBaseModule


class LayerNormLinear(layers.LayerNormLinear, TransformerEngineBaseModule):
    __doc__ = layers.LayerNormLinear.__doc__
