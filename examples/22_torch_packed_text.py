"""PyTorch: train on documents of different lengths, packed without padding, then continue several prompts.

Shows: documents lie one after the other in one (tokens, hidden) array ("thd"), ``cu_seqlens`` says where each
begins, and no token sees another document; every step has another number of tokens. Then prompts of
different lengths grow together over a cache of keys and values in pages, and one gets more text in between,
as in a conversation. Needs: PyTorch (extra torch), a CPU; with CUDA it runs on the GPU. Argument: steps.
"""

import inspect
import random
import shutil
import statistics
import textwrap

import fp8kit_torch as te
import torch

from fp8kit.backends.dispatch import default_device
from fp8kit.commands import positional, positive

HIDDEN, HEADS, LONGEST, DOCUMENTS = 64, 4, 1024, 3
RECIPE = te.recipe.Float8CurrentScaling()
OPTIONS = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "normalization": "RMSNorm"}
OPTIONS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def documents() -> list[bytes]:
    """Functions of Python's own library, of 30 to ``LONGEST`` bytes."""
    modules = (inspect, random, shutil, statistics, textwrap)
    found = [function for module in modules for _, function in inspect.getmembers(module, inspect.isfunction)]
    texts = [inspect.getsource(function).encode() for function in found]
    return [text for text in texts if len(text) <= LONGEST]


class GPT(torch.nn.Module):
    """A byte-level language model. ids: (tokens,); returns logits (tokens, 256)."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, HIDDEN, device=device)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, layer_number=number, device=device, **OPTIONS)
            for number in (1, 2)
        )
        self.head = te.LayerNormLinear(HIDDEN, 256, normalization="RMSNorm", device=device)
        self.angles = te.RotaryPositionEmbedding(HIDDEN // HEADS, device=device)(LONGEST)

    def forward(self, ids: torch.Tensor, **where: object) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, **where)
        return self.head(x)


def pack(texts: list[bytes], device: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """The bytes to read, the bytes to foretell, and where the documents lie, as a layer's arguments."""
    ids = torch.tensor([byte for text in texts for byte in text[:-1]], device=device)
    targets = torch.tensor([byte for text in texts for byte in text[1:]], device=device)
    lengths = torch.tensor([len(text) - 1 for text in texts])
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    longest = int(lengths.max())
    names = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return ids, targets, names | {"max_seqlen_q": longest, "max_seqlen_kv": longest}


@torch.no_grad()
def grow(model: GPT, prompts: dict[str, bytes], count: int, more: bytes, device: str) -> dict[str, bytes]:
    """Each prompt with ``count`` bytes drawn; the first one is given ``more`` text half way."""
    cache = te.InferenceParams(
        len(prompts),
        LONGEST,
        qkv_format="thd",
        is_paged=True,
        page_size=16,
        total_num_pages=64,
        device=device,
    )
    written, new = dict(prompts), dict(prompts)
    for step in range(count):
        cache.pre_step({name: len(text) for name, text in new.items()})
        ids = torch.tensor([byte for text in new.values() for byte in text], device=device)
        with te.autocast(recipe=RECIPE):
            logits = model(ids, inference_params=cache)
        ends = torch.tensor([len(text) for text in new.values()]).cumsum(0) - 1
        drawn = torch.multinomial(torch.softmax(logits[ends.to(device)], -1), 1).flatten().tolist()
        new = {name: bytes([byte]) for name, byte in zip(prompts, drawn, strict=True)}
        if step == count // 2:
            new[next(iter(prompts))] += more
        written = {name: written[name] + new[name] for name in prompts}
    return written


def main(steps: int = 40) -> None:
    """Print the loss as it falls, then what the prompts become."""
    torch.manual_seed(0)
    device, texts, draw = default_device().kind, documents(), random.Random(0)
    model, tokens = GPT(device), set()
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(steps):
        ids, targets, where = pack(draw.sample(texts, DOCUMENTS), device)
        tokens.add(len(ids))
        with te.autocast(recipe=RECIPE):
            loss = torch.nn.functional.cross_entropy(model(ids, **where), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"step {step}: {len(ids)} tokens, loss {loss.item():.3f} nats/byte")
    print(f"numbers of tokens in a step: {len(tokens)}, from {min(tokens)} to {max(tokens)}")
    for text in grow(model, {"a": b"def ", "b": b"    return "}, 24, b"\n    # ", device).values():
        print(repr(text.decode("latin-1")))


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
