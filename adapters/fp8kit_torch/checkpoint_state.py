"""FP8 state of a checkpoint that is loaded before a model's layers are converted: kept until they are."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from fp8kit.arguments import flag
from fp8kit_torch.checks import module
from fp8kit_torch.extra_state import pack

_LAST = "_extra_state"
_KEPT = "_fp8kit_extra_state"  # where a model keeps what waits: name of a layer -> its state
_SAVES = "_fp8kit_saves_extra_state"
# models that something waits in
waiting: list[weakref.ref[nn.Module]] = []


def keep_extra_state(model: nn.Module, save: bool = True) -> nn.Module:
    """Let ``model`` load checkpoints of a converted model although its own layers are plain, and returns it:
    FP8 state (keys ``..._extra_state``) waits until the layers are converted, by ``convert`` or by a client
    (accelerate, Lightning), which is at the latest when the next ``autocast`` begins. A ``state_dict`` has
    what waits. Call it before ``load_state_dict``: in the constructor of a LightningModule, say.

    Converted layers have their keys before their first step, too: ``torch.distributed.checkpoint`` reads what
    a ``state_dict`` has keys for, and nothing else.

    ``save``: False leaves FP8 state out of the model's ``state_dict``, so that a plain model loads it.
    ArgumentError for other arguments.
    """
    module("keep_extra_state", "model", model)
    flag("keep_extra_state", "save", save)
    if _KEPT not in vars(model):
        vars(model)[_KEPT] = {}
        model.register_load_state_dict_pre_hook(_take_out)
        model.register_state_dict_post_hook(_put_back)
    vars(model)[_SAVES] = save
    return model


def _take_out(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: Any, *lists: Any
) -> None:
    """Keep the states of layers that have none yet."""
    parts = dict(model.named_modules())
    for key in [key for key in state_dict if key.startswith(prefix) and key.endswith(f".{_LAST}")]:
        name = key[len(prefix) :].removesuffix(f".{_LAST}")
        if name in parts and type(parts[name]).set_extra_state is nn.Module.set_extra_state:
            vars(model)[_KEPT][name] = state_dict.pop(key)
    if vars(model)[_KEPT]:
        waiting.append(weakref.ref(model))


def _put_back(model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Add what waits to a ``state_dict``, or leave all FP8 state out."""
    if vars(model)[_SAVES]:
        for name, part in model.named_modules():
            if hasattr(part, "fp8_meta"):
                state_dict.setdefault(f"{prefix}{name}.{_LAST}", pack({}))
        state_dict.update({f"{prefix}{name}.{_LAST}": own for name, own in vars(model)[_KEPT].items()})
    else:
        for key in [key for key in state_dict if key.startswith(prefix) and key.endswith(f".{_LAST}")]:
            del state_dict[key]


def hand_over() -> None:
    """Give layers that were converted since what waits for them. What is for layers that stay as they are is
    dropped with the first that is given."""
    left = []
    for reference in waiting:
        model = reference()
        if model is None:
            continue
        kept: dict[str, Tensor] = vars(model)[_KEPT]
        parts = dict(model.named_modules())
        ready = {name: parts[name] for name in kept if hasattr(parts.get(name), "fp8_meta")}
        for name, part in ready.items():
            part.set_extra_state(kept[name])
        if ready:
            kept.clear()
        elif kept:
            left.append(reference)
    waiting[:] = left
