"""Quantise an array to FP8 and back.

Shows: current scaling, a scale of your own, scales for rows and blocks, and the error that each leaves.
Needs: a CPU. With CuPy and a GPU, pass a CuPy array instead: the result is made of CuPy arrays, and nothing
else changes.
"""

import numpy as np

import fp8kit as fk


def error(x: np.ndarray, q: fk.Float8Tensor) -> float:
    """Relative error of the round trip, in the 2-norm."""
    return float(np.linalg.norm(q.dequantize() - x) / np.linalg.norm(x))


def main() -> None:
    """Print one line for each way to scale."""
    x = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    x[3] *= 1e6  # one row of outliers, which a single scale must make room for

    q = fk.quantize(x, fk.E4M3)
    print(
        f"codes {q.data.dtype} {q.data.shape}, scale_inv {q.scale_inv}, "
        f"largest value of the format {q.format.max}"
    )
    quiet = np.delete(x, 3, axis=0)
    for scaling in ("tensor", "row", "block_1x128", "block_128x128", "mx_1x32"):
        q = fk.quantize(x, fk.E4M3, scaling=scaling)
        kept = np.delete(q.dequantize(), 3, axis=0)
        lost = np.linalg.norm(kept - quiet) / np.linalg.norm(quiet)
        print(
            f"{scaling:14} error of the whole {error(x, q):.4f}, of the rows beside the outliers {lost:.4f}"
        )

    own = fk.quantize(quiet, fk.E5M2, scale=np.float32([1024.0]))
    print(f"E5M2 with scale 1024: error {error(quiet, own):.4f} (2 mantissa bits)")


if __name__ == "__main__":
    main()
