"""Delayed scaling by your own rules.

Shows: ``amax_compute_algo`` makes a tensor's amax from its history, ``scaling_factor_compute_algo`` makes its
scale from the amax; both are functions on NumPy arrays, called when the step ends. Here the amax is twice a
mean, which one outlier does not take over, and the scale a power of two. Needs: a CPU, or a GPU (then each
update waits for it).
"""

import numpy as np

import fp8kit as fk


def mean_of_used_rows(history: np.ndarray) -> np.ndarray:
    """float32 (H, n) -> (n,): the mean of the steps that recorded something, times 2 for head room."""
    used = np.maximum((history > 0).sum(axis=0), 1)
    return (2 * history.sum(axis=0) / used).astype(np.float32)


def power_of_two(
    amax: np.ndarray, scale: np.ndarray, fp8_max: float, recipe: fk.recipe.DelayedScaling
) -> np.ndarray:
    """float32 (n,): the largest power of two that keeps amax within the format; the old scale where amax says
    nothing."""
    usable = np.isfinite(amax) & (amax > 0)
    exponent = np.floor(np.log2(fp8_max / np.where(usable, amax, 1))) - recipe.margin
    return np.where(usable, np.exp2(exponent), scale).astype(np.float32)


RECIPES = {
    "max": fk.recipe.DelayedScaling(amax_history_len=8),
    "own": fk.recipe.DelayedScaling(
        amax_history_len=8, amax_compute_algo=mean_of_used_rows, scaling_factor_compute_algo=power_of_two
    ),
}


def main() -> None:
    """Print the input's next scale over six steps; step 2 has an outlier."""
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((64, 96)).astype(np.float32) for _ in range(6)]
    batches[2][0, 0] = 200.0
    for name, recipe in RECIPES.items():
        fk.manual_seed(0)
        layer = fk.nn.Linear(96, 48)
        scales = []
        for batch in batches:
            with fk.autocast(recipe=recipe):
                layer(fk.tensor(batch, device=layer.weight.device))
            scales.append(float(layer.fp8_meta["scaling_fwd"].scale[0]))
        print(
            f"{name}: {recipe.short_name()}: scales of the input "
            f"{', '.join(f'{scale:.6g}' for scale in scales)}"
        )


if __name__ == "__main__":
    main()
