"""Where dropout's randomness comes from: torch's own generators, so that ``torch.manual_seed`` rules it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8kit_torch.layer import next_rng
from fp8kit_torch.parameters import placed


def dropout_seed(device: Any = None) -> Tensor:
    """What a layer draws for one operation that drops: ``(seed, offset)``, int64 (2,) on ``device``, from
    torch's default generator there.

    ``device``: as for parameters. A layer draws one each for attention's dropout, a branch's dropout and its
    dropped paths, in the order in which they run. So ``with fk.draw_from(fp8kit_torch.dropout_seed):`` gives
    a native layer the numbers that the same torch layer has after the same ``torch.manual_seed``. Raises
    ArgumentError or BackendError for what is no device, or none of this machine.
    """
    return next_rng(placed("dropout_seed", device))
