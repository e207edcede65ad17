"""Where did the NaN come from?

Shows: ``autocast(check_finite=True)`` stops at the first layer and tensor that holds NaN or Inf, forward or
backward, and the failed step leaves no trace in the FP8 scales. For finding faults: it waits for the device
after every operation. Needs: a CPU, or a GPU.
"""

import numpy as np

import fp8kit as fk

fk.manual_seed(0)
MODEL = fk.nn.Sequential(fk.nn.LayerNormMLP(32, 64), fk.nn.LayerNormMLP(32, 64), fk.nn.Linear(32, 8))
DEVICE = next(MODEL.parameters()).device


def step(x: np.ndarray, dy: np.ndarray) -> str:
    """One forward and backward pass under the microscope: what it says."""
    leaf = fk.tensor(x, requires_grad=True, device=DEVICE)
    try:
        with fk.autocast(recipe=fk.recipe.DelayedScaling(amax_history_len=4), check_finite=True):
            y = MODEL(leaf)
        y.backward(dy)
    except fk.NonFiniteError as error:
        return str(error)
    return "finite"


def main() -> None:
    """A healthy step, then a bad input, a bad weight and a bad gradient."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((16, 32)).astype(np.float32), rng.standard_normal((16, 8)).astype(np.float32)
    print(f"healthy:      {step(x, dy)}")
    scales = fk.tensor(MODEL[1].fp8_meta["scaling_fwd"].scale).numpy().copy()

    bad = x.copy()
    bad[3, 4] = np.nan
    print(f"bad input:    {step(bad, dy)}")
    bad = dy.copy()
    bad[0, 0] = np.inf
    print(f"bad gradient: {step(x, bad)}")

    weight = MODEL[1].fc2_weight
    good = weight.numpy().copy()
    bad = good.copy()
    bad[7, 7] = np.inf
    with fk.no_grad():
        weight.copy_(bad)
    print(f"bad weight:   {step(x, dy)}")
    with fk.no_grad():
        weight.copy_(good)
    print(f"repaired:     {step(x, dy)}")
    left = fk.tensor(MODEL[1].fp8_meta["scaling_fwd"].scale).numpy()
    print(f"scales after the bad steps: {'as before' if np.array_equal(left, scales) else 'others'}")


if __name__ == "__main__":
    main()
