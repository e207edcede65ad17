"""``as_transformer_engine``: programs written for Transformer Engine import this door under that name. Nothing here happens by itself.

Only names change: ``transformer_engine.pytorch`` *is* the module ``fp8kit_torch``, and what is not in it is not there under the other name
either.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fp8kit import recipe as recipes
from fp8kit.errors import BackendError, RecipeError, expected

STANDS_FOR = "2.20.0"  # the Transformer Engine whose names and defaults these are
# module under the other name -> module here; several where its names are spread over them
_SAME = {
    "transformer_engine.pytorch": ("fp8kit_torch",),
    "transformer_engine.pytorch.optimizers": ("fp8kit_torch.optimizers",),
    "transformer_engine.pytorch.fp8": ("fp8kit_torch.autocast", "fp8kit_torch.availability", "fp8kit_torch.quantized"),
    "transformer_engine.pytorch.quantization": ("fp8kit_torch.autocast", "fp8kit_torch.availability", "fp8kit_torch.quantized"),
    "transformer_engine.pytorch.tensor": ("fp8kit_torch.quantized",),
    "transformer_engine.pytorch.distributed": ("fp8kit_torch.recompute", "fp8kit_torch.rng"),
    "transformer_engine.pytorch.graph": ("fp8kit_torch.graphs",),
    "transformer_engine.pytorch.cross_entropy": ("fp8kit_torch.cross_entropy",),
    "transformer_engine.pytorch.permutation": ("fp8kit_torch.moe",),
    "transformer_engine.pytorch.module": ("fp8kit_torch",),
    "transformer_engine.pytorch.attention": ("fp8kit_torch",),
    "transformer_engine.pytorch.transformer": ("fp8kit_torch",),
}
_NEUTRAL = {"interval": 1, "override_linear_precision": (False, False, False)}


class _OldDelayedScaling(type):
    """Calls make fp8kit's ``DelayedScaling``, and every one of those is an instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> recipes.DelayedScaling:
        for name, neutral in _NEUTRAL.items():
            value = kwargs.pop(name, neutral)
            if (tuple(value) if isinstance(value, list) else value) != neutral:
                raise RecipeError(expected("DelayedScaling", name, value, f"{neutral}, the only value that it has left"))
        return recipes.DelayedScaling(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, recipes.DelayedScaling)

    def __getattr__(cls, name: str) -> Any:
        return getattr(recipes.DelayedScaling, name)


class DelayedScaling(metaclass=_OldDelayedScaling):
    """``fp8kit.recipe.DelayedScaling`` that takes two arguments of Transformer Engine 1.x as well, at their neutral values only:
    ``interval=1`` and ``override_linear_precision=(False, False, False)``. RecipeError otherwise."""


def _module(name: str, parts: Iterable[ModuleType], package: bool = True) -> ModuleType:
    """A module of that name with the public names of ``parts``."""
    made = ModuleType(name, f"fp8kit under the name {name}.")
    made.__spec__ = ModuleSpec(name, None, is_package=package)
    if package:
        made.__path__ = []
    for part in parts:
        for key in getattr(part, "__all__", None) or [key for key in vars(part) if not key.startswith("_")]:
            setattr(made, key, getattr(part, key))
    return made


class _Distribution(importlib.metadata.Distribution):
    """What ``importlib.metadata`` says of "transformer-engine": libraries ask that before they import it."""

    def read_text(self, filename: str) -> str | None:
        """The METADATA, and nothing else."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {STANDS_FOR}\nSummary: fp8kit_torch under another name\n"

    def locate_file(self, path: Any) -> Any:
        """There are no files."""
        raise FileNotFoundError(f"transformer-engine: {path}: this is fp8kit_torch under another name")


class _Finder:
    """Answers for ``transformer_engine``: its modules are in ``sys.modules`` already, and any other name of it is refused, lest a file of
    fp8kit_torch be loaded a second time, or parts of an installed Transformer Engine be mixed in."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """None for other packages; ModuleNotFoundError for what fp8kit does not have."""
        if name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            raise ModuleNotFoundError(f"{name}: fp8kit_torch, which stands for transformer_engine here, does not have it", name=name)

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        """The one distribution, when it is asked for."""
        return [_Distribution()] if (context.name or "").replace("_", "-").lower() == "transformer-engine" else []


def as_transformer_engine() -> ModuleType:
    """Make ``transformer_engine``, ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe`` importable names of this door,
    in this process; returns ``transformer_engine``. Calling it again changes nothing.

    An installed Transformer Engine is left out from then on. BackendError where it was imported already.
    """
    known = sys.modules.get("transformer_engine")
    if known is not None:
        if isinstance(getattr(known, "__fp8kit__", None), _Finder):
            return known
        raise BackendError(expected("as_transformer_engine", "transformer_engine", "imported already", "a call before its first import"))
    recipe = _module("transformer_engine.common.recipe", [recipes], package=False)
    recipe.DelayedScaling = DelayedScaling  # type: ignore[attr-defined]
    made = {"transformer_engine": _module("transformer_engine", []), "transformer_engine.common": _module("transformer_engine.common", []),
            "transformer_engine.common.recipe": recipe}
    for name, targets in _SAME.items():
        parts = [importlib.import_module(target) for target in targets]
        made[name] = parts[0] if name == "transformer_engine.pytorch" else _module(name, parts)
    whole = made["transformer_engine"]
    whole.__version__ = STANDS_FOR  # type: ignore[attr-defined]
    whole.common, whole.pytorch = made["transformer_engine.common"], made["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    made["transformer_engine.common"].recipe = recipe  # type: ignore[attr-defined]
    finder = _Finder()
    whole.__fp8kit__ = finder  # type: ignore[attr-defined]
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    sys.modules.update(made)
    return whole
