"""fp8kit: FP8 transformer layers on NumPy and CuPy arrays, and under PyTorch and JAX without a compiled extension."""

__version__ = "0.1.0"
