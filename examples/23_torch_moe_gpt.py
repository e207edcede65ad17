"""PyTorch: train a small GPT whose MLPs are mixtures of experts, in high precision and in FP8.

Shows: the router with its auxiliary loss, tokens to rows by expert (padded for the products) and back, the
experts as one ``GroupedMLP`` with the probabilities inside; how evenly the experts are used. The text is the
library's own source, byte by byte. Needs: PyTorch (extra torch), a CPU or a GPU. Arguments: steps.
"""

from pathlib import Path

import fp8kit_torch as te
import torch
from fp8kit_torch import router
from torch import nn

import fp8kit
from fp8kit.backends.dispatch import default_device
from fp8kit.commands import positional, positive
from fp8kit.recipe import Float8CurrentScaling

DEVICE = default_device().kind
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LAYERS, HIDDEN, HEADS, FFN, EXPERTS, TOPK = 2, 64, 4, 96, 8, 2
LENGTH, BATCH, BALANCE, ALIGN = 64, 8, 0.1, 16


class Experts(nn.Module):
    """y = sum over a token's experts of p_e MLP_e(norm(x)). ``loss``: the auxiliary loss of the last call;
    ``counts``: the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = te.RMSNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)  # outside of FP8: it decides
        self.mlp = te.GroupedMLP(EXPERTS, HIDDEN, FFN, bias=False)

    def forward(self, x):
        tokens = self.norm(x).reshape(-1, HIDDEN)
        logits = self.gate(tokens.float())
        probs, chosen = router.fused_topk_with_score_function(
            logits, TOPK, False, None, None, None, "softmax", None
        )
        self.counts = chosen.sum(0)
        _, scores = router.fused_compute_score_for_moe_aux_loss(logits, TOPK, "softmax")
        self.loss = router.fused_moe_aux_loss(scores, self.counts, len(tokens), EXPERTS, TOPK, BALANCE)
        rows, weights, row_map, offsets, sizes = te.moe_permute_and_pad_with_probs(
            tokens, probs, chosen, self.counts, ALIGN
        )
        rows = self.mlp(rows, sizes, weights)
        y = te.moe_unpermute(rows, row_map, restore_shape=tokens.shape, pad_offsets=offsets)
        return y.reshape(x.shape)


class Block(nn.Module):
    """Attention, then experts, each with its norm and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, normalization="RMSNorm", bias=False)
        self.attention = te.DotProductAttention(HEADS, HIDDEN // HEADS, qkv_format="bshd")
        self.proj, self.experts = te.Linear(HIDDEN, HIDDEN, bias=False), Experts()

    def forward(self, x):  # (batch, length, hidden)
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, -1))
        x = x + self.proj(self.attention(q, k, v, attn_mask_type="causal"))
        return x + self.experts(x)


class GPT(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = te.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(steps: int, recipe) -> list[float]:
    """The losses of a training from the same seed."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(fp8kit.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT().to(DEVICE, DTYPE)
    for block in model.blocks:
        block.experts.gate.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,))
        batch = torch.stack([data[i : i + LENGTH + 1] for i in starts]).to(DEVICE)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        (loss + sum(block.experts.loss for block in model.blocks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    used = torch.stack([block.experts.counts for block in model.blocks]).float()
    shares = (used / used.sum(1, keepdim=True)).aminmax()
    print(f"experts take from {shares.min:.3f} to {shares.max:.3f} of the tokens ({1 / EXPERTS} is even)")
    return losses


def main(steps: int = 40) -> None:
    """Train twice."""
    for name, recipe in (("high precision", None), ("FP8, current scaling", Float8CurrentScaling())):
        losses = train(steps, recipe)
        print(f"{name}: loss {losses[0]:.3f} to {sum(losses[-5:]) / len(losses[-5:]):.3f}")


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
