"""The bytes of what a call may change."""

from __future__ import annotations

import fp8kit_torch as ft
import torch


def state_of(value):
    """The bytes of the tensors in an argument, of a module its parameters and its FP8 state."""
    if isinstance(value, torch.nn.Module):
        found = {name: state_of(t) for name, t in [*value.named_parameters(), *value.named_buffers()]}
        return found | {
            f"{name}.fp8": [state_of(p) for state in m.fp8_meta.values() for p in state.parts]
            for name, m in value.named_modules()
            if hasattr(m, "fp8_meta")
        }
    if isinstance(value, torch.optim.Optimizer):
        return state_of([value.state_dict(), [p for group in value.param_groups for p in group["params"]]])
    if isinstance(value, dict):
        return {name: state_of(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [state_of(part) for part in value]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        return (
            value.dtype,
            value.shape,
            value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, ft.InferenceParams):
        return {name: state_of(part) for name, part in vars(value).items()}
    return repr(value) if isinstance(value, int | float | str | bytes | None) else None
