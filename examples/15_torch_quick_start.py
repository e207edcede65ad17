"""PyTorch: one transformer layer in five steps, from plain modules to FP8.

Shows: what each step takes over (products and norms, then fused pairs of them, then the whole layer, then
FP8), that all compute the same, and how long forward and backward take. Needs: PyTorch (extra torch), a CPU
or a GPU (bfloat16). Arguments: hidden size, length.
"""

import time

import fp8kit_torch as te
import torch
from torch import nn

from fp8kit.backends.dispatch import default_device
from fp8kit.commands import positional, positive

DEVICE = default_device().kind
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# a plain layer's parameters, and those of fused modules that hold the same
NAMES = {
    "norm1.": "layernorm_qkv.layer_norm_",
    "qkv.": "layernorm_qkv.",
    "proj.": "proj.",
    "norm2.": "layernorm_mlp.layer_norm_",
    "fc1.": "layernorm_mlp.fc1_",
    "fc2.": "layernorm_mlp.fc2_",
}


class Plain(nn.Module):
    """Attention and MLP of products and norms out of ``kit``: ``torch.nn``, or ``fp8kit_torch``."""

    def __init__(self, kit, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = kit.LayerNorm(size), kit.LayerNorm(size)
        self.qkv, self.proj = kit.Linear(size, 3 * size), kit.Linear(size, size)
        self.fc1, self.fc2 = kit.Linear(size, 4 * size), kit.Linear(4 * size, size)

    def forward(self, x):  # (sequence, batch, size)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(o.permute(2, 0, 1, 3).flatten(-2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Fused(nn.Module):
    """A norm and a product in one module, a norm and an MLP in one, and the attention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.layernorm_qkv, self.proj = te.LayerNormLinear(size, 3 * size), te.Linear(size, size)
        self.attention, self.layernorm_mlp = (
            te.DotProductAttention(heads, size // heads),
            te.LayerNormMLP(size, 4 * size),
        )

    def forward(self, x):
        x = x + self.proj(self.attention(qkv_layer=self.layernorm_qkv(x)))
        return x + self.layernorm_mlp(x)


def main(size: int = 64, length: int = 32) -> None:
    """Print each step's time, and how far its output is from the first one's."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        heads, x = max(2, size // 128), torch.randn(length, 2, size, dtype=DTYPE, requires_grad=True)
        whole = te.TransformerLayer(
            size,
            4 * size,
            heads,
            hidden_dropout=0,
            attention_dropout=0,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
        )
        steps = {
            "1 plain PyTorch": Plain(nn, size, heads),
            "2 te.Linear, te.LayerNorm": Plain(te, size, heads),
            "3 fused modules": Fused(size, heads),
            "4 te.TransformerLayer": whole,
            "5 te.TransformerLayer in FP8": whole,
        }
        first, source = None, steps["1 plain PyTorch"].to(DTYPE).state_dict()
        fused = {
            next(name.replace(old, new) for old, new in NAMES.items() if name.startswith(old)): p
            for name, p in source.items()
        }
        inside = {
            name if name.startswith("layernorm_mlp") else f"self_attention.{name}": p
            for name, p in fused.items()
        }
        for (name, layer), values in zip(steps.items(), (source, source, fused, inside, inside), strict=True):
            layer.to(DTYPE).load_state_dict(values)
            for turn in range(5):
                if turn == 2:  # warm; reading a number waits for the device
                    _, start = float(x.grad.sum()), time.perf_counter()
                with te.autocast(enabled="FP8" in name):
                    y = layer(x)
                y.backward(torch.ones_like(y))
            _, end = float(x.grad.sum()), time.perf_counter()
            first = y.detach() if first is None else first
            error = (y.detach() - first).float().norm() / first.float().norm()
            print(f"{name:30} {1e3 * (end - start) / 3:8.2f} ms, difference {error:.5f}")


if __name__ == "__main__":
    main(*positional(__doc__, size=positive, length=positive))
