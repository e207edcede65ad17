"""Torch optimisers on fp8kit's kernels, ``adamw_`` and ``sgd_`` of the contract, which compute in float32 whatever the parameters' dtype.

Names, arguments and defaults are Transformer Engine's.
"""

from fp8kit_torch.fused_adam import FusedAdam
from fp8kit_torch.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
