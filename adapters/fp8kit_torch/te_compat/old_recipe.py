"""``DelayedScaling`` with the arguments that Transformer Engine's had before 2.0, which accelerate and
Lightning still give it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from fp8kit import recipe as recipes
from fp8kit.errors import RecipeError
from fp8kit.quantization import Quantization
from fp8kit.recipe_fields import recipe_class

_GEMMS = ("fprop", "dgrad", "wgrad")


@recipe_class
class OverriddenDelayedScaling(recipes.DelayedScaling):
    """``DelayedScaling``, some of whose GEMMs are in high precision: ``in_high_precision``, names out of
    "fprop dgrad wgrad"."""

    in_high_precision: str = ""

    @cached_property
    @lru_cache(maxsize=64)  # noqa: B019  equal recipes give one object
    def quantization(self) -> Quantization:
        """As delayed scaling's, but for those GEMMs."""
        made = super().quantization.gemms
        plain = self.in_high_precision.split()
        return Quantization(
            *(replace(made[n], compute="high_precision") if n in plain else made[n] for n in _GEMMS)
        )

    @property
    def override_linear_precision(self) -> tuple[bool, ...]:
        """Whether fprop, dgrad and wgrad are in high precision."""
        return tuple(name in self.in_high_precision.split() for name in _GEMMS)

    def short_name(self) -> str:
        """As delayed scaling's, with the GEMMs in high precision."""
        return f"{super().short_name()}, {self.in_high_precision} in high precision"


class _OldDelayedScaling(type):
    """Calls make fp8kit's ``DelayedScaling``, and every one of those is an instance."""

    def __call__(
        cls, *args: Any, interval: Any = 1, override_linear_precision: Any = (False,) * 3, **kwargs: Any
    ) -> recipes.DelayedScaling:
        if isinstance(interval, bool) or interval != 1:
            raise RecipeError("DelayedScaling", "interval", interval, "1: scales are updated at each step")
        own = override_linear_precision
        if not isinstance(own, tuple | list) or len(own) != 3 or not all(isinstance(o, bool) for o in own):
            wanted = "three bools: fprop, dgrad, wgrad"
            raise RecipeError("DelayedScaling", "override_linear_precision", repr(own), wanted)
        plain = " ".join(name for name, on in zip(_GEMMS, own, strict=True) if on)
        if not plain:
            return recipes.DelayedScaling(*args, **kwargs)
        return OverriddenDelayedScaling(*args, **kwargs, in_high_precision=plain)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, recipes.DelayedScaling)

    def __getattr__(cls, name: str) -> Any:
        return getattr(recipes.DelayedScaling, name)


class DelayedScaling(metaclass=_OldDelayedScaling):
    """``fp8kit.recipe.DelayedScaling`` that takes two arguments of Transformer Engine 1.x as well:
    ``interval=1``, and ``override_linear_precision``, which of fprop, dgrad and wgrad are in high precision.
    RecipeError for others."""
