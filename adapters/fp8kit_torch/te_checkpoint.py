"""Checkpoints of Transformer Engine and of plain torch models into this door's modules, whose parameters have the same names.

A plain model's ``state_dict`` loads as it is. Transformer Engine's differs in ``_extra_state``, a pickle, which is read here without being
run (``te_extra_state``) and becomes this door's own bytes: scales and amax histories keep their values and their slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.errors import CheckpointError
from fp8kit_torch import extra_state
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.te_extra_state import read_extra_state

_SUFFIX = "_extra_state"
_DIRECTIONS = {"fwd": 3, "bwd": 2}  # slots a GEMM


def convert_extra_state(value: Any, gemms: int) -> Tensor:
    """A Transformer Engine module's ``_extra_state`` as this door's: uint8 (n,), (0,) where it holds no delayed scaling.

    ``gemms``: GEMMs of the module that it is for. CheckpointError where it does not fit, or is no extra state.
    """
    state = read_extra_state(value)
    parts: dict[str, Tensor] = {}
    for direction, slots in _DIRECTIONS.items():
        scale, history = ((state or {}).get(f"{name}_{direction}") for name in ("scale", "amax_history"))
        if scale is None or history is None:
            return extra_state.pack({})
        if scale.shape != (slots * gemms,) or history.ndim != 2 or history.shape[1] != slots * gemms or history.shape[0] < 1:
            got = f"scale_{direction} {tuple(scale.shape)}, amax_history_{direction} {tuple(history.shape)}"
            raise CheckpointError(f"_extra_state: got {got}, expected {slots * gemms} slots: {slots} for each of {gemms} GEMMs")
        if not (torch.isfinite(scale) & (scale > 0)).all():
            raise CheckpointError(f"_extra_state: scale_{direction} holds {scale.tolist()}, expected positive numbers")
        parts |= {f"scaling_{direction}.scale": scale, f"scaling_{direction}.scale_inv": 1 / scale,
                  f"scaling_{direction}.amax_history": history}
    return extra_state.pack(parts)


def from_transformer_engine(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` as ``module.load_state_dict`` takes it: extra states converted, those of modules that keep none here (norms, attention
    without FP8) left out. CheckpointError for an extra state that cannot be read or does not fit, and for FP8 primary weights."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, TransformerEngineBaseModule)}
    found: dict[str, Any] = {}
    for key, value in state_dict.items():
        name, _, last = key.rpartition(".")
        if last != _SUFFIX:
            if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
                raise CheckpointError(f"{key}: got {type(value).__name__}, expected a plain tensor (FP8 weights: saved dequantized)")
            found[key] = value
            continue
        layer = layers.get(name)
        if layer is None or not layer.gemms:
            continue
        try:
            found[key] = convert_extra_state(value, len(layer.gemms))
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from error
    return found


def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """``module.load_state_dict`` of what a model of Transformer Engine of the same structure saved; returns what that returns."""
    return module.load_state_dict(from_transformer_engine(module, state_dict), strict=strict)
