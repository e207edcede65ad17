"""``Linear`` in torch."""

from __future__ import annotations

from fp8kit import layers
from fp8kit_torch.module import TransformerEngineBaseModule


class Linear(layers.Linear, TransformerEngineBaseModule):
    pass
