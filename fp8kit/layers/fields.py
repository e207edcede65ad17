"""Constructor arguments that are attributes of a layer: what a program sets later holds from the next call
on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from fp8kit.layers.base import checked


class _Field:
    name: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def _plain(self, layer: Any, value: Any) -> Any:
        """The value as the constructor would take it, with its errors."""
        return getattr(checked(layer.layer_name, layer.constructor_rules, {self.name: value}), self.name)


class SpecField(_Field):
    """A field of the layer's spec, at the end of this ``path`` of attributes."""

    def __init__(self, *path: str) -> None:
        self.path = path

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        if layer is None:
            return self
        own = vars(layer).get("_modules", {})  # torch's, of a subclass that has a module of that name
        return own[self.name] if self.name in own else reduce(getattr, self.path, layer._spec)

    def __set__(self, layer: Any, value: Any) -> None:
        # before there is a spec, in a subclass that has not called the constructor, that one says it
        if "_spec" in vars(layer) and value != self.__get__(layer):
            layer.change_spec(_replaced(layer._spec, self.path, self._plain(layer, value)))


class PartField(_Field):
    """The attribute ``of_part`` of the layer's ``part``; ``nothing``: what None stands for. ``others``: parts
    that have it too, where they are there."""

    def __init__(self, part: str, of_part: str, nothing: Any = None, others: Sequence[str] = ()) -> None:
        self.part, self.of_part, self.nothing, self.others = part, of_part, nothing, others

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        return self if layer is None else getattr(getattr(layer, self.part), self.of_part, None)

    def __set__(self, layer: Any, value: Any) -> None:
        for name in (self.part, *self.others):
            if (part := getattr(layer, name, None)) is not None:
                plain = self._plain(layer, value)
                setattr(part, self.of_part, self.nothing if plain is None else plain)


def _replaced(spec: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    return replace(spec, **{name: _replaced(getattr(spec, name), rest, value) if rest else value})
