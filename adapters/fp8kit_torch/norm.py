"""``LayerNorm``, ``RMSNorm`` and ``L2Normalization`` in torch."""

from __future__ import annotations

from fp8kit import layers
from fp8kit_torch.layer import TorchLayer
from fp8kit_torch.parameters import ParameterModule


class LayerNorm(layers.LayerNorm, ParameterModule):
    __doc__ = layers.LayerNorm.__doc__


class RMSNorm(layers.RMSNorm, ParameterModule):
    __doc__ = layers.RMSNorm.__doc__


class L2Normalization(layers.L2Normalization, TorchLayer):
    __doc__ = layers.L2Normalization.__doc__
