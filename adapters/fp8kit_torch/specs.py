"""A layer's spec under a recipe, from its spec in high precision: as an object, and as a text, a constant
within ``torch.compile``."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8kit import scaled_products
from fp8kit.execution.codec import decode, encode
from fp8kit.layers.base import spec_object
from fp8kit.layers.fp8_layer import layer_products, layer_spec, scale_names
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization
from fp8kit.recipe_fields import by_key
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch.autocast import layer_recipe
from fp8kit_torch.constants import constant_result
from fp8kit_torch.state import named
from fp8kit_torch.torch_compat import unseen


@constant_result
def layer_text(
    spec: str,
    recipe: str,
    cached: bool,
    bias: str,
    options: tuple[tuple[str, Any], ...],
    cast: int = -1,
    layer: tuple[str, str] = ("", ""),
    frozen: tuple[float, ...] = (),
    where: str = "cpu",
) -> str:
    """The text of ``layer_spec``; ``recipe``: its key, "" for high precision; ``layer``: class and name.
    ``cast``: of this product's weight cast instead. ``frozen``: delayed scaling's forward scales, which are
    what they are from now on. ``where``: the device that it is for."""
    fp8 = _fp8_of(recipe, layer, where) if recipe else None
    found = layer_spec(decode(spec), fp8, cached, bias, options)
    if frozen and fp8 is not None:
        found = _with_scales(found, fp8, frozen)
    if cast >= 0:
        found = LinearSpec(layer_products(found)[cast])
    return encode(found)


def _with_scales(spec: Any, fp8: Quantization, scales: tuple[float, ...]) -> Any:
    """The spec whose products cast their operands with these scales, by the slots of the forward state."""
    changes, start = {}, 0
    for field in dataclasses.fields(spec):
        part = getattr(spec, field.name)
        if isinstance(part, ProductSpec):
            x, w = (
                partial(dataclasses.replace, scale_source="static", static_scale=scale)
                for scale in scales[start : start + 2]
            )
            own = (
                fp8.map(x, "x").map(w, "w").map(lambda g: dataclasses.replace(g, scale_source="current"), "g")
            )
            changes[field.name] = dataclasses.replace(part, fp8=own)
            start += FORWARD_SLOTS
    return dataclasses.replace(spec, **changes)


@constant_result
def frozen_scales(state: int) -> tuple[float, ...]:
    """The scales of the live state of that number, as they are."""
    found = named(state)
    assert found is not None
    with unseen():
        return tuple(found.scale.tolist())


def _fp8_of(recipe: str, layer: tuple[str, str], where: str) -> Quantization | None:
    own = layer_recipe(recipe, layer)
    return None if own is None else scaled_products.for_device(own.quantization, where)


@constant_result
def fp8_text(recipe: str, layer: tuple[str, str], where: str) -> str:
    """The text of what a recipe, by its key, means for the products of a ``layer`` of that class and name
    on the device ``where``; "" for high precision."""
    fp8 = _fp8_of(recipe, layer, where)
    return "" if fp8 is None else encode(fp8)


@constant_result
def attention_text(fields: tuple[Any, ...], recipe: str, name: str, plain_backward: bool) -> str:
    """The text of an ``AttentionSpec`` of these first fields under a recipe, by its key, for a layer that
    is called ``name``; ``plain_backward``: its field."""
    how = by_key(recipe).attention_for(name)
    more = () if how is None else (False, False, how, plain_backward)
    return encode(spec_object("AttentionSpec", *fields, *more))


@constant_result
def expert_text(fields: tuple[Any, ...], recipe: str, layer: tuple[str, str], slots: int) -> str:
    """The text of an ``ExpertLinearSpec`` of these first fields and ``slots`` under a recipe, by its key,
    for a ``layer`` of that class and name."""
    own = layer_recipe(recipe, layer)
    fp8 = None if own is None else own.quantization
    return encode(spec_object("ExpertLinearSpec", *fields, fp8, slots))


@constant_result
def with_cached_weight(spec: str) -> tuple[str, str]:
    """Of the text of an ``ExpertLinearSpec``: that of its ``fp8``, "" in high precision, and that of the spec
    whose weight is cached."""
    found = decode(spec)
    if found.fp8 is None:
        return "", spec
    return encode(found.fp8), encode(dataclasses.replace(found, weight_cached=True))


@constant_result
def attention_draws(recipe: str, name: str) -> bool:
    """Whether that draws random numbers besides dropout's."""
    how = by_key(recipe).attention_for(name)
    return how is not None and how.needs_rng


def spec_for(kind: str, *arguments: Any) -> Any:
    """The spec of class ``kind`` with these plain arguments: an object, the same one for the same arguments;
    within ``torch.compile`` its text."""
    return _text_of(kind, arguments) if torch.compiler.is_compiling() else spec_object(kind, *arguments)


def any_rows(rows: int, x: Tensor) -> tuple[int, Tensor | None]:
    """A number of rows as a spec and the input ``like`` have it. Within ``torch.compile``, where a spec is a
    constant, the shape of ``like`` says it: one graph is for every number."""
    return (-1, x.new_empty((rows, 0))) if torch.compiler.is_compiling() else (rows, None)


@constant_result
def _text_of(kind: str, arguments: tuple[Any, ...]) -> str:
    return encode(spec_object(kind, *arguments))


__all__ = ["layer_products", "scale_names"]
