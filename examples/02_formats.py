"""A number format of your own, and stochastic rounding.

Shows: a ``Format`` is a sign, exponent and mantissa bits, and derives its limits; the error halves with each
mantissa bit; nearest rounding loses what is small against a step, stochastic rounding keeps it in the mean.
Needs: a CPU, or a GPU.
"""

import numpy as np

import fp8kit as fk
from fp8kit.backends.dispatch import default_device


def host(tensor: fk.Float8Tensor) -> np.ndarray:
    """The dequantised values on the host."""
    return fk.tensor(tensor.dequantize()).numpy()


def main() -> None:
    """Print limits and error of some formats, then the mean of values that lie between two codes."""
    device = default_device()
    values = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    x = fk.tensor(values, device=device)
    own = [
        fk.Format("E3M4", 3, 4),
        fk.Format("E3M2", 3, 2, special="none"),
        fk.Format("E2M3", 2, 3, special="none"),
    ]
    for fmt in (fk.E4M3, fk.E5M2, fk.E2M1, *own):
        error = np.linalg.norm(host(fk.quantize(x, fmt)) - values) / np.linalg.norm(values)
        print(
            f"{fmt.name} {fmt.bits} bits, {fmt.smallest_subnormal:.3g} ... {fmt.max:.5g}, "
            f"epsilon {fmt.epsilon:.4f}, error {error:.4f}"
        )

    # 1.03 lies between 1 and 1.125: a quarter of the way
    between = fk.tensor(np.full((128, 128), 1.03, np.float32), device=device)
    nearest = host(fk.quantize(between, fk.E4M3, scale=1.0))
    print(f"nearest: mean {nearest.mean():.4f} of 1.0300, {len(np.unique(nearest))} different value")
    for offset in range(2):
        drawn = host(fk.quantize(between, fk.E4M3, scale=1.0, rounding="stochastic", rng=(7, offset)))
        print(
            f"stochastic, rng (7, {offset}): mean {drawn.mean():.4f} of 1.0300, "
            f"{len(np.unique(drawn))} different values"
        )
    again = host(fk.quantize(between, fk.E4M3, scale=1.0, rounding="stochastic", rng=(7, 1)))
    print(f"the same rng again: {'the same' if np.array_equal(again, drawn) else 'other'} bits")


if __name__ == "__main__":
    main()
