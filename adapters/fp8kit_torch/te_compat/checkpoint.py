"""Checkpoints of Transformer Engine and of plain torch models into this frontend's modules, whose parameters
have the same names.

A plain model's ``state_dict`` loads as it is. Transformer Engine's differs in ``_extra_state``, a pickle,
which is read without being run (``extra_state``) and becomes this frontend's own bytes: scales and amax
histories keep their values and their slots. A module's own ``load_state_dict`` reads it too; what is here
says by name, before anything is loaded, what cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fp8kit.errors import CheckpointError
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.te_compat.extra_state import convert_extra_state

_SUFFIX = "_extra_state"


def from_transformer_engine(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` as ``module.load_state_dict`` takes it: extra states converted, those of modules that
    keep none here (norms, attention without FP8) left out. CheckpointError for an extra state that cannot be
    read or does not fit, and for FP8 primary weights."""
    layers = dict(module.named_modules())
    found: dict[str, Any] = {}
    for key, value in state_dict.items():
        name, _, last = key.rpartition(".")
        if last != _SUFFIX:
            if type(value) not in (Tensor, nn.Parameter):
                raise CheckpointError(
                    f"{key}: got {type(value).__name__}, expected a plain tensor (FP8 weights: "
                    "saved dequantized)"
                )
            found[key] = value
            continue
        layer = layers.get(name)
        if not isinstance(layer, TransformerEngineBaseModule) or not layer.gemms:
            continue
        try:
            found[key] = convert_extra_state(value, len(layer.gemms))
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {str(error).removeprefix('_extra_state: ')}") from error
    return found


def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """``module.load_state_dict`` of what a model of Transformer Engine of the same structure saved; returns
    what that returns."""
    return module.load_state_dict(from_transformer_engine(module, state_dict), strict=strict)
