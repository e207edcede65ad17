"""PyTorch: fine-tune a Hugging Face GPT-2 in FP8.

Shows: ``te.convert`` puts FP8 layers round a model's own parameters, so that its optimiser, its checkpoints
and its code stay as they are; the training loop differs by one ``with``; ``te.revert`` gives the plain model
back. The model is made from a configuration, small and untrained; ``from_pretrained("gpt2")`` goes the same
way. Needs: PyTorch (extra torch), transformers (no extra), a CPU; with CUDA it runs on the GPU.
Argument: steps.
"""

from fp8kit.errors import not_installed

if why := not_installed("17_torch_fine_tune.py", None, "transformers"):
    raise SystemExit(why)

import fp8kit_torch as te
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fp8kit.backends.dispatch import default_device
from fp8kit.commands import positional, positive

TEXT = b"the quick brown fox jumps over the lazy dog; " * 40
LENGTH = 32


def batch(step: int, device: str) -> torch.Tensor:
    """Eight pieces of the text, bytes as tokens."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(TEXT) - LENGTH, (8,), generator=generator).tolist()
    return torch.tensor([list(TEXT[start : start + LENGTH]) for start in starts], device=device)


def main(steps: int = 30) -> None:
    """Print the loss as it falls, then that of the plain model with the trained weights."""
    torch.manual_seed(0)
    device = default_device().kind
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).to(device)
    count = sum(p.numel() for p in model.parameters())
    te.convert(model)
    layers = [
        name for name, module in model.named_modules() if isinstance(module, te.TransformerEngineBaseModule)
    ]
    print(
        f"{len(layers)} layers in FP8, {count} parameters before and "
        f"{sum(p.numel() for p in model.parameters())} after"
    )
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
    fp8_recipe = te.recipe.DelayedScaling(amax_history_len=16)
    for step in range(steps):
        ids = batch(step, device)
        with te.autocast(recipe=fp8_recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f} nats/byte")
    te.revert(model)
    ids = batch(steps, device)
    with torch.no_grad():
        print(f"the plain model again: loss {model(input_ids=ids, labels=ids).loss.item():.3f} nats/byte")


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
