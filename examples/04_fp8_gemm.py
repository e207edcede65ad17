"""Multiply two FP8 matrices.

Shows: ``a8 @ b8.T`` sums in float32 and undoes both scales; the error against the exact product comes from
rounding the operands, and is about that of one rounding however long the sum. Needs: a CPU. On a GPU of
compute capability 8.9 or newer, with CuPy arrays, the same line runs on the tensor cores.
"""

import numpy as np

import fp8kit as fk


def main() -> None:
    """Print the error of products of growing depth."""
    rng = np.random.default_rng(0)
    for depth in (64, 512, 4096):
        a = rng.standard_normal((128, depth)).astype(np.float32)
        b = rng.standard_normal((96, depth)).astype(np.float32)
        c = fk.quantize(a, fk.E4M3) @ fk.quantize(b, fk.E4M3).T
        exact = a.astype(np.float64) @ b.astype(np.float64).T
        error = np.linalg.norm(np.asarray(c, np.float64) - exact) / np.linalg.norm(exact)
        print(f"(128, {depth}) @ ({depth}, 96): {c.dtype}, relative error {error:.4f}")


if __name__ == "__main__":
    main()
