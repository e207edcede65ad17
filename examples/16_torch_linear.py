"""PyTorch: ``te.Linear`` under ``te.autocast`` with delayed scaling, E4M3 for everything.

Shows: Transformer Engine's first example under its names; scales that follow the data from the second step
on, and what they cost in accuracy; that the module's FP8 state goes through ``state_dict``. Needs: PyTorch
(extra torch), a CPU; with CUDA it runs on the GPU.
"""

import fp8kit_torch as te
import torch
from fp8kit_torch import recipe

from fp8kit.backends.dispatch import default_device


def main() -> None:
    """Print losses, errors and scales of three steps, then those of a copy that was loaded."""
    torch.manual_seed(0)
    device = default_device().kind
    in_features, out_features, rows = 96, 128, 64
    model = te.Linear(in_features, out_features, bias=True, device=device)
    inp = torch.randn(rows, in_features, device=device)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3, amax_history_len=16)
    exact = model(inp).detach()
    for step in range(3):
        model.zero_grad()
        with te.autocast(enabled=True, recipe=fp8_recipe):
            out = model(inp)
        loss = out.square().sum()
        loss.backward()
        error = ((out - exact).norm() / exact.norm()).item()
        forward, backward = model.fp8_meta["scaling_fwd"].scale, model.fp8_meta["scaling_bwd"].scale
        print(
            f"step {step}: loss {loss.item():.3f}, error {error:.4f}, next scales: input {forward[0]:.1f}, "
            f"weight {forward[1]:.1f}, gradient {backward[0]:.1f}"
        )

    wanted = 2 * exact.t() @ inp
    print(f"weight gradient: error {((model.weight.grad - wanted).norm() / wanted.norm()).item():.4f}")
    other = te.Linear(in_features, out_features, device=device)
    other.load_state_dict(model.state_dict())
    with te.autocast(recipe=fp8_recipe):
        print(f"loaded, scales and all: the same bits {torch.equal(other(inp), model(inp))}")


if __name__ == "__main__":
    main()
