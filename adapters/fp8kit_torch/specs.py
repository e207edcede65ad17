"""A layer's spec under a recipe, from its spec in high precision: as an object, and as a text, a constant
within ``torch.compile``."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch

from fp8kit.execution.codec import decode, encode
from fp8kit.layers.base import spec_object
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.scaling import forward_slots
from fp8kit_torch.autocast import recipe_of
from fp8kit_torch.constants import constant_result


def layer_products(spec: Any) -> list[ProductSpec]:
    """The products of a layer's spec, in order."""
    return [value for value in vars(spec).values() if isinstance(value, ProductSpec)]


def layer_spec(
    spec: Any,
    fp8: Quantization | None,
    cached: bool,
    bias: str,
    options: tuple[tuple[str, Any], ...],
    more: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """``spec`` with its products in FP8 or not, their weights cached or not, ``bias`` of the last one,
    ``options`` as further fields, and ``more`` as further fields of the products."""
    names = [
        field.name for field in dataclasses.fields(spec) if isinstance(getattr(spec, field.name), ProductSpec)
    ]
    changes = {
        name: dataclasses.replace(getattr(spec, name), fp8=fp8, weight_cached=cached, **dict(more))
        for name in names
    }
    changes[names[-1]] = dataclasses.replace(changes[names[-1]], bias=bias)
    return dataclasses.replace(spec, **changes, **dict(options))


@constant_result
def layer_text(
    spec: str,
    recipe: tuple[Any, ...],
    cached: bool,
    bias: str,
    options: tuple[tuple[str, Any], ...],
    cast: int = -1,
) -> str:
    """The text of ``layer_spec``; ``recipe``: by its parts, () for high precision. ``cast``: of this
    product's weight cast instead."""
    fp8 = recipe_of(recipe).quantization if recipe else None
    found = layer_spec(decode(spec), fp8, cached, bias, options)
    if cast >= 0:
        found = LinearSpec(layer_products(found)[cast])
    return encode(found)


@constant_result
def fp8_text(recipe: tuple[Any, ...]) -> str:
    """The text of what a recipe, by its parts, means for products."""
    return encode(recipe_of(recipe).quantization)


@lru_cache(maxsize=64)
def scale_names(gemms: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the scales that a layer's forward reads from its state, in the order of the slots."""
    return tuple(f"{operand}_scale" for operand in forward_slots(gemms))


def spec_for(kind: str, *arguments: Any) -> Any:
    """The spec of class ``kind`` with these plain arguments: an object, the same one for the same arguments;
    within ``torch.compile`` its text."""
    return _text_of(kind, arguments) if torch.compiler.is_compiling() else spec_object(kind, *arguments)


@constant_result
def _text_of(kind: str, arguments: tuple[Any, ...]) -> str:
    return encode(spec_object(kind, *arguments))
