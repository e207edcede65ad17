"""Memory for time: activations that are computed again.

Shows: ``fk.checkpoint`` keeps a layer's input and none of its activations; backward runs the layer once more,
dropout and FP8 scales included, and every gradient has the same bits. Needs: a CPU, or a GPU.
"""

import gc
import tracemalloc

import numpy as np

import fp8kit as fk
from fp8kit.backends.dispatch import default_device

DEVICE = default_device()


def in_use() -> int:
    """Bytes that arrays occupy on the default device."""
    gc.collect()  # else what nobody holds any more might be freed between two looks
    if DEVICE.kind == "cuda":
        import cupy

        return int(cupy.get_default_memory_pool().used_bytes())
    # only now: it would slow down the compilation of the first step's kernels
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    return tracemalloc.get_traced_memory()[0]


def train(recomputed: bool) -> tuple[int, bytes]:
    """(bytes that three layers keep for backward, the second step's gradients as bytes)."""
    fk.manual_seed(0)
    layers = [
        fk.nn.TransformerLayer(128, 512, 4, hidden_dropout=0.1, attention_dropout=0.0, device=DEVICE)
        for _ in range(3)
    ]
    x = fk.tensor(
        np.random.default_rng(0).standard_normal((64, 4, 128)).astype(np.float32),
        requires_grad=True,
        device=DEVICE,
    )
    dy = fk.tensor(np.random.default_rng(1).standard_normal(x.shape).astype(np.float32), device=DEVICE)
    for step in range(2):  # delayed scaling has found its scales after the first
        before = in_use() if step else 0
        with fk.autocast(recipe=fk.recipe.DelayedScaling(amax_history_len=4)):
            y = x
            for layer in layers:
                y = fk.checkpoint(layer, y) if recomputed else layer(y)
        kept = in_use() - before if step else 0
        y.backward(dy)
        del y
    gradients = [x.grad, *(parameter.grad for layer in layers for parameter in layer.parameters())]
    return kept, b"".join(gradient.numpy().tobytes() for gradient in gradients)


def main() -> None:
    """Print what is kept, and whether the gradients agree."""
    with fk.deterministic():
        (much, plain), (little, again) = (train(recomputed) for recomputed in (False, True))
    print(f"kept for backward: {much / 2**20:.2f} MiB, with checkpoint {little / 2**20:.2f} MiB")
    print(f"{len(plain) // 4} gradients: {'the same bits' if plain == again else 'other bits'}")


if __name__ == "__main__":
    main()
