"""Hugging Face checkpoints with weights in FP8 by blocks of 128 x 128 (``quantization_config`` of method
"fp8", tensors ``weight`` in E4M3 and ``weight_scale_inv``): written, and read into any model.

The format is DeepSeek-V3's: a weight's value is code * scale_inv of its block, scale_inv float32 or E8M0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8kit import checkpoint_format
from fp8kit.arguments import choice
from fp8kit.errors import ArgumentError, CheckpointError
from fp8kit.float8 import quantize
from fp8kit.formats import E4M3
from fp8kit_torch.checks import module as want_module
from fp8kit_torch.linear import Linear

BLOCK = 128
_SCALES = "_scale_inv"


def save_fp8_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], scale_rule: str = "exact"
) -> list[str]:
    """Save a transformers model, converted or not, with the weights of its linear layers in FP8, as
    ``from_pretrained`` loads it. Returns the names of those layers.

    Weights (N, K) of float32, bfloat16 or float16 whose N and K are multiples of 128, the output embeddings
    left out, become E4M3 codes with a float32 scale for each block of 128 x 128; the rest stays as it is, and
    FP8 state is left out. ``scale_rule``: "exact", amax / 448, or "power_2", that rounded up to a power of
    two. ArgumentError for another model or rule.
    """
    want_module("save_fp8_pretrained", "model", model)
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        wanted = "a transformers model, which has save_pretrained"
        raise ArgumentError("save_fp8_pretrained", "model", type(model).__name__, wanted)
    choice("save_fp8_pretrained", "scale_rule", scale_rule, ("exact", "power_2"))
    whole: Any = model
    head = whole.get_output_embeddings()
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Linear)}
    chosen = [name for name, m in linear.items() if m is not head and _fits(m, state.get(f"{name}.weight"))]
    for name in chosen:
        made = quantize(state[f"{name}.weight"], E4M3, scaling="block_128x128", scale_rule=scale_rule)
        state[f"{name}.weight"] = made.data.view(torch.float8_e4m3fn)
        state[f"{name}.weight{_SCALES}"] = made.scale_inv
    own = whole.config.__dict__
    before = own.get("quantization_config")
    own["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name for name in linear if name not in chosen],
    }
    try:
        whole.save_pretrained(folder, state_dict=state)
    finally:
        own.pop("quantization_config")
        if before is not None:
            own["quantization_config"] = before
    return chosen


def _fits(layer: nn.Module, weight: Tensor | None) -> bool:
    own = isinstance(weight, Tensor) and weight is not None and weight.ndim == 2
    return bool(own and weight.dtype.itemsize > 1 and not any(size % BLOCK for size in weight.shape))


@torch.no_grad()
def load_fp8_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Load the weights of a Hugging Face checkpoint, in FP8 by blocks or not, into ``model``, plain or
    converted, and return it. Weights in FP8 become code * scale_inv, in the parameter's dtype.

    ``folder``: has ``model.safetensors``, or ``model.safetensors.index.json`` and its files. Blocks are of
    the size that the grid of scales says, 128 x 128 at the edges too. CheckpointError where a file, a weight
    or the scales of one are missing or of another shape, and then nothing is loaded.
    """
    want_module("load_fp8_pretrained", "model", model)
    found = _tensors(Path(folder))
    parameters = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
    tied = {value.data_ptr() for key, value in parameters.items() if key in found}
    loaded = {}
    for key, own in parameters.items():
        if key not in found:
            if own.data_ptr() in tied:
                continue
            raise CheckpointError(
                "load_fp8_pretrained", "folder", f"no tensor {key!r}", "one for each weight"
            )
        values = found[key]
        if values.dtype is torch.float8_e4m3fn:
            if f"{key}{_SCALES}" not in found:
                raise CheckpointError(
                    "load_fp8_pretrained", key, "codes alone", f"a tensor {key}{_SCALES} too"
                )
            values = _values(key, values, found[f"{key}{_SCALES}"])
        if values.shape != own.shape:
            got = f"shape {tuple(values.shape)}"
            raise CheckpointError(
                "load_fp8_pretrained", key, got, f"shape {tuple(own.shape)}, as the model has"
            )
        loaded[key] = values
    for key, values in loaded.items():
        parameters[key].copy_(values)
    return model


def _values(key: str, codes: Tensor, scales: Tensor) -> Tensor:
    """code * scale_inv, float32."""
    wanted = tuple(-(-size // BLOCK) for size in codes.shape)
    if tuple(scales.shape) != wanted:
        got = f"shape {tuple(scales.shape)}"
        raise CheckpointError("load_fp8_pretrained", f"{key}{_SCALES}", got, f"shape {wanted}")
    wide = scales.float()
    for dim, size in enumerate(codes.shape):
        wide = wide.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return codes.float() * wide


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint's files, on the CPU."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            got = f"{index}: {error}"
            raise CheckpointError(
                "load_fp8_pretrained", "folder", got, "an index of safetensors files"
            ) from None
    found = {}
    for name in sorted(names):
        if Path(name).name != name:
            raise CheckpointError("load_fp8_pretrained", "folder", f"a file {name!r}", "files of the folder")
        for key, array in checkpoint_format.read(str(folder / name))[0].items():
            bits = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            found[key] = bits.view(getattr(torch, array.dtype.name)).reshape(array.shape)
    return found


__all__ = ["load_fp8_pretrained", "save_fp8_pretrained"]
