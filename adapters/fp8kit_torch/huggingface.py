"""Hugging Face checkpoints with weights in FP8 by blocks of 128 x 128 (``quantization_config`` of method
"fp8", tensors ``weight`` in E4M3 and ``weight_scale_inv``): written, and read into any model.

The format is DeepSeek-V3's: a weight's value is code * scale_inv of its block, scale_inv float32 or E8M0.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
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
from fp8kit_torch.expert_kinds import GATED, ExpertKind, layout_of
from fp8kit_torch.linear import Linear

log = logging.getLogger("fp8kit")
BLOCK = 128
_SCALES = "_scale_inv"


def save_fp8_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], scale_rule: str = "exact"
) -> list[str]:
    """Save a transformers model, converted or not, with the weights of its linear layers in FP8, as
    ``from_pretrained`` loads it. Returns the names of those layers.

    Weights (N, K) of float32, bfloat16 or float16 whose N and K are multiples of 128, the output embeddings
    left out, become E4M3 codes with a float32 scale for each block of 128 x 128, and so do the weights of
    experts in arrays gate_up_proj (E, 2 F, H) and down_proj (E, H, F), under the names of single experts
    where transformers writes these. The rest stays as it is, experts of other layouts, with biases or of
    other sizes too, since transformers has no FP8 experts like them, and FP8 state is left out.

    ``scale_rule``: "exact", amax / 448, or "power_2", that rounded up to a power of two. ArgumentError for
    another model or rule, and where no weight would be in FP8: nothing is written then. A UserWarning says
    how many of how many layers are, where some are not; the head does not count.
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
    chosen = [name for name, m in linear.items() if m is not head and _fits(state.get(f"{name}.weight"))]
    for name in chosen:
        key = f"{name}.weight"
        state[key], state[f"{key}{_SCALES}"] = _quantized(state[key], scale_rule)
    scales: dict[str, Tensor] = {}
    layers = [name for name, m in linear.items() if m is not head]
    for name, m in model.named_modules():
        keys = [f"{name}.{part}" for part in GATED]
        if layout_of(m) is not None:
            layers.append(name)
        if layout_of(m) == ExpertKind(GATED, "oi", biased=False) and all(
            _fits(state.get(key)) for key in keys
        ):
            chosen.append(name)
            for key in keys:
                state[key], scales[key] = _quantized(state[key], scale_rule)
    _say_left([name for name in layers if name not in chosen], len(layers))
    state |= {f"{key}{_SCALES}": value for key, value in _as_saved(model, scales).items()}
    # transformers puts its own kind in the place of each of these, unless the checkpoint says otherwise
    read_in_fp8 = [name for name, _ in model.named_modules() if name in linear or name.endswith(".experts")]
    own = whole.config.__dict__
    before = own.get("quantization_config")
    own["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name for name in read_in_fp8 if name not in chosen],
    }
    try:
        whole.save_pretrained(folder, state_dict=state)
    finally:
        own.pop("quantization_config")
        if before is not None:
            own["quantization_config"] = before
    return chosen


def _say_left(left: list[str], layers: int) -> None:
    """Refuse a checkpoint without any weight in FP8, and warn of one that has some."""
    why = f"weights whose N and K are multiples of {BLOCK}"
    if len(left) == layers:
        got = f"none of its {layers} layers has {why}"
        raise ArgumentError("save_fp8_pretrained", "model", got, "at least one: use save_pretrained")
    if left:
        some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        warnings.warn(
            f"save_fp8_pretrained: {layers - len(left)} of {layers} layers are in FP8, those with {why}; the "
            f"others stay as they are: {some}",
            stacklevel=3,
        )


def _fits(weight: Any) -> bool:
    own = isinstance(weight, Tensor) and weight.ndim in (2, 3) and weight.dtype.itemsize > 1
    return own and not any(size % BLOCK for size in weight.shape[-2:])


def _quantized(weight: Tensor, scale_rule: str) -> tuple[Tensor, Tensor]:
    """The codes, and a scale for each block: those of experts one below the other."""
    rows = weight.reshape(-1, weight.shape[-1])
    made: Any = quantize(rows, E4M3, scaling="block_128x128", scale_rule=scale_rule)
    grid = *weight.shape[:-2], weight.shape[-2] // BLOCK, weight.shape[-1] // BLOCK
    return made.data.view(torch.float8_e4m3fn).reshape(weight.shape), made.scale_inv.reshape(grid)


def _as_saved(model: Any, scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scales by the names and in the parts in which transformers writes their weights."""
    if not scales:
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    parts: dict[str, Tensor] = revert_weight_conversion(model, scales)
    return {key: value.contiguous() for key, value in parts.items()}


@torch.no_grad()
def load_fp8_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Load the weights of a Hugging Face checkpoint, in FP8 by blocks or not, into ``model``, plain or
    converted, and return it. Weights in FP8 become code * scale_inv, in the parameter's dtype.

    ``folder``: has ``model.safetensors``, or ``model.safetensors.index.json`` and its files. Blocks are of
    the size that the grid of scales says, 128 x 128 at the edges too. Where a transformers model has other
    names than its checkpoints, or experts in one array that these have singly, transformers puts the values
    together, in a second model in float32. CheckpointError where a file, a weight or the scales of one are
    missing or of another shape, and then nothing is loaded.
    """
    want_module("load_fp8_pretrained", "model", model)
    if not Path(folder).is_dir():
        got = repr(os.fspath(folder))
        raise CheckpointError("load_fp8_pretrained", "folder", got, "a folder that is there")
    found = _tensors(Path(folder))
    coded = [key for key, values in found.items() if values.dtype is torch.float8_e4m3fn]
    if not coded:
        log.info("%s has no weight in FP8: its values are loaded as they are", os.fspath(folder))
    for key in coded:
        if f"{key}{_SCALES}" not in found:
            wanted = f"a tensor {key}{_SCALES} too"
            raise CheckpointError("load_fp8_pretrained", key, "codes alone", wanted)
        found[key] = _values(key, found[key], found.pop(f"{key}{_SCALES}"))
    parameters = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
    if _missing(model, parameters, found) and hasattr(model, "from_pretrained") and found:
        found = _put_together(model, found)
    if missing := _missing(model, parameters, found):
        got = f"no tensor {missing[0]!r}"
        raise CheckpointError("load_fp8_pretrained", "folder", got, "one for each weight")
    loaded = {key: found[key] for key in parameters if key in found}
    for key, values in loaded.items():
        if values.shape != parameters[key].shape:
            got, wanted = f"shape {tuple(values.shape)}", f"shape {tuple(parameters[key].shape)}"
            raise CheckpointError("load_fp8_pretrained", key, got, f"{wanted}, as the model has")
    for key, values in loaded.items():
        parameters[key].copy_(values)
    return model


def _missing(model: Any, parameters: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """What a checkpoint lacks, but for what shares its memory with something that it has, and for angles,
    which the model's own numbers say."""
    whole = parameters | dict(model.named_parameters(remove_duplicate=False))
    places = {key: whole[key].data_ptr() or id(whole[key]) for key in parameters}  # codes have no address
    tied = {place for key, place in places.items() if key in found}
    lacking = [key for key, place in places.items() if key not in found and place not in tied]
    return [key for key in lacking if not key.endswith("inv_freq")]


def _put_together(model: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's values by the model's names, as transformers reads them into a plain model."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    try:
        plain, info = type(model).from_pretrained(
            None, config=config, state_dict=found, dtype=torch.float32, output_loading_info=True
        )
    except RuntimeError as error:  # an expert that is not there, or of another shape
        why = f"transformers cannot put its tensors together: {str(error).strip().splitlines()[0]}"
        raise CheckpointError("load_fp8_pretrained", "folder", why, "every tensor of the model") from error
    lacking = info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]}
    return {key: value for key, value in plain.state_dict().items() if key not in lacking}


def _values(key: str, codes: Tensor, scales: Tensor) -> Tensor:
    """code * scale_inv, float32."""
    wanted = (*codes.shape[:-2], *(-(-size // BLOCK) for size in codes.shape[-2:]))
    if codes.ndim < 2 or tuple(scales.shape) != wanted:
        got = f"shape {tuple(scales.shape)}"
        raise CheckpointError("load_fp8_pretrained", f"{key}{_SCALES}", got, f"shape {wanted}")
    wide = scales.float()
    for dim in (-2, -1):
        wide = wide.repeat_interleave(BLOCK, dim).narrow(dim, 0, codes.shape[dim])
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
