"""One linear layer in FP8, forward and backward.

Shows: ``autocast`` with delayed scaling, where its state lives, and how a module's scales follow the data:
they start at 1 and are right from the second step on. Needs: a CPU; on a machine with CUDA the layer is made
on the GPU, and the same lines run there.
"""

import numpy as np

import fp8kit as fk


def main() -> None:
    """Print error and scale of the input over three steps, then of the gradients."""
    fk.manual_seed(0)
    rng = np.random.default_rng(0)
    layer = fk.nn.Linear(128, 64)
    x = fk.tensor(
        rng.standard_normal((32, 128)).astype(np.float32), requires_grad=True, device=layer.weight.device
    )
    dy = fk.tensor(rng.standard_normal((32, 64)).astype(np.float32), device=layer.weight.device)
    exact = layer(x).numpy()
    recipe = fk.recipe.DelayedScaling(amax_history_len=16)
    for step in range(3):
        layer.zero_grad()
        x.grad = None
        with fk.autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
        error = np.linalg.norm(y.numpy() - exact) / np.linalg.norm(exact)
        scale = layer.fp8_meta["scaling_fwd"].scale
        print(
            f"step {step}: relative error {error:.4f}, next scales: input {float(scale[0]):.1f}, "
            f"weight {float(scale[1]):.1f}"
        )
    wanted = dy.numpy().T @ x.numpy()
    error = np.linalg.norm(layer.weight.grad.numpy() - wanted) / np.linalg.norm(wanted)
    print(f"weight gradient: relative error {error:.4f} (E5M2 for dy, E4M3 for x)")


if __name__ == "__main__":
    main()
