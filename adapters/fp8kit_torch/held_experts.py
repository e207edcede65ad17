"""Weights of experts that are held in FP8, as one product of all groups takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.quantization import Quantization
from fp8kit.spec import Meta
from fp8kit_torch.operand_tensor import OperandTensor, want_fit
from fp8kit_torch.side_by_side import as_one
from fp8kit_torch.te_compat.grouped_tensor import QuantizedGroupedTensor

_NAMES = {"w_inv": "w_scale_inv"}  # of scales of tensors, as ``OperandTensor`` calls them


def way_of(weight: Tensor) -> Quantization | None:
    """How a weight, or one parameter of several, is held for products; None where these take its values."""
    if isinstance(weight, OperandTensor):
        return weight._fp8
    whole = isinstance(weight, QuantizedGroupedTensor) and issubclass(weight._how.kind, OperandTensor)
    return weight._how.how if whole else None  # type: ignore[attr-defined, no-any-return]


def want_held_fit(operation: str, weights: Sequence[Tensor], fp8: Quantization) -> None:
    """Raise what ``OperandTensor.inputs`` would raise of weights that are held for products."""
    for weight in weights:
        if (how := way_of(weight)) is not None:
            want_fit(operation, how, fp8)


def codes_as_one(weights: Sequence[Any], wanted: Mapping[str, Meta]) -> dict[str, Tensor]:
    """The operands ``wanted`` of ``expert_linear`` of weights, or of one parameter of all: its own memory,
    where it holds them as they are wanted, else copies. UnsupportedError for operands that are not held."""
    if any(name.startswith("dgrad_") for name in wanted):
        rule = "the same for fprop and for dgrad: the weight is held in FP8 alone"
        raise UnsupportedError("GroupedLinear", "recipe", "two ways to cast a weight", rule)
    one = weights[0] if isinstance(weights[0], QuantizedGroupedTensor) else None
    held = {} if one is None else one.parts_as_one()
    found = {name: held.get(_NAMES.get(name, name)) for name in wanted}
    if any(found[n] is None or found[n].numel() != math.prod(wanted[n].shape) for n in wanted):
        parts = [member._operands() for member in (weights if one is None else one.operands())]
        found = {name: torch.stack([own[_NAMES.get(name, name)] for own in parts]) for name in wanted}
    return {name: found[name].view(wanted[name].shape) for name in wanted}


def standing_for(
    weights: Sequence[Any], codes: Mapping[str, Tensor], alone: bool, dtype: torch.dtype | None
) -> Tensor:
    """What stands for the weights as one (N, ...) in a call that multiplies their ``codes``, and hands their
    gradients on but for ``alone``. ``dtype``: that torch.autocast casts to, if it does."""
    if isinstance(weights[0], QuantizedGroupedTensor):
        return weights[0].detach() if alone else weights[0]
    shape = len(weights), *weights[0].shape
    whole: Tensor = QuantizedGroupedTensor._made(codes, None, shape, dtype or weights[0].dtype)
    return whole if alone else as_one(whole, *weights)  # type: ignore[no-any-return]
