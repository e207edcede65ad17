"""Train a byte-level GPT in FP8, save it, and let it write.

Shows: the whole loop in a few lines: model, AdamW with warm-up and cosine, clipping, FP8 under ``autocast``,
a checkpoint that holds the scales too, and sampling. Needs: a CPU (about 10 seconds once its kernels are
compiled); on a machine with CUDA it trains in bfloat16 and FP8 on the GPU. ``fp8kit demo`` is the same at a
useful size, beside a high-precision run.
"""

import tempfile
from pathlib import Path

import fp8kit as fk
from fp8kit.backends.dispatch import default_device
from fp8kit.commands import positional, positive
from fp8kit.models import text
from fp8kit.models.gpt import GPT, generate
from fp8kit.models.presets import preset
from fp8kit.models.train import high_precision


def main(steps: int = 200) -> None:
    """Train for ``steps`` steps and print losses and a sample."""
    size, device = preset("tiny"), default_device()
    corpus = text.standard_library()
    fk.manual_seed(0)
    model = GPT(size, high_precision(device), device)
    optimizer = fk.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    recipe = fk.recipe.DelayedScaling(amax_history_len=16)
    for step in range(steps):
        ids, targets = text.batch(corpus.train, sequences=16, length=size.context, seed=0, step=step)
        with fk.autocast(recipe=recipe):
            logits = model(fk.tensor(ids, device=device))
            loss = fk.nn.cross_entropy(logits, fk.tensor(targets, device=device))
        loss.backward()
        fk.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.lr = fk.optim.warmup_cosine(step, 3e-3, steps // 10, steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(
                f"step {step}: {loss.item():.3f} nats/byte (bytes by frequency alone: "
                f"{corpus.unigram_entropy():.3f})"
            )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gpt.safetensors")
        fk.save(path, model)
        again = GPT(size, high_precision(device), device)
        fk.load(path, again)
    print(generate(again, b"def ", 60, recipe).decode(errors="replace"))


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
