"""``common.recipe``: the recipes by the path that programs written for Transformer Engine know, beside
``fp8kit_torch.recipe``."""

from fp8kit import recipe

__all__ = ["recipe"]
