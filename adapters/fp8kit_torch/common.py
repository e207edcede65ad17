"""``common.recipe``: the recipes by the path that programs written for Transformer Engine know, beside
``fp8kit_torch.recipe``."""

import sys

from fp8kit import recipe

__all__ = ["recipe"]

# so that names can be imported from both
sys.modules |= {f"fp8kit_torch.{path}": recipe for path in ("recipe", "common.recipe")}
