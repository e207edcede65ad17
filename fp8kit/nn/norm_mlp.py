"""``LayerNormMLP`` on the native tape."""

from __future__ import annotations

from fp8kit import layers
from fp8kit.nn.fp8 import Fp8Module


class LayerNormMLP(layers.LayerNormMLP, Fp8Module):
    __doc__ = layers.LayerNormMLP.__doc__
