"""Specs as texts: torch's ops take no Python objects, so what is static about a call travels as one string that says everything.

The text does not depend on the process that wrote it: a compiled graph that is loaded elsewhere finds what it needs in its own strings.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any

from fp8kit import formats
from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit.ops.cross_entropy import CrossEntropySpec
from fp8kit.ops.dropout_add import AddSpec, DropoutAddSpec
from fp8kit.ops.embedding import EmbeddingSpec
from fp8kit.ops.linear import LinearSpec
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec
from fp8kit.ops.norm_mlp import NormMLPSpec
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.quant import Fp8, Quant
from fp8kit.ops.rope import RopeSpec
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MMParams, QParams

SPECS = {
    kind.__name__: kind
    for kind in (
        AttentionSpec, CrossEntropySpec, AddSpec, DropoutAddSpec, EmbeddingSpec, LinearSpec, NormSpec, NormLinearSpec, NormMLPSpec,
        ProductSpec, Fp8, Quant, RopeSpec, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MMParams, QParams,
    )
}  # fmt: skip
_NAMED = {formats.Format: ("format", formats.FORMATS), formats.DType: ("dtype", formats.DTYPES), Format: ("recipe_format", Format)}
_TABLES: dict[str, Any] = dict(_NAMED.values())


@lru_cache(maxsize=4096)
def encode(value: Any) -> str:
    """The text of a spec, a recipe, or a tuple of these and of plain values. TypeError for anything else."""
    return json.dumps(_packed(value), separators=(",", ":"))


@lru_cache(maxsize=4096)
def decode(text: str) -> Any:
    """What ``encode`` wrote; the same object for the same text."""
    return _unpacked(json.loads(text))


def _packed(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Format)):
        return value
    if isinstance(value, tuple | list):
        return [_packed(part) for part in value]
    if type(value) in _NAMED:
        return {_NAMED[type(value)][0]: value.name}
    if type(value) in SPECS.values():
        return {type(value).__name__: {field.name: _packed(getattr(value, field.name)) for field in dataclasses.fields(value)}}
    raise TypeError(f"fp8kit_torch: {type(value).__name__} {value!r} cannot go into a compiled graph")


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(part) for part in value)
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name in _TABLES:
        return _TABLES[name][inner]
    return SPECS[name](**{field: _unpacked(part) for field, part in inner.items()})
