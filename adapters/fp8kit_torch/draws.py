"""Where dropout's randomness comes from: torch's own generators, so that ``torch.manual_seed`` rules it."""

from __future__ import annotations

import torch
from torch import Tensor


def next_rng(device: torch.device) -> Tensor:
    """A fresh int64 [2] ``(seed, offset)`` for one operation, drawn from the default generator of ``device``.

    Drawn on the device: nothing waits for the host, and a captured graph draws anew at each replay.
    """
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
