"""``LayerNorm``, ``RMSNorm`` and ``L2Normalization`` on the native tape."""

from __future__ import annotations

from fp8kit import layers
from fp8kit.nn.layer import NativeLayer


class LayerNorm(layers.LayerNorm, NativeLayer):
    __doc__ = layers.LayerNorm.__doc__


class RMSNorm(layers.RMSNorm, NativeLayer):
    __doc__ = layers.RMSNorm.__doc__


class L2Normalization(layers.L2Normalization, NativeLayer):
    __doc__ = layers.L2Normalization.__doc__
