"""``Linear`` on the native tape."""

from __future__ import annotations

from fp8kit import layers
from fp8kit.nn.fp8 import Fp8Module


class Linear(layers.Linear, Fp8Module):
    __doc__ = layers.Linear.__doc__
