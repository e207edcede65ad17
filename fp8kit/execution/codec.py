"""Specs as text and back. The static part of a call travels as one string through torch's operators, XLA's
attributes and checkpoints.

The text is the same in every process. A new process can run the call from the text alone.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fp8kit import formats, recipe
from fp8kit.accumulation import Accumulation
from fp8kit.arguments import shown
from fp8kit.backends.policy import SelectionPolicy, policy_from_text
from fp8kit.errors import FormatError, Fp8kitError
from fp8kit.lru import memoized
from fp8kit.ops.registry import SPECS
from fp8kit.spec import Meta

# values that have a name: type -> (tag, name -> value)
_NAMED: dict[type, tuple[str, Any]] = {
    formats.Format: ("format", formats.FORMATS),
    formats.DType: ("dtype", formats.DTYPES),
    recipe.Format: ("recipe_format", recipe.Format),
}
_TABLES = dict(_NAMED.values())


@memoized("encoded specs")
def encode(value: Any) -> str:
    """The text of a spec, a recipe, a meta, a policy, or a tuple of these and of plain values. FormatError
    for anything else; ``fk.register_operation`` makes the dataclasses of a user's own spec known."""
    return json.dumps(_packed(value), separators=(",", ":"))


@memoized("decoded specs")
def decode(text: str) -> Any:
    """The value whose text ``encode`` wrote; the same object for the same text. FormatError for any other
    text, and for a text that names a class which this process does not know."""
    try:
        return _unpacked(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, Fp8kitError):
            raise
        raise FormatError("decode", "text", shown(text), "one that encode wrote") from error


def _packed(value: Any) -> Any:
    table = _NAMED.get(type(value))
    if table is not None and (table[0] != "format" or formats.FORMATS.get(value.name) == value):
        return {table[0]: value.name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Meta):
        return {"meta": [list(value.shape), value.dtype.name, value.zero]}
    if isinstance(value, tuple | list):
        return [_packed(part) for part in value]
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, SelectionPolicy):
        return {"policy": policy_from_text(value.text).text}  # where it has overrides, it is kept from now on
    if isinstance(value, Accumulation):
        return {"accumulation": [value.fraction_bits, value.chunk, value.promote, value.group]}
    if SPECS.get(type(value).__name__) is type(value):
        fields: Any = dataclasses.fields(value)  # type: ignore[arg-type]
        parts = {field.name: _packed(getattr(value, field.name)) for field in fields if field.init}
        return {"is": type(value).__name__, **parts}
    wanted = "numbers, text, formats, tuples, and dataclasses that fk.register_operation was given"
    raise FormatError("encode", "spec", repr(value), wanted)


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(part) for part in value)
    if not isinstance(value, dict):
        return value
    if "is" in value:
        return SPECS[value["is"]](**{name: _unpacked(part) for name, part in value.items() if name != "is"})
    ((tag, inner),) = value.items()
    if tag in _TABLES:
        return _TABLES[tag][inner]
    if tag == "policy":
        return policy_from_text(inner)
    if tag == "accumulation":
        return Accumulation(*inner)
    if tag == "meta":
        shape, dtype, zero = inner
        return Meta(tuple(shape), formats.DTYPES[dtype], zero)
    return frozenset(inner)
