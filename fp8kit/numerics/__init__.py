"""The numerics laboratory: what low precision does to the tensors of a training."""

from fp8kit.numerics.capture import Dump, GemmOperands, capture

__all__ = ["Dump", "GemmOperands", "capture"]
