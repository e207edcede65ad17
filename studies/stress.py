"""SwiGLU's outliers, planted: one hidden channel of each block whose two halves align, and grow.

Fishman et al. 2024 (arXiv 2409.12517, section 4) found after 200 billion tokens that training in FP8 diverges
where the gate's and the linear half's weights of a channel have become alike and large, because the product
is then quadratic in the input and a scale of the whole tensor follows that channel. Here that state is made:
from a step on, both rows of channel 0 are one direction u times a factor k that grows, and the channel's
column of the second weight is divided by k^2. With k large, silu(k u x) k u x / k^2 = relu(u x) u x: the
function hardly changes, so that in high precision the training goes on as if nothing had happened. The
channel's own weights are held there; all others train.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.models.gpt import GPT

MOST = 256.0  # the factor stays there: an activation 2^16 times the first


class Growth:
    """The planted channels of a model with SwiGLU and float32 weights. From step ``first`` on the factor is
    ``growth`` to the number of steps, up to ``MOST``."""

    def __init__(self, model: GPT, growth: float, first: int) -> None:
        self.layers: list[Any] = [layer.layernorm_mlp for layer in model.layers]
        self.growth, self.first = growth, first
        self.planted: list[tuple[Any, Any]] = []  # (u, the second weight's column) of each layer

    def factor(self, step: int) -> float:
        """k at a step."""
        return float(min(self.growth ** (step - self.first), MOST))

    def apply(self, step: int) -> None:
        """Set the channels' weights for a step; nothing before ``first``."""
        if step < self.first:
            return
        if not self.planted:
            for layer in self.layers:
                rows, column = layer.read("fc1_weight"), layer.read("fc2_weight")[:, 0]
                self.planted.append((rows[0].copy(), column.copy()))
        k = np.float32(self.factor(step))
        for layer, (u, column) in zip(self.layers, self.planted, strict=True):
            first, second = layer.read("fc1_weight").copy(), layer.read("fc2_weight").copy()
            first[[0, layer.ffn_hidden_size]] = k * u
            second[:, 0] = column / k**2
            layer.write("fc1_weight", first)
            layer.write("fc2_weight", second)
