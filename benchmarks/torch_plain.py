"""What a PyTorch user writes without fp8kit, and the float32 reference: the same modules by hand on torch's
own operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Mlp(torch.nn.Module):
    """norm, fc1, GELU (tanh), fc2 of (..., ``hidden``)."""

    def __init__(self, hidden: int, ffn: int, **factory: Any) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden, **factory)
        self.fc1 = torch.nn.Linear(hidden, ffn, **factory)
        self.fc2 = torch.nn.Linear(ffn, hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (..., hidden). Returns the same shape and dtype."""
        return self.fc2(functional.gelu(self.fc1(self.norm(x)), approximate="tanh"))


class Layer(torch.nn.Module):
    """A GPT layer without dropout: causal attention and MLP, norms before the branches; queries, keys and
    values from one product, interleaved by head. Batch first, where the scaled dot product's result needs no
    copy."""

    def __init__(self, hidden: int, ffn: int, heads: int, **factory: Any) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(hidden, **factory)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, **factory)
        self.proj = torch.nn.Linear(hidden, hidden, **factory)
        self.mlp = Mlp(hidden, ffn, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, sequence, hidden). Returns the same shape and dtype."""
        # (batch, sequence, heads, 3, channels) -> three of (batch, heads, sequence, channels)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (self.heads, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


_MLP = {
    "norm.weight": "layer_norm_weight",
    "norm.bias": "layer_norm_bias",
    "fc1.weight": "fc1_weight",
    "fc1.bias": "fc1_bias",
    "fc2.weight": "fc2_weight",
    "fc2.bias": "fc2_bias",
}
# fp8kit's and Transformer Engine's name of a module -> the module here, and its parameters' names -> theirs
PLAIN: dict[str, tuple[type[torch.nn.Module], dict[str, str]]] = {
    "Linear": (torch.nn.Linear, {"weight": "weight", "bias": "bias"}),
    "LayerNormMLP": (Mlp, _MLP),
    "TransformerLayer": (
        Layer,
        {
            "norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
            "norm.bias": "self_attention.layernorm_qkv.layer_norm_bias",
            "qkv.weight": "self_attention.layernorm_qkv.weight",
            "qkv.bias": "self_attention.layernorm_qkv.bias",
            "proj.weight": "self_attention.proj.weight",
            "proj.bias": "self_attention.proj.bias",
        }
        | {f"mlp.{own}": f"layernorm_mlp.{theirs}" for own, theirs in _MLP.items()},
    ),
}


def plain(
    kind: str, sizes: tuple[int, ...], weights: dict[str, Tensor], dtype: torch.dtype
) -> torch.nn.Module:
    """The plain module of ``kind`` (a key of ``PLAIN``) with these weights, which have fp8kit's names, on
    their device in ``dtype``."""
    make, names = PLAIN[kind]
    module = make(*sizes, device=next(iter(weights.values())).device, dtype=dtype)
    module.load_state_dict({own: weights[theirs] for own, theirs in names.items()})
    return module
