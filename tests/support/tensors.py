"""``fp8kit.testing.assert_close`` for torch's tensors, of any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fp8kit.testing import compare


def host(value: Any) -> Any:
    """Returns a tensor's values in float64 on the host; anything else as it is."""
    return value.detach().double().cpu().numpy() if isinstance(value, torch.Tensor) else value


def largest(*tensors: torch.Tensor) -> float:
    """Returns the largest absolute value in any of them."""
    return max(float(np.abs(host(tensor)).max()) for tensor in tensors)


def assert_tensor_close(what: str, got: torch.Tensor, want: torch.Tensor, slack: Any = 0.0) -> None:
    """AssertionError where ``got`` differs from ``want``, of its dtype or float64, by more than one rounding
    to the dtype of ``got`` and ``slack``, a number or a tensor: see ``fp8kit.testing.assert_close``."""
    if want.dtype not in (got.dtype, torch.float64):
        raise AssertionError(f"{what}: {got.dtype}, expected {want.dtype}")
    compare.assert_close(what, host(got), host(want), str(got.dtype).removeprefix("torch."), host(slack))
